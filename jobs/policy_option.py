"""`--policy` and `--cost` of the commands: what they name, read before any model takes its time to load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graft_dist.bench import ORACLE
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


def caps_of(learned: Learned) -> dict[str, int]:
    """The most nodes of the learned policy's trees."""
    return {} if learned.policy is None else {"graft": learned.policy.max_budget}


def read_learned(policy: str | None, cost: Path | None, methods: Sequence[str], config: TargetConfig) -> Learned:
    """Read what the options name; without `--policy`, a learned method takes the policy that ships for the target.

    Raises:
        PolicyError: one sentence, for a policy or file that is missing or broken.
    """
    curve = None if cost is None else read_cost_curve(cost)
    asked = [method for method in methods if method in (*LEARNED_METHODS, ORACLE)]
    if policy is None and not asked:
        return Learned(None, curve)
    return Learned(read_policy(policy, asked[0] if asked else "graft", config), curve)


def read_policy(policy: str | None, method: str, config: TargetConfig | None) -> GraftPolicy:
    """Read the policy that `--policy` names, or the one that ships for the target.

    Raises:
        PolicyError: there is none, or it is broken.
    """
    if policy is not None:
        return GraftPolicy.load(policy_folder(policy))
    folder = None if config is None else shipped_policy(config.slug)
    if folder is None:
        known = "and no target is named" if config is None else f"and none ships for {config.target}"
        raise PolicyError(f"method {method!r} needs a learned policy, {known}: give --policy FOLDER")
    return GraftPolicy.load(folder)


def policy_folder(policy: str) -> Path:
    """The folder that `--policy` names, or a local copy of the registered version that it names.

    Raises:
        RegistryError: the registry holds no such version, or cannot be reached.
    """
    if policy.startswith("models:/"):
        from jobs.registry_command import tracking_uri
        from storage.registry import Registry

        return Registry(tracking_uri(None)).fetch_reference(policy)
    return Path(policy).expanduser()
