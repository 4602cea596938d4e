"""`make demo`: the loop once, on this machine: a policy is learned, served under load, learned again, replaced.

On a Ray head of its own: champion v1 comes from little data and few steps, and serves; the schedule starts a retraining
with more of both, whose v2 beats v1 at the gate and goes live while users ask; a v3 that was trained for one step is
refused; a rollback brings v1 back. Everything is done by the commands that users have; users are simulated, and what
became of each of their requests is counted. `demo.log`, `report.md` and `gate.html`, the report on v2, are left in the
--out folder, everything else in --work.

Exit code 0 if all of that happened, 1 if something did not, or not before --limit.
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
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from jobs.machine_names import MachineNames
from jobs.out_file import write_aside
from jobs.quickstart import follow
from jobs.ray_head import RayHead, free_ports
from jobs.ray_jobs import job_client
from serve import applications

REPOSITORY = Path(__file__).resolve().parents[1]
GRAFT = [sys.executable, "-m", "jobs.cli"]

LOG, REPORT, GATE_REPORT = PAGES = ("demo.log", "report.md", "gate.html")
_LARGEST_REPORT = 1_000_000  # characters

# Nothing is waited for beyond the request's limit; these say sooner that something is wrong.
_DEPLOY_TIMEOUT_S = 300.0  # for the server to run
_LIVE_TIMEOUT_S = 180.0  # for a promoted version to be in force
_SCHEDULE_TIMEOUT_S = 180.0  # for the next tick's submission: ticks are a minute apart
_STOP_TIMEOUT_S = 10.0  # for a command that is asked to end

_POLL_CHAMPION_S = 2.0  # a look takes some 20 ms
_FOLLOW_S = 2.0  # a look reads all of the job's log
_PAUSE_S = 8.0  # of the one user who asks while a policy is trained
_SUBMITTED = re.compile(r"submitted (retrain-\S+)")
_VERDICT = re.compile(r"retrain: ((promoted|kept|nothing new|failed|stopped)\b.*)")


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
    limit_s: float  # for all of it


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
        for name in (GATE_REPORT, REPORT):  # of an earlier demonstration
            (self.request.out / name).unlink(missing_ok=True)
        self._log = self.request.out / LOG
        self._log.write_text("", encoding="utf-8")
        self.names = MachineNames()  # that stay out of everything which is published
        for folder, word in ((self.request.work, "WORK"), (REPOSITORY, "."), (Path(sys.prefix), "VENV")):
            self.names.add(folder, word)

    def write(self, text: str) -> None:
        """Onto the terminal and into the log, without this machine's names."""
        text = self.names.hide(text)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(text)
        print(text, end="", flush=True)

    def keep_gate_report(self) -> None:
        """Leave the newest retraining's report as `gate.html`, unless it is large or still names this machine."""
        runs = [path for path in (self.request.work / "runs").glob("*/*") if path.is_dir()]
        report = max(runs, key=lambda run: run.name) / "report.html" if runs else None
        if report is None or not report.exists():
            self.write("the retraining has left no report\n")
            return
        page = self.names.hide(report.read_text(encoding="utf-8"))
        if len(page) > _LARGEST_REPORT or self.names.left_in(page):
            self.write(f"the gate's report, {len(page)} characters, is left in {report}\n")
            return
        write_aside(self.request.out / GATE_REPORT, page)

    def check_pages(self) -> None:
        """Hide once more, since a job's log comes in pieces that may end within a name; say what is still there."""
        for path in (self.request.out / name for name in PAGES):
            if path.exists():
                page = self.names.hide(path.read_text(encoding="utf-8"))
                write_aside(path, page)
                left = self.names.left_in(page)
                if left:
                    print(f"demo: {path} still names {', '.join(left)}", flush=True)

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
    demo = Demo(_request(argv))
    try:
        return _demonstrate(demo)
    finally:
        demo.check_pages()


def _demonstrate(demo: Demo) -> int:
    """Show everything, say how it ended, and report; returns the exit code."""
    request = demo.request
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
    write_aside(request.out / REPORT, demo.names.hide(report))
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
    write_prompts(request.work / "prompts" / "none.jsonl", [])
    first, second, undertrained = _configs(request)
    # Four processors as Ray counts them, whatever there is: a replica and a job at once on a small machine.
    environment = {"PYTHONPATH": str(REPOSITORY), "RAY_worker_niceness": "0"}
    with RayHead(num_cpus=4, environment=environment) as head, within(request.limit_s - demo.now_s):
        demo.names.add(head.folder, "HEAD")
        retrain = [sys.executable, "jobs/retrain.py", "--address", head.address, "--config"]
        with demo.stage("a first policy from little data") as result:
            verdict = _verdict(demo.run([*retrain, str(first)], head))
            result(verdict)
            if not verdict.startswith("promoted v1"):
                demo.run([*GRAFT, "promote", "--config", str(first), *_tracking(request), "1"], head)
                result(f"{verdict}; promoted by hand all the same, so that there is a champion to beat")
        with demo.stage("the champion serves") as result:
            url = _serve(request, head)
            result(f"v1 in force {_wait_for(url, 'v1'):.0f} s after the server was up")
        with Users(url, prompts[::-1], request.max_new_tokens) as users:
            with demo.stage("the schedule starts a retraining with more data, while users ask") as result:
                users.be(4)
                began = demo.now_s
                job = _submitted(demo, second, head)
                time.sleep(max(0.0, began + request.busy_s - demo.now_s))
                users.be(1, pause_s=_PAUSE_S)  # so that the retraining gets its share of a small machine
                verdict = _followed(demo, job, head)
                result(verdict)
                demo.keep_gate_report()
                _expect(verdict, "promoted v2")
                users.be(4)
                _wait_for(url, "v2")
                result(f"{verdict}; in force without a restart")
            time.sleep(request.busy_s)
            users.be(1, pause_s=_PAUSE_S)
            with demo.stage("a version that was trained for one step is refused, while users ask") as result:
                verdict = _verdict(demo.run([*retrain, str(undertrained)], head))
                result(verdict)
                _expect(verdict, "kept v2")
            users.be(4)
            with demo.stage("rollback to v1, while users ask") as result:
                demo.run([*GRAFT, "rollback", "--config", str(first), *_tracking(request)], head)
                result(f"v1 in force after {_wait_for(url, 'v1'):.1f} s")
            time.sleep(request.busy_s)
        demo.run([*GRAFT, "policies", *_tracking(request)], head)
    return users.asked


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """A block that ends with a `GraftError` after so long, whatever it waits for then. For the main thread."""

    def end(number: int, frame: FrameType | None) -> None:
        raise GraftError("the limit for all of it is reached, and the rest is given up")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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


