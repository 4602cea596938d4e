import json
from typing import Any

import pytest

from graft_dist.config import TargetConfig
from graft_dist.engine import Engine, SequenceEvent
from graft_dist.errors import PromptError
from graft_dist.generate import Request, answer_all, to_request
from graft_dist.policy import ddtree, plain
from graft_dist.prompts import BadPrompt, Prompt
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from tests.conftest import FakeDrafter

REQUESTS = [Request(f"p{index}", "chat", list(range(3, 9 + index))) for index in range(5)]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


def answers_of(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    return {answer.request.prompt_id: answer.token_ids for answer in answer_all(engine, requests, PARAMS)}


def test_rows_have_exactly_the_published_keys_and_are_json(tiny_llama: Target) -> None:
    engine = Engine(tiny_llama, None, plain(), max_slots=1)
    answer = next(answer_all(engine, REQUESTS[:1], PARAMS))
    row = json.loads(json.dumps(answer.to_row()))
    assert list(row) == [
        "id", "task", "prompt_token_ids", "output_token_ids", "text", "finish_reason", "num_rounds",
        "acceptance_lengths", "prefill_s", "decode_s",
    ]  # fmt: skip
    assert row["finish_reason"] == "length"
    assert len(row["output_token_ids"]) == 12
    assert row["acceptance_lengths"] == [1] * 11
    assert row["text"] == tiny_llama.tokenizer.decode(row["output_token_ids"], skip_special_tokens=True)


def test_the_first_token_belongs_to_no_round(tiny_llama: Target) -> None:
    reference = answers_of(Engine(tiny_llama, None, plain(), max_slots=1), REQUESTS)
    drafter = FakeDrafter(tiny_llama, [request.token_ids + reference[request.prompt_id] for request in REQUESTS])
    engine = Engine(tiny_llama, drafter, ddtree(8), max_slots=1)
    for answer in answer_all(engine, REQUESTS, PARAMS):
        assert answer.token_ids == reference[answer.request.prompt_id]
        assert sum(answer.acceptance_lengths) == len(answer.token_ids) - 1
        assert max(answer.acceptance_lengths) > 1
        assert answer.num_drafted > 0
        stages = answer.stages
        total_ms = stages.draft_ms + stages.build_ms + stages.verify_ms + stages.commit_ms
        assert total_ms == pytest.approx(answer.decode_s * 1e3)


def test_slots_change_the_order_but_not_the_answers(tiny_llama: Target) -> None:
    one_by_one = answers_of(Engine(tiny_llama, None, plain(), max_slots=1), REQUESTS)
    together = answers_of(Engine(tiny_llama, None, plain(), max_slots=3), REQUESTS)
    assert one_by_one == together


class WatchedEngine(Engine):
    """Remembers the events of every step."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.steps: list[list[SequenceEvent]] = []

    def step(self) -> list[SequenceEvent]:
        self.steps.append(super().step())
        return self.steps[-1]


def test_mismatches_are_counted_and_rounds_of_several_are_shared_out(tiny_llama: Target) -> None:
    known = answers_of(Engine(tiny_llama, None, plain(), max_slots=1), REQUESTS)
    sequences = [request.token_ids + known[request.prompt_id] for request in REQUESTS]
    drafter = FakeDrafter(tiny_llama, sequences, accuracy=0.5)  # where it errs, a depth has the token at another rank
    engine = WatchedEngine(tiny_llama, drafter, ddtree(12, num_candidates=8), max_slots=3, record=True)
    answers = list(answer_all(engine, REQUESTS, PARAMS))
    records = [event.round for events in engine.steps for event in events if event.round is not None]
    assert sum(answer.num_mismatched or 0 for answer in answers) == sum(record.is_mismatch for record in records) > 0
    rounds = [{event.trace.verify_ns for event in events if event.trace is not None} for events in engine.steps]
    assert all(len(times) <= 1 for times in rounds)  # one round a step, whose time all its sequences tell
    passed_ms = sum(sum(times) for times in rounds) / 1e6
    assert sum(answer.shared_stages.verify_ms for answer in answers) == pytest.approx(passed_ms)
    assert sum(answer.stages.verify_ms for answer in answers) > 1.5 * passed_ms
    assert all(answer.total_s > answer.decode_s for answer in answers)


def test_a_request_the_engine_refuses_is_an_error_and_the_rest_goes_on(tiny_llama: Target) -> None:
    engine = Engine(tiny_llama, None, plain(), max_slots=2, max_length=32)
    requests = [Request("long", "chat", [5] * 40), REQUESTS[0], Request("empty", "chat", [])]
    answers = {answer.request.prompt_id: answer for answer in answer_all(engine, requests, PARAMS)}
    assert answers["p0"].finish_reason == "length"
    assert answers["long"].finish_reason == answers["empty"].finish_reason == "error"
    assert "40" in (answers["long"].error or "")
    assert answers["long"].to_row()["output_token_ids"] == []


def test_text_arrives_in_pieces_that_add_up(tiny_llama: Target) -> None:
    pieces: dict[str, str] = {}

    def listen(request: Request, text: str) -> None:
        pieces[request.prompt_id] = pieces.get(request.prompt_id, "") + text

    engine = Engine(tiny_llama, None, plain(), max_slots=2)
    for answer in answer_all(engine, REQUESTS, PARAMS, on_text=listen):
        assert pieces.get(answer.request.prompt_id, "") == answer.text


def test_stopping_ends_what_is_in_hand_and_begins_nothing_else(tiny_llama: Target) -> None:
    engine = Engine(tiny_llama, None, plain(), max_slots=2)
    whole = answers_of(engine, REQUESTS)
    asked = iter([False, False, False, *[True] * 9])
    stopped = list(answer_all(engine, REQUESTS, PARAMS, is_stopped=lambda: next(asked)))
    assert [answer.request.prompt_id for answer in stopped] == ["p0", "p1"]
    for answer in stopped:
        assert answer.finish_reason == "abort"
        assert 0 < len(answer.token_ids) < 12
        assert answer.token_ids == whole[answer.request.prompt_id][: len(answer.token_ids)]
    assert answers_of(engine, REQUESTS) == whole  # the engine is none the worse for it


def test_prompts_are_rendered_with_the_configured_system_prompt(tiny_llama: Target) -> None:
    config = TargetConfig(target="./x", drafter="./y", system_prompt="Be brief.")
    request = to_request(Prompt("a", "code", ("add two numbers",)), tiny_llama.tokenizer, config)
    text = tiny_llama.tokenizer.decode(request.token_ids)
    assert "Be brief." in text
    assert text.endswith("assistant\n")
    assert (request.prompt_id, request.task) == ("a", "code")


def test_a_bad_prompt_is_refused_with_its_place() -> None:
    config = TargetConfig(target="./x", drafter="./y")
    with pytest.raises(PromptError, match="f:3: the line is not UTF-8"):
        to_request(BadPrompt("f:3", 3, "the line is not UTF-8 text"), None, config)  # type: ignore[arg-type]
