"""`make demo`: the loop once, on this machine: a policy is learned, served under load, learned again, replaced.

On a Ray head of its own: champion v1 comes from little data and few steps, and serves; the schedule starts a retraining
with more of both, whose v2 beats v1 at the gate and goes live while users ask; a v3 that was trained for one step is
refused; a rollback brings v1 back. Everything is done by the commands that users have; users are simulated, and what
became of each of their requests is counted. `demo.log`, `report.md` and `gate.html`, the report on v2, are left in the
--out folder, everything else in --work.

Exit code 0 if all of that happened, 1 if something did not.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import Any

from graft_dist.config import TargetConfig, load_config
from graft_dist.errors import GraftError
from graft_dist.hardware import cpu_name
from jobs.demo_prompts import made_prompts
from jobs.demo_users import Asked, Users
from jobs.fresh_prompts import write_prompts
from jobs.out_file import write_aside
from jobs.quickstart import follow
from jobs.ray_head import RayHead, free_ports
from jobs.ray_jobs import job_client
from serve import applications

REPOSITORY = Path(__file__).resolve().parents[1]
GRAFT = [sys.executable, "-m", "jobs.cli"]

GATE_REPORT = "gate.html"
_LARGEST_REPORT = 1_000_000  # characters

_LIVE_TIMEOUT_S = 180.0  # for a promoted version to be in force
_SCHEDULE_TIMEOUT_S = 180.0  # for the next tick's submission: ticks are a minute apart
_RETRAIN_TIMEOUT_S = 900.0  # for the scheduled retraining
_TRIED = ((4, 2), (10, 3), (3, 2))  # prompts of the live trial, and audited ones, of each retraining
_SUBMITTED = re.compile(r"submitted (retrain-\S+)")
_VERDICT = re.compile(r"retrain: ((promoted|kept|nothing new|failed)\b.*)")


@dataclass(frozen=True, kw_only=True)
class DemoRequest:
    """What the demonstration does; the defaults fit a machine with two cores."""

    config: Path
    work: Path  # is made anew
    out: Path
    num_prompts: tuple[int, int]  # collected for v1, and in addition for v2
    steps: tuple[int, int]  # optimizer steps at most of v1 and v2
    max_new_tokens: int
    busy_s: float  # how long many users are watched at each version


@dataclass(frozen=True)
class Stage:
    """What happened, for the report."""

    title: str
    at_s: float  # since the start
    took_s: float
    result: str


@dataclass
class Demo:
    """One demonstration: its log, and what it has found so far."""

    request: DemoRequest
    stages: list[Stage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self.request.out.mkdir(parents=True, exist_ok=True)
        for name in (GATE_REPORT, "report.md"):  # of an earlier demonstration
            (self.request.out / name).unlink(missing_ok=True)
        self._log = self.request.out / "demo.log"
        self._log.write_text("", encoding="utf-8")

    def write(self, text: str) -> None:
        """Onto the terminal and into the log, without this machine's folders."""
        text = self._without_folders(text)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(text)
        print(text, end="", flush=True)

    def _without_folders(self, text: str) -> str:
        for folder, name in ((self.request.work, "WORK"), (REPOSITORY, "."), (Path(sys.prefix), "VENV")):
            text = text.replace(str(folder), name)
        return text

    def keep_gate_report(self) -> None:
        """Leave the newest retraining's report as `gate.html`, unless it is large or still names folders from here."""
        reports = (self.request.work / "runs").glob("*/*/report.html")
        newest = max(reports, key=lambda path: path.parent.name, default=None)
        if newest is None:
            raise GraftError("the retraining has left no report")
        page = self._without_folders(newest.read_text(encoding="utf-8"))
        if len(page) > _LARGEST_REPORT or any(f"{folder}/" in page for folder in (Path.home(), tempfile.gettempdir())):
            self.write(f"the gate's report, {len(page)} characters, is left in {newest}\n")
            return
        write_aside(self.request.out / GATE_REPORT, page)

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @contextmanager
    def stage(self, title: str) -> Iterator[Callable[[str], None]]:
        """A part of the demonstration; yields what to call with its result."""
        began, results = self.now_s, [""]
        self.write(f"\n=== {began:5.0f} s: {title}\n")
        yield results.append
        self.stages.append(Stage(title, began, self.now_s - began, results[-1]))

    def run(self, command: Sequence[str], head: RayHead) -> list[str]:
        """Run a command to its end; returns its lines. Raises `GraftError` for another exit code than 0."""
        self.write(f"$ {shlex.join(_shown(command))}\n")
        process = _start(command, head)
        lines = []
        with _ended(process):
            assert process.stdout is not None
            for line in process.stdout:
                self.write(line)
                lines.append(line)
        if process.returncode != 0:
            raise GraftError(f"{shlex.join(_shown(command))} ended with exit code {process.returncode}")
        return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    logging.getLogger("ray").setLevel(logging.ERROR)  # it names every file that it does not upload
    request = _request(argv)
    demo = Demo(request)
    try:
        asked = show(demo)
    except (GraftError, OSError, RuntimeError) as error:  # the last of Ray's clients
        demo.write(f"demo: {str(error) or type(error).__name__}\n")
        return 1
    except KeyboardInterrupt:
        demo.write("demo: interrupted; everything it had started is stopped\n")
        return 130
    has_gate_report = (request.out / GATE_REPORT).exists()
    report = render_report(load_config(request.config), demo.stages, asked, demo.now_s, has_gate_report=has_gate_report)
    write_aside(request.out / "report.md", report)
    demo.write(f"\n{report}")
    lost = [one for one in asked if not one.is_answered]
    if lost:
        demo.write(f"demo: {len(lost)} requests got no whole answer\n")
    return 1 if lost else 0


