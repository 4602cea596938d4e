"""Is decoding lossless? Every method against transformers' own `generate` on a model of its own.

The reference is the unmodified model, loaded apart from the engine's, with transformers' attention, cache, stopping
rules and logits processors. At temperature 0 it is plain `generate(do_sample=False)`; above 0 the same loop draws each
token by inverse CDF with the engine's random number for (seed, output position), so the engine's text must be the same
there too.

A first difference between the two is judged by its margin at the reference's decision:

* greedy: how much higher the reference's logit of its own token is than that of the method's token;
* sampled: how far the random number lies from the method's token's interval in the reference's CDF.

float32: a margin under 1e-4 is a tie. bfloat16: rounding errors grow with the spread of the logits, and two correct
ways of computing them (in one pass, or 8 tokens at a time; both by transformers alone, built-in target, 1,150
positions) were seen to move a margin by at most 0.18 standard deviations of the logits over the vocabulary; so up to
0.2 of them is a near tie (0.7 at the built-in target). A change of m in the margin of logits moves a CDF whose value
is u, at temperature T, by at most m u (1 - u) / T, which is the limit for sampled tokens. Everything else is a bug.

After a tie the reference starts again from the method's own tokens, so the rest of the answer is audited as well.

Not covered: stop strings (the reference has none), and answers cut by the engine's context limit are compared up to the
cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray

from graft_dist.generate import Answer
from graft_dist.reference import Decision, Reference

FLOAT32_TIE = 1e-4
BFLOAT16_SPREADS = 0.2


class Kind(StrEnum):
    """What a difference means."""

    TIE = "tie"  # float32: the two tokens are as good as equal
    NEAR_TIE = "near tie"  # bfloat16: rounding decides between the two tokens
    BUG = "bug"


@dataclass(frozen=True)
class Difference:
    """One place where a method's answer leaves the reference's.

    position: index in the output tokens. A token of None means that the answer had already ended there, which is always
    a bug.
    margin: see the module's docstring; `allowed` is the largest margin that still counts as a tie.
    """

    prompt_id: str
    position: int
    reference_token: int | None
    method_token: int | None
    margin: float
    allowed: float
    kind: Kind


@dataclass(frozen=True)
class ArmReport:
    """What the audit of one method found."""

    name: str
    num_prompts: int
    num_identical: int
    num_tokens: int
    num_rounds: int
    num_committed: int  # tokens committed by rounds: all but the first of each answer
    num_drafted: int
    drafts: bool  # whether the method is one that drafts
    differences: tuple[Difference, ...]
    errors: tuple[str, ...]  # "prompt id: reason" of prompts without an answer

    @property
    def num_bugs(self) -> int:
        return sum(difference.kind is Kind.BUG for difference in self.differences)

    @property
    def mat(self) -> float | None:
        """Tokens committed per round; None if there was no round."""
        return self.num_committed / self.num_rounds if self.num_rounds else None

    @property
    def is_vacuous(self) -> bool:
        """True if a drafting method never drafted: then its equality with the reference says nothing."""
        return self.drafts and self.num_drafted == 0

    @property
    def passed(self) -> bool:
        return self.num_bugs == 0 and not self.errors and not self.is_vacuous


@dataclass(frozen=True)
class TieRule:
    """When a margin still counts as a tie, for the dtype that both sides computed in."""

    dtype: torch.dtype
    near_tie: float = BFLOAT16_SPREADS  # for bfloat16, in standard deviations of the logits

    def allowed(self, spread: float, temperature: float, number: float | None = None) -> float:
        """The largest margin of a tie: in logits at temperature 0, in probability mass above (see `Decision`)."""
        margin = FLOAT32_TIE if self.dtype == torch.float32 else self.near_tie * spread
        return margin if number is None else margin * number * (1 - number) / temperature

    def judge(self, margin: float, allowed: float) -> Kind:
        if self.dtype == torch.float32:
            return Kind.TIE if margin < allowed else Kind.BUG
        return Kind.NEAR_TIE if margin <= allowed else Kind.BUG


def first_difference(reference: Sequence[int], answer: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing on one side; None if the two are equal."""
    for index, (expected, found) in enumerate(zip(reference, answer, strict=False)):
        if expected != found:
            return index
    return None if len(reference) == len(answer) else min(len(reference), len(answer))


def compare(
    reference: Reference, answer: Answer, limit: int, rule: TieRule, expected: Sequence[int] | None = None
) -> list[Difference]:
    """The differences of one answer from the reference, up to and including the first bug.

    limit: most output tokens the answer could have. expected: the reference's own answer, if it is known already.
    """
    prompt_ids, output_ids = answer.request.token_ids, answer.token_ids
    differences: list[Difference] = []
    start = 0
    while True:
        follows = expected if expected is not None and start == 0 else None
        if follows is None:
            follows = reference.generate(prompt_ids, output_ids[:start], limit - start)
        index = first_difference(follows, output_ids[start:])
        if index is None:
            return differences
        difference = _judge(reference, answer, start, follows, index, rule)
        differences.append(difference)
        start += index + 1
        if difference.kind is Kind.BUG or start >= limit:
            return differences
        if output_ids[start - 1] in reference.stop_token_ids:
            # The tie was between a stop token and going on: the answer has to end here.
            if start < len(output_ids):
                differences.append(_length_bug(answer, start, None, output_ids[start]))
            return differences


