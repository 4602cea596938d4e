"""A store of synthetic rounds, as large as asked for: written, asked, streamed, merged, deleted from; each step timed.

    python bench/store_scale.py --rounds 10000000 --store DIR [--out bench/store-scale] [--memory 2GB]
        [--process-memory 4GB] [--threads 2] [--resume]

Values are random, sizes those of real rounds (7 depths of 16 candidates, budgets from 4 to 32, about 1 kB a round).
Eight runs in four days; run-3 and run-7 are of another target. So questions about one target or run have files to skip,
and merged files hold two runs. Every step has a process of its own. DuckDB's memory is limited, and so is that of the
whole process, by the kernel (`RLIMIT_DATA`, on Linux): a step that wants more fails, and the benchmark with it. `DIR`
is made, and must not be there; while the training step runs, its lessons lie beside it. `--out` gets the machine
(run.json, first), the rows (raw.jsonl, one by one) and a table (summary.md, in the end, also of what was done before a
step failed). With `--resume` it goes on with the step that failed or was interrupted, a merge or deletion with what is
left of it; run.json says so. Other `--rounds`, `--memory` or `--threads` are refused then.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: the folder on the path is bench/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import pyarrow as pa

from storage import SCHEMA_VERSION, TrajectoryStore, UnitKey, connect, query_names, run_query
from storage.schema import ROUNDS, SEQUENCES

DEPTH, WIDTH, VOCAB_SIZE = 7, 16, 49152
BUDGETS = (4, 8, 16, 32)
TARGETS = ("target-a", "target-b")
FIRST_DAY = datetime(2026, 1, 1, tzinfo=UTC)
NUM_RUNS, RUNS_PER_DAY = 8, 2
SEQUENCES_PER_UNIT, ROUNDS_PER_SEQUENCE = 32, 64
FILES_PER_COMMIT = 100
PROGRESS_S = 20.0  # between two signs of life
EMBEDDING_SIZE, TRAINING_STEPS = 64, 20
TASKS = ("code", "chat", "math", "prose")
DATASET, DRAFTER = {"target_fingerprint": "synthetic"}, "synthetic"
TYPES = {field.name: field.type for schema in (ROUNDS, SEQUENCES) for field in schema}

Step = tuple[str, str, Callable[..., dict[str, Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class Measured:
    """One step: wall and processor time, and the most memory that its process had."""

    step: str
    state: str  # of the store: as written, merged, deleted from
    seconds: float
    cpu_s: float
    peak_mib: float  # resident, with the pages of files that it maps, such as libraries and lessons
    own_mib: float  # of that, its own: what RLIMIT_DATA is about; seen 20 times a second
    result: dict[str, Any]


# ---------------------------------------------------------------------------- rows


def lists(name: str, lengths: np.ndarray, values: np.ndarray) -> pa.Array:
    """A column of lists, cut from flat values."""
    return _cut(lengths, pa.array(values, TYPES[name].value_type), TYPES[name])


def matrices(name: str, lengths: np.ndarray, values: np.ndarray) -> pa.Array:
    """A column of lists of lists of WIDTH values."""
    inner = TYPES[name].value_type
    widths = np.full(int(lengths.sum()), WIDTH)
    return _cut(lengths, _cut(widths, pa.array(values, inner.value_type), inner), TYPES[name])


def _cut(lengths: np.ndarray, values: pa.Array, kind: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=kind)


def table(schema: pa.Schema, num_rows: int, columns: dict[str, Any]) -> pa.Table:
    """Columns by name; a single value is every row's, and a missing column is NULL."""
    arrays = []
    for field in schema:
        value = columns.get(field.name)
        if isinstance(value, np.ndarray | list):
            value = pa.array(value, field.type)
        elif not isinstance(value, pa.Array):
            value = pa.repeat(pa.scalar(value, field.type), num_rows)
        arrays.append(value)
    return pa.Table.from_arrays(arrays, schema=schema)


