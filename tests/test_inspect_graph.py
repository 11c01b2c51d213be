"""The inspection tool end to end on a small model: its table, its timelines, and what it refuses."""

import itertools
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SMALL = [
    *("--config", "llama3_debug.toml", "--model.args.n_layers", "2", "--training.seq_len", "64"),
    *("--training.global_batch_size", "-1", "--world-size", "16"),
]


def inspect(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "inspect_graph.py"), *argv],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )


class Elements(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("inspect")
    done = inspect(*SMALL, "--trace", str(folder / "t.json"), "--html", str(folder / "t.html"))
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


def rows(text: str, direction: str) -> dict[str, list[float]]:
    found = re.findall(rf"^{direction} +(none|block|auto|floor) +(.*)$", text, re.MULTILINE)
    return {plan: [float(number) for number in numbers.split()] for plan, numbers in found}


def test_the_table_compares_plans_in_both_directions(run: tuple[str, Path]) -> None:
    for direction, parameters in (("forward", 21), ("backward", 20 + 21)):
        table = rows(run[0], direction)
        assert table["none"][0] == parameters
        assert table["block"][0] < parameters / 2
        assert table["block"][1] == table["none"][1]  # what is moved stays the same
        floor, none, block, auto = table["floor"][0], *(table[plan][3] for plan in ("none", "block", "auto"))
        assert floor <= auto <= min(none, block)


def test_every_parameter_is_in_one_bucket_of_a_direction(run: tuple[str, Path]) -> None:
    (forward,) = re.findall(r"^block, forward:\n((?:  .*\n)+)", run[0], re.MULTILINE)
    for name in ("tok_embeddings", "attention.wq", "feed_forward.w2", "norm, output"):
        assert len(re.findall(rf"[:,] {name}\b", forward)) == 1, forward


def test_the_trace_has_a_process_for_each_plan_and_direction_and_spans_that_do_not_overlap(
    run: tuple[str, Path],
) -> None:
    events = json.loads((run[1] / "t.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"{plan}: {way}" for plan in ("none", "block", "auto") for way in ("forward", "backward")]
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(lanes) == 2 * 6
    for spans in lanes.values():
        for (_, end), (begin, _) in itertools.pairwise(spans):
            assert begin >= end - 1e-3
    assert any(e["ph"] == "C" and e["args"]["activations"] > 0 for e in events)


def test_the_page_loads_nothing_and_holds_every_bucket(run: tuple[str, Path]) -> None:
    text = (run[1] / "t.html").read_text()
    elements = Elements()
    elements.feed(text)
    assert elements.loads == []
    assert "http" not in text
    (data,) = re.findall(r"^const panes = (.*);$", text, re.MULTILINE)
    panes = json.loads(data)
    assert len(panes) == 6
    for span in panes[2]["lanes"]["dp_shard"]:
        assert span["bytes"] > 0
        assert span["modules"]
        assert span["hidden_by"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--hardware", "H1"], "--hardware H1: it is not described. Use one of H100"),
        (["--parallelism.tensor_parallel_degree", "3"], "parallelism.tensor_parallel_degree = 3"),
        (["--parallelism.fsdp_gather_once"], "parallelism.fsdp_gather_once = true"),
    ],
)
def test_what_cannot_be_inspected_is_refused_before_tracing(argv: list[str], said: str) -> None:
    done = inspect(*SMALL, *argv)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
