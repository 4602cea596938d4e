"""The summary of a load test, on rows whose answer can be worked out in the head."""

from dataclasses import replace

import pytest

from graft_dist.prompts import Prompt
from jobs.load_client import Outcome, Reply
from jobs.load_report import GapRow, LoadRow, LoadSummary, ServiceLevel, percentiles, render_markdown, summarise, to_row
from jobs.load_schedule import Load

LEVEL = ServiceLevel(ttft_ms=200.0, token_ms=40.0)


def rows_of(
    arm: str, block: int, position: int, *, total_s: float, due_s: float = 0.0, text: str = "yes", tokens: int = 11,
    outcome: Outcome = Outcome.ok,
) -> tuple[LoadRow, GapRow]:  # fmt: skip
    """A request of 11 tokens: the first after 100 ms, the others in two pieces."""
    reply = Reply(
        outcome=outcome,
        sent_s=0.0,
        total_s=total_s,
        ttft_s=0.1,
        gaps_s=((total_s - 0.1) / 2,) * 2,
        texts=(text,),
        finish_reasons=("stop",),
        num_tokens=tokens,
        graft={"rounds": 4, "mean_budget": 0.0 if arm == "plain" else 8.0},
    )
    prompt = Prompt(f"p{position}", "chat", ("?",))
    return to_row(Load(concurrency=2), block, position, arm, prompt, due_s, 0.002, reply)


def summary_of(pairs: list[tuple[LoadRow, GapRow]]) -> dict[str, LoadSummary]:
    made = summarise([row for row, _ in pairs], [gap for _, gap in pairs], LEVEL)
    return {row.arm: row for row in made}


def two_blocks() -> list[tuple[LoadRow, GapRow]]:
    """Plain takes 1 s for its two requests, twice; the tree arm takes half as long, and one of its texts differs."""
    pairs = []
    for block in range(2):
        pairs += [rows_of("plain", block, 0, total_s=0.5), rows_of("plain", block, 1, total_s=0.5, due_s=0.5)]
        text = "no" if block else "yes"
        pairs += [rows_of("ddtree", block, 0, total_s=0.25, text=text)]
        pairs += [rows_of("ddtree", block, 1, total_s=0.25, due_s=0.25)]
    return pairs


def test_a_row_holds_what_a_user_sees() -> None:
    row, gap = rows_of("plain", 0, 0, total_s=0.5)
    assert (row.ttft_ms, row.late_ms, row.num_tokens, row.outcome, row.concurrency) == (100.0, 2.0, 11, "ok", 2)
    assert gap.gaps_ms == [200.0, 200.0] and row.itl_p50_ms == row.itl_max_ms == row.itl_mean_ms == 200.0
    assert row.token_ms == pytest.approx(40.0) and row.output_sha256 is not None
    cut, _ = rows_of("plain", 0, 0, total_s=0.5, outcome=Outcome.cut)
    assert cut.output_sha256 is None and cut.finish_reason is None and cut.token_ms is None


def test_rates_and_ratios() -> None:
    summary = summary_of(two_blocks())
    assert list(summary) == ["plain", "ddtree"]
    plain, tree = summary["plain"], summary["ddtree"]
    assert plain.tokens_per_s == pytest.approx(44 / 2.0) and tree.tokens_per_s == pytest.approx(44 / 1.0)
    assert plain.throughput_ratio == plain.throughput_low == plain.throughput_high == plain.latency_ratio == 1.0
    for value in (tree.throughput_ratio, tree.throughput_low, tree.throughput_high, tree.latency_ratio):
        assert value == pytest.approx(2.0)
    assert plain.token_ms == pytest.approx(40.0) and tree.token_ms == pytest.approx(15.0)
    assert (plain.ttft_p50_ms, plain.ttft_p99_ms, tree.itl_p50_ms) == (100.0, 100.0, 75.0)
    assert (plain.mean_budget, tree.mean_budget) == (0.0, 8.0)
    assert (plain.differs_from_plain, tree.differs_from_plain) == (0, 1)


def test_the_interval_is_over_blocks() -> None:
    pairs = two_blocks()
    slow = [
        (replace(row, total_s=4 * row.total_s) if (row.arm, row.block) == ("ddtree", 1) else row, gap)
        for row, gap in pairs
    ]
    tree = summary_of(slow)["ddtree"]
    assert tree.throughput_low is not None and tree.throughput_high is not None and tree.throughput_ratio is not None
    assert tree.throughput_low < tree.throughput_ratio < tree.throughput_high
    single = summary_of([pair for pair in pairs if pair[0].block == 0])["ddtree"]
    assert (single.throughput_ratio, single.throughput_low, single.latency_high) == (pytest.approx(2.0), None, None)


def test_goodput_counts_answers_within_the_service_level() -> None:
    pairs = two_blocks()
    late = [(replace(row, ttft_ms=201.0) if row.position else row, gap) for row, gap in pairs]
    plain = summary_of(late)["plain"]
    assert (plain.good_share, plain.goodput_per_s) == (0.5, 1.0)
    slow = [rows_of("plain", 0, 0, total_s=0.51)]  # 41 ms per token
    assert summary_of(slow)["plain"].good_share == 0.0
    assert summary_of([rows_of("plain", 0, 0, total_s=0.5, outcome=Outcome.cut)])["plain"].good_share == 0.0


def test_requests_without_an_answer_count_as_time_and_not_as_tokens() -> None:
    pairs = two_blocks()
    lost = [
        rows_of("ddtree", row.block, row.position, total_s=row.total_s, due_s=row.due_s, outcome=Outcome.timeout)
        if (row.arm, row.position) == ("ddtree", 1)
        else (row, gap)
        for row, gap in pairs
    ]
    tree = summary_of(lost)["ddtree"]
    assert (tree.num_requests, tree.num_ok) == (4, 2)
    assert tree.throughput_ratio == pytest.approx(1.0) and tree.latency_ratio == pytest.approx(2.0)
    nothing = [pair for pair in lost if (pair[0].arm, pair[0].position) != ("ddtree", 0)]
    tree = summary_of(nothing)["ddtree"]
    assert (tree.throughput_ratio, tree.latency_ratio, tree.tokens_per_s, tree.ttft_p50_ms) == (None, None, 0.0, None)
    table = render_markdown(
        summarise([row for row, _ in nothing], [gap for _, gap in nothing], LEVEL), [row for row, _ in nothing], LEVEL
    )
    assert "closed-2 ddtree p1: timeout" in table and "within 200 ms" in table


def test_without_plain_there_are_no_ratios() -> None:
    tree = summary_of([pair for pair in two_blocks() if pair[0].arm == "ddtree"])["ddtree"]
    assert (tree.throughput_ratio, tree.latency_ratio, tree.differs_from_plain) == (None, None, 0)


def test_percentiles_lie_between_ranks() -> None:
    assert percentiles([]) == (None, None, None)
    assert percentiles([5.0]) == (5.0, 5.0, 5.0)
    assert percentiles([float(value) for value in range(101)]) == (50.0, 95.0, 99.0)
    assert percentiles([0.0, 10.0])[0] == 5.0
