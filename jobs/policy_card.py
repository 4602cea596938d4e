"""The card of a policy that ships with the package: Markdown whose every figure names the row it was taken from.

The rows are a file of their own, so that `bench/verify.py` finds any figure that is not what the run's report says.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from graft_dist.errors import ConfigError
from graft_dist.policy import GraftPolicy
from graft_dist.replay import ALL_TASKS
from jobs.budget_candidate import CADDTREE, PLAIN, REPORTED_BUDGETS, fixed

Row = dict[str, Any]

_COLUMNS = ("mat", "mismatch_rate", "mean_budget", "tokens_per_s", "speedup")
_SCORERS = ("marginal", "tdes")

_LIMITS = """## Limits

The numbers are a replay at recorded positions, under one machine's costs; decoding itself is measured under `bench/`.
On other hardware the cost of a round is measured where the policy is used. Another target or drafter is refused."""


@dataclass(frozen=True)
class LearnedRun:
    """What a learning run left in its folder."""

    policy: GraftPolicy
    report: Mapping[str, Any]  # `Report.as_json`, and which policy it is about
    run: Mapping[str, Any]  # run.json

    @classmethod
    def read(cls, folder: Path) -> LearnedRun:
        """Raises `GraftError` unless the run came to its end."""
        policy = GraftPolicy.load(folder / "policy")
        try:
            report, run = (json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("report", "run"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} is not the folder of a learning run that has ended ({error})") from error
        if report.get("policy") != policy.fingerprint:
            raise ConfigError(f"{folder}: the report is about another policy than the one beside it")
        return cls(policy, report, run)

    @property
    def tasks(self) -> list[str]:
        """All tasks together, then each."""
        return list(dict.fromkeys(row["task"] for row in self.report["test"]))

    @property
    def decoders(self) -> dict[str, str]:
        """The report's arms that the card compares, by the names it gives them."""
        chosen, ddtree = self.report["chosen"]["name"], self.report["ddtree"]
        named = {"plain": PLAIN, "ddtree": ddtree, "caddtree": CADDTREE}
        return named if chosen == ddtree else {**named, "chosen": chosen}

    @property
    def budgets(self) -> list[int]:
        """Fixed budgets that both scorers were judged with."""
        arms = {row["arm"] for row in self.report["test"]}
        return [budget for budget in REPORTED_BUDGETS if fixed("tdes", budget).name in arms]

    def rows(self) -> list[Row]:
        """Every number that the card shows, and what else was tried: other budgets, other models of costs."""
        found = [
            {"decoder": name, "task": row["task"], **{column: row[column] for column in _COLUMNS}}
            for name, arm in self.decoders.items()
            for row in self.report["test"]
            if row["arm"] == arm
        ]
        for each in self.report["comparisons"]:
            numbers = {name: each[name] for name in ("ratio", "low", "high")}
            found.append({"decoder": f"chosen over {_rival(each)}", "task": each["task"], **numbers})
        whole = {row["arm"]: row for row in self.report["test"] if row["task"] == ALL_TASKS}
        for budget in self.budgets:
            both = {scorer: whole[fixed(scorer, budget).name] for scorer in _SCORERS}
            numbers = {f"{scorer}_{name}": row[name] for scorer, row in both.items() for name in _COLUMNS}
            found.append({"decoder": f"budget {budget}", "task": ALL_TASKS, **numbers})
        found += [
            {"decoder": arm.replace(",", ""), "task": ALL_TASKS, **{column: row[column] for column in _COLUMNS}}
            for arm, row in whole.items()
            if arm not in (PLAIN, CADDTREE)
        ]
        found += [
            {"decoder": f"cost {fit['name']}", "task": ALL_TASKS, "error_ms": fit["error_ms"]}
            for fit in self.report["cost"]["fits"]
        ]
        return [*found, {"decoder": "fit", "task": ALL_TASKS, **self._fit()}]

    def _fit(self) -> Row:
        looks, costs = self.report["fit"], self.report["cost"]
        calibrations = self.report["calibration"]["marginal" if self.policy.tdes is None else "tdes"]
        return {
            "kl_before": looks[0]["held_out_kl"],
            "kl": min(look["held_out_kl"] for look in looks),
            "calibration_error": min(calibrations, key=lambda fit: fit["log_loss"])["error"],
            "cost_error_ms": next(fit["error_ms"] for fit in costs["fits"] if fit["name"] == costs["best"]),
        }


def _rival(comparison: Mapping[str, Any]) -> str:
    return "caddtree" if comparison["baseline"] == CADDTREE else "ddtree"


def policy_card(run: LearnedRun, num_bytes: int, source: str, about: str) -> str:
    """The card.

    Args:
        num_bytes: size of the weights.
        source: the file of `run.rows()`, as `bench/verify.py` finds it.
        about: Markdown that only people know: on the prompts, and how their rounds were collected.
    """
    parts = [_head(run, num_bytes), _data(run, about), _recipe(run), _quality(run, source), _LIMITS]
    return "\n\n".join(parts) + "\n"


def _head(run: LearnedRun, num_bytes: int) -> str:
    policy = run.policy
    lines = {
        "decoder": run.report["chosen"]["what"],
        "edge scorer": _scorer(policy, num_bytes),
        "trees": f"up to {policy.max_budget} nodes, {policy.num_candidates} candidates a depth",
        "costs known of": "; ".join(sorted(policy.cost_curves)),
        "target": f"`{policy.target_fingerprint[:16]}`",
        "drafter": f"`{policy.drafter_fingerprint}`",
        "policy": f"`{policy.fingerprint}`",
        "software": policy.software,
        "licence": "Apache-2.0",
    }
    return "\n".join(
        [
            f"# Policy of the target {policy.slug}",
            "",
            "What this project's `jobs/train.py` learned for this target and its drafter: how edges of draft trees are",
            "scored, and how large trees get. It decides how fast text comes out, never which.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in lines.items()),
        ]
    )


