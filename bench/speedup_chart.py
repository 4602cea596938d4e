"""Draw a benchmark's speed-ups as an SVG: a group of bars for each task, a bar for each method and budget.

python bench/speedup_chart.py bench/smollm2-135m speedup.svg

A line on each bar spans its 95 % interval; the grey line is plain decoding. Standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BAR, GAP, HEIGHT, MARGIN, LEGEND = 14, 24, 320, 48, 150
COLOURS = (
    "#1b6ca8",
    "#2a9d8f",
    "#8ab17d",
    "#e9c46a",
    "#f4a261",
    "#e76f51",
    "#9b2226",
    "#6a4c93",
    "#577590",
    "#b56576",
    "#000000",
    "#7f7f7f",
    "#bcbd22",
)


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """The whole picture of the rows of a `summary.json`."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    arms = [arm for arm in dict.fromkeys((row["method"], row["budget"]) for row in rows) if arm[0] != "plain"]
    colours = {arm: COLOURS[place % len(COLOURS)] for place, arm in enumerate(arms)}
    top = max(1.0, *(row["speedup_high"] for row in rows))
    step = len(arms) * BAR + GAP
    width = MARGIN + len(tasks) * step + LEGEND
    parts = [rule(1.0, top, MARGIN, width - LEGEND)]
    for place, task in enumerate(tasks):
        left = MARGIN + place * step
        parts.append(f'<text x="{left}" y="{HEIGHT - MARGIN + 18}" font-size="12">{task}</text>')
        for row in rows:
            arm = row["method"], row["budget"]
            if row["task"] == task and arm in colours:
                parts += bar(row, left + arms.index(arm) * BAR, top, colours[arm])
    for place, (method, budget) in enumerate(arms):
        y = MARGIN + 18 * place
        parts.append(
            f'<rect x="{width - LEGEND + 16}" y="{y - 10}" width="10" height="10" fill="{colours[arms[place]]}"/>'
        )
        parts.append(f'<text x="{width - LEGEND + 32}" y="{y}" font-size="12">{method} {budget}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="{MARGIN}" y="{MARGIN - 24}" font-size="13">times plain decoding\'s speed</text>\n{body}\n</svg>\n'
    )


def height_of(value: float, top: float) -> float:
    """The pixel row of a speed-up."""
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value / top


def rule(value: float, top: float, left: float, right: float) -> str:
    y = height_of(value, top)
    return f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#999"/>'


def bar(row: dict[str, Any], left: float, top: float, colour: str) -> list[str]:
    """One bar, its interval, and its height in figures."""
    y, middle = height_of(row["speedup"], top), left + BAR / 2
    low, high = height_of(row["speedup_low"], top), height_of(row["speedup_high"], top)
    title = f"{row['method']} {row['budget']} {row['task']}: {row['speedup']:.2f}"
    return [
        f'<rect x="{left}" y="{y:.1f}" width="{BAR - 2}" height="{HEIGHT - MARGIN - y:.1f}" fill="{colour}">'
        f"<title>{title}</title></rect>",
        f'<line x1="{middle}" x2="{middle}" y1="{low:.1f}" y2="{high:.1f}" stroke="black"/>',
    ]


def main(folder: str, picture: str) -> None:
    """Read the summary and write the picture."""
    rows = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))
    Path(picture).write_text(draw(rows), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:3])