def _configs(request: DemoRequest) -> list[Path]:
    """Write the configurations of v1, v2 and v3; returns their files.

    The live trial and the audit of v2 are of more prompts than those of the others, where replay alone decides.
    """
    some, more = {"num_live_prompts": 2, "num_audit_prompts": 1}, {"num_live_prompts": 6, "num_audit_prompts": 2}
    made, none = ([{"path": str(request.work / "prompts" / f"{name}.jsonl")}] for name in ("made", "none"))
    retrainings = {
        "first": {"prompts": made, "num_prompts": request.num_prompts[0], "steps": request.steps[0], **some},
        "second": {"prompts": made, "num_prompts": request.num_prompts[1], "steps": request.steps[1], **more},
        # One step, and from the rounds that are there.
        "undertrained": {"prompts": none, "min_new_sequences": 0, "steps": 1, **some},
    }
    paths = []
    for name, settings in retrainings.items():
        paths.append(request.work / f"{name}.yaml")
        write_aside(paths[-1], _config(request, settings))
    return paths


def _config(request: DemoRequest, settings: Mapping[str, Any]) -> str:
    """The target's configuration with sections of its own for retraining and schedule; JSON is YAML."""
    content = load_config(request.config).model_dump(mode="json", exclude_none=True)
    content["resources"] |= {"num_actors": 2}
    content["retrain"] = {
        "store": str(request.work / "store"),
        "runs": str(request.work / "runs"),
        "tracking_uri": _tracking(request)[1],
        "explore": [0, 4, 8, 16],  # larger trees take a processor without bfloat16 too long
        "max_new_tokens": request.max_new_tokens,
        "min_rounds": 100,
        **settings,
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
        "poll_champion": {"tracking_uri": _tracking(request)[1], "every_s": _POLL_CHAMPION_S},
    }
    name = load_config(request.config).slug
    application = {"name": name, "route_prefix": "/", "import_path": applications.IMPORT_PATH, "args": args}
    options = {"host": "127.0.0.1", "port": port, "request_timeout_s": None}
    applications.deploy(head.dashboard_url, application, http_options=options)
    applications.wait_until_running(head.dashboard_url, name, timeout_s=_DEPLOY_TIMEOUT_S)
    return f"http://127.0.0.1:{port}"


def _submitted(demo: Demo, config: Path, head: RayHead) -> str:
    """Let the scheduler submit one retraining; returns the job's name."""
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
                return submitted[1]
    raise GraftError("the scheduler submitted nothing")


def _followed(demo: Demo, job: str, head: RayHead) -> str:
    """Follow a retraining to its end; returns its last line."""
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        demo.write(text)

    follow(job_client(head.dashboard_url), job, poll_s=_FOLLOW_S, write=write)
    return _verdict("".join(written).splitlines())


def _verdict(lines: Sequence[str]) -> str:
    found = [match[1] for line in lines if (match := _VERDICT.match(line.strip()))]
    if not found:
        raise GraftError("the retraining said nothing of its end")
    return found[-1]


def _expect(verdict: str, wanted: str) -> None:
    if not verdict.startswith(wanted):
        raise GraftError(f"the retraining was to end with {wanted!r}, and has ended with: {verdict}")


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
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)
            process.kill()
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
    add("--prompts", type=int, nargs=2, default=(32, 128), metavar="N", help="collected for v1, and in addition for v2")
    add("--steps", type=int, nargs=2, default=(5, 150), metavar="N", help="optimizer steps at most of v1 and of v2")
    add("--max-new-tokens", type=int, default=40, metavar="N", help="longest answer")
    add("--busy", type=float, default=15.0, metavar="S", help="seconds of many users at each version")
    add("--limit", type=float, default=30.0, metavar="MIN", help="minutes after which all is given up")
    options = parser.parse_args(argv)
    return DemoRequest(
        config=options.config.resolve(),
        work=options.work.resolve(),
        out=options.out.resolve(),
        num_prompts=tuple(options.prompts),
        steps=tuple(options.steps),
        max_new_tokens=options.max_new_tokens,
        busy_s=options.busy,
        limit_s=60 * options.limit,
    )


if __name__ == "__main__":
    sys.exit(main())
