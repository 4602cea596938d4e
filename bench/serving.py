"""The measurement of serving, whole: a server on this machine, load by method and number of users, and a soak.

    python bench/serving.py OUT [--config smollm2-135m] [--policy builtin:smollm2-135m] [--minutes 30] [--blocks 6]
                            [--rates 0.1,0.3]

Starts `graft serve` with a learned policy (default: the one that ships with the target's drafter, if one does) and
leaves in OUT:

    load/      `graft bench-serve` at 1, 4 and 16 users, arms taking turns: plain, ddtree (the configuration's budget)
               and graft, the learned policy
    open/      the same arms under Poisson arrivals, `--rates` requests per second; `--rates ""` leaves it out
    soak/      `graft bench-serve --soak` with 8 users: clients leave, answers are compared with plain decoding's, and
               the policies `none` (a measured budget) and the learned one are swapped each minute
    serve.log  what the server said

`--policy none` does without: the third arm is then default, budgets that pay under the measured cost, and the soak's
second policy is CaDDTree's rule, in OUT/caddtree: the drafter's own probabilities against the measured cost.

In the end it says of each claim whether the rows bear it out: under every closed load the interval of graft's
throughput over plain decoding's reaches 1, with one user the ratio is at least 1.5, and in float32 no answer differs.

The machine must do nothing else. Exit code 1 if a command has, or a claim is not borne out. `--minutes 0` leaves the
soak out. Ctrl-C and SIGTERM end what runs, which writes what it has, and the server.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

if __name__ == "__main__":  # run as a file: the folder on the path is bench/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from graft_dist.budget import AcceptanceGain
from graft_dist.config import TargetConfig, load_config
from graft_dist.decoder import load_decoder
from graft_dist.policy import DataIdentity, GraftPolicy
from graft_dist.prompts import starter_prompts_path
from graft_dist.software import describe_software
from graft_dist.target import fastest_dtype
from jobs.ray_head import free_ports
from jobs.serve_command import default_policy

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 900.0
GRAFT = [sys.executable, "-m", "jobs.cli"]
METHODS = ("plain", "ddtree", "graft")
OPEN_REQUESTS = 6  # of a block of Poisson arrivals, which lasts about so many over the rate, once for each arm
LEAST_RATIO = 1.5  # of one user's throughput over plain decoding's


@dataclass(frozen=True)
class Claim:
    """Something that the measurement shall show."""

    text: str  # with the figures found
    holds: bool


def judge(summary: Sequence[Mapping[str, Any]], arm: str, is_float32: bool) -> list[Claim]:
    """What the entries of a `summary.json` say of an arm: one claim or more for each closed load."""
    claims = []
    for row in summary:
        if row["arm"] != arm or not row["load"].startswith("closed-"):
            continue
        ratio, low, high = row["throughput_ratio"], row["throughput_low"], row["throughput_high"]
        if high is None:
            claims.append(Claim(f"{row['load']}: {arm} is not slower than plain: too few blocks to tell", False))
        else:
            figures = f"ratio {ratio:.3f}, interval {low:.3f} to {high:.3f}"
            claims.append(Claim(f"{row['load']}: {arm} is not shown to be slower than plain: {figures}", high >= 1.0))
        if row["load"] == "closed-1":
            holds = ratio is not None and ratio >= LEAST_RATIO
            figure = "unknown" if ratio is None else f"{ratio:.3f}"
            claims.append(Claim(f"{row['load']}: {arm} is at least {LEAST_RATIO} times plain: {figure}", holds))
        if is_float32:
            number = row["differs_from_plain"]
            claims.append(Claim(f"{row['load']}: {arm} answers as plain does: {number} differ", number == 0))
    return claims or [Claim(f"no closed load of {arm} was measured", False)]


def decodes_in_float32(config: TargetConfig) -> bool:
    """Whether a server on this machine does."""
    if config.dtype != "auto":
        return config.dtype == "float32"
    is_cuda = config.device != "cpu" and torch.cuda.is_available()
    return fastest_dtype(torch.device("cuda" if is_cuda else "cpu")) == "float32"


def report(load: Path, arm: str, is_float32: bool) -> bool:
    """Print a line for each claim; whether all hold."""
    file = load / "summary.json"
    if not file.is_file():
        print(f"not shown: {file} is not there")
        return False
    claims = judge(json.loads(file.read_text(encoding="utf-8")), arm, is_float32)
    for claim in claims:
        print(f"{'shown' if claim.holds else 'not shown'}: {claim.text}")
    return all(claim.holds for claim in claims)


def save_caddtree(config: TargetConfig, folder: Path) -> None:
    """CaDDTree's rule for the target; no costs are known, so that the server's measured ones stand in."""
    target, drafter = load_decoder(config)
    assert drafter is not None
    GraftPolicy(
        slug=config.slug,
        target_fingerprint=target.fingerprint,
        drafter_fingerprint=drafter.fingerprint,
        software=describe_software(),
        tdes=None,
        kind="marginal",
        gain=AcceptanceGain(),
        num_candidates=config.num_candidates,
        max_budget=max(config.budgets),
        data=DataIdentity("none", (), 0, 0, 0, 0, 0),
    ).save(folder)


class Server:
    """`graft serve` while the context lasts; `dashboard` is its Ray's address."""

    def __init__(self, config: str, policy: str, port: int, log: Path) -> None:
        self._log = log
        self._command = [*GRAFT, "serve", "--config", config, "--policy", policy, "--port", str(port)]
        self._command += ["--methods", ",".join(METHODS), "--address", "local"]
        self.dashboard = ""

    def __enter__(self) -> Server:
        with self._log.open("w", encoding="utf-8") as file:
            self._process = start(self._command, stdout=file, stderr=subprocess.STDOUT)
        try:
            self.dashboard = self._wait_until_it_serves()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        end(self._process)

    def _wait_until_it_serves(self) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            found = re.search(r"^Ray dashboard: (\S+)$", self._log.read_text(encoding="utf-8"), re.MULTILINE)
            if found is not None:
                return found[1]
            time.sleep(0.5)
        raise SystemExit(f"the server did not start:\n{self._log.read_text(encoding='utf-8')}")


