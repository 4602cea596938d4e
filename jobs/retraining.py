"""One retraining run of one target: collect, compact, train, evaluate, decide, report, clean up.

Each step is done once for a run, whatever kills the job in between (`run_steps`), and one run of a target is at work
at a time (`lease`). A run that was cut off is gone on with by the next start; one that ended is not touched again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from graft_dist.config import TargetConfig
from graft_dist.drift import Drift, Verdict
from graft_dist.errors import GraftError, RegistryError, RegistryUnavailableError, StoreError
from graft_dist.retraining import Retraining
from graft_dist.sampling import SamplingParams
from jobs.arguments import check_place
from jobs.cluster import ClusterBusyError
from jobs.collection import CollectRequest
from jobs.collection import run as collect
from jobs.decode_spec import DecodeSpec
from jobs.drift import DriftRequest, find_drift
from jobs.driver import Ending
from jobs.evaluation import Evaluator, evidence_of
from jobs.fresh_prompts import asked_before, choose_fresh, count_unlearned, last_training, write_prompts
from jobs.gate import Decision, Evidence, decide, gate_tags
from jobs.learning_data import count_recorded
from jobs.lease import Lease, LeaseHeldError, LeaseLostError, hold_all
from jobs.out_file import to_json, write_aside
from jobs.policy_training import PolicyRequest
from jobs.policy_training import run as train
from jobs.ray_pool import PoolSettings
from jobs.retraining_report import write_report
from jobs.run_retention import empty_old_runs
from jobs.run_steps import Ends, Results, Step, StepBrokenOffError, StepFailedError, Stopped, one_line, run_steps
from jobs.traffic_prompts import TrafficPrompts
from storage.place import Place
from storage.registry import CHAMPION, Registry
from storage.trajectories import TrajectoryStore

EXIT_FAILED, EXIT_LEASE_HELD = 1, 75

WAIT_FOR_NODES_S = 1800.0  # nobody is there to try again: a cluster that scales from 0 gets time to start nodes


@dataclass(frozen=True, kw_only=True)
class RetrainRequest:
    """What a run is asked to do."""

    config: TargetConfig
    settings: Retraining
    tracking_uri: str
    policy_request: Callable[[Path], PolicyRequest]
    """Makes the training's request, given the folder for what it leaves."""
    run_id: str | None = None  # None: the unfinished run, else a new one
    wait_s: float = 0.0  # for another run of the same target to end
    only_if_drifted: bool = False  # else "nothing new", unless there is nothing to compare recent rounds with
    address: str | None = None  # of the Ray cluster

    @property
    def runs(self) -> Path:
        """The target's folder of runs; absolute, since Ray's workers have other working directories."""
        return Path(self.settings.runs).expanduser().absolute() / self.config.slug

    @property
    def store(self) -> str:
        """Root of the trajectory store."""
        return self.settings.store if "://" in self.settings.store else str(Path(self.settings.store).expanduser())

    @property
    def leases(self) -> list[Path]:
        """What a run of the target holds: runs that meet in the folder of runs, or in a local store, are kept apart."""
        found = [self.runs / "lease.json"]
        if "://" not in self.store or self.store.startswith("file://"):  # parsing a bucket's name would ask the network
            found.append(Place.parse(self.store).local / "_leases" / f"{self.config.slug}.json")
        return found


def say(line: str) -> None:
    """Print a line at once, so that a job's log can be followed."""
    print(f"retrain: {line}", flush=True)


def run(request: RetrainRequest, failpoint: Callable[[str], None] = lambda _: None) -> int:
    """Do what is left of a run, say how it ended in the last line, and return the exit code.

    `failpoint` is for tests that kill the process; it is called with "before" or "after" and a step's name, and with
    "before end" when the steps are done and their end is not written down.

    Raises a `GraftError` before any work when the request cannot be carried out.
    """
    _check_places(request)
    leases = [Lease(path, _run_to_do(request)) for path in request.leases]

    def check() -> None:
        for lease in leases:
            lease.check()

    try:
        with hold_all(leases, wait_s=request.wait_s, say=say, on_lost=_break_off) as formers:
            run_id = _run_to_do(request)  # again: the one that was at work may have ended meanwhile
            for former in sorted({former.run_id for former in formers} - {run_id}):
                say(f"took over from run {former}, which has given no sign of life")
            return _run_alone(request, run_id, check, failpoint)
    except (LeaseHeldError, LeaseLostError) as error:
        say(str(error))
        return EXIT_LEASE_HELD
    except OSError as error:  # of the lease, or of the run's folder: a full disk, say
        say(f"failed: {one_line(error)}; the same command tries again")
        return EXIT_FAILED