def _scorer(policy: GraftPolicy, num_bytes: int) -> str:
    if policy.tdes is None:
        return "none: the drafter's own probabilities"
    shape = policy.tdes.config
    gate = f", gated by hidden states at rank {shape.gate_rank}" if shape.gate_rank > 0 else ""
    relying = ", weighing the drafter's own probabilities" if shape.reliance else ""
    size = sum(parameter.numel() for parameter in policy.tdes.parameters())
    return f"width {shape.width}{gate}{relying}; {policy.reading} scores; {size:,} parameters, {num_bytes:,} bytes"


def _data(run: LearnedRun, about: str) -> str:
    data = run.policy.data
    return (
        f"## Data\n\n{about.strip()}\n\n{data.num_sequences:,} sequences with {data.num_decoded_rounds:,} decoded and "
        f"{data.num_dense_rounds:,} dense rounds; {data.num_held_out_rounds:,} of the rounds were kept from the edge\n"
        "scorer, to fit and choose budgets by and to judge. Prompts are split by a hash of their words."
    )


def _recipe(run: LearnedRun) -> str:
    made = run.run["provenance"]
    spent = datetime.fromisoformat(run.report["finished_at"]) - datetime.fromisoformat(made["started_at"])
    minutes = round(spent.total_seconds() / 60)
    took = f"{minutes} minute{'' if minutes == 1 else 's'}"
    resumed = ", interruptions included," if run.report.get("is_resumed") else ""
    settings = "\n".join(f"{name}: {value}" for name, value in run.run["settings"].items() if value is not None)
    return (
        f"## Recipe\n\n```sh\n{shlex.join(['python', *made['command']])}\n```\n\n"
        f"{took} from start to end{resumed} on {made['machine']['cpu']}, at commit "
        f"`{made['commit']}`, with these settings:\n\n```yaml\n{settings}\n```"
    )


def _quality(run: LearnedRun, source: str) -> str:
    rows = {f"{row['decoder']} {row['task']}": row for row in run.rows()}
    parts = [
        "## Quality\n\nOn prompts that nothing was fitted to or chosen by: recorded rounds replayed, tokens per\n"
        "second under the fitted cost of a round. `ddtree` has the fixed budget that was best on other prompts.",
        _decoder_table(run, rows, source),
        *(_comparison(rows, rival, source) for rival in ("ddtree", "caddtree")),
        _budget_table(run, rows, source),
        _fit_paragraph(rows, source),
    ]
    return "\n\n".join(part for part in parts if part)


def _decoder_table(run: LearnedRun, rows: Mapping[str, Row], source: str) -> str:
    names = [f"{decoder} {task}" for task in run.tasks for decoder in run.decoders]
    lines = [
        f"| {name} | {row['mat']:.2f} | {100 * row['mismatch_rate']:.1f} % | {row['mean_budget']:.1f} | "
        f"{row['tokens_per_s']:.1f} | {row['speedup']:.2f} |"
        for name, row in ((name, rows[name]) for name in names)
    ]
    header = "| decoder, task | acceptance length | mismatched rounds | nodes | tokens/s | speed-up |"
    return _table(source, names, _COLUMNS, header, lines)


def _budget_table(run: LearnedRun, rows: Mapping[str, Row], source: str) -> str:
    if not run.budgets:
        return ""
    names = [f"budget {budget} {ALL_TASKS}" for budget in run.budgets]
    columns = [f"{scorer}_{name}" for name in ("mat", "mismatch_rate") for scorer in _SCORERS]
    lines = [
        f"| {name} | {row['marginal_mat']:.2f} | {row['tdes_mat']:.2f} | {100 * row['marginal_mismatch_rate']:.1f} % | "
        f"{100 * row['tdes_mismatch_rate']:.1f} % |"
        for name, row in ((name, rows[name]) for name in names)
    ]
    header = "| fixed budget | acceptance length, DDTree | learned edges | mismatched rounds, DDTree | learned edges |"
    return _table(source, names, columns, header, lines)


def _table(source: str, names: list[str], columns: list[str] | tuple[str, ...], header: str, lines: list[str]) -> str:
    marker = f"<!-- figures: {source}; rows: {', '.join(names)}; columns: {', '.join(columns)} -->"
    return "\n".join([marker, "", header, "|---" * (1 + len(columns)) + "|", *lines])


def _comparison(rows: Mapping[str, Row], rival: str, source: str) -> str:
    name = f"chosen over {rival} {ALL_TASKS}"
    if name not in rows:
        return ""
    row = rows[name]
    return (
        f"<!-- figures: {source}; values: {name} ratio, {name} low, {name} high -->\n\nOver {rival}, all tasks: "
        f"{row['ratio']:.3f} times the tokens per second ({row['low']:.3f} to {row['high']:.3f} when prompts are drawn "
        "again)."
    )


def _fit_paragraph(rows: Mapping[str, Row], source: str) -> str:
    name = f"fit {ALL_TASKS}"
    row = rows[name]
    values = ", ".join(f"{name} {column}" for column in ("kl_before", "kl", "calibration_error", "cost_error_ms"))
    return (
        f"<!-- figures: {source}; values: {values} -->\n\nDivergence from the target's distribution on prompts that\n"
        f"the edge scorer was not fitted to: {row['kl_before']:.3f} nats before, {row['kl']:.3f} after. Chances of\n"
        f"nodes are off by {row['calibration_error']:.4f} on average, costs of rounds by {row['cost_error_ms']:.2f} ms."
    )
