"""Decoding policies: which scorer and which budget a round uses.

All decoding methods are one round loop with another pair of these two. Owns the named methods, and `GraftPolicy`, the
learned pair as one saved artifact; scorers and budgets themselves live in `edge_scorer.py` and `budget.py`, the files
of an artifact in `policy_file.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch

from graft_dist import policy_file
from graft_dist.budget import (
    NO_LIMIT,
    AcceptanceGain,
    BudgetPolicy,
    ExploringBudget,
    FixedBudget,
    Form,
    GainModel,
    PowerGain,
    UtilityBudget,
)
from graft_dist.cost_curve import CostCurve
from graft_dist.edge_scorer import (
    EdgeScorer,
    MarginalScorer,
    Reading,
    TdesNetwork,
    TdesScorer,
    hidden_projection,
    unfold_projection,
)
from graft_dist.errors import PolicyError
from graft_dist.hardware import describe_hardware

if TYPE_CHECKING:
    from graft_dist.drafter import DFlashDrafter
    from graft_dist.target import Target

METHODS = ("plain", "chain", "ddtree")
"""The methods that need nothing measured."""

COSTED_METHODS = ("caddtree",)
"""The methods that need a cost curve."""

LEARNED_METHODS = ("graft", "graft-fixed")
"""The methods that need a `GraftPolicy`: with its own budgets, and its trees with a budget given by hand."""

ALL_METHODS = (*METHODS, *COSTED_METHODS, *LEARNED_METHODS)

CADDTREE_BUDGET = 256
"""Nodes of CaDDTree's trees, at most: its rule is to find its own end, so the cap is out of its way."""

BudgetKind = Literal["fixed", "saba", "marginal"]
"""How a learned policy chooses budgets: a constant, by `PowerGain`, by `AcceptanceGain`."""


@dataclass(frozen=True)
class DecodingPolicy:
    """How the trees of a round are scored and how large they get. Never changes what text comes out, only how fast."""

    name: str  # what reports and records call it
    scorer: EdgeScorer  # gives every edge its score
    budget: BudgetPolicy  # gives every slot its number of nodes
    num_candidates: int  # top candidates per depth that the drafter hands over
    max_depth: int | None = None  # deepest depth of a tree; None: the drafter's draft depth

    def __post_init__(self) -> None:
        if self.num_candidates < 1:
            raise PolicyError(f"num_candidates must be at least 1, not {self.num_candidates}")
        if self.max_depth is not None and self.max_depth < 1:
            raise PolicyError(f"max_depth must be at least 1 (or None for the draft depth), not {self.max_depth}")


def plain() -> DecodingPolicy:
    """Decode without a draft: budget 0, one token per round."""
    return DecodingPolicy("plain", MarginalScorer(), FixedBudget(0), num_candidates=1)


def chain(max_depth: int | None = None) -> DecodingPolicy:
    """DFlash's chain (arXiv 2602.06036): the top candidate of each depth, as deep as drafted or as `max_depth`."""
    budget = FixedBudget(NO_LIMIT if max_depth is None else max_depth)
    return DecodingPolicy("chain", MarginalScorer(), budget, num_candidates=1, max_depth=max_depth)


def ddtree(budget: int, num_candidates: int = 16) -> DecodingPolicy:
    """DDTree (arXiv 2604.12989): the `budget` best paths under the drafter's marginals, `S = sum of log q_d(c)`."""
    return DecodingPolicy("ddtree", MarginalScorer(), FixedBudget(budget), num_candidates)


def caddtree(cost: CostCurve, max_budget: int = CADDTREE_BUDGET, num_candidates: int = 16) -> DecodingPolicy:
    """CaDDTree: DDTree's trees, cut where the drafter's own probabilities no longer pay for a node.

    Every round is drafted: not drafting where it never pays is not part of that method.
    """
    budget = UtilityBudget(AcceptanceGain(), cost, max_budget, may_rest=False)
    return DecodingPolicy("caddtree", MarginalScorer(), budget, num_candidates)


