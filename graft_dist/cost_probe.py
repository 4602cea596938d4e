"""Measuring what rounds cost on the present hardware: a few seconds of real rounds at several budgets.

For hardware that nobody has recorded timings of. One sequence decodes; its budget changes from round to round, so that
drift of the machine reaches all budgets alike. Medians are taken, so that a round that something else disturbed does
not count.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

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
_PROMPT_ROUNDS = 16  # rounds after which the next prompt has its turn
_WARM_UP = 1  # rounds of each budget that are dropped: caches grow, the tree builder is compiled


def measure_cost(
    target: Target,
    drafter: DFlashDrafter | Drafter,
    *,
    budgets: Sequence[int] = BUDGETS,
    num_candidates: int = 16,
    num_rounds: int = 7,
    limit_s: float = 10.0,
) -> CostCurve:
    """Time rounds of a random prompt, as `probe_rounds` decodes them, and return the curve of their medians.

    Trees are DDTree's, of `num_candidates` per depth; a budget that the drafter's depth cannot fill counts with the
    nodes it had.

    Raises:
        PolicyError: fewer than two budgets above 0, or none that drafts.
    """
    random = torch.Generator().manual_seed(0)
    prompt = torch.randint(target.vocab_size, (_PROMPT_TOKENS,), generator=random).tolist()
    records = probe_rounds(
        target,
        drafter,
        [prompt],
        budgets=budgets,
        num_candidates=num_candidates,
        num_rounds=num_rounds,
        limit_s=limit_s,
    )
    curve = cost_of(records, describe_hardware(target.dtype_name, target.device))
    if curve is None:
        sizes = sorted({record.budget for record in records})
        raise PolicyError(f"the drafter gives trees of {sizes} nodes only: too few sizes to measure costs")
    return curve


def probe_rounds(
    target: Target,
    drafter: DFlashDrafter | Drafter,
    prompts: Iterable[Sequence[int]],
    *,
    budgets: Sequence[int],
    num_candidates: int,
    num_rounds: int,
    limit_s: float,
    max_length: int | None = None,
) -> list[RoundRecord]:
    """Decode `num_rounds` rounds of one sequence at each budget, 0 among them, on an engine of its own.

    The prompts (token ids, cut to fit) take turns. After `limit_s` seconds, on a slow or busy machine, what has been
    decoded has to do: one round of each budget at least.

    Raises:
        PolicyError: fewer than two budgets above 0, or rounds that fail.
    """
    wanted = sorted({0, *budgets})
    if len(wanted) < 3 or wanted[0] < 0 or num_rounds < 1:
        raise PolicyError(f"measuring costs needs two budgets above 0 and a round of each, not {list(budgets)}")
    engine = Engine(
        target, drafter, ddtree(0), max_slots=1, max_length=max_length, max_budget=wanted[-1], record=True,
        detokenize=False,
    )  # fmt: skip
    probe = _Probe(engine, prompts)
    records: list[RoundRecord] = []
    start = time.monotonic()
    for turn in range(_WARM_UP + num_rounds):
        if turn > _WARM_UP and time.monotonic() - start > limit_s:
            break
        # Smaller budgets follow larger ones as often as the other way round.
        for budget in wanted if turn % 2 else reversed(wanted):
            engine.policy = ddtree(budget, num_candidates)
            record = probe.next_round()
            if turn >= _WARM_UP:
                records.append(record)
    return records


def cost_of(records: Sequence[RoundRecord], hardware: str) -> CostCurve | None:
    """The curve of the rounds' medians by budget, or None with fewer than two drafted budgets."""
    spent: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for record in records:
        spent[record.budget].append(_milliseconds(record))
    timings = []
    for budget, rows in sorted(spent.items()):
        round_ms, undrafted_ms = np.median(rows, axis=0)
        timings.append(Timing(budget, float(round_ms), float(undrafted_ms), len(rows)))
    curve = fit_cost_curve(timings, hardware)
    if curve is None:
        return None
    source = f"measured before decoding, medians of {len(records)} rounds at {len(timings)} budgets ({hardware})"
    return CostCurve(curve.budgets, curve.round_ms, source)


class _Probe:
    """An engine's one sequence: round after round, prompt after prompt."""

    def __init__(self, engine: Engine, prompts: Iterable[Sequence[int]]) -> None:
        self._engine = engine
        self._prompts = itertools.cycle(prompts)
        self._sequence_id = ""
        self._num_rounds = 0

    def next_round(self) -> RoundRecord:
        """Run one round, of the next prompt when this one has had its turn or is at its end."""
        while True:
            if self._num_rounds == _PROMPT_ROUNDS:
                self._engine.abort(self._sequence_id)
                self._engine.step()  # which only tells that it is gone
            if not self._engine.has_work:
                self._begin()
            for event in self._engine.step():
                if event.error is not None:
                    raise PolicyError(f"costs cannot be measured: {event.error}")
                if event.round is not None and event.finish_reason is None:
                    self._num_rounds += 1
                    return event.round

    def _begin(self) -> None:
        room = self._engine.max_length - 1
        prompt = next(self._prompts)[: max(1, room // 2)]
        # As far as there is room: the end of an answer cuts the trees of the rounds before it.
        self._sequence_id = self._engine.add(prompt, SamplingParams(max_new_tokens=room, ignore_eos=True))
        self._num_rounds = 0


def _milliseconds(record: RoundRecord) -> tuple[float, float]:
    """A round's whole time, and the part that a plain round spends too."""
    undrafted = record.verify_ns + record.commit_ns
    return (record.draft_ns + record.build_ns + undrafted) / 1e6, undrafted / 1e6
