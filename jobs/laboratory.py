"""Where decoders are tried: a data set's recorded rounds, edge scorers, and what a round costs; and the choice of one.

Budgets are fitted to the tune split, of which scorers have seen only where to stop. Each half of its prompts is tried
with what the other half taught, so that no decoder is compared on rounds that its weights were fitted to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from graft_dist.cost_curve import CostCurve
from graft_dist.edge_scorer import EdgeScorer
from graft_dist.errors import StoreError
from graft_dist.learning.saba import (
    CalibrationFits,
    CostFits,
    GainFit,
    Observations,
    fit_calibrations,
    fit_costs,
    fit_gain,
    join_observations,
    observe,
)
from graft_dist.prompts import LearningSplit
from graft_dist.replay import RecordedRounds, SequenceName, walk_rounds
from graft_dist.trial import GainCurves, Trial, gain_curves, of_sequences, run_trial, thinned
from jobs.budget_candidate import CADDTREE, PLAIN, Candidate, baselines, fixed_candidates, learned_candidates
from jobs.learning_data import LearningData, decoded_rounds
from jobs.training_report import Choice
from storage import connect
from storage.learning_rounds import Timed, timed_hardware, timed_rounds

_ROUNDS_OF_A_BUDGET = (30, 5)
"""At least so many a budget must have to tell its cost; if no rounds have, then so many.

Otherwise the few rounds that the last sequences of a batch were alone in would speak for all.
"""

_MOST_ROUNDS = 50_000  # that budgets are fitted to: some hundred bytes each, and more change nothing


class Laboratory:
    """The recorded rounds of one data set, and the scorers to try on them.

    Args:
        store, slug: where the rounds are, and of which target.
        scorers: by name; `choose` and `gain_curves` need "marginal" among them.
        cost: what rounds cost, by which decoders are judged.
        max_budget: nodes of the trees that are built, and the most that a policy may choose; CaDDTree has its own.
    """

    def __init__(
        self,
        data: LearningData,
        store: str,
        slug: str,
        scorers: Mapping[str, EdgeScorer],
        cost: CostCurve,
        max_budget: int,
    ) -> None:
        self._data, self._store, self._slug = data, store, slug
        self.scorers, self.cost, self.max_budget = scorers, cost, max_budget
        self._halves = data.halves("tune")

    def try_out(self, arms: Sequence[Candidate]) -> Trial:
        """Replay the test split's decoded rounds with several decoders."""
        return self._trial("test", self._data.prompt_of("test"), arms)

    def try_crosswise(self, arms: Sequence[Sequence[Candidate]]) -> Trial:
        """Replay the tune split's decoded rounds: each half with its own arms, which have the same names in both."""
        trial = Trial(self.cost)
        for half, own in zip(self._halves, arms, strict=True):
            trial.take_in(self._trial("tune", half, own))
        return trial

    def observations(self, scorer: str) -> list[Observations]:
        """What the rounds of each half of the tune split show of a scorer's trees; of too many, an even sample."""
        num_rounds = sum(sequence.num_decoded for sequence in self._data.splits["tune"])
        share = _MOST_ROUNDS / max(num_rounds, 1)
        parts: list[list[Observations]] = [[] for _ in self._halves]
        for rounds in self._rounds("tune"):
            for half, part in zip(self._halves, parts, strict=True):
                for own in of_sequences([thinned(rounds, share)], half):
                    walk = walk_rounds(own, self.scorers[scorer], self.max_budget)
                    part.append(observe(own, walk, self.max_budget))
        if not all(parts):
            raise StoreError("the tune split has drafted rounds of too few prompts to fit budgets to: collect more")
        return [join_observations(part) for part in parts]

    def gain_curves(self) -> GainCurves:
        """Tokens by budget and difficulty on the test split, of the drafter's own trees."""
        rounds = of_sequences(self._rounds("test"), self._data.prompt_of("test"))
        return gain_curves(rounds, self.scorers["marginal"], self.max_budget)

    def _rounds(self, split: LearningSplit) -> Iterator[RecordedRounds]:
        return decoded_rounds(self._data, self._store, self._slug, split)

    def _trial(self, split: LearningSplit, prompt_of: Mapping[SequenceName, str], arms: Sequence[Candidate]) -> Trial:
        made = [arm.arm(self.cost, self.max_budget) for arm in arms]
        return run_trial(self._rounds(split), prompt_of, self.scorers, made, self.cost, self.max_budget)


