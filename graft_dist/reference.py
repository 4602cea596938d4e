"""transformers' own `generate` as an independent opinion: what to say after a prompt, and how fast.

The unmodified model, loaded apart from the engine's, with transformers' attention, cache, stopping rules and logits
processors. At temperature 0 it is plain `generate(do_sample=False)`. Above 0 it is the same loop, in which one more
logits processor turns the engine's random number for (seed, output position) into a token by inverse CDF.

Not covered: stop strings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from graft_dist.config import TargetConfig
from graft_dist.counter_random import uniform
from graft_dist.generate import Answer, Request
from graft_dist.peer import Assistance
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target, locate


@dataclass(frozen=True)
class Decision:
    """What the reference saw when it chose a token.

    scores: [V], the logits after penalties (greedy) or the probabilities (sampled).
    spread: standard deviation of the raw logits over the vocabulary, the scale of their rounding errors.
    number: the random number that the probabilities were read with; None for greedy.
    """

    scores: NDArray[np.float64]
    spread: float
    number: float | None

    @property
    def token(self) -> int:
        """What the reference says: its best token, or the one in whose interval of the CDF the random number lies."""
        if self.number is None:
            return int(self.scores.argmax())
        token = int(np.searchsorted(np.cumsum(self.scores), self.number, side="right"))
        return min(token, len(self.scores) - 1)

    def margin(self, token: int) -> float:
        """How far the decision was from `token`: in logits (greedy), or in probability mass (sampled)."""
        if self.number is None:
            return float(self.scores.max() - self.scores[token])
        high = float(self.scores[: token + 1].sum())
        low = high - float(self.scores[token])
        if low == high:
            return math.inf  # the reference had ruled the token out
        return max(low - self.number, self.number - high, 0.0)


_UNASSISTED = Assistance()


class Reference:
    """One transformers causal LM as the judge, one prompt at a time; it must not be the engine's own object."""

    def __init__(self, model: Any, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
        if not params.is_greedy and params.seed is None:
            raise ValueError("above temperature 0 the reference needs a seed")
        self.model = model.eval()
        # A model's own generation config may carry sampling defaults and penalties, which generate() would merge in.
        self.model.generation_config = GenerationConfig()
        self.params = params
        self.stop_token_ids = sorted(params.stop_set(eos_token_ids))

    @classmethod
    def load(cls, config: TargetConfig, target: Target, params: SamplingParams) -> Reference:
        """Load the configured target a second time, with transformers' default attention, in `target`'s dtype."""
        model = AutoModelForCausalLM.from_pretrained(
            locate(config.target),
            revision=config.revision,
            dtype=target.dtype,
            trust_remote_code=config.trust_remote_code,
            device_map={"": target.device} if target.device.type == "cuda" else None,
        )
        return cls(model, params, target.eos_token_ids)

    def generate(self, prompt_ids: Sequence[int], output_ids: Sequence[int], limit: int) -> list[int]:
        """The tokens that follow `output_ids`, at most `limit`, ending with the first stop token."""
        return self._run(prompt_ids, output_ids, limit, _Chooser(self.params, len(prompt_ids)))

    def decide(self, prompt_ids: Sequence[int], output_ids: Sequence[int], num_steps: int) -> Decision:
        """The decision behind the last of `num_steps` tokens that follow `output_ids`."""
        chooser = _Chooser(self.params, len(prompt_ids))
        self._run(prompt_ids, output_ids, num_steps, chooser)
        assert chooser.decision is not None
        return chooser.decision

    @torch.inference_mode()
    def decisions(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Iterator[Decision]:
        """The decision at each position of `output_ids`, and the one after them: given the tokens before it.

        One pass of the model for all of them, so a judge of a whole answer need not decode it again.
        """
        ids = torch.tensor([[*prompt_ids, *output_ids]], device=self.model.device)
        logits = self.model(ids, use_cache=False, logits_to_keep=len(output_ids) + 1).logits[0]
        chooser = _Chooser(self.params, len(prompt_ids))
        processors = LogitsProcessorList([chooser.spread, *_processors(self.params, len(prompt_ids)), chooser])
        for position in range(len(output_ids) + 1):
            # In float32, as transformers' loop hands them to its processors.
            processors(ids[:, : len(prompt_ids) + position], logits[position, None].float())
            assert chooser.decision is not None
            yield chooser.decision

    def answer(self, request: Request, limit: int, assistance: Assistance = _UNASSISTED) -> Answer:
        """Answer with at most `limit` tokens, nothing added to transformers' loop but a clock at each round.

        What a first pass accepts of proposals beside its own token counts as a round, though it took no time of its
        own: the error is in transformers' favour.
        """
        clock = _RoundClock()
        counter = self.model.register_forward_pre_hook(clock.count_proposed, with_kwargs=True)
        started = time.perf_counter()
        try:
            token_ids = self._run(request.token_ids, [], limit, None, clock, assistance)
        finally:
            counter.remove()
        first, last = clock.times[0], clock.times[-1]
        is_stopped = token_ids[-1] in self.stop_token_ids
        return Answer(
            request=request,
            token_ids=token_ids,
            text="",
            finish_reason="stop" if is_stopped else "length",
            error=None,
            acceptance_lengths=[count for count in (clock.counts[0] - 1, *clock.counts[1:]) if count],
            num_drafted=clock.num_proposed,
            prefill_s=first - started,
            decode_s=last - first,
            total_s=last - started,
        )

    @torch.inference_mode()
    def _run(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        limit: int,
        chooser: _Chooser | None,
        streamer: BaseStreamer | None = None,
        assistance: Assistance = _UNASSISTED,
    ) -> list[int]:
        ids = torch.tensor([[*prompt_ids, *output_ids]], device=self.model.device)
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=limit,
            eos_token_id=self.stop_token_ids or None,
            pad_token_id=self.stop_token_ids[0] if self.stop_token_ids else 0,
            **assistance.settings,
        )
        processors = _processors(self.params, len(prompt_ids))
        if chooser is not None:
            processors = [chooser.spread, *processors, chooser]
        produced = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            logits_processor=LogitsProcessorList(processors),
            streamer=streamer,
            assistant_model=assistance.model,
        )
        return produced[0, ids.shape[1] :].tolist()


