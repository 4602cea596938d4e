"""The plan: deterministic, resumable, never the same sequence twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graft_dist.config import TargetConfig
from graft_dist.errors import ConfigError
from graft_dist.prompts import BadPrompt, Prompt
from graft_dist.sampling import SamplingParams
from jobs.decode_spec import DecodeSpec
from jobs.units import plan

CONFIG = TargetConfig(target="builtin:smollm2-135m", drafter="builtin:smollm2-135m")
GREEDY = DecodeSpec(config=CONFIG, method="ddtree", budget=8, sampling=SamplingParams())
SAMPLED = replace(GREEDY, sampling=SamplingParams(temperature=0.7), num_samples=3)
PROMPTS = [Prompt(f"p{number}", "chat", (f"Question {number}?",)) for number in range(10)]


def test_a_plan_cuts_prompts_in_order_and_is_the_same_every_time() -> None:
    units = plan(PROMPTS, GREEDY, "run", 4)
    assert [len(unit) for unit in units] == [4, 4, 2]
    assert [item.prompt_id for unit in units for item in unit.items] == [f"p{number}" for number in range(10)]
    assert units == plan(PROMPTS, GREEDY, "run", 4)
    assert len({unit.unit_id for unit in units}) == 3


def test_units_and_sequences_of_another_run_have_other_ids() -> None:
    ours, theirs = plan(PROMPTS, GREEDY, "run", 4), plan(PROMPTS, GREEDY, "other", 4)
    assert not {unit.unit_id for unit in ours} & {unit.unit_id for unit in theirs}
    assert not {item.sequence_id for unit in ours for item in unit.items} & {
        item.sequence_id for unit in theirs for item in unit.items
    }


def test_a_changed_prompt_under_an_old_id_is_another_sequence() -> None:
    changed = [*PROMPTS[:3], Prompt("p3", "chat", ("Another question?",)), *PROMPTS[4:]]
    ours, theirs = plan(PROMPTS, GREEDY, "run", 4), plan(changed, GREEDY, "run", 4)
    assert [a.unit_id == b.unit_id for a, b in zip(ours, theirs, strict=True)] == [False, True, True]


@pytest.mark.parametrize("committed", [{0}, {1}, {0, 2}, {1, 2}, {0, 1, 2}])
def test_what_a_killed_run_left_is_cut_as_before(committed: set[int]) -> None:
    units = plan(PROMPTS, GREEDY, "run", 4)
    done = {item.sequence_id for index in committed for item in units[index].items}
    left = plan(PROMPTS, GREEDY, "run", 4, done)
    assert left == [unit for index, unit in enumerate(units) if index not in committed]


def test_added_prompts_and_another_unit_size_decode_nothing_twice() -> None:
    done = {item.sequence_id for unit in plan(PROMPTS[:6], GREEDY, "run", 4) for item in unit.items}
    left = plan(PROMPTS, GREEDY, "run", 3, done)
    assert [item.prompt_id for unit in left for item in unit.items] == ["p6", "p7", "p8", "p9"]


def test_samples_of_a_prompt_have_their_own_seeds_whatever_the_method() -> None:
    items = [item for unit in plan(PROMPTS[:2], SAMPLED, "run", 16) for item in unit.items]
    assert [item.sample_index for item in items] == [0, 1, 2, 0, 1, 2]
    assert len({item.seed for item in items}) == 6
    chain = replace(SAMPLED, method="chain", budget=None)
    assert [item.seed for item in items] == [
        item.seed for unit in plan(PROMPTS[:2], chain, "another run", 16) for item in unit.items
    ]
    reseeded = replace(SAMPLED, seed=1)
    assert not {item.seed for item in items} & {
        item.seed for unit in plan(PROMPTS[:2], reseeded, "run", 16) for item in unit.items
    }


def test_a_bad_line_becomes_one_item_with_its_reason() -> None:
    units = plan([PROMPTS[0], BadPrompt("file:2", 2, "not JSON")], SAMPLED, "run", 16)
    (unit,) = units
    assert [item.error for item in unit.items] == [None, None, None, "not JSON"]
    assert unit.items[-1].prompt_id == "file:2"


def test_the_identity_is_made_of_content_and_not_of_timing() -> None:
    identity = GREEDY.identity("target", "drafter", "float32")
    assert identity == replace(GREEDY, seed=7, num_samples=1).identity("target", "drafter", "float32")
    others = [
        GREEDY.identity("another target", "drafter", "float32"),
        GREEDY.identity("target", "another drafter", "float32"),
        replace(GREEDY, budget=9).identity("target", "drafter", "float32"),
        replace(GREEDY, budgets=(0, 4)).identity("target", "drafter", "float32"),
        replace(GREEDY, dense=True).identity("target", "drafter", "float32"),
        replace(GREEDY, num_hidden=8).identity("target", "drafter", "float32"),
        replace(GREEDY, method="plain").identity("target", None, "float32"),
        replace(GREEDY, sampling=SamplingParams(max_new_tokens=5)).identity("target", "drafter", "float32"),
        SAMPLED.identity("target", "drafter", "float32"),
        replace(SAMPLED, seed=7).identity("target", "drafter", "float32"),
        GREEDY.identity("target", "drafter", "bfloat16"),
    ]
    assert len({identity, *others}) == 12


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"method": "magic"}, "method is 'magic'"),
        ({"method": "plain", "budgets": (0, 4)}, "explored with method ddtree only"),
        ({"budget": -1}, "budget is -1"),
        ({"budgets": (0, -4)}, "budget is -4"),
        ({"num_hidden": -1}, "hidden is -1"),
        ({"method": "plain", "num_hidden": 4}, "hidden states are the drafter's"),
        ({"num_samples": 0}, "num-samples is 0"),
        ({"num_samples": 2}, "needs a temperature above 0"),
    ],
)
def test_impossible_specifications_are_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        replace(GREEDY, **changes)  # type: ignore[arg-type]
