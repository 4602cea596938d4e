"""BenchWorker: the models of a benchmark, and one group of prompts at a time through all arms in turn.

A plain class, so that tests run it in their own process; the job makes an actor of it, which alone uses the cores and
the GPU that it reserves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from graft_dist.bench import ORACLE, Arm, Measurement, arms_for, rotated, to_group_measurement, to_measurement
from graft_dist.config import TargetConfig
from graft_dist.decoder import LoadTimes, load_timed
from graft_dist.drafter import DFlashDrafter
from graft_dist.errors import GraftError
from graft_dist.generate import to_request
from graft_dist.policy import COSTED_METHODS, LEARNED_METHODS
from graft_dist.policy_maker import PolicyMaker
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from jobs.arm_decoder import ArmDecoder
from jobs.bench_plan import BenchPlan, Cell, Group
from jobs.generate_command import new_maker
from jobs.policy_option import Learned, caps_of, read_learned
from jobs.provenance import machine


class BenchWorker:
    """Decodes the groups that it is given.

    Loads at the first call and not before: what an actor refuses when it is made reaches nobody as the error it was.
    """

    def __init__(self, config: TargetConfig, plan: BenchPlan, num_threads: int) -> None:
        self._config, self._plan, self._num_threads = config, plan, num_threads
        self._ready: tuple[Cell, tuple[Arm, ...], ArmDecoder] | None = None
        self._makers: dict[int, PolicyMaker] = {}  # by sequences decoded together: costs differ

    def describe(self, cell: Cell) -> dict[str, Any]:
        """What rows have to share to stand in one table, and beside it, under "machine" and "cost", what people ask.

        Costs that nobody knows yet are measured here: with as many sequences as the cell decodes together.
        """
        target, drafter, _ = self._models
        methods = self._plan.methods_of(cell)
        is_costed = any(method in (*COSTED_METHODS, *LEARNED_METHODS, ORACLE) for method in methods)
        return {
            "target_fingerprint": target.fingerprint,
            "drafter_fingerprint": drafter.fingerprint if drafter else None,
            "policy_fingerprint": self._learned.fingerprint,
            "dtype": target.dtype_name,
            "threads": torch.get_num_threads(),
            "machine": machine(),
            "cost": asdict(self._maker(cell.batch).cost) if is_costed else None,
        }

    def arms(self, methods: Sequence[str], budgets: Sequence[int]) -> list[Arm]:
        """The arms of some methods, plain decoding first."""
        _, drafter, _ = self._models
        depth = drafter.draft_depth if drafter else 0
        return arms_for(methods, budgets, depth, caps_of(self._learned))

    def measure(self, cell: Cell, arms: Sequence[Arm], turn: int, group: Group) -> list[Measurement] | str:
        """One measurement of each arm, in an order that rotates with `turn`; or why the group cannot be decoded."""
        decoder = self._decoder(cell, tuple(arms))
        try:
            requests = [to_request(prompt, self._models[0].tokenizer, self._config) for prompt in group]
        except GraftError as error:
            return str(error)
        measured = []
        for arm in rotated(arms, turn):
            if cell.batch == 1:
                answers, total_s = [decoder.answer(arm, requests[0])], 0.0
            else:
                answers, total_s = decoder.answer_together(arm, requests)
            problem = next((answer.error for answer in answers if answer.finish_reason == "error"), None)
            if problem is not None:
                return f"{arm.name}: {problem}"
            measured.append(
                to_measurement(arm, answers[0], cell.temperature, decoder.load_s[arm])
                if cell.batch == 1
                else to_group_measurement(arm, answers, total_s, cell.temperature, decoder.load_s[arm])
            )
        return measured

    @cached_property
    def _learned(self) -> Learned:
        return read_learned(self._plan.policy_of(self._config), None, self._plan.methods, self._config)

    @cached_property
    def _models(self) -> tuple[Target, DFlashDrafter | None, LoadTimes]:
        torch.set_num_threads(self._num_threads)
        disable_progress_bar()
        return load_timed(self._config, *self._plan.methods)

    def _maker(self, batch: int) -> PolicyMaker:
        if batch not in self._makers:
            target, drafter, _ = self._models
            self._makers[batch] = new_maker(self._config, target, drafter, self._learned, num_slots=batch)
        return self._makers[batch]

    def _decoder(self, cell: Cell, arms: tuple[Arm, ...]) -> ArmDecoder:
        """The decoder of a cell; the last one's caches are let go first."""
        if self._ready is None or self._ready[:2] != (cell, arms):
            self._ready = None
            params = SamplingParams(
                temperature=cell.temperature, seed=self._plan.seed, max_new_tokens=self._plan.max_new_tokens
            )
            target, drafter, loading = self._models
            decoder = ArmDecoder(
                self._config, target, drafter, arms, params, self._maker(cell.batch), batch=cell.batch, loading=loading
            )
            self._ready = cell, arms, decoder
        return self._ready[2]