def within(sizes: np.ndarray) -> np.ndarray:
    """0, 1, ... within each group of these sizes: [2, 3] makes 0 1 0 1 2."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def unit(
    key: UnitKey, target: str, written_at: datetime, num_sequences: int, rng: np.random.Generator
) -> dict[str, pa.Table]:
    """The two tables of a unit of made-up rounds; counts and lengths fit each other, tokens are random."""

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, VOCAB_SIZE, count, dtype=np.int32)

    def floats(count: int) -> np.ndarray:
        return rng.standard_exponential(count, np.float32)

    per_sequence = rng.integers(ROUNDS_PER_SEQUENCE // 2, ROUNDS_PER_SEQUENCE * 3 // 2, num_sequences, endpoint=True)
    n, starts = int(per_sequence.sum()), np.cumsum(per_sequence) - per_sequence
    sequence_of = np.repeat(np.arange(num_sequences), per_sequence)
    names = np.array([f"{key.unit_id}.{index}" for index in range(num_sequences)])
    # A full binary tree of candidates, in insertion order; the accepted path is its leftmost one.
    budgets = rng.choice(np.array(BUDGETS), n)
    nodes, round_of = within(budgets + 1), np.repeat(np.arange(n), budgets + 1)
    depths = np.log2(nodes + 1).astype(np.int64)
    num_accepted = np.minimum(rng.geometric(0.4, n) - 1, np.log2(budgets + 1).astype(np.int64))
    num_tokens = num_accepted + 1
    before = np.cumsum(num_tokens) - num_tokens
    num_prompt, num_output = rng.integers(20, 200, num_sequences), np.add.reduceat(num_tokens, starts)
    roots, candidates = tokens(n), tokens(n * DEPTH * WIDTH).reshape(n, DEPTH, WIDTH)
    tree_tokens = np.where(
        nodes == 0, roots[round_of], candidates[round_of, depths - 1, (nodes - 2**depths + 1) % WIDTH]
    )
    is_followed = (nodes + 1 == 2**depths) & (depths < num_accepted[round_of])
    wanted = np.where(is_followed, candidates[round_of, depths, 0], tokens(len(nodes)))
    drafted = np.full(n, DEPTH)
    shared = {"unit_id": key.unit_id, "attempt": key.attempt, "run_id": key.run_id}
    rounds = table(ROUNDS, n, shared | {
        "sequence_id": names[sequence_of].tolist(),
        "kind": "decoded",
        "round_index": within(per_sequence),
        "context_length": num_prompt[sequence_of] + before - before[starts][sequence_of],
        "root_token": roots,
        "candidate_ids": matrices("candidate_ids", drafted, candidates.ravel()),
        "candidate_log_probs": matrices("candidate_log_probs", drafted, -floats(n * DEPTH * WIDTH)),
        "conf": floats(n),
        "degen": floats(n),
        "hist": floats(n),
        "budget": budgets,
        "tree_tokens": lists("tree_tokens", budgets + 1, tree_tokens),
        "tree_parents": lists("tree_parents", budgets + 1, np.where(nodes == 0, -1, (nodes - 1) // 2)),
        "tree_depths": lists("tree_depths", budgets + 1, depths),
        "target_tokens": lists("target_tokens", budgets + 1, wanted),
        "accepted": lists("accepted", num_accepted, 2 ** (within(num_accepted) + 1) - 1),
        "num_tokens": num_tokens,
        "is_mismatch": rng.random(n) < 0.1,
        "parent_logits": matrices("parent_logits", num_tokens, floats(num_tokens.sum() * WIDTH)),
        "parent_logsumexp": lists("parent_logsumexp", num_tokens, floats(num_tokens.sum())),
        "followed": lists("followed", np.zeros(n, np.int64), np.zeros(0, np.int32)),
        "draft_ns": rng.integers(8_000_000, 12_000_000, n),
        "build_ns": rng.integers(100_000, 200_000, n),
        "verify_ns": rng.integers(20_000_000, 40_000_000, n),
        "commit_ns": rng.integers(500_000, 900_000, n),
        "batch_size": 1,
        "batch_rows": budgets + 1,
    })  # fmt: skip
    sequences = table(SEQUENCES, num_sequences, shared | {
        "sequence_id": names.tolist(),
        "prompt_id": names.tolist(),
        "task": [TASKS[index % len(TASKS)] for index in range(num_sequences)],
        "prompt_token_ids": lists("prompt_token_ids", num_prompt, tokens(num_prompt.sum())),
        "output_token_ids": lists("output_token_ids", num_output, tokens(num_output.sum())),
        "finish_reason": "length",
        "sampling": '{"max_new_tokens": 256, "temperature": 0.0}',
        "temperature": 0.0,
        "seed": 0,
        "num_rounds": per_sequence,
        "num_drafted": np.add.reduceat(budgets, starts),
        "num_accepted": np.add.reduceat(num_accepted, starts),
        "prefill_s": 0.1,
        "decode_s": per_sequence * 0.04,
        "target_spec": target,
        "target_fingerprint": DATASET["target_fingerprint"],
        "drafter_fingerprint": DRAFTER,
        "policy": "ddtree",
        "hardware": "synthetic",
        "software": "synthetic",
        "schema_version": SCHEMA_VERSION,
        "written_at": written_at,
        "source": "collect",
    })  # fmt: skip
    return {"rounds": rounds, "sequences": sequences}


# ---------------------------------------------------------------------------- steps


def write(root: str, num_rounds: int) -> dict[str, Any]:
    """Write and commit units until every run has its share."""
    store, rng = TrajectoryStore(root), np.random.default_rng(0)
    num_written = num_bytes = num_files = 0
    due = time.monotonic() + PROGRESS_S
    for run in range(NUM_RUNS):
        run_id, target = f"run-{run}", TARGETS[run % 4 == 3]
        day = FIRST_DAY + timedelta(days=run // RUNS_PER_DAY)
        seq, waiting, aim = store.begin(run_id, target, DATASET), [], num_rounds * (run + 1) // NUM_RUNS
        while num_written < aim:
            name = rng.bytes(8).hex()
            key = UnitKey(unit_id=name, attempt=name, run_id=run_id)
            size = min(SEQUENCES_PER_UNIT, -(-(aim - num_written) // ROUNDS_PER_SEQUENCE))
            files = store.write_tables(key, target, day.date(), unit(key, target, day, size, rng))
            num_written += files[0].rows
            num_bytes += sum(file.size for file in files)
            num_files += len(files)
            waiting += files
            if num_written >= aim or len(waiting) >= FILES_PER_COMMIT:
                store.commit(waiting, run_id, seq)
                seq, waiting = seq + 1, []
            if time.monotonic() >= due or num_written >= num_rounds:
                print(f"  {num_written:,} of {num_rounds:,} rounds", flush=True)
                due = time.monotonic() + PROGRESS_S
    return {"rounds": num_written, "files": num_files, "mb": round(num_bytes / 1e6, 1)}


def ask(root: str, memory: str, threads: int, sql_or_name: str) -> dict[str, Any]:
    return {"rows": run_query(root, sql_or_name, memory_limit=memory, threads=threads).num_rows}


def stream_for_training(root: str, memory: str, threads: int) -> dict[str, Any]:
    """What a worker of `jobs/train.py` does: write one target's lessons from the store, and take a few steps on them.

    As many sequences are fitted to and held out as prompts are there; the target's embeddings are random; Ray is only
    imported.
    """
    import torch

    from graft_dist.edge_scorer import TdesConfig
    from graft_dist.learning.tdes import TdesTraining
    from graft_dist.prompts import TEST_FRACTION, TUNE_FRACTION
    from jobs.scorer_training import ScorerPlan, train_on_worker
    from storage.learning_rounds import RoundShape, recorded_sequences, shapes_of

    imports_mib, out = peak_mib(), Path(f"{root}-training")
    shutil.rmtree(out, ignore_errors=True)  # of a process that was killed
    snapshot = TrajectoryStore(root).snapshot()
    with closing(connect(root, memory_limit=memory, threads=threads, snapshot=snapshot)) as connection:
        depth, width, _ = shapes_of(connection, TARGETS[0], DRAFTER)[0]
        shape = RoundShape(depth, width)
        sequences = recorded_sequences(connection, TARGETS[0], DRAFTER, shape)
    of_test, of_tune = round(20 * TEST_FRACTION), round(20 * TUNE_FRACTION)
    tune = tuple(each for at, each in enumerate(sequences) if of_test <= at % 20 < of_test + of_tune)
    fit = tuple(each for at, each in enumerate(sequences) if at % 20 >= of_test + of_tune)
    training = TdesTraining(steps=TRAINING_STEPS, evaluate_every=TRAINING_STEPS)
    plan = ScorerPlan(
        store=root,
        snapshot=snapshot,
        slug=TARGETS[0],
        shape=shape,
        fit=fit,
        tune=tune,
        target="synthetic",
        revision=None,
        network=TdesConfig(embedding_size=EMBEDDING_SIZE, draft_depth=depth),
        training=training,
        out=out,
        identity="synthetic",
        threads=threads,
        lessons=out / "lessons",
    )
    try:
        train_on_worker(plan, torch.randn(VOCAB_SIZE, EMBEDDING_SIZE))
        lessons_mb = sum(file.stat().st_size for file in plan.lessons.rglob("*.bin")) / 1e6
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return {
        "rounds": sum(each.num_decoded for each in (*fit, *tune)),
        "lessons_mb": round(lessons_mb, 1),
        "training_steps": training.steps,
        "imports_mib": round(imports_mib),
    }


def stream_for_replay(root: str, memory: str, threads: int) -> dict[str, Any]:
    """Read one target's rounds in batches, as replay does."""
    from storage.recorded_rounds import Selection, recorded_rounds

    with closing(connect(root, memory_limit=memory, threads=threads)) as connection:
        batches = recorded_rounds(connection, Selection(target=TARGETS[0]))
        return {"rounds": sum(len(batch.sequence_ids) for batch in batches)}


