"""What a load test leaves per request, and the summary that follows from these rows alone.

Conventions. TTFT counts from the moment a request was due (open loop) or sent (closed loop) to its first text. ITL is
the time between one piece of text and the next, as the client sees it: with speculation a piece holds several tokens,
so beside it stands `token_ms`, the time per token after the first piece. A block's wall time runs from its start to its
last answer, so that tokens/s include its tail. Ratios are over plain decoding: above 1, the arm is faster.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graft_dist.bench import BASELINE, bootstrap_interval, paired_ratio
from graft_dist.prompts import Prompt
from jobs.load_client import Outcome, Reply
from jobs.load_schedule import Load

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class LoadRow:
    """One request: a line of `raw.jsonl`. What an unanswered request lacks is None."""

    load: str
    concurrency: int | None
    rate: float | None  # requests per second
    block: int
    position: int  # in the block
    arm: str
    prompt_id: str
    task: str
    due_s: float  # when it was to be sent, from the block's start
    late_ms: float  # how much later the client really sent it
    ttft_ms: float | None
    itl_mean_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    itl_p99_ms: float | None
    itl_max_ms: float | None
    num_tokens: int | None
    total_s: float
    outcome: str
    finish_reason: str | None
    output_sha256: str | None
    num_rounds: int | None  # as the server counted them
    mean_budget: float | None

    @property
    def is_ok(self) -> bool:
        return self.outcome == Outcome.ok

    @property
    def token_ms(self) -> float | None:
        """Milliseconds per token after the first piece of text."""
        if not self.is_ok or self.ttft_ms is None or self.num_tokens is None or self.num_tokens < 2:
            return None
        return (self.total_s * 1e3 - self.ttft_ms) / (self.num_tokens - 1)


@dataclass(frozen=True)
class GapRow:
    """The gaps between the pieces of one answer: a line of `gaps.jsonl`, in the order of `raw.jsonl`."""

    load: str
    block: int
    position: int
    arm: str
    gaps_ms: list[float]


@dataclass(frozen=True)
class ServiceLevel:
    """A request is good if it is answered, its first text comes in time and its tokens follow quickly enough."""

    ttft_ms: float
    token_ms: float

    def is_met(self, row: LoadRow) -> bool:
        if not row.is_ok or row.ttft_ms is None:
            return False
        return row.ttft_ms <= self.ttft_ms and (row.token_ms is None or row.token_ms <= self.token_ms)


@dataclass(frozen=True)
class LoadSummary:
    """One arm under one load: an entry of `summary.json`.

    throughput_ratio: the arm's tokens per second of wall time over plain's; latency_ratio: plain's end-to-end seconds
    per token over the arm's, over requests that both answered. Low and high bound the middle 95 % over resampled
    blocks; None with fewer than two blocks.
    """

    load: str
    arm: str
    num_requests: int
    num_ok: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    itl_p99_ms: float | None
    token_ms: float | None  # mean over requests
    tokens_per_s: float
    goodput_per_s: float  # good requests per second of wall time
    good_share: float
    throughput_ratio: float | None
    throughput_low: float | None
    throughput_high: float | None
    latency_ratio: float | None
    latency_low: float | None
    latency_high: float | None
    mean_budget: float | None
    differs_from_plain: int  # requests whose text is not plain decoding's, of those that both answered


def to_row(
    load: Load, block: int, position: int, arm: str, prompt: Prompt, due_s: float, late_s: float, reply: Reply
) -> tuple[LoadRow, GapRow]:
    """The two rows of one request."""
    gaps = [round(1e3 * gap, 3) for gap in reply.gaps_s]
    p50, p95, p99 = percentiles(gaps)
    is_ok = reply.outcome == Outcome.ok
    row = LoadRow(
        load=load.name,
        concurrency=load.concurrency,
        rate=load.rate,
        block=block,
        position=position,
        arm=arm,
        prompt_id=prompt.id,
        task=prompt.task,
        due_s=round(due_s, 6),
        late_ms=round(1e3 * late_s, 3),
        ttft_ms=None if reply.ttft_s is None else round(1e3 * reply.ttft_s, 3),
        itl_mean_ms=sum(gaps) / len(gaps) if gaps else None,
        itl_p50_ms=p50,
        itl_p95_ms=p95,
        itl_p99_ms=p99,
        itl_max_ms=max(gaps) if gaps else None,
        num_tokens=reply.num_tokens,
        total_s=round(reply.total_s, 6),
        outcome=reply.outcome.value,
        finish_reason=reply.finish_reasons[0] if is_ok else None,
        output_sha256=hashlib.sha256("\0".join(reply.texts).encode()).hexdigest() if is_ok else None,
        num_rounds=reply.graft.get("rounds"),
        mean_budget=reply.graft.get("mean_budget"),
    )
    return row, GapRow(load.name, block, position, arm, gaps)


def percentiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """The 50th, 95th and 99th percentile, between ranks by straight lines; None without values."""
    if not values:
        return None, None, None
    p50, p95, p99 = np.percentile(np.array(values, np.float64), [50, 95, 99])
    return float(p50), float(p95), float(p99)


def summarise(rows: Sequence[LoadRow], gaps: Sequence[GapRow], level: ServiceLevel) -> list[LoadSummary]:
    """A function of the rows alone: every load in the order of the rows, every arm under it, plain first."""
    summary = []
    for load in dict.fromkeys(row.load for row in rows):
        here = [row for row in rows if row.load == load]
        arms = dict.fromkeys(row.arm for row in here)
        for arm in sorted(arms, key=lambda arm: (arm != BASELINE, arm)):
            own = [gap for row in gaps if (row.load, row.arm) == (load, arm) for gap in row.gaps_ms]
            summary.append(_summarise_arm(arm, here, own, level))
    return summary


def _summarise_arm(arm: str, rows: Sequence[LoadRow], gaps: Sequence[float], level: ServiceLevel) -> LoadSummary:
    own = [row for row in rows if row.arm == arm]
    plain = [row for row in rows if row.arm == BASELINE]
    good = [row for row in own if row.is_ok]
    token_ms = [row.token_ms for row in good if row.token_ms is not None]
    wall = block_sums(own)[:, 0].sum()
    num_good = sum(level.is_met(row) for row in own)
    budgets = [(row.mean_budget, row.num_rounds) for row in good if row.mean_budget is not None and row.num_rounds]
    return LoadSummary(
        rows[0].load,
        arm,
        len(own),
        len(good),
        *percentiles([row.ttft_ms for row in good if row.ttft_ms is not None]),
        *percentiles(gaps),
        sum(token_ms) / len(token_ms) if token_ms else None,
        float(sum(row.num_tokens or 0 for row in good) / wall),
        float(num_good / wall),
        num_good / len(own),
        *_ratio(block_sums(plain), block_sums(own)),
        *_ratio(*_latencies(plain, own)),
        sum(mean * rounds for mean, rounds in budgets) / sum(rounds for _, rounds in budgets) if budgets else None,
        sum(first.output_sha256 != second.output_sha256 for first, second in _pairs(plain, own)),
    )


def block_sums(rows: Sequence[LoadRow]) -> FloatArray:
    """[blocks, 2]: each block's wall seconds and its answered tokens."""
    sums = []
    for block in sorted({row.block for row in rows}):
        here = [row for row in rows if row.block == block]
        sums.append(
            (max(row.due_s + row.total_s for row in here), sum(row.num_tokens or 0 for row in here if row.is_ok))
        )
    return np.array(sums, np.float64).reshape(-1, 2)


