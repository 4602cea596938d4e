"""The edge scorers that an ablation compares, each with what it changes about the one that `jobs/train.py` fits."""

from __future__ import annotations

from dataclasses import dataclass

from graft_dist.edge_scorer import Reading


@dataclass(frozen=True, kw_only=True)
class ScorerVariant:
    """One way to score edges; the defaults are those of `jobs/train.py`."""

    name: str
    what: str  # for people
    losses: tuple[float, float, float] = (1.0, 0.03, 0.1)  # weights of the KL, the pair and the edge term
    every_parent: bool = False
    has_gate: bool = False
    reliance: bool = False
    reading: Reading = "conditional"
    fitted: tuple[str, ...] | None = None  # names of the parameters that are fitted; None: all
    fitted_as: str | None = None  # the variant whose weights it reads in another way


VARIANTS = (
    ScorerVariant(
        name="depth",
        what="the drafter's probabilities, each depth's sharpened or flattened by one number",
        reliance=True,
        fitted=("reliance",),
    ),
    ScorerVariant(name="pair", what="parent, child and depth: the paper's scorer, conditional scores"),
    ScorerVariant(
        name="pair-sum", what="the same weights, scores as the paper prints them", reading="sum", fitted_as="pair"
    ),
    ScorerVariant(name="pair-relying", what="pair, and the drafter's probabilities by depth and parent", reliance=True),
    ScorerVariant(name="gated", what="pair, gated by the drafter's hidden state", has_gate=True),
    ScorerVariant(name="gated-relying", what="both", has_gate=True, reliance=True),
    ScorerVariant(name="kl", what="pair, KL alone", losses=(1.0, 0.0, 0.0)),
    ScorerVariant(name="kl-sum", what="the same weights, scores as printed", reading="sum", fitted_as="kl"),
    ScorerVariant(name="kl+pair", what="pair, KL + 0.03 pair", losses=(1.0, 0.03, 0.0)),
    ScorerVariant(name="kl+edge", what="pair, KL + 0.1 edges", losses=(1.0, 0.0, 0.1)),
    ScorerVariant(name="kl+3pair", what="pair, KL + 0.1 pair", losses=(1.0, 0.1, 0.0)),
    ScorerVariant(name="kl+3edge", what="pair, KL + 0.3 edges", losses=(1.0, 0.0, 0.3)),
    ScorerVariant(name="edge", what="pair, edges alone; of its looks the least KL", losses=(0.0, 0.0, 1.0)),
    ScorerVariant(name="every-parent", what="pair, KL also at verified parents off the path", every_parent=True),
)
"""In the order in which they are fitted; beside them stands the drafter's own scorer, "marginal"."""
