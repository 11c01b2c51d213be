import contextlib

import pytest

from trainer.metrics.clock import StepClock


class Now:
    """A clock that moves when told."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds

    def wait(self, seconds):
        self.seconds += seconds


@pytest.fixture
def now():
    return Now()


@pytest.fixture
def clock(now):
    return StepClock(now)


def run_steps(clock, now, first, last, seconds=2.0, tokens=10):
    for step in range(first, last + 1):
        clock.start_step()
        now.wait(seconds)
        clock.end_step(step, tokens)


def test_first_step_of_a_launch_is_compile_time_and_not_timed(clock, now):
    now.wait(7)  # building the model
    run_steps(clock, now, 11, 11, seconds=30)
    lap = clock.lap(11)
    assert (lap.steps, lap.timed_steps, lap.timed_tokens, lap.timed_seconds) == (1, 0, 0, 0)
    assert lap.compile_seconds == 30


def test_a_lap_from_the_first_step_on_times_the_others_only(clock, now):
    now.wait(7)
    run_steps(clock, now, 11, 11, seconds=30)
    run_steps(clock, now, 12, 20)
    lap = clock.lap(20)
    assert (lap.steps, lap.timed_steps, lap.timed_tokens, lap.timed_seconds) == (10, 9, 90, 18)
    assert lap.compile_seconds == 30


def test_laps_count_each_step_once(clock, now):
    run_steps(clock, now, 1, 10)
    clock.lap(1)
    assert clock.lap(4).timed_tokens == 30
    assert clock.lap(10).timed_tokens == 60


def test_a_step_read_late_has_the_time_it_was_stamped_with(clock, now):
    run_steps(clock, now, 1, 3)
    now.wait(50)
    clock.lap(1)
    assert clock.lap(3).timed_seconds == 4


@pytest.mark.parametrize("kind", ["validation", "checkpoint"])
def test_time_apart_is_not_training_time(clock, now, kind):
    run_steps(clock, now, 1, 2)
    with clock.apart(kind):
        now.wait(9)
    run_steps(clock, now, 3, 4)
    clock.lap(2)
    lap = clock.lap(4)
    assert lap.timed_seconds == 4
    assert getattr(lap, f"{kind}_seconds") == 9


def test_time_apart_counts_also_when_it_ends_in_an_error(clock, now):
    run_steps(clock, now, 1, 1)
    with contextlib.suppress(OSError), clock.apart("checkpoint"):
        now.wait(9)
        raise OSError
    run_steps(clock, now, 2, 2)
    assert clock.lap(2).timed_seconds == 2


def test_time_apart_inside_the_first_step_is_not_compile_time(clock, now):
    clock.start_step()
    now.wait(5)
    with clock.apart("checkpoint"):
        now.wait(3)
    clock.end_step(1, 10)
    lap = clock.lap(1)
    assert (lap.compile_seconds, lap.checkpoint_seconds) == (5, 3)


def test_reading_data_is_training_time_and_summed(clock, now):
    run_steps(clock, now, 1, 1)
    clock.start_step()
    with clock.reading_data():
        now.wait(0.5)
    now.wait(1)
    clock.end_step(2, 10)
    clock.lap(1)
    lap = clock.lap(2)
    assert (lap.data_seconds, lap.timed_seconds) == (0.5, 1.5)


def test_time_apart_cannot_be_nested(clock):
    with pytest.raises(AssertionError, match="count twice"), clock.apart("validation"), clock.apart("checkpoint"):
        pass
