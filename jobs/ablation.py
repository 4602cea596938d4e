r"""Compare edge scorers, losses, readings and budgets on one store: what does each part of a policy bring?

    python jobs/ablation.py --config FILE --store DIR --out DIR

Every variant of `jobs/scorer_variant.py` is fitted to the same rounds in this process, and replayed with every kind of
budget on the same held-out prompts. Run again it goes on with the variants that are missing. DIR gets rows.jsonl, a row
for each variant, budget and task, summary.jsonl, a row for each variant, and the same as tables in summary.md.
Exit codes: 0 all variants are done; 2 the arguments or the store cannot work, in one sentence; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: the folder on the path is jobs/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from graft_dist.config import TargetConfig, load_config
from graft_dist.edge_scorer import EdgeScorer, MarginalScorer, TdesScorer
from graft_dist.learning.tdes import TdesTraining
from graft_dist.replay import ALL_TASKS
from graft_dist.target import read_embeddings
from jobs.arguments import count, run_job, whole_number
from jobs.budget_candidate import REPORTED_BUDGETS
from jobs.laboratory import Laboratory, recorded_costs, try_scorer
from jobs.learning_data import LearningData, open_snapshot, read_learning_data
from jobs.out_file import write_aside
from jobs.pinned_run import PinnedRun, config_settings
from jobs.scorer_training import Placement, ScorerPlan, ScorerPlanner, fit_scorer
from jobs.scorer_variant import VARIANTS, ScorerVariant

MARGINAL = ScorerVariant(name="marginal", what="the drafter's own probabilities: DDTree, CaDDTree")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class AblationRequest:
    """What to compare, and on what."""

    config: TargetConfig
    store: str
    out: Path
    training: TdesTraining
    gate_rank: int  # 0: no gated scorers, and rounds without hidden states are used too
    max_budget: int
    threads: int
    every_prompt: bool
    min_rounds: int

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the result."""
        return {
            **asdict(self.training),
            "gate_rank": self.gate_rank,
            "max_budget": self.max_budget,
            "every_prompt": self.every_prompt,
            "variants": [asdict(variant) for variant in self.variants],
            **config_settings(self.config),
        }

    @property
    def variants(self) -> list[ScorerVariant]:
        """The drafter's own scorer, then everything that can be fitted."""
        return [MARGINAL, *(variant for variant in VARIANTS if self.gate_rank > 0 or not variant.has_gate)]


def say(line: str) -> None:
    """Print a line at once, so that a log can be followed."""
    print(f"ablation: {line}", flush=True)


def run(request: AblationRequest) -> int:
    """Fit and judge what is missing, then write the tables; returns the exit code 0.

    Raises a `GraftError`, in one sentence, when the request cannot be carried out.
    """
    torch.set_num_threads(request.threads)
    pinned = PinnedRun.open(request.out, request.settings, request.store)
    data = read_learning_data(
        request.config,
        request.store,
        open_snapshot(request.store, pinned.versions),
        every_prompt=request.every_prompt,
        min_rounds=request.min_rounds,
        needs_hidden=request.gate_rank > 0,
    )
    pinned.keep(data.snapshot, data.drafter_fingerprint)
    for split in data.splits:
        say(f"{split}: {len(set(data.prompt_of(split).values()))} prompts, {data.num_rounds(split)} rounds")
    ablation = _Ablation(request, data, pinned.identity)
    started, missing = time.monotonic(), [one for one in request.variants if not ablation.file(one).exists()]
    for number, variant in enumerate(missing, start=1):
        rows = ablation.judge(variant)
        write_aside(ablation.file(variant), _lines(rows))
        left = (time.monotonic() - started) / number * (len(missing) - number)
        say(f"{variant.name}: {_headline(rows)}; {number} of {len(missing)}, about {left / 60:.0f} min left")
    rows = [json.loads(line) for one in request.variants for line in ablation.file(one).read_text("utf-8").splitlines()]
    write_aside(request.out / "rows.jsonl", _lines(rows))
    summed = sums(rows, request.variants)
    write_aside(request.out / "summary.jsonl", _lines(summed))
    write_aside(request.out / "summary.md", summary(summed, request.variants))
    shutil.rmtree(request.out / "lessons", ignore_errors=True)  # gigabytes that nobody reads again
    pinned.release()
    say(f"{len(rows)} rows and the tables are in {request.out}")
    return 0


