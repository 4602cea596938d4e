"""`--policy` and `--cost` of the commands: what they name, read before any model takes its time to load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graft_dist.config import TargetConfig
from graft_dist.cost_curve import CostCurve, read_cost_curve
from graft_dist.errors import PolicyError
from graft_dist.policy import LEARNED_METHODS, GraftPolicy, shipped_policy


@dataclass(frozen=True)
class Learned:
    """What a command was given besides its methods."""

    policy: GraftPolicy | None
    cost: CostCurve | None

    @property
    def fingerprint(self) -> str | None:
        """The policy's fingerprint."""
        return None if self.policy is None else self.policy.fingerprint


def read_learned(policy: str | None, cost: Path | None, methods: Sequence[str], config: TargetConfig) -> Learned:
    """Read what the options name; without `--policy`, a learned method takes the policy that ships for the target.

    Raises:
        PolicyError: one sentence, for a policy or file that is missing or broken.
    """
    curve = None if cost is None else read_cost_curve(cost)
    if policy is not None:
        return Learned(GraftPolicy.load(policy_folder(policy)), curve)
    asked = [method for method in methods if method in LEARNED_METHODS]
    if not asked:
        return Learned(None, curve)
    folder = shipped_policy(config.slug)
    if folder is None:
        raise PolicyError(
            f"method {asked[0]!r} needs a learned policy, and none ships for {config.target}: give --policy FOLDER"
        )
    return Learned(GraftPolicy.load(folder), curve)


def policy_folder(policy: str) -> Path:
    """The folder that `--policy` names."""
    return Path(policy).expanduser()
