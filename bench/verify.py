"""Recompute a benchmark's published numbers from its raw rows, with nothing but the standard library.

    python bench/verify.py [FOLDER|DOCUMENT.md ...]      (default: all that the repository publishes)

Each folder holds what `graft bench`, `graft bench-serve` or a measurement of a part (`bench/forwards.py`,
`roofline.py`, `compiled.py`, `draft_vocabulary.py`) wrote. Every cell of its summary that
is a function of the rows is computed again, in other code than the one that made it; the intervals' bounds, which come
from random resampling, are checked against a resampling of our own. `summary.md` has to show the same numbers, and of
`graft bench` what a round's stages took. Rows of earlier versions have fewer columns, and so have their summaries. Exit
code 1, and a line for each, when something differs.

A document says where its figures come from in comments, each in front of the table or paragraph that it is about:

    <!-- figures: bench/x; rows: plain 0 all, ddtree 8 all; columns: speedup, speedup_low + speedup_high, mat -->
    <!-- figures: bench/x; values: ddtree 8 code speedup, ddtree 8 math speedup -->
    <!-- figures: bench/y/log.jsonl; rows: step; columns: loss, depth_accuracy.0 -->

A row is method, budget and task of `summary.json` (load and arm where there are those), decoder and task of a file of
such rows, ARM/RIVAL and task of `comparisons.jsonl`, or the key of a log whose value stands in the row's first cell (a
large store's steps have the store's state with them: "query: gain, merged"). A folder without a `summary.json` is a log
of its `*.json` files, such as the summaries of `jobs/collect.py`; their names without the ending are the key `run`. A
column is named for each cell but the first, which says what the row is. A paragraph's figures are its numbers with a
decimal point or a percent sign, in order. Each has to be the value as rounded to the digits it is shown with; files are
looked up from the repository's root."""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

RELATIVE_TOLERANCE = 1e-9
INTERVAL_TOLERANCE = 0.05  # of the speed-up: two resamplings of the same rows differ by chance

ROOT = Path(__file__).resolve().parents[1]
MARKER = re.compile(r"<!-- figures: ([^;>]+); (?:rows: ([^;>]+); columns: ([^;>]+)|values: ([^;>]+)) -->")
FIGURE = re.compile(r"\d+(?:\.\d+)?(?: ?%)?")
Lookup = Callable[[str], Any]  # the value that a row and a column name, such as "ddtree 8 all mat"


