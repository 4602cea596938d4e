"""`graft bench-serve`: load a running server as users would, arms taking turns block by block, and keep every row.

run.json      what was run: settings, server, machine, versions, commit, command
raw.jsonl     one row per request, written block by block
gaps.jsonl    beside each row the gaps between the pieces of the answer
summary.json  computed from the rows at the end, as is the table in summary.md
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graft_dist.bench import BASELINE
from graft_dist.errors import GraftError, PolicyError
from graft_dist.prompts import BadPrompt, Prompt
from jobs.load_client import Ask, LoadClient, Outcome, Reply
from jobs.load_report import (
    GapRow,
    LoadRow,
    LoadSummary,
    ServiceLevel,
    render_markdown,
    summarise,
    to_lines,
    to_row,
)
from jobs.load_schedule import Block, Load, blocks, turns
from jobs.out_file import to_json, write_aside
from jobs.provenance import provenance

DEFAULT_ARM = "default"
ARMS = (BASELINE, "ddtree", "graft", DEFAULT_ARM)
"""What a request may ask a server for, and what the server does when it is not asked."""


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What is measured."""

    loads: Sequence[Load]
    arms: Sequence[str]
    num_blocks: int
    block_requests: int | None  # None: `Load.default_block`
    max_new_tokens: int
    temperature: float
    seed: int
    level: ServiceLevel


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where requests go."""

    url: str
    model: str | None  # None: the only one the server has
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0

    def client(self) -> LoadClient:
        return LoadClient(self.url, self.api_key, self.timeout_s)


def run_serve_bench(server: Server, plan: LoadPlan, prompts: Sequence[Prompt | BadPrompt], out: Path) -> int:
    """Measure; returns the exit code: 0, or 1 if some request was not answered.

    Raises `GraftError` when the server is not there or does not take what the plan asks of it.
    """
    good = usable(prompts)
    check_folder(out)
    return asyncio.run(_measure(server, plan, good, out))


async def _measure(server: Server, plan: LoadPlan, prompts: Sequence[Prompt], out: Path) -> int:
    async with server.client() as client:
        model = await find_model(client, server.model)
        bench = _Bench(client, model, plan, out)
        await bench.check_arms(prompts[0])
        about = {"settings": _settings(plan, server, model, prompts), "server": await about_server(client)}
        start_folder(out, about)
        try:
            for load in plan.loads:
                await bench.run_load(load, prompts)
        finally:
            summary = bench.finish()
    print(render_overall(summary))
    print(f"rows, summary and table: {out}", file=sys.stderr)
    return bench.report_problems()


class _Bench:
    """One run: asks, keeps the rows, writes the files."""

    def __init__(self, client: LoadClient, model: str, plan: LoadPlan, out: Path) -> None:
        self.client, self.model, self.plan, self.out = client, model, plan, out
        self.rows: list[LoadRow] = []
        self.gaps: list[GapRow] = []

    async def check_arms(self, prompt: Prompt) -> None:
        """Ask once per arm, so that a server that refuses one says so before the work."""
        for arm in self.plan.arms:
            reply = await self.client.ask(self._request(arm, prompt))
            if reply.outcome != Outcome.ok:
                hint = "" if arm == DEFAULT_ARM else " (does the application's `methods` name it?)"
                raise GraftError(f"the server does not answer with arm {arm}: {reply.detail or reply.outcome}{hint}")

    async def run_load(self, load: Load, prompts: Sequence[Prompt]) -> None:
        """All blocks of one load; before them each arm answers some requests that are not counted."""
        size = self.plan.block_requests or load.default_block()
        warmup = next(blocks(load, prompts, 1, load.concurrency or 4, self.plan.seed))
        for arm in self.plan.arms:
            await self._run_block(Load(concurrency=load.concurrency or 4), arm, warmup)
        for block in blocks(load, prompts, self.plan.num_blocks, size, self.plan.seed):
            for arm in turns(self.plan.arms, block):
                start = time.perf_counter()
                replies = await self._run_block(load, arm, block)
                self._keep(load, arm, block, start, replies)
            self._progress(load, block)

    async def _run_block(self, load: Load, arm: str, block: Block) -> list[Reply]:
        asks = [self._request(arm, prompt) for prompt in block.prompts]
        if load.concurrency is not None:
            return await closed_loop(self.client, asks, load.concurrency)
        assert block.arrivals_s is not None
        return await open_loop(self.client, asks, block.arrivals_s)

    def _request(self, arm: str, prompt: Prompt) -> Ask:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": turn} for turn in prompt.turns],
            "max_tokens": self.plan.max_new_tokens,
            "temperature": self.plan.temperature,
            "seed": self.plan.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "graft": {"metrics": True} | ({} if arm == DEFAULT_ARM else {"method": arm}),
        }
        return Ask("chat", body)

    def _keep(self, load: Load, arm: str, block: Block, start: float, replies: Sequence[Reply]) -> None:
        rows, gaps = [], []
        for position, (prompt, reply) in enumerate(zip(block.prompts, replies, strict=True)):
            sent_s = reply.sent_s - start
            due_s = sent_s if block.arrivals_s is None else block.arrivals_s[position]
            row, gap = to_row(load, block.index, position, arm, prompt, due_s, sent_s - due_s, reply)
            rows.append(row)
            gaps.append(gap)
        for name, lines in (("gaps.jsonl", to_lines(gaps)), ("raw.jsonl", to_lines(rows))):
            with (self.out / name).open("a", encoding="utf-8") as file:
                file.write(lines)
        self.rows += rows
        self.gaps += gaps

    def _progress(self, load: Load, block: Block) -> None:
        rates = []
        for arm in self.plan.arms:
            here = [row for row in self.rows if (row.load, row.block, row.arm) == (load.name, block.index, arm)]
            wall = max(row.due_s + row.total_s for row in here)
            rates.append(f"{arm} {sum(row.num_tokens or 0 for row in here) / wall:.1f}")
        done = f"{load.name}: block {block.index + 1} of {self.plan.num_blocks}"
        print(f"{done}: tokens/s: {', '.join(rates)}", file=sys.stderr, flush=True)

    def finish(self) -> list[LoadSummary]:
        """Write the summary of the rows there are."""
        summary = summarise(self.rows, self.gaps, self.plan.level)
        write_aside(self.out / "summary.json", to_json([asdict(row) for row in summary]))
        write_aside(self.out / "summary.md", render_markdown(summary, self.rows, self.plan.level))
        return summary

    def report_problems(self) -> int:
        failed = [row for row in self.rows if not row.is_ok]
        for outcome in sorted({row.outcome for row in failed}):
            number = sum(row.outcome == outcome for row in failed)
            print(f"graft: {number} of {len(self.rows)} requests: {outcome}", file=sys.stderr)
        if any(row.arm == BASELINE and row.mean_budget for row in self.rows):
            print("graft: the server drafted for the arm plain: the ratios mean nothing", file=sys.stderr)
            return 1
        return 1 if failed else 0


async def closed_loop(client: LoadClient, asks: Sequence[Ask], concurrency: int) -> list[Reply]:
    """`concurrency` users, each taking the next request when its last one is answered; replies in order."""
    replies: dict[int, Reply] = {}
    waiting = iter(enumerate(asks))

    async def user() -> None:
        for position, ask in waiting:
            replies[position] = await client.ask(ask)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(user())
    return [replies[position] for position in range(len(asks))]


async def open_loop(client: LoadClient, asks: Sequence[Ask], arrivals_s: Sequence[float]) -> list[Reply]:
    """Each request at its moment, whatever became of the others; times count from that moment. Replies in order."""
    start = time.perf_counter()

    async def visitor(ask: Ask, moment: float) -> Reply:
        await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
        return await client.ask(ask, since=start + moment)

    async with asyncio.TaskGroup() as group:
        visitors = [group.create_task(visitor(*each)) for each in zip(asks, arrivals_s, strict=True)]
    return [each.result() for each in visitors]


def parse_arms(listed: str) -> list[str]:
    """Arms from a comma-separated list. Raises `PolicyError` for one that is unknown."""
    names = [name.strip() for name in listed.split(",")]
    for name in names:
        if name not in ARMS:
            raise PolicyError(f"unknown arm {name!r} in --arms: choose from {', '.join(ARMS)}")
    return list(dict.fromkeys(names))


def read_api_key(path: Path | None) -> str | None:
    """The first line of a file. Raises `GraftError` if there is none."""
    if path is None:
        return None
    try:
        lines = path.read_text(encoding="utf-8").split()
    except OSError as error:
        raise GraftError(f"--api-key-file is {path}, which cannot be read: {error.strerror}") from error
    if not lines:
        raise GraftError(f"--api-key-file is {path}, which is empty")
    return lines[0]


def usable(prompts: Sequence[Prompt | BadPrompt]) -> list[Prompt]:
    """The prompts; the bad ones are said on stderr. Raises `GraftError` if none is left."""
    for prompt in prompts:
        if isinstance(prompt, BadPrompt):
            print(f"graft: {prompt.id} is left out: {prompt.error}", file=sys.stderr)
    good = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
    if not good:
        raise GraftError("none of the prompts can be used")
    return good


def check_folder(out: Path) -> None:
    """Raise `GraftError` unless a new run can be written to `out`: to be said before the work."""
    if out.exists() and not out.is_dir():
        raise GraftError(f"--out is {out}, which is a file: name a folder")
    if out.is_dir() and any(out.iterdir()):
        raise GraftError(f"--out is {out}, which is not empty: name a new folder")


def start_folder(out: Path, about: dict[str, Any]) -> None:
    """Make the folder and say in `run.json` what runs: `about`, machine, versions, commit, command."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GraftError(f"--out is {out}, which cannot be made: {error.strerror}") from error
    write_aside(out / "run.json", to_json(about | provenance()))


