"""One drafter training run: let the target answer, read the answers from the store, train on Ray Train's workers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from graft_dist.config import TargetConfig
from graft_dist.decoder import load_target
from graft_dist.drafter import DrafterConfig
from graft_dist.errors import ConfigError, DrafterError, PromptError
from graft_dist.learning.drafter import LANES, Answer, DrafterScore, DrafterTrainer, DrafterTraining
from graft_dist.prompts import BadPrompt, Prompt, is_held_out, prompt_hash, read_prompts, render
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target, check_taps, read_architecture, read_tokenizer
from jobs.collection import CollectRequest
from jobs.collection import run as collect
from jobs.decode_spec import DecodeSpec
from jobs.driver import Ending
from jobs.fresh_prompts import write_prompts
from jobs.ray_pool import PoolSettings
from storage.query import connect as connect_store


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """The free choices of a drafter's architecture; the rest follows the target."""

    num_layers: int = 2
    block_size: int = 8
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    """A token of the target's vocabulary that never occurs in text."""

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ConfigError(f"layers is {self.num_layers}; it must be at least 1")
        if self.block_size < 2:
            raise ConfigError(f"block-size is {self.block_size}; it must be at least 2, the root and one mask")
        if list(self.target_layer_ids) != sorted({layer for layer in self.target_layer_ids if layer >= 0}):
            raise ConfigError(f"taps are {list(self.target_layer_ids)}; they must be increasing layers from 0 on")


@dataclass(frozen=True, kw_only=True)
class DrafterRequest:
    """What a training run is asked to do."""

    config: TargetConfig
    prompts: tuple[str, ...]
    store: str  # root of the trajectory store that holds the answers
    out: Path  # folder of the run: checkpoints, log, and `drafter/`
    shape: DrafterShape
    training: DrafterTraining
    temperatures: tuple[float, ...] = (0.0,)  # one answer per prompt and temperature
    max_new_tokens: int = 256
    num_slots: int = 32
    num_held_out: int = 96  # held-out prompts, answered greedily, that the score is computed on
    num_workers: int = 1
    threads_per_worker: int = 1
    address: str | None = None

    def __post_init__(self) -> None:
        # The rest is refused where it is used; these only after hours of answering.
        if self.num_workers < 1 or LANES % self.num_workers:
            raise ConfigError(f"workers is {self.num_workers}; it must be 1, 2, 4 or 8")
        if self.training.sequences_per_step % LANES:
            raise ConfigError(
                f"sequences-per-step is {self.training.sequences_per_step}; allowed are multiples of {LANES}"
            )
        for name, number in (("slots", self.num_slots), ("threads", self.threads_per_worker)):
            if number < 1:
                raise ConfigError(f"{name} is {number}; it must be at least 1")


def say(line: str) -> None:
    """Print a line at once, so that a job's log can be followed."""
    print(f"train_drafter: {line}", flush=True)


def run(request: DrafterRequest) -> int:
    """Answer what has no answer yet, then train to the last step; returns the exit code, 0 or that of the collection.

    Raises a `GraftError` before any work when the request cannot be carried out.
    """
    by_id = _prompts_by_id(request.prompts)
    check_shape(request.shape, request.config)
    try:
        request.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder of the run {request.out} cannot be made ({error.strerror})") from error
    to_answer = prompts_to_answer(by_id.values(), request.num_held_out)
    for temperature, prompts in _passes(request.temperatures, *to_answer).items():
        say(f"answers at temperature {temperature:g}")
        file = request.out / f"prompts-{temperature:g}.jsonl"
        write_prompts(file, prompts)
        code = collect(_answers_request(request, temperature, file))
        if code not in (Ending.COMPLETE.value, Ending.PARTIAL.value):
            return code
    wanted = {prompt.id: prompt for part in to_answer for prompt in part}
    training, held_out = read_answers(request.store, request.config.slug, wanted, render_all(request.config, wanted))
    tokens = sum(len(answer.output_token_ids) for answer in training)
    say(f"training on {len(training)} answers of {tokens:,} tokens; {len(held_out)} held-out answers are for the score")
    if not training:
        raise DrafterError(f"the store {request.store} holds no answer to a training prompt; check --prompts and --out")
    started = time.monotonic()
    score = train(request, training, held_out)
    say(f"done in {(time.monotonic() - started) / 3600:.2f} h: {score}; checkpoint in {request.out / 'drafter'}")
    return 0


