"""The trajectory store: whole units of decoded prompts go in, consistent snapshots come out.

    <root>/sequences/   Delta table: _delta_log/ and target=<slug>/date=<day>/unit-<id>-<attempt>.parquet
    <root>/rounds/      the same for the rounds
    <root>/_tmp/        files being written; never read, never named *.parquet
    <root>/_pins/       snapshots that learning runs still read, see `pins`
    <root>/_leases/     which retraining run of a target is at work; readers and `vacuum` pass it over

The root is a folder of a local or network file system, or s3://bucket/prefix. An object appears whole when its upload
has ended, so that files for an object store are written aside on the machine that makes them.

A *unit* (some tens of prompts) is one sequences file and one rounds file of one *attempt*. Who does what:

* Anyone, such as an actor: `write_unit` writes both files aside, flushes, checksums, and renames or uploads them.
  Nothing is visible yet: a file counts only if the log names it.
* The driver alone: `begin` once, then `commit` finished units in batches, with `seq` growing by one or more each time.

A commit writes two logs, always rounds first, then sequences. So the sequences' log decides: a unit counts once its
sequences are there, and then its rounds are there too; rounds whose (unit_id, attempt) has no sequences are invisible
to readers (see `query.connect`). Readers load the two logs in the opposite order for the same reason. So a crash
anywhere leaves whole units.

Once only: the first committed attempt of a unit wins, later ones are skipped. Two fences see to it, both application
transactions of the log: (run_id, seq) stops a second driver of the same run (`StoreFencedError`), and a counter that
every commit raises makes commits of *different* runs take turns, each looking again at what is already there.

Of two commits to a log at once one is refused, by a rename that replaces nothing on a file system, by a conditional PUT
in an object store; a store that ignores `If-None-Match` will not do.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from graft_dist.errors import StoreError
from storage import schema as tables
from storage.compaction import compact_table, live_files
from storage.parquet_files import distinct_rows, distinct_values, footer_of, sha256_of, write_file
from storage.pins import Pins
from storage.place import Place
from storage.retention import forget_days, forget_run
from storage.schema import PARTITION_COLUMNS, PARTITION_FIELDS, SCHEMA_VERSION, Provenance, UnitKey

if TYPE_CHECKING:
    from graft_dist.rounds import RoundRecord, SequenceRecord

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TURN = "graft-dist/turn"  # application id of the counter that makes commits of different runs take turns
_MAX_COMMIT_TRIES = 20
_STEP = re.compile(r"\s*(?:\x1b\[\d*m)*↳(?:\x1b\[\d*m)*\s*")
_TABLE_PROPERTIES = {
    "delta.checkpointInterval": "50",  # a log without checkpoints is read commit by commit
    "delta.logRetentionDuration": "interval 365 days",  # a table version names a data set: keep it readable
    "graft.schemaVersion": str(SCHEMA_VERSION),
}


class StoreFencedError(StoreError):
    """Another driver of the same run has committed past this one, which must stop without committing anything more."""


@dataclass(frozen=True)
class FileInfo:
    """A complete file of one unit, written but not necessarily committed. Small; made to cross process boundaries."""

    table: str  # "sequences" or "rounds"
    path: str  # relative to the table's folder
    size: int  # bytes
    rows: int
    sha256: str
    unit_id: str
    attempt: str
    target: str  # slug
    date: str  # yyyy-mm-dd


@dataclass(frozen=True)
class CommitResult:
    """What one commit did; both in the order of the files given."""

    committed: tuple[str, ...]  # unit ids that count from now on
    skipped: tuple[str, ...]  # unit ids that an earlier attempt had already filled


@dataclass(frozen=True)
class Snapshot:
    """The files of both tables at one moment. The versions name the data set for good; -1 is a table not there yet."""

    root: str
    sequences_version: int
    rounds_version: int
    sequences_files: tuple[str, ...]  # absolute paths or s3:// URIs
    rounds_files: tuple[str, ...]
    sequences_columns: pa.Schema  # as registered then; a file may lack some of them
    rounds_columns: pa.Schema

    @property
    def name(self) -> str:
        """The identity of this data set within its store, such as "sequences@12+rounds@12"."""
        return f"sequences@{self.sequences_version}+rounds@{self.rounds_version}"


@dataclass(frozen=True)
class Compaction:
    """What `compact` did, over both tables."""

    num_files_before: int
    num_files_after: int
    num_purged_attempts: int  # attempts whose rounds were dropped because their sequences never came


def new_attempt() -> str:
    """A name for one try of one unit, unique over all runs: 12 hexadecimal digits."""
    return uuid.uuid4().hex[:12]


class TrajectoryStore:
    """A store at `root` (a local path, file:// or s3:// URI). Making one touches nothing; `begin` creates it."""

    def __init__(self, root: str | os.PathLike[str], schemas: Mapping[str, pa.Schema] = tables.TABLES) -> None:
        self.root = Place.parse(root)
        self._schemas = dict(schemas)
        uploads = Path(platformdirs.user_cache_dir("graft-dist")) / "uploads"
        self._aside = self.root.local / "_tmp" if self.root.is_local else uploads
        self._units: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())  # paths read; their unit ids

    @property
    def path(self) -> Path:
        """The folder of a local store."""
        return self.root.local

    # ------------------------------------------------------------------ writing

    def write_unit(
        self,
        key: UnitKey,
        provenance: Provenance,
        sequences: Sequence[SequenceRecord],
        rounds: Sequence[RoundRecord],
        written_at: datetime | None = None,
    ) -> list[FileInfo]:
        """Write one attempt of a unit; nothing is visible until the driver commits the result.

        Args:
            key: `attempt` must never have been used before (`new_attempt()`).
            sequences: every prompt of the unit once, failed ones included.
            rounds: all recorded rounds of these sequences; may be empty.
            written_at: with time zone; now by default. Its UTC day is the partition.

        Returns:
            The rounds file and the sequences file, complete under their final names.

        Raises:
            ValueError: for a unit that is not whole: no sequence, a sequence twice, a foreign round, a missing round.
        """
        _check_unit(key, provenance, sequences, rounds)
        written_at = (written_at or datetime.now(UTC)).astimezone(UTC)
        bodies = {
            "rounds": tables.rounds_table(key, rounds),
            "sequences": tables.sequences_table(key, provenance, sequences, written_at),
        }
        return self.write_tables(key, provenance.target, written_at.date(), bodies)

    def write_tables(self, key: UnitKey, target: str, day: date, bodies: Mapping[str, pa.Table]) -> list[FileInfo]:
        """As `write_unit`, of rows made elsewhere: both tables of a whole unit, in the columns of `schema`."""
        return [self._write_file(name, body, key, target, day.isoformat()) for name, body in bodies.items()]

    def _write_file(self, table: str, body: pa.Table, key: UnitKey, target: str, day: str) -> FileInfo:
        name = _file_name(key.unit_id, key.attempt)
        relative = f"target={target}/date={day}/{name}"
        aside, final = self._aside / f"{table}-{Path(name).stem}", self.root / table / relative
        if final.info() is not None:
            raise ValueError(f"attempt {key.attempt!r} of unit {key.unit_id!r} exists already: use a new name")
        about = {"schema_version": str(SCHEMA_VERSION), "unit_id": key.unit_id, "attempt": key.attempt}
        body = body.replace_schema_metadata({f"graft.{name}": value for name, value in about.items()})
        written = write_file(aside, final, body.schema, [body])
        return FileInfo(
            table=table,
            path=relative,
            size=written.size,
            rows=written.rows,
            sha256=written.sha256,
            unit_id=key.unit_id,
            attempt=key.attempt,
            target=target,
            date=day,
        )

    # --------------------------------------------------------------- committing

    def prepare(self) -> None:
        """Create or upgrade the tables. `begin` does so too; this is for finding out early whether it can be done.

        Raises:
            StoreError: if no store can be made or written here, or it was written by a newer version.
        """
        for table in self._schemas:
            self._create_or_upgrade(table)
        with _told_apart(f"writing to {self.root}"):
            self._aside.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._aside) as file:
                file.write(b"graft")
            if not self.root.is_local:
                with self.root.files.open_output_stream((self.root / "_tmp/probe").path) as probe:
                    probe.write(b"graft")

    def begin(self, run_id: str, target: str, dataset: Mapping[str, str]) -> int:
        """Prepare the store for a run's commits: create or upgrade its tables, and check that the run belongs here.

        Args:
            run_id: the same for every driver of the same run, so that a second one is fenced off; a name of letters,
                digits, '.', '_' and '-'.
            target: slug of the target.
            dataset: what must be equal for everything ever stored under this target, such as
                {"target_fingerprint": ..., "tokenizer_sha256": ...}. The first run under a target registers it.

        Returns:
            The first `seq` that this driver may commit with.

        Raises:
            StoreError: if the target's data has another identity, or the store was written by a newer version.
        """
        _check_name("run id", run_id)
        _check_name("target", target)
        self.prepare()
        self._register(target, dict(dataset))
        return 1 + max(self._log(table).transaction_version(run_id) or 0 for table in self._schemas)

    def commit(self, files: Iterable[FileInfo], run_id: str, seq: int) -> CommitResult:
        """Make units visible, all of these or none; units that are there already are skipped. Driver only.

        Args:
            files: the complete results of `write_unit` for any number of units.
            run_id: as given to `begin`.
            seq: larger than every one this run has committed with.

        Raises:
            StoreFencedError: if another driver of this run has committed with this `seq` or a later one.
            StoreError: if a file is missing, differs from its description, does not fit the table, or the log cannot
                be written; nothing is visible then, and the same files can be committed once that is mended.
        """
        units = _whole_units(files)
        log = self._log("sequences")
        self._check_fence(log, run_id, seq)
        known = self._units_in(log)
        wanted = {unit_id: unit for unit_id, unit in units.items() if unit_id not in known}
        self._check_files(wanted.values())
        fresh: list[FileInfo] = []
        if wanted:
            self._append("rounds", lambda _: [unit["rounds"] for unit in wanted.values()], run_id, seq)
            fresh = self._append("sequences", lambda log: self._not_in(log, wanted), run_id, seq)
        committed = {file.unit_id for file in fresh}
        return CommitResult(
            committed=tuple(unit_id for unit_id in units if unit_id in committed),
            skipped=tuple(unit_id for unit_id in units if unit_id not in committed),
        )

    def _not_in(self, log: DeltaTable, units: Mapping[str, Mapping[str, FileInfo]]) -> list[FileInfo]:
        known = self._units_in(log)
        return [unit["sequences"] for unit_id, unit in units.items() if unit_id not in known]

    def _append(
        self, table: str, choose: Callable[[DeltaTable], list[FileInfo]], run_id: str, seq: int
    ) -> list[FileInfo]:
        """Add files to one log, fenced; whatever another commit changes meanwhile is looked at again."""
        lost: CommitFailedError | None = None
        for _ in range(_MAX_COMMIT_TRIES):
            log = self._log(table)
            self._check_fence(log, run_id, seq)
            files = choose(log)
            if not files:
                return []
            turn = (log.transaction_version(_TURN) or 0) + 1
            try:
                log.create_write_transaction(
                    [_add_action(file) for file in files],
                    "append",
                    log.schema(),
                    partition_by=list(PARTITION_COLUMNS),
                    commit_properties=_commit_properties(files, run_id, seq, turn),
                )
            except CommitFailedError as error:
                lost = error
                continue
            except (DeltaError, OSError) as error:
                raise StoreError(f"{self.root / table} cannot be written: {_one_line(error)}.") from error
            return files
        raise StoreError(f"{self.root / table}: commit given up after {_MAX_COMMIT_TRIES} tries: {lost}") from lost

    def _check_fence(self, log: DeltaTable, run_id: str, seq: int) -> None:
        # The log itself refuses a transaction that races with ours, but takes an old version from a fresh snapshot.
        if (log.transaction_version(run_id) or 0) >= seq:
            raise StoreFencedError(
                f"another driver of run {run_id!r} has committed batch {seq} to {self.root}: this one must stop."
            )

    def _check_files(self, units: Iterable[Mapping[str, FileInfo]]) -> None:
        registered = {table: _arrow_schema(self._log(table)) for table in self._schemas}
        for unit in units:
            for file in unit.values():
                place = self.root / file.table / file.path
                info = place.info()
                if info is None:
                    raise StoreError(f"{place} is gone: unit {file.unit_id!r} has to be decoded again.")
                if info.size != file.size or sha256_of(place) != file.sha256:
                    raise StoreError(f"{place} is not the file that was written ({file.size} bytes): not committed.")
                footer = footer_of(place)
                if footer.num_rows != file.rows:
                    raise StoreError(f"{place} has {footer.num_rows} rows instead of {file.rows}: not committed.")
                tables.check_file_schema(footer.schema.to_arrow_schema(), registered[file.table], str(place))

    def _units_in(self, log: DeltaTable) -> frozenset[str]:
        """The unit ids of one version of `sequences`; kept, because a driver asks at every commit."""
        paths = frozenset(file.path for file in live_files(log))
        read, units = self._units
        if not read <= paths:  # files were merged or forgotten
            read, units = frozenset(), frozenset()
        new = [self.root / "sequences" / path for path in sorted(paths - read)]
        self._units = (paths, units | distinct_values(new, "unit_id"))
        return self._units[1]

    def _create_or_upgrade(self, table: str) -> None:
        full = pa.schema([*self._schemas[table], *PARTITION_FIELDS])
        if not self._is_table(table):
            self._create(table, full)
        log = self._log(table)
        version = int(log.metadata().configuration.get("graft.schemaVersion", "0"))
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.root} has schema version {version}, newer than {SCHEMA_VERSION}: update graft-dist."
            )
        known = set(_arrow_schema(log).names)
        missing = pa.schema([column for column in full if column.name not in known])
        with _told_apart(f"the upgrade of {self.root / table}"):
            if missing:
                log.alter.add_columns(DeltaSchema.from_arrow(missing).fields)
                log = self._log(table)
            if version < SCHEMA_VERSION:
                log.alter.set_table_properties({"graft.schemaVersion": str(SCHEMA_VERSION)}, raise_if_not_exists=False)

    def _create(self, table: str, schema: pa.Schema) -> None:
        try:
            DeltaTable.create(
                str(self.root / table),
                schema=schema,
                mode="ignore",
                partition_by=list(PARTITION_COLUMNS),
                configuration=_TABLE_PROPERTIES,
                raise_if_key_not_exists=False,
                storage_options=self.root.log_options,
            )
        except (DeltaError, OSError) as error:
            if not self._is_table(table):  # else another driver was faster
                raise StoreError(f"no trajectory store can be made at {self.root}: {_one_line(error)}.") from error

    def _register(self, target: str, dataset: dict[str, str]) -> None:
        key = f"graft.dataset.{target}"
        for _ in range(_MAX_COMMIT_TRIES):
            log = self._log("sequences")
            found = json.loads(log.metadata().configuration.get(key) or "null")
            if found is not None:
                break
            try:
                log.alter.set_table_properties({key: json.dumps(dataset, sort_keys=True)}, raise_if_not_exists=False)
            except CommitFailedError:
                continue
            except (DeltaError, OSError) as error:
                raise StoreError(f"{self.root} cannot be written: {_one_line(error)}.") from error
            return
        else:
            raise StoreError(f"{self.root} could not register target {target!r}: others committed first.")
        for name in sorted(found.keys() | dataset.keys()):
            if found.get(name) != dataset.get(name):
                raise StoreError(
                    f"{self.root} holds data of target {target!r} with {name} {found.get(name)}, this run has "
                    f"{dataset.get(name)}: use another store, they must not be mixed."
                )

    def _files(self, log: DeltaTable, table: str) -> list[Place]:
        return [self.root / table / file.path for file in live_files(log)]

    def _is_table(self, table: str) -> bool:
        try:
            return DeltaTable.is_deltatable(str(self.root / table), storage_options=self.root.log_options)
        except (DeltaError, OSError) as error:
            raise StoreError(f"{self.root} cannot be read: {_one_line(error)}.") from error

    def _open(self, table: str, version: int | None = None) -> DeltaTable | None:
        try:
            return DeltaTable(str(self.root / table), version=version, storage_options=self.root.log_options)
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as error:
            what = "cannot be read" if version is None else f"has no version {version}"
            raise StoreError(f"{self.root / table} {what}: {_one_line(error)}.") from error

    def _log(self, table: str, version: int | None = None) -> DeltaTable:
        log = self._open(table, version)
        if log is None:
            raise StoreError(f"there is no trajectory store at {self.root}: it has no table {table!r}.")
        return log

    # ------------------------------------------------------------------ reading

    @property
    def exists(self) -> bool:
        """True once `begin` has made both tables."""
        return all(self._is_table(table) for table in self._schemas)

    def snapshot(self, sequences_version: int | None = None, rounds_version: int | None = None) -> Snapshot:
        """The files that count now, or at the given versions of an earlier snapshot; empty when there is no store.

        Raises:
            StoreError: for a version that the log does not have.
        """
        # Sequences first: every sequence of this version has its rounds in any version of `rounds` read later.
        sequences = self._log_at("sequences", sequences_version)
        rounds = self._log_at("rounds", rounds_version)
        return Snapshot(
            root=str(self.root),
            sequences_version=-1 if sequences is None else sequences.version(),
            rounds_version=-1 if rounds is None else rounds.version(),
            sequences_files=self._names(sequences, "sequences"),
            rounds_files=self._names(rounds, "rounds"),
            sequences_columns=pa.schema([]) if sequences is None else _arrow_schema(sequences),
            rounds_columns=pa.schema([]) if rounds is None else _arrow_schema(rounds),
        )

    def _log_at(self, table: str, version: int | None) -> DeltaTable | None:
        if version == -1:
            return None
        return self._open(table) if version is None else self._log(table, version)

    def _names(self, log: DeltaTable | None, table: str) -> tuple[str, ...]:
        return () if log is None else tuple(str(file) for file in self._files(log, table))

    # --------------------------------------------------------------- upkeep

    def compact(self, orphan_age_hours: float = 24.0, target_size: int = 256 << 20) -> Compaction:
        """Merge small files, and drop rounds whose sequences never came. Safe while others read and commit.

        The replaced files stay for readers that still use them, until `vacuum`.

        Args:
            orphan_age_hours: rounds without sequences go when their file is at least this old; must be longer than any
                driver takes between its two commits.
            target_size: bytes that a merged file should have at most.

        Raises:
            StoreError: if another compaction is faster; run it again if need be.
        """
        with _told_apart(f"the compaction of {self.root}"):
            logs = {table: self._log(table) for table in self._schemas}
            before = sum(len(live_files(log)) for log in logs.values())
            young, old = self._orphans(logs["rounds"], orphan_age_hours)
            for table, log in logs.items():
                # Young orphans stay files of their own: their sequences may be on the way, and their age must stay
                # known.
                keep, drop = (young, old) if table == "rounds" else ([], [])
                compact_table(log, self.root / table, self._aside, keep=keep, drop=drop, target_size=target_size)
            after = sum(len(live_files(self._log(table))) for table in self._schemas)
            return Compaction(before, after, len(old))

    def _orphans(self, rounds: DeltaTable, age_hours: float) -> tuple[list[str], list[str]]:
        """The rounds files of attempts without sequences, (young, old); read the sequences' log after the rounds'."""
        committed = distinct_rows(self._files(self._log("sequences"), "sequences"), "unit_id", "attempt")
        known = {_file_name(unit_id, attempt) for unit_id, attempt in committed}
        newest = time.time() - 3600 * age_hours
        young: list[str] = []
        old: list[str] = []
        for file in live_files(rounds):
            place = self.root / "rounds" / file.path
            # Merged files hold no orphans: those were kept out.
            if place.name.startswith("unit-") and place.name not in known:
                info = place.info()
                (old if info is not None and info.mtime.timestamp() <= newest else young).append(file.path)
        return young, old

    def forget(self, *, before: date | None = None, target: str | None = None, run_id: str | None = None) -> int:
        """Delete what was written on days before `before` (of one target or all), or all rows of a run.

        The sequences go first: their rounds no longer count from then on, so a call that was cut off is simply made
        again. The files stay on disk until `vacuum`. A forgotten run that is started again decodes everything anew.

        Returns:
            How many files were concerned, over both tables.

        Raises:
            StoreError: other upkeep came first; run it again.
            ValueError: neither `before` nor `run_id` is given, or both.
        """
        if (before is None) == (run_id is None) or (target is not None and before is None):
            raise ValueError("give either before (and, if need be, target) or run_id")
        with _told_apart(f"the deletion from {self.root}"):
            num_files = 0
            for table in ("sequences", "rounds"):
                log, folder = self._log(table), self.root / table
                if before is not None:
                    num_files += forget_days(log, folder, before, target)
                else:
                    assert run_id is not None
                    num_files += forget_run(log, folder, self._aside, run_id)
            return num_files

    def pin(self, name: str, snapshot: Snapshot) -> None:
        """Keep the files of a snapshot from `vacuum` until `unpin`, or until `pins.PIN_DAYS` after the last `pin`.

        Raises:
            StoreError: the store cannot be written.
        """
        versions = {"sequences": snapshot.sequences_version, "rounds": snapshot.rounds_version}
        Pins(self.root).put(name, versions)

    def unpin(self, name: str) -> None:
        """Take a pin away, if there is one."""
        Pins(self.root).take_away(name)

    def vacuum(self, retention_hours: int = 24) -> list[str]:
        """Delete files that the log no longer names, or never did: of killed attempts, compacted ones, half-written.

        Files of pinned snapshots stay, however old they are. Of an object store, half-written files are those of this
        machine.

        Args:
            retention_hours: files younger than this stay. Must be longer than a unit's decoding, its wait for a commit,
                and the longest query; 0 is only for a store that nobody else has open.

        Returns:
            The deleted files, relative to the root.
        """
        with _told_apart(f"the vacuum of {self.root}"):
            deleted = []
            for table in self._schemas:
                gone = self._log(table).vacuum(
                    retention_hours=retention_hours,
                    dry_run=False,
                    enforce_retention_duration=False,
                    full=True,
                    keep_versions=Pins(self.root).versions(table) or None,
                )
                deleted += [f"{table}/{path}" for path in gone]
            oldest = time.time() - 3600 * retention_hours
            for path in sorted(self._aside.glob("*")):
                with contextlib.suppress(FileNotFoundError):  # its writer has just renamed it
                    if path.stat().st_mtime <= oldest:
                        path.unlink()
                        deleted.append(f"_tmp/{path.name}")
            return deleted

    def export(self, dest: str | os.PathLike[str]) -> Path:
        """Write what counts now as plain Parquet files under `dest`: see `export.export_tree`."""
        from storage.export import export_tree  # it reads through `query`, which reads through this module

        return export_tree(str(self.root), dest)