def _break_off() -> None:
    """What the lease's thread does when another run has taken over: a step may have hours to go."""
    if callable(signal.getsignal(signal.SIGTERM)):  # else nobody has said how this process ends in order
        os.kill(os.getpid(), signal.SIGTERM)


def _run_alone(
    request: RetrainRequest, run_id: str, check: Callable[[], None], failpoint: Callable[[str], None]
) -> int:
    folder = request.runs / run_id
    end = folder / "end.json"
    if end.exists():
        ended = json.loads(end.read_text(encoding="utf-8"))
        say(f"run {run_id} has ended already")
        say(ended["line"])
        return int(ended["exit_code"])
    say(f"run {run_id} of {request.config.slug} in {folder}")
    job = _Job(request, folder)
    try:
        results = run_steps(folder, _watched(job.steps(), failpoint), check=check, say=say)
        line = f"{results.outcome}: {results.reason}" if isinstance(results, Ends) else str(results["decide"]["line"])
        code = 0
    except StepFailedError as error:
        with suppress(OSError):  # of a full disk, which the step may have met already
            check()  # whoever has lost the lease must not end the run for the one that goes on with it
        line, code = str(error), EXIT_FAILED
    except StepBrokenOffError as broken:
        with suppress(OSError):  # what the step met comes first
            check()
        if not isinstance(broken.__cause__, Stopped | KeyboardInterrupt | SystemExit):  # nobody foresaw it
            traceback.print_exception(broken.__cause__)
        say(f"{broken}; the same command goes on there")
        return broken.exit_code
    failpoint("before end")
    try:
        write_aside(end, to_json({"line": line, "exit_code": code}))
    except OSError as error:  # what the run came to is so all the same
        say(f"the end of the run cannot be written down ({error}); the same command comes to it again")
    say(line)
    return code


def _watched(steps: list[Step], failpoint: Callable[[str], None]) -> list[Step]:
    def watch(step: Step) -> Step:
        def action(results: Results) -> Any:
            failpoint(f"before {step.name}")
            found = step.action(results)
            failpoint(f"after {step.name}")
            return found

        return Step(step.name, action)

    return [watch(step) for step in steps]


def _check_places(request: RetrainRequest) -> None:
    settings = request.settings
    traffic = [("prompts", source.traffic) for source in settings.prompts if source.traffic is not None]
    for key, place in (("store", settings.store), ("runs", settings.runs), *traffic):
        check_place(f"retrain.{key}", os.path.expanduser(place))
    elsewhere = [place for _, place in traffic if _plain(place) != _plain(settings.store)]
    if request.only_if_drifted and elsewhere and len(elsewhere) == len(traffic):
        say(
            f"--if-drifted looks for recorded traffic in retrain.store, {settings.store}; what lies in {elsewhere[0]} "
            "is asked again, and is not looked at"
        )


def _plain(place: str) -> str:
    """A store's place, spelt in one way."""
    return os.path.expanduser(place.removeprefix("file://")).rstrip("/")


def _run_to_do(request: RetrainRequest) -> str:
    return request.run_id or _unfinished(request.runs) or f"{datetime.now(UTC):%Y%m%dT%H%M%S}"


def _unfinished(runs: Path) -> str | None:
    """The newest run that did not come to an end."""
    folders = [path for path in runs.glob("*/") if path.is_dir() and not (path / "end.json").exists()]
    return max((path.name for path in folders), default=None)


