"""Steps of a long run, each done once: a run that was killed goes on at the step it was killed in.

A finished step leaves a record, `<number>-<name>.json` in the run's folder, written aside and renamed into place. A
step that is recorded is skipped and its recorded result used, so a step must be a function of the results before it and
of what it finds on disk, and may be started again after it was killed anywhere inside.

What a step raises says what becomes of the run: a `GraftError` means that it cannot succeed; anything else, a full disk
or a signal say, that the next start goes on there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft_dist.errors import GraftError
from jobs.out_file import write_aside

Results = Mapping[str, Any]
"""What the steps so far have found, by their names."""


class StepFailedError(GraftError):
    """A step cannot succeed; names the step."""


class StepBrokenOffError(Exception):
    """A step did not come to its end, and the next start goes on there; names the step."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Stopped(Exception):
    """What a step raises that was stopped from outside: why, and the job's exit code."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Ends:
    """What a step returns to end the run early, with the reason for people."""

    outcome: str
    reason: str


@dataclass(frozen=True)
class Step:
    """One step. `action` gets the earlier results and returns its own, as JSON has it, or `Ends`."""

    name: str
    action: Callable[[Results], Any]


def run_steps(
    folder: Path, steps: Sequence[Step], *, check: Callable[[], None], say: Callable[[str], None]
) -> Results | Ends:
    """Run the steps that have no record yet, in order; return all results, or what a step ended the run with.

    `check` is called before each step and before each record; it raises when this run must not go on.

    Raises:
        StepFailedError: a step raised a `GraftError`; the records before it stay.
        StepBrokenOffError: it raised anything else, its record could not be written, or a signal came.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for number, step in enumerate(steps, start=1):
        path = folder / f"{number}-{step.name}.json"
        record = _read(path, step.name)
        if record is None:
            with _named(step.name):
                check()
                say(f"step {number} of {len(steps)}: {step.name}")
                record = _do(step, results)
                check()
                _write(path, record)
        else:
            say(f"step {number} of {len(steps)}: {step.name} is done already")
        if "ends" in record:
            return Ends(**record["ends"])
        results[step.name] = record["result"]
    return results


@contextmanager
def _named(step: str) -> Iterator[None]:
    """Say of what breaks a step off in which step it did."""
    try:
        yield
    except GraftError:
        raise
    except Stopped as stopped:
        raise StepBrokenOffError(f"stopped at step {step}: {stopped}", stopped.exit_code) from stopped
    except KeyboardInterrupt as error:
        raise StepBrokenOffError(f"stopped at step {step}: it was interrupted", 130) from error
    except SystemExit as error:  # how SIGTERM arrives
        code = error.code if isinstance(error.code, int) else 1
        raise StepBrokenOffError(f"stopped at step {step}: it was told to end", code) from error
    except Exception as error:
        raise StepBrokenOffError(f"failed at step {step}: {one_line(error)}", 1) from error


def one_line(error: Exception) -> str:
    """An error that nobody foresaw, for the end of a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _do(step: Step, results: Results) -> dict[str, Any]:
    started = time.time()
    try:
        result = step.action(results)
    except GraftError as error:
        raise StepFailedError(f"failed at step {step.name}: {error}") from error
    record: dict[str, Any] = {"step": step.name, "started_at": started, "finished_at": time.time()}
    if isinstance(result, Ends):
        return {**record, "ends": {"outcome": result.outcome, "reason": result.reason}}
    return {**record, "result": result}


def _read(path: Path, name: str) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise GraftError(f"{path} is not a step's record ({error}): remove it to repeat the step") from error
    if not isinstance(record, dict) or record.get("step") != name or not {"result", "ends"} & record.keys():
        raise GraftError(f"{path} is not the record of a step {name!r}: choose another run id")
    return record


def _write(path: Path, record: Mapping[str, Any]) -> None:
    write_aside(path, json.dumps(record, indent=1, sort_keys=True) + "\n")