def show(demo: Demo) -> list[Asked]:
    """Everything, in order; returns what became of the users' requests. Raises `GraftError` where it does not work."""
    request = demo.request
    shutil.rmtree(request.work, ignore_errors=True)
    (request.work / "prompts").mkdir(parents=True)
    prompts = made_prompts()
    write_prompts(request.work / "prompts" / "made.jsonl", prompts)
    first, second, undertrained = (request.work / f"{name}.yaml" for name in ("first", "second", "undertrained"))
    for path, steps, count, tried in zip(
        (first, second, undertrained), (*request.steps, 1), (*request.num_prompts, 1), _TRIED, strict=True
    ):
        write_aside(path, _config(request, steps=steps, num_prompts=count, tried=tried))
    # Four processors as Ray counts them, whatever there is: a replica and a job at once on a small machine.
    with RayHead(num_cpus=4, environment={"PYTHONPATH": str(REPOSITORY), "RAY_worker_niceness": "0"}) as head:
        retrain = [sys.executable, "jobs/retrain.py", "--address", head.address, "--config"]
        with demo.stage("a first policy from little data") as result:
            verdict = _verdict(demo.run([*retrain, str(first)], head))
            result(verdict)
            if not verdict.startswith("promoted v1"):
                demo.run([*GRAFT, "promote", "--config", str(first), *_tracking(request), "1"], head)
                result(f"{verdict}; promoted by hand all the same, so that there is a champion to beat")
        with demo.stage("the champion serves under load") as result:
            url = _serve(request, head)
            took_s = _wait_for(url, "v1")
            result(f"v1 in force after {took_s:.0f} s")
        with Users(url, prompts[::-1], request.max_new_tokens) as users:
            _watch(users, request.busy_s)
            users.be(1, pause_s=4.0)  # so that the retraining gets its share of a small machine
            with demo.stage("the schedule starts a retraining with more data, while users ask") as result:
                verdict = _scheduled(demo, second, head)
                result(verdict)
                _expect(verdict, "promoted v2")
                demo.keep_gate_report()
                users.be(4)
                _wait_for(url, "v2")
                result(f"{verdict}; in force without a restart")
            _watch(users, request.busy_s)
            users.be(1, pause_s=4.0)
            with demo.stage("a version that was trained for one step is refused, while users ask") as result:
                verdict = _verdict(demo.run([*retrain, str(undertrained)], head))
                result(verdict)
                _expect(verdict, "kept v2")
            users.be(4)
            with demo.stage("rollback to v1, while users ask") as result:
                demo.run([*GRAFT, "rollback", "--config", str(first), *_tracking(request)], head)
                result(f"v1 in force after {_wait_for(url, 'v1'):.1f} s")
            _watch(users, request.busy_s)
        demo.run([*GRAFT, "policies", *_tracking(request)], head)
    return users.asked


