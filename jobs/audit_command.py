"""`graft audit`: every method's answers against transformers' own `generate`, printed and judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graft_dist.audit import ArmReport, Difference, Kind, TieRule, audit_answers
from graft_dist.bench import BASELINE, expand_arms
from graft_dist.config import TargetConfig
from graft_dist.decoder import load_decoder, new_engine
from graft_dist.generate import answer_all
from graft_dist.prompts import BadPrompt, Prompt
from graft_dist.reference import Reference
from graft_dist.sampling import SamplingParams
from jobs.arm_decoder import policy_of
from jobs.generate_command import new_maker, report_failures, to_requests
from jobs.out_file import check_out_file, to_json, write_aside
from jobs.policy_option import Learned, caps_of
from jobs.provenance import file_identity, provenance, public_config


def run_audit(  # noqa: PLR0913 - one argument is one option of the command
    config: TargetConfig,
    prompts: Sequence[Prompt | BadPrompt],
    methods: Sequence[str],
    budgets: Sequence[int],
    params: SamplingParams,
    slots: int,
    near_tie: float,
    out: Path | None,
    learned: Learned,
    prompt_file: Path,
) -> int:
    """Audit the methods; returns the exit code: 0 if all are lossless, 1 for a bug, a failed prompt, an empty test."""
    if out is not None:
        check_out_file(out)
    identity, about = file_identity(prompt_file), provenance()  # now: the file may be gone in the end
    target, drafter = load_decoder(config, *methods)
    arms = expand_arms(methods, budgets, drafter.draft_depth if drafter else 0, caps_of(learned))
    maker = new_maker(config, target, drafter, learned)
    policies = [policy_of(arm, maker) for arm in arms]
    max_budget = max(arm.budget for arm in arms)
    engine = new_engine(config, target, drafter, policies[0], max_slots=slots, max_budget=max_budget)
    requests, failed = to_requests(prompts, target.tokenizer, config)
    limits = {
        request.prompt_id: min(params.max_new_tokens, engine.max_length - len(request.token_ids))
        for request in requests
    }
    reference = Reference.load(config, target, params)
    rule = TieRule(target.dtype, near_tie)
    print(
        f"{config.target} in {target.dtype_name}: {len(requests)} prompts, up to {params.max_new_tokens} tokens, "
        f"{slots} at a time, temperature {params.temperature:g}, against transformers' generate",
        flush=True,
    )
    expected: dict[str, list[int]] = {}
    reports: list[ArmReport] = []
    for arm, policy in zip(arms, policies, strict=True):
        engine.policy = policy
        answers = list(answer_all(engine, requests, params))
        drafts = arm.method != BASELINE
        reports.append(audit_answers(arm.name, answers, reference, limits, rule, expected, drafts))
        print(render_report(reports[-1], target.tokenizer), flush=True)
    exit_code = report_failures(failed)
    if out is not None:
        settings = {"config": public_config(config), "sampling": asdict(params), "slots": slots, "near_tie": near_tie}
        settings |= {"dtype": target.dtype_name, "prompt_file": identity}
        settings |= {"target_fingerprint": target.fingerprint, "policy_fingerprint": learned.fingerprint}
        settings |= {"drafter_fingerprint": None if drafter is None else drafter.fingerprint}
        content = {"settings": settings, **about, "reports": [asdict(report) for report in reports]}
        write_aside(out, to_json(content))
    return 0 if exit_code == 0 and all(report.passed for report in reports) else 1


def render_report(report: ArmReport, tokenizer: Any) -> str:
    """What is printed about one method: a line of counts, then one for each difference."""
    num_ties = len(report.differences) - report.num_bugs
    mat = f", MAT {report.mat:.2f}" if report.mat is not None else ""
    verdict = "ok" if report.passed else "FAILED"
    lines = [
        f"{report.name}: {verdict}: {report.num_identical} of {report.num_prompts} prompts identical "
        f"({report.num_tokens} tokens{mat}), {num_ties} ties, {report.num_bugs} bugs"
    ]
    if report.is_vacuous:
        lines.append("  nothing was drafted, so nothing was tested")
    lines += [f"  no answer to {error}" for error in report.errors]
    lines += [f"  {_render_difference(difference, tokenizer)}" for difference in report.differences]
    return "\n".join(lines)


def _render_difference(difference: Difference, tokenizer: Any) -> str:
    names = [
        "the end" if token is None else f"{token} {tokenizer.decode([token])!r}"
        for token in (difference.reference_token, difference.method_token)
    ]
    kind = "BUG" if difference.kind is Kind.BUG else str(difference.kind)
    return (
        f"{kind}: {difference.prompt_id} at output token {difference.position}: generate gives {names[0]}, the method "
        f"{names[1]}, margin {difference.margin:.3g} (a tie up to {difference.allowed:.3g})"
    )