class _Job:
    """The steps of a run. Each reads what it needs from the results of the steps before it."""

    def __init__(self, request: RetrainRequest, folder: Path) -> None:
        self.request, self.folder = request, folder
        self.config, self.settings = request.config, request.settings
        self.slug = request.config.slug

    def steps(self) -> list[Step]:
        """In order."""
        actions = (
            self.choose, self.collect, self.compact, self.train, self.evaluate, self.decide, self.report, self.clean,
        )  # fmt: skip
        return [Step(action.__name__, _gone_on_with(action)) for action in actions]

    def choose(self, results: Results) -> Any:
        """Look whether acceptance has drifted, choose the prompts, and write them down."""
        settings, drift = self.settings, self._drift()
        say(drift.sentence)
        if self.request.only_if_drifted and not drift.calls_for_training:
            return Ends("nothing new", drift.sentence)
        fresh = choose_fresh(
            settings.prompts,
            asked_before(self.request.runs),
            settings.num_prompts,
            every_prompt=settings.every_prompt,
            traffic=TrafficPrompts(self.config).read,
        )
        num_prompts, least = len(fresh) + count_unlearned(self.request.runs), settings.min_new_sequences
        if num_prompts < least:
            # It reads what sequences there are, so only where it matters; fresh prompts will add to the rounds.
            num_recorded = self._count_recorded(0 if fresh else settings.min_rounds)
            if num_prompts + num_recorded < least:
                found = f"{num_prompts} fresh prompts and {num_recorded} recorded requests to learn from"
                return Ends("nothing new", f"{found}, and {least} are asked for")
        write_prompts(self.folder / "prompts.jsonl", fresh)
        return {"num_prompts": len(fresh), "drift": asdict(drift)}

    def collect(self, results: Results) -> Any:
        """Decode the prompts with exploring budgets; goes on by itself where it was cut off."""
        if results["choose"]["num_prompts"] == 0:
            return {"exit_code": 0}
        settings, resources = self.settings, self.config.resources
        code = collect(
            CollectRequest(
                spec=DecodeSpec(
                    config=self.config,
                    method="ddtree",
                    budget=max(settings.explore),
                    budgets=settings.explore,
                    sampling=SamplingParams(max_new_tokens=settings.max_new_tokens),
                    dense=settings.dense,
                    num_hidden=settings.hidden,
                ),
                prompts=(str(self.folder / "prompts.jsonl"),),
                store=self.request.store,
                num_slots=self.config.max_slots,
                pool=PoolSettings(
                    num_actors=resources.num_actors, num_cpus=resources.num_cpus, num_gpus=resources.num_gpus
                ),
                address=self.request.address,
                wait_for_nodes_s=WAIT_FOR_NODES_S,
            )
        )
        if code > 128 or code == Ending.CUT_OFF.value:
            raise Stopped(f"the collection was {Ending(code).label}", code)
        if code not in (Ending.COMPLETE.value, Ending.PARTIAL.value):
            raise GraftError(f"the collection ended with exit code {code}")
        return {"exit_code": code}

    def compact(self, results: Results) -> Any:
        """Merge small files, unless it cannot be done now: another target's run may be merging the same store."""
        try:
            return asdict(TrajectoryStore(self.request.store).compact())
        except StoreError as error:
            return {"skipped": str(error)}

    def train(self, results: Results) -> Any:
        """Fit and register the challenger; goes on by itself where it was cut off."""
        out = self.folder / "training"
        train(self.request.policy_request(out))
        # By its content: the alias may by now be that of a training which somebody started by hand.
        version = self._registry().version_of(self.slug, out / "policy")
        if version is None:
            raise RegistryError(f"the registry {self.request.tracking_uri} does not hold the policy of {out}")
        return {"version": version, "policy": str(out / "policy")}

    def evaluate(self, results: Results) -> Any:
        """Compare the challenger with the champion, or with DDTree where there is none."""
        registry = self._registry()
        champion = registry.resolve(self.slug, CHAMPION)
        challenger = results["train"]["version"]
        if champion == challenger:
            return Ends(f"kept v{champion}", "training came to the very policy that is champion already")
        evaluator = Evaluator(self.config, self.settings, self.request.store, self.request.address)
        ours = (challenger, Path(results["train"]["policy"]))
        theirs = None
        if champion is not None:
            # Beside the run: the live trial may be on another node, which sees this folder and not our cache.
            beside = self.folder / "champion"
            shutil.rmtree(beside, ignore_errors=True)
            theirs = (champion, Path(shutil.copytree(registry.fetch(self.slug, champion), beside)))
        try:
            return {"champion": champion, **evaluator.compare(theirs, ours)}
        except ClusterBusyError as error:
            raise Stopped(str(error), EXIT_FAILED) from error

    def decide(self, results: Results) -> Any:
        """Promote or keep; nothing else, so that what is decided is known whatever fails afterwards."""
        evaluated, version = results["evaluate"], results["train"]["version"]
        champion = evaluated["champion"]
        decision = decide(
            *_evidence(evaluated),
            num_audited=evaluated["num_audited"],
            num_bugs=evaluated["num_bugs"],
            margin=self.settings.margin,
        )
        if decision.is_promoted and self._registry().is_rolled_back(self.slug, version):
            # By a person, perhaps while this run was cut off just after its promotion.
            decision = Decision(False, f"v{version} was rolled back by hand, whatever the gate says: {decision.reason}")
        if decision.is_promoted:
            try:
                self._registry().promote(self.slug, version, expected_champion=champion)
            except RegistryUnavailableError as error:  # it may have heard of the promotion: asked again, it says
                raise Stopped(f"it is not known whether v{version} is promoted, for {error}", EXIT_FAILED) from error
            line = f"promoted v{version}: {decision.reason}"
        else:
            line = f"kept {'DDTree' if champion is None else f'v{champion}'} because {decision.reason}"
        return {"line": line, "reason": decision.reason, "is_promoted": decision.is_promoted}

    def report(self, results: Results) -> Any:
        """Make the reason and the numbers tags of the version, and a report."""
        evaluated, version, decided = results["evaluate"], results["train"]["version"], results["decide"]
        champion = evaluated["champion"]
        tags = {
            "graft.gate.decision": "promoted" if decided["is_promoted"] else "kept",
            "graft.gate.reason": decided.get("reason", decided["line"]),  # a run may go on from an earlier version's
            "graft.gate.champion": "none" if champion is None else str(champion),
            "graft.gate.run": self.folder.name,
            **gate_tags(*_evidence(evaluated), evaluated["num_audited"], evaluated["num_bugs"]),
            **_drift_tags(results["choose"].get("drift")),
        }
        line, path = decided["line"], self.folder / "report.html"
        try:
            write_report(path, self.slug, version, line, results, self.folder / "training")
            registry = self._registry()
            registry.tag(self.slug, version, tags)
            registry.log_report(self.slug, version, path)
        except RegistryUnavailableError as error:  # the run must not end as failed: its decision holds
            done = f"v{version} is promoted" if decided["is_promoted"] else f"v{version} is not promoted"
            raise Stopped(f"{done}, but its tags and report are not all kept: {error}", EXIT_FAILED) from error
        except RegistryError as error:  # somebody has deleted the version, say: no later start could do better
            say(f"report: not all kept, {error}")
            return {"report": str(path) if path.exists() else None, "skipped": str(error)}
        return {"report": str(path)}

    def clean(self, results: Results) -> Any:
        """Delete what the retention rule lets go; what cannot be deleted now goes at the next run's end."""
        parts = {
            "num_forgotten_files": self._forget,
            "num_deleted_files": self._vacuum,
            "num_emptied_runs": self._empty,
        }
        done: dict[str, Any] = {}
        for name, part in parts.items():
            try:
                done[name] = part()
            except Exception as error:  # whatever it is, it must not hide what the run has decided
                what = one_line(error)
                say(f"clean: left for the next run, {what}")
                done.setdefault("skipped", []).append(what)
        return done

    def _forget(self) -> int:
        """Trajectories that are too old; returns how many files went."""
        if self.settings.keep_days is None:
            return 0
        return TrajectoryStore(self.request.store).forget(before=self._oldest().date(), target=self.slug)

    def _vacuum(self) -> int:
        return len(TrajectoryStore(self.request.store).vacuum())

    def _empty(self) -> int:
        """Checkpoints and copies of runs that are too old; returns how many runs had any."""
        return 0 if self.settings.keep_days is None else empty_old_runs(self.request.runs, self._oldest())

    def _oldest(self) -> datetime:
        """The moment before which things are too old to be kept."""
        assert self.settings.keep_days is not None
        return datetime.now(UTC) - timedelta(days=self.settings.keep_days)

    def _drift(self) -> Drift:
        try:
            return find_drift(
                DriftRequest(
                    config=self.config,
                    rule=self.settings.drift,
                    store=self.request.store,
                    tracking_uri=self.request.tracking_uri,
                    every_prompt=self.settings.every_prompt,
                )
            )
        except StoreError as error:  # a store that is new, say; whether the run can work, its own steps will find
            return Drift(Verdict.unknown, f"drift cannot be measured ({error})")

    def _count_recorded(self, min_rounds: int) -> int:
        """Requests to learn from that were recorded since the last training began whose policy was judged."""
        try:
            return count_recorded(
                self.config,
                self.request.store,
                since=last_training(self.request.runs),
                every_prompt=self.settings.every_prompt,
                min_rounds=min_rounds,
                needs_hidden=self.settings.gate_rank > 0,
            )
        except StoreError as error:  # a store that is new, say, or has too few rounds
            say(f"recorded requests cannot be learned from ({error})")
            return 0

    def _registry(self) -> Registry:
        return Registry(self.request.tracking_uri)


def _gone_on_with(action: Callable[[Results], Any]) -> Callable[[Results], Any]:
    """The step, broken off and not failed where the registry is away: the next start may find it back."""

    def attempt(results: Results) -> Any:
        try:
            return action(results)
        except RegistryUnavailableError as error:
            raise Stopped(str(error), EXIT_FAILED) from error

    return attempt


def _evidence(evaluated: Mapping[str, Any]) -> tuple[Evidence, Evidence | None]:
    """By replay and live."""
    replayed = evidence_of(evaluated["replay"])
    assert replayed is not None
    return replayed, evidence_of(evaluated["live"])


def _drift_tags(drift: Mapping[str, Any] | None) -> dict[str, str]:
    """None: the run began with a version of this program that did not look at drift."""
    if drift is None:
        return {}
    numbers = {f"graft.drift.{name}": drift[name] for name in ("ratio", "low", "high")}
    return {
        "graft.drift": drift["verdict"],
        "graft.drift.reason": drift["sentence"],
        **{name: f"{value:.4f}" for name, value in numbers.items() if value is not None},
    }
