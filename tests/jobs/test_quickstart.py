"""Following a job's log, whatever the cluster answers; the live answer's verdict; the whole way once, and stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from graft_dist import generate
from graft_dist.config import TargetConfig
from graft_dist.engine import Engine
from graft_dist.errors import GraftError
from graft_dist.generate import Answer
from jobs import quickstart as quickstart_module
from jobs.quickstart import QuickstartRequest, answer_live, collect, follow
from storage import connect

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Client:
    """Answers as listed: a status, or an error; the log grows by a letter at each answer. The last one goes on."""

    answers: list[JobStatus | BaseException]
    stopped: list[str] = field(default_factory=list)
    num_asked: int = 0

    def get_job_info(self, job: str) -> Any:
        answer = self.answers[min(self.num_asked, len(self.answers) - 1)]
        self.num_asked += 1
        if isinstance(answer, BaseException):
            raise answer
        return SimpleNamespace(status=answer)

    def get_job_logs(self, job: str) -> str:
        return "abcdefgh"[: self.num_asked]

    def submit_job(self, **options: Any) -> str:
        return "one"

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)


def followed(client: Client, **options: Any) -> tuple[Any, str]:
    written: list[str] = []
    details = follow(cast(JobSubmissionClient, client), "one", poll_s=0.0, write=written.append, **options)
    return details, "".join(written)


def test_some_polls_may_fail() -> None:
    client = Client([JobStatus.RUNNING, ConnectionError("busy"), RuntimeError("503"), JobStatus.SUCCEEDED])
    details, written = followed(client)
    assert details.status == JobStatus.SUCCEEDED and written == "abcd"


def test_a_cluster_that_is_gone_is_said() -> None:
    client = Client([JobStatus.RUNNING, ConnectionError("nobody\nthere")])
    with pytest.raises(GraftError, match="the job one cannot be followed: nobody there"):
        followed(client)
    assert 10 < client.num_asked < 100


def test_a_job_that_takes_too_long_is_stopped() -> None:
    client = Client([JobStatus.RUNNING])
    with pytest.raises(GraftError, match="the job one is not over after 0 s and is stopped"):
        followed(client, timeout_s=0.0)
    assert client.stopped == ["one"]


def test_of_what_is_interrupted_the_job_ends_before_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client([JobStatus.RUNNING, KeyboardInterrupt(), JobStatus.RUNNING, JobStatus.STOPPED])
    seen = []

    class Head:
        dashboard_url = "http://127.0.0.1:1"

        def __enter__(self) -> Head:
            return self

        def __exit__(self, *_: object) -> None:
            seen.append((list(client.stopped), client.num_asked))

    monkeypatch.setattr(quickstart_module, "RayHead", Head)
    monkeypatch.setattr(quickstart_module, "job_client", lambda address: client)
    request = QuickstartRequest(
        config=tmp_path / "x.yaml",
        prompts=tmp_path / "x.jsonl",
        store=tmp_path / "store",
        num_actors=1,
        num_slots=1,
        budget=1,
        max_new_tokens=1,
    )
    with pytest.raises(KeyboardInterrupt):
        collect(request)
    assert seen == [(["one"], 4)]


@pytest.fixture
def wrong_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft trees whose answers end with another token than plain decoding's."""
    honest = generate.answer_all

    def answer_all(engine: Engine, *arguments: Any, **options: Any) -> Iterator[Answer]:
        for answer in honest(engine, *arguments, **options):
            tokens = answer.token_ids
            is_plain = engine.policy.name == "plain"
            yield answer if is_plain else replace(answer, token_ids=[*tokens[:-1], tokens[-1] + 1])

    monkeypatch.setattr(generate, "answer_all", answer_all)


def test_the_live_answers_are_the_same_text(tiny_config: TargetConfig, capsys: pytest.CaptureFixture[str]) -> None:
    answer_live(tiny_config, 6, 8)
    assert re.search(r"^speed-up by draft trees: \d+\.\d\d times, the same text$", capsys.readouterr().out, re.M)