def review(reference: Reference, answer: Answer, limit: int, rule: TieRule) -> list[Difference]:
    """The differences that `compare` would find, by one pass over the answer, where there are many to judge.

    Each token is held against what the reference says after the tokens before it. Its logits are those of a pass over
    all tokens, not of `generate`'s over one; how far the two may be apart is what a tie allows.
    """
    output_ids = answer.token_ids
    differences: list[Difference] = []
    for position, decision in enumerate(reference.decisions(answer.request.token_ids, output_ids)):
        is_over = position == limit or (position > 0 and output_ids[position - 1] in reference.stop_token_ids)
        if is_over or position == len(output_ids):
            expected = None if is_over else decision.token
            found = output_ids[position] if position < len(output_ids) else None
            if (expected, found) != (None, None):
                differences.append(_length_bug(answer, position, expected, found))
            break
        if output_ids[position] != decision.token:
            differences.append(_weigh(reference, answer, position, decision, rule))
            if differences[-1].kind is Kind.BUG:
                break
    return differences


def _judge(
    reference: Reference, answer: Answer, start: int, follows: Sequence[int], index: int, rule: TieRule
) -> Difference:
    output_ids = answer.token_ids
    position = start + index
    expected = follows[index] if index < len(follows) else None
    found = output_ids[position] if position < len(output_ids) else None
    if expected is None or found is None:
        return _length_bug(answer, position, expected, found)
    decision = reference.decide(answer.request.token_ids, output_ids[:start], index + 1)
    return _weigh(reference, answer, position, decision, rule)


def _weigh(reference: Reference, answer: Answer, position: int, decision: Decision, rule: TieRule) -> Difference:
    """The difference at a position where the reference decided for another token than the answer has."""
    found = answer.token_ids[position]
    margin = decision.margin(found)
    allowed = rule.allowed(decision.spread, reference.params.temperature, decision.number)
    kind = rule.judge(margin, allowed)
    return Difference(answer.request.prompt_id, position, decision.token, found, margin, allowed, kind)


def _length_bug(answer: Answer, position: int, expected: int | None, found: int | None) -> Difference:
    return Difference(answer.request.prompt_id, position, expected, found, math.inf, 0.0, Kind.BUG)


def audit_answers(
    name: str,
    answers: Sequence[Answer],
    reference: Reference,
    limits: dict[str, int],
    rule: TieRule,
    expected: dict[str, list[int]],
    drafts: bool,
) -> ArmReport:
    """Compare one method's answers with the reference.

    limits: most output tokens by prompt id. expected: the reference's answers by prompt id; missing ones are computed
    and put in, so that every method after the first finds them there.
    """
    differences: list[Difference] = []
    errors: list[str] = []
    num_identical = 0
    for answer in answers:
        prompt_id = answer.request.prompt_id
        if answer.finish_reason == "error":
            errors.append(f"{prompt_id}: {answer.error}")
            continue
        if prompt_id not in expected:
            expected[prompt_id] = reference.generate(answer.request.token_ids, [], limits[prompt_id])
        found = compare(reference, answer, limits[prompt_id], rule, expected[prompt_id])
        differences += found
        num_identical += not found
    return ArmReport(
        name=name,
        num_prompts=len(answers),
        num_identical=num_identical,
        num_tokens=sum(len(answer.token_ids) for answer in answers),
        num_rounds=sum(answer.num_rounds for answer in answers),
        num_committed=sum(sum(answer.acceptance_lengths) for answer in answers),
        num_drafted=sum(answer.num_drafted for answer in answers),
        drafts=drafts,
        differences=tuple(differences),
        errors=tuple(errors),
    )


def chi_square(observed: NDArray[np.int64], probabilities: NDArray[np.float64], min_expected: float = 5.0) -> float:
    """The p-value of Pearson's test that counts `observed` [C] come from `probabilities` [C].

    Cells that expect fewer than `min_expected` counts are pooled. A count in a cell of probability 0 gives 0.0.
    """
    total = int(observed.sum())
    if np.any(observed[probabilities == 0] > 0):
        return 0.0
    expected = probabilities * total
    large = expected >= min_expected
    observed_cells = np.append(observed[large], observed[~large].sum()).astype(np.float64)
    expected_cells = np.append(expected[large], expected[~large].sum())
    kept = expected_cells > 0
    statistic = float((((observed_cells - expected_cells) ** 2)[kept] / expected_cells[kept]).sum())
    freedom = int(kept.sum()) - 1
    if freedom < 1:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
