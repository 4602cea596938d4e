"""Random numbers that are a function of (seed, counters) and of nothing else.

There is no stream to advance: whoever asks for the number of a given counter gets the same one, in any order and any
number of times. That is what lets every decoding method give the same text for the same seed, and a replayed
round draw the same budget. Not for cryptography.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def hash_counters(seed: int, *counters: int) -> int:
    """Return a 64-bit hash of `seed` and `counters` (integers of any sign, taken modulo 2**64).

    With one counter it is the counter-th output of SplitMix64 seeded with the mixed seed; further counters chain.
    """
    state = _mix((seed + _GAMMA) & _MASK)
    for counter in counters:
        state = _mix((state + (counter + 1) * _GAMMA) & _MASK)
    return state


def uniform(seed: int, *counters: int) -> float:
    """Return a number strictly between 0 and 1 that depends on `seed` and `counters` only.

    It lies on a grid of 2**52 midpoints: with 53 bits the largest would round to 1.0.
    """
    return ((hash_counters(seed, *counters) >> 12) + 0.5) * 2.0**-52


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one of several answers to a prompt: the first has the seed given, others derived ones."""
    return hash_counters(seed, choice) if choice else seed


def _mix(value: int) -> int:
    """SplitMix64's finaliser."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