@contextlib.contextmanager
def _told_apart(what: str) -> Iterator[None]:
    """Losing a race with another writer's commit is no fault of the store's: nothing was changed, try again."""
    try:
        yield
    except CommitFailedError as error:
        raise StoreError(f"{what} met another commit and changed nothing: run it again ({error}).") from error
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise StoreError(f"{what} failed: {_one_line(error)}.") from error


def _one_line(error: Exception) -> str:
    """An error's text for people; the log's library colours its own and breaks it into steps."""
    return " ".join(_STEP.sub(": ", str(error)).split())


def _check_name(what: str, name: str) -> None:
    if not _SAFE_NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} must consist of letters, digits, '.', '_' and '-'")


def _check_unit(
    key: UnitKey, provenance: Provenance, sequences: Sequence[SequenceRecord], rounds: Sequence[RoundRecord]
) -> None:
    for what, name in (("unit id", key.unit_id), ("attempt", key.attempt), ("target", provenance.target)):
        _check_name(what, name)
    expected = {record.sequence_id: record for record in sequences}
    if not sequences or len(expected) != len(sequences):
        raise ValueError(f"unit {key.unit_id!r} has {len(sequences)} sequences with {len(expected)} different ids")
    decoded: dict[str, list[int]] = {}
    for record in rounds:
        if record.sequence_id not in expected:
            raise ValueError(f"unit {key.unit_id!r} has a round of {record.sequence_id!r}, not one of its sequences")
        if record.kind == "decoded":
            decoded.setdefault(record.sequence_id, []).append(record.round_index)
    for sequence_id, indices in decoded.items():
        num_rounds = expected[sequence_id].num_rounds
        if sorted(indices) != list(range(num_rounds)):
            raise ValueError(
                f"sequence {sequence_id!r} had {num_rounds} rounds, but these are recorded: {sorted(indices)}"
            )


