"""Measuring what rounds cost on the present hardware: a few seconds of real rounds at several budgets.

For hardware that nobody has recorded timings of. One sequence decodes, or as many as will be decoded together; the
budget changes from round to round, so that drift of the machine reaches all budgets alike. Medians are taken, so that a
round that something else disturbed does not count.
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
    num_slots: int = 1,
) -> CostCurve:
    """Time rounds of random prompts, as `probe_rounds` decodes them, and return the curve of their medians.

    Trees are DDTree's, of `num_candidates` per depth; a budget that the drafter's depth cannot fill counts with the
    nodes it had.

    Raises:
        PolicyError: fewer than two budgets above 0, or none that drafts.
    """
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(target.vocab_size, (num_slots, _PROMPT_TOKENS), generator=random).tolist()
    records = probe_rounds(
        target,
        drafter,
        prompts,
        budgets=budgets,
        num_candidates=num_candidates,
        num_rounds=num_rounds,
        limit_s=limit_s,
        num_slots=num_slots,
    )
    curve = cost_of(records, describe_hardware(target.dtype_name, target.device))
    if curve is None:
        sizes = sorted({record.budget for record in records})
        raise PolicyError(f"the drafter gives trees of {sizes} nodes only: too few sizes to measure costs")
    return curve


def probe_rounds(  # noqa: PLR0913 - a measurement's settings, each with a name
    target: Target,
    drafter: DFlashDrafter | Drafter,
    prompts: Iterable[Sequence[int]],
    *,
    budgets: Sequence[int],
    num_candidates: int,
    num_rounds: int,
    limit_s: float,
    max_length: int | None = None,
    num_slots: int = 1,
) -> list[RoundRecord]:
    """Decode `num_rounds` rounds of `num_slots` sequences at each budget, 0 among them, on an engine of its own.

    Returns one record of each round, that of its largest tree: the times are those of the whole batch. The prompts
    (token ids, cut to fit) take turns. After `limit_s` seconds, on a slow or busy machine, what has been
    decoded has to do: one round of each budget at least.

    Raises:
        PolicyError: fewer than two budgets above 0, or rounds that fail.
    """
    wanted = sorted({0, *budgets})
    if len(wanted) < 3 or wanted[0] < 0 or num_rounds < 1:
        raise PolicyError(f"measuring costs needs two budgets above 0 and a round of each, not {list(budgets)}")
    engine = Engine(
        target, drafter, ddtree(0), max_slots=num_slots, max_length=max_length, max_budget=wanted[-1], record=True,
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
    """The curve of the rounds' medians by budget, or None with fewer than two drafted budgets.

    Of rounds of several sequences it is by rows, as `budget.batch_costs` reads it for so many.
    """
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
    num_slots = records[0].batch_size
    what = "rounds" if num_slots == 1 else f"rounds of {num_slots} sequences"
    source = f"measured before decoding, medians of {len(records)} {what} at {len(timings)} budgets ({hardware})"
    if num_slots == 1:
        return CostCurve(curve.budgets, curve.round_ms, source)
    points = _by_rows(curve, next(timing for timing in timings if timing.budget > 0), num_slots)
    return CostCurve(tuple(points), tuple(points.values()), source)


def _by_rows(curve: CostCurve, smallest: Timing, num_slots: int) -> dict[int, float]:
    """A batch's milliseconds by nodes of its largest tree, at one less than the rows that all its trees have.

    `smallest` is of the smallest drafted budget: the draft's time, with which the roots alone are verified, is read off
    it, so that the step between 0 and 1, which `budget.batch_costs` takes for the draft, is the batch's own.
    """
    plain_ms, *drafted_ms = curve.round_ms
    roots_ms = min(plain_ms + smallest.round_ms - smallest.undrafted_ms, drafted_ms[0])
    points = {0: plain_ms, 1: roots_ms, num_slots - 1: roots_ms}
    for budget, ms in zip(curve.budgets[1:], drafted_ms, strict=True):
        points[num_slots * (1 + budget) - 1] = ms
    return points


class _Probe:
    """An engine with all its slots taken: round after round, prompts after prompts."""

    def __init__(self, engine: Engine, prompts: Iterable[Sequence[int]]) -> None:
        self._engine = engine
        self._prompts = itertools.cycle(prompts)
        self._sequence_ids: list[str] = []
        self._num_rounds = 0

    def next_round(self) -> RoundRecord:
        """Run one round of all slots, with the next prompts when these have had their turn or one is at its end."""
        while True:
            if self._num_rounds == _PROMPT_ROUNDS:
                self._end()
            if not self._engine.has_work:
                self._begin()
            events = self._engine.step()
            error = next((event.error for event in events if event.error is not None), None)
            if error is not None:
                raise PolicyError(f"costs cannot be measured: {error}")
            if any(event.finish_reason is not None for event in events):
                self._end()
                continue
            records = [event.round for event in events if event.round is not None]
            if len(records) == self._engine.max_slots:  # fewer while prompts are read
                self._num_rounds += 1
                return max(records, key=lambda record: record.budget)

    def _begin(self) -> None:
        room = self._engine.max_length - 1
        # As far as there is room: the end of an answer cuts the trees of the rounds before it.
        params = SamplingParams(max_new_tokens=room, ignore_eos=True)
        prompts = itertools.islice(self._prompts, self._engine.max_slots)
        self._sequence_ids = [self._engine.add(prompt[: max(1, room // 2)], params) for prompt in prompts]
        self._num_rounds = 0

    def _end(self) -> None:
        for sequence_id in self._sequence_ids:
            self._engine.abort(sequence_id)
        self._engine.step()  # which only tells that they are gone
        self._num_rounds = 0


def _milliseconds(record: RoundRecord) -> tuple[float, float]:
    """A round's whole time, and the part that a plain round spends too."""
    undrafted = record.verify_ns + record.commit_ns
    return (record.draft_ns + record.build_ns + undrafted) / 1e6, undrafted / 1e6
