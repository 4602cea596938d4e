"""The `graft` command: options in, exit codes out; the work is in the `*_command.py` modules and in `storage`.

Exit codes: 0 done; 1 work is missing or an audit failed; 2 the command cannot be carried out as given (one sentence on
stderr); 130 interrupted. Heavy imports happen inside the commands, so that `graft --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import TyperException

from graft_dist import __version__
from graft_dist.config import TargetConfig, load_config, targets_folder
from graft_dist.errors import ConfigError, GraftError, PolicyError, PromptError

if TYPE_CHECKING:
    from graft_dist.prompts import BadPrompt, Prompt
    from graft_dist.sampling import SamplingParams

app = typer.Typer(
    name="graft",
    help="Decode a language model with draft trees: same text, fewer passes of the model.\n\n"
    "Start with: graft generate --config smollm2-135m --prompt 'Name three colours.'",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

store_app = typer.Typer(help="Keep a trajectory store in order: compact, forget, vacuum, export.")
app.add_typer(store_app, name="store")

schedule_app = typer.Typer(help="Retrain targets on a schedule: run it, look at it, or submit one run for cron.")
app.add_typer(schedule_app, name="schedule")


INTERRUPTED = 130
"""What Typer turns Ctrl-C into."""


class DtypeName(StrEnum):
    """Number formats that a target is computed in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class DeviceName(StrEnum):
    """Where a target is computed."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class TableFormat(StrEnum):
    """How `graft query` prints."""

    table = "table"
    csv = "csv"
    json = "json"


class RoundSource(StrEnum):
    """Where recorded rounds come from."""

    traffic = "traffic"
    collect = "collect"


class Split(StrEnum):
    """Of the prompts that a policy is learned from (`graft_dist.prompts.learning_split`)."""

    fit = "fit"
    tune = "tune"
    test = "test"


class RoundKind(StrEnum):
    """Of the rounds in a store."""

    decoded = "decoded"
    dense = "dense"


class ReplayFormat(StrEnum):
    """How `graft replay` prints."""

    table = "table"
    json = "json"


Serving = Annotated[
    str | None, typer.Option(help="Dashboard of a Ray cluster, such as http://head:8265, whose applications to update.")
]
Tracking = Annotated[
    str | None,
    typer.Option(help="MLflow server or sqlite:////FILE; default: MLFLOW_TRACKING_URI, else a file of the user's."),
]
Address = Annotated[
    str | None,
    typer.Option(help="URL of the Ray dashboard; default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, http://127.0.0.1:8265."),
]
WorkingDir = Annotated[
    str | None,
    typer.Option(help="Folder to send with each job, as in ray job submit; default: what the cluster has installed."),
]
ScheduledConfigs = Annotated[
    list[str], typer.Option("--config", help="Target with a schedule; may be given several times.")
]
ScheduleStateFile = Annotated[Path, typer.Option(help="SQLite file that remembers what was done.")]
Store = Annotated[str, typer.Option(help="Trajectory store: a folder, a file:// or an s3:// URI.")]
Config = Annotated[str, typer.Option(help="Target to decode with: a YAML file, or a name that `graft targets` lists.")]
PromptFile = Annotated[Path, typer.Option(help="JSONL file, one object a line: id, task, turns.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first so many prompts.")]
Methods = Annotated[str, typer.Option(help="Comma-separated: plain, chain, ddtree, caddtree, graft, graft-fixed.")]
Policy = Annotated[
    str | None,
    typer.Option(
        metavar="<folder>",
        help="Learned policy: a folder, or models:/graft-TARGET@champion; default: the target's shipped one.",
    ),
]
Cost = Annotated[
    Path | None,
    typer.Option(help="JSON object from budgets to milliseconds of a round; default: the policy's, else measured."),
]
Budgets = Annotated[
    str | None, typer.Option(help="Comma-separated numbers of draft nodes per round, for methods that take a budget.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="End an answer after so many tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token; above, tokens are sampled.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens that hold this much probability.")]
TopK = Annotated[int, typer.Option(min=0, help="Sample from so many likeliest tokens; 0 means all.")]
MinP = Annotated[float, typer.Option(help="Sample from tokens at least this fraction as likely as the likeliest.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: tokens of prompt and answer become less likely.")]
PresencePenalty = Annotated[float, typer.Option(help="Subtracted from the logits of tokens in the answer.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Subtracted once per time that a token is in the answer.")]
Seed = Annotated[int, typer.Option(help="Above temperature 0: same seed, same text, whatever the method.")]
Slots = Annotated[int, typer.Option(min=1, help="Prompts decoded together.")]
Threads = Annotated[
    int | None, typer.Option(min=1, max=1024, help="CPU threads; default: the config's, then PyTorch's.")
]
Dtype = Annotated[DtypeName | None, typer.Option(help="Number format instead of the config's.")]
Device = Annotated[DeviceName | None, typer.Option(help="Device instead of the config's.")]
Method = Annotated[
    str,
    typer.Option(help="How to decode, the text is the same: plain, chain, ddtree, caddtree, graft or graft-fixed."),
]
Nodes = Annotated[
    int | None,
    typer.Option(min=0, help="Draft nodes per round; default: the config's. At most, where the method chooses."),
]
OwnSeed = Annotated[int | None, typer.Option(help="Same seed, same text; without one each run draws its own.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="<str>", help="End before this text; may be given several times.")
]
StopTokenId = Annotated[
    list[int] | None, typer.Option(metavar="<int>", help="End after this token; may be given several times.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's own end token.")]
Drafter = Annotated[str | None, typer.Option(help="Drafter instead of the config's: a folder or a Hugging Face id.")]


@app.command()
def generate(
    config: Config,
    prompt: Annotated[str | None, typer.Option(help="Text to answer.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL file of prompts to answer instead.")] = None,
    method: Method = "ddtree",
    budget: Nodes = None,
    policy: Policy = None,
    cost: Cost = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: OwnSeed = None,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    out: Annotated[Path | None, typer.Option(help="Write a JSON object per prompt here instead of text.")] = None,
    limit: Limit = None,
    slots: Slots = 1,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = None,
    drafter: Drafter = None,
) -> None:
    """Answer a prompt on the terminal, or a file of prompts into a JSONL file."""
    settings = _read_config(config, dtype, device, drafter)
    if (prompt is None) == (prompts is None):
        raise PromptError("give either --prompt TEXT or --prompts FILE.jsonl")
    found = _one_prompt(prompt) if prompt is not None else _read_prompts(prompts, limit)
    from graft_dist.policy import check_method
    from jobs.policy_option import read_learned

    check_method(method)
    nodes = _budget(method, budget, settings)
    learned = read_learned(policy, cost, [method], settings)
    params = _sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
    )
    _prepare_torch(settings, threads)
    from jobs.generate_command import run_generate

    raise typer.Exit(run_generate(settings, found, method, nodes, params, out, slots, learned))


@app.command()
def chat(
    config: Config,
    method: Method = "ddtree",
    budget: Nodes = None,
    policy: Policy = None,
    system: Annotated[str | None, typer.Option(help="System message instead of the config's.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: OwnSeed = None,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = None,
    drafter: Drafter = None,
) -> None:
    """Talk with the model on the terminal; /reset forgets the conversation, /exit ends, Ctrl-C stops an answer."""
    settings = _read_config(config, dtype, device, drafter)
    if system is not None:
        settings = settings.model_copy(update={"system_prompt": system})
    from graft_dist.policy import check_method
    from jobs.policy_option import read_learned

    check_method(method)
    nodes = _budget(method, budget, settings)
    learned = read_learned(policy, None, [method], settings)
    params = _sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
    )
    _prepare_torch(settings, threads)
    from jobs.chat_command import run_chat

    raise typer.Exit(run_chat(settings, method, nodes, params, learned))


@app.command()
def audit(
    config: Config,
    prompts: PromptFile,
    methods: Methods = "plain,chain,ddtree",
    budgets: Budgets = None,
    policy: Policy = None,
    cost: Cost = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = 0,
    near_tie: Annotated[
        float,
        typer.Option(min=0.0, help="bfloat16: largest margin of a near tie, in standard deviations of the logits."),
    ] = 0.2,
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON here too.")] = None,
    limit: Limit = None,
    slots: Slots = 1,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = None,
    drafter: Drafter = None,
) -> None:
    """Compare every method's answers with transformers' own generate; exit 1 if one of them is not lossless."""
    settings = _read_config(config, dtype, device, drafter)
    names = _methods(methods)
    chosen = _budgets(budgets, [max(settings.budget, 1)])
    found = _read_prompts(prompts, limit)
    params = _sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    from jobs.policy_option import read_learned

    learned = read_learned(policy, cost, names, settings)
    _prepare_torch(settings, threads)
    from jobs.audit_command import run_audit

    raise typer.Exit(run_audit(settings, found, names, chosen, params, slots, near_tie, out, learned, prompts))


@app.command()
def bench(
    config: Config,
    prompts: PromptFile,
    out: Annotated[Path, typer.Option(help="Folder for rows and summary; an interrupted run there is continued.")],
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: plain, chain, ddtree, caddtree, graft, graft-fixed; transformers' own: hf, "
            "hf-lookup, hf-dflash."
        ),
    ] = "plain,chain,ddtree",
    budgets: Budgets = None,
    policy: Policy = None,
    cost: Cost = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Prompts decoded by every arm before measuring.")] = 1,
    limit: Limit = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = None,
    drafter: Drafter = None,
) -> None:
    """Measure methods against plain decoding, prompt by prompt in turns, and write rows and a summary."""
    settings = _read_config(config, dtype, device, drafter)
    names = _methods(methods, extra=("oracle", "hf", "hf-lookup", "hf-dflash"))
    chosen = _budgets(budgets, [budget for budget in settings.budgets if budget > 0])
    found = _read_prompts(prompts, limit)
    params = _sampling(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
    )
    from jobs.policy_option import read_learned

    learned = read_learned(policy, cost, names, settings)
    _prepare_torch(settings, threads)
    from jobs.bench_command import run_bench

    raise typer.Exit(run_bench(settings, found, prompts, names, chosen, params, warmup, out, learned))


@app.command("bench-serve")
def bench_serve(
    prompts: PromptFile,
    out: Annotated[Path, typer.Option(help="New folder for rows and summary.")],
    url: Annotated[str, typer.Option(help="Address of the running server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to ask for; default: the only one the server has.")] = None,
    arms: Annotated[
        str,
        typer.Option(help="Comma-separated: plain, ddtree, graft; default is whatever the server does when not asked."),
    ] = "plain,ddtree,graft",
    concurrency: Annotated[
        str, typer.Option(help="Comma-separated numbers of users, each with one request at a time; empty for none.")
    ] = "1,4,16",
    rates: Annotated[
        str, typer.Option(help="Comma-separated requests per second of Poisson arrivals; empty for none.")
    ] = "",
    blocks: Annotated[int, typer.Option(min=1, help="Blocks per load, answered by every arm in turn.")] = 6,
    block_requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of a block; default: twice the users, at least 4; 16 if Poisson."),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    slo_ttft: Annotated[
        float, typer.Option(min=0.0, help="Goodput counts requests with the first text within so many ms,")
    ] = 1000.0,
    slo_token: Annotated[float, typer.Option(min=0.0, help="and at most so many ms per further token.")] = 100.0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for an answer.")] = 600.0,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key to send; default: none is sent.")] = None,
    limit: Limit = None,
    soak: Annotated[
        float | None,
        typer.Option(min=0.001, help="Instead: mixed load for so many minutes, judged for losses and leaks."),
    ] = None,
    leave_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Soak: part of the requests whose client leaves early.")
    ] = 0.1,
    policies: Annotated[
        str, typer.Option(help="Soak: policies to swap, comma-separated: none, folders, versions such as v3.")
    ] = "",
    swap_every: Annotated[float, typer.Option(min=0.1, help="Soak: seconds between two swaps.")] = 60.0,
    sample_every: Annotated[
        float | None,
        typer.Option(min=0.01, help="Soak: seconds between two looks at the replicas; default: 5, or 60 looks."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="Soak: the server's target, decoded here: answers are compared with plain decoding's."),
    ] = None,
    tolerate_ties: Annotated[
        bool,
        typer.Option("--tolerate-ties", help="Soak without --config: another answer is counted, no failure."),
    ] = False,
    dashboard: Annotated[
        str, typer.Option(help="Soak: the cluster's dashboard, to swap policies and find replicas.")
    ] = "http://127.0.0.1:8265",
    app_name: Annotated[
        str | None, typer.Option("--app", help="Soak: the Serve application; default: the only one.")
    ] = None,
    tracking_uri: Annotated[str | None, typer.Option(help="Soak: the registry of versions in --policies.")] = None,
) -> None:
    """Load a running server, methods taking turns, and write rows and a summary; or soak it for a while."""
    from jobs.load_report import ServiceLevel
    from jobs.load_schedule import parse_loads
    from jobs.serve_bench import LoadPlan, Server, parse_arms, read_api_key, run_serve_bench

    found = _read_prompts(prompts, limit)
    server = Server(url=url, model=model, api_key=read_api_key(api_key_file), timeout_s=timeout)
    loads = parse_loads(concurrency, rates)
    if soak is None:
        plan = LoadPlan(
            loads=loads,
            arms=parse_arms(arms),
            num_blocks=blocks,
            block_requests=block_requests,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            level=ServiceLevel(slo_ttft, slo_token),
        )
        raise typer.Exit(run_serve_bench(server, plan, found, out))
    from jobs.offline_answers import OfflineAnswers
    from jobs.soak import SoakPlan, run_soak
    from jobs.soak_command import application_control, parse_policies

    pins = parse_policies(policies, tracking_uri, dashboard) if policies else []
    control = application_control(dashboard, app_name, pins)
    auditor = None if config is None else OfflineAnswers(load_config(config))
    soak_plan = SoakPlan(
        minutes=soak,
        concurrency=max(load.concurrency or 1 for load in loads),
        max_new_tokens=max_new_tokens,
        seed=seed,
        leave_share=leave_share,
        swap_every_s=swap_every,
        # Sixty looks of a short run: fewer than twenty after warming up could not be judged.
        sample_every_s=min(5.0, max(1.0, soak)) if sample_every is None else sample_every,
        tolerates_ties=tolerate_ties,
    )
    raise typer.Exit(run_soak(server, soak_plan, found, control, out, auditor))


@app.command()
def replay(
    store: Store,
    method: Annotated[
        str, typer.Option(help="Whose trees: ddtree, the drafter's own; or graft, a learned policy's.")
    ] = "ddtree",
    policy: Policy = None,
    config: Annotated[
        str | None, typer.Option(help="The target, whose token embeddings a learned policy's edge scorer reads.")
    ] = None,
    budgets: Annotated[str, typer.Option(help="Comma-separated numbers of draft nodes per round.")] = "4,8,16,32,64",
    target: Annotated[str | None, typer.Option(help="Only rounds of this target, by its name in the store.")] = None,
    task: Annotated[str | None, typer.Option(help="Only rounds of this task.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL file: only rounds of its prompts, by id.")] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out/--all", help="Of --prompts, only the fifth no drafter is trained on; or all.")
    ] = False,
    split: Annotated[
        Split | None, typer.Option(help="Of --prompts, only those of this part of policy learning: fit, tune or test.")
    ] = None,
    kind: Annotated[RoundKind | None, typer.Option(help="Only decoded rounds, or only dense ones.")] = None,
    cost: Annotated[
        Path | None, typer.Option(help="JSON object from budgets to milliseconds; default: the recorded timings.")
    ] = None,
    format: Annotated[ReplayFormat, typer.Option(help="How to print the report.")] = ReplayFormat.table,
) -> None:
    """Work out, without decoding, what other budgets and scores would have made of recorded rounds."""
    from jobs.policy_option import read_policy
    from jobs.replay_command import ReplayRequest, run_replay

    settings = None if config is None else load_config(config)
    if policy is not None and method != "graft":
        raise PolicyError(f"--policy is for --method graft, not for {method!r}")
    request = ReplayRequest(
        store=store,
        method=method,
        learned=read_policy(policy, method, settings) if method == "graft" else None,
        config=settings,
        budgets=_budgets(budgets, []),
        target=target,
        task=task,
        prompts=None if prompts is None else _read_prompts(prompts, None),
        is_held_out_only=held_out,
        split=None if split is None else split.value,
        kind=None if kind is None else kind.value,
        cost=cost,
    )
    raise typer.Exit(run_replay(request, format.value))


@app.command()
def drift(
    config: Config,
    store: Annotated[
        str | None,
        typer.Option(help="Trajectory store: a folder, a file:// or an s3:// URI; default: the config's, of retrain."),
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M"], help="Recent is from then on (UTC); default: the champion's time."
        ),
    ] = None,
    source: Annotated[RoundSource, typer.Option(help="Recent rounds: users' requests, or what jobs collected.")] = (
        RoundSource.traffic
    ),
    tracking_uri: Tracking = None,
    format: Annotated[ReplayFormat, typer.Option(help="How to print.")] = ReplayFormat.table,
) -> None:
    """Compare the acceptance of recent rounds with that of the rounds the champion was trained on."""
    from graft_dist.retraining import DriftRule
    from jobs.drift import DriftRequest, run_drift
    from jobs.registry_command import tracking_uri as resolved

    settings = load_config(config)
    if store is None and settings.retrain is None:
        raise ConfigError(f"{config} has no section retrain: say with --store where rounds are recorded")
    known = settings.retrain
    request = DriftRequest(
        config=settings,
        rule=DriftRule() if known is None else known.drift,
        store=store or ("" if known is None else known.store),
        tracking_uri=resolved(tracking_uri or (None if known is None else known.tracking_uri)),
        every_prompt=known is not None and known.every_prompt,
        source=source.value,
        since=None if since is None else since.replace(tzinfo=UTC),
    )
    raise typer.Exit(run_drift(request, format.value))


@app.command()
def query(
    sql: Annotated[str, typer.Argument(help="SQL over the views sequences and rounds, or the name of a stored query.")],
    store: Store,
    format: Annotated[TableFormat, typer.Option(help="How to print the answer.")] = TableFormat.table,
    memory: Annotated[str, typer.Option(help="What DuckDB may take, such as 8GB; more goes to files in .tmp.")] = "2GB",
) -> None:
    """Ask a trajectory store a question in SQL, also while a job writes to it."""
    from storage.query import query as answer

    print(answer(store, sql, format.value, memory_limit=memory))


@store_app.command()
def compact(
    store: Store,
    orphan_age_hours: Annotated[
        float, typer.Option(min=0.0, help="Drop rounds that have had no sequences for so long.")
    ] = 24.0,
) -> None:
    """Merge small files into few; also while a job writes to the store."""
    from jobs.store_command import run_compact

    run_compact(store, orphan_age_hours)


@store_app.command()
def forget(
    store: Store,
    before: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="Everything written on earlier days (UTC).")
    ] = None,
    target: Annotated[str | None, typer.Option(help="With --before: of this target only.")] = None,
    run: Annotated[str | None, typer.Option(help="Everything that a run recorded, by its id.")] = None,
) -> None:
    """Delete the rows of whole days, or of a run; their files stay until `graft store vacuum`."""
    from jobs.store_command import run_forget

    run_forget(store, None if before is None else before.date(), target, run)


@store_app.command()
def vacuum(
    store: Store,
    retention_hours: Annotated[int, typer.Option(min=0, help="Keep files that are younger.")] = 24,
) -> None:
    """Delete files that the store no longer refers to."""
    from jobs.store_command import run_vacuum

    run_vacuum(store, retention_hours)


@store_app.command()
def export(
    store: Store, dest: Annotated[Path, typer.Option(help="Folder to write to; an earlier export is replaced.")]
) -> None:
    """Write a copy of the rows as plain Parquet files, for tools that know no Delta log."""
    from jobs.store_command import run_export

    run_export(store, dest)


@schedule_app.command("run")
def schedule_run(
    config: ScheduledConfigs,
    address: Address = None,
    working_dir: WorkingDir = None,
    state: ScheduleStateFile = Path("data/schedule.sqlite"),
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at clock and cluster.")] = 15.0,
) -> None:
    """Submit each target's retraining job when it is due, until stopped; one process for all targets."""
    from jobs.schedule_command import run_schedule

    raise typer.Exit(run_schedule(config, address, working_dir, state, interval))


