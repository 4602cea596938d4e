"""Speed of decoding methods against plain decoding: what is measured, in which order, and what the numbers mean.

Arms (a method and its budget) take turns on every prompt in one process, in an order that rotates from prompt to
prompt, so that drift of the machine reaches all of them alike. Each arm's time is compared with plain decoding's *on
the same prompt*. Owns the raw row, the summary computed from raw rows alone, and the table; files belong to the caller.

Conventions: `decode_s` is everything after the target's prefill, the drafter's prefill included. The first output token
comes from the prefill, so a row decoded `num_output_tokens - 1` tokens in `decode_s`; rates are over those.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graft_dist.errors import PolicyError
from graft_dist.generate import Answer, Request

BASELINE = "plain"
TRANSFORMERS = "hf"
LOOKUP = "hf-lookup"
DFLASH = "hf-dflash"
PEERS = (TRANSFORMERS, LOOKUP, DFLASH)
"""transformers' own greedy ways to decode: checks on the engine, not decoding policies (`peer.py`)."""
LOOKUP_TOKENS = 10
"""Tokens that prompt lookup proposes at most: what transformers' own class does when nobody says otherwise."""
FIXED_BUDGETS = {BASELINE: 0, TRANSFORMERS: 0, LOOKUP: LOOKUP_TOKENS}
ORACLE = "oracle"
"""The learned policy's trees with budgets that know the answer (`oracle.py`): a bound, not a method."""
ADAPTIVE_METHODS = ("caddtree", "graft", ORACLE)
"""Methods that choose each round's budget themselves; their arm's budget is the most that a tree may get."""
CADDTREE_CAP = 256
"""High enough that the rule decides and not the cap: with a low cap it never acts."""
NUM_RESAMPLES = 2000
BOOTSTRAP_SEED = 0
ALL_TASKS = "all"

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Arm:
    """One thing measured: a method at one budget (0 where nothing is drafted, the draft depth for a chain).

    For `ADAPTIVE_METHODS` the budget is the most nodes that a tree may get.
    """

    method: str
    budget: int

    @property
    def name(self) -> str:
        is_one = self.method in (BASELINE, *PEERS, *ADAPTIVE_METHODS)
        return self.method if is_one else f"{self.method}-{self.budget}"


@dataclass(frozen=True)
class RawRow:
    """One arm on one prompt, or on several decoded together: a line of `raw.jsonl`.

    Stage milliseconds are sums over the rounds, None where unknown. mat: tokens committed per round of a sequence, None
    if the prefill's tokens were the only ones. Of several prompts, `prompt_id` has all their ids with commas between,
    counts are sums, and `decode_s` and `end_to_end_s` are the time that passed for all of them. The last three columns
    are None in rows of earlier versions.
    """

    prompt_id: str
    task: str
    method: str
    budget: int
    num_output_tokens: int
    decode_s: float
    prefill_s: float
    num_rounds: int
    mat: float | None
    draft_ms: float | None
    build_ms: float | None
    verify_ms: float | None
    commit_ms: float | None
    temperature: float = 0.0
    batch: int = 1  # prompts decoded together
    num_mismatched: int | None = None  # rounds that stopped at a token which the tree had under another parent
    end_to_end_s: float | None = None  # from the prompt's text to the last token: tokenising and prefills included
    load_s: float | None = None  # what loading the arm's models took, once for all its rows

    @property
    def arm(self) -> Arm:
        return Arm(self.method, self.budget)

    @property
    def num_decoded(self) -> int:
        """Output tokens that `decode_s` was spent on."""
        return max(self.num_output_tokens - self.batch, 0)


@dataclass(frozen=True)
class OutputRow:
    """What the arm answered: a line of `outputs.jsonl`, the evidence that arms did the same work."""

    prompt_id: str
    method: str
    budget: int
    output_sha256: str  # of the answer's token ids; not the ids, which may quote the prompt
    acceptance_lengths: list[int]
    num_drafted: int