def recorded_costs(data: LearningData, store: str, slug: str) -> list[CostFits]:
    """What rounds cost, by hardware; first the one on which most rounds were alone, by which decoders are judged here.

    Where only batches were timed there, the curve is of a sequence's share: it judges policies here, and is kept under
    a name that no hardware has, so that who decodes with the policy measures rounds instead of believing it. Other
    hardware is kept only with enough rounds that were alone.
    """
    found: list[CostFits] = []
    with closing(connect(store, snapshot=data.snapshot)) as connection:
        asked = (connection, slug, data.drafter_fingerprint, data.shape)
        for hardware in timed_hardware(*asked):
            fits = _costs_on(partial(timed_rounds, *asked, hardware), is_first=not found)
            found += [] if fits is None else [fits]
    if not found:
        raise StoreError(
            "the decoded rounds have too few budgets to tell what others would cost: collect with "
            "--explore 0,4,8,16,32,64"
        )
    return found


def _costs_on(rounds: Callable[[], Iterator[Timed]], is_first: bool) -> CostFits | None:
    """What the rounds of one hardware tell, which `rounds` yields anew, the most telling first."""
    for min_rounds in _ROUNDS_OF_A_BUDGET if is_first else _ROUNDS_OF_A_BUDGET[:1]:
        for timed in rounds():
            if timed.batch_size > 1 and not is_first:
                break
            fits = fit_costs(timed.rounds, timed.label, min_rounds)
            if fits is not None:
                return replace(fits, run_ids=timed.run_ids)
    return None


def choose(lab: Laboratory) -> Choice:
    """Fit the budgets of every scorer, and take the decoder that gets most tokens per second on the tune split."""
    calibrations, gains = {}, {}
    for scorer in lab.scorers:
        observed = lab.observations(scorer)
        calibrations[scorer], gains[scorer] = fit_calibrations(observed), fit_gain(observed)
    tried = _candidates(lab, calibrations, gains)
    trial = lab.try_crosswise([_candidates(lab, calibrations, gains, half) for half in (0, 1)])
    rows = {candidate.name: trial.row(candidate.name) for candidate in tried}
    learned = [candidate for candidate in tried if candidate.name not in (PLAIN, CADDTREE)]
    ddtree = [candidate for candidate in learned if candidate.scorer == "marginal" and candidate.kind == "fixed"]
    chosen, best_ddtree = (
        max(some, key=lambda candidate: rows[candidate.name].tokens_per_s) for some in (learned, ddtree)
    )
    return Choice(chosen, best_ddtree, tried, list(rows.values()), calibrations, gains)


def _candidates(
    lab: Laboratory,
    calibrations: Mapping[str, CalibrationFits],
    gains: Mapping[str, GainFit],
    half: int | None = None,
) -> list[Candidate]:
    """Everything to try: with what all of the tune split taught, or for one half with what the other one did."""
    found = baselines()
    for scorer in lab.scorers:
        found += fixed_candidates(scorer, lab.max_budget)
        found += learned_candidates(scorer, calibrations[scorer], gains[scorer], half)
    return found


@dataclass(frozen=True)
class ScorerTrial:
    """One edge scorer with every kind of budget."""

    tune: Trial  # crosswise
    test: Trial
    arms: Sequence[Candidate]


def try_scorer(lab: Laboratory, scorer: str) -> ScorerTrial:
    """Fit one scorer's budgets, and try all of them on both splits."""
    observed = lab.observations(scorer)
    calibrations, gain = fit_calibrations(observed), fit_gain(observed)
    fixed = fixed_candidates(scorer, lab.max_budget)
    arms = [*fixed, *learned_candidates(scorer, calibrations, gain)]
    crossed = [[*fixed, *learned_candidates(scorer, calibrations, gain, half)] for half in (0, 1)]
    return ScorerTrial(lab.try_crosswise(crossed), lab.try_out(arms), arms)