def render_report(
    config: TargetConfig, stages: Sequence[Stage], asked: Sequence[Asked], total_s: float, *, has_gate_report: bool
) -> str:
    """`report.md`."""
    lines = [
        "# The loop, shown once",
        "",
        f"`make demo` with {config.target} on {cpu_name() or 'an unknown CPU'}, {os.cpu_count()} cores: "
        f"{total_s / 60:.1f} minutes in all. This is one run, with users and training on the same cores; "
        "[the log](demo.log) has every line of it.",
        "",
        "| at | took | what | result |",
        "|---|---|---|---|",
        *(f"| {one.at_s:.0f} s | {one.took_s:.0f} s | {one.title} | {one.result} |" for one in stages),
        "",
        *([f"[What the gate had to judge v2 by]({GATE_REPORT}).", ""] if has_gate_report else []),
        "What became of the users' requests, by the version that answered and by how many users asked at once:",
        "",
        "| version | users | requests | whole answers | tokens a round | tokens/s of an answer, median |",
        "|---|---|---|---|---|---|",
    ]
    for version, num_users in dict.fromkeys((one.version, one.num_users) for one in asked):
        own = [one for one in asked if (one.version, one.num_users) == (version, num_users)]
        lines.append(f"| {version or 'none'} | {num_users} | {len(own)} | {_answers_cells(own)} |")
    lost = sum(not one.is_answered for one in asked)
    lines += ["", f"{len(asked)} requests, of which {lost} got no whole answer."]
    return "\n".join(lines) + "\n"


def _answers_cells(asked: Sequence[Asked]) -> str:
    whole = [one for one in asked if one.is_answered]
    if not whole:
        return "0 | |"
    mat = sum(one.num_tokens for one in whole) / max(1, sum(one.num_rounds for one in whole))
    rates = sorted(one.num_tokens / one.total_s for one in whole)
    return f"{len(whole)} | {mat:.2f} | {rates[len(rates) // 2]:.1f}"


def _config(request: DemoRequest, *, steps: int, num_prompts: int, tried: tuple[int, int]) -> str:
    """The target's configuration with sections of its own for retraining and schedule; JSON is YAML."""
    content = load_config(request.config).model_dump(mode="json", exclude_none=True)
    content["resources"] |= {"num_actors": 2}
    content["retrain"] = {
        "prompts": [{"path": str(request.work / "prompts" / "*.jsonl")}],
        "store": str(request.work / "store"),
        "runs": str(request.work / "runs"),
        "tracking_uri": _tracking(request)[1],
        "num_prompts": num_prompts,
        "explore": [0, 4, 8, 16],  # larger trees take a processor without bfloat16 too long
        "max_new_tokens": request.max_new_tokens,
        "steps": steps,
        "min_rounds": 100,
        "num_live_prompts": tried[0],
        "num_audit_prompts": tried[1],
    }
    content["schedule"] = {"cron": "* * * * *"}
    return json.dumps(content, indent=1)


def _tracking(request: DemoRequest) -> list[str]:
    return ["--tracking-uri", f"sqlite:///{request.work / 'mlflow.db'}"]


def _serve(request: DemoRequest, head: RayHead) -> str:
    """Deploy the target as `serve deploy` does, following the registry's champion. Returns the server's URL."""
    (port,) = free_ports(1)
    args = {
        "config": str(request.config),
        "threads": 1,  # two would spin in wait for each other wherever a job has one of the cores
        "poll_champion": {"tracking_uri": _tracking(request)[1], "every_s": 2},
    }
    name = load_config(request.config).slug
    application = {"name": name, "route_prefix": "/", "import_path": applications.IMPORT_PATH, "args": args}
    options = {"host": "127.0.0.1", "port": port, "request_timeout_s": None}
    applications.deploy(head.dashboard_url, application, http_options=options)
    applications.wait_until_running(head.dashboard_url, name, timeout_s=600)
    return f"http://127.0.0.1:{port}"