@dataclass(frozen=True)
class SummaryRow:
    """One arm over one task's prompts, or over all: an entry of `summary.json`.

    speedup: plain decoding's seconds per token over the arm's, both summed over the same prompts; low and high bound
    the middle 95 % of it over resampled rows. mean_budget: draft nodes verified per round. num_prompts: rows, each of
    one prompt, or of as many as were decoded together. mismatch_rate: the part of the rounds that stopped at a token
    which the tree had under another parent. overhead_ms: per round, what `decode_s` has beside drafting and verifying.
    decode_s and end_to_end_s: sums over the rows, the latter with loading, once. None: rows that do not tell.
    """

    method: str
    budget: int
    task: str
    speedup: float
    speedup_low: float
    speedup_high: float
    mat: float | None
    tokens_per_s: float
    mean_budget: float
    num_prompts: int
    mismatch_rate: float | None
    overhead_ms: float | None
    decode_s: float
    end_to_end_s: float | None


@dataclass(frozen=True)
class ComparisonRow:
    """A learned arm against another that drafts, over one task's prompts or all: a line of `comparisons.jsonl`.

    Rivals are the arms that are not learned, which tells what learning brings, and for learned budgets the learned
    trees of a fixed budget, which tells what of it choosing the budgets brings.

    ratio: the rival's seconds per token over the arm's, both summed over the same prompts; above 1 the arm is faster.
    low and high bound the middle 95 % of it over resampled rows.
    """

    arm: str
    rival: str
    task: str
    ratio: float
    low: float
    high: float
    num_prompts: int


@dataclass(frozen=True)
class Measurement:
    """The two rows that one arm leaves on one prompt."""

    raw: RawRow
    output: OutputRow


Decoder = Callable[[Arm, Request], Answer]
"""Answers one request with one arm."""


def expand_arms(
    methods: Sequence[str], budgets: Sequence[int], draft_depth: int, caps: Mapping[str, int] | None = None
) -> list[Arm]:
    """The arms of some methods in their order: one for each budget where a method takes budgets. Repeats are dropped.

    `caps` gives the most nodes of a tree for adaptive methods. Raises `PolicyError` for no or impossible budgets.
    """
    if not budgets or min(budgets) < 1:
        raise PolicyError(f"budgets are {list(budgets)}, allowed is a list of whole numbers from 1")
    alone = {**FIXED_BUDGETS, "chain": draft_depth, DFLASH: draft_depth, "caddtree": CADDTREE_CAP, **(caps or {})}
    alone[ORACLE] = alone.get("graft", CADDTREE_CAP)
    arms = [Arm(method, budget) for method in methods for budget in ([alone[method]] if method in alone else budgets)]
    return list(dict.fromkeys(arms))


def arms_for(
    methods: Sequence[str], budgets: Sequence[int], draft_depth: int, caps: Mapping[str, int] | None = None
) -> list[Arm]:
    """The arms of a benchmark, plain decoding first. Raises `PolicyError` if that baseline is missing."""
    check_baseline(methods)
    return expand_arms([BASELINE, *methods], budgets, draft_depth, caps)


def check_baseline(methods: Sequence[str]) -> None:
    """Raise `PolicyError` if plain decoding, which all are compared with, is not among the methods."""
    if BASELINE not in methods:
        raise PolicyError(f"speed is compared with plain decoding: add {BASELINE} to the methods {', '.join(methods)}")


def rotated(arms: Sequence[Arm], turn: int) -> list[Arm]:
    """The arms in the order of the given turn: each arm comes first, second, ... equally often over the turns."""
    start = turn % len(arms)
    return [*arms[start:], *arms[:start]]


def run_prompts(
    arms: Sequence[Arm],
    requests: Iterable[tuple[int, Request]],
    decode: Decoder,
    temperature: float = 0.0,
    load_s: Mapping[Arm, float] = MappingProxyType({}),
) -> Iterator[tuple[Request, list[Measurement], str | None]]:
    """All arms on each request in turn: (request, its measurements, None), or (request, [], why it could not be
    decoded).

    `requests` come with their turn number, so that a resumed run rotates as an undisturbed one would. `load_s`: seconds
    that loading took, by arm.
    """
    for turn, request in requests:
        measured: list[Measurement] = []
        for arm in rotated(arms, turn):
            answer = decode(arm, request)
            if answer.finish_reason == "error":
                yield request, [], f"{arm.name}: {answer.error}"
                break
            measured.append(to_measurement(arm, answer, temperature, load_s.get(arm)))
        else:
            yield request, measured, None


