"""Loads and blocks: which requests a load test sends, in which order, when, and by which arm.

A *load* is closed (so many users, each sending the next request when the last one is answered) or open (requests
arrive as a Poisson process, whether or not earlier ones are answered). A load is measured in *blocks*: each arm (a way
the server is asked to decode) answers the same requests of the block, one arm after the other, the first one changing
from block to block; so drift of the machine reaches all arms alike, and a block is a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from graft_dist.errors import GraftError
from graft_dist.prompts import Prompt

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Load:
    """One kind and strength of load: exactly one of the two is given."""

    concurrency: int | None = None  # users of a closed loop
    rate: float | None = None  # requests per second of an open loop

    @property
    def name(self) -> str:
        return f"closed-{self.concurrency}" if self.concurrency is not None else f"poisson-{self.rate:g}"

    def default_block(self) -> int:
        """Requests of a block: enough that its start and its tail, when users run out of work, do not dominate."""
        return max(4, 2 * self.concurrency) if self.concurrency is not None else 16


def parse_loads(concurrency: str, rates: str) -> list[Load]:
    """Loads from comma-separated numbers of users and of requests per second; either may be empty, not both.

    Raises `GraftError` for what is no such list.
    """
    users = _numbers("--concurrency", concurrency, int, "whole numbers from 1")
    arrivals = _numbers("--rates", rates, float, "numbers above 0")
    if not users and not arrivals:
        raise GraftError("give --concurrency, --rates or both: there is no load to measure")
    return [Load(concurrency=number) for number in users] + [Load(rate=rate) for rate in arrivals]


def _numbers(option: str, listed: str, kind: Callable[[str], Number], allowed: str) -> list[Number]:
    try:
        numbers = [kind(part) for part in listed.split(",")] if listed.strip() else []
    except ValueError:
        numbers = [kind("0")]
    if any(not 0 < number < 10_000 for number in numbers):
        raise GraftError(f"{option} is {listed!r}, allowed are {allowed} with commas between them")
    return list(dict.fromkeys(numbers))


@dataclass(frozen=True)
class Block:
    """The requests of one block, and when they arrive: seconds from its start, None in a closed loop."""

    index: int
    prompts: tuple[Prompt, ...]
    arrivals_s: tuple[float, ...] | None


def blocks(load: Load, prompts: Sequence[Prompt], number: int, size: int, seed: int) -> Iterator[Block]:
    """`number` blocks of `size` requests; the prompts, shuffled once, are gone through again and again."""
    order = np.random.default_rng(seed).permutation(len(prompts))
    for index in range(number):
        chosen = tuple(prompts[order[(index * size + offset) % len(order)]] for offset in range(size))
        arrivals = None if load.rate is None else poisson_arrivals(load.rate, size, seed, index)
        yield Block(index, chosen, arrivals)


def poisson_arrivals(rate: float, number: int, seed: int, block: int) -> tuple[float, ...]:
    """Moments, in seconds, at which `number` requests of a Poisson process of `rate` per second arrive.

    A function of its arguments: every arm of a block meets the same moments.
    """
    if not rate > 0:
        raise ValueError(f"the rate is {rate}; it must be above 0")
    gaps = np.random.default_rng([seed, block]).exponential(1 / rate, number)
    return tuple(float(moment) for moment in np.cumsum(gaps))


def turns(arms: Sequence[str], block: Block) -> list[str]:
    """The arms in the order in which they answer the block."""
    start = block.index % len(arms)
    return [*arms[start:], *arms[:start]]