def start(command: Sequence[str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start a command that no Ctrl-C reaches but through `end`: what is measured shall not lose its server first."""
    return subprocess.Popen(command, cwd=ROOT, process_group=0, **streams)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a command to end, as Ctrl-C does, and wait: it may have to write what it has."""
    process.send_signal(signal.SIGINT)
    process.wait()


def run(command: Sequence[str]) -> int:
    """Run a command to its end, or until we are interrupted."""
    process = start(command)
    try:
        return process.wait()
    except BaseException:
        end(process)
        raise


def stop(number: int, frame: FrameType | None) -> None:
    """Handle a signal: end, by way of everything that runs."""
    sys.exit(128 + number)


def arguments(words: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", default="smollm2-135m")
    parser.add_argument("--policy", help="a folder, builtin:NAME or none (default: what `graft serve` has by itself)")
    parser.add_argument("--prompts", type=Path, default=starter_prompts_path())
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--rates", default="0.1,0.3", help="Poisson arrivals: requests per second; empty for none")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--soak-users", type=int, default=8)
    chosen = parser.parse_args(words)
    if chosen.out.exists():
        parser.error(f"{chosen.out} is there already: give a new folder")
    return chosen


def main(words: Sequence[str] | None = None) -> int:
    chosen = arguments(words)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)  # SIGINT too: a shell has its background jobs, and whom they start, ignore it
    config, out = load_config(chosen.config), chosen.out.resolve()
    file = Path(chosen.config).expanduser()
    spec = str(file.resolve()) if file.is_file() else chosen.config  # the commands run in another folder
    policy = chosen.policy or default_policy(config)
    if policy != "none" and not policy.startswith("builtin:"):
        policy = str(Path(policy).resolve())
    out.mkdir(parents=True)
    if policy == "none":
        arm, learned = "default", str(out / "caddtree")
        save_caddtree(config, out / "caddtree")
    else:
        arm, learned = "graft", policy
    (port,) = free_ports(1)
    with Server(spec, policy, port, out / "serve.log") as server:
        url = f"http://127.0.0.1:{port}"
        asking = [*GRAFT, "bench-serve", "--prompts", str(chosen.prompts.resolve()), "--url", url]
        asking += ["--max-new-tokens", str(chosen.max_new_tokens)]
        load = ["--arms", f"plain,ddtree,{arm}", "--blocks", str(chosen.blocks)]
        codes = [run([*asking, *load, "--concurrency", chosen.concurrency, "--out", str(out / "load")])]
        if chosen.rates:
            load += ["--concurrency", "", "--rates", chosen.rates, "--block-requests", str(OPEN_REQUESTS)]
            codes.append(run([*asking, *load, "--out", str(out / "open")]))
        if chosen.minutes > 0:
            soak = ["--soak", str(chosen.minutes), "--concurrency", str(chosen.soak_users), "--config", spec]
            soak += ["--policies", f"none,{learned}", "--dashboard", server.dashboard]
            codes.append(run([*asking, *soak, "--out", str(out / "soak")]))
    is_shown = report(out / "load", arm, decodes_in_float32(config))
    return 0 if is_shown and not any(codes) else 1


if __name__ == "__main__":
    sys.exit(main())
