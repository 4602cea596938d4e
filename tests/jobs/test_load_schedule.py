"""Arrivals are a Poisson process, the same for every arm; every arm answers the same requests in turn."""

import numpy as np
import pytest
from scipy import stats

from graft_dist.prompts import Prompt
from jobs.load_schedule import Load, blocks, poisson_arrivals, turns

PROMPTS = [Prompt(f"p{index}", "chat", ("?",)) for index in range(5)]


def test_gaps_between_arrivals_are_exponential_with_the_right_mean() -> None:
    arrivals = np.array(poisson_arrivals(4.0, 4000, seed=3, block=0))
    gaps = np.diff(arrivals, prepend=0.0)
    assert (gaps > 0).all()
    assert stats.kstest(gaps, "expon", args=(0, 0.25)).pvalue > 0.01
    assert stats.kstest(gaps, "expon", args=(0, 0.28)).pvalue < 0.01  # the test can tell


def test_arrivals_depend_on_seed_and_block_alone() -> None:
    assert poisson_arrivals(2.0, 9, seed=1, block=4) == poisson_arrivals(2.0, 9, seed=1, block=4)
    others = [poisson_arrivals(2.0, 9, seed=1, block=5), poisson_arrivals(2.0, 9, seed=2, block=4)]
    assert poisson_arrivals(2.0, 9, seed=1, block=4) not in others
    doubled = np.array(poisson_arrivals(4.0, 9, seed=1, block=4))
    assert doubled == pytest.approx(np.array(poisson_arrivals(2.0, 9, seed=1, block=4)) / 2)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_is_above_0(rate: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        poisson_arrivals(rate, 3, seed=0, block=0)


def test_blocks_go_through_the_prompts_again_and_again() -> None:
    made = list(blocks(Load(concurrency=2), PROMPTS, number=5, size=3, seed=7))
    asked = [prompt.id for block in made for prompt in block.prompts]
    assert sorted(asked[:5]) == sorted(asked[5:10]) == sorted(prompt.id for prompt in PROMPTS)
    assert asked[:5] == asked[5:10] != [prompt.id for prompt in PROMPTS]  # shuffled, so that tasks mix in every block
    assert made == list(blocks(Load(concurrency=2), PROMPTS, number=5, size=3, seed=7))
    assert all(block.arrivals_s is None for block in made)
    (opened,) = blocks(Load(rate=2.0), PROMPTS, number=1, size=3, seed=7)
    assert opened.prompts == made[0].prompts and opened.arrivals_s == poisson_arrivals(2.0, 3, 7, 0)


def test_every_arm_is_first_equally_often() -> None:
    orders = [turns(["a", "b", "c"], block) for block in blocks(Load(rate=1.0), PROMPTS, number=6, size=1, seed=0)]
    assert [order[0] for order in orders] == ["a", "b", "c", "a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_names_and_block_sizes() -> None:
    assert [load.name for load in (Load(concurrency=16), Load(rate=0.5), Load(rate=2.0))] == [
        "closed-16", "poisson-0.5", "poisson-2",
    ]  # fmt: skip
    assert [Load(concurrency=1).default_block(), Load(concurrency=16).default_block()] == [4, 32]
