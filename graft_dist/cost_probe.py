"""Measuring what rounds cost on the present hardware: a few seconds of real rounds at several budgets.

For hardware that a policy has no recorded timings of. One sequence decodes with a random prompt; its budget changes
from round to round, so that drift of the machine reaches all budgets alike. Medians are taken, so that a round that
something else disturbed does not count.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from graft_dist.cost_curve import CostCurve, Timing, fit_cost_curve
from graft_dist.drafter import DFlashDrafter
from graft_dist.engine import Drafter, Engine
from graft_dist.errors import PolicyError
from graft_dist.hardware import describe_hardware
from graft_dist.policy import ddtree
from graft_dist.rounds import RoundRecord
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target

BUDGETS = (0, 1, 2, 4, 8, 16, 32, 64)
_PROMPT_TOKENS = 64
_WARM_UP = 1  # rounds of each budget whose times are dropped: caches grow, the tree builder is compiled


def measure_cost(
    target: Target,
    drafter: DFlashDrafter | Drafter,
    *,
    budgets: Sequence[int] = BUDGETS,
    num_candidates: int = 16,
    num_rounds: int = 7,
    limit_s: float = 10.0,
) -> CostCurve:
    """Time `num_rounds` rounds of one sequence at each budget, 0 among them, and return the curve of their medians.

    After `limit_s` seconds, on a slow or busy machine, what has been timed has to do: one round of each at least.

    Trees are DDTree's, of `num_candidates` per depth; a budget that the drafter's depth cannot fill counts with the
    nodes it had.

    Raises:
        PolicyError: fewer than two budgets above 0, or none that drafts.
    """
    wanted = sorted({0, *budgets})
    if len(wanted) < 3 or wanted[0] < 0 or num_rounds < 1:
        raise PolicyError(f"measuring costs needs two budgets above 0 and a round of each, not {list(budgets)}")
    engine = Engine(target, drafter, ddtree(0), max_slots=1, max_budget=wanted[-1], record=True, detokenize=False)
    spent: dict[int, list[tuple[float, float]]] = defaultdict(list)
    start = time.monotonic()
    for turn in range(_WARM_UP + num_rounds):
        if turn > _WARM_UP and time.monotonic() - start > limit_s:
            break
        # Smaller budgets follow larger ones as often as the other way round.
        for budget in wanted if turn % 2 else reversed(wanted):
            engine.policy = ddtree(budget, num_candidates)
            record = _next_round(engine)
            if turn >= _WARM_UP:
                spent[record.budget].append(_milliseconds(record))
    timings = []
    for budget, rows in sorted(spent.items()):
        round_ms, undrafted_ms = np.median(rows, axis=0)
        timings.append(Timing(budget, float(round_ms), float(undrafted_ms), len(rows)))
    hardware = describe_hardware(target.dtype_name, target.device)
    curve = fit_cost_curve(timings, hardware)
    if curve is None:
        raise PolicyError(f"the drafter gives trees of {sorted(spent)} nodes only: too few sizes to measure costs")
    return CostCurve(
        curve.budgets,
        curve.round_ms,
        f"measured before decoding, medians of {timings[-1].num_rounds} rounds at each of {len(wanted)} budgets "
        f"({hardware})",
    )


def _next_round(engine: Engine) -> RoundRecord:
    """Run one round, with a new sequence when the last one is at its end."""
    while True:
        if not engine.has_work:
            room = engine.max_length - 1
            random = torch.Generator().manual_seed(0)
            size = min(_PROMPT_TOKENS, max(1, room // 2))
            prompt = torch.randint(engine.target.vocab_size, (size,), generator=random).tolist()
            engine.add(prompt, SamplingParams(max_new_tokens=room, ignore_eos=True))
        for event in engine.step():
            if event.error is not None:
                raise PolicyError(f"costs cannot be measured: {event.error}")
            if event.round is not None and event.finish_reason is None:
                return event.round


def _milliseconds(record: RoundRecord) -> tuple[float, float]:
    """A round's whole time, and the part that a plain round spends too."""
    undrafted = record.verify_ns + record.commit_ns
    return (record.draft_ns + record.build_ns + undrafted) / 1e6, undrafted / 1e6
