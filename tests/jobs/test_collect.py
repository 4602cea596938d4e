"""The command line of collect, the pre-flight, and what the job says about itself."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graft_dist.config import TargetConfig
from graft_dist.errors import ConfigError, PolicyError, StoreError
from graft_dist.prompts import Prompt, read_prompts, starter_prompts_path
from graft_dist.sampling import SamplingParams
from jobs import collect
from jobs.cluster import Cluster, check_fits, job_id, wait_until_fits
from jobs.collect_actor import ActorPlan, ModelInfo, WorkerInfo
from jobs.collection import CollectRequest, StopSignal, run
from jobs.collector_loading import load_collector
from jobs.decode_spec import DecodeSpec
from jobs.driver import Ending
from jobs.estimate import check_room, estimate
from jobs.quickstart import follow
from jobs.units import plan
from jobs.work import Report, WorkerLost
from storage import TrajectoryStore, UnitKey, connect
from storage.recorded_rounds import Selection, recorded_rounds
from tests.jobs.fakes import FakePool
from tests.storage.records import PROVENANCE, make_sequence

CONFIG = TargetConfig(target="builtin:smollm2-135m", drafter="builtin:smollm2-135m")
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def parse(*arguments: str) -> CollectRequest:
    required = ["--config", "smollm2-135m", "--prompts", "a.jsonl", "b.jsonl"]
    return collect.request_from(collect._parser().parse_args([*required, *arguments]))


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_VARIABLE, raising=False)


def test_what_is_not_said_comes_from_the_configuration() -> None:
    request = parse("--out", "/data/store")
    config = request.spec.config
    assert (request.spec.method, request.spec.budget, request.spec.budgets) == ("ddtree", config.budget, ())
    assert (request.num_slots, request.pool.num_actors) == (config.max_slots, config.resources.num_actors)
    assert (request.pool.num_cpus, request.pool.num_gpus) == (config.resources.num_cpus, config.resources.num_gpus)
    assert (request.prompts, request.store, request.unit_size) == (("a.jsonl", "b.jsonl"), "/data/store", 16)
    assert request.spec.sampling == SamplingParams(max_new_tokens=128)


def test_every_option_reaches_its_place() -> None:
    request = parse(
        "--out", "s", "--actors", "3", "--slots", "5", "--explore", "0,4,8", "--dense", "--hidden", "32",
        "--max-new-tokens", "9",
        "--temperature", "0.7", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1",
        "--seed", "11", "--num-samples", "2", "--limit", "7",
        "--unit-size", "4", "--commit-units", "6", "--commit-interval", "2.5", "--max-attempts", "5",
        "--progress-interval", "1.5", "--address", "host:1", "--dtype", "float32",
    )  # fmt: skip
    spec = request.spec
    assert (request.pool.num_actors, request.num_slots, request.limit, request.unit_size) == (3, 5, 7, 4)
    assert (spec.budgets, spec.dense, spec.seed, spec.num_samples, spec.config.dtype) == (
        (0, 4, 8),
        True,
        11,
        2,
        "float32",
    )
    assert spec.num_hidden == 32
    assert spec.sampling == SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, max_new_tokens=9)
    assert (request.driver.commit_units, request.driver.commit_interval_s) == (6, 2.5)
    assert (request.driver.max_attempts, request.driver.progress_s, request.address) == (5, 1.5, "host:1")


def test_a_chain_is_as_deep_as_drafted_unless_it_is_told() -> None:
    assert parse("--out", "s", "--method", "chain").spec.budget is None
    assert parse("--out", "s", "--method", "chain", "--budget", "3").spec.budget == 3


def test_an_actor_makes_room_for_its_largest_budget_under_a_memory_limit(tiny_config: TargetConfig) -> None:
    sampling = SamplingParams(max_new_tokens=8)
    config = tiny_config.model_copy(update={"memory_limit_gb": 0.1})
    spec = DecodeSpec(config=config, method="ddtree", budget=16, budgets=(200, 150), sampling=sampling)
    assert spec.max_budget == 200
    assert replace(spec, budgets=()).max_budget == 16
    assert replace(spec, budgets=(), method="plain").max_budget == 0
    assert replace(spec, budgets=(), method="chain", budget=None).max_budget == 0
    load_collector(ActorPlan(spec=spec, store=None, num_slots=1, num_threads=1))  # decodes to warm up


def test_hidden_states_are_recorded_for_decoded_and_dense_rounds(tiny_config: TargetConfig, tmp_path: Path) -> None:
    spec = DecodeSpec(
        config=tiny_config,
        method="ddtree",
        budget=4,
        dense=True,
        num_hidden=5,
        sampling=SamplingParams(max_new_tokens=8),
    )
    collector, models = load_collector(ActorPlan(spec=spec, store=str(tmp_path), num_slots=2, num_threads=1))
    run_id = models.identity(spec)
    units = plan([Prompt(f"p{index}", "chat", (f"add {index}",)) for index in range(2)], spec, run_id, 2)
    store = TrajectoryStore(tmp_path)
    turn = store.begin(run_id, tiny_config.slug, {})
    finished = [*collector.work([], units[0], False).finished]
    while not finished:
        finished += collector.work([units[0].unit_id], None, False).finished
    store.commit(finished[0].files, run_id, turn)
    with connect(tmp_path, threads=1) as connection:
        batches = list(recorded_rounds(connection, Selection(), with_hidden=True))
    assert {kind for batch in batches for kind, _ in batch.groups} == {"decoded", "dense"}
    assert {None if batch.hidden is None else batch.hidden.shape[1:] for batch in batches} == {(4, 5)}
    too_many = replace(spec, num_hidden=33)
    with pytest.raises(PolicyError, match="hidden states of 32 numbers cannot be projected to 33"):
        load_collector(ActorPlan(spec=too_many, store=str(tmp_path), num_slots=1, num_threads=1))


def test_no_write_needs_no_store() -> None:
    assert parse("--no-write").store is None
    with pytest.raises(ConfigError, match="--out is missing"):
        parse()


def test_a_submitted_job_needs_an_absolute_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_VARIABLE, json.dumps({"metadata": {"job_submission_id": "raysubmit_1"}}))
    assert job_id() == "raysubmit_1"
    with pytest.raises(ConfigError, match="--out data is relative"):
        parse("--out", "data")
    assert parse("--out", "/data").store == "/data"
    assert parse("--out", "file:///data").store == "file:///data"
    with pytest.raises(ConfigError, match=r"--summary run\.json is relative"):
        parse("--no-write", "--summary", "run.json")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--config", "nowhere.yaml", "--prompts", "a", "--out", "s"], "nowhere.yaml: no such file"),
        (["--config", "smollm2-135m", "--prompts", "nowhere.jsonl", "--out", "s"], "nowhere.jsonl cannot be read"),
        (["--config", "smollm2-135m", "--prompts", "a", "--out", "s", "--top-p", "0"], "top_p must be above 0"),
        (
            ["--config", "smollm2-135m", "--prompts", "a", "--out", "s", "--method", "plain", "--explore", "0"],
            "ddtree only",
        ),
        (["--config", "smollm2-135m", "--prompts", "a", "--out", "s", "--budget", "4097"], "budget is 4097"),
        (["--config", "smollm2-135m", "--prompts", "a", "--out", "s", "--explore", "4,5000"], "budget is 5000"),
        (["--config", "smollm2-135m", "--prompts", "a", "--no-write", "--summary", "/no/s.json"], "--summary is /no/s"),
        (["--config", "smollm2-135m", "--prompts", str(starter_prompts_path()), "--out", "/dev/null/s"], "/dev/null/s"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_exit_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect.main(arguments) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--method", "magic"], "invalid choice: 'magic'"),
        (["--actors", "0"], "0 is below 1"),
        (["--actors", "x"], "'x' is not a whole number"),
        (["--budget", "x"], "'x' is not a whole number"),
        (["--explore", "a,b"], "'a,b' is not a list of budgets such as 0,4,8,16"),
        (["--commit-interval", "-1"], "-1 is not a number from 0 on"),
        (["--commit-interval", "nan"], "nan is not a number from 0 on"),
        (["--progress-interval", "0"], "0 is not above 0"),
        (["--wait-for-nodes", "soon"], "'soon' is not a number"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_unknown_arguments_end_with_exit_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--out", "s", *arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_signals_are_given_back_after_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def connect(*_: object) -> Cluster:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray takes it
        return Cluster(is_local=False, message="connected", resources={})

    monkeypatch.setattr("jobs.cluster.connect", connect)
    request = replace(parse("--no-write"), prompts=(str(starter_prompts_path()),))
    with pytest.raises(ConfigError, match="the cluster has 0"):
        run(request)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


class UnwritingPool(FakePool):
    """Two workers whose units leave no files; to be had where the driver makes its pool."""

    def __init__(self, *_: object) -> None:
        super().__init__(2)

    def start(self) -> list[WorkerInfo]:
        return [WorkerInfo(ModelInfo("target", "tokenizer", "drafter", 7, "float32"), "host")] * 2

    def close(self) -> None:
        pass

    def wait(self, timeout_s: float) -> list[tuple[int, Report | WorkerLost]]:
        return [(worker, _without_files(answer)) for worker, answer in super().wait(timeout_s)]


def _without_files(answer: Report | WorkerLost) -> Report:
    assert isinstance(answer, Report)
    return replace(answer, finished=tuple(replace(unit, files=()) for unit in answer.finished))


def test_a_summary_has_the_figures_of_the_last_lines_and_where_they_were_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(is_local=False, message="connected", resources={"CPU": 64.0})
    monkeypatch.setattr("jobs.cluster.connect", lambda *_: cluster)
    monkeypatch.setattr("jobs.collection.RayPool", UnwritingPool)
    file = tmp_path / "run.json"
    words = ["--config", "smollm2-135m", "--prompts", str(starter_prompts_path()), "--no-write", "--actors", "2"]
    assert collect.main([*words, "--slots", "4", "--budget", "6", "--summary", str(file)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    summary = json.loads(file.read_text())
    # 60 prompts in units of 16; a fake unit says that it has two sequences of ten tokens
    names = ("ending", "exit_code", "message", "prompts", "sequences", "errors", "tokens", "mat", "rounds", "rows")
    assert [summary[name] for name in names] == ["complete", 0, None, 60, 8, 0, 80, 2.0, 36, 8]
    assert (summary["units"], summary["units_left"], summary["set_aside"], summary["actors_lost"]) == (4, 0, [], 0)
    assert summary["tokens_per_s"] == 80 / summary["seconds"] and summary["megabytes"] == 400 / 1e6
    line = (
        f"complete after {summary['seconds']:.1f} s: 8 sequences (0 of them errors) in 4 units, 80 tokens, "
        f"{summary['tokens_per_s']:.1f} tokens/s, MAT 2.00, 8 rows, 0.0 MB"
    )
    assert line in capsys.readouterr().out
    settings = summary["settings"]
    assert (settings["actors"], settings["slots"], settings["method"], settings["budget"]) == (2, 4, "ddtree", 6)
    assert (settings["dtype"], settings["is_recorded"]) == ("float32", False)
    assert summary["machine"]["cpu"] and summary["versions"]["ray"] and summary["finished_at"]


@pytest.mark.parametrize(("num_good", "code"), [(0, 3), (1, 0)])
def test_started_again_a_run_has_the_exit_code_that_it_had(
    num_good: int, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is left to do, and what is in the store says how it went."""
    monkeypatch.setattr("jobs.cluster.connect", lambda *_: Cluster(False, "connected", {"CPU": 64.0}))
    monkeypatch.setattr("jobs.collection.RayPool", UnwritingPool)
    (tmp_path / "prompts.jsonl").write_text("no JSON\nneither\n")
    words = ["--config", "smollm2-135m", "--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "store")]
    request = collect.request_from(collect._parser().parse_args(words))
    run_id = UnwritingPool().start()[0].models.identity(request.spec)
    (unit,) = plan(read_prompts(request.prompts), request.spec, run_id, request.unit_size, set())
    records = [make_sequence(item.sequence_id, 0, finish_reason="error", error=item.error) for item in unit.items]
    records[:num_good] = [replace(record, finish_reason="length", error=None) for record in records[:num_good]]
    store = TrajectoryStore(tmp_path / "store")
    seq = store.begin(run_id, "smollm2-135m", {"target_fingerprint": "target", "tokenizer_sha256": "tokenizer"})
    key = UnitKey(unit_id=unit.unit_id, attempt="1", run_id=run_id)
    provenance = replace(PROVENANCE, target="smollm2-135m")
    store.commit(store.write_unit(key, provenance, records, []), run_id, seq)
    others = UnitKey(unit_id="others", attempt="1", run_id=run_id)  # of another prompt file, answered well
    answered = make_sequence("another", 0, finish_reason="length")
    store.commit(store.write_unit(others, provenance, [answered], []), run_id, seq + 1)
    assert collect.main(words) == code
    said = capsys.readouterr().out
    assert f"2 sequences of these prompts ({2 - num_good} of them errors)" in said
    assert ("not one prompt could be answered" in said) == (code == 3)


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGINT, Ending.INTERRUPTED), (signal.SIGTERM, Ending.TERMINATED)]
)
def test_the_first_signal_asks_and_the_second_ends_the_process(number: signal.Signals, ending: Ending) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop = StopSignal()
        with pytest.raises(SystemExit, match=str(ending.value)):
            signal.raise_signal(number)  # while it loads there is nothing to finish
        stop.start_waiting()
        signal.raise_signal(number)
        assert stop.ending() is ending
        with pytest.raises(SystemExit, match=str(ending.value)):
            signal.raise_signal(number)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def test_a_store_that_cannot_be_made_is_refused_before_an_actor_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(is_local=False, message="connected", resources={"CPU": 64.0})
    monkeypatch.setattr("jobs.cluster.connect", lambda *_: cluster)
    monkeypatch.setattr("jobs.collection.RayPool", lambda *settings: pytest.fail("an actor was started"))
    request = replace(parse("--out", "/dev/null/s"), prompts=(str(starter_prompts_path()),))
    with pytest.raises(StoreError, match="no trajectory store can be made at /dev/null/s"):
        run(request)


