"""The plots of a learning run, as PNG files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from graft_dist.trial import DIFFICULTIES, GainCurves
from jobs.budget_candidate import fixed
from jobs.training_report import Report

_NAMES = {"marginal": "DDTree", "tdes": "learned edges"}


def draw_plots(folder: Path, report: Report, curves: GainCurves) -> list[Path]:
    """Draw everything into `folder`, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Callable[[Any], None]] = {
        "loss": lambda axes: _loss(axes, report),
        "gain": lambda axes: _gain(axes, report),
        "mismatch": lambda axes: _mismatch(axes, report),
        "utility": lambda axes: _utility(axes, report, curves),
        "reliability": lambda axes: _reliability(axes, report),
        "cost": lambda axes: _cost(axes, report),
    }
    files = []
    for name, draw in drawn.items():
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        draw(figure.subplots())
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=120)
    return files


def _loss(axes: Any, report: Report) -> None:
    steps = [look.step for look in report.looks]
    axes.plot(steps, [look.held_out_kl for look in report.looks], "o-", label="held-out KL")
    axes.plot(steps[1:], [look.loss for look in report.looks[1:]], "s--", label="training loss (all terms)")
    axes.set(xlabel="step", ylabel="nats", title="Fitting the edge scorer", ylim=(0, None))
    axes.legend()


def _gain(axes: Any, report: Report) -> None:
    for scorer, name in _NAMES.items():
        rows = [report.row(fixed(scorer, budget).name) for budget in report.budgets]
        axes.plot(report.budgets, [row.mat for row in rows], "o-", label=name)
    axes.set(xlabel="budget (nodes)", ylabel="mean acceptance length", title="Gain by budget, held-out prompts")
    axes.legend()


def _mismatch(axes: Any, report: Report) -> None:
    """Figure 1b of the paper."""
    budget = 32 if 32 in report.budgets else report.budgets[-1]
    places = np.arange(len(report.tasks))
    for number, (scorer, name) in enumerate(_NAMES.items()):
        rates = [report.row(fixed(scorer, budget).name, task).mismatch_rate for task in report.tasks]
        axes.bar(places + 0.4 * number - 0.2, [100 * rate for rate in rates], 0.4, label=name)
    axes.set_xticks(places, report.tasks)
    axes.set(ylabel="mismatched rounds (%)", title=f"Parent-child mismatch by task, budget {budget}")
    axes.legend()


def _utility(axes: Any, report: Report, curves: GainCurves) -> None:
    """Figure 1c of the paper."""
    for name in [name for name in DIFFICULTIES if curves.num_rounds[name] > 0]:
        tokens = curves.tokens[name]
        utility = 1000 * tokens / report.costs[0].best.curve.table(len(tokens) - 1, curves.context_lengths[name])
        best = int(np.argmax(utility[1:])) + 1
        (line,) = axes.plot(np.arange(1, len(tokens)), utility[1:], label=f"{name} ({curves.num_rounds[name]} rounds)")
        axes.plot([best], [utility[best]], "o", color=line.get_color())
    axes.set(xlabel="budget (nodes)", ylabel="tokens/s", title="Utility by budget and difficulty of the round")
    axes.legend()


def _reliability(axes: Any, report: Report) -> None:
    scorer = report.choice.chosen.scorer
    for fit in report.choice.calibrations[scorer].fits:
        axes.plot(
            [one.predicted for one in fit.bins], [one.observed for one in fit.bins], "o-",
            label=f"{fit.name} (error {fit.error:.4f})",
        )  # fmt: skip
    axes.plot([0, 1], [0, 1], ":", color="grey")
    axes.set(xlabel="predicted", ylabel="observed", title=f"Chance that a node is accepted, {_NAMES[scorer]}")
    axes.legend()


def _cost(axes: Any, report: Report) -> None:
    for fit in report.costs[0].fits:
        top = max(report.max_budget, fit.curve.budgets[-1])
        style = "-" if fit is report.costs[0].best else ":"
        axes.plot(fit.curve.table(top), style, label=f"{fit.name} (error {fit.error_ms:.2f} ms)")
    axes.set(xlabel="budget (nodes)", ylabel="ms per round", title="What a round costs", ylim=(0, None))
    axes.legend()
