"""Collection on a real Ray cluster into a real store, with processes killed at the worst moments.

Whatever happens, a rerun ends with every prompt once, and with rounds equal to those of an undisturbed run.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from graft_dist.config import TargetConfig
from jobs.ray_head import RayHead
from storage import connect

pytestmark = [pytest.mark.slow, pytest.mark.ray]

REPOSITORY = Path(__file__).resolve().parents[2]
CHAOS = Path(__file__).with_name("chaos_driver.py")
ON_A_BARE_MACHINE = """import runpy, sys
import ray
import psutil  # Ray's own
psutil.process_iter = lambda *_, **__: iter(())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")"""
"""Runs a script as if no Ray ran here: without an address Ray joins any cluster among the machine's processes."""
NUM_PROMPTS = 20
UNIT_SIZE = 4
QUERIES = {
    "sequences": """SELECT * EXCLUDE (attempt, date, hardware, prefill_s, decode_s, written_at)
                    FROM sequences ORDER BY sequence_id""",
    "rounds": """SELECT * EXCLUDE (attempt, date, draft_ns, build_ns, verify_ns, commit_ns, batch_size, batch_rows,
                                   candidate_ids, candidate_log_probs, conf, degen, parent_logits, parent_logsumexp),
                        CASE WHEN kind = 'dense' OR budget > 0
                             THEN [candidate_ids, candidate_log_probs, parent_logits, [parent_logsumexp]]
                        END
                 FROM rounds ORDER BY sequence_id, kind, round_index""",
}
"""Everything a reader sees but what differs from one run to the next: names of attempts, timings, the neighbours in
a batch, and what was drafted for a sequence of budget 0 (nothing, unless a neighbour was drafted for)."""


