"""Draw a drafter's training log as an SVG: held-out acceptance length and accuracy by depth over the steps.

python bench/drafter_curve.py bench/drafter/log.jsonl bench/drafter/curve.svg

Standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 720, 320, 48
COLOURS = ("#1b6ca8", "#2a9d8f", "#8ab17d", "#e9c46a", "#f4a261", "#e76f51", "#9b2226")


def polyline(xs: Sequence[float], ys: Sequence[float], left: int, top: float, bottom: float, colour: str) -> str:
    """Points of one curve in a panel that starts at pixel `left`; `ys` are scaled between `bottom` and `top`."""
    width, height = (WIDTH - 3 * MARGIN) / 2, HEIGHT - 2 * MARGIN
    points = " ".join(
        f"{left + width * x / xs[-1]:.1f},{HEIGHT - MARGIN - height * (y - bottom) / (top - bottom):.1f}"
        for x, y in zip(xs, ys, strict=True)
    )
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'


def panel(title: str, left: int, bottom: float, top: float, last_step: int) -> list[str]:
    """Axes, their ends and the title of one panel."""
    width, height = (WIDTH - 3 * MARGIN) / 2, HEIGHT - 2 * MARGIN
    return [
        f'<rect x="{left}" y="{MARGIN}" width="{width}" height="{height}" fill="none" stroke="#999"/>',
        f'<text x="{left}" y="{MARGIN - 12}" font-size="13">{title}</text>',
        f'<text x="{left - 6}" y="{MARGIN + 5}" font-size="11" text-anchor="end">{top:g}</text>',
        f'<text x="{left - 6}" y="{HEIGHT - MARGIN}" font-size="11" text-anchor="end">{bottom:g}</text>',
        f'<text x="{left}" y="{HEIGHT - MARGIN + 16}" font-size="11">step 0</text>',
        f'<text x="{left + width}" y="{HEIGHT - MARGIN + 16}" font-size="11" text-anchor="end">{last_step}</text>',
    ]


def draw(rows: Sequence[dict[str, object]]) -> str:
    """The whole picture of log rows that have a score."""
    steps = [float(str(row["step"])) for row in rows]
    lengths = [float(str(row["chain_mat"])) for row in rows]
    accuracy = [json.loads(json.dumps(row["depth_accuracy"])) for row in rows]
    right = MARGIN * 2 + (WIDTH - 3 * MARGIN) // 2
    top = max(2.0, max(lengths) // 0.5 * 0.5 + 0.5)
    parts = panel("held-out acceptance length of a chain", MARGIN, 1.0, top, int(steps[-1]))
    parts.append(polyline(steps, lengths, MARGIN, top, 1.0, COLOURS[0]))
    parts += panel("share of right first choices, depth 1 (top) to D", right, 0.0, 1.0, int(steps[-1]))
    for depth, colour in zip(range(len(accuracy[0])), COLOURS, strict=False):
        parts.append(polyline(steps, [row[depth] for row in accuracy], right, 1.0, 0.0, colour))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def main(log: str, picture: str) -> None:
    """Read the log and write the picture."""
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    Path(picture).write_text(draw([row for row in rows if "chain_mat" in row]))


if __name__ == "__main__":
    main(*sys.argv[1:3])
