"""A live trial: champion and challenger take turns on the same prompts in one engine; the challenger is audited too.

Runs wherever the models fit, so what goes in and comes out is plain data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.utils.logging import disable_progress_bar

from graft_dist.audit import TieRule, audit_answers
from graft_dist.config import TargetConfig
from graft_dist.decoder import load_decoder, new_engine
from graft_dist.errors import GraftError
from graft_dist.generate import Answer, Request, answer_all
from graft_dist.policy import DecodingPolicy, GraftPolicy
from graft_dist.policy_maker import PolicyMaker
from graft_dist.reference import Reference
from graft_dist.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class LivePlan:
    """What to try; policies are folders."""

    config: TargetConfig
    requests: tuple[Request, ...]
    num_turns: int  # of the requests, the first ones: answered by both; 0 leaves the comparison out
    num_audited: int  # of the requests, the first ones: answered by the challenger and audited; 0 leaves the audit out
    max_new_tokens: int
    challenger: str
    champion: str | None  # None: DDTree at `ddtree_budget`
    ddtree_budget: int
    num_threads: int


@dataclass(frozen=True)
class Turns:
    """One policy's answers to all prompts."""

    decode_ms: list[float]  # by prompt, after the target's prefill
    num_tokens: list[int]  # by prompt, decoded in that time
    mat: float
    mean_budget: float


@dataclass(frozen=True)
class Audit:
    """The challenger's answers against transformers' own."""

    num_audited: int
    num_bugs: int  # audited answers that are not the target's own, or failed
    differences: list[str]  # a line for each difference from transformers' own answer, ties included


@dataclass(frozen=True)
class LiveTrial:
    """What came out, on which hardware it does not say: both policies had the same."""

    turns: tuple[Turns, Turns] | None  # the champion's and the challenger's
    audit: Audit | None


def run_live(plan: LivePlan) -> LiveTrial:
    """Decode greedily, one prompt at a time, the two policies in alternating order; audit the challenger's answers.

    Raises:
        GraftError: a model, a policy or a prompt cannot be used; one sentence.
    """
    torch.set_num_threads(plan.num_threads)
    disable_progress_bar()
    target, drafter = load_decoder(plan.config)
    policies = {name: _policy(plan, name, PolicyMaker(target, drafter, plan.config.num_candidates,
                learned=_learned(plan, name))) for name in ("champion", "challenger")}  # fmt: skip
    params = SamplingParams(max_new_tokens=plan.max_new_tokens)
    engine = new_engine(plan.config, target, drafter, policies["champion"], max_slots=1, max_budget=_max_budget(plan))

    def answer(name: str, request: Request) -> Answer:
        engine.policy = policies[name]
        return next(answer_all(engine, [request], params))

    both = plan.requests[: plan.num_turns]
    for name in policies if both else ():
        answer(name, both[0])  # compiles and grows caches; not counted
    answers: dict[str, list[Answer]] = {name: [] for name in policies}
    for turn, request in enumerate(both):
        for name in ("champion", "challenger") if turn % 2 == 0 else ("challenger", "champion"):
            answers[name].append(answer(name, request))
    turns = (_turns(answers["champion"]), _turns(answers["challenger"])) if both else None
    audited = answers["challenger"][: plan.num_audited]
    audited += [answer("challenger", request) for request in plan.requests[len(both) : plan.num_audited]]
    if not audited:
        return LiveTrial(turns, None)
    reference = Reference.load(plan.config, target, params)
    limits = {
        request.prompt_id: min(params.max_new_tokens, engine.max_length - len(request.token_ids))
        for request in plan.requests
    }
    report = audit_answers("challenger", audited, reference, limits, TieRule(target.dtype), {}, drafts=False)
    lines = [
        f"{one.prompt_id} at token {one.position}: {one.kind}, margin {one.margin:.3g}" for one in report.differences
    ]
    return LiveTrial(turns, Audit(len(audited), report.num_bugs + len(report.errors), lines))


def _max_budget(plan: LivePlan) -> int:
    learned = [_learned(plan, name) for name in ("champion", "challenger")]
    return max(plan.ddtree_budget if policy is None else policy.max_budget for policy in learned)


def _learned(plan: LivePlan, name: str) -> GraftPolicy | None:
    folder = plan.champion if name == "champion" else plan.challenger
    return None if folder is None else GraftPolicy.load(folder)


def _policy(plan: LivePlan, name: str, maker: PolicyMaker) -> DecodingPolicy:
    if name == "champion" and plan.champion is None:
        return maker.make("ddtree", plan.ddtree_budget)
    return maker.make("graft", None)


def _turns(answers: list[Answer]) -> Turns:
    failed = [answer for answer in answers if answer.finish_reason == "error"]
    if failed:
        raise GraftError(f"the live trial could not decode {failed[0].request.prompt_id}: {failed[0].error}")
    num_rounds = max(1, sum(answer.num_rounds for answer in answers))
    tokens = [sum(answer.acceptance_lengths) for answer in answers]
    return Turns(
        decode_ms=[1000 * answer.decode_s for answer in answers],
        num_tokens=tokens,
        mat=sum(tokens) / num_rounds,
        mean_budget=sum(answer.num_drafted for answer in answers) / num_rounds,
    )