@schedule_app.command("status")
def schedule_status(
    config: ScheduledConfigs,
    state: ScheduleStateFile = Path("data/schedule.sqlite"),
    last: Annotated[int, typer.Option(min=1, help="How many of each target's last attempts to show.")] = 3,
    format: Annotated[ReplayFormat, typer.Option(help="How to print.")] = ReplayFormat.table,
) -> None:
    """Show each target's next run and last outcomes; needs no cluster."""
    from jobs.schedule_command import show_status

    show_status(config, state, last, format.value)


@schedule_app.command("submit")
def schedule_submit(
    config: Config,
    address: Address = None,
    working_dir: WorkingDir = None,
    entrypoint: Annotated[
        str | None, typer.Option(help="Command line of the job instead of the schedule's; {config} is --config.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end; exit 1 if it fails.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the job.")] = 15.0,
) -> None:
    """Submit the job of the tick that came last, unless somebody has: for cron, systemd or Kubernetes."""
    from jobs.schedule_command import submit

    raise typer.Exit(submit(config, address, working_dir, entrypoint, wait, interval))


@app.command()
def policies(
    config: Annotated[str | None, typer.Option(help="Only those of this target: a YAML file or a name.")] = None,
    tracking_uri: Tracking = None,
    format: Annotated[ReplayFormat, typer.Option(help="How to print them.")] = ReplayFormat.table,
) -> None:
    """List the learned policies in the MLflow registry, newest first, with their aliases and numbers."""
    from jobs.registry_command import run_policies
    from jobs.registry_command import tracking_uri as resolved

    run_policies(None if config is None else load_config(config).slug, resolved(tracking_uri), format.value)


