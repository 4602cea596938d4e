"""A replica's metrics, as Prometheus sees them on Ray's own endpoint, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from openai import BadRequestError, OpenAI
from ray import serve
from ray.serve.config import HTTPOptions

from graft_dist.config import TargetConfig
from jobs.ray_head import free_ports
from serve.app import build
from serve.metrics import SPECS, MetricSpec, ServingMetrics
from serve.serve_args import ServeArgs
from tests.serve.conftest import MODEL

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "infra" / "grafana" / "serving.json"
EXPORTED = {name: spec for spec in SPECS for name in spec.exported_names}

Sample = tuple[str, dict[str, str], float]


# ---- The dashboard


def queries() -> list[str]:
    """Every PromQL expression of the dashboard, those of its variables and annotations included."""
    found: list[str] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            found.extend(node[key] for key in ("expr", "query") if isinstance(node.get(key), str))
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(json.loads(DASHBOARD.read_text(encoding="utf-8")))
    return [query for query in found if query != "prometheus"]


def test_every_query_names_a_metric_that_exists() -> None:
    assert len(queries()) > 20
    for query in queries():
        names = re.findall(r"\bray_\w+", query)
        assert names and [name for name in names if name not in EXPORTED] == [], query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query


def test_queries_group_by_tags_that_their_metric_has() -> None:
    of_ray = {"application", "deployment", "replica", "le"}
    for query in queries():
        for inner, name in re.findall(r"sum(?: by \(([^)]*)\))? ?\((?:rate|increase)\((ray_\w+)", query):
            groups = {group.strip() for group in inner.split(",") if group.strip()}
            assert groups <= of_ray | set(EXPORTED[name].tags), query


def test_no_query_trusts_a_histogram_s_sum() -> None:
    """Ray passes on buckets, not values."""
    assert [query for query in queries() if "_sum" in query] == []


def test_every_metric_is_shown() -> None:
    shown = set(re.findall(r"\bray_\w+", " ".join(queries())))
    assert [spec.name for spec in SPECS if not shown & set(spec.exported_names)] == []


def test_every_metric_and_tag_is_explained() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `ray_(\w+?)(?:_total)?` \| (.*) \|$", page, re.MULTILINE))
    assert set(rows) == {spec.name for spec in SPECS}
    for spec in SPECS:
        assert rows[spec.name].startswith(f"{spec.kind} | {spec.description}")
        assert all(f"`{tag}`" in rows[spec.name] for tag in spec.tags)


def test_panels_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


# ---- What is set without a cluster


class Recorded:
    """In place of Ray's metric: remembers values by tags."""

    def __init__(self, spec: MetricSpec) -> None:
        self.spec = spec
        self.values: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[self._tags(tags)] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        self.values[self._tags(tags)] += value

    def _tags(self, tags: dict[str, str]) -> tuple[str, ...]:
        assert set(tags) == set(self.spec.tags)
        return tuple(tags[name] for name in self.spec.tags)


def test_a_policy_change_shows_the_version_in_force_and_whether_another_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, Recorded] = {}

    def make(spec: MetricSpec) -> Recorded:
        return made.setdefault(spec.name.removeprefix("graft_serve_"), Recorded(spec))

    monkeypatch.setattr("serve.metrics._make", make)
    metrics = ServingMetrics()

    def shown() -> tuple[float, float]:
        return made["policy_version"].values[()], made["policy_refused"].values[()]

    assert shown() == (0, 0)
    metrics.policy_changed("v7", "why")
    assert shown() == (7, 1)
    metrics.policy_changed("v12", None)
    assert shown() == (12, 0)
    metrics.policy_changed("ddtree", "v12 is away")  # a label of no registered version
    assert shown() == (0, 1)
    assert made["policy_changes"].values == {
        ("v7", "refused"): 1, ("v12", "in_force"): 1, ("ddtree", "refused"): 1
    }  # fmt: skip


# ---- The endpoint

REPORT_MS = 2000


