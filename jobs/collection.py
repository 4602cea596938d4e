"""One collection run from beginning to end: pre-flight, actors, plan, driver loop, summary, exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from graft_dist.errors import PromptError
from graft_dist.prompts import BadPrompt, Prompt, read_prompts
from jobs.cluster import connected, job_id, wait_until_fits
from jobs.collect_actor import ActorPlan, ModelInfo
from jobs.decode_spec import DecodeSpec
from jobs.driver import CommitLog, Driver, DriverSettings, Ending, RunResult
from jobs.estimate import check_room, estimate
from jobs.out_file import to_json, write_aside
from jobs.provenance import provenance
from jobs.ray_pool import PoolSettings, RayPool
from jobs.units import Unit, plan
from storage.query import connect as connect_store
from storage.trajectories import CommitResult, FileInfo, TrajectoryStore


@dataclass(frozen=True, kw_only=True)
class CollectRequest:
    """What a run is asked to do."""

    spec: DecodeSpec
    prompts: tuple[str, ...]  # JSONL files, in order
    store: str | None  # root of the trajectory store; None decodes without recording
    summary: Path | None = None  # a file that gets the figures of the run's end
    num_slots: int
    pool: PoolSettings
    unit_size: int = 16
    limit: int | None = None  # the first so many prompts only
    address: str | None = None  # of the Ray cluster
    wait_for_nodes_s: float = 0.0  # how long a cluster that is too small may take to start nodes
    driver: DriverSettings = field(default_factory=DriverSettings)


def say(line: str) -> None:
    """Print a line at once, so that a job's log can be followed."""
    print(f"collect: {line}", flush=True)