def _pairs(plain: Sequence[LoadRow], own: Sequence[LoadRow]) -> list[tuple[LoadRow, LoadRow]]:
    """The same request, answered by both."""
    baseline = {(row.block, row.position): row for row in plain if row.is_ok}
    found = [(baseline.get((row.block, row.position)), row) for row in own if row.is_ok]
    return [(first, second) for first, second in found if first is not None]


def _latencies(plain: Sequence[LoadRow], own: Sequence[LoadRow]) -> tuple[FloatArray, FloatArray]:
    """Two times [blocks, 2]: end-to-end seconds and tokens of the requests that both answered."""
    sums: dict[int, list[float]] = {}
    for first, second in _pairs(plain, own):
        each = (first.total_s, first.num_tokens or 0, second.total_s, second.num_tokens or 0)
        sums[first.block] = [total + value for total, value in zip(sums.get(first.block, [0.0] * 4), each, strict=True)]
    both = np.array([sums[block] for block in sorted(sums)], np.float64).reshape(-1, 4)
    return both[:, :2], both[:, 2:]


def _ratio(plain: FloatArray, own: FloatArray) -> tuple[float | None, float | None, float | None]:
    """Ratio, low and high; None where blocks without a token make it meaningless."""
    if not len(plain) or len(plain) != len(own) or not (plain[:, 1].all() and own[:, 1].all()):
        return None, None, None
    ratio = paired_ratio(plain, own)
    return (ratio, *(bootstrap_interval(plain, own) if len(plain) > 1 else (None, None)))


def render_markdown(summary: Sequence[LoadSummary], rows: Sequence[LoadRow], level: ServiceLevel) -> str:
    """`summary.md`: the summary as a table, outcomes that are no answer, and what the columns mean."""
    columns = list(LoadSummary.__dataclass_fields__)
    lines = [table_line(columns), table_line(["---"] * len(columns))]
    lines += [table_line([shown(value) for value in asdict(row).values()]) for row in summary]
    lines += [
        "",
        "ttft: milliseconds to the first text. itl: milliseconds between one piece of text and the next; a piece may "
        "hold several tokens, token_ms is the mean time per token after the first piece. goodput: requests per second "
        f"with the first text within {level.ttft_ms:g} ms and at most {level.token_ms:g} ms per further token. Ratios "
        "are over plain decoding, above 1 is faster: throughput by tokens per second of wall time (under an open load "
        "that does not saturate the server it is about 1, whatever the arm), latency by end-to-end seconds per token; "
        "low and high: 95 % bootstrap interval over blocks. differs_from_plain: answers whose text is another one than "
        "plain decoding's; in bfloat16 a near tie may fall either way with the shape of the batch, in float32 there "
        "should be none.",
        "",
    ]
    failed = [row for row in rows if not row.is_ok]
    lines += [f"{row.load} {row.arm} {row.prompt_id}: {row.outcome}" for row in failed] or [
        "Every request was answered."
    ]
    return "\n".join(lines) + "\n"


def table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def to_lines(rows: Sequence[LoadRow | GapRow]) -> str:
    """Rows as JSON lines."""
    return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