@app.command()
def promote(
    config: Config,
    version: Annotated[str, typer.Argument(help="Number of the version, or an alias such as challenger.")],
    tracking_uri: Tracking = None,
    address: Serving = None,
) -> None:
    """Make a registered policy the champion; the champion until now is kept as previous."""
    from jobs.registry_command import run_promote
    from jobs.registry_command import tracking_uri as resolved

    run_promote(load_config(config).slug, version, resolved(tracking_uri), address)


@app.command()
def rollback(config: Config, tracking_uri: Tracking = None, address: Serving = None) -> None:
    """Make the previous champion the champion again."""
    from jobs.registry_command import run_rollback
    from jobs.registry_command import tracking_uri as resolved

    run_rollback(load_config(config).slug, resolved(tracking_uri), address)


@app.command()
def serve(
    config: Config,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines as well.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of the decoder, each with its share of the CPUs.")] = 1,
    policy: Annotated[
        str | None,
        typer.Option(help="Folder of a learned policy, or none; default: the one that ships for the target."),
    ] = None,
    follow_champion: Annotated[
        bool, typer.Option("--follow-champion", help="Decode with the registry's champion, whoever it becomes.")
    ] = False,
    tracking_uri: Tracking = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated: what a request may ask for by itself; empty for nothing.")
    ] = "plain,ddtree,graft",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of each replica.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Dashboard of the Ray to serve on; default: one that runs here, else a new one.")
    ] = None,
    api_keys_file: Annotated[Path | None, typer.Option(help="File of API keys, one a line; default: no key.")] = None,
) -> None:
    """Serve a target behind an OpenAI-compatible endpoint until Ctrl-C."""
    from jobs.registry_command import tracking_uri as resolved
    from jobs.serve_command import ServeRequest, run_serve

    if tracking_uri is not None and not follow_champion:
        raise ConfigError("--tracking-uri is where --follow-champion looks for the champion: give both")
    request = ServeRequest(
        config=config,
        host=host,
        port=port,
        replicas=replicas,
        policy=policy,
        methods=_served_methods(methods),
        threads=threads,
        address=address,
        api_keys_file=api_keys_file,
        followed_registry=resolved(tracking_uri) if follow_champion else None,
    )
    raise typer.Exit(run_serve(request))


