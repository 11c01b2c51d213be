"""Laws of the helper every distributed test stands on."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks


def _sum_over_ranks(rank: int, factor: int) -> tuple[int, float, int]:
    total = torch.tensor(float(rank + 1) * factor)
    dist.all_reduce(total)
    return rank, total.item(), torch.get_num_threads()


def _fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("the cause")
    dist.barrier()


def _hang_on_rank_one(rank: int) -> None:
    if rank == 1:
        _sleep_for_ever()


def _sleep_for_ever() -> None:
    time.sleep(1000)


def _die_on_rank_zero(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), 9)
    time.sleep(1000)


def _read_environment(rank: int) -> str:
    return os.environ["FULLGRAPH_TEST"]


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(_sum_over_ranks, 2, 10) == [(0, 30.0, 1), (1, 30.0, 1)]


def test_a_failing_rank_shows_its_own_traceback_and_ends_the_others() -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*_fail_on_rank_one.*KeyError: 'the cause'"):
        run_ranks(_fail_on_rank_one, 2)
    assert time.monotonic() - began < 20


def test_a_hanging_rank_is_named_with_its_stack() -> None:
    with pytest.raises(RankError, match=r"(?s)not done after 3 seconds: .*rank 1.*_sleep_for_ever"):
        run_ranks(_hang_on_rank_one, 2, timeout_seconds=3)


def test_a_killed_rank_is_named_at_once() -> None:
    with pytest.raises(RankError, match="rank 0 killed by signal 9"):
        run_ranks(_die_on_rank_zero, 2)


def test_ranks_see_the_environment_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("first", "second"):
        monkeypatch.setenv("FULLGRAPH_TEST", value)
        assert run_ranks(_read_environment, 1) == [value]
