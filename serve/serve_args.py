"""What a serving application is built from: `ServeArgs` (the `args` of a Serve config) and `UserConfig` (its policy).

Data only. What can be changed while replicas run is in `UserConfig`; everything else needs new replicas.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Method = Literal["plain", "ddtree", "graft"]

DRAIN_MARGIN_S = 30.0
"""What a replica needs besides its longest request: load balancers to turn away, what was recorded to be written."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RegistryPin(_Strict):
    """A registered version of the target's policy."""

    version: Annotated[int, Field(ge=1)]
    tracking_uri: str


class PolicyPin(_Strict):
    """Where a policy comes from: either a folder that every node sees, or the registry.

    The folder `builtin:NAME` is the policy that comes with the package for the target of that name.
    """

    folder: str | None = None
    registry: RegistryPin | None = None

    @model_validator(mode="after")
    def _check_one(self) -> PolicyPin:
        if (self.folder is None) == (self.registry is None):
            raise ValueError("give either folder or registry")
        return self

    def describe(self) -> str:
        """A short name for people: `v7`, or the folder."""
        return f"v{self.registry.version}" if self.registry is not None else str(self.folder)


class UserConfig(_Strict):
    """What a running application can be told: its policy. None: draft trees with a budget measured at start."""

    policy: PolicyPin | None = None


class Autoscaling(_Strict):
    """Replicas by load: Ray Serve keeps about `target_ongoing_requests` running requests per replica."""

    min_replicas: Annotated[int, Field(ge=1)] = 1
    max_replicas: Annotated[int, Field(ge=1)]
    target_ongoing_requests: Annotated[float | None, Field(gt=0)] = None  # default: 0.7 of the slots
    upscale_delay_s: Annotated[float, Field(ge=0)] = 30.0
    downscale_delay_s: Annotated[float, Field(ge=0)] = 600.0

    @model_validator(mode="after")
    def _check_order(self) -> Autoscaling:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}")
        return self


class AliasPolling(_Strict):
    """Let replicas follow the registry's champion by themselves, instead of being told by `graft promote`."""

    tracking_uri: str
    every_s: Annotated[float, Field(ge=1)] = 60.0


class TrafficRecording(_Strict):
    """Which requests leave their sequences and rounds in a trajectory store, and how: users' data."""

    store: Annotated[str, Field(min_length=1)]  # root of a trajectory store that every replica can write to
    share: Annotated[float, Field(gt=0, le=1)]  # of the requests
    unit_sequences: Annotated[int, Field(ge=1, le=10_000)] = 32  # finished sequences that make a unit of the store
    flush_s: Annotated[float, Field(gt=0)] = 60.0  # a smaller unit is written after so long
    max_pending_mb: Annotated[float, Field(gt=0)] = 64.0  # memory for what is not written yet; more is dropped


class ServeArgs(_Strict):
    """One application: one target model, decoded by one or more replicas. Unknown keys are refused."""

    # The target's YAML file, or the name of a shipped one; every node must be able to read it.
    config: str
    # The model's name in the API; default: the Hugging Face id, or the configuration's short name.
    model: Annotated[str | None, Field(min_length=1)] = None
    # The policy that replicas start with, unless the deployment's user_config says otherwise.
    policy: PolicyPin | None = None
    # The methods that a request may ask for by itself; none: every request gets the application's policy.
    methods: tuple[Method, ...] = ()

    # Replicas: how many, and what Ray reserves for each. CPUs and GPUs default to the configuration's resources.
    replicas: Annotated[int, Field(ge=1)] = 1
    autoscaling: Autoscaling | None = None
    num_cpus: Annotated[float | None, Field(gt=0)] = None
    num_gpus: Annotated[float | None, Field(ge=0)] = None
    # CPU threads that torch uses in a replica; default: the configuration's, else the CPUs reserved.
    threads: Annotated[int | None, Field(ge=1)] = None

    # Limits. Sequences decoded together default to the configuration's max_slots.
    max_slots: Annotated[int | None, Field(ge=1, le=1024)] = None
    max_queue: Annotated[int, Field(ge=0)] = 32  # sequences that wait for a slot; one more is refused with 429
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4_000_000
    max_request_s: Annotated[float, Field(gt=0)] = 900.0  # a request is ended after so long, whatever its client does
    retry_after_s: Annotated[int, Field(ge=1)] = 1  # what a refused client is told to wait

    # API keys: a file with one key a line (# starts a comment), or the name of an environment variable with keys and
    # commas between them. Neither: no key is asked for.
    api_keys_file: str | None = None
    api_keys_variable: str | None = None

    # Health: a round loop that has not come round for so long is stuck, and Serve replaces the replica.
    stuck_after_s: Annotated[float, Field(gt=0)] = 120.0
    health_check_period_s: Annotated[float, Field(gt=0)] = 10.0
    # How long a replica that is to go may take to finish its requests; default: `max_request_s` and a margin.
    drain_timeout_s: Annotated[float | None, Field(gt=0)] = None

    # Follow the registry's champion without being told; off unless given.
    poll_champion: AliasPolling | None = None
    # Prompts and answers are users' data: they appear in no log unless this is true.
    log_prompts: bool = False
    # Keep a sample of the traffic as trajectories, for training; off unless given.
    record_traffic: TrafficRecording | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ServeArgs:
        if self.autoscaling is not None and self.replicas != 1:
            raise ValueError("give either replicas or autoscaling")
        if self.api_keys_file is not None and self.api_keys_variable is not None:
            raise ValueError("give either api_keys_file or api_keys_variable")
        if self.drain_timeout_s is not None and self.drain_timeout_s < self.max_request_s + DRAIN_MARGIN_S:
            raise ValueError(
                f"drain_timeout_s {self.drain_timeout_s:g} would cut requests that max_request_s "
                f"{self.max_request_s:g} allows: give at least {self.max_request_s + DRAIN_MARGIN_S:g}, or a smaller "
                "max_request_s"
            )
        return self

    @property
    def drain_s(self) -> float:
        """Seconds after which a replica that is to go is ended: longer than any request may run."""
        return self.max_request_s + DRAIN_MARGIN_S if self.drain_timeout_s is None else self.drain_timeout_s