def to_measurement(arm: Arm, answer: Answer, temperature: float = 0.0, load_s: float | None = None) -> Measurement:
    """The rows of one answer."""
    is_engine = arm.method not in PEERS
    num_rounds = answer.num_rounds
    raw = RawRow(
        prompt_id=answer.request.prompt_id,
        task=answer.request.task,
        method=arm.method,
        budget=arm.budget,
        num_output_tokens=len(answer.token_ids),
        decode_s=answer.decode_s,
        prefill_s=answer.prefill_s,
        num_rounds=num_rounds,
        mat=sum(answer.acceptance_lengths) / num_rounds if num_rounds else None,
        draft_ms=answer.stages.draft_ms if is_engine else None,
        build_ms=answer.stages.build_ms if is_engine else None,
        verify_ms=answer.stages.verify_ms if is_engine else None,
        commit_ms=answer.stages.commit_ms if is_engine else None,
        temperature=temperature,
        num_mismatched=answer.num_mismatched,
        end_to_end_s=answer.request.render_s + answer.total_s,
        load_s=load_s,
    )
    output = OutputRow(
        prompt_id=answer.request.prompt_id,
        method=arm.method,
        budget=arm.budget,
        output_sha256=_sha256(answer.token_ids),
        acceptance_lengths=answer.acceptance_lengths,
        num_drafted=answer.num_drafted,
    )
    return Measurement(raw, output)


def to_group_measurement(
    arm: Arm, answers: Sequence[Answer], total_s: float, temperature: float, load_s: float | None = None
) -> Measurement:
    """The rows of several prompts of one task that were decoded together in `total_s`, prefills included.

    `answers` stand in the order of the prompts. What a round's stages took is shared out evenly among its sequences, so
    that the sums over all of them are what passed.
    """
    stages = [answer.shared_stages for answer in answers]
    mismatches = [answer.num_mismatched for answer in answers if answer.num_mismatched is not None]
    lengths = [length for answer in answers for length in answer.acceptance_lengths]
    prefill_s = sum(answer.prefill_s for answer in answers)
    prompt_id = ",".join(answer.request.prompt_id for answer in answers)
    raw = RawRow(
        prompt_id=prompt_id,
        task=answers[0].request.task,
        method=arm.method,
        budget=arm.budget,
        num_output_tokens=sum(len(answer.token_ids) for answer in answers),
        decode_s=total_s - prefill_s,
        prefill_s=prefill_s,
        num_rounds=len(lengths),
        mat=sum(lengths) / len(lengths) if lengths else None,
        draft_ms=sum(own.draft_ms for own in stages),
        build_ms=sum(own.build_ms for own in stages),
        verify_ms=sum(own.verify_ms for own in stages),
        commit_ms=sum(own.commit_ms for own in stages),
        temperature=temperature,
        batch=len(answers),
        num_mismatched=sum(mismatches) if len(mismatches) == len(answers) else None,
        end_to_end_s=sum(answer.request.render_s for answer in answers) + total_s,
        load_s=load_s,
    )
    output = OutputRow(
        prompt_id=prompt_id,
        method=arm.method,
        budget=arm.budget,
        output_sha256=_sha256([answer.token_ids for answer in answers]),
        acceptance_lengths=lengths,
        num_drafted=sum(answer.num_drafted for answer in answers),
    )
    return Measurement(raw, output)


def _sha256(ids: object) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def summarise(raw: Sequence[RawRow], outputs: Sequence[OutputRow]) -> list[SummaryRow]:
    """The summary of all arms, each over every task and over all prompts; a function of the raw rows alone."""
    baseline = {row.prompt_id: row for row in raw if row.method == BASELINE}
    num_drafted = {(row.prompt_id, row.method, row.budget): row.num_drafted for row in outputs}
    arms = list(dict.fromkeys(sorted((row.arm for row in raw), key=_arm_order)))
    tasks = sorted({row.task for row in raw} - {ALL_TASKS})
    summary: list[SummaryRow] = []
    for arm in arms:
        for task in [*tasks, ALL_TASKS]:
            pairs = _pairs(baseline, (row for row in raw if row.arm == arm), task)
            if pairs:
                drafted = sum(num_drafted[(row.prompt_id, row.method, row.budget)] for _, row in pairs)
                summary.append(_summarise_pairs(arm, task, pairs, drafted))
    return summary