def compact(root: str) -> dict[str, Any]:
    return asdict(TrajectoryStore(root).compact())


def forget_run(root: str) -> dict[str, Any]:
    return {"files": TrajectoryStore(root).forget(run_id="run-0")}


def forget_day(root: str) -> dict[str, Any]:
    return {"files": TrajectoryStore(root).forget(before=(FIRST_DAY + timedelta(days=2)).date())}


def vacuum(root: str) -> dict[str, Any]:
    return {"files": len(TrajectoryStore(root).vacuum(retention_hours=0))}


def steps(root: str, num_rounds: int, memory: str, threads: int) -> Iterator[Step]:
    """(step, state of the store, function, arguments), in order."""
    questions = {name: name for name in query_names()}
    questions["one target"] = f"SELECT avg(num_tokens) FROM rounds WHERE target = '{TARGETS[1]}'"
    questions["one run"] = "SELECT avg(num_tokens) FROM rounds WHERE run_id = 'run-5'"
    yield "write", "empty", write, (root, num_rounds)
    for state in ("as written", "merged"):
        if state == "merged":
            yield "compact", "as written", compact, (root,)
        for name, question in questions.items():
            yield f"query: {name}", state, ask, (root, memory, threads, question)
    yield "stream for training", "merged", stream_for_training, (root, memory, threads)
    yield "stream for replay", "merged", stream_for_replay, (root, memory, threads)
    yield "forget a run", "merged", forget_run, (root,)
    yield "forget two days", "merged", forget_day, (root,)
    yield "vacuum", "deleted from", vacuum, (root,)
    yield "query: summary", "deleted from", ask, (root, memory, threads, "summary")


