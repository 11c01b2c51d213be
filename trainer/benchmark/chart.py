"""A benchmark as one page that loads nothing: a bar for each variant's median step, a whisker for its middle half."""

from __future__ import annotations

import html
from collections.abc import Iterator
from statistics import median

from trainer.benchmark.result import BASELINES, Measurement, Result, middle_half
from trainer.units import MIB

ROW, LABEL, WIDTH = 34, 130, 520  # pixels: height of a row, width of its name, width of the longest bar
COLORS = {"fsdp2": "#9aa5b1", "fsdp2+compile": "#9aa5b1", "ddp+compile": "#9aa5b1"}
OURS = "#2f6fb2"


def page(result: Result) -> str:
    """Return the page."""
    machine, *_ = result.lines()
    facts = [html.escape(line) for line in list(result.lines())[:2]]
    height = ROW * len(result.measurements)
    bars = "\n".join(_bars(result))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(machine)}</title>
<style>body {{ font: 14px system-ui, sans-serif; margin: 2em; color: #222 }} svg text {{ font-size: 13px }}
p {{ color: #555 }}</style>
<h1>Milliseconds a step, shorter is better</h1>
<p>{facts[0]}<br>{facts[1]}</p>
<svg width="{LABEL + WIDTH + 420}" height="{height}" role="img" aria-label="Milliseconds of a step by variant">
{bars}
</svg>
<p>Bars: medians over rounds in which the variants took turns. Lines: the middle half of the rounds. Times faster: the
median over rounds of the other's time divided by the variant's.</p>
{_warnings(result)}</html>
"""


def _bars(result: Result) -> Iterator[str]:
    longest = max(middle_half(m.samples)[1] for m in result.measurements)
    for number, m in enumerate(result.measurements):
        top, scale = number * ROW, WIDTH / longest
        low, high = (LABEL + value * scale for value in middle_half(m.samples))
        length = median(m.samples) * scale
        middle = top + ROW / 2
        yield (
            f'<text x="{LABEL - 8}" y="{middle + 4}" text-anchor="end">{html.escape(m.variant)}</text>'
            f'<rect x="{LABEL}" y="{top + 6}" width="{length:.1f}" height="{ROW - 12}" '
            f'fill="{COLORS.get(m.variant, OURS)}"/>'
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" stroke="#222" stroke-width="2"/>'
            f'<text x="{max(high, LABEL + length) + 8:.1f}" y="{middle + 4}">{html.escape(_say(result, m))}</text>'
        )


def _say(result: Result, m: Measurement) -> str:
    ratios = [
        f"{ratio:.2f}x {baseline}"
        for baseline in BASELINES
        if baseline != m.variant and (ratio := result.ratio(m, baseline)) is not None
    ]
    return ", ".join([f"{median(m.samples) * 1e3:.1f} ms", *ratios, f"{m.peak_bytes / MIB:.0f} MiB"])


def _warnings(result: Result) -> str:
    return "".join(f"<p><b>Wrong: {html.escape(line)}</b></p>\n" for line in result.find_wrong())
