import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from graft_dist.bench import (
    Arm,
    OutputRow,
    RawRow,
    arms_for,
    bootstrap_interval,
    compare,
    count_differing,
    paired_ratio,
    render_markdown,
    rotated,
    run_prompts,
    summarise,
    to_group_measurement,
)
from graft_dist.errors import PolicyError
from graft_dist.generate import Answer, Request, StageTimes, failed_answer


def raw_row(prompt_id: str, method: str, budget: int, decode_s: float, num_output_tokens: int = 11, **kwargs) -> RawRow:
    values = {"task": "math", "prefill_s": 0.1, "num_rounds": num_output_tokens - 1, "mat": 1.0}
    values |= {"draft_ms": 1.0, "build_ms": 0.5, "verify_ms": 8.0, "commit_ms": 0.25}
    return RawRow(
        prompt_id=prompt_id, method=method, budget=budget, num_output_tokens=num_output_tokens, decode_s=decode_s,
        **(values | kwargs),
    )  # fmt: skip


def output_row(row: RawRow, num_drafted: int = 0, tokens: list[int] | None = None) -> OutputRow:
    tokens = list(range(row.num_output_tokens)) if tokens is None else tokens
    return OutputRow(row.prompt_id, row.method, row.budget, str(tokens), [1] * row.num_rounds, num_drafted)


def test_arms_put_the_baseline_first_and_give_each_budget_its_own_arm() -> None:
    arms = arms_for(["chain", "ddtree", "plain", "hf"], [8, 16], draft_depth=7)
    assert arms == [Arm("plain", 0), Arm("chain", 7), Arm("ddtree", 8), Arm("ddtree", 16), Arm("hf", 0)]
    assert [arm.name for arm in arms] == ["plain", "chain-7", "ddtree-8", "ddtree-16", "hf"]


def test_methods_that_choose_budgets_have_one_arm() -> None:
    methods = ["plain", "caddtree", "graft", "graft-fixed"]
    arms = arms_for(methods, [8, 16], draft_depth=7, caps={"graft": 64})
    assert [arm.name for arm in arms] == ["plain", "caddtree", "graft", "graft-fixed-8", "graft-fixed-16"]
    assert [arm.budget for arm in arms] == [0, 256, 64, 8, 16]


def test_arms_without_the_baseline_or_with_a_zero_budget_are_refused() -> None:
    with pytest.raises(PolicyError, match="add plain"):
        arms_for(["ddtree"], [8], draft_depth=7)
    with pytest.raises(PolicyError, match="from 1"):
        arms_for(["plain", "ddtree"], [0, 8], draft_depth=7)


def test_rotation_gives_every_arm_every_place_equally_often() -> None:
    arms = arms_for(["plain", "ddtree"], [8, 16, 32], draft_depth=7)
    orders = [rotated(arms, turn) for turn in range(len(arms))]
    assert all(set(order) == set(arms) for order in orders)
    for place in range(len(arms)):
        assert {order[place] for order in orders} == set(arms)


def test_run_prompts_interleaves_arms_per_prompt_in_rotated_order() -> None:
    arms = [Arm("plain", 0), Arm("ddtree", 8)]
    calls: list[tuple[str, str]] = []

    def decode(arm: Arm, request: Request) -> Answer:
        calls.append((request.prompt_id, arm.name))
        return Answer(request, [1, 2, 3, 4], "", "length", None, [2, 1], 16, 0.5, 2.0, StageTimes(1, 2, 3, 4))

    requests = [Request(f"p{index}", "chat", [1]) for index in range(2)]
    found = list(run_prompts(arms, enumerate(requests), decode, load_s={Arm("plain", 0): 5.0}))
    assert calls == [("p0", "plain"), ("p0", "ddtree-8"), ("p1", "ddtree-8"), ("p1", "plain")]
    _, measured, problem = found[1]
    assert problem is None
    assert [row.raw.load_s for row in measured] == [None, 5.0]
    row = measured[0].raw
    assert (row.method, row.num_output_tokens, row.num_rounds, row.mat) == ("ddtree", 4, 2, 1.5)
    assert (row.draft_ms, row.build_ms, row.verify_ms, row.commit_ms) == (1, 2, 3, 4)


def test_a_prompt_that_fails_on_one_arm_leaves_no_rows_and_the_rest_goes_on() -> None:
    def decode(arm: Arm, request: Request) -> Answer:
        if request.prompt_id == "bad" and arm.method == "ddtree":
            return failed_answer(request, "too long")
        return Answer(request, [1, 2], "", "length", None, [1], 0, 0.5, 2.0)

    requests = [Request("bad", "chat", [1]), Request("good", "chat", [1])]
    found = list(run_prompts([Arm("plain", 0), Arm("ddtree", 8)], enumerate(requests), decode))
    assert [(request.prompt_id, len(measured), problem) for request, measured, problem in found] == [
        ("bad", 0, "ddtree-8: too long"),
        ("good", 2, None),
    ]