def compare(raw: Sequence[RawRow]) -> list[ComparisonRow]:
    """Each learned arm against its rivals that draft: a function of the raw rows alone."""
    arms = list(dict.fromkeys(sorted((row.arm for row in raw), key=_arm_order)))
    learned = [arm for arm in arms if arm.method.startswith("graft")]
    rivals = [arm for arm in arms if arm.method not in ("graft", BASELINE, ORACLE, *PEERS)]
    tasks = [*sorted({row.task for row in raw} - {ALL_TASKS}), ALL_TASKS]
    rows = {arm: {row.prompt_id: row for row in raw if row.arm == arm} for arm in arms}
    found = []
    for arm, rival, task in itertools.product(learned, rivals, tasks):
        if rival in learned and arm.method != "graft":
            continue
        pairs = _pairs(rows[rival], rows[arm].values(), task)
        if pairs:
            sums = _sums(pairs)
            bounds = bootstrap_interval(*sums)
            found.append(ComparisonRow(arm.name, rival.name, task, paired_ratio(*sums), *bounds, len(pairs)))
    return found


def _arm_order(arm: Arm) -> tuple[int, str, int]:
    first = (BASELINE, *PEERS, "chain")
    return first.index(arm.method) if arm.method in first else len(first), arm.method, arm.budget


def _pairs(others: Mapping[str, RawRow], own: Iterable[RawRow], task: str) -> list[tuple[RawRow, RawRow]]:
    """Another arm's row (by prompt) and the arm's own, for every prompt of the task on which both decoded something."""
    # An answer of one token was finished by the prefill: nothing was decoded, so there is no time to compare.
    pairs = [(others[row.prompt_id], row) for row in own if task in (row.task, ALL_TASKS) and row.prompt_id in others]
    return [pair for pair in pairs if all(row.num_decoded > 0 for row in pair)]


def _sums(pairs: Sequence[tuple[RawRow, RawRow]]) -> tuple[FloatArray, FloatArray]:
    """Seconds and tokens [prompts, 2] of the other arm, and of the own."""
    others, own = zip(*pairs, strict=True)
    return _seconds_and_tokens(others), _seconds_and_tokens(own)


def _seconds_and_tokens(rows: Iterable[RawRow]) -> FloatArray:
    return np.array([[row.decode_s, row.num_decoded] for row in rows], np.float64)


def _summarise_pairs(arm: Arm, task: str, pairs: list[tuple[RawRow, RawRow]], num_drafted: int) -> SummaryRow:
    plain, own = _sums(pairs)
    low, high = bootstrap_interval(plain, own)
    rows = [row for _, row in pairs]
    num_rounds = sum(row.num_rounds for row in rows)
    num_mismatched = _total(row.num_mismatched for row in rows)
    whole_s, load_s = _total(row.end_to_end_s for row in rows), [row.load_s for row in rows if row.load_s is not None]
    forwards_ms = _total(ms for row in rows for ms in (row.draft_ms, row.verify_ms))
    decoded_s, num_decoded = own.sum(axis=0)
    return SummaryRow(
        method=arm.method,
        budget=arm.budget,
        task=task,
        speedup=paired_ratio(plain, own),
        speedup_low=low,
        speedup_high=high,
        mat=num_decoded / num_rounds if num_rounds else None,
        tokens_per_s=num_decoded / decoded_s,
        mean_budget=num_drafted / num_rounds if num_rounds else 0.0,
        num_prompts=len(pairs),
        mismatch_rate=num_mismatched / num_rounds if num_rounds and num_mismatched is not None else None,
        overhead_ms=(1e3 * float(decoded_s) - forwards_ms) / num_rounds
        if num_rounds and forwards_ms is not None
        else None,
        decode_s=float(decoded_s),
        # A run that was gone on with has loaded more than once.
        end_to_end_s=None if whole_s is None else whole_s + max(load_s, default=0.0),
    )


