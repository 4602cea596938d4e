"""`make quickstart`: the whole way once, in a few minutes, on this machine.

Starts a Ray head with its dashboard, submits the collect job on the starter prompts and follows its log, asks the store
a few questions, then answers one prompt live, plainly and with a draft tree per round. Ends everything it started, also
when it is interrupted. What it collects stays in `.quickstart/store`; a second run begins anew.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ray.job_submission import JobDetails, JobSubmissionClient

from graft_dist.config import TargetConfig, load_config
from graft_dist.errors import GraftError
from graft_dist.prompts import Prompt, starter_prompts_path
from jobs.ray_head import RayHead
from jobs.ray_jobs import job_client
from storage.query import query

REPOSITORY = Path(__file__).resolve().parents[1]
LIVE_PROMPT = Prompt(
    "live", "code", ("Write a Python function that returns the n-th Fibonacci number, and explain it.",)
)
_MOST_FAILED_POLLS = 40  # in a row, before a job is given up
_STOP_TIMEOUT_S = 15.0  # Ray kills a driver that has not ended after 3 s
QUESTIONS = (
    ("summary", "What was collected: MAT, mismatch rate, tokens per second of one engine"),
    ("acceptance", "How often the accepted path reaches a depth"),
    ("mismatch", "How often the wanted token was in the tree, but under another parent"),
    ("gain", "Mean acceptance length if the budget had been smaller"),
)


@dataclass(frozen=True, kw_only=True)
class QuickstartRequest:
    """What the quickstart shows; the defaults fit a machine with two cores."""

    config: Path
    prompts: Path
    store: Path
    num_actors: int
    num_slots: int
    budget: int
    max_new_tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the quickstart; returns the exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    logging.getLogger("ray").setLevel(logging.ERROR)  # it names every file that it does not upload
    started = time.monotonic()
    try:
        request = _request(argv)
        collect(request)
        ask(request.store)
        config = load_config(request.config)
        answer_live(config, config.budget, 2 * request.max_new_tokens)
    except GraftError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("quickstart: interrupted; everything it had started is stopped", file=sys.stderr)
        return 130
    _title(f"Done in {time.monotonic() - started:.0f} s. The store is {request.store}; ask it more:")
    print(f'  .venv/bin/graft query --store {request.store} "SELECT task, count(*) FROM sequences GROUP BY task"')
    return 0


def collect(request: QuickstartRequest) -> None:
    """Collect on a Ray head of its own. Raises `GraftError` unless the job says that everything was collected."""
    shutil.rmtree(request.store, ignore_errors=True)
    _title("Starting a Ray head on this machine")
    with RayHead() as head:
        print(f"dashboard: {head.dashboard_url}", flush=True)
        entrypoint = shlex.join(_collect_command(request))
        _title("Submitting the collect job")
        print(f"ray job submit --address {head.dashboard_url} --working-dir . -- {entrypoint}", flush=True)
        client = job_client(head.dashboard_url)
        # The bars of the built-in target's conversion, drawn by both actors, would bury the progress.
        runtime_env = {"working_dir": str(REPOSITORY), "env_vars": {"TQDM_DISABLE": "1"}}
        job = client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env)
        try:
            details = follow(client, job)
        except BaseException:
            _stop(client, job)
            raise
        if details.driver_exit_code != 0:
            raise GraftError(f"the collect job ended as {details.status} with exit code {details.driver_exit_code}")
        _title("Stopping the Ray head")


def _collect_command(request: QuickstartRequest) -> list[str]:
    return [
        sys.executable, "jobs/collect.py", "--config", str(request.config), "--prompts", str(request.prompts),
        "--out", str(request.store), "--actors", str(request.num_actors), "--slots", str(request.num_slots),
        "--method", "ddtree", "--budget", str(request.budget), "--max-new-tokens", str(request.max_new_tokens),
        "--unit-size", "10", "--progress-interval", "5",
    ]  # fmt: skip


def _write(text: str) -> None:
    print(text, end="", flush=True)


def follow(
    client: JobSubmissionClient,
    job: str,
    poll_s: float = 0.5,
    write: Callable[[str], None] = _write,
    timeout_s: float = math.inf,
) -> JobDetails:
    """Write a job's log as it grows until the job is over. Polls: a log stream may break off while the job goes on.

    Raises `GraftError` when the cluster does not answer for many polls in a row, and when the job takes longer than
    `timeout_s`: it is stopped then.
    """
    num_printed = num_failed = 0
    deadline = time.monotonic() + timeout_s
    while True:
        if time.monotonic() > deadline:
            with contextlib.suppress(OSError, RuntimeError):
                client.stop_job(job)
            raise GraftError(f"the job {job} is not over after {timeout_s:.0f} s and is stopped")
        try:
            details = client.get_job_info(job)
            log = client.get_job_logs(job)
        except (OSError, RuntimeError) as error:  # of a busy machine: what requests raises, and Ray for other answers
            num_failed += 1
            if num_failed >= _MOST_FAILED_POLLS:
                raise GraftError(f"the job {job} cannot be followed: {' '.join(str(error).split())[:300]}") from error
            time.sleep(poll_s)
            continue
        num_failed = 0
        write(log[num_printed:])
        num_printed = len(log)
        if details.status.is_terminal():
            return details
        time.sleep(poll_s)


def _stop(client: JobSubmissionClient, job: str) -> None:
    """End the job and wait for it: its driver has a session of its own, and would outlive the head by some seconds."""
    with contextlib.suppress(GraftError, OSError, RuntimeError):
        client.stop_job(job)
        follow(client, job, write=lambda _: None, timeout_s=_STOP_TIMEOUT_S)


def ask(store: Path) -> None:
    """Print the answers to a few of the named questions."""
    for name, question in QUESTIONS:
        _title(f"{question} (graft query --store {store} {name})")
        print(query(store, name), flush=True)


def answer_live(config: TargetConfig, budget: int, max_new_tokens: int) -> None:
    """Answer one prompt plainly and with a tree per round, in this process, and print the speed-up.

    Raises `GraftError` when the two texts differ in float32, where hardly anything excuses it.
    """
    # Here and not above: the models' libraries take seconds to import, and the job shall not wait for them.
    from graft_dist.decoder import load_decoder, new_engine
    from graft_dist.generate import Answer, Request, answer_all, to_request
    from graft_dist.policy import ddtree, plain
    from graft_dist.sampling import SamplingParams
    from jobs.generate_command import describe

    def print_text(request: Request, text: str) -> None:
        _write(text)

    target, drafter = load_decoder(config)
    request = to_request(LIVE_PROMPT, target.tokenizer, config)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    policies = {"plain decoding": plain(), f"draft trees of {budget} nodes": ddtree(budget, config.num_candidates)}
    answers: list[Answer] = []
    for name, policy in policies.items():
        used = None if policy.name == "plain" else drafter
        engine = new_engine(config, target, used, policy, max_slots=1, max_budget=budget)
        # The first rounds compile the tree builder and touch new memory: neither belongs into the comparison.
        list(answer_all(engine, [request], SamplingParams(max_new_tokens=8)))
        _title(f"{LIVE_PROMPT.turns[0]}  [{name}]")
        answers += answer_all(engine, [request], params, on_text=print_text)
        print(f"\n[{describe(answers[-1])}]", flush=True)
    slow, fast = answers
    differs = slow.token_ids != fast.token_ids
    if differs and target.dtype_name == "float32":
        raise GraftError(
            "the texts of plain decoding and of draft trees differ in float32, which only two tokens that are equally "
            "likely excuse: run `graft audit` with this configuration to find out at which token, and why"
        )
    same = f"texts differ in {target.dtype_name}: see `graft audit`" if differs else "the same text"
    print(f"\nspeed-up by draft trees: {slow.decode_s / fast.decode_s:.2f} times, {same}", flush=True)


def _title(text: str) -> None:
    print(f"\n--- {text}", flush=True)


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # as an exception, so that the head is stopped on the way out


def _request(argv: Sequence[str] | None) -> QuickstartRequest:
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__)
    parser.add_argument("--config", type=Path, default=REPOSITORY / "targets" / "smollm2-135m.yaml")
    parser.add_argument("--prompts", type=Path, default=starter_prompts_path())
    parser.add_argument("--store", type=Path, default=REPOSITORY / ".quickstart" / "store")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--budget", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    options = parser.parse_args(argv)
    return QuickstartRequest(
        config=options.config.resolve(),
        prompts=options.prompts.resolve(),
        store=options.store.resolve(),
        num_actors=options.actors,
        num_slots=options.slots,
        budget=options.budget,
        max_new_tokens=options.max_new_tokens,
    )


if __name__ == "__main__":
    sys.exit(main())