def test_transformers_own_arm_has_no_stage_times() -> None:
    def decode(arm: Arm, request: Request) -> Answer:
        return Answer(request, [1, 2], "", "length", None, [1], 0, 0.5, 2.0)

    found = list(run_prompts([Arm("hf", 0)], [(0, Request("p", "chat", [1]))], decode))
    assert found[0][1][0].raw.verify_ms is None


def test_raw_and_summary_rows_have_exactly_the_published_keys() -> None:
    raw = [raw_row("a", "plain", 0, 2.0), raw_row("a", "ddtree", 8, 1.0)]
    assert list(asdict(raw[0])) == [
        "prompt_id", "task", "method", "budget", "num_output_tokens", "decode_s", "prefill_s", "num_rounds", "mat",
        "draft_ms", "build_ms", "verify_ms", "commit_ms", "temperature", "batch", "num_mismatched", "end_to_end_s",
        "load_s",
    ]  # fmt: skip
    summary = summarise(raw, [output_row(row) for row in raw])
    assert list(asdict(summary[0])) == [
        "method", "budget", "task", "speedup", "speedup_low", "speedup_high", "mat", "tokens_per_s", "mean_budget",
        "num_prompts", "mismatch_rate", "overhead_ms", "decode_s", "end_to_end_s",
    ]  # fmt: skip


def test_speedup_is_the_ratio_of_summed_seconds_per_token_over_the_same_prompts() -> None:
    raw = [
        raw_row("a", "plain", 0, 4.0, 11),
        raw_row("b", "plain", 0, 8.0, 21, task="code"),
        raw_row("a", "ddtree", 8, 1.0, 11, num_rounds=5),
        raw_row("b", "ddtree", 8, 4.0, 21, task="code", num_rounds=10),
        raw_row("c", "plain", 0, 100.0, 11),  # no partner: must not count
    ]
    summary = summarise(raw, [output_row(row, num_drafted=8 * row.num_rounds) for row in raw])
    rows = {(row.method, row.task): row for row in summary}
    both = rows[("ddtree", "all")]
    assert both.speedup == pytest.approx((12.0 / 30) / (5.0 / 30))
    assert both.tokens_per_s == pytest.approx(30 / 5.0)
    assert both.mat == pytest.approx(30 / 15)
    assert both.mean_budget == pytest.approx(8.0)
    assert both.num_prompts == 2
    assert rows[("ddtree", "math")].speedup == pytest.approx(4.0)
    assert rows[("ddtree", "code")].speedup == pytest.approx(2.0)
    assert rows[("plain", "all")].speedup == 1.0
    assert rows[("plain", "all")].num_prompts == 3
    assert rows[("plain", "all")].speedup_low == rows[("plain", "all")].speedup_high == 1.0


def test_mismatches_overhead_and_the_whole_time_are_pooled_over_the_same_prompts() -> None:
    ours = {"num_rounds": 5, "num_mismatched": 2, "draft_ms": 300.0, "verify_ms": 1600.0, "end_to_end_s": 2.5}
    raw = [
        raw_row("a", "plain", 0, 4.0),
        raw_row("b", "plain", 0, 8.0),
        raw_row("a", "ddtree", 8, 2.0, load_s=3.0, **ours),
        raw_row("b", "ddtree", 8, 4.0, load_s=7.0, **(ours | {"num_rounds": 15, "verify_ms": 3600.0})),
        raw_row("c", "ddtree", 8, 9.0, load_s=99.0, **ours),  # no partner: must not count
    ]
    rows = {row.method: row for row in summarise(raw, [output_row(row) for row in raw]) if row.task == "all"}
    own = rows["ddtree"]
    assert own.mismatch_rate == pytest.approx(4 / 20)
    assert own.overhead_ms == pytest.approx((6000 - 600 - 5200) / 20)
    assert (own.decode_s, own.end_to_end_s) == (6.0, 12.0)  # loaded twice, by a run that was gone on with: once counts
    plain = rows["plain"]  # rows of an earlier version: they tell the stages and no more
    assert (plain.mismatch_rate, plain.end_to_end_s) == (None, None) and plain.overhead_ms is not None


def test_stages_of_prompts_decoded_together_are_shared_out() -> None:
    def answer(name: str, lengths: list[int]) -> Answer:
        request, share = Request(name, "chat", [1], render_s=0.25), StageTimes(*[float(len(lengths))] * 4)
        return Answer(
            request, [0] * (1 + sum(lengths)), "", "length", None, lengths, 4, 0.5, 9.0, StageTimes(70, 70, 70, 70),
            share, num_mismatched=1, total_s=8.0,
        )  # fmt: skip

    row = to_group_measurement(Arm("ddtree", 8), [answer("a", [2, 1]), answer("b", [3])], 4.0, 0.0, load_s=6.0).raw
    assert (row.draft_ms, row.build_ms, row.verify_ms, row.commit_ms) == (3.0,) * 4
    assert (row.num_rounds, row.num_mismatched, row.decode_s) == (3, 2, 3.0)
    assert (row.end_to_end_s, row.load_s) == (4.5, 6.0)


