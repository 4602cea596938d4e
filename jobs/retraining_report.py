"""The report of a retraining run: one HTML page that needs nothing beside it, plots included."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jobs.out_file import write_aside

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.verdict { padding: .75rem 1rem; border-left: .3rem solid #8a94a6; background: #f3f5f8 }
.promoted { border-color: #1b8a5a; background: #eaf7f0 }
table { border-collapse: collapse; width: 100% }
td, th { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #dde2ea }
td:first-child, th:first-child { text-align: left } figure { margin: 1rem 0 } img { max-width: 100% }
@media (prefers-color-scheme: dark) {
  body { background: #14181f; color: #e4e8ee } .verdict { background: #1d232d } .promoted { background: #15291f }
  td, th { border-color: #2c3542 } img { background: white }
}
"""


def write_report(path: Path, slug: str, version: int, line: str, results: Mapping[str, Any], training: Path) -> None:
    """Write the page, with the plots of the training run's folder."""
    evaluated = results["evaluate"]
    is_promoted = line.startswith("promoted")
    parts = [
        f"<h1>{escape(slug)}: version {version}</h1>",
        f'<p class="verdict{" promoted" if is_promoted else ""}">{escape(line)}</p>',
        *([f"<p>{escape(evaluated['note'])}</p>"] if evaluated["note"] else []),
        _evidence("On the same recorded rounds of held-out prompts (replay)", evaluated["replay"]),
        *([_evidence("Decoding in turns", evaluated["live"])] if evaluated["live"] is not None else []),
        _audit(evaluated),
        *([_drift(results["choose"]["drift"])] if "drift" in results["choose"] else []),
        "<h2>Steps</h2>",
        _table(["step", "result"], [[name, _short(result)] for name, result in results.items() if name != "evaluate"]),
        *(["<h2>Training</h2>"] if (training / "plots").is_dir() else []),
        *(_figure(plot) for plot in sorted((training / "plots").glob("*")) if plot.suffix in _KINDS),
    ]
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(slug)} v{version}</title><style>{_STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )
    write_aside(path, page)


_KINDS = {".png": "image/png", ".svg": "image/svg+xml"}


def _figure(plot: Path) -> str:
    data = base64.b64encode(plot.read_bytes()).decode()
    caption = escape(plot.stem.replace("_", " ").replace("-", " "))
    return (
        f'<figure><img alt="{caption}" src="data:{_KINDS[plot.suffix]};base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _evidence(title: str, row: Mapping[str, Any]) -> str:
    sides = [
        [
            side["name"],
            f"{side['tokens_per_s']:.1f}",
            f"{side['mat']:.2f}",
            "" if side["mismatch_rate"] is None else f"{side['mismatch_rate']:.1%}",
        ]
        for side in (row["champion"], row["challenger"])
    ]
    ratio = (
        f"<p>Challenger over champion: {row['ratio']:.3f} times the tokens per second, 95 % between {row['low']:.3f} "
        f"and {row['high']:.3f}, over {row['num_prompts']} prompts.{_intervals(row)}</p>"
    )
    return f"<h2>{escape(title)}</h2>{_table(['policy', 'tokens/s', 'tokens a round', 'mismatch'], sides)}{ratio}"


def _intervals(row: Mapping[str, Any]) -> str:
    """Of what the same draws of prompts say beside the speed; nothing where it was not observed by prompt."""
    mat, mismatch = row.get("mat"), row.get("mismatch")
    text = ""
    if mat is not None:
        text += f" Tokens a round: {mat['value']:.3f} times, between {mat['low']:.3f} and {mat['high']:.3f}."
    if mismatch is not None:
        value, low, high = (100 * mismatch[name] for name in ("value", "low", "high"))
        text += f" Mismatch: {value:+.2f} points, between {low:+.2f} and {high:+.2f}."
    return text


def _audit(evaluated: Mapping[str, Any]) -> str:
    if not evaluated["num_audited"]:
        return "<h2>Audit</h2><p>No answers were audited.</p>"
    lines = "".join(f"<li>{escape(line)}</li>" for line in evaluated["differences"])
    return (
        f"<h2>Audit</h2><p>{evaluated['num_audited']} answers against transformers' own: "
        f"{evaluated['num_bugs']} are not the target's.</p><ul>{lines}</ul>"
    )


def _drift(found: Mapping[str, Any]) -> str:
    rows = [
        [
            row["side"],
            row["task"],
            f"{row['num_prompts']}",
            f"{row['num_rounds']}",
            f"{row['mat']:.2f}",
            f"{row['mismatch_rate']:.1%}",
            f"{row['conf']:.3f}",
        ]
        for row in found["rows"]
    ]
    head = ["rounds of", "task", "prompts", "rounds", "tokens a round", "mismatch", "confidence"]
    sentence = found["sentence"][:1].upper() + found["sentence"][1:]
    return (
        "<h2>Recent traffic against the champion's training (replay of the drafter's own trees)</h2>"
        f"<p>{escape(sentence)}.</p>{_table(head, rows) if rows else ''}"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = ["".join(f"<th>{escape(name)}</th>" for name in head)]
    cells += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _short(result: Any) -> str:
    if not isinstance(result, Mapping):
        return str(result)
    plain = {name: value for name, value in result.items() if not isinstance(value, Mapping)}
    return ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in plain.items())[:300]
