"""The decoders that a learning run tries: an edge scorer with a way to choose budgets, and what they have to beat."""

from __future__ import annotations

from dataclasses import dataclass

from graft_dist.budget import AcceptanceGain, BudgetPolicy, FixedBudget, Form, GainModel, PowerGain, UtilityBudget
from graft_dist.cost_curve import CostCurve
from graft_dist.learning.saba import CalibrationFits, GainFit
from graft_dist.policy import CADDTREE_BUDGET, BudgetKind
from graft_dist.trial import Arm

FIXED_BUDGETS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
REPORTED_BUDGETS = (8, 16, 32, 64)
PLAIN, CADDTREE = "plain", "caddtree"


@dataclass(frozen=True)
class Candidate:
    """One decoder to try; the fields are those of a `GraftPolicy`."""

    name: str
    scorer: str  # marginal or tdes
    kind: BudgetKind
    gain: GainModel | None = None
    form: Form = "ratio"
    fixed_budget: int | None = None
    may_rest: bool = True
    max_budget: int | None = None  # None: the same as all others

    def budget_policy(self, cost: CostCurve, max_budget: int) -> BudgetPolicy:
        """A fresh budget policy."""
        if self.fixed_budget is not None:
            return FixedBudget(self.fixed_budget)
        assert self.gain is not None
        return UtilityBudget(self.gain, cost, self.max_budget or max_budget, self.form, self.may_rest)

    def arm(self, cost: CostCurve, max_budget: int) -> Arm:
        """Itself as an arm of a trial."""
        return Arm(self.name, self.scorer, lambda: self.budget_policy(cost, max_budget), self.max_budget)


def fixed(scorer: str, budget: int) -> Candidate:
    """The same budget in every round; with the marginal scorer this is DDTree."""
    return Candidate(f"{scorer}, fixed {budget}", scorer, "fixed", fixed_budget=budget)


def baselines() -> list[Candidate]:
    """What is there without learning, but for DDTree's fixed budgets: plain decoding, and CaDDTree with its own cap."""
    caddtree = Candidate(CADDTREE, "marginal", "marginal", AcceptanceGain(), may_rest=False, max_budget=CADDTREE_BUDGET)
    return [Candidate(PLAIN, "marginal", "fixed", fixed_budget=0), caddtree]


def fixed_candidates(scorer: str, max_budget: int) -> list[Candidate]:
    """Fixed budgets up to the largest, which is one of them."""
    return [fixed(scorer, budget) for budget in sorted({*FIXED_BUDGETS, max_budget}) if budget <= max_budget]


def learned_candidates(
    scorer: str, calibrations: CalibrationFits, gain: GainFit, part: int | None = None
) -> list[Candidate]:
    """Budgets by expected gain and cost: raw and calibrated chances, and the state alone; the simpler first.

    With `part`, as they were fitted without that part of the rounds.
    """
    best = calibrations.best
    calibration = best.calibration if part is None else best.crossed[part]
    gains: dict[str, tuple[BudgetKind, GainModel]] = {"marginal, raw": ("marginal", AcceptanceGain())}
    if best.name != "raw":
        gains[f"marginal, {best.name}"] = ("marginal", AcceptanceGain(calibration))
    gains["saba"] = ("saba", gain.gain if part is None else gain.crossed[part])
    forms: tuple[Form, ...] = ("ratio", "price")
    return [
        Candidate(f"{scorer}, {name}, {form}", scorer, kind, model, form)
        for name, (kind, model) in gains.items()
        for form in forms
    ]


def describe(candidate: Candidate) -> str:
    """What a choice means, for people."""
    scorer = "the learned edge scorer" if candidate.scorer == "tdes" else "the drafter's own probabilities"
    if candidate.fixed_budget is not None:
        return f"{scorer}, {candidate.fixed_budget} nodes in every round"
    by = "the state of the round" if isinstance(candidate.gain, PowerGain) else "each node's chance of being accepted"
    return f"{scorer}, budgets by {by} ({candidate.form} form)"