def _whole_units(files: Iterable[FileInfo]) -> dict[str, dict[str, FileInfo]]:
    """{unit_id: {"rounds": file, "sequences": file}}; of several attempts at a unit, the first one given."""
    attempts: dict[tuple[str, str], dict[str, FileInfo]] = {}
    for file in files:
        attempts.setdefault((file.unit_id, file.attempt), {})[file.table] = file
    units: dict[str, dict[str, FileInfo]] = {}
    for (unit_id, attempt), pair in attempts.items():
        if pair.keys() != {"rounds", "sequences"}:
            raise ValueError(f"attempt {attempt!r} of unit {unit_id!r} has only {sorted(pair)}: commit both files")
        units.setdefault(unit_id, pair)
    return units


def _file_name(unit_id: str, attempt: str) -> str:
    return f"unit-{unit_id}-{attempt}.parquet"


def _add_action(file: FileInfo) -> AddAction:
    return AddAction(
        path=file.path,
        size=file.size,
        partition_values={"target": file.target, "date": file.date},
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=json.dumps({"numRecords": file.rows}),
    )


def _commit_properties(files: Sequence[FileInfo], run_id: str, seq: int, turn: int) -> CommitProperties:
    checksums = {file.path.rpartition("/")[2]: file.sha256 for file in files}
    return CommitProperties(
        custom_metadata={"graft": {"run_id": run_id, "seq": seq, "sha256": checksums}},
        app_transactions=[Transaction(run_id, seq), Transaction(_TURN, turn)],
    )


def _arrow_schema(log: DeltaTable) -> pa.Schema:
    return pa.schema(log.schema().to_arrow())
