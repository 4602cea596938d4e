"""OfflineAnswers: the right answers to a soak's questions, decoded in this process without a draft, and the audit's
judgement of answers that differ.

Decodes with the configuration that the server has; the number format has to be the server's too. An answer with other
tokens is reviewed by transformers' unmodified model, loaded apart, with the audit's rule for ties at each position; its
text and its end have to follow from its tokens. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graft_dist.audit import TieRule, review
from graft_dist.config import TargetConfig
from graft_dist.counter_random import choice_seed
from graft_dist.decoder import load_decoder, new_engine
from graft_dist.errors import GraftError
from graft_dist.generate import Answer, Request
from graft_dist.policy import plain
from graft_dist.prompts import Prompt, render
from graft_dist.reference import Reference
from graft_dist.sampling import SamplingParams, TextStream
from jobs.soak import Judgement, Question, Told


@dataclass(frozen=True)
class _Asked:
    """One choice of a question as the engine takes it."""

    prompt_token_ids: list[int]
    params: SamplingParams


class OfflineAnswers:
    """An `Auditor` with the target of a configuration. Loads it: takes a while, and its memory."""

    def __init__(self, config: TargetConfig) -> None:
        self._config = config
        self._target, _ = load_decoder(config, "plain")
        if self._target.tokenizer is None:
            raise GraftError(f"{config.target} has no tokenizer, so there is no text to compare")
        self.name = f"plain decoding in {self._target.dtype_name}, offline"

    def check(self, system_fingerprint: str) -> None:
        """Raise `GraftError` if the server decodes another target."""
        ours = f"graft-{self._target.fingerprint[:8]}-"
        if not system_fingerprint.startswith(ours):
            raise GraftError(
                f"the server decodes another target than --config: its fingerprint is {system_fingerprint}, it should "
                f"begin with {ours}"
            )

    def answers(self, asked: Sequence[Question]) -> dict[str, Told]:
        """Decode every question, many at a time."""
        engine = new_engine(self._config, self._target, None, plain())
        waiting: dict[str, tuple[str, int]] = {}
        for question in asked:
            for choice, each in enumerate(self._choices(question)):
                try:
                    waiting[engine.add(each.prompt_token_ids, each.params)] = question.name, choice
                except ValueError as error:
                    raise GraftError(f"{question.name} cannot be decoded: {error}") from error
        texts = dict.fromkeys(waiting.values(), "")
        ids: dict[tuple[str, int], list[int]] = {key: [] for key in texts}
        reasons: dict[tuple[str, int], str | None] = {}
        while engine.has_work:
            for event in engine.step():
                key = waiting[event.sequence_id]
                texts[key] += event.text
                ids[key] += event.token_ids
                reasons[key] = event.finish_reason
                if event.error is not None:
                    raise GraftError(f"{key[0]} cannot be decoded: {event.error}")
        found = {}
        for question in asked:
            keys = [(question.name, choice) for choice in range(question.body.get("n", 1))]
            tokens = tuple(tuple(ids[key]) for key in keys)
            found[question.name] = Told(
                texts=tuple(texts[key] for key in keys),
                finish_reasons=tuple(reasons[key] for key in keys),
                num_tokens=sum(map(len, tokens)),
                token_ids=tokens,
            )
        return found

    def judge(self, question: Question, told: Told) -> Judgement:
        """Review every choice by transformers' own model, and its text and end by its tokens."""
        choices = self._choices(question)
        if not len(choices) == len(told.texts) == len(told.token_ids):
            numbers = f"{len(told.texts)} texts and {len(told.token_ids)} lists of tokens"
            return Judgement(faults=(f"{len(choices)} answers were asked for, {numbers} came",))
        faults, differences = [], []
        if told.num_tokens != sum(map(len, told.token_ids)):
            faults.append(f"{told.num_tokens} tokens were counted, {sum(map(len, told.token_ids))} came")
        for choice, each in enumerate(choices):
            ids, reason = list(told.token_ids[choice]), told.finish_reasons[choice]
            stream = TextStream(self._target.tokenizer, each.params.stop)
            text, is_stopped = "", False
            for token in ids:
                if is_stopped:
                    faults.append(f"choice {choice} goes on after a stop string")
                    break
                delta = stream.push([token])
                text, is_stopped = text + delta.text, delta.is_stopped
            text += stream.finish()
            if text != told.texts[choice]:
                faults.append(f"the text of choice {choice} is not that of its tokens")
            # Up to a stop string the answer has to be the reference's beginning, otherwise its whole.
            limit = len(ids) if is_stopped else each.params.max_new_tokens
            is_at_end = is_stopped or (bool(ids) and ids[-1] in self._stop_tokens(each.params))
            if reason != ("stop" if is_at_end else "length"):
                faults.append(f"choice {choice} ended by {reason}")
            request = Request(question.name, "", each.prompt_token_ids)
            answer = Answer(request, ids, text, "stop" if is_at_end else "length", None, [], 0, 0.0, 0.0)
            reference = Reference(self._model, each.params, self._target.eos_token_ids)
            differences += review(reference, answer, limit, TieRule(self._target.dtype))
        return Judgement(tuple(differences), tuple(faults))

    @cached_property
    def _model(self) -> Any:
        """The unmodified model, loaded apart; only when something has to be judged."""
        return Reference.load(self._config, self._target, SamplingParams()).model

    def _stop_tokens(self, params: SamplingParams) -> frozenset[int]:
        return params.stop_set(self._target.eos_token_ids)

    def _choices(self, question: Question) -> list[_Asked]:
        body, tokenizer = question.body, self._target.tokenizer
        if question.kind == "chat":
            prompt = Prompt(question.name, "", tuple(message["content"] for message in body["messages"]))
            ids = render(tokenizer, prompt, self._config.system_prompt, self._config.enable_thinking)
        else:
            ids = list(tokenizer.encode(body["prompt"]))
        return [
            _Asked(
                ids,
                SamplingParams(
                    temperature=body["temperature"],
                    seed=choice_seed(body["seed"], choice),
                    max_new_tokens=body["max_tokens"],
                    stop=tuple(body.get("stop", ())),
                ),
            )
            for choice in range(body.get("n", 1))
        ]