def run(request: CollectRequest, failpoint: Callable[[str], None] = lambda _: None) -> int:
    """Collect, and return the exit code: see `Ending`. `failpoint` is for tests that kill the process at named points.

    Raises a `GraftError` when the run cannot start: nothing was decoded then. Afterwards SIGINT and SIGTERM do what
    they did before, and this process is in a Ray cluster only if it was in one before.

    """
    prompts = _read(request)
    store = None if request.store is None else TrajectoryStore(request.store)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with connected(request.address) as cluster:
            say(cluster.message + (f", as job {job_id()}" if job_id() else ""))
            stop = StopSignal()  # after ray.init, which sets a handler of its own
            size = (request.pool.num_actors, request.pool.num_cpus, request.pool.num_gpus)
            wait_until_fits(cluster, *size, wait_s=request.wait_for_nodes_s, say=say)
            if store is not None:
                store.prepare()  # a store that cannot be made is said before the models take their time to load
            with closing(RayPool(_actor_plan(request, store), request.pool)) as pool:
                models = pool.start()[0].models
                say(f"{pool.num_workers} actors ready, each with {request.num_slots} slots and {_models_line(models)}")
                result = _work(request, prompts, store, pool, models, stop, failpoint)
                figures = _conclude(result, request, prompts, store, models.identity(request.spec))
        if request.summary is not None:
            try:
                _write_summary(request, models, figures)
            except OSError as error:  # the run itself is over and committed, and keeps its exit code
                say(f"the summary cannot be written to {request.summary} ({error.strerror})")
        return int(figures["exit_code"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _read(request: CollectRequest) -> list[Prompt | BadPrompt]:
    prompts = read_prompts(request.prompts)[: request.limit]
    if not prompts:
        raise PromptError(f"there is no prompt in {', '.join(request.prompts)}")
    num_bad = sum(isinstance(prompt, BadPrompt) for prompt in prompts)
    say(
        f"{len(prompts)} prompts"
        + (f", of which {num_bad} are unusable lines that become error rows" if num_bad else "")
    )
    return prompts


def _actor_plan(request: CollectRequest, store: TrajectoryStore | None) -> ActorPlan:
    return ActorPlan(
        spec=request.spec,
        store=None if store is None else str(store.root),
        num_slots=request.num_slots,
        num_threads=request.spec.config.threads or max(1, int(request.pool.num_cpus)),
    )


def _models_line(models: ModelInfo) -> str:
    drafter = "no drafter" if models.drafter_fingerprint is None else f"drafter {models.drafter_fingerprint[:12]}"
    return f"target {models.target_fingerprint[:12]} in {models.dtype}, {drafter}"


def _work(
    request: CollectRequest,
    prompts: Sequence[Prompt | BadPrompt],
    store: TrajectoryStore | None,
    pool: RayPool,
    models: ModelInfo,
    stop: StopSignal,
    failpoint: Callable[[str], None],
) -> RunResult:
    run_id = models.identity(request.spec)
    log: CommitLog = NoLog()
    done: set[str] = set()
    if store is not None:
        # First the fence, then what is committed: a commit between the two is one that fences this driver.
        dataset = {"target_fingerprint": models.target_fingerprint, "tokenizer_sha256": models.tokenizer_sha256}
        log = StoreLog(store, run_id, store.begin(run_id, request.spec.config.slug, dataset))
        done = committed_sequences(store, run_id)
    units = plan(prompts, request.spec, run_id, request.unit_size, done)
    if done:
        say(f"run {run_id}: {len(done)} sequences are there already")
    _preflight(units, request, store, models)
    stop.start_waiting()
    driver = Driver(
        pool,
        log,
        units,
        request.driver,
        stop_signal=stop.ending,
        on_progress=lambda progress: say(progress.line()),
        on_event=say,
        failpoint=failpoint,
    )
    return driver.run()


def _preflight(
    units: Sequence[Unit], request: CollectRequest, store: TrajectoryStore | None, models: ModelInfo
) -> None:
    expected = estimate(units, request.spec, models.draft_depth)
    if store is None:
        say(f"{expected.line()}; nothing is recorded")
        return
    if store.root.is_local:
        free = check_room(store.path, expected)
        say(f"{expected.line()}; {free / 1e9:,.1f} GB free at {store.root}")
    else:
        say(f"{expected.line()} for {store.root}")


def _conclude(
    result: RunResult,
    request: CollectRequest,
    prompts: Sequence[Prompt | BadPrompt],
    store: TrajectoryStore | None,
    run_id: str,
) -> dict[str, Any]:
    """Say how the run ended. Returns what was said, under the names that it has in a summary."""
    tally, figures = result.committed, _figures(result, len(prompts))
    of_run = (tally.num_sequences, tally.num_errors)
    if result.ending is Ending.COMPLETE:
        if store is not None:
            units = plan(prompts, request.spec, run_id, request.unit_size)
            of_run = _count_sequences(store, run_id, {item.sequence_id for unit in units for item in unit.items})
        if 0 < of_run[0] == of_run[1]:
            figures["exit_code"] = Ending.PARTIAL.value
    say(
        f"{result.ending.label} after {result.elapsed_s:.1f} s: {tally.num_sequences} sequences "
        f"({tally.num_errors} of them errors) in {result.num_units_committed} units, {tally.num_tokens:,} tokens, "
        f"{figures['tokens_per_s']:.1f} tokens/s, MAT {tally.mat:.2f}, {tally.num_rows:,} rows, "
        f"{figures['megabytes']:.1f} MB"
    )
    if result.message:
        say(result.message)
    if result.num_workers_lost:
        say(f"actors were lost {result.num_workers_lost} times")
    for unit in result.set_aside:
        say(f"not collected: unit {unit.unit_id} after {unit.attempts} attempts ({unit.reason})")
    if result.num_units_left:
        say(f"{result.num_units_left} units are left; the same command goes on with them")
    if store is not None:
        figures["snapshot"] = store.snapshot().name
        say(f"store {store.root} is now {figures['snapshot']}")
    if of_run[0] > tally.num_sequences:
        say(f"with what was there already {of_run[0]} sequences of these prompts ({of_run[1]} of them errors)")
    if figures["exit_code"] != result.ending.value:
        say("not one prompt could be answered")
    return figures


def _figures(result: RunResult, num_prompts: int) -> dict[str, Any]:
    tally = result.committed
    return {
        "ending": result.ending.label,
        "exit_code": result.ending.value,
        "message": result.message,
        "seconds": result.elapsed_s,
        "prompts": num_prompts,
        "sequences": tally.num_sequences,
        "errors": tally.num_errors,
        "units": result.num_units_committed,
        "units_left": result.num_units_left,
        "set_aside": [asdict(unit) for unit in result.set_aside],
        "actors_lost": result.num_workers_lost,
        "tokens": tally.num_tokens,
        "tokens_per_s": tally.num_tokens / max(result.elapsed_s, 1e-9),
        "mat": tally.mat,
        "rounds": tally.num_rounds,  # decoded
        "rows": tally.num_rows,  # written, of both tables
        "megabytes": tally.num_bytes / 1e6,
    }


def _write_summary(request: CollectRequest, models: ModelInfo, figures: dict[str, Any]) -> None:
    assert request.summary is not None
    about = provenance()
    about["finished_at"] = about.pop("started_at")
    settings = {
        "target": request.spec.config.slug,
        "dtype": models.dtype,
        "actors": request.pool.num_actors,
        "cpus_per_actor": request.pool.num_cpus,
        "gpus_per_actor": request.pool.num_gpus,
        "slots": request.num_slots,
        "unit_size": request.unit_size,
        **request.spec.policy_json(),
        "sampling": asdict(request.spec.sampling),
        "dense": request.spec.dense,
        "hidden": request.spec.num_hidden,
        "is_recorded": request.store is not None,
    }
    write_aside(request.summary, to_json({**figures, "settings": settings, **about}))


def committed_sequences(store: TrajectoryStore, run_id: str) -> set[str]:
    """The ids of the sequences that this run has committed, in whatever units."""
    with connect_store(str(store.root), threads=1) as connection:
        rows = connection.execute("SELECT sequence_id FROM sequences WHERE run_id = ?", [run_id]).fetchall()
    return {row[0] for row in rows}


def _count_sequences(store: TrajectoryStore, run_id: str, wanted: Collection[str]) -> tuple[int, int]:
    """How many of these sequences the run has committed by now, earlier starts included, and how many are errors.

    Others of the same run are those of other prompt files.
    """
    sql = "SELECT sequence_id, error IS NOT NULL FROM sequences WHERE run_id = ?"
    with connect_store(str(store.root), threads=1) as connection:
        is_error = {name: failed for name, failed in connection.execute(sql, [run_id]).fetchall() if name in wanted}
    return len(is_error), sum(is_error.values())


class StoreLog:
    """A run's commits to the store, numbered as the fence wants them."""

    def __init__(self, store: TrajectoryStore, run_id: str, first_seq: int) -> None:
        self._store = store
        self._run_id = run_id
        self._seq = first_seq

    def commit(self, files: Sequence[FileInfo]) -> CommitResult:
        """Commit whole units. Raises `StoreFencedError` when another driver of this run was faster."""
        result = self._store.commit(files, self._run_id, self._seq)
        self._seq += 1
        return result


class NoLog:
    """For a run that records nothing."""

    def commit(self, files: Sequence[FileInfo]) -> None:
        assert not files, "nothing is written, so there is nothing to commit"


class StopSignal:
    """SIGTERM and SIGINT: end the process at once while it loads, and ask the driver to stop once it works.

    A second signal always ends the process at once.

    """

    _ENDINGS = {signal.SIGTERM: Ending.TERMINATED, signal.SIGINT: Ending.INTERRUPTED}  # noqa: RUF012

    def __init__(self) -> None:
        self._is_waiting = False
        self._asked: Ending | None = None
        for number in self._ENDINGS:
            signal.signal(number, self._receive)

    def start_waiting(self) -> None:
        """From now on someone looks at `ending` and stops in good order."""
        self._is_waiting = True

    def ending(self) -> Ending | None:
        """How the run was asked to end; None while it was not."""
        return self._asked

    def _receive(self, number: int, frame: FrameType | None) -> None:
        ending = self._ENDINGS[signal.Signals(number)]
        if not self._is_waiting or self._asked is not None:
            sys.exit(ending.value)
        self._asked = ending
