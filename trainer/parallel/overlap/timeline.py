"""Timelines of forecasts, to look at: spans by lane, a trace for Perfetto, and a page that opens from disk."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainer.parallel.overlap.auto import Candidate
from trainer.parallel.overlap.cost import whole_bytes
from trainer.parallel.overlap.find import module_of
from trainer.parallel.overlap.forecast import DIRECTIONS, Forecast
from trainer.parallel.overlap.simulate import Span

COMPUTE = "compute"
DEPTH = 3  # parts of a module's name that a span of computation is labelled with: layers.0.attention
PAGE = Path(__file__).with_suffix(".html")


def name_bucket(modules: Sequence[str]) -> str:
    """Name a bucket by what its modules have in common, or by its first and last."""
    if len(modules) == 1:
        return modules[0]
    parts = [module.split(".") for module in modules]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common) if common else f"{modules[0]} ... {modules[-1]}"


def lanes(candidate: Candidate) -> dict[str, list[dict[str, Any]]]:
    """Return the spans of every lane: computation, merged by module, and one lane for each axis that communicates."""
    computed = merge_spans(span for span in candidate.simulation.spans if span.collective is None)
    found: dict[str, list[dict[str, Any]]] = {COMPUTE: computed}
    for span in candidate.simulation.spans:
        if span.collective is not None:
            found.setdefault(span.collective.axis, []).append(_describe(span, candidate, computed))
    return found


def merge_spans(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Join spans of computation that follow one another and belong to one module."""
    merged: list[dict[str, Any]] = []
    for span in spans:
        name = ".".join(module_of(span.node).split(".")[:DEPTH]) or "model"
        last = merged[-1] if merged else None
        if last and last["name"] == name and span.begin - last["end"] < 1e-9:
            last["end"] = span.end
        else:
            merged.append({"name": name, "begin": span.begin, "end": span.end})
    return merged


def _describe(span: Span, candidate: Candidate, computed: list[dict[str, Any]]) -> dict[str, Any]:
    collective = span.collective
    assert collective is not None
    size = whole_bytes(collective)
    exposed = candidate.simulation.exposed.get(span.node, 0.0)
    return {
        "name": f"{collective.kind} {name_bucket(collective.modules)}",
        "begin": span.begin,
        "end": span.end,
        "bytes": size,
        "modules": list(collective.modules),
        "exposed": exposed,
        "hidden_by": _hidden_by(span, computed),
    }


def _hidden_by(span: Span, computed: list[dict[str, Any]]) -> str:
    """Name the first and last module that computes while `span` travels."""
    low, high = 0, len(computed)
    while low < high:  # the first that ends after the span begins
        middle = (low + high) // 2
        low, high = (middle + 1, high) if computed[middle]["end"] <= span.begin else (low, middle)
    names = []
    for other in computed[low:]:
        if other["begin"] >= span.end:
            break
        names.append(other["name"])
    return "nothing" if not names else names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"


def perfetto(forecasts: Sequence[Forecast]) -> dict[str, Any]:
    """Return Chrome trace events: a process for each plan and direction, a thread for each lane, a counter of memory.

    The format is documented as "Trace Event Format"; https://ui.perfetto.dev opens it.
    """
    events: list[dict[str, Any]] = []
    panes = [(f, direction) for f in forecasts for direction in DIRECTIONS]
    for process, (found, direction) in enumerate(panes, start=1):
        candidate = found.direction(direction)
        events.append(_named("process_name", process, 0, f"{found.plan}: {direction}"))
        for thread, (lane, spans) in enumerate(lanes(candidate).items(), start=1):
            events.append(_named("thread_name", process, thread, lane))
            events += [_event(span, process, thread) for span in spans]
        for seconds, live in candidate.simulation.live:
            events.append(
                {"ph": "C", "pid": process, "tid": 0, "ts": seconds * 1e6, "name": "live bytes", "args": live}
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}


def _event(span: dict[str, Any], process: int, thread: int) -> dict[str, Any]:
    rest = {key: value for key, value in span.items() if key not in ("name", "begin", "end")}
    begin, end = span["begin"] * 1e6, span["end"] * 1e6
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": begin,
        "dur": end - begin,
        "name": span["name"],
        "args": rest,
    }


def page(forecasts: Sequence[Forecast], title: str) -> str:
    """Return a page with all timelines that needs nothing but itself."""
    panes = []
    for found in forecasts:
        for direction in DIRECTIONS:
            candidate = found.direction(direction)
            live = [[seconds, *values.values()] for seconds, values in candidate.simulation.live]
            panes.append(
                {
                    "title": f"{found.plan}: {direction}",
                    "seconds": candidate.simulation.seconds,
                    "exposed": candidate.exposed_seconds,
                    "peak": candidate.simulation.peak_bytes,
                    "lanes": lanes(candidate),
                    "live": live[:: max(1, len(live) // 2000)],
                }
            )
    # "</" would end the script element.
    data = json.dumps(panes, default=float).replace("</", "<\\/")
    return PAGE.read_text().replace("{{title}}", html.escape(title)).replace("{{data}}", data)