def _total(values: Iterable[float | None]) -> float | None:
    """Their sum; None if one is not known."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def paired_ratio(plain: FloatArray, own: FloatArray) -> float:
    """Plain decoding's seconds per token over the arm's; both [prompts, 2]: seconds and tokens of the same prompts."""
    plain_s, plain_tokens = plain.sum(axis=0)
    own_s, own_tokens = own.sum(axis=0)
    return float((plain_s / plain_tokens) / (own_s / own_tokens))


def bootstrap_interval(plain: FloatArray, own: FloatArray, coverage: float = 0.95) -> tuple[float, float]:
    """Bounds of the middle `coverage` of `paired_ratio` when prompts are drawn again with replacement (fixed seed)."""
    random = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = random.integers(0, len(plain), size=(NUM_RESAMPLES, len(plain)))
    plain_sums, own_sums = plain[drawn].sum(axis=1), own[drawn].sum(axis=1)
    ratios = (plain_sums[:, 0] / plain_sums[:, 1]) / (own_sums[:, 0] / own_sums[:, 1])
    tail = (1.0 - coverage) / 2
    low, high = np.quantile(ratios, [tail, 1.0 - tail])
    return float(low), float(high)


def count_differing(outputs: Sequence[OutputRow]) -> dict[Arm, int]:
    """For each arm, on how many prompts its tokens are not plain decoding's (possible in bfloat16, at near ties)."""
    plain = {row.prompt_id: row.output_sha256 for row in outputs if row.method == BASELINE}
    counts: dict[Arm, int] = {}
    for row in outputs:
        arm = Arm(row.method, row.budget)
        counts[arm] = counts.get(arm, 0) + (row.output_sha256 != plain.get(row.prompt_id))
    return counts


def render_markdown(
    summary: Sequence[SummaryRow],
    compared: Sequence[ComparisonRow],
    raw: Sequence[RawRow],
    outputs: Sequence[OutputRow],
) -> str:
    """`summary.md`: the summary's rows, what a round costs and how end-to-end time compares, and `compare`'s rows."""
    lines = [
        *_table(SummaryRow, summary),
        "",
        "speedup: seconds per token of plain decoding over the arm's, summed over the same prompts, prefill excluded; "
        "low and high: 95 % bootstrap interval over prompts. mat: tokens committed per round, bonus token included. "
        "mismatch_rate: rounds that stopped at a token which the tree had under another parent. overhead_ms: of a "
        "round, what is left of it beside drafting and verifying. decode_s: seconds, prefill excluded; end_to_end_s: "
        "with prefill, tokenising and one loading of the models. "
        "A best budget read off this table was chosen on the prompts it is measured on.",
        "",
        "Milliseconds per round, and the same comparison with tokenising and prefill included:",
        "",
    ]
    stages = [
        "method",
        "budget",
        "draft",
        "build",
        "verify",
        "commit",
        "end_to_end_speedup",
        "differs_from_plain",
    ]
    lines += [_table_line(stages), _table_line(["---"] * len(stages))]
    lines += [_table_line(_stage_cells(arm, raw, outputs)) for arm in _ordered_arms(summary)]
    if compared:
        lines += ["", "Learned methods against others: the other's seconds per token over the learned one's.", ""]
        lines += _table(ComparisonRow, compared)
    return "\n".join(lines) + "\n"


def _ordered_arms(summary: Sequence[SummaryRow]) -> list[Arm]:
    return list(dict.fromkeys(Arm(row.method, row.budget) for row in summary))


def _stage_cells(arm: Arm, raw: Sequence[RawRow], outputs: Sequence[OutputRow]) -> list[str]:
    rows = {row.prompt_id: row for row in raw if row.arm == arm}
    plain = {row.prompt_id: row for row in raw if row.method == BASELINE and row.prompt_id in rows}
    num_rounds = sum(row.num_rounds for row in rows.values())
    cells = [arm.method, str(arm.budget)]
    for stage in ("draft_ms", "build_ms", "verify_ms", "commit_ms"):
        times = [getattr(row, stage) for row in rows.values()]
        known = num_rounds > 0 and None not in times
        cells.append(_shown(sum(times) / num_rounds) if known else "")
    cells.append(_shown(paired_ratio(_end_to_end(plain.values()), _end_to_end(rows[key] for key in plain))))
    cells.append(str(count_differing(outputs).get(arm, 0)))
    return cells


def _end_to_end(rows: Iterable[RawRow]) -> FloatArray:
    """Seconds and tokens [prompts, 2], loading excluded."""
    return np.array([[_whole_s(row), row.num_output_tokens] for row in rows], np.float64)


def _whole_s(row: RawRow) -> float:
    return row.prefill_s + row.decode_s if row.end_to_end_s is None else row.end_to_end_s


def _table(kind: type[SummaryRow | ComparisonRow], rows: Sequence[SummaryRow | ComparisonRow]) -> list[str]:
    columns = list(kind.__dataclass_fields__)
    lines = [[_shown(value) for value in asdict(row).values()] for row in rows]
    return [_table_line(cells) for cells in (columns, ["---"] * len(columns), *lines)]


def _table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