def test_a_job_that_does_not_fit_the_cluster_is_refused_with_both_numbers() -> None:
    check_fits({"CPU": 4.0}, num_actors=4, num_cpus=1.0, num_gpus=0.0)
    with pytest.raises(ConfigError, match=r"8 actors need 8 CPUs \(1 each\), but the cluster has 4"):
        check_fits({"CPU": 4.0}, num_actors=8, num_cpus=1.0, num_gpus=0.0)
    with pytest.raises(ConfigError, match=r"2 actors need 2 GPUs \(1 each\), but the cluster has 0"):
        check_fits({"CPU": 4.0}, num_actors=2, num_cpus=1.0, num_gpus=1.0)
    small = Cluster(is_local=False, message="", resources={"CPU": 4.0})
    with pytest.raises(ConfigError, match="8 actors need 8 CPUs"):  # at once
        wait_until_fits(small, 8, 1.0, 0.0, wait_s=0.0, say=pytest.fail)


def test_the_estimate_counts_every_answer_at_full_length() -> None:
    spec = DecodeSpec(config=CONFIG, method="ddtree", budget=8, sampling=SamplingParams(max_new_tokens=10))
    units = plan([Prompt(f"p{index}", "chat", ("?",)) for index in range(30)], spec, "run", 16)
    decoded, dense = estimate(units, spec, 7), estimate(units, replace(spec, dense=True), 7)
    assert (decoded.num_sequences, decoded.num_tokens, decoded.num_rows) == (30, 300, 330)
    assert dense.num_rows == 630
    with_hidden = [estimate(units, replace(spec, dense=dense, num_hidden=32), 7).num_bytes for dense in (False, True)]
    assert with_hidden[0] > decoded.num_bytes and with_hidden[1] - dense.num_bytes > with_hidden[0] - decoded.num_bytes
    assert dense.num_bytes > decoded.num_bytes > estimate(units, replace(spec, method="plain"), 0).num_bytes
    assert "30 sequences, at most 300 tokens, 330 rows" in decoded.line()


def test_a_run_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = DecodeSpec(config=CONFIG, method="ddtree", budget=8, sampling=SamplingParams())
    expected = estimate(plan([Prompt("p", "chat", ("?",))], spec, "run", 16), spec, 7)
    assert check_room(tmp_path / "not" / "there", expected) > 0
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    with pytest.raises(StoreError, match="0 MB free"):
        check_room(tmp_path, expected)


class FakeJobs:
    """A job server whose job writes a line at every look and ends at the third."""

    def __init__(self) -> None:
        self.looks = 0

    def get_job_info(self, job: str) -> Any:
        self.looks += 1
        is_over = self.looks == 3

        class Status:
            def is_terminal(self) -> bool:
                return is_over

        class Details:
            status = Status()
            driver_exit_code = 3 if is_over else None

        return Details()

    def get_job_logs(self, job: str) -> str:
        return "".join(f"line {number}\n" for number in range(self.looks))


def test_a_followed_jobs_log_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    details = follow(FakeJobs(), "job", poll_s=0.0)  # type: ignore[arg-type]
    assert details.driver_exit_code == 3
    assert capsys.readouterr().out == "line 0\nline 1\nline 2\n"