class _RoundClock(BaseStreamer):
    """Notes when new tokens became known, how many they were, and how many the model was asked to judge."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self.num_proposed = 0
        self._has_prompt = False

    def put(self, value: Any) -> None:
        if self._has_prompt:
            self.times.append(time.perf_counter())
            self.counts.append(value.numel())
        self._has_prompt = True  # what comes first is the prompt itself

    def count_proposed(self, _model: Any, _arguments: Any, inputs: dict[str, Any]) -> None:
        """A hook before each forward pass: behind the prompt's, all rows but the first are proposals."""
        if self.times:
            self.num_proposed += inputs["input_ids"].shape[1] - 1

    def end(self) -> None:
        pass


def _processors(params: SamplingParams, prompt_length: int) -> list[LogitsProcessor]:
    """transformers' processors for `params`, in the order in which sampling applies them."""
    found: list[LogitsProcessor] = []
    if params.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        found.append(_OutputPenalties(params.presence_penalty, params.frequency_penalty, prompt_length))
    if params.is_greedy:
        return found
    found.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        found.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        found.append(MinPLogitsWarper(params.min_p))
    return found


class _OutputPenalties(LogitsProcessor):
    """Presence and frequency penalties over the output tokens, which transformers itself does not have."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        output = input_ids[0, self.prompt_length :]
        counts = torch.bincount(output, minlength=scores.shape[1]).to(scores.dtype)
        return scores - self.frequency * counts - self.presence * (counts > 0)


class _Spread(LogitsProcessor):
    """Notes the standard deviation of the logits as the model gave them."""

    value = 0.0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.value = float(scores[0].std())
        return scores


class _Chooser(LogitsProcessor):
    """Keeps the last decision, and above temperature 0 turns the seeded draw into the only possible token."""

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        self.params, self.prompt_length = params, prompt_length
        self.spread = _Spread()
        self.decision: Decision | None = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self.params.is_greedy:
            values = scores[0].double().cpu().numpy()
            self.decision = Decision(values, self.spread.value, None)
            return scores
        assert self.params.seed is not None
        number = uniform(self.params.seed, input_ids.shape[1] - self.prompt_length)
        probabilities = torch.softmax(scores[0].double(), dim=-1).cpu().numpy()
        self.decision = Decision(probabilities, self.spread.value, number)
        chosen = torch.full_like(scores, -math.inf)
        chosen[0, self.decision.token] = 0.0
        return chosen