def keep_machine(out: Path, options: dict[str, Any], num_done: int) -> dict[str, Any]:
    """Write down what is about to be measured, and on what; a later start under `resumed`, with the steps before it."""
    from jobs.provenance import provenance  # here: it loads libraries whose memory the steps would seem to use

    about = {"options": options, **provenance()}
    if num_done > 0:
        first = json.loads((out / "run.json").read_text(encoding="utf-8"))
        about = first | {"resumed": [*first.get("resumed", []), {"steps_before": num_done, **about}]}
    (out / "run.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return {}


def rows_of(out: Path) -> list[Measured]:
    """What an earlier start has measured; nothing where there was none. A line that was cut off is taken out."""
    raw = out / "raw.jsonl"
    if not raw.exists():
        return []
    whole = [line for line in raw.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
    raw.write_text("".join(whole), encoding="utf-8")
    return [Measured(**json.loads(line)) for line in whole]


def differences(out: Path, options: dict[str, Any]) -> list[str]:
    """In what a start would differ from the first one, whose rows it would go on with."""
    first = json.loads((out / "run.json").read_text(encoding="utf-8"))["options"]
    names = ("rounds", "memory", "threads")
    return [f"--{name.replace('_', '-')} {first[name]}" for name in names if first[name] != options[name]]


def limits_of(out: Path) -> str:
    """What steps' processes might take, as the starts were told."""
    about = json.loads((out / "run.json").read_text(encoding="utf-8"))
    last = about["options"]["process_memory"]
    said = [last]
    for later in about.get("resumed", []):
        if (limit := later["options"]["process_memory"]) != last:
            last = limit
            said.append(f"{limit} from row {later['steps_before'] + 1} on")
    return ", ".join(said)


def num_bytes_of(text: str) -> int:
    """A size as DuckDB takes it: "3GB" is 3e9 bytes."""
    factors = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 3GB")
    return int(float(match[1]) * factors[match[2].upper()])


def peak_mib() -> float:
    """The most memory that this process had resident until now: what it holds, and pages of files that it maps."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _watch(done: threading.Event, seen: list[float]) -> None:
    """Note what this process holds itself, 20 times a second; nothing where there is no /proc."""
    statm = Path("/proc/self/statm")
    while statm.exists() and not done.wait(0.05):
        resident, of_files = (int(pages) for pages in statm.read_text().split()[1:3])
        seen.append((resident - of_files) * resource.getpagesize() / 2**20)


def _child(pipe: Any, limit: int | None, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    done, seen = threading.Event(), [0.0]
    watch = threading.Thread(target=_watch, args=(done, seen), daemon=True)
    watch.start()  # before the limit: a thread that finds no memory to start with would be waited for without end
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    started = time.perf_counter()
    try:
        result = function(*arguments)
        seconds = time.perf_counter() - started
    finally:
        done.set()
        watch.join()
    pipe.send((seconds, time.process_time(), peak_mib(), max(seen), result))


def measure(
    step: str, state: str, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...], limit: int | None
) -> Measured:
    """Do a step in a process of its own: memory that one has touched is not another's. `limit`: bytes it may have."""
    # This process only imports: it has no threads that a fork could break.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, limit, function, arguments))
    started = time.monotonic()
    process.start()
    sender.close()
    while not receiver.poll(PROGRESS_S):
        print(f"  {step} ({state}): {time.monotonic() - started:.0f} s so far", flush=True)
    try:
        seconds, cpu_s, *memory, result = receiver.recv()
    except EOFError:
        raise SystemExit(f"{step} ({state}) failed; its own message is above") from None
    process.join()
    return Measured(step, state, round(seconds, 3), round(cpu_s, 3), *(round(mib, 1) for mib in memory), result)


def summary(rows: Sequence[Measured], memory: str, process_memory: str) -> str:
    """A table for people."""
    lines = [
        f"DuckDB was given {memory}, each step's whole process {process_memory} (RLIMIT_DATA). Peak: resident, of the "
        "step's whole process, libraries and mapped files included; own: what it held without them.",
        "",
    ]
    lines += ["| step | store | seconds | peak MiB | own MiB | result |", "|---|---|---:|---:|---:|---|"]
    for row in rows:
        result = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in row.result.items())
        figures = f"{row.seconds:.2f} | {row.peak_mib:.0f} | {row.own_mib:.0f}"
        lines.append(f"| {row.step} | {row.state} | {figures} | {result} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Do all steps and keep what they took."""
    parser = argparse.ArgumentParser(
        prog="store_scale.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, required=True, metavar="N", help="rounds to write, about 1 kB each")
    add("--store", type=Path, required=True, metavar="DIR", help="folder for the store; must not be there")
    add("--out", type=Path, default=Path("bench/store-scale"), metavar="DIR", help="folder for the results")
    add("--memory", default="2GB", help="DuckDB's limit (2GB)")
    add(
        "--process-memory",
        default="4GB",
        help="each step's limit, by the kernel, which counts reserved addresses too (4GB)",
    )
    add("--threads", type=int, default=2, metavar="N", help="DuckDB's threads (2)")
    add("--resume", action="store_true", help="go on after the last row in --out, with the store that is there")
    options = parser.parse_args(argv)
    rows = rows_of(options.out) if options.resume else []
    if options.resume and not rows:
        parser.error(f"{options.out} has no row to go on after; leave out --resume, and delete {options.store}")
    if not options.resume and options.store.exists():
        parser.error(f"{options.store} is there already: choose another folder, delete it, or give --resume")
    try:
        limit = num_bytes_of(options.process_memory)
    except ValueError as error:
        parser.error(f"--process-memory: {error}")
    options.out.mkdir(parents=True, exist_ok=True)
    other = differences(options.out, vars(options)) if rows else []
    if other:
        parser.error(f"the rows in {options.out} were measured with {', '.join(other)}: --resume takes the same")
    shown = {name: value for name, value in vars(options).items() if name not in ("store", "out")}
    measure("provenance", "no store", keep_machine, (options.out, shown, len(rows)), None)
    every = steps(str(options.store.absolute()), options.rounds, options.memory, options.threads)
    try:
        with (options.out / "raw.jsonl").open("a" if rows else "w", encoding="utf-8") as raw:
            for step in islice(every, len(rows), None):
                row = measure(*step, limit)
                rows.append(row)
                raw.write(json.dumps(asdict(row)) + "\n")
                raw.flush()
                memory_used = f"{row.peak_mib:.0f} MiB ({row.own_mib:.0f} own)"
                print(f"{row.step} ({row.state}): {row.seconds:.2f} s, {memory_used}, {row.result}", flush=True)
    finally:
        table = summary(rows, options.memory, limits_of(options.out))
        (options.out / "summary.md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