@pytest.mark.usefixtures("wrong_trees")
def test_another_text_in_float32_is_an_error(tiny_config: TargetConfig, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GraftError, match=r"differ in float32, which only .* excuse: run `graft audit`"):
        answer_live(tiny_config, 6, 8)
    assert "speed-up" not in capsys.readouterr().out


@pytest.mark.usefixtures("wrong_trees")
def test_another_text_in_bfloat16_is_said(tiny_config: TargetConfig, capsys: pytest.CaptureFixture[str]) -> None:
    answer_live(tiny_config.model_copy(update={"dtype": "bfloat16"}), 6, 8)
    assert capsys.readouterr().out.endswith(" times, texts differ in bfloat16: see `graft audit`\n")


@dataclass
class Quickstart:
    """`python -m jobs.quickstart` in a process, whose temporary files, and so its Ray's, lie below a folder of ours."""

    config: TargetConfig
    folder: Path
    temporary: Path

    def start(self, num_prompts: int, max_new_tokens: int) -> subprocess.Popen[str]:
        config, prompts = self.folder / "tiny.yaml", self.folder / "prompts.jsonl"
        config.write_text(json.dumps(self.config.model_dump(mode="json", exclude_none=True)))  # JSON is YAML
        rows = [{"id": f"p{index}", "task": "chat", "turns": [f"Say {index}."]} for index in range(num_prompts)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, "-m", "jobs.quickstart", "--config", str(config), "--prompts", str(prompts)]
        command += ["--store", str(self.folder / "store"), "--actors", "1", "--max-new-tokens", str(max_new_tokens)]
        known = {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | known,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self) -> dict[int, str]:
        """Command lines of the processes that were started with our folder or have a file open in it."""
        found, ours = {}, str(self.temporary)
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
                names = [command, (entry / "environ").read_text(errors="replace")]
                names += [str(file.readlink()) for file in (entry / "fd").iterdir()]
            except OSError:
                continue  # it has ended meanwhile
            if any(ours in name for name in names):
                found[int(entry.name)] = command
        return found

    def left(self) -> tuple[list[str], list[str]]:
        """What should be gone in the end: command lines of processes, and the head's folder.

        Ray's shell that looks every second whether a driver's supervisor lives may take that second.
        """
        watch = ("/bin/sh -c while kill -s 0 ", "sleep 1 ")
        commands = [command for command in self.processes().values() if not command.startswith(watch)]
        return commands, [path.name for path in self.temporary.glob("graft-ray-*")]


@pytest.fixture
def quickstart(tiny_config: TargetConfig, tmp_path: Path) -> Iterator[Quickstart]:
    temporary = Path(tempfile.mkdtemp(prefix="graft-"))  # short, for Ray's sockets
    run = Quickstart(tiny_config, tmp_path, temporary)
    yield run
    for pid in run.processes():
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.ray
def test_the_whole_way_once(quickstart: Quickstart) -> None:
    process = quickstart.start(num_prompts=6, max_new_tokens=8)
    output, _ = process.communicate(timeout=500)
    print(output)
    assert process.returncode == 0
    assert quickstart.left() == ([], [])
    for shown in ("MAT", "mismatch", "speed-up by draft trees", "the same text", "Done in"):
        assert shown in output, shown
    with connect(quickstart.folder / "store", threads=1) as connection:
        found = connection.execute("SELECT count(*), count(error), sum(num_rounds) FROM sequences").fetchall()
    assert found[0][:2] == (6, 0) and found[0][2] > 0


@pytest.mark.slow
@pytest.mark.ray
def test_sigterm_ends_all_that_was_started(quickstart: Quickstart) -> None:
    lines, running = [], ""
    with quickstart.start(num_prompts=400, max_new_tokens=160) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "actors ready" in line:
                running = "\n".join(quickstart.processes().values())
                process.send_signal(signal.SIGTERM)
    output = "".join(lines)
    print(output, running)
    for name in ("raylet", "gcs_server", "jobs/collect.py"):
        assert name in running, name
    assert process.returncode == 143
    assert quickstart.left() == ([], [])
    assert "speed-up" not in output