def _prompts_by_id(paths: Sequence[str]) -> dict[str, Prompt]:
    found = read_prompts(paths)
    prompts = {prompt.id: prompt for prompt in found if isinstance(prompt, Prompt)}
    if not prompts:
        raise ConfigError(f"there is no usable prompt in {', '.join(paths)}")
    for line in found:
        if isinstance(line, BadPrompt):
            say(f"not a prompt: {line.id}: {line.error}")
    return prompts


def prompts_to_answer(prompts: Iterable[Prompt], num_held_out: int) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to train on, as they come, and held-out ones for the score, in the order of their hashes.

    That order is a shuffle which stays the same as prompts are added, so that the score is about every task.
    """
    every = list(prompts)
    held_out = sorted((one for one in every if is_held_out(one.turns)), key=lambda one: prompt_hash(one.turns))
    return [one for one in every if not is_held_out(one.turns)], held_out[:num_held_out]


def _passes(temperatures: Sequence[float], training: list[Prompt], held_out: list[Prompt]) -> dict[float, list[Prompt]]:
    """What to answer at each temperature: held-out prompts only greedily, as acceptance is judged."""
    passes = dict.fromkeys(temperatures, training)
    passes[0.0] = [*passes.get(0.0, []), *held_out]
    return {temperature: prompts for temperature, prompts in passes.items() if prompts}


def _answers_request(request: DrafterRequest, temperature: float, prompts: Path) -> CollectRequest:
    """Plain decoding, sequences only: the rounds of plain decoding teach nothing."""
    resources = request.config.resources
    return CollectRequest(
        spec=DecodeSpec(
            config=request.config,
            method="plain",
            budget=None,
            sampling=SamplingParams(temperature=temperature, max_new_tokens=request.max_new_tokens),
            seed=request.training.seed,
            records_rounds=False,
        ),
        prompts=(str(prompts),),
        store=request.store,
        num_slots=request.num_slots,
        pool=PoolSettings(num_actors=resources.num_actors, num_cpus=resources.num_cpus, num_gpus=resources.num_gpus),
        unit_size=64,
        address=request.address,
    )


def check_shape(shape: DrafterShape, config: TargetConfig) -> None:
    """Refuse taps and a mask token that the target does not have, before hours of answering; reads no weights."""
    architecture = read_architecture(**_where(config))
    check_taps(config.target, architecture.num_hidden_layers, shape.target_layer_ids)
    if not 0 <= shape.mask_token_id < architecture.vocab_size:
        raise ConfigError(
            f"mask-token is {shape.mask_token_id}; {config.target} has token ids from 0 to "
            f"{architecture.vocab_size - 1}"
        )


def render_all(config: TargetConfig, prompts: Mapping[str, Prompt]) -> dict[str, tuple[int, ...]]:
    """The token ids of each prompt, by its id, as the target is asked; without those that its template refuses."""
    tokenizer = read_tokenizer(**_where(config))
    rendered = {}
    for prompt in prompts.values():
        with suppress(PromptError):  # the collection has said so, and the store has it as an error
            rendered[prompt.id] = tuple(render(tokenizer, prompt, config.system_prompt, config.enable_thinking))
    return rendered


def _where(config: TargetConfig) -> dict[str, Any]:
    return {"spec": config.target, "revision": config.revision, "trust_remote_code": config.trust_remote_code}


def read_answers(
    store: str, target: str, prompts: Mapping[str, Prompt], rendered: Mapping[str, tuple[int, ...]]
) -> tuple[list[Answer], list[Answer]]:
    """The target's finished sequences in `store`, in a fixed order: those to train on, and those of held-out prompts.

    Whatever policy decoded them: text does not depend on it. Left out are sequences of prompts that are not in
    `prompts`, and those whose prompt is not what `rendered` says: whether a text is held out is known of the texts in
    `prompts` only, and an id may have had another one. Held-out answers are greedy only, as acceptance is judged.
    """
    with connect_store(store) as connection:
        rows = connection.execute(
            """
            SELECT prompt_id, prompt_token_ids, output_token_ids, temperature
            FROM sequences
            WHERE target = ? AND error IS NULL AND finish_reason IN ('stop', 'length')
            ORDER BY prompt_id, temperature, sequence_id
            """,
            [target],
        ).fetchall()
    training, held_out, num_others = [], [], 0
    for prompt_id, prompt_token_ids, output_token_ids, temperature in rows:
        prompt = prompts.get(prompt_id)
        if prompt is None:
            continue
        if tuple(prompt_token_ids) != rendered.get(prompt_id):
            num_others += 1
            continue
        answer = Answer(tuple(prompt_token_ids), tuple(output_token_ids))
        if not is_held_out(prompt.turns):
            training.append(answer)
        elif temperature == 0.0:
            held_out.append(answer)
    if num_others:
        say(f"answers left out, since their prompts had another text or system prompt: {num_others}")
    return training, held_out


def drafter_config(shape: DrafterShape, target: Target) -> DrafterConfig:
    """A drafter of `shape` whose layers have the target's widths."""
    config = target.config
    return DrafterConfig(
        hidden_size=target.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        max_position_embeddings=target.max_position_embeddings,
        vocab_size=target.vocab_size,
        block_size=shape.block_size,
        num_target_layers=target.num_layers,
        mask_token_id=shape.mask_token_id,
        target_layer_ids=shape.target_layer_ids,
    )


