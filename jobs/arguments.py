"""What the jobs' command lines share: a parser, values whose mistakes are said in a plain sentence, how a job ends."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from graft_dist.errors import ConfigError, GraftError
from jobs.cluster import job_id

Value = TypeVar("Value")


def job_parser(prog: str, description: str | None, *, needs_prompts: bool = True) -> argparse.ArgumentParser:
    """A parser with the options that every job has; `--prompts` for those that decode."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="the target's YAML file, or the name of a shipped one")
    if needs_prompts:
        add("--prompts", required=True, nargs="+", metavar="FILE", help="JSONL files of prompts")
    add("--address", help='of the Ray cluster (default: RAY_ADDRESS, else one that runs here); "local" starts one')
    return parser


def run_job(name: str, again: str, work: Callable[[], int]) -> int:
    """Do a job's work and return the exit code: its own, 2 where it cannot work, 130 when it was interrupted.

    `again` tells whoever interrupts the job what the same command does next.
    """
    try:
        return work()
    except GraftError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: stopped; the same command {again}", file=sys.stderr, flush=True)
        return 130


def check_place(name: str, place: str) -> None:
    """Raise `ConfigError` where a submitted job is given a path, as `name`, that depends on the working directory."""
    if job_id() is not None and "://" not in place and not os.path.isabs(place):
        raise ConfigError(
            f"{name} {place} is relative, but a submitted job runs in a copy of the working directory that is deleted; "
            "give an absolute path that all nodes see"
        )


def check_folder(name: str, place: str) -> None:
    """As `check_place`, for what has to be a folder that is mounted."""
    if "://" in place:
        raise ConfigError(f"{name} {place} is a URI: give a folder that all nodes see")
    check_place(name, place)


def whole_number(text: str) -> int:
    """Any whole number, such as -3."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def count(text: str) -> int:
    """A whole number from 1 on."""
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def positive(text: str) -> float:
    """A finite number above 0."""
    number = from_zero(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def from_zero(text: str) -> float:
    """A finite number from 0 on."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= number < math.inf:  # also for NaN
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def list_of(kind: Callable[[str], Value], what: str) -> Callable[[str], tuple[Value, ...]]:
    """Values with commas between them; `what` is how the error names them, such as "budgets such as 0,4,8"."""

    def read(text: str) -> tuple[Value, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {what}") from None

    return read
