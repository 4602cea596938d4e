"""Load test, soak and traffic recording against a real service behind a real socket, in float32."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from graft_dist.audit import Kind
from graft_dist.config import TargetConfig
from graft_dist.errors import GraftError
from graft_dist.policy import ddtree
from graft_dist.prompts import Prompt
from graft_dist.target import Target
from jobs import cli
from jobs.offline_answers import OfflineAnswers
from jobs.serve_bench import Server
from jobs.soak import Judgement, Question, ReplicaControl, SoakPlan, run_soak
from serve.active_policy import ActivePolicy
from serve.serve_args import UserConfig
from storage import run_query
from tests.serve.conftest import Running, recite

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Recorded:
    """A service that records all of its traffic, and where."""

    running: Running
    store: Path


@pytest.fixture(scope="module")
def recorded(serve_reciter: Callable[..., Running], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    store = tmp_path_factory.mktemp("traffic") / "store"
    traffic = {"store": str(store), "share": 1.0, "unit_sequences": 8}
    running = serve_reciter(methods=("plain", "ddtree"), max_queue=8, record_traffic=traffic)
    asyncio.run(running.service.reconfigure(UserConfig()))
    yield Recorded(running, store)
    running.close()


def test_a_load_test_of_a_real_service(recorded: Recorded, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": f"p{index}", "task": "chat", "turns": [f"Recite {index}"]}) for index in range(4)]
    prompts.write_text("\n".join(lines))
    out = tmp_path / "out"
    fixed = ["--prompts", str(prompts), "--out", str(out), "--url", recorded.running.url, "--arms", "plain,ddtree"]
    loads = ["--concurrency", "1,3", "--rates", "50", "--blocks", "2", "--block-requests", "4"]
    assert cli.run(["bench-serve", *fixed, *loads, "--max-new-tokens", "12"]) == 0
    summary = {(row["load"], row["arm"]): row for row in json.loads((out / "summary.json").read_text())}
    assert {load for load, _ in summary} == {"closed-1", "closed-3", "poisson-50"}
    for (_, arm), row in summary.items():
        assert row["num_ok"] == row["num_requests"] == 8
        assert row["differs_from_plain"] == 0  # float32: the text is the same, whatever drafts
        assert row["mean_budget"] == 0.0 if arm == "plain" else row["mean_budget"] > 0.0
        assert row["ttft_p50_ms"] > 0 and row["itl_p99_ms"] >= row["itl_p50_ms"] > 0
    rows = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    assert {row["num_tokens"] for row in rows} == {12}
    rounds = {arm: sum(row["num_rounds"] for row in rows if row["arm"] == arm) for arm in ("plain", "ddtree")}
    assert rounds["plain"] == 24 * 11 > rounds["ddtree"]
    command = [sys.executable, "-S", "-I", "bench/verify.py", str(out)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_a_short_soak_of_a_real_service(recorded: Recorded, reciting_config: TargetConfig, tmp_path: Path) -> None:
    numbers = itertools.count(1)

    def swap() -> str:
        """Another policy between two rounds, as a new champion would come."""
        number = next(numbers)
        methods = recorded.running.service.decode.active.methods
        active = ActivePolicy(f"v{number}", number, f"p-{number}", ddtree(2 + number % 5, 4), methods)
        asyncio.run(recorded.running.service.decode.swap(active))
        return active.label

    plan = SoakPlan(
        minutes=0.02, concurrency=4, max_new_tokens=24, seed=0, leave_share=0.2, swap_every_s=0.1, sample_every_s=0.05,
        tolerates_ties=False,
    )  # fmt: skip
    prompts = [Prompt(f"p{index}", "chat", (f"Question {index}",)) for index in range(24)]
    server = Server(url=recorded.running.url, model=None, timeout_s=60.0)
    auditor = OfflineAnswers(reciting_config)
    code = run_soak(server, plan, prompts, ReplicaControl(swap, lambda: [os.getpid()]), tmp_path / "out", auditor)
    report = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert code == 0, report["problems"]
    assert report["reference"] == "plain decoding in float32, offline"
    assert report["num_differing"] == 0 and report["num_compared"] >= 12 and len(report["swaps"]) >= 1
    assert recorded.running.service.health()["sequences"] == 0


def test_the_audit_finds_what_is_wrong_with_an_answer(reciting_config: TargetConfig, reciting_target: Target) -> None:
    auditor = OfflineAnswers(reciting_config)
    auditor.check(f"graft-{reciting_target.fingerprint[:8]}-v7+refused")
    with pytest.raises(GraftError, match="another target than --config"):
        auditor.check("graft-00000000-v7")
    fields = {"model": "reciter", "max_tokens": 30, "seed": 3, "temperature": 0, "graft": {"token_ids": True}}
    asked = [
        Question("greedy", "text", fields | {"prompt": "recite"}),
        Question("stopped", "chat", fields | {"messages": [{"role": "user", "content": "recite"}], "stop": ["世👋"]}),
        Question("several", "text", fields | {"prompt": "recite", "temperature": 0.9, "n": 2}),
    ]
    right = auditor.answers(asked)
    assert right["greedy"].texts == (recite(30),) and right["stopped"].texts == ("Stop? é",)
    assert right["greedy"].finish_reasons == ("length",) and right["stopped"].finish_reasons == ("stop",)
    for question in asked:
        assert auditor.judge(question, right[question.name]) == Judgement()
    greedy = right["greedy"]
    ids = greedy.token_ids[0]
    (bug,) = auditor.judge(asked[0], replace(greedy, token_ids=((*ids[:4], ids[6], *ids[5:]),))).differences
    assert (bug.position, bug.reference_token, bug.method_token, bug.kind) == (4, ids[4], ids[6], Kind.BUG)
    cut = replace(greedy, texts=(recite(29),), num_tokens=29, token_ids=(ids[:29],))
    assert not auditor.judge(asked[0], cut).is_tie
    leaking = replace(right["stopped"], texts=("Stop? é世",))
    assert auditor.judge(asked[1], leaking).faults == ("the text of choice 0 is not that of its tokens",)
    swapped = replace(right["several"], token_ids=right["several"].token_ids[::-1])
    assert not auditor.judge(asked[2], swapped).is_tie


def test_the_traffic_is_in_the_store(recorded: Recorded) -> None:
    """After the tests above: what was served has been recorded, whole, but for sequences that saw a swap."""
    client = recorded.running.client()
    asked = client.chat.completions.create(
        model="reciter", messages=[{"role": "user", "content": "Keep this"}], temperature=0, max_tokens=9, n=2,
        extra_headers={"x-request-id": "kept"},
    )  # fmt: skip
    recorded.running.close()
    counts = recorded.running.service.health()["recorded_traffic"]
    num_swapped = counts["dropped"].get("policy", 0)
    assert counts["pending"] == 0 and counts["dropped"] in ({}, {"policy": num_swapped})
    assert counts["offered"] == counts["recorded"] + num_swapped
    assert recorded.running.reports.traffic_outcomes == {"recorded": counts["recorded"]} | counts["dropped"]
    sql = "SELECT source, task, count(*) AS n, bool_and(error IS NULL) AS is_fine FROM sequences GROUP BY ALL"
    assert run_query(recorded.store, sql).to_pylist() == [
        {"source": "traffic", "task": "traffic", "n": counts["recorded"], "is_fine": True}
    ]
    (kept,) = run_query(
        recorded.store,
        """
        SELECT count(DISTINCT sequence_id) AS num_answers, list(DISTINCT len(output_token_ids)) AS lengths,
            sum(num_tokens)::BIGINT AS num_tokens
        FROM sequences JOIN rounds USING (unit_id, attempt, sequence_id) WHERE prompt_id = 'kept'
        """,
    ).to_pylist()
    assert kept == {"num_answers": 2, "lengths": [9], "num_tokens": 16}  # the first token of each is the prompt's own
    assert len(asked.choices) == 2
    policies = {row["policies"] for row in run_query(recorded.store, "runs").to_pylist()}
    assert any("plain" in each and "ddtree" in each for each in policies)


def test_a_dead_store_slows_and_fails_no_request(serve_reciter: Callable[..., Running], tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    traffic = {"store": str(tmp_path / "store"), "share": 1.0, "unit_sequences": 1}
    running = serve_reciter(record_traffic=traffic)
    try:
        for _ in range(3):
            answer = running.client().chat.completions.create(
                model="reciter", messages=[{"role": "user", "content": "Recite"}], temperature=0, max_tokens=5
            )
            assert answer.usage is not None and answer.usage.completion_tokens == 5
    finally:
        running.close()
    assert running.service.health()["recorded_traffic"] == {
        "offered": 3,
        "recorded": 0,
        "pending": 0,
        "dropped": {"store": 3},
    }
