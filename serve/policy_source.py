"""`PolicySource`: makes an `ActivePolicy` from what the application's configuration pins.

Everything is loaded, checked against target and drafter, and built before anybody decodes with it; what does not fit
raises a `GraftError` with one sentence and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graft_dist.config import TargetConfig
from graft_dist.cost_curve import CostCurve
from graft_dist.drafter import DFlashDrafter
from graft_dist.errors import PolicyError
from graft_dist.policy import DecodingPolicy, GraftPolicy, ddtree, plain, shipped_policy
from graft_dist.target import Target
from serve.active_policy import ActivePolicy
from serve.serve_args import Method, PolicyPin
from storage.registry import CHAMPION, Registry


class PolicySource:
    """Policies for one target and drafter.

    Args:
        methods: those that requests may choose by themselves.
        max_budget: most draft nodes the engine has room for under its memory limit; None: it has none.
    """

    def __init__(
        self,
        config: TargetConfig,
        target: Target,
        drafter: DFlashDrafter,
        methods: Sequence[Method],
        max_budget: int | None,
    ) -> None:
        self._config = config
        self._target = target
        self._drafter = drafter
        self._methods = methods
        self._max_budget = max_budget

    def read(self, pin: PolicyPin) -> GraftPolicy:
        """Load a saved policy and check that it fits. Reads files, and the registry where it is asked."""
        policy = GraftPolicy.load(self._folder(pin))
        policy.check(self._target.fingerprint, self._drafter.fingerprint)
        if self._max_budget is not None and policy.max_budget > self._max_budget:
            raise PolicyError(
                f"the policy has budgets up to {policy.max_budget}, but under its memory limit this server was started "
                f"for budgets up to {self._max_budget}"
            )
        return policy

    def saved(self, pin: PolicyPin, policy: GraftPolicy, cost: CostCurve | None) -> ActivePolicy:
        """A saved policy, ready to decode; `cost` is what rounds cost here, where it weighs that."""
        decoding = policy.decoding_policy(self._target, self._drafter, cost)
        version = None if pin.registry is None else pin.registry.version
        label = f"folder-{policy.fingerprint[:8]}" if version is None else f"v{version}"
        return ActivePolicy(label, version, policy.fingerprint, decoding, self._choices(decoding))

    def unsaved(self, decoding: DecodingPolicy) -> ActivePolicy:
        """A policy that was made here."""
        return ActivePolicy(decoding.name, None, None, decoding, self._choices(None))

    def _choices(self, learned: DecodingPolicy | None) -> dict[str, DecodingPolicy]:
        known = {"plain": plain(), "ddtree": ddtree(self._config.budget, self._config.num_candidates)}
        if learned is not None:
            known["graft"] = learned
        return {name: policy for name, policy in known.items() if name in self._methods}

    def _folder(self, pin: PolicyPin) -> Path:
        if pin.folder is not None:
            return _shipped(pin.folder) if pin.folder.startswith("builtin:") else Path(pin.folder)
        assert pin.registry is not None
        return Registry(pin.registry.tracking_uri).fetch(self._config.slug, pin.registry.version)


def _shipped(spec: str) -> Path:
    folder = shipped_policy(spec.removeprefix("builtin:"))
    if folder is None:
        raise PolicyError(f"no policy {spec!r} comes with this package: name a folder, or a registered version")
    return folder


def registered_champion(tracking_uri: str, slug: str) -> int | None:
    """The version that the registry's alias names; None where there is none. Asks over the network."""
    return Registry(tracking_uri).resolve(slug, CHAMPION)