def _scheduled(demo: Demo, config: Path, head: RayHead) -> str:
    """Let the scheduler submit one retraining, and follow that to its end; returns its last line."""
    command = [*GRAFT, "schedule", "run", "--config", str(config), "--address", head.dashboard_url, "--interval", "1"]
    command += ["--working-dir", str(REPOSITORY), "--state", str(demo.request.work / "schedule.sqlite")]
    demo.write(f"$ {shlex.join(_shown(command))}\n")
    process = _start(command, head)
    with _ended(process, patience_s=_SCHEDULE_TIMEOUT_S):
        assert process.stdout is not None
        for line in process.stdout:
            demo.write(line)
            submitted = _SUBMITTED.search(line)
            if submitted is not None:
                process.send_signal(signal.SIGTERM)  # one tick is enough; its job goes on
                break
        else:
            raise GraftError("the scheduler submitted nothing")
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        demo.write(text)

    follow(job_client(head.dashboard_url), submitted[1], write=write, timeout_s=_RETRAIN_TIMEOUT_S)
    return _verdict("".join(written).splitlines())


def _verdict(lines: Sequence[str]) -> str:
    found = [match[1] for line in lines if (match := _VERDICT.match(line.strip()))]
    if not found:
        raise GraftError("the retraining said nothing of its end")
    return found[-1]


def _expect(verdict: str, wanted: str) -> None:
    if not verdict.startswith(wanted):
        raise GraftError(f"expected was {wanted}, and it was: {verdict}")


def _wait_for(url: str, label: str, timeout_s: float = _LIVE_TIMEOUT_S) -> float:
    """Wait until the server decodes with this version; returns the seconds it took. Raises `GraftError` at the end."""
    began, said = time.monotonic(), "nothing"
    while time.monotonic() - began < timeout_s:
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=60) as response:
                health: Mapping[str, Any] = json.load(response)
        except (OSError, ValueError, HTTPException) as error:  # a server that is busy, says 503 or breaks off
            said = str(error)
        else:
            said = json.dumps(health)
            if health["policy"]["label"] == label:
                return time.monotonic() - began
        time.sleep(0.2)
    raise GraftError(f"{label} is not in force after {timeout_s:.0f} s; the server says last: {said}")


def _watch(users: Users, seconds: float) -> None:
    users.be(4)
    time.sleep(seconds)


def _start(command: Sequence[str], head: RayHead) -> subprocess.Popen[str]:
    environment = head.environment({"PYTHONPATH": str(REPOSITORY)})
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@contextmanager
def _ended(process: subprocess.Popen[str], patience_s: float | None = None) -> Iterator[None]:
    """A block at whose end, however it ends, the process has ended; killed after `patience_s`."""
    alarm = None if patience_s is None else threading.Timer(patience_s, process.kill)
    if alarm is not None:
        alarm.start()
    try:
        yield
        process.wait()
    finally:
        if alarm is not None:
            alarm.cancel()
        if process.poll() is None:
            process.terminate()
            process.wait()


def _shown(command: Sequence[str]) -> list[str]:
    """As a user would type it."""
    if list(command[: len(GRAFT)]) == GRAFT:
        return ["graft", *command[len(GRAFT) :]]
    return ["python", *command[1:]]


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # as an exception, so that the head is stopped on the way out


def _request(argv: Sequence[str] | None) -> DemoRequest:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, default=REPOSITORY / "targets" / "smollm2-135m.yaml")
    add("--work", type=Path, default=REPOSITORY / "data" / "demo", help="folder for everything; is made anew")
    add("--out", type=Path, default=REPOSITORY / "docs" / "demo", help="folder for the log and the report")
    add("--prompts", type=int, nargs=2, default=(32, 120), metavar="N", help="collected for v1, and in addition for v2")
    add("--steps", type=int, nargs=2, default=(20, 500), metavar="N", help="optimizer steps at most of v1 and of v2")
    add("--max-new-tokens", type=int, default=48, metavar="N", help="longest answer")
    add("--busy", type=float, default=20.0, metavar="S", help="seconds of many users at each version")
    options = parser.parse_args(argv)
    return DemoRequest(
        config=options.config.resolve(),
        work=options.work.resolve(),
        out=options.out.resolve(),
        num_prompts=tuple(options.prompts),
        steps=tuple(options.steps),
        max_new_tokens=options.max_new_tokens,
        busy_s=options.busy,
    )


if __name__ == "__main__":
    sys.exit(main())