def exploring(budgets: Sequence[int], seed: int, num_candidates: int = 16) -> DecodingPolicy:
    """DDTree's trees with a budget drawn per round from `budgets`: for collecting rounds, not for speed."""
    return DecodingPolicy("exploring", MarginalScorer(), ExploringBudget(tuple(budgets), seed), num_candidates)


def policy_for(
    method: str, *, budget: int | None, num_candidates: int, cost: CostCurve | None = None
) -> DecodingPolicy:
    """Return the policy of a named method.

    Args:
        method: one of `METHODS` or `COSTED_METHODS`.
        budget: nodes per round; `ddtree` needs it, `chain` takes it as its depth when given, `caddtree` as the most
            nodes, `plain` ignores it.
        num_candidates: candidates per depth for `ddtree` and `caddtree`.
        cost: what rounds cost on this hardware; `caddtree` needs it.

    Raises:
        PolicyError: an unknown method, a missing budget or cost curve, or impossible numbers.
    """
    if method == "plain":
        return plain()
    if method == "chain":
        return chain(max_depth=budget)
    if method == "ddtree":
        if budget is None:
            raise PolicyError("method 'ddtree' needs a budget: the number of draft nodes to verify per round")
        return ddtree(budget, num_candidates)
    if method == "caddtree":
        if cost is None:
            raise PolicyError("method 'caddtree' needs a cost curve: the milliseconds of a round by its budget")
        return (
            caddtree(cost, num_candidates=num_candidates) if budget is None else caddtree(cost, budget, num_candidates)
        )
    check_method(method)
    raise PolicyError(f"method {method!r} needs a learned policy")


def check_method(method: str) -> None:
    """Raise `PolicyError` unless a method of that name exists."""
    if method not in ALL_METHODS:
        raise PolicyError(f"unknown method {method!r}: choose one of {', '.join(ALL_METHODS)}")


@dataclass(frozen=True)
class DataIdentity:
    """What a policy was fitted on; enough to find the same rows again."""

    store: str  # the snapshot's name, such as "sequences@12+rounds@12"
    run_ids: tuple[str, ...]
    num_shards: int
    num_sequences: int
    num_decoded_rounds: int
    num_dense_rounds: int
    num_held_out_rounds: int  # of both kinds, of prompts that the edge scorer was not fitted on
    cost_run_ids: tuple[str, ...] = ()  # whose timed rounds the cost curves are of; empty: not written down


