r"""Turn the folder of a learning run into the policy that ships with the package: its files, its card, the card's rows.

    python jobs/ship_policy.py --run DIR --to graft_dist/data/policies/TARGET --rows bench/policy --about FILE

FILE holds what only people know, as Markdown: where the prompts came from and how their rounds were collected.
Exit codes: 0 shipped; 2 the run is not whole, or its policy is not for shipping, in one sentence.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: the folder on the path is jobs/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from graft_dist.errors import ConfigError, GraftError
from graft_dist.policy_file import TENSORS_NAME
from jobs.out_file import write_aside
from jobs.policy_card import LearnedRun, policy_card

MOST_BYTES = 1_000_000
"""Of weights: they are part of every installation."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, ship, and return the exit code."""
    options = _parser().parse_args(argv)
    try:
        run = LearnedRun.read(options.run)
        ship(run, options.to, options.rows, _read(options.about))
    except GraftError as error:
        print(f"ship_policy: {error}", file=sys.stderr, flush=True)
        return 2
    print(f"policy {run.policy.fingerprint} is in {options.to}; bench/verify.py checks the figures of its README.md")
    return 0


def ship(run: LearnedRun, to: Path, rows: Path, about: str) -> None:
    """Write the policy with its card to `to`, and the card's rows to the folder `rows`. Raises `GraftError`."""
    policy, weights = run.policy, to / TENSORS_NAME
    if to.name != policy.slug:
        raise ConfigError(f"--to is {to}, but the policy of {policy.slug} is looked for in a folder of that name")
    num_bytes = 0 if policy.tdes is None else 4 * sum(each.numel() for each in policy.tdes.parameters())
    if num_bytes > MOST_BYTES:
        raise ConfigError(
            f"the edge scorer's weights take {num_bytes:,} bytes, and at most {MOST_BYTES:,} may ship: train with a "
            "smaller --width or --gate-rank"
        )
    try:
        rows.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--rows is {rows}, but that folder cannot be made ({error.strerror})") from error
    policy.save(to)
    file = rows / "rows.jsonl"
    write_aside(file, "".join(json.dumps(row) + "\n" for row in run.rows()))
    size = weights.stat().st_size if weights.exists() else 0
    write_aside(to / "README.md", policy_card(run, size, file.as_posix(), about))


def _read(about: Path) -> str:
    try:
        return about.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--about is {about}, which cannot be read ({error})") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ship_policy.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--run", type=Path, required=True, metavar="DIR", help="folder of a learning run that has ended")
    add("--to", type=Path, required=True, metavar="DIR", help="where the policy goes, named like the target")
    add("--rows", type=Path, required=True, metavar="DIR", help="folder of the card's rows, from the repository's root")
    add(
        "--about",
        type=Path,
        required=True,
        metavar="FILE",
        help="Markdown on the prompts and how rounds were collected",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