@dataclass
class Bench:
    """Where the runs of this module work: a cluster, a configuration, prompts."""

    head: RayHead
    config: Path
    prompts: Path
    folder: Path

    def arguments(self, store: str) -> list[str]:
        return [
            "--config", str(self.config), "--prompts", str(self.prompts), "--out", str(self.folder / store),
            "--actors", "2", "--slots", "3", "--method", "ddtree", "--explore", "0,3,6", "--dense",
            "--max-new-tokens", "24", "--unit-size", str(UNIT_SIZE), "--commit-units", "1", "--progress-interval", "1",
        ]  # fmt: skip

    def start(self, store: str, *more: str, chaos: str | None = None, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(REPOSITORY / "jobs" / "collect.py")]
        if chaos is not None:
            command = [sys.executable, str(CHAOS), chaos]
        known = {"RAY_ADDRESS": self.head.address, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        return subprocess.Popen(
            [*command, *self.arguments(store), *more],
            cwd=self.folder,
            env=self.head.environment(known | environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, store: str, *more: str, chaos: str | None = None) -> tuple[int, str]:
        """The exit code and the output."""
        process = self.start(store, *more, chaos=chaos)
        try:
            output, _ = process.communicate(timeout=400)
        finally:
            process.kill()
        print(output)
        return process.returncode, output

    def rows(self, store: str) -> dict[str, list[tuple[Any, ...]]]:
        with connect(self.folder / store, threads=1) as connection:
            return {table: connection.execute(query).fetchall() for table, query in QUERIES.items()}


@pytest.fixture(scope="module")
def bench(ray_head: RayHead, tiny_config: TargetConfig, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("collect")
    config = folder / "tiny.yaml"
    config.write_text(json.dumps(tiny_config.model_dump(mode="json")))  # JSON is YAML
    prompts = folder / "prompts.jsonl"
    lines = [
        json.dumps({"id": f"p{number}", "task": ("code", "chat")[number % 2], "turns": [f"Say {number} in words."]})
        for number in range(NUM_PROMPTS)
    ]
    lines[5] = '{"id": "p5", "turns": ["broken'
    lines[9] = json.dumps({"id": "p9", "task": "chat", "turns": ["far too long " * 100]})
    lines[13] = json.dumps({"id": "p13", "task": "chat", "turns": [""]})
    lines[18] = json.dumps({"id": "p18", "task": "chat", "turns": [18]})
    prompts.write_text("\n".join(lines) + "\n")
    return Bench(ray_head, config, prompts, folder)


@pytest.fixture(scope="module")
def undisturbed(bench: Bench) -> dict[str, list[tuple[Any, ...]]]:
    code, output = bench.run("undisturbed")
    assert code == 0
    assert "complete after" in output
    return bench.rows("undisturbed")


@dataclass
class Reader:
    """Reads a store over and over in a thread; every look has to show whole units only, and never less than before."""

    store: Path
    num_looks: int = 0
    faults: list[str] = field(default_factory=list)

    def __enter__(self) -> Reader:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.faults == []
        assert self.num_looks > 3

    def _loop(self) -> None:
        last = 0
        while not self._stop.wait(0.1):
            with connect(self.store, threads=1) as connection:
                count, distinct = connection.execute(
                    "SELECT count(*), count(DISTINCT sequence_id) FROM sequences"
                ).fetchall()[0]
                torn = connection.execute(
                    """SELECT sequence_id FROM sequences LEFT JOIN rounds USING (sequence_id)
                       GROUP BY sequence_id, num_rounds
                       HAVING count(*) FILTER (kind = 'decoded') != num_rounds"""
                ).fetchall()
            self.num_looks += 1
            if count % UNIT_SIZE or count != distinct or count < last or torn:
                self.faults.append(f"{count} sequences, {distinct} different, {last} before, torn: {torn}")
            last = count


def assert_same(ours: dict[str, list[tuple[Any, ...]]], theirs: dict[str, list[tuple[Any, ...]]]) -> None:
    for table in ("sequences", "rounds"):
        assert len(ours[table]) == len(theirs[table]) > 0
        for a, b in zip(ours[table], theirs[table], strict=True):
            assert is_close(a, b), f"{table}: {[pair for pair in zip(a, b, strict=True) if not is_close(*pair)]}"


def is_close(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(is_close(x, y) for x, y in zip(a, b, strict=True))
    return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-3) if isinstance(a, float) else bool(a == b)


def test_every_prompt_is_there_once_bad_ones_with_their_reason(
    bench: Bench, undisturbed: dict[str, list[tuple[Any, ...]]]
) -> None:
    assert len(undisturbed["sequences"]) == NUM_PROMPTS
    with connect(bench.folder / "undisturbed", threads=1) as connection:
        errors = dict(connection.execute("SELECT prompt_id, error FROM sequences WHERE error IS NOT NULL").fetchall())
        kinds = dict(connection.execute("SELECT kind, count(*) FROM rounds GROUP BY kind").fetchall())
        tokens = connection.execute(
            "SELECT sum(len(output_token_ids) - 1) FROM sequences WHERE error IS NULL"
        ).fetchall()
        committed = connection.execute("SELECT sum(num_tokens) FROM rounds WHERE kind = 'decoded'").fetchall()
        budgets = connection.execute("SELECT DISTINCT budget FROM rounds WHERE kind = 'decoded'").fetchall()
    reasons = {
        "prompts.jsonl:6": "not valid JSON",
        "p9": "leaves no room",
        "prompts.jsonl:14": "a turn is '', allowed is a text that is not empty",
        "prompts.jsonl:19": "a turn is 18, allowed is a text that is not empty",
    }
    assert errors.keys() == reasons.keys()
    assert [prompt_id for prompt_id, reason in reasons.items() if reason not in errors[prompt_id]] == []
    assert kinds["dense"] == tokens[0][0] == committed[0][0]
    assert {budget for (budget,) in budgets} >= {0, 3, 6}


def test_on_a_machine_without_a_cluster_one_is_started_for_the_job(bench: Bench) -> None:
    command = [sys.executable, "-c", ON_A_BARE_MACHINE, str(REPOSITORY / "jobs" / "collect.py")]
    known = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0", "PYTHONPATH": str(REPOSITORY)}
    with tempfile.TemporaryDirectory(prefix="graft-ray-", ignore_cleanup_errors=True) as folder:  # short, for sockets
        environment = bench.head.environment(known | {"RAY_TMPDIR": folder})
        environment.pop("RAY_ADDRESS", None)
        done = subprocess.run(
            [*command, *bench.arguments("bare"), "--limit", str(UNIT_SIZE)],
            cwd=bench.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "no Ray cluster given, so one was started here" in done.stdout
    rows = bench.rows("bare")
    assert len(rows["sequences"]) == UNIT_SIZE
    assert len(rows["rounds"]) > UNIT_SIZE


def test_a_run_that_is_complete_decodes_nothing_again(
    bench: Bench, undisturbed: dict[str, list[tuple[Any, ...]]]
) -> None:
    code, output = bench.run("undisturbed")
    assert code == 0
    assert f"{NUM_PROMPTS} sequences are there already" in output
    assert bench.rows("undisturbed") == undisturbed


def test_killed_actors_cost_only_what_they_had_in_hand(
    bench: Bench, undisturbed: dict[str, list[tuple[Any, ...]]]
) -> None:
    chaos = "kill-actors:unit-finished:1"
    store = chaos.replace(":", "-")
    with Reader(bench.folder / store):
        code, output = bench.run(store, chaos=chaos)
    assert code == 0
    assert "was lost" in output
    assert_same(bench.rows(store), undisturbed)


def test_a_driver_that_is_killed_again_and_again_loses_and_doubles_nothing(
    bench: Bench, undisturbed: dict[str, list[tuple[Any, ...]]]
) -> None:
    """Before a commit, after one, and together with its actors: each start finds what those before it committed."""
    committed = [0]
    with Reader(bench.folder / "killed"):
        for chaos in ("kill:before-commit:2", "kill:after-commit:1", "kill-all:before-commit:1"):
            code, output = bench.run("killed", "--actors", "1", chaos=chaos)
            assert code == -9
            assert committed[-1] == 0 or f"{committed[-1]} sequences are there already" in output
            committed.append(len(bench.rows("killed")["sequences"]))
        assert 0 < committed[1] < committed[2] == committed[3] < NUM_PROMPTS
        code, output = bench.run("killed", "--actors", "1")
    assert code == 0
    assert f"{committed[3]} sequences are there already" in output
    assert_same(bench.rows("killed"), undisturbed)


def test_a_stopped_driver_commits_what_is_finished(bench: Bench, undisturbed: dict[str, list[tuple[Any, ...]]]) -> None:
    code, output = bench.run("stopped", "--actors", "1", "--commit-units", "100", chaos="term:unit-finished:2")
    assert code == 143
    assert "units are left" in output
    left = len(bench.rows("stopped")["sequences"])
    assert left >= 2 * UNIT_SIZE
    assert left % UNIT_SIZE == 0
    code, output = bench.run("stopped", "--actors", "1")
    assert code == 0
    assert f"{left} sequences are there already" in output
    assert_same(bench.rows("stopped"), undisturbed)


def test_of_two_drivers_of_one_run_the_late_one_is_fenced(
    bench: Bench, undisturbed: dict[str, list[tuple[Any, ...]]]
) -> None:
    go = bench.folder / "go"
    first = bench.start("fenced", "--actors", "1", chaos="pause:before-commit:1", CHAOS_GO=str(go))
    assert first.stdout is not None
    for line in first.stdout:
        if "chaos: paused" in line:
            break
    with Reader(bench.folder / "fenced"):
        code, _ = bench.run("fenced", "--actors", "1")
        go.touch()
        output, _ = first.communicate(timeout=300)
    print(output)
    assert code == 0
    assert first.returncode == 75
    assert "another driver of run" in output
    assert_same(bench.rows("fenced"), undisturbed)


def test_a_job_waits_for_nodes_that_a_growing_cluster_starts(bench: Bench) -> None:
    code, output = bench.run("refused", "--actors", "64", "--wait-for-nodes", "1")
    assert code == 2
    assert "waiting up to 1 s for it to start nodes" in output
    assert "64 actors need 12.8 CPUs (0.2 each), but the cluster has 2" in output
    assert not (bench.folder / "refused").exists()
    script = """from jobs.cluster import connect, wait_until_fits
cluster = connect(None)
wait_until_fits(cluster, 3, 1.0, 0.0, wait_s=300, say=lambda line: print(line, flush=True))
print("fits", flush=True)"""
    environment = bench.head.environment({"RAY_ADDRESS": bench.head.address, "PYTHONPATH": str(REPOSITORY)})
    waiting = subprocess.Popen(
        [sys.executable, "-c", script], cwd=bench.folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert waiting.stdout is not None
    assert "waiting up to 300 s" in waiting.stdout.readline()
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={bench.head.address}", "--num-cpus=1"]
    start += ["--object-store-memory=80000000", "--block"]
    node = subprocess.Popen(start, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        output, _ = waiting.communicate(timeout=300)
    finally:
        waiting.kill()
        node.terminate()
        node.wait(120)
    assert "fits" in output


def test_models_that_cannot_be_loaded_are_said_once(bench: Bench) -> None:
    config = json.loads(bench.config.read_text())
    target = shutil.copytree(config["target"], bench.folder / "broken-target")
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    broken = bench.folder / "broken.yaml"
    broken.write_text(json.dumps(config | {"target": str(target)}))
    code, output = bench.run("broken", "--config", str(broken))
    assert code == 2
    assert output.count("broken-target' cannot be loaded") == 1
    assert "Traceback" not in output


def test_ray_job_submit_runs_the_same_command(bench: Bench, undisturbed: dict[str, list[tuple[Any, ...]]]) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", f"--address={bench.head.dashboard_url}"]
    command += ["--working-dir", str(REPOSITORY), "--", "python", "jobs/collect.py", *bench.arguments("submitted")]
    environment = bench.head.environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "as job raysubmit_" in done.stdout
    assert_same(bench.rows("submitted"), undisturbed)