class _Ablation:
    """One store's rounds, on which every variant is fitted and judged alike."""

    def __init__(self, request: AblationRequest, data: LearningData, identity: str) -> None:
        self.request, self.data, self._identity = request, data, identity
        config = request.config
        self._embeddings = read_embeddings(config.target, revision=config.revision)
        self._costs, *_ = recorded_costs(data, request.store, config.slug)
        self._planner = ScorerPlanner(config, request.store, data, self._embeddings, request.threads)

    def file(self, variant: ScorerVariant) -> Path:
        """Where a variant's rows are kept."""
        return self.request.out / variant.name / "rows.jsonl"

    def judge(self, variant: ScorerVariant) -> list[Row]:
        """Rows of every budget and task on the test split, with what was seen of them on the tune split."""
        self.file(variant).parent.mkdir(exist_ok=True)
        request = self.request
        scorer, kl = self._scorer(variant)
        lab = Laboratory(
            self.data, request.store, request.config.slug, {variant.name: scorer}, self._costs.best.curve,
            request.max_budget,
        )  # fmt: skip
        trial = try_scorer(lab, variant.name)
        return [
            {
                "variant": variant.name,
                "budget": arm.name.removeprefix(f"{variant.name}, "),
                "kind": arm.kind,
                **{key: value for key, value in asdict(trial.test.row(arm.name, task)).items() if key != "arm"},
                "tune_tokens_per_s": trial.tune.row(arm.name).tokens_per_s,
                "held_out_kl": kl,
            }
            for arm in trial.arms
            for task in trial.test.tasks
        ]

    def _scorer(self, variant: ScorerVariant) -> tuple[EdgeScorer, float | None]:
        """The scorer, and the KL that its fit came to."""
        if variant is MARGINAL:
            return MarginalScorer(), None
        if variant.fitted_as is not None:
            variant = replace(next(one for one in VARIANTS if one.name == variant.fitted_as), reading=variant.reading)
        network, looks = fit_scorer(self._plan(variant), Placement(0, None), self._embeddings)
        return TdesScorer(network, self._embeddings, variant.reading), min(look.held_out_kl for look in looks)

    def _plan(self, variant: ScorerVariant) -> ScorerPlan:
        request, (kl, pair, edge) = self.request, variant.losses
        plan = self._planner.plan(
            request.out / variant.name,
            f"{self._identity} {variant.name}",
            replace(
                request.training, kl_weight=kl, pair_weight=pair, edge_weight=edge, every_parent=variant.every_parent
            ),
            gate_rank=request.gate_rank if variant.has_gate else 0,
            reliance=variant.reliance,
        )
        # All variants learn from the same lessons.
        lessons = request.out / "lessons" / self.data.drafter_fingerprint
        return replace(plan, lessons=lessons, fitted=variant.fitted)


def _lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _headline(rows: Sequence[Row]) -> str:
    chosen = max((row for row in rows if row["task"] == ALL_TASKS), key=lambda row: row["tune_tokens_per_s"])
    return f"best with {chosen['budget']}: MAT {chosen['mat']:.2f}, {chosen['tokens_per_s']:.1f} tokens/s"


def sums(rows: Sequence[Row], variants: Sequence[ScorerVariant]) -> list[Row]:
    """A row for each variant, all tasks together: KL, MAT and mismatches by fixed budget, tokens per second by budget.

    Of the fixed budgets, and of the calibrations, the one that was best on the tune split; None where a kind of budget
    was not tried, since no calibration was better than the raw chances.
    """
    return [_sums_of(variant, [row for row in rows if row["variant"] == variant.name]) for variant in variants]


def _sums_of(variant: ScorerVariant, rows: Sequence[Row]) -> Row:
    own = {row["budget"]: row for row in rows if row["task"] == ALL_TASKS}
    found: Row = {"decoder": variant.name, "task": ALL_TASKS, "held_out_kl": rows[0]["held_out_kl"]}
    for budget in REPORTED_BUDGETS:
        row = own.get(f"fixed {budget}")
        if row is not None:
            found |= {f"mat_{budget}": row["mat"], f"mismatch_rate_{budget}": row["mismatch_rate"]}
    for name, is_kind in BUDGET_KINDS.items():
        kind = [row for budget, row in own.items() if is_kind(budget)]
        best = max(kind, key=lambda row: row["tune_tokens_per_s"], default=None)
        found[name] = None if best is None else best["tokens_per_s"]
    return found


