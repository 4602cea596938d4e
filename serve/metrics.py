"""What a replica counts and times: Prometheus metrics through Ray, `ray_graft_serve_...` on every node's metrics port.

Owns names, units and buckets. Ray adds the tags application, deployment and replica. Counters hold raw counts and
ratios are made where they are shown: tokens/s is `rate(ray_graft_serve_output_tokens_total[1m])`, the mean acceptance
length `rate(ray_graft_serve_round_tokens_total[5m]) / rate(ray_graft_serve_rounds_total[5m])`. Histograms are for
quantiles only: Ray passes on which bucket a value fell into and not the value, so that a histogram's `_sum` is a guess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ray.serve import metrics as ray_metrics

from graft_dist.rounds import RoundTrace
from serve.observer import RequestReport, StepReport, Submission

Kind = Literal["counter", "gauge", "histogram"]

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.5, 1.0, 5.0)
_LENGTHS = tuple(length + 0.5 for length in range(17))  # one whole number in the middle of each
_BUDGETS = (0.5, 1.5, 2.5, 4.5, 8.5, 12.5, 16.5, 24.5, 32.5, 48.5, 64.5, 96.5, 128.5, 256.5, 512.5, 1024.5)


@dataclass(frozen=True)
class MetricSpec:
    """One metric. Prometheus sees `ray_<name>`, and behind it `_total` (counter) or `_bucket`, `_sum`, `_count`."""

    name: str
    kind: Kind
    description: str
    tags: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported_names(self) -> tuple[str, ...]:
        """The names of its series on the metrics port."""
        endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
        return tuple(f"ray_{self.name}{ending}" for ending in endings[self.kind])


SPECS = (
    MetricSpec("graft_serve_requests", "counter", "Completion requests that have ended, by outcome.", ("outcome",)),
    MetricSpec("graft_serve_prompt_tokens", "counter", "Prompt tokens of requests that have ended."),
    MetricSpec("graft_serve_output_tokens", "counter", "Tokens decoded, of requests that still run too."),
    MetricSpec(
        "graft_serve_time_to_first_token_seconds",
        "histogram",
        "From a request's arrival to its first token.",
        buckets=_SECONDS,
    ),
    MetricSpec(
        "graft_serve_inter_token_latency_seconds",
        "histogram",
        "Time between two deliveries of a request, divided by the tokens that the later one brought.",
        buckets=_TOKEN_SECONDS,
    ),
    MetricSpec("graft_serve_request_seconds", "histogram", "From a request's arrival to its end.", buckets=_SECONDS),
    MetricSpec("graft_serve_live_slots", "gauge", "Sequences that are being decoded."),
    MetricSpec("graft_serve_queued_sequences", "gauge", "Sequences that wait for a slot."),
    MetricSpec("graft_serve_steps", "counter", "Steps of the engine: one round for all live slots each."),
    MetricSpec(
        "graft_serve_stage_seconds",
        "counter",
        "Wall time of the engine's steps by stage: draft, build, verify, commit, and the prompts read between rounds.",
        ("stage",),
    ),
    MetricSpec("graft_serve_rounds", "counter", "Rounds, counted once for each sequence that takes part."),
    MetricSpec("graft_serve_round_tokens", "counter", "Tokens that these rounds committed, bonus tokens included."),
    MetricSpec("graft_serve_draft_nodes", "counter", "Draft nodes that these rounds verified."),
    MetricSpec(
        "graft_serve_acceptance_length",
        "histogram",
        "Tokens that a round committed for a sequence, the bonus token included.",
        buckets=_LENGTHS,
    ),
    MetricSpec(
        "graft_serve_budget",
        "histogram",
        "Draft nodes that a round verified for a sequence.",
        buckets=_BUDGETS,
    ),
    MetricSpec(
        "graft_serve_mismatches",
        "counter",
        "Rounds of a sequence that stopped although the wanted token was in the tree, under another parent.",
    ),
    MetricSpec("graft_serve_policy_version", "gauge", "Registry version of the policy in force; 0: not registered."),
    MetricSpec("graft_serve_policy_refused", "gauge", "1 while the policy that was asked for was refused, else 0."),
    MetricSpec(
        "graft_serve_policy_changes",
        "counter",
        "Policies put in force, and those refused, by the label of the policy in force afterwards.",
        ("policy", "outcome"),
    ),
    MetricSpec(
        "graft_serve_traffic_sequences",
        "counter",
        "Answers of sampled requests: recorded, or the reason why they were dropped (full, store, policy, rounds).",
        ("outcome",),
    ),
)
"""Every metric of a replica."""


class ServingMetrics:
    """Counts what a replica reports; a `DecodeObserver` and a `RequestObserver`. Make it inside the replica."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {spec.name.removeprefix("graft_serve_"): _make(spec) for spec in SPECS}
        self._set("policy_version", 0)
        self._set("policy_refused", 0)
        self._load(0, 0)

    # ---- on the decode thread

    def added(self, submission: Submission) -> bool:
        """Records are not needed: traces carry all that is counted."""
        return False

    def stepped(self, report: StepReport) -> None:
        """Count a step of the engine, and what it brought each sequence."""
        self._load(report.num_live, report.num_waiting)
        self._count("output_tokens", sum(len(event.token_ids) for event in report.events))
        traces = [event.trace for event in report.events if event.trace is not None]
        self._time_stages(traces, report.step_s)
        rounds = [trace for trace in traces if trace.num_tokens > 0]
        for trace in rounds:
            self._observe("acceptance_length", trace.num_tokens)
            self._observe("budget", trace.budget)
        self._count("rounds", len(rounds))
        self._count("round_tokens", sum(trace.num_tokens for trace in rounds))
        self._count("draft_nodes", sum(trace.budget for trace in rounds))
        self._count("mismatches", sum(trace.is_mismatch for trace in rounds))

    def _time_stages(self, traces: Sequence[RoundTrace], step_s: float) -> None:
        """A step's round has the same times in all its traces; what else the step took went into prompts."""
        self._count("steps", 1)
        rest_s = step_s
        if traces:
            round_ = traces[0]
            for stage in ("draft", "build", "verify", "commit"):
                stage_s = getattr(round_, f"{stage}_ns") / 1e9
                rest_s -= stage_s
                self._count("stage_seconds", stage_s, stage=stage)
        self._count("stage_seconds", max(0.0, rest_s), stage="prefill")

    # ---- on the event loop

    def requested(self, report: RequestReport) -> None:
        """Count a request that has ended."""
        self._count("requests", 1, outcome=report.outcome)
        self._observe("request_seconds", report.duration_s)
        self._count("prompt_tokens", report.num_prompt_tokens)
        if report.first_token_s is not None:
            self._observe("time_to_first_token_seconds", report.first_token_s)
        for gap_s in report.token_gaps_s:
            self._observe("inter_token_latency_seconds", gap_s)

    def policy_changed(self, label: str, refused: str | None) -> None:
        """Show which version decodes, and whether another one was refused."""
        version = re.fullmatch(r"v(\d+)", label)
        self._set("policy_version", int(version[1]) if version else 0)
        self._set("policy_refused", int(refused is not None))
        outcome = "in_force" if refused is None else "refused"
        self._count("policy_changes", 1, policy=label, outcome=outcome)

    # ---- on the recorder's thread and the decode thread

    def traffic(self, outcome: str, number: int) -> None:
        """Count sampled answers that are in the store, or were dropped."""
        self._count("traffic_sequences", number, outcome=outcome)

    # ---- all

    def _load(self, num_live: int, num_waiting: int) -> None:
        self._set("live_slots", num_live)
        self._set("queued_sequences", num_waiting)

    def _count(self, name: str, value: float, **tags: str) -> None:
        if value > 0:  # Ray refuses to count nothing
            self._metrics[name].inc(value, tags)

    def _observe(self, name: str, value: float) -> None:
        self._metrics[name].observe(value, {})

    def _set(self, name: str, value: float) -> None:
        self._metrics[name].set(value, {})


def _make(spec: MetricSpec) -> Any:
    tags: Any = spec.tags  # Ray's annotation allows exactly one, its code any number
    if spec.kind == "histogram":
        return ray_metrics.Histogram(spec.name, spec.description, list(spec.buckets), tags)
    kind = ray_metrics.Counter if spec.kind == "counter" else ray_metrics.Gauge
    return kind(spec.name, spec.description, tags)