@dataclass(frozen=True, kw_only=True, eq=False)
class GraftPolicy:
    """A learned decoder of one target with one drafter: edge scorer, budgets and what they were learned from.

    On disk it is a folder of two files, see `policy_file`. Immutable: what decodes is made anew by `decoding_policy`.
    """

    slug: str
    """The target's short name, as in the store and the registry."""
    target_fingerprint: str
    drafter_fingerprint: str
    software: str
    """Versions that fitted it: "graft-dist 0.1.0, torch 2.13.0"."""
    tdes: TdesNetwork | None
    """The edge scorer for whole hidden states; None: the drafter's marginals."""
    reading: Reading = "conditional"
    kind: BudgetKind
    fixed_budget: int | None = None
    """Nodes per round of the kind "fixed"."""
    gain: GainModel | None
    """`PowerGain` for "saba", `AcceptanceGain` for "marginal"; None for "fixed"."""
    form: Form = "ratio"
    num_candidates: int = 16
    max_budget: int = 64
    """Most nodes of a tree; budgets are chosen from 0 up to this."""
    cost_curves: Mapping[str, CostCurve] = field(default_factory=dict)
    """By hardware, as `describe_hardware` names it."""
    data: DataIdentity
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.slug):
            raise PolicyError(f"a policy's slug is {self.slug!r}; allowed are letters, digits, '.', '_' and '-'")
        if self.kind not in get_args(BudgetKind) or self.form not in get_args(Form):
            raise PolicyError(f"a policy has budgets of kind {self.kind!r} and form {self.form!r}, which do not exist")
        if self.reading not in get_args(Reading):
            raise PolicyError(f"a policy has the reading {self.reading!r}; there are {', '.join(get_args(Reading))}")
        if not (self.num_candidates >= 1 and self.max_budget >= 1):
            raise PolicyError(
                f"a policy has {self.num_candidates} candidates and budgets up to {self.max_budget}; both must be at "
                "least 1"
            )
        wanted = {"fixed": type(None), "saba": PowerGain, "marginal": AcceptanceGain}[self.kind]
        if not isinstance(self.gain, wanted) or (self.fixed_budget is None) != (self.kind != "fixed"):
            raise PolicyError(
                f"a policy of kind {self.kind!r} does not go with a gain of type {type(self.gain).__name__} and the "
                f"fixed budget {self.fixed_budget}"
            )
        if self.fixed_budget is not None and not 0 <= self.fixed_budget <= self.max_budget:
            raise PolicyError(f"a policy's fixed budget is {self.fixed_budget}; allowed is 0 to {self.max_budget}")

    def save(self, folder: Path | str) -> Path:
        """Write the policy to `folder`, aside first and then in one step over an earlier one. Returns the folder.

        Raises:
            PolicyError: it cannot be written, or holds numbers that are not finite.
        """
        tensors = None if self.tdes is None else self.tdes.state_dict()
        if tensors is not None and not all(bool(values.isfinite().all()) for values in tensors.values()):
            raise PolicyError("the edge scorer's weights are not all finite: the policy is not saved")
        policy_file.write_folder(Path(folder), self._part, tensors)
        return Path(folder)

    @classmethod
    def load(cls, folder: Path | str) -> GraftPolicy:
        """Read a saved policy.

        Raises:
            PolicyError: one sentence, for anything that is missing, broken, unknown, misshapen or not finite.
        """
        part, network = policy_file.read_folder(Path(folder))
        try:
            return cls(
                slug=part.slug,
                target_fingerprint=part.target_fingerprint,
                drafter_fingerprint=part.drafter_fingerprint,
                software=part.software,
                tdes=network,
                reading="conditional" if part.scorer is None else part.scorer.reading,
                kind=part.kind,
                fixed_budget=part.fixed_budget,
                gain=None if part.gain is None else part.gain.build(),
                form=part.form,
                num_candidates=part.num_candidates,
                max_budget=part.max_budget,
                cost_curves={name: curve.build() for name, curve in part.cost_curves.items()},
                data=DataIdentity(**part.data.model_dump()),
                metrics=part.metrics,
            )
        except PolicyError as error:
            raise PolicyError(f"{Path(folder) / policy_file.JSON_NAME}: {error}") from error

    @property
    def fingerprint(self) -> str:
        """16 hex digits over everything that is saved."""
        return hashlib.sha256(policy_file.to_json(self._part).encode()).hexdigest()[:16]

    def check(self, target_fingerprint: str, drafter_fingerprint: str | None) -> None:
        """Refuse another target or drafter than the policy was fitted with, naming both sides.

        Raises:
            PolicyError: one sentence.
        """
        pairs = (
            ("target", self.target_fingerprint, target_fingerprint),
            ("drafter", self.drafter_fingerprint, drafter_fingerprint),
        )
        for what, ours, theirs in pairs:
            if theirs is None:
                raise PolicyError(f"the policy was fitted with {what} {ours[:12]}, and there is no {what}")
            if ours != theirs:
                raise PolicyError(
                    f"the policy was fitted with {what} {ours[:12]}, this {what} is {theirs[:12]}: use a policy that "
                    "was trained for it"
                )

    def scorer(self, embeddings: torch.Tensor) -> EdgeScorer:
        """Return the edge scorer over the target's token embeddings [V, E]; its tables take a moment to compute."""
        return MarginalScorer() if self.tdes is None else TdesScorer(self.tdes, embeddings, self.reading)

    def replay_scorer(self, embeddings: torch.Tensor, num_hidden: int) -> EdgeScorer:
        """Return the edge scorer for recorded rounds, whose hidden states are projected to `num_hidden` numbers."""
        if self.tdes is None or self.tdes.config.gate_rank == 0:
            return self.scorer(embeddings)
        if num_hidden == 0:
            raise PolicyError(
                "the policy's edge scorer reads hidden states, and these rounds were recorded without any: collect "
                "with --hidden"
            )
        projection = hidden_projection(self.drafter_fingerprint, self.tdes.config.hidden_size, num_hidden)
        return TdesScorer(unfold_projection(self.tdes, projection), embeddings, self.reading)

    def budget_policy(self, cost: CostCurve | None) -> BudgetPolicy:
        """Return a fresh budget policy, with its own running averages.

        Raises:
            PolicyError: the kind needs a cost curve, and there is none.
        """
        if self.fixed_budget is not None:
            return FixedBudget(self.fixed_budget)
        assert self.gain is not None
        if cost is None:
            known = ", ".join(sorted(self.cost_curves)) or "none"
            raise PolicyError(f"the policy needs a cost curve of this hardware, and knows the hardware: {known}")
        return UtilityBudget(self.gain, cost, self.max_budget, self.form)

    def cost_curve(self, dtype: str, device: torch.device | None = None) -> CostCurve | None:
        """Return the curve of the present hardware and threads; None where the policy has never seen it."""
        return self.cost_curves.get(describe_hardware(dtype, device))

    def decoding_policy(
        self, target: Target, drafter: DFlashDrafter | None, cost: CostCurve | None = None
    ) -> DecodingPolicy:
        """Return what an engine decodes with: a fresh object with a running state of its own.

        Args:
            target: gives embeddings and is checked.
            drafter: is checked, when there is one.
            cost: what rounds cost here; None takes the policy's own curve of the present hardware.

        Raises:
            PolicyError: another target or drafter, or hardware that the policy has no curve of.
        """
        self.check(target.fingerprint, self.drafter_fingerprint if drafter is None else drafter.fingerprint)
        if cost is None:
            cost = self.cost_curve(target.dtype_name, target.device)
        budget = self.budget_policy(cost)
        return DecodingPolicy("graft", self.scorer(target.embedding_weight), budget, self.num_candidates)

    @cached_property
    def _part(self) -> policy_file.PolicyPart:
        scorer = None
        if self.tdes is not None:
            names = [name for name in policy_file.ScorerPart.model_fields if name not in ("reading", "sha256")]
            scorer = policy_file.ScorerPart(
                **{name: getattr(self.tdes.config, name) for name in names},
                reading=self.reading,
                sha256=policy_file.tensors_sha256(self.tdes.state_dict()),
            )
        try:
            return policy_file.PolicyPart(
                schema_version=policy_file.SCHEMA_VERSION,
                slug=self.slug,
                target_fingerprint=self.target_fingerprint,
                drafter_fingerprint=self.drafter_fingerprint,
                software=self.software,
                scorer=scorer,
                kind=self.kind,
                fixed_budget=self.fixed_budget,
                gain=None if self.gain is None else policy_file.gain_part(self.gain),
                form=self.form,
                num_candidates=self.num_candidates,
                max_budget=self.max_budget,
                cost_curves={
                    name: policy_file.CostPart(**vars(curve)) for name, curve in sorted(self.cost_curves.items())
                },
                data=policy_file.DataPart(**vars(self.data)),
                metrics=dict(sorted(self.metrics.items())),
            )
        except ValueError as error:  # pydantic's
            first = " ".join(str(error).split())[:200]
            raise PolicyError(f"the policy cannot be written as JSON ({first})") from error


def shipped_policy(slug: str) -> Path | None:
    """Return the folder of the policy that comes with this package for a target; None where there is none."""
    folder = Path(str(resources.files("graft_dist") / "data" / "policies" / slug))
    return folder if (folder / policy_file.JSON_NAME).is_file() else None