def _is_calibrated(budget: str, form: str) -> bool:
    return budget.startswith("marginal, ") and ", raw, " not in budget and budget.endswith(form)


BUDGET_KINDS: dict[str, Callable[[str], bool]] = {
    "best_fixed": lambda budget: budget.startswith("fixed "),
    "saba_ratio": lambda budget: budget == "saba, ratio",
    "saba_price": lambda budget: budget == "saba, price",
    "raw_ratio": lambda budget: budget == "marginal, raw, ratio",
    "raw_price": lambda budget: budget == "marginal, raw, price",
    "calibrated_ratio": lambda budget: _is_calibrated(budget, "ratio"),
    "calibrated_price": lambda budget: _is_calibrated(budget, "price"),
}
"""Which of the tried budgets belong to a column of the second table."""


def summary(rows: Sequence[Row], variants: Sequence[ScorerVariant]) -> str:
    """The tables as Markdown, of the rows that `sums` gives."""
    parts = ["# Ablation", _scorer_table(rows), _budget_table(rows)]
    return "\n\n".join([*parts, *(f"* `{variant.name}`: {variant.what}" for variant in variants)]) + "\n"


def _scorer_table(rows: Sequence[Row]) -> str:
    budgets = [budget for budget in REPORTED_BUDGETS if f"mat_{budget}" in rows[0]]
    header = ["scorer", "held-out KL", *(f"MAT / mismatched, {budget} nodes" for budget in budgets)]
    lines = []
    for row in rows:
        kl = "" if row["held_out_kl"] is None else f"{row['held_out_kl']:.4f}"
        cells = [f"{row[f'mat_{budget}']:.3f} / {100 * row[f'mismatch_rate_{budget}']:.1f} %" for budget in budgets]
        lines.append([row["decoder"], kl, *cells])
    return _table(header, lines)


def _budget_table(rows: Sequence[Row]) -> str:
    header = ["scorer", *(f"{kind.replace('_', ' ')}: tokens/s" for kind in BUDGET_KINDS)]
    rates = [[row[kind] for kind in BUDGET_KINDS] for row in rows]
    cells = [["as raw" if rate is None else f"{rate:.2f}" for rate in own] for own in rates]
    return _table(header, [[row["decoder"], *own] for row, own in zip(rows, cells, strict=True)])


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and return the exit code."""
    options = _parser().parse_args(argv)
    return run_job("ablation", "goes on with what is missing", lambda: run(request_from(options)))


def request_from(options: argparse.Namespace) -> AblationRequest:
    """The request that the options describe. Raises `GraftError` where they cannot work."""
    config = load_config(options.config)
    return AblationRequest(
        config=config,
        store=options.store,
        out=options.out,
        training=TdesTraining(
            steps=options.steps,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            seed=options.seed,
        ),
        gate_rank=options.gate_rank,
        max_budget=options.max_budget,
        threads=options.threads or config.threads or 1,
        every_prompt=options.all_prompts,
        min_rounds=options.min_rounds,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ablation.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="the target's YAML file, or the name of a shipped one")
    add("--store", required=True, metavar="URI", help="trajectory store with decoded rounds")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for fits, rows.jsonl and summary.md")
    add("--steps", type=count, default=600, metavar="N", help="optimizer steps of each fit at most (600)")
    add("--learning-rate", type=float, default=2e-3, help="peak learning rate (0.002)")
    add("--weight-decay", type=float, default=3.0, help="of the matrices (3.0)")
    add("--gate-rank", type=whole_number, default=32, metavar="R", help="of gated scorers; 0: none of them (32)")
    add("--max-budget", type=count, default=64, metavar="B", help="largest budget (64)")
    add("--threads", type=count, metavar="N", help="CPU threads (the configuration's, else 1)")
    add("--all-prompts", action="store_true", help="also prompts that a drafter trained here would have seen")
    add("--min-rounds", type=count, default=1000, metavar="N", help="refuse to fit on fewer rounds (1000)")
    add("--seed", type=whole_number, default=0, help="of initialisation and data order (0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