@app.command()
def targets() -> None:
    """List the targets that come with the project."""
    for file in sorted(targets_folder().glob("*.yaml")):
        settings = load_config(file)
        print(f"{file.stem:<22} {settings.target}, drafter {settings.drafter}, {settings.dtype} on {settings.device}")


@app.command()
def version() -> None:
    """Print the version of graft-dist."""
    print(__version__)


def _read_config(source: str, dtype: DtypeName | None, device: DeviceName | None, drafter: str | None) -> TargetConfig:
    """The configuration with the command line's overrides; a drafter given by hand may be any folder name."""
    settings = load_config(source)
    overrides: dict[str, Any] = {}
    if dtype is not None:
        overrides["dtype"] = dtype.value
    if device is not None:
        overrides["device"] = device.value
    if drafter is not None:
        overrides |= {"drafter": drafter, "drafter_revision": None}
    return settings.model_copy(update=overrides)


def _read_prompts(path: Path | None, limit: int | None) -> list[Prompt | BadPrompt]:
    from graft_dist.prompts import read_prompts

    assert path is not None
    found = read_prompts(path)[:limit]
    if not found:
        raise PromptError(f"the prompt file {path} holds no prompts")
    return found


def _one_prompt(text: str) -> list[Prompt | BadPrompt]:
    from graft_dist.prompts import Prompt

    if not text.strip():
        raise PromptError("--prompt is empty: give the text to answer")
    return [Prompt("prompt", "other", (text,))]