def read_lines(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def read_summaries(folder: Path) -> list[Row]:
    files = sorted(folder.glob("*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) | {"run": file.stem} for file in files]


def key_of(row: Row) -> tuple[str, str, int]:
    return row["prompt_id"], row["method"], row["budget"]


def pairs_of(raw: list[Row], cell: Row) -> list[tuple[Row, Row]]:
    """Plain decoding's row and the arm's, for every prompt of the cell on which both decoded something."""
    plain = [row for row in raw if row["method"] == "plain"]
    own = [row for row in raw if (row["method"], row["budget"]) == (cell["method"], cell["budget"])]
    return paired(plain, own, cell["task"])


def paired(others: list[Row], own: list[Row], task: str) -> list[tuple[Row, Row]]:
    """Rows of the same prompts of a task, where both decoded something."""
    of_prompt = {row["prompt_id"]: row for row in others}
    here = [row for row in own if task in (row["task"], "all") and row["prompt_id"] in of_prompt]
    pairs = [(of_prompt[row["prompt_id"]], row) for row in here]
    return [pair for pair in pairs if all(num_decoded(one) > 0 for one in pair)]


def num_decoded(row: Row) -> int:
    """Output tokens but the first of each prompt, which comes from the prompt's own pass; old rows have one prompt."""
    return int(row["num_output_tokens"] - row.get("batch", 1))


def speedup_of(pairs: list[tuple[Row, Row]]) -> float:
    seconds_per_token = [
        sum(pair[side]["decode_s"] for pair in pairs) / sum(num_decoded(pair[side]) for pair in pairs)
        for side in (0, 1)
    ]
    return float(seconds_per_token[0] / seconds_per_token[1])


def recompute(raw: list[Row], outputs: dict[tuple[str, str, int], Row], cell: Row) -> Row:
    """The cell's numbers, the interval excepted."""
    pairs = pairs_of(raw, cell)
    own = [row for _, row in pairs]
    total = sum(num_decoded(row) for row in own)
    num_rounds = sum(row["num_rounds"] for row in own)
    found: Row = {
        "speedup": speedup_of(pairs),
        "mat": total / num_rounds if num_rounds else None,
        "tokens_per_s": total / sum(row["decode_s"] for row in own),
        "mean_budget": sum(outputs[key_of(row)]["num_drafted"] for row in own) / num_rounds if num_rounds else 0.0,
        "num_prompts": len(pairs),
    }
    is_told = "overhead_ms" in cell or any("end_to_end_s" in row for row in own)
    return found | recompute_costs(own, num_rounds) if is_told else found


def recompute_costs(own: list[Row], num_rounds: int) -> Row:
    """What rows tell of mismatches and of time beside the forward passes; rows of earlier versions cannot."""
    decode_s, mismatched = sum(row["decode_s"] for row in own), sum_of(own, "num_mismatched")
    passes_ms, whole_s = sum_of(own, "draft_ms", "verify_ms"), sum_of(own, "end_to_end_s")
    return {
        "mismatch_rate": mismatched / num_rounds if num_rounds and mismatched is not None else None,
        "overhead_ms": (1000 * decode_s - passes_ms) / num_rounds if num_rounds and passes_ms is not None else None,
        "decode_s": decode_s,
        "end_to_end_s": None if whole_s is None else whole_s + max(row.get("load_s") or 0.0 for row in own),
    }


def sum_of(rows: list[Row], *columns: str) -> float | None:
    """The sum of the columns over the rows; None if a value is missing."""
    values = [row.get(column) for row in rows for column in columns]
    return None if None in values else sum(values)


def interval_of(pairs: list[tuple[Row, Row]], num_resamples: int = 1000) -> tuple[float, float]:
    generator = random.Random(1)
    ratios = sorted(speedup_of(generator.choices(pairs, k=len(pairs))) for _ in range(num_resamples))
    return ratios[int(0.025 * num_resamples)], ratios[int(0.975 * num_resamples) - 1]


def differences(folder: Path) -> list[str]:
    """One line for each number that does not follow from the rows."""
    if (folder / "summary.jsonl").is_file() and not (folder / "summary.json").is_file():
        return part_differences(folder)
    return load_differences(folder) if (folder / "gaps.jsonl").is_file() else bench_differences(folder)


def bench_differences(folder: Path) -> list[str]:
    """`differences` of what `graft bench` wrote."""
    raw = read_lines(folder / "raw.jsonl")
    outputs = {key_of(row): row for row in read_lines(folder / "outputs.jsonl")}
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    tables = (folder / "summary.md").read_text(encoding="utf-8")
    found = [f"outputs.jsonl and raw.jsonl disagree on {key}" for key in _disagreeing(raw, outputs)]
    for cell in summary:
        name = f"{cell['method']} {cell['budget']} {cell['task']}"
        for column, value in recompute(raw, outputs, cell).items():
            if not _is_close(cell.get(column), value, RELATIVE_TOLERANCE):
                found.append(f"{name}: {column} is {cell.get(column)}, the rows give {value}")
        low, high = interval_of(pairs_of(raw, cell))
        for column, value in (("speedup_low", low), ("speedup_high", high)):
            if abs(cell[column] - value) > INTERVAL_TOLERANCE * cell["speedup"]:
                found.append(f"{name}: {column} is {cell[column]}, another resampling gives {value}")
        if _table_line(cell) not in tables:
            found.append(f"{name}: summary.md does not have the line of summary.json")
    for arm in dict.fromkeys((cell["method"], cell["budget"]) for cell in summary):
        line = stage_line(arm, raw, outputs)
        if line not in tables.split("\n"):
            found.append(f"{arm[0]} {arm[1]}: summary.md does not have the stages that the rows give: {line}")
    return found + _frozen_differences(folder) + _comparison_differences(folder, raw)


def stage_line(arm: tuple[str, int], raw: list[Row], outputs: dict[tuple[str, str, int], Row]) -> str:
    """An arm's line in the table of stages: milliseconds per round, end-to-end speed-up, answers unlike plain ones."""
    own = {row["prompt_id"]: row for row in raw if (row["method"], row["budget"]) == arm}
    plain = {row["prompt_id"]: row for row in raw if row["method"] == "plain" and row["prompt_id"] in own}
    num_rounds = sum(row["num_rounds"] for row in own.values())
    sums = [sum_of(list(own.values()), f"{stage}_ms") for stage in ("draft", "build", "verify", "commit")]
    stages = [None if value is None or not num_rounds else value / num_rounds for value in sums]
    seconds_per_token = [
        sum(end_to_end_s(row) for row in rows) / sum(row["num_output_tokens"] for row in rows)
        for rows in (list(plain.values()), [own[prompt_id] for prompt_id in plain])
    ]
    plain_hashes = {key[0]: row["output_sha256"] for key, row in outputs.items() if key[1] == "plain"}
    num_differing = sum(
        row["output_sha256"] != plain_hashes.get(key[0]) for key, row in outputs.items() if key[1:] == arm
    )
    speedup = seconds_per_token[0] / seconds_per_token[1]
    return _shown_line([*arm, *stages, speedup, num_differing])


def end_to_end_s(row: Row) -> float:
    """Seconds of a row, loading excluded; earlier versions did not take the time of tokenising."""
    whole_s = row.get("end_to_end_s")
    return float(row["prefill_s"] + row["decode_s"] if whole_s is None else whole_s)


def _comparison_differences(folder: Path, raw: list[Row]) -> list[str]:
    """What `comparisons.jsonl` has that the rows do not give: one learned arm over another arm."""
    if not (folder / "comparisons.jsonl").is_file():
        return []
    found = []
    for cell in read_lines(folder / "comparisons.jsonl"):
        others, own = ([row for row in raw if _is_arm(row, cell[side])] for side in ("rival", "arm"))
        pairs, name = paired(others, own, cell["task"]), f"{cell['arm']} over {cell['rival']}, {cell['task']}"
        for column, value in (("ratio", speedup_of(pairs)), ("num_prompts", len(pairs))):
            if not _is_close(cell[column], value, RELATIVE_TOLERANCE):
                found.append(f"{name}: {column} is {cell[column]}, the rows give {value}")
        for column, value in zip(("low", "high"), interval_of(pairs), strict=True):
            if abs(cell[column] - value) > INTERVAL_TOLERANCE * cell["ratio"]:
                found.append(f"{name}: {column} is {cell[column]}, another resampling gives {value}")
    return found


def _is_arm(row: Row, name: str) -> bool:
    return name in (row["method"], f"{row['method']}-{row['budget']}")


def _frozen_differences(folder: Path) -> list[str]:
    """Whether the budgets that were frozen are the fastest ones of the tuning rows."""
    if not (folder / "frozen.json").is_file():
        return []
    frozen = json.loads((folder / "frozen.json").read_text(encoding="utf-8"))
    tuning = json.loads((folder / "tuning" / "summary.json").read_text(encoding="utf-8"))
    found = []
    for method, budget in frozen.items():
        cells = [cell for cell in tuning if cell["method"] == method and cell["task"] == "all"]
        best = max(cells, key=lambda cell: cell["speedup"], default={"budget": None})["budget"]
        if budget != best:
            found.append(f"frozen.json has {method} at {budget}, the tuning rows say {best}")
    return found


def _disagreeing(raw: list[Row], outputs: dict[tuple[str, str, int], Row]) -> list[tuple[str, str, int]]:
    return [
        key_of(row)
        for row in raw
        if key_of(row) not in outputs
        or len(outputs[key_of(row)]["acceptance_lengths"]) != row["num_rounds"]
        or sum(outputs[key_of(row)]["acceptance_lengths"]) != num_decoded(row)
    ]


def _is_close(first: float | None, second: float | None, tolerance: float) -> bool:
    if first is None or second is None:
        return first is second
    return abs(first - second) <= tolerance * max(abs(first), abs(second))


def _table_line(cell: Row) -> str:
    return _shown_line(list(cell.values()))


def _shown_line(values: list[Any]) -> str:
    shown = ["" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value) for value in values]
    return f"| {' | '.join(shown)} |"


# ---- what the measurements of single parts wrote: bench/forwards.py, roofline.py, compiled.py, draft_vocabulary.py


def part_differences(folder: Path) -> list[str]:
    """`differences` of a measurement whose summary has a row for each kind of what was measured."""
    raw, summary = read_lines(folder / "raw.jsonl"), read_lines(folder / "summary.jsonl")
    know = next((rows_of_part for column, rows_of_part in PARTS.items() if raw and column in raw[-1]), None)
    if know is None:
        return ["raw.jsonl has other rows than those of the measurements that are the only ones known here"]
    expected, found = know(raw), []
    kind = next(iter(expected[0]))
    if [cell.get(kind) for cell in summary] != [row[kind] for row in expected]:
        found.append(f"summary.jsonl does not have one row for each kind of {kind} in raw.jsonl")
    for cell, row in zip(summary, expected, strict=False):
        for column in dict.fromkeys([*cell, *row]):
            if column != kind and not _is_close(cell.get(column), row.get(column), RELATIVE_TOLERANCE):
                found.append(f"{cell[kind]}: {column} is {cell.get(column)}, the rows give {row.get(column)}")
    return found


def forward_rows(raw: list[Row]) -> list[Row]:
    """By kind of weights: median milliseconds of verifying, by budget, and of drafting."""
    found = []
    for weights in dict.fromkeys(row["weights"] for row in raw):
        own = [row for row in raw if row["weights"] == weights]
        columns: dict[str, list[float]] = {f"verify_{row['budget']}": [] for row in own} | {"draft": []}
        for row in own:
            columns[f"verify_{row['budget']}"].append(row["verify_ms"])
            if row["budget"]:
                columns["draft"].append(row["draft_ms"])
        medians = {column: round(statistics.median(values), 3) for column, values in columns.items() if values}
        found.append({"weights": weights} | medians)
    return found


def roofline_rows(raw: list[Row]) -> list[Row]:
    """By pass: milliseconds to read its weights and to multiply at the machine's rates, of its products, of it all."""
    machine, *passes = raw
    read, flops = statistics.median(machine["read_gb_s"]), statistics.median(machine["gflop_s"])
    return [
        {
            "pass": row["pass"],
            "read": row["weight_bytes"] / read / 1e6,
            "multiply": row["flops"] / flops / 1e6,
            "products": statistics.median(row["products_ms"]),
            "whole": statistics.median(row["pass_ms"]),
            "read_gb_s": read,
            "gflop_s": flops,
        }
        for row in passes
    ]


def compiled_rows(raw: list[Row]) -> list[Row]:
    """By way: median milliseconds by number of rows, and the seconds of its first passes together."""
    found = []
    for way in dict.fromkeys(row["way"] for row in raw):
        own = [row for row in raw if row["way"] == way]
        medians = {f"rows_{row['rows']}": round(statistics.median(row["ms"]), 3) for row in own}
        found.append({"way": way} | medians | {"first_s": round(sum(row["first_s"] for row in own), 1)})
    return found


def vocabulary_rows(raw: list[Row]) -> list[Row]:
    """By size of the draft vocabulary: acceptance length, milliseconds of a round, tokens per second, also over 0's."""
    names = ("tokens", "rounds", "draft_ms", "round_ms")
    sums = {
        size: {name: sum(row[name] for row in raw if row["size"] == size) for name in names}
        for size in sorted({row["size"] for row in raw})
    }
    rates = {size: 1e3 * total["tokens"] / total["round_ms"] for size, total in sums.items()}
    return [
        {
            "size": size,
            "mat": round(total["tokens"] / total["rounds"], 4),
            "draft_ms": round(total["draft_ms"] / total["rounds"], 3),
            "round_ms": round(total["round_ms"] / total["rounds"], 3),
            "tokens_per_s": round(rates[size], 3),
            "ratio": round(rates[size] / rates[0], 4),
        }
        for size, total in sums.items()
    ]


PARTS: dict[str, Callable[[list[Row]], list[Row]]] = {
    "weights": forward_rows,
    "pass": roofline_rows,
    "way": compiled_rows,
    "size": vocabulary_rows,
}
"""By a column that only the rows of one measurement have: what its summary has to be."""


# ---- what `graft bench-serve` wrote


def load_differences(folder: Path) -> list[str]:
    """`differences` of what `graft bench-serve` wrote."""
    raw, gaps = read_lines(folder / "raw.jsonl"), read_lines(folder / "gaps.jsonl")
    level = json.loads((folder / "run.json").read_text(encoding="utf-8"))["settings"]["service_level"]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    tables = (folder / "summary.md").read_text(encoding="utf-8")
    gaps_of = {request_of(row): row["gaps_ms"] for row in gaps}
    found = [f"gaps.jsonl and raw.jsonl disagree on {request_of(row)}" for row in raw if not _has_gaps(row, gaps_of)]
    cells = {(row["load"], row["arm"]) for row in raw}
    if {(cell["load"], cell["arm"]) for cell in summary} != cells or len(summary) != len(cells):
        found.append("summary.json does not have one entry for each load and arm of raw.jsonl")
    for cell in summary:
        name = f"{cell['load']} {cell['arm']}"
        own, plain = rows_of(raw, cell["load"], cell["arm"]), rows_of(raw, cell["load"], "plain")
        own_gaps = [gap for row in own for gap in gaps_of.get(request_of(row), ())]
        for column, value in recompute_load(own, plain, own_gaps, level).items():
            if not _is_close(cell[column], value, RELATIVE_TOLERANCE):
                found.append(f"{name}: {column} is {cell[column]}, the rows give {value}")
        for kind, (first, second) in ratio_sides(plain, own).items():
            for bound, value in zip(("low", "high"), block_interval(first, second), strict=True):
                if not _is_close(cell[f"{kind}_{bound}"], value, LOAD_INTERVAL_TOLERANCE):
                    found.append(
                        f"{name}: {kind}_{bound} is {cell[f'{kind}_{bound}']}, another resampling gives {value}"
                    )
        if _table_line(cell) not in tables:
            found.append(f"{name}: summary.md does not have the line of summary.json")
    return found


LOAD_INTERVAL_TOLERANCE = 0.1  # few blocks make coarse intervals

Sums = dict[int, tuple[float, float]]  # by block: seconds, tokens


def request_of(row: Row) -> tuple[str, int, int, str]:
    return row["load"], row["block"], row["position"], row["arm"]


def rows_of(raw: list[Row], load: str, arm: str) -> list[Row]:
    return [row for row in raw if (row["load"], row["arm"]) == (load, arm)]


def _has_gaps(row: Row, gaps_of: dict[tuple[str, int, int, str], list[float]]) -> bool:
    gaps = gaps_of.get(request_of(row))
    if gaps is None:
        return False
    shown = [row["itl_mean_ms"], row["itl_p50_ms"], row["itl_p95_ms"], row["itl_p99_ms"], row["itl_max_ms"]]
    mean, largest = (sum(gaps) / len(gaps), max(gaps)) if gaps else (None, None)
    own = [mean, *(percentile(gaps, share) for share in (0.5, 0.95, 0.99)), largest]
    return all(_is_close(*pair, RELATIVE_TOLERANCE) for pair in zip(shown, own, strict=True))


def percentile(values: list[float], share: float) -> float | None:
    """Between the two nearest ranks by a straight line."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def token_ms(row: Row) -> float | None:
    if row["outcome"] != "ok" or row["ttft_ms"] is None or (row["num_tokens"] or 0) < 2:
        return None
    return float((1e3 * row["total_s"] - row["ttft_ms"]) / (row["num_tokens"] - 1))


def is_good(row: Row, level: Row) -> bool:
    if row["outcome"] != "ok" or row["ttft_ms"] is None or row["ttft_ms"] > level["ttft_ms"]:
        return False
    own = token_ms(row)
    return own is None or own <= level["token_ms"]


def wall_sums(rows: list[Row]) -> Sums:
    sums = {}
    for block in {row["block"] for row in rows}:
        here = [row for row in rows if row["block"] == block]
        tokens = sum(row["num_tokens"] or 0 for row in here if row["outcome"] == "ok")
        sums[block] = max(row["due_s"] + row["total_s"] for row in here), float(tokens)
    return sums


def load_pairs(plain: list[Row], own: list[Row]) -> list[tuple[Row, Row]]:
    """Requests that both arms answered."""
    answered = {(row["block"], row["position"]): row for row in plain if row["outcome"] == "ok"}
    return [
        (answered[row["block"], row["position"]], row)
        for row in own
        if row["outcome"] == "ok" and (row["block"], row["position"]) in answered
    ]


def latency_sums(pairs: list[tuple[Row, Row]], side: int) -> Sums:
    sums: Sums = {}
    for pair in pairs:
        seconds, tokens = sums.get(pair[side]["block"], (0.0, 0.0))
        sums[pair[side]["block"]] = seconds + pair[side]["total_s"], tokens + (pair[side]["num_tokens"] or 0)
    return sums


def ratio_sides(plain: list[Row], own: list[Row]) -> dict[str, tuple[Sums, Sums]]:
    pairs = load_pairs(plain, own)
    return {
        "throughput": (wall_sums(plain), wall_sums(own)),
        "latency": (latency_sums(pairs, 0), latency_sums(pairs, 1)),
    }


def block_ratio(plain: Sums, own: Sums, chosen: list[int]) -> float:
    """Seconds per token of plain decoding over the arm's, over the chosen blocks."""
    rates = [sum(s[block][0] for block in chosen) / sum(s[block][1] for block in chosen) for s in (plain, own)]
    return rates[0] / rates[1]


def _are_comparable(plain: Sums, own: Sums) -> bool:
    return bool(plain) and plain.keys() == own.keys() and all(s[block][1] for s in (plain, own) for block in s)


def block_interval(plain: Sums, own: Sums, num_resamples: int = 4000) -> tuple[float | None, float | None]:
    if len(plain) < 2 or not _are_comparable(plain, own):
        return None, None
    generator, listed = random.Random(1), sorted(plain)
    drawn = [generator.choices(listed, k=len(listed)) for _ in range(num_resamples)]
    ratios = [block_ratio(plain, own, chosen) for chosen in drawn]
    return percentile(ratios, 0.025), percentile(ratios, 0.975)


def recompute_load(own: list[Row], plain: list[Row], gaps: list[float], level: Row) -> Row:
    """The cell's numbers, the intervals excepted."""
    good = [row for row in own if row["outcome"] == "ok"]
    wall = sum(seconds for seconds, _ in wall_sums(own).values())
    num_good = sum(is_good(row, level) for row in own)
    ttfts = [row["ttft_ms"] for row in good if row["ttft_ms"] is not None]
    each_ms = [value for value in map(token_ms, good) if value is not None]
    counted = [row for row in good if row["mean_budget"] is not None and row["num_rounds"]]
    drafted = sum(row["mean_budget"] * row["num_rounds"] for row in counted)
    cell: Row = {
        "num_requests": len(own),
        "num_ok": len(good),
        "token_ms": sum(each_ms) / len(each_ms) if each_ms else None,
        "tokens_per_s": sum(row["num_tokens"] or 0 for row in good) / wall,
        "goodput_per_s": num_good / wall,
        "good_share": num_good / len(own),
        "mean_budget": drafted / sum(row["num_rounds"] for row in counted) if counted else None,
        "differs_from_plain": sum(a["output_sha256"] != b["output_sha256"] for a, b in load_pairs(plain, own)),
    }
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        cell[f"ttft_{name}_ms"], cell[f"itl_{name}_ms"] = percentile(ttfts, share), percentile(gaps, share)
    for kind, (first, second) in ratio_sides(plain, own).items():
        is_fit = _are_comparable(first, second)
        cell[f"{kind}_ratio"] = block_ratio(first, second, sorted(first)) if is_fit else None
    return cell


# ---- documents


def document_differences(document: Path) -> list[str]:
    """One line for each marked figure of a document that is not its file's value, and for text that cannot be read."""
    text = document.read_text(encoding="utf-8")
    markers = list(MARKER.finditer(text))
    if len(markers) != text.count("<!-- figures"):
        return ["a comment that begins with figures: cannot be read"]
    if not markers:
        return ["no figure is marked"]
    found = []
    for marker in markers:
        block = text[marker.end() :].strip().split("\n\n")[0]
        source, rows, columns, values = marker.groups()
        lookup = _lookup(ROOT / source.strip())
        if values is not None:
            shown = [figure for figure in FIGURE.findall(block) if "." in figure or "%" in figure]
            found += _compare(source, shown, values.split(","), lookup)
        else:
            found += _table_differences(source, block, rows.split(","), columns.split(","), lookup)
    return found


def _table_differences(source: str, block: str, rows: list[str], columns: list[str], lookup: Lookup) -> list[str]:
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.split("\n")[2:]]
    # A log's rows are found by what stands in their first cells, a summary's are named in the marker.
    names = rows if " " in rows[0].strip() else [f"{rows[0].strip()} {line[0]}" for line in cells]
    if len(names) != len(cells) or any(len(line) != 1 + len(columns) for line in cells):
        return [f"{source}: the table has other rows or columns than its comment names"]
    found = []
    for name, line in zip(names, cells, strict=True):
        for cell, column in zip(line[1:], columns, strict=True):
            wanted = [f"{name} {part.strip()}" for part in column.split("+")] if cell else []
            found += _compare(source, FIGURE.findall(cell), wanted, lookup)
    return found


def _compare(source: str, shown: list[str], names: list[str], lookup: Lookup) -> list[str]:
    if len(shown) != len(names):
        return [f"{source}: {len(shown)} figures ({', '.join(shown)}) where the comment names {len(names)}"]
    found = []
    for figure, name in zip(shown, names, strict=True):
        value = lookup(name)
        number = figure.rstrip("% ")
        digits = len(number.partition(".")[2])
        if value is None or f"{value * (100 if '%' in figure else 1):.{digits}f}" != number:
            found.append(f"{source}: {' '.join(name.split())} is shown as {figure}, but is {value}")
    return found


def _lookup(source: Path) -> Lookup:
    if (source / "summary.json").is_file():
        summary = json.loads((source / "summary.json").read_text(encoding="utf-8"))
        keys = ("load", "arm") if "load" in summary[0] else ("method", "budget", "task")
        cells = {" ".join(str(row[key]) for key in keys): row for row in summary}
    else:
        lines = read_summaries(source) if source.is_dir() else read_lines(source)
        cells = {f"{key} {row[key]}": row for row in lines for key in row if isinstance(row[key], int | str)}
        cells |= {f"{row['decoder']} {row['task']}": row for row in lines if "decoder" in row}
        cells |= {f"step {row['step']}, {row['state']}": row for row in lines if "state" in row}
        cells |= {f"{row['arm']}/{row['rival']} {row['task']}": row for row in lines if "rival" in row}

    def look(name: str) -> Any:
        row, _, column = " ".join(name.split()).rpartition(" ")
        key, _, index = column.partition(".")
        value = cells.get(row, {}).get(key)
        return value[int(index)] if index and value is not None else value

    return look


def published() -> list[Path]:
    """What the repository publishes: measurements with a summary of their rows, and documents with marked figures."""
    folders = [file.parent for file in (ROOT / "bench").rglob("summary.json")]
    folders += [
        file.parent for file in (ROOT / "bench").glob("*/summary.jsonl") if (file.parent / "raw.jsonl").is_file()
    ]
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "graft_dist" / "data").rglob("README.md")]
    marked = [page for page in documents if "\n<!-- figures" in page.read_text(encoding="utf-8")]
    return [path.relative_to(ROOT) for path in sorted(folders) + sorted(marked)]


def main() -> int:
    paths = [Path(argument) for argument in sys.argv[1:]] or [ROOT / path for path in published()]
    if any(path.name.startswith("-") for path in paths):
        print("usage: python bench/verify.py [FOLDER|DOCUMENT.md ...]", file=sys.stderr)
        return 2
    failed = False
    for path in paths:
        try:
            found = document_differences(path) if path.suffix == ".md" else differences(path)
        except OSError as error:
            print(f"{error.filename} cannot be read: {error.strerror}", file=sys.stderr)
            return 2
        failed = failed or bool(found)
        print(f"{path}: {'every number follows from the rows' if not found else f'{len(found)} differences'}")
        for line in found:
            print(f"  {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
