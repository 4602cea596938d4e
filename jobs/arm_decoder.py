"""ArmDecoder: the arms of a benchmark, all loaded at once, so that they can take turns on each prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence

from graft_dist.bench import BASELINE, ORACLE, PEERS, Arm
from graft_dist.config import TargetConfig
from graft_dist.decoder import LoadTimes, needs_drafter, new_engine
from graft_dist.drafter import DFlashDrafter
from graft_dist.generate import Answer, Request, answer_all, failed_answer
from graft_dist.oracle import KnownAnswer
from graft_dist.peer import assistance
from graft_dist.policy import DecodingPolicy, plain
from graft_dist.policy_maker import PolicyMaker
from graft_dist.reference import Reference
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target

_PLAIN = Arm(BASELINE, 0)


class ArmDecoder:
    """One engine whose policy is swapped between the arms that draft, `batch` prompts at a time.

    Plain decoding has an engine without a drafter, so that the baseline does not pay for taps that nobody reads.
    transformers' own methods have a model of their own; they and the oracle take one prompt at a time.
    """

    def __init__(
        self,
        config: TargetConfig,
        target: Target,
        drafter: DFlashDrafter | None,
        arms: Sequence[Arm],
        params: SamplingParams,
        maker: PolicyMaker,
        *,
        batch: int = 1,
        loading: LoadTimes,
    ) -> None:
        own = [arm for arm in arms if arm.method not in PEERS]
        largest = max(arm.budget for arm in own)
        self._params = params
        self._engine = new_engine(config, target, drafter, plain(), max_slots=batch, max_budget=largest)
        self._plain_engine = new_engine(config, target, None, plain(), max_slots=batch)
        self._known = KnownAnswer()
        self._policies = {
            arm: maker.oracle(self._known, arm.budget) if arm.method == ORACLE else policy_of(arm, maker) for arm in own
        }
        self._plain: Answer | None = None  # the last one, from which the oracle knows what follows
        self._peers = {arm.method: assistance(arm.method, drafter) for arm in arms if arm.method in PEERS}
        started = time.perf_counter()
        self._reference = Reference.load(config, target, params) if self._peers else None
        reference_s = time.perf_counter() - started
        self.load_s = {arm: self._load_s(arm, loading, reference_s) for arm in arms}

    def answer(self, arm: Arm, request: Request) -> Answer:
        """Answer one prompt."""
        if self._reference is not None and arm.method in self._peers:
            room = self._engine.max_length - len(request.token_ids)
            if room < 1:
                return failed_answer(
                    request, f"a prompt of {len(request.token_ids)} tokens leaves no room for an answer"
                )
            return self._reference.answer(request, min(self._params.max_new_tokens, room), self._peers[arm.method])
        if arm.method == ORACLE:
            if self._plain is None or self._plain.request is not request:
                self._plain = self._decode(_PLAIN, [request])[0]
            self._known.tell([*request.token_ids, *self._plain.token_ids])
        answer = self._decode(arm, [request])[0]
        if arm.method == BASELINE:
            self._plain = answer
        return answer

    def answer_together(self, arm: Arm, requests: Sequence[Request]) -> tuple[list[Answer], float]:
        """Answer prompts side by side; the answers in the prompts' order, and the seconds that all of it took."""
        started = time.perf_counter()
        answers = self._decode(arm, requests)
        total_s = time.perf_counter() - started
        places = {id(request): place for place, request in enumerate(requests)}
        return sorted(answers, key=lambda answer: places[id(answer.request)]), total_s

    def _load_s(self, arm: Arm, loading: LoadTimes, reference_s: float) -> float:
        """Seconds that loading what decodes an arm took, had it been loaded alone."""
        target_s = reference_s if arm.method in self._peers else loading.target_s
        return target_s + (loading.drafter_s if needs_drafter(arm.method) else 0.0)

    def _decode(self, arm: Arm, requests: Sequence[Request]) -> list[Answer]:
        if arm.method == BASELINE:
            return list(answer_all(self._plain_engine, requests, self._params))
        self._engine.policy = self._policies[arm]
        return list(answer_all(self._engine, requests, self._params))


def policy_of(arm: Arm, maker: PolicyMaker) -> DecodingPolicy:
    """The policy that decodes an arm; a chain always runs to the draft depth."""
    return maker.make(arm.method, None if arm.method == "chain" else arm.budget)