def _methods(listed: str, extra: tuple[str, ...] = ()) -> list[str]:
    from graft_dist.policy import ALL_METHODS

    allowed = (*ALL_METHODS, *extra)
    names = [name.strip() for name in listed.split(",")]
    for name in names:
        if name not in allowed:
            raise PolicyError(f"unknown method {name!r} in --methods: choose from {', '.join(allowed)}")
    return list(dict.fromkeys(names))


def _served_methods(listed: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in listed.split(",") if name.strip())
    for name in names:
        if name not in ("plain", "ddtree", "graft"):
            raise PolicyError(f"unknown method {name!r} in --methods: choose from plain, ddtree, graft")
    return names


def _budgets(listed: str | None, default: list[int]) -> list[int]:
    if listed is None:
        return default
    try:
        budgets = [int(part) for part in listed.split(",")]
    except ValueError:
        budgets = []
    if not budgets or min(budgets) < 1 or max(budgets) > 4096:
        raise PolicyError(f"--budgets is {listed!r}, allowed are whole numbers from 1 to 4096 with commas between them")
    return budgets


def _budget(method: str, budget: int | None, settings: TargetConfig) -> int | None:
    if method in ("ddtree", "graft-fixed") and budget is None:
        return settings.budget
    if budget is not None and budget > 4096:
        raise PolicyError(f"--budget is {budget}, allowed is a whole number up to 4096")
    return budget


def _sampling(**fields: Any) -> SamplingParams:
    from graft_dist.sampling import SamplingParams

    try:
        return SamplingParams(**fields)
    except ValueError as error:
        raise GraftError(str(error)) from error


def _prepare_torch(settings: TargetConfig, threads: int | None) -> None:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    number = threads or settings.threads
    if number is not None:
        torch.set_num_threads(number)


def main() -> None:
    """Run the command line; what a user can mend is one sentence on stderr."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments or ["--help"], prog_name="graft", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:
            print("graft: interrupted", file=sys.stderr)
        return code if isinstance(code, int) else 0
    except GraftError as error:
        print(f"graft: {error}", file=sys.stderr)
        return 2
    except TyperException as error:
        print(f"graft: {error.format_message()}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # In the middle of the work, such as a disk that is full; what can be known before is a GraftError.
        print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    main()
