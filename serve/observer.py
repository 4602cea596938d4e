"""What a replica tells those who watch it (metrics, traffic recording): small reports, handed over as things happen.

A `DecodeObserver` is called on the decode thread, between two rounds, and must return at once: whatever takes longer
belongs on a thread of its own. An exception in one is logged once and switches that observer off; no request suffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from graft_dist.engine import SequenceEvent
from graft_dist.sampling import SamplingParams
from serve.active_policy import ActivePolicy

Outcome = Literal["ok", "cancelled", "refused", "busy", "unauthorized", "too_long", "timeout", "error", "draining"]
"""How a request ended. `refused` is any other mistake of the client's."""


@dataclass(frozen=True)
class Submission:
    """One sequence as it goes to the engine."""

    sequence_id: str
    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams  # with its seed: drawn by the server where the request gave none
    method: str | None  # the method the request asked for; None: the application's policy
    index: int = 0  # among its request's sequences, which are added one after the other


@dataclass(frozen=True)
class StepReport:
    """One step of the engine."""

    events: Sequence[SequenceEvent]  # with a `trace` for every round; with a `round` record where one was asked for
    num_live: int  # sequences that hold a slot
    num_waiting: int  # sequences that wait for one
    step_s: float  # the whole step: reading prompts and one round
    policy_label: str  # see `ActivePolicy.label`
    active: ActivePolicy  # the policy in force in this step
    is_resting: bool = False  # drafting has failed lately: nothing was drafted, whatever the policy


@dataclass(frozen=True)
class RequestReport:
    """One HTTP request to a completion endpoint that has ended."""

    request_id: str
    endpoint: Literal["chat", "completions"]
    outcome: Outcome
    status: int  # HTTP status; 499 for a client that left
    is_streamed: bool
    num_prompt_tokens: int
    num_output_tokens: int
    first_token_s: float | None  # from the arrival of the request; None: there was none
    duration_s: float
    policy: str  # label of the application's policy that was in force when it was last decoded, or else when it came
    method: str | None  # that the request chose instead
    token_gaps_s: Sequence[float]  # between tokens: an event's gap, divided by its tokens; one entry per event


class DecodeObserver(Protocol):
    """Watches the decode thread."""

    def added(self, submission: Submission) -> bool:
        """A sequence has been queued; return whether its rounds shall be recorded (`SequenceEvent.round`)."""
        ...

    def stepped(self, report: StepReport) -> None:
        """The engine has made a step."""
        ...


class RequestObserver(Protocol):
    """Watches requests; called on the replica's event loop, but for `traffic`. Switched off by an exception as well."""

    def requested(self, report: RequestReport) -> None:
        """A request has ended."""
        ...

    def policy_changed(self, label: str, refused: str | None) -> None:
        """Another policy decodes from now on, or one was refused for the reason given and the old one stays."""
        ...

    def traffic(self, outcome: str, number: int) -> None:
        """So many answers of sampled requests were recorded, or dropped for a reason: see `TrafficRecorder`.

        Called on the recorder's thread or the decode thread.
        """
        ...