async def find_model(client: LoadClient, wanted: str | None) -> str:
    """The name of the model to ask for. Raises `GraftError` if the server does not have it, or has several."""
    listed = await client.get("/v1/models")
    names = [model["id"] for model in (listed or {}).get("data", ())]
    if wanted is not None:
        if wanted not in names:
            raise GraftError(f"the server at {client.url} has no model {wanted!r}, it has {', '.join(names) or 'none'}")
        return wanted
    if len(names) != 1:
        raise GraftError(
            f"the server at {client.url} has {len(names)} models: name one of {', '.join(names)} (--model)"
        )
    return str(names[0])


async def about_server(client: LoadClient) -> dict[str, Any]:
    """What the server says of itself."""
    return {"models": await client.get("/v1/models"), "version": await client.get("/version")}


def _settings(plan: LoadPlan, server: Server, model: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
    return {
        "model": model,
        "loads": [load.name for load in plan.loads],
        "arms": list(plan.arms),
        "num_blocks": plan.num_blocks,
        "block_requests": {load.name: plan.block_requests or load.default_block() for load in plan.loads},
        "max_new_tokens": plan.max_new_tokens,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "service_level": asdict(plan.level),
        "timeout_s": server.timeout_s,
        "num_prompts": len(prompts),
    }


def render_overall(summary: Sequence[LoadSummary]) -> str:
    """The summary, aligned for a terminal."""
    head = f"{'load':<13}{'arm':<9}{'ok':>9}{'ttft p50':>10}{'p95':>8}{'p99':>8}{'itl p50':>9}{'p95':>7}{'p99':>7}"
    lines = [head + f"{'tokens/s':>10}{'goodput':>9}{'ratio':>7}{'95 % interval':>15}"]
    for row in summary:
        times = (row.ttft_p50_ms, row.ttft_p95_ms, row.ttft_p99_ms, row.itl_p50_ms, row.itl_p95_ms, row.itl_p99_ms)
        cells = ["" if time is None else f"{time:.0f}" for time in times]
        ratio = "" if row.throughput_ratio is None else f"{row.throughput_ratio:.2f}"
        low, high = row.throughput_low, row.throughput_high
        interval = "" if low is None or high is None else f"{low:.2f} to {high:.2f}"
        answered = f"{row.num_ok}/{row.num_requests}"
        lines.append(
            f"{row.load:<13}{row.arm:<9}{answered:>9}{cells[0]:>10}{cells[1]:>8}{cells[2]:>8}{cells[3]:>9}{cells[4]:>7}"
            f"{cells[5]:>7}{row.tokens_per_s:>10.1f}{row.goodput_per_s:>9.2f}{ratio:>7}{interval:>15}"
        )
    return "\n".join(lines)