def test_learned_arms_are_compared_with_those_that_draft_on_the_same_prompts() -> None:
    raw = [
        raw_row("a", "plain", 0, 4.0),
        raw_row("a", "ddtree", 8, 2.0),
        raw_row("b", "ddtree", 8, 6.0, task="code"),
        raw_row("c", "ddtree", 8, 9.0),  # no partner: must not count
        raw_row("a", "caddtree", 256, 1.0),
        raw_row("a", "oracle", 64, 0.5),
        raw_row("a", "graft", 64, 1.0),
        raw_row("b", "graft", 64, 3.0, task="code", num_output_tokens=21),
        raw_row("a", "graft-fixed", 8, 1.5),
    ]
    found = {(row.arm, row.rival, row.task): row for row in compare(raw)}
    others = {"ddtree-8", "caddtree"}
    pairs = {("graft", rival) for rival in {*others, "graft-fixed-8"}} | {("graft-fixed-8", rival) for rival in others}
    assert {(arm, rival) for arm, rival, _ in found} == pairs
    assert found["graft", "graft-fixed-8", "all"].ratio == pytest.approx(1.5)
    assert found["graft-fixed-8", "ddtree-8", "all"].ratio == pytest.approx(2.0 / 1.5)
    assert found["graft", "ddtree-8", "math"].ratio == pytest.approx(2.0)
    assert found["graft", "ddtree-8", "code"].ratio == pytest.approx((6.0 / 10) / (3.0 / 20))
    both = found["graft", "ddtree-8", "all"]
    assert both.ratio == pytest.approx((8.0 / 20) / (4.0 / 30)) and both.num_prompts == 2
    assert both.low < both.ratio < both.high
    assert found["graft", "caddtree", "all"].ratio == 1.0
    assert "| graft | ddtree-8 | all | 3.000 |" in render_markdown(
        summarise(raw, [output_row(row) for row in raw]), compare(raw), raw, [output_row(row) for row in raw]
    )


def test_answers_of_one_token_are_left_out_of_the_pairs() -> None:
    raw = [raw_row("a", "plain", 0, 0.0, 1), raw_row("a", "ddtree", 8, 0.0, 1), raw_row("b", "plain", 0, 2.0)]
    summary = summarise(raw, [output_row(row) for row in raw])
    assert [(row.method, row.task, row.num_prompts) for row in summary] == [("plain", "math", 1), ("plain", "all", 1)]


def test_bootstrap_is_reproducible_and_collapses_when_all_prompts_agree() -> None:
    tokens = np.full(6, 10.0)
    plain = np.stack([np.arange(1.0, 7.0), tokens], axis=1)
    same = np.stack([np.arange(1.0, 7.0) / 2, tokens], axis=1)
    assert bootstrap_interval(plain, same) == pytest.approx((2.0, 2.0))
    mixed = np.stack([np.array([1.0, 1.0, 1.0, 6.0, 6.0, 6.0]), tokens], axis=1)
    low, high = bootstrap_interval(plain, mixed)
    assert low < paired_ratio(plain, mixed) < high
    assert bootstrap_interval(plain, mixed) == (low, high)


def test_bootstrap_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(7)
    covered = 0
    for _ in range(100):
        plain_s = random.uniform(1, 3, size=40)
        own_s = plain_s / 1.5 * random.lognormal(0, 0.2, size=40)
        tokens = np.full(40, 100.0)
        low, high = bootstrap_interval(np.stack([plain_s, tokens], 1), np.stack([own_s, tokens], 1))
        covered += low <= 1.5 / math.exp(0.02) <= high
    assert 85 <= covered <= 100


def test_differing_outputs_are_counted_per_arm() -> None:
    raw = [raw_row("a", "plain", 0, 2.0), raw_row("a", "chain", 7, 2.0), raw_row("a", "ddtree", 8, 1.0)]
    outputs = [output_row(raw[0]), output_row(raw[1]), output_row(raw[2], tokens=[9] * 11)]
    assert count_differing(outputs) == {Arm("plain", 0): 0, Arm("chain", 7): 0, Arm("ddtree", 8): 1}


def test_markdown_shows_every_summary_row_and_the_stage_times() -> None:
    raw = [raw_row("a", "plain", 0, 2.0), raw_row("a", "ddtree", 8, 1.0), raw_row("a", "hf", 0, 2.5, verify_ms=None)]
    outputs = [output_row(row) for row in raw]
    text = render_markdown(summarise(raw, outputs), compare(raw), raw, outputs)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 6 + 2 + 3
    start = "| ddtree | 8 | math | 2.000 | 2.000 | 2.000 | 1.000 | 10.000 | 0.000 | 1 |"
    assert f"{start}  | 99.100 | 1.000 |  |" in lines
    assert lines[-1].startswith("| ddtree | 8 | 0.100 | 0.050 | 0.800 | 0.025 | 1.909 |")
    json.dumps([asdict(row) for row in raw])  # rows are plain JSON
