r"""Give a drafter its draft vocabulary: the tokens that stored answers are made of, most frequent first.

    python jobs/draft_vocabulary.py --config smollm2-135m --store DIR --size 16384 --to DRAFTER_FOLDER

Counts the prompts' and the answers' tokens of a trajectory store. Where the store has fewer distinct tokens than are
wanted, the lowest ids that are missing fill up: byte-pair encodings number the merges of frequent pieces first.
Writes `draft_vocabulary.json` beside the checkpoint's weights, where every command finds it. With another vocabulary
the drafter has another fingerprint: a policy that was learned before is refused and has to be learned again.
Exit codes: 0 written; 2 the arguments, the store or the checkpoint cannot work, in one sentence.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # run as a file: the folder on the path is jobs/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from graft_dist.config import load_config
from graft_dist.draft_head import FILE_NAME
from graft_dist.drafter import read_config
from graft_dist.errors import ConfigError, GraftError, StoreError
from jobs.arguments import count
from jobs.out_file import write_aside
from storage.query import connect
from storage.trajectories import TrajectoryStore

COUNTS = """
    SELECT token, count(*) AS times
    FROM (SELECT unnest(prompt_token_ids || output_token_ids) AS token FROM sequences
          WHERE target = ? AND error IS NULL)
    GROUP BY token ORDER BY times DESC, token
"""


@dataclass(frozen=True)
class DraftVocabulary:
    """What was chosen, and how much of what was counted it holds."""

    token_ids: list[int]  # rising
    coverage: float  # of the tokens counted, the share that is in it
    num_distinct: int  # tokens that were counted at least once


def choose_tokens(counts: Sequence[tuple[int, int]], size: int, vocab_size: int) -> DraftVocabulary:
    """Take the first `size` of (token, times), most frequent first, and fill up with the lowest ids."""
    chosen = {token for token, _ in counts[:size]}
    covered = sum(times for _, times in counts[:size])
    for token in range(vocab_size):
        if len(chosen) == size:
            break
        chosen.add(token)
    total = sum(times for _, times in counts)
    return DraftVocabulary(sorted(chosen), covered / total, len(counts))


def count_tokens(store: str, slug: str) -> list[tuple[int, int]]:
    """Tokens of a target's stored sequences with how often each comes, most frequent first. Raises `StoreError`."""
    if not TrajectoryStore(store).exists:
        raise StoreError(f"there is no trajectory store at {store}: a collect job creates one when it starts")
    with closing(connect(store)) as connection:
        counts: list[tuple[int, int]] = connection.execute(COUNTS, [slug]).fetchall()
    if not counts:
        raise StoreError(f"the store at {store} has no finished sequence of the target {slug}")
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, count, write, and return the exit code."""
    options = _parser().parse_args(argv)
    try:
        config = load_config(options.config)
        vocab_size = read_config(options.to).vocab_size
        if options.size > vocab_size:
            raise ConfigError(f"--size is {options.size}, the drafter's vocabulary is {vocab_size}")
        vocabulary = choose_tokens(count_tokens(options.store, config.slug), options.size, vocab_size)
        write_aside(options.to / FILE_NAME, json.dumps(vocabulary.token_ids, separators=(",", ":")) + "\n")
    except GraftError as error:
        print(f"draft_vocabulary: {error}", file=sys.stderr, flush=True)
        return 2
    except OSError as error:
        print(f"draft_vocabulary: --to is {options.to}: nothing can be written there ({error})", file=sys.stderr)
        return 2
    print(
        f"{len(vocabulary.token_ids):,} of {vocab_size:,} tokens are in {options.to / FILE_NAME}: "
        f"{100 * vocabulary.coverage:.2f} % of those that were counted, {vocabulary.num_distinct:,} distinct ones"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="draft_vocabulary.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="the target's YAML file, or the name of a shipped one")
    add("--store", required=True, metavar="DIR", help="trajectory store of the target's answers")
    add("--size", type=count, required=True, metavar="N", help="tokens that the drafter may propose")
    add("--to", type=Path, required=True, metavar="DIR", help="the drafter's checkpoint folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
