"""What a learning run found out: the table for people, the same as JSON, and the numbers that a version is tagged with.

Everything is judged on the test split, which nothing was fitted or chosen on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graft_dist.learning.saba import CalibrationFits, CostFits, GainFit
from graft_dist.learning.tdes import Evaluation
from graft_dist.replay import ALL_TASKS
from graft_dist.trial import Comparison, Trial, TrialRow
from jobs.budget_candidate import CADDTREE, PLAIN, REPORTED_BUDGETS, Candidate, describe, fixed

_BUDGET_HEADER = f"{'budget':<8}{'MAT':>8}{'before':>8}{'change':>8}{'mismatch':>10}{'before':>8}{'change':>8}"


@dataclass(frozen=True)
class Choice:
    """What was chosen on the tune split, and by which numbers."""

    chosen: Candidate
    ddtree: Candidate  # at its best fixed budget there
    tried: Sequence[Candidate]
    rows: Sequence[TrialRow]  # of all that was tried, all tasks together
    calibrations: dict[str, CalibrationFits]  # by scorer
    gains: dict[str, GainFit]


@dataclass(frozen=True)
class Report:
    """The judgement."""

    choice: Choice
    looks: Sequence[Evaluation]
    costs: Sequence[CostFits]  # by hardware; decoders are judged by the first one's
    rows: Sequence[TrialRow]  # every arm, every task; test split
    comparisons: Sequence[Comparison]  # of the chosen one, every task
    max_budget: int

    def row(self, arm: str, task: str = ALL_TASKS) -> TrialRow:
        """One arm's row."""
        return next(row for row in self.rows if (row.arm, row.task) == (arm, task))

    @property
    def tasks(self) -> list[str]:
        """All tasks together, then each."""
        return list(dict.fromkeys(row.task for row in self.rows))

    @property
    def budgets(self) -> list[int]:
        """Fixed budgets that are reported."""
        return [budget for budget in REPORTED_BUDGETS if budget <= self.max_budget] or [self.max_budget]

    @property
    def metrics(self) -> dict[str, float]:
        """What a version is judged by at a glance."""
        chosen, ddtree = self.row(self.choice.chosen.name), self.row(self.choice.ddtree.name)
        found = {
            "test_mat": chosen.mat,
            "test_mismatch_rate": chosen.mismatch_rate,
            "test_mean_budget": chosen.mean_budget,
            "test_tokens_per_s": chosen.tokens_per_s,
            "test_speedup": chosen.speedup,
            "test_rounds": float(chosen.num_rounds),
            "ddtree_tokens_per_s": ddtree.tokens_per_s,
            "caddtree_tokens_per_s": self.row(CADDTREE).tokens_per_s,
            "held_out_kl": min(look.held_out_kl for look in self.looks),
            "held_out_kl_before": self.looks[0].held_out_kl,
        }
        for comparison in self.comparisons:
            if comparison.task == ALL_TASKS:
                name = "caddtree" if comparison.baseline == CADDTREE else "ddtree"
                for part in ("ratio", "low", "high"):
                    found[f"over_{name}_{part}"] = getattr(comparison, part)
        for budget in self.budgets:
            for scorer, name in (("tdes", "tdes"), ("marginal", "ddtree")):
                row = self.row(fixed(scorer, budget).name)
                found |= {f"{name}_mat_{budget}": row.mat, f"{name}_mismatch_rate_{budget}": row.mismatch_rate}
        return found

    @property
    def headline(self) -> str:
        """One sentence."""
        over = next((each for each in self.comparisons if each.task == ALL_TASKS and each.baseline != CADDTREE), None)
        if over is None:  # it is compared with nothing, being the baseline itself
            return f"{describe(self.choice.chosen)}: DDTree, which nothing that was learned beats"
        return (
            f"{describe(self.choice.chosen)}; predicted {over.ratio:.3f} ({over.low:.3f} to {over.high:.3f}) times the "
            f"tokens per second of DDTree with {self.choice.ddtree.fixed_budget} nodes, on held-out prompts"
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, without the fitted models themselves."""
        choice = self.choice
        return {
            "chosen": {"name": choice.chosen.name, "what": describe(choice.chosen)},
            "ddtree": choice.ddtree.name,
            "metrics": self.metrics,
            "test": [asdict(row) for row in self.rows],
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
            "tune": [asdict(row) for row in choice.rows],
            "calibration": {
                scorer: [
                    {
                        "name": fit.name,
                        "log_loss": fit.log_loss,
                        "error": fit.error,
                        "bins": [asdict(b) for b in fit.bins],
                    }
                    for fit in fits.fits
                ]
                for scorer, fits in choice.calibrations.items()
            },
            "gain": {
                scorer: {
                    "error": fit.error,
                    "constant_error": fit.constant_error,
                    "num_rounds": fit.num_rounds,
                    "num_left_out": choice.calibrations[scorer].num_left_out,
                    "curve": fit.curve,
                    **asdict(fit.gain),
                }
                for scorer, fit in choice.gains.items()
            },
            "cost": _cost_json(self.costs[0]),
            "costs_elsewhere": [_cost_json(fits) for fits in self.costs[1:]],
            "fit": [asdict(look) for look in self.looks],
        }

    def as_table(self) -> str:
        """The judgement as text."""
        names = [PLAIN, self.choice.ddtree.name, CADDTREE, self.choice.chosen.name]
        width = max(len(name) for name in names) + 2
        lines = [
            f"chosen on the tune split: {self.choice.chosen.name}: {describe(self.choice.chosen)}",
            f"cost of rounds: {self.costs[0].best.name} ({self.costs[0].hardware})",
            "",
            f"{'task':<12}{'decoder':<{width}}{'rounds':>8}{'MAT':>7}{'mismatch':>10}{'budget':>8}{'tokens/s':>10}"
            f"{'speedup':>9}",
        ]
        for task in self.tasks:
            for name in dict.fromkeys(names):
                row = self.row(name, task)
                lines.append(
                    f"{task:<12}{name:<{width}}{row.num_rounds:>8}{row.mat:>7.3f}{row.mismatch_rate:>10.1%}"
                    f"{row.mean_budget:>8.1f}{row.tokens_per_s:>10.1f}{row.speedup:>9.3f}"
                )
            for each in self.comparisons:
                if each.task == task:
                    lines.append(
                        f"{task:<12}{each.arm} over {each.baseline}: {each.ratio:.3f} "
                        f"({each.low:.3f} to {each.high:.3f})"
                    )
        lines += ["", "learned edges against the drafter's own, fixed budgets:", _BUDGET_HEADER]
        for budget in self.budgets:
            ours, theirs = self.row(fixed("tdes", budget).name), self.row(fixed("marginal", budget).name)
            mismatch = ours.mismatch_rate / theirs.mismatch_rate - 1 if theirs.mismatch_rate else 0.0
            lines.append(
                f"{budget:<8}{ours.mat:>8.3f}{theirs.mat:>8.3f}{ours.mat / theirs.mat - 1:>+8.1%}"
                f"{ours.mismatch_rate:>10.1%}{theirs.mismatch_rate:>8.1%}{mismatch:>+8.1%}"
            )
        return "\n".join(lines)


def _cost_json(costs: CostFits) -> dict[str, Any]:
    return {
        "hardware": costs.hardware,
        "best": costs.best.name,
        "num_rounds": costs.num_rounds,
        "num_left_out": costs.num_left_out,
        "fits": [{"name": fit.name, "error_ms": fit.error_ms, **asdict(fit.curve)} for fit in costs.fits],
    }


def report_of(
    trial: Trial, choice: Choice, looks: Sequence[Evaluation], costs: Sequence[CostFits], max_budget: int, seed: int
) -> Report:
    """Judge a choice by a trial on the test split."""
    names = [candidate.name for candidate in choice.tried]
    baselines = [name for name in (choice.ddtree.name, CADDTREE) if name != choice.chosen.name]
    return Report(
        choice=choice,
        looks=looks,
        costs=costs,
        rows=[trial.row(name, task) for task in trial.tasks for name in names],
        comparisons=[
            trial.compare(choice.chosen.name, baseline, task, seed) for task in trial.tasks for baseline in baselines
        ],
        max_budget=max_budget,
    )
