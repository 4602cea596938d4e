"""The measurement of serving, whole: a server on this machine, load by method and number of users, and a soak.

    python bench/serving.py OUT [--config smollm2-135m] [--policy builtin:smollm2-135m] [--minutes 30] [--blocks 6]

Starts `graft serve` with a learned policy (default: the one that ships with the target's drafter, if one does) and
leaves in OUT:

    load/      `graft bench-serve` at 1, 4 and 16 users, arms taking turns: plain, ddtree (the configuration's budget)
               and graft, the learned policy
    soak/      `graft bench-serve --soak` with 8 users: clients leave, answers are compared with plain decoding's, and
               the policies `none` (a measured budget) and the learned one are swapped each minute
    serve.log  what the server said

`--policy none` does without: the third arm is then default, budgets that pay under the measured cost, and the soak's
second policy is CaDDTree's rule, in OUT/caddtree: the drafter's own probabilities against the measured cost.

The machine must do nothing else. Exit code 1 if one of the two has. `--minutes 0` leaves the soak out. Ctrl-C and
SIGTERM end both, which write what they have, and the server.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":  # run as a file: the folder on the path is bench/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from graft_dist.budget import AcceptanceGain
from graft_dist.config import TargetConfig, load_config
from graft_dist.decoder import load_decoder
from graft_dist.policy import DataIdentity, GraftPolicy
from graft_dist.prompts import starter_prompts_path
from graft_dist.software import describe_software
from jobs.ray_head import free_ports
from jobs.serve_command import default_policy

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 900.0
GRAFT = [sys.executable, "-m", "jobs.cli"]
METHODS = ("plain", "ddtree", "graft")


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
        self._command += ["--methods", ",".join(METHODS)]
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
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--soak-users", type=int, default=8)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    chosen = arguments(words)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)  # SIGINT too: a shell has its background jobs, and whom they start, ignore it
    config, out = load_config(chosen.config), chosen.out.resolve()
    policy = chosen.policy or default_policy(config)
    if policy != "none" and not policy.startswith("builtin:"):
        policy = str(Path(policy).resolve())
    out.mkdir(parents=True)
    if policy == "none":
        arms, learned = "plain,ddtree,default", str(out / "caddtree")
        save_caddtree(config, out / "caddtree")
    else:
        arms, learned = "plain,ddtree,graft", policy
    (port,) = free_ports(1)
    with Server(chosen.config, policy, port, out / "serve.log") as server:
        asking = [
            *GRAFT,
            "bench-serve",
            "--prompts",
            str(chosen.prompts.resolve()),
            "--url",
            f"http://127.0.0.1:{port}",
        ]
        asking += ["--max-new-tokens", str(chosen.max_new_tokens)]
        load = ["--arms", arms, "--concurrency", chosen.concurrency, "--blocks", str(chosen.blocks)]
        codes = [run([*asking, *load, "--out", str(out / "load")])]
        if chosen.minutes > 0:
            soak = ["--soak", str(chosen.minutes), "--concurrency", str(chosen.soak_users), "--config", chosen.config]
            soak += ["--policies", f"none,{learned}", "--dashboard", server.dashboard]
            codes.append(run([*asking, *soak, "--out", str(out / "soak")]))
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