@pytest.fixture(scope="module")
def url(reciting_config: TargetConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Serve application with one replica, on a Ray of its own that exports its metrics often."""
    target = tmp_path_factory.mktemp("target") / "reciter.yaml"
    target.write_text(yaml.safe_dump(reciting_config.model_dump(mode="json")), encoding="utf-8")
    (port,) = free_ports(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token to the home directory
        patch.setenv("RAY_worker_niceness", "0")  # the lowest priority by default: loading would take minutes
        ray.init(
            address="local",  # whatever else runs here
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100_000_000,
            log_to_driver=False,
            _system_config={"metrics_report_interval_ms": REPORT_MS},
        )
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        args = ServeArgs(config=str(target), model=MODEL, methods=("plain", "ddtree"))
        serve.run(build(args), name="reciter", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def scrape() -> list[Sample]:
    """What Prometheus would read from this node."""
    (node,) = ray.nodes()
    with urllib.request.urlopen(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", timeout=30) as response:
        text = response.read().decode()
    samples = []
    for line in text.splitlines():
        found = re.fullmatch(r"(ray_graft_serve_\w+)\{(.*)\} (\S+)", line)
        if found:
            samples.append((found[1], dict(re.findall(r"(\w+)=\"([^\"]*)\"", found[2])), float(found[3])))
    return samples


def total(samples: list[Sample], name: str, **tags: str) -> float:
    return sum(value for found, own, value in samples if found == name and tags.items() <= own.items())


def scrape_until(name: str, value: float) -> list[Sample]:
    """Wait until everything before the last request has reached the endpoint."""
    deadline = time.monotonic() + 120
    while True:
        samples = scrape()
        if total(samples, name) == value:
            return samples
        assert time.monotonic() < deadline, samples
        time.sleep(0.3)


@pytest.mark.slow
@pytest.mark.ray
def test_the_endpoint_tells_what_happened(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120) as client:
        messages: Any = [{"role": "user", "content": "Recite!"}]
        whole = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=40,
            temperature=0,
            extra_body={"graft": {"method": "ddtree", "metrics": True}},
        )
        pieces = list(
            client.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=20,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"graft": {"method": "plain", "metrics": True}},
            )
        )
        with pytest.raises(BadRequestError):
            client.chat.completions.create(model=MODEL, messages=messages, max_tokens=10_000)
    assert whole.usage is not None and pieces[-1].usage is not None
    samples = scrape_until("ray_graft_serve_requests_total", 3)
    assert total(samples, "ray_graft_serve_requests_total", outcome="ok") == 2
    assert total(samples, "ray_graft_serve_requests_total", outcome="too_long") == 1
    num_output = whole.usage.completion_tokens + pieces[-1].usage.completion_tokens
    num_prompt = whole.usage.prompt_tokens + pieces[-1].usage.prompt_tokens
    assert total(samples, "ray_graft_serve_output_tokens_total") == num_output
    assert total(samples, "ray_graft_serve_prompt_tokens_total") >= num_prompt
    for name in ("time_to_first_token_seconds", "request_seconds"):
        assert total(samples, f"ray_graft_serve_{name}_count") >= 2
    # A request's first token belongs to no round.
    assert total(samples, "ray_graft_serve_round_tokens_total") == num_output - 2
    told = [one.model_extra["metrics"] for one in (whole, pieces[-1]) if one.model_extra]
    num_rounds = sum(one["graft"]["rounds"] for one in told)
    assert total(samples, "ray_graft_serve_rounds_total") == num_rounds
    for name in ("acceptance_length", "budget"):
        assert total(samples, f"ray_graft_serve_{name}_count") == num_rounds
    num_long = total(samples, "ray_graft_serve_acceptance_length_bucket", le="+Inf")
    assert num_long == num_rounds >= total(samples, "ray_graft_serve_acceptance_length_bucket", le="1.5")
    assert total(samples, "ray_graft_serve_inter_token_latency_seconds_count") == num_rounds
    drafted = sum(one["speculative_decoding"]["num_draft_tokens"] for one in told)
    assert total(samples, "ray_graft_serve_draft_nodes_total") == drafted > 0
    assert total(samples, "ray_graft_serve_mismatches_total") == sum(one["graft"]["mismatch"] for one in told)
    for stage in ("draft", "build", "verify", "commit", "prefill"):
        assert total(samples, "ray_graft_serve_stage_seconds_total", stage=stage) > 0
    assert total(samples, "ray_graft_serve_steps_total") >= num_rounds
    assert total(samples, "ray_graft_serve_policy_version") == 0
    assert total(samples, "ray_graft_serve_policy_changes_total", outcome="in_force") >= 1
    assert total(samples, "ray_graft_serve_live_slots") == total(samples, "ray_graft_serve_queued_sequences") == 0
    seen = {name for name, _, _ in samples}
    assert {
        name for name in EXPORTED if not re.search("mismatches|traffic", name)
    } - seen == set()  # those may not happen
    assert {name for name in seen if name not in EXPORTED} == set()
    assert {tags["application"] for _, tags, _ in samples} == {"reciter"}
    assert all("replica" in tags for _, tags, _ in samples)
    gauges = {spec.exported_names[0] for spec in SPECS if spec.kind == "gauge"}
    deadline = time.monotonic() + 6 * REPORT_MS / 1000
    while time.monotonic() < deadline:  # they stay while nothing is decoded and no policy changes
        assert gauges - {name for name, _, _ in scrape()} == set()
        time.sleep(0.2)
