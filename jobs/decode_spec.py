"""DecodeSpec: everything that decides what a collection run records, as plain data that travels to the actors.

Two runs with the same identity on the same models leave the same sequences, so the identity is what names units and
sequences, and what two drivers must not work on at once.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from graft_dist.config import TargetConfig
from graft_dist.draft_tree import MAX_NODES
from graft_dist.errors import ConfigError
from graft_dist.policy import METHODS, DecodingPolicy, exploring, policy_for
from graft_dist.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class DecodeSpec:
    """One way of decoding prompts.

    `budgets` is empty for a fixed budget; otherwise each round draws its budget from it, by a hash of `seed`, the
    sequence and the round. `seed` also derives the sequences' sampling seeds.

    """

    config: TargetConfig
    method: str
    budget: int | None  # ddtree: nodes per round; chain: its depth, None for the whole draft depth; plain: no matter
    budgets: tuple[int, ...] = ()
    sampling: SamplingParams
    seed: int = 0
    num_samples: int = 1
    dense: bool = False
    records_rounds: bool = True  # False keeps the sequences only
    num_hidden: int = 0  # numbers recorded of each of the drafter's hidden states, for gated edge scorers; 0: none

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method is {self.method!r}; allowed: {', '.join(METHODS)}")
        if self.budgets and self.method != "ddtree":
            raise ConfigError(f"budgets are explored with method ddtree only, not with {self.method!r}")
        for budget in (self.budget or 0, *self.budgets):
            if not 0 <= budget <= MAX_NODES:
                raise ConfigError(
                    f"budget is {budget}; it must be between 0, which means not to draft, and {MAX_NODES}"
                )
        if self.num_hidden < 0:
            raise ConfigError(f"hidden is {self.num_hidden}; it must be at least 0")
        if self.num_hidden > 0 and self.method == "plain" and not self.dense:
            raise ConfigError("hidden states are the drafter's: method 'plain' has none to record")
        if self.num_samples < 1:
            raise ConfigError(f"num-samples is {self.num_samples}; it must be at least 1")
        if self.num_samples > 1 and self.sampling.is_greedy:
            raise ConfigError("num-samples above 1 needs a temperature above 0: greedy answers would all be the same")

    @property
    def num_candidates(self) -> int:
        """K as recorded in decoded rounds: a chain keeps the best candidate of each depth."""
        return 1 if self.method == "chain" else self.config.num_candidates

    @property
    def max_budget(self) -> int:
        """The largest budget that a round can have; 0 where nothing is drafted or the drafter's depth decides."""
        if self.method == "plain":
            return 0
        return max(self.budgets) if self.budgets else self.budget or 0

    def policy(self) -> DecodingPolicy:
        """The decoding policy itself; raises `PolicyError` when the parts contradict each other."""
        if self.budgets:
            return exploring(list(self.budgets), self.seed, num_candidates=self.config.num_candidates)
        return policy_for(self.method, budget=self.budget, num_candidates=self.config.num_candidates)

    def policy_json(self) -> dict[str, Any]:
        """The policy as JSON, for hashing and for people."""
        chosen: dict[str, Any] = {"method": self.method, "num_candidates": self.num_candidates}
        if self.budgets:
            chosen |= {"budgets": list(self.budgets), "seed": self.seed}
        elif self.method != "plain":
            chosen["budget"] = self.budget
        return chosen

    def policy_fingerprint(self) -> str:
        """A short hash of the policy."""
        return digest(self.policy_json())

    def identity(self, target_fingerprint: str, drafter_fingerprint: str | None, dtype: str) -> str:
        """A short hash of everything that decides the recorded sequences, the prompts excepted.

        The models count by their content, not by their names, so a retrained drafter under an old name is another run;
        `dtype` is what they were really loaded in.
        The number of actors and slots does not count: it changes timings only.

        """
        config = self.config
        return digest(
            {
                "target": target_fingerprint,
                "drafter": drafter_fingerprint,
                "dtype": dtype,
                "system_prompt": config.system_prompt,
                "enable_thinking": config.enable_thinking,
                "max_length": config.max_length,
                "policy": self.policy_json(),
                "sampling": asdict(self.sampling),
                "seed": None if self.sampling.is_greedy else self.seed,
                "dense": self.dense,
                "rounds": self.records_rounds,
                # Left out when 0, so that runs from before this could be recorded keep their identity.
                **({"hidden": self.num_hidden} if self.num_hidden > 0 else {}),
            }
        )


def digest(value: object) -> str:
    """The first 16 hex digits of the SHA-256 of `value` as canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]
