"""The measurement of serving, whole: a server on this machine, load by method and number of users, and a soak.

    python bench/serving.py OUT [--config smollm2-135m] [--minutes 30] [--blocks 6] [--max-new-tokens 128]

Starts `graft serve` without a learned policy and leaves in OUT:

    load/      `graft bench-serve` at 1, 4 and 16 users, arms taking turns: plain, ddtree (the configuration's budget),
               and default (what the server does when it is not asked: budgets that pay under the measured cost)
    soak/      `graft bench-serve --soak` with 8 users: clients leave, answers are compared with plain decoding's, and
               the policies `none` and CaDDTree's rule are swapped each minute
    caddtree/  CaDDTree's rule as a saved policy: the drafter's own probabilities against the measured cost
    serve.log  what the server said

The machine must do nothing else. Exit code 1 if one of the two has. `--minutes 0` leaves the soak out.
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

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 900.0
GRAFT = [sys.executable, "-m", "jobs.cli"]


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

    def __init__(self, config: str, port: int, log: Path) -> None:
        self._log = log
        command = [*GRAFT, "serve", "--config", config, "--port", str(port), "--methods", "plain,ddtree"]
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        self.dashboard = ""

    def __enter__(self) -> Server:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.dashboard:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise SystemExit(f"the server did not start:\n{self._log.read_text(encoding='utf-8')}")
            time.sleep(0.5)
            found = re.search(r"^Ray dashboard: (\S+)$", self._log.read_text(encoding="utf-8"), re.MULTILINE)
            self.dashboard = found[1] if found else ""
        return self

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait()


def arguments(words: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, default=starter_prompts_path())
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--soak-users", type=int, default=8)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    chosen = arguments(words)
    out = chosen.out.resolve()
    out.mkdir(parents=True)
    save_caddtree(load_config(chosen.config), out / "caddtree")
    (port,) = free_ports(1)
    with Server(chosen.config, port, out / "serve.log") as server:
        asking = [
            *GRAFT,
            "bench-serve",
            "--prompts",
            str(chosen.prompts.resolve()),
            "--url",
            f"http://127.0.0.1:{port}",
        ]
        asking += ["--max-new-tokens", str(chosen.max_new_tokens)]
        load = ["--arms", "plain,ddtree,default", "--concurrency", chosen.concurrency, "--blocks", str(chosen.blocks)]
        codes = [subprocess.call([*asking, *load, "--out", str(out / "load")], cwd=ROOT)]
        if chosen.minutes > 0:
            soak = ["--soak", str(chosen.minutes), "--concurrency", str(chosen.soak_users), "--config", chosen.config]
            soak += ["--policies", f"none,{out / 'caddtree'}", "--dashboard", server.dashboard]
            codes.append(subprocess.call([*asking, *soak, "--out", str(out / "soak")], cwd=ROOT))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