def train(request: DrafterRequest, training: Sequence[Answer], held_out: Sequence[Answer]) -> DrafterScore | None:
    """Train on Ray Train's workers, or in this process when there is one worker.

    Raises `DrafterError` or `TargetError` when that is what a worker raised.
    """
    plan = {"request": request, "training": list(training), "held_out": list(held_out)}
    if request.num_workers == 1:
        return train_on_worker(plan)
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from jobs.ray_training import training_cluster

    with training_cluster(request.address) as cluster:
        say(cluster.message)
        result = TorchTrainer(
            _train_with_result,  # type: ignore[arg-type]  # may return a value: `Result.return_value`
            train_loop_config=plan,
            scaling_config=ScalingConfig(
                num_workers=request.num_workers,
                use_gpu=request.config.resources.num_gpus > 0,
                resources_per_worker={"CPU": request.threads_per_worker},
            ),
            # A name of its own: Ray Train resumes runs by name, and this run resumes from its own folder.
            run_config=RunConfig(name=f"drafter-{time.time_ns()}", storage_path=str(request.out.absolute() / "ray")),
        ).fit()
    score = result.return_value  # type: ignore[attr-defined]
    if score is None:
        return None
    return DrafterScore(tuple(score["depth_accuracy"]), score["chain_mat"], score["top8_mat"])


def _train_with_result(plan: dict[str, Any]) -> dict[str, Any] | None:
    score = train_on_worker(plan)
    return None if score is None else asdict(score)


def train_on_worker(plan: dict[str, Any]) -> DrafterScore | None:
    """One worker's share of the training; the first worker prints the progress."""
    request: DrafterRequest = plan["request"]
    torch.set_num_threads(request.threads_per_worker)
    target = load_target(request.config)
    trainer = DrafterTrainer(
        target,
        drafter_config(request.shape, target),
        request.training,
        plan["training"],
        plan["held_out"],
        request.out,
    )
    if trainer.step:
        say(f"resumed at step {trainer.step} of {request.training.steps}")
    return trainer.run(_report)


def _report(row: dict[str, Any]) -> None:
    line = f"step {row['step']}, epoch {row['epoch']:.2f}, loss {row['loss']:.4f}"
    if "chain_mat" in row:
        by_depth = " ".join(f"{share:.2f}" for share in row["depth_accuracy"])
        line += f", held out: acceptance length {row['chain_mat']:.3f}, right by depth {by_depth}"
    say(f"{line}; {row['left_s'] / 60:.0f} min left")
