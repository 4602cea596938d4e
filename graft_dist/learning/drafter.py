"""Training a DFlash drafter (arXiv 2602.06036) on sequences that the target itself generated.

A training step takes whole answers. Each is read once by the target, which gives the context features and its own
next-token distribution at every position; then *anchors* are drawn at random in the answer, each the root of one
block, and the drafter predicts the D tokens after every anchor in one pass. An anchor sees the features strictly
before it and its own block, never another block. The loss of depth d weighs exp(-(d - 1) / gamma) and mixes the
target's distribution (soft) with the token that followed (hard). Embedding and LM head stay the target's, frozen.

Letters: T tokens of a sequence, A anchors, B = D + 1 block rows, D draft depth, H hidden, F tap width, K teacher's
top tokens, G key/value heads, N query heads per key/value head, d head size, U tokens in the training softmax.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from graft_dist.drafter import Attend, DFlashModel, DrafterConfig, save_drafter
from graft_dist.errors import DrafterError

if TYPE_CHECKING:
    from graft_dist.target import Target

IGNORED = -100
"""Label of a block row that lies behind the end of its sequence."""

SHAPE_STEP = 64
"""Sizes that differ from answer to answer are rounded to multiples of this: on a CPU each new shape of a matrix product
costs oneDNN the compilation of a kernel, which took longer than the products themselves."""

LANES = 8
"""Sequences are dealt to this many lanes by index, and workers own whole lanes: the order of the data does not depend
on the number of workers (1, 2, 4 or 8), and a sequence's cached features are needed by one worker only."""


@dataclass(frozen=True)
class Answer:
    """One sequence of the target: token ids of the prompt as rendered, and of what the target said."""

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]


def answers_sha256(answers: Sequence[Answer]) -> str:
    """A hash of the answers' token ids, in their order."""
    digest = hashlib.sha256()
    for answer in answers:
        prompt, output = answer.prompt_token_ids, answer.output_token_ids
        digest.update(np.array([len(prompt), len(output), *prompt, *output], np.int64).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class DrafterTraining:
    """How a drafter is trained; every field is part of the run's identity."""

    steps: int
    """Optimizer steps of the whole run."""
    seed: int = 0
    sequences_per_step: int = 16
    anchors_per_sequence: int = 64
    learning_rate: float = 5e-3
    """Peak rate: warm-up, then constant, then linear to zero over the last `decay_fraction` of the steps."""
    warmup_steps: int = 50
    decay_fraction: float = 0.5
    weight_decay: float = 0.05
    depth_gamma: float = 4.0
    """Decay of the loss with depth; the DFlash paper has 4 for blocks of 8 and 7 for 16."""
    soft_weight: float = 0.7
    """Share of the target's own distribution in the loss; the rest is the token that followed."""
    teacher_top_k: int = 16
    core_vocabulary: int = 6144
    """The most frequent answer tokens, always in the training softmax."""
    sampled_vocabulary: int = 1024
    """Tokens drawn from the rest of the vocabulary in each sequence, standing for all of it."""
    feature_cache_bytes: int = 8 << 30
    """Memory for the target's features between epochs; what does not fit is computed again. Nothing goes to disk."""
    evaluate_every: int = 100
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "sequences_per_step", "anchors_per_sequence", "teacher_top_k", "core_vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("soft_weight", "decay_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie between 0 and 1")


@dataclass(frozen=True)
class Lesson:
    """What the target's one pass over a sequence teaches."""

    tokens: torch.Tensor
    """int64 [T] prompt and answer."""
    prompt_length: int
    features: torch.Tensor
    """[T, F] tapped hidden states."""
    teacher_ids: torch.Tensor
    """int32 [T, K] the target's most likely tokens *at* position t, given those before; rows of the prompt are 0."""
    teacher_log_probs: torch.Tensor
    """[T, K] their log-probabilities over the whole vocabulary."""

    @property
    def num_bytes(self) -> int:
        tensors = (self.tokens, self.features, self.teacher_ids, self.teacher_log_probs)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def teach(target: Target, answer: Answer, tap_layers: Sequence[int], top_k: int) -> Lesson:
    """Read `answer` once with the target.

    Raises `DrafterError` when a tapped state or a logit is not finite; the caller sets the sequence aside.
    """
    tokens = torch.tensor([*answer.prompt_token_ids, *answer.output_token_ids], device=target.device)
    prompt_length = len(answer.prompt_token_ids)
    output = target.read(tokens, tap_layers, first_row=prompt_length - 1)
    features, scores = output.features[0], output.logits[:-1].float()
    log_norm = scores.logsumexp(dim=-1, keepdim=True)
    if not (torch.isfinite(features).all() and torch.isfinite(log_norm).all()):
        raise DrafterError("the target gave values that are not finite")
    top = scores.topk(top_k, dim=-1)
    log_probs = top.values - log_norm
    pad = (0, 0, prompt_length, 0)
    ids, log_probs = F.pad(top.indices.to(torch.int32), pad), F.pad(log_probs.to(target.dtype), pad)
    return Lesson(tokens, prompt_length, features, ids, log_probs)


def draw_anchors(lesson: Lesson, count: int, rng: np.random.Generator) -> torch.Tensor:
    """int64 [A <= count] sorted positions of block roots: answer tokens with at least one token behind them."""
    candidates = np.arange(lesson.prompt_length, len(lesson.tokens) - 1)
    chosen = rng.choice(candidates, size=min(count, len(candidates)), replace=False)
    return torch.from_numpy(np.sort(chosen)).to(lesson.tokens.device)


def block_labels(tokens: torch.Tensor, anchors: torch.Tensor, depth: int) -> torch.Tensor:
    """int64 [A, D]: the tokens after each anchor, `IGNORED` behind the end."""
    positions = anchors[:, None] + torch.arange(1, depth + 1, device=anchors.device)
    inside = positions < len(tokens)
    return torch.where(inside, tokens[positions.clamp(max=len(tokens) - 1)], IGNORED)


def block_hidden(
    model: DFlashModel, embed: Callable[[torch.Tensor], torch.Tensor], lesson: Lesson, anchors: torch.Tensor
) -> torch.Tensor:
    """Hidden rows [A, D, H] that the drafter gives for a block at each of `anchors`, all in one pass.

    `embed` is the target's embedding. Equal to what `DFlashDrafter.propose` computes for the same context and root.
    """
    config = model.config
    num_anchors, size = len(anchors), config.block_size
    block = torch.full((num_anchors, size), config.mask_token_id, device=anchors.device)
    block[:, 0] = lesson.tokens[anchors]
    positions = anchors[:, None] + torch.arange(size, device=anchors.device)
    # Columns behind the last anchor, and behind the answer, are hidden from every block.
    length = -(-int(anchors.max()) // SHAPE_STEP) * SHAPE_STEP
    context_positions = torch.arange(length, device=anchors.device)[None]
    features = lesson.features[:length]
    features = F.pad(features, (0, 0, 0, length - len(features)))
    context = model.context_key_values(features[None].to(block_dtype(model)), context_positions)
    hidden_columns = context_positions >= anchors[:, None]
    attend = _block_attention(context, hidden_columns, config)
    embedded = embed(block.view(1, -1)).to(block_dtype(model))
    rows: torch.Tensor = model(embedded, positions.view(1, -1), attend)
    return rows.view(num_anchors, size, -1)[:, 1:]


def block_dtype(model: DFlashModel) -> torch.dtype:
    """The dtype in which activations enter the model: bfloat16 under autocast, else that of the weights."""
    device = model.fc.weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.fc.weight.dtype


def _block_attention(
    context: list[tuple[torch.Tensor, torch.Tensor]], hidden_columns: torch.Tensor, config: DrafterConfig
) -> Attend:
    """Attention of A blocks laid out in one row: each sees its own context columns and itself.

    Written out in matrix products instead of one masked call, because a mask over all blocks' keys would spend most
    of the work on pairs of blocks that must not see each other. `hidden_columns` is bool [A, T]."""
    groups, head_dim = config.num_key_value_heads, config.head_dim
    num_anchors, size = len(hidden_columns), config.block_size
    blocked = hidden_columns[:, None]

    def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        context_key, context_value = (tensor[0] for tensor in context[index])
        rows = query.reshape(groups, -1, head_dim)
        seen = (rows @ context_key.transpose(1, 2)).view(groups, -1, num_anchors, size, context_key.shape[1])
        split = query.reshape(groups, -1, num_anchors, size, head_dim).transpose(1, 2)
        own_key, own_value = (x.view(groups, num_anchors, 1, size, head_dim) for x in (key, value))
        own = (split @ own_key.transpose(-1, -2)).transpose(1, 2)
        scores = torch.cat([seen.masked_fill(blocked, float("-inf")), own], dim=-1).float() * head_dim**-0.5
        weights = scores.softmax(dim=-1).to(value.dtype)
        from_context = weights[..., :-size].reshape(groups, -1, context_key.shape[1]) @ context_value
        from_block = (weights[..., -size:].transpose(1, 2) @ own_value).transpose(1, 2)
        return from_context.view(1, -1, num_anchors * size, head_dim) + from_block.reshape(
            1, -1, num_anchors * size, head_dim
        )

    return attend


class DistillationLoss(torch.autograd.Function):
    """sum over rows of w * cross-entropy(target distribution, softmax(hidden @ head^T)), without keeping the logits.

    The gradient is formed beside the loss, a few hundred rows at a time, so that `[rows, U]` never exists as a whole
    (the idea of fused linear cross-entropy, Liger Kernel, arXiv 2410.10989). The head gets no gradient: it is frozen.
    """

    ROWS = 256

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        bias: torch.Tensor,
        columns: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """`hidden` [rows, H], `head` [U, H], `bias` float [U], `columns` int64 [rows, K], `weights` float [rows, K].

        `weights[i, j]` is how much row i wants column `columns[i, j]`: the row's loss weight times a probability.
        """
        loss = torch.zeros((), device=hidden.device)
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), DistillationLoss.ROWS):
            rows = slice(start, start + DistillationLoss.ROWS)
            logits = (hidden[rows] @ head.T).float().add_(bias)
            wanted, total = weights[rows], weights[rows].sum(dim=1, keepdim=True)
            log_norm = logits.logsumexp(dim=1, keepdim=True)
            loss += (wanted * (log_norm - logits.gather(1, columns[rows]))).sum()
            push = logits.sub_(log_norm).exp_().mul_(total).scatter_add_(1, columns[rows], -wanted)
            gradient[rows] = push.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), None, None, None, None


@dataclass(frozen=True)
class TrainingVocabulary:
    """The tokens of the training softmax: a core that is always there, and what stands for the rest."""

    core: torch.Tensor
    """int64 [C] the most frequent answer tokens."""
    rest: torch.Tensor
    """int64 [V - C]."""

    @staticmethod
    def of(answers: Sequence[Answer], vocab_size: int, core_size: int) -> TrainingVocabulary:
        counts = np.zeros(vocab_size, dtype=np.int64)
        for answer in answers:
            np.add.at(counts, np.asarray(answer.output_token_ids), 1)
        order = torch.from_numpy(np.argsort(-counts, kind="stable"))
        size = min(core_size, int((counts > 0).sum()))
        return TrainingVocabulary(order[:size].sort().values, order[size:])

    def draw(self, wanted: torch.Tensor, count: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids int64 [U] holding all of `wanted`, and the bias float [U] that corrects for the sampling."""
        drawn = self.rest[torch.from_numpy(rng.choice(len(self.rest), size=min(count, len(self.rest)), replace=False))]
        kept = torch.unique(torch.cat([self.core, wanted]))
        drawn = drawn[~torch.isin(drawn, kept)]
        surplus = (len(kept) + len(drawn)) % SHAPE_STEP
        drawn = drawn[surplus if len(drawn) > SHAPE_STEP else 0 :]
        left = len(self.core) + len(self.rest) - len(kept)
        correction = math.log(max(left, 1) / max(len(drawn), 1))
        bias = torch.cat([torch.zeros(len(kept)), torch.full((len(drawn),), correction)])
        return torch.cat([kept, drawn]), bias


def block_loss(
    hidden: torch.Tensor,
    lesson: Lesson,
    anchors: torch.Tensor,
    head: torch.Tensor,
    vocabulary: TrainingVocabulary,
    training: DrafterTraining,
    rng: np.random.Generator,
) -> torch.Tensor:
    """Mean weighted loss of blocks with `hidden` rows [A, D, H]; `head` [V, H] is the target's LM head."""
    depth = hidden.shape[1]
    labels = block_labels(lesson.tokens, anchors, depth)
    is_real = labels != IGNORED
    depth_weights = torch.exp(-torch.arange(depth, device=hidden.device) / training.depth_gamma)
    row_weights = (depth_weights * is_real).flatten()  # rows behind the end weigh nothing: their number differs
    row_weights = row_weights / row_weights.sum()
    positions = anchors[:, None] + torch.arange(1, depth + 1, device=anchors.device)
    positions = positions.clamp(max=len(lesson.tokens) - 1).flatten()
    soft = lesson.teacher_log_probs[positions].float().softmax(dim=-1) * training.soft_weight
    hard = torch.full((len(positions), 1), 1.0 - training.soft_weight, device=hidden.device)
    ids = torch.cat([lesson.teacher_ids[positions].long(), lesson.tokens[positions][:, None]], dim=1)
    # The vocabulary lives in the CPU's memory, the head may not.
    drawn, drawn_bias = vocabulary.draw(ids.flatten().cpu(), training.sampled_vocabulary, rng)
    tokens, bias = drawn.to(head.device), drawn_bias.to(head.device)
    column_of = torch.zeros(len(head), dtype=torch.int64, device=head.device)
    column_of[tokens] = torch.arange(len(tokens), device=head.device)
    weights = torch.cat([soft, hard], dim=1) * row_weights[:, None]
    rows = hidden.flatten(0, 1)
    loss: torch.Tensor = DistillationLoss.apply(rows, head[tokens].to(rows.dtype), bias, column_of[ids], weights)
    return loss


@dataclass(frozen=True)
class DrafterScore:
    """Teacher-forced quality on held-out sequences, greedy, over the whole vocabulary."""

    depth_accuracy: tuple[float, ...]
    """Share of anchors whose depth-d token is the drafter's first choice, d = 1..D."""
    chain_mat: float
    """1 + mean number of leading depths that are right: the acceptance length of a chain."""
    top8_mat: float
    """The same if the token only has to be among the first eight choices: a bound for trees."""


@torch.no_grad()
def count_hits(
    model: DFlashModel, target: Target, lessons: Sequence[Lesson], anchors_per_sequence: int = 48, seed: int = 0
) -> torch.Tensor:
    """Raw counts at random anchors of `lessons`, float64 [3 + D]; sums over workers add up.

    In order: anchors, leading depths right, leading depths among the first eight choices, and for each depth how often
    the first choice is right.
    """
    depth = model.config.draft_depth
    counts = torch.zeros(3 + depth, dtype=torch.float64, device=target.device)
    for index, lesson in enumerate(lessons):
        anchors = draw_anchors(lesson, anchors_per_sequence, np.random.default_rng((seed, index)))
        hidden = block_hidden(model, target.embed, lesson, anchors)
        # In two dimensions: on a slice of three, matmul copies the whole LM head once per anchor.
        logits = target.lm_head(hidden.flatten(0, 1).to(target.dtype))
        top = logits.topk(8, dim=-1).indices.unflatten(0, hidden.shape[:2])
        labels = block_labels(lesson.tokens, anchors, depth)
        right = (top[..., 0] == labels).double()
        close = (top == labels[..., None]).any(dim=-1).double()
        leading = torch.stack([right.cumprod(dim=1).sum(), close.cumprod(dim=1).sum()])
        counts += torch.cat([right.new_tensor([len(anchors)]), leading, right.sum(dim=0)])
    return counts


def score_of(counts: torch.Tensor) -> DrafterScore:
    """Turn the sums of `count_hits` into shares."""
    anchors, leading, leading_close, *right = counts.tolist()
    return DrafterScore(
        tuple(round(hits / anchors, 4) for hits in right),
        round(1.0 + leading / anchors, 4),
        round(1.0 + leading_close / anchors, 4),
    )


@torch.no_grad()
def initial_model(config: DrafterConfig, target: Target, seed: int) -> DFlashModel:
    """A fresh drafter. Where the target's last layers have the drafter's shapes, it starts from their weights.

    The context features then start as the last tap through the last layer's input norm, so that the copied key and
    value projections see what they were trained on.
    """
    torch.manual_seed(seed)
    model = DFlashModel(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    sources = list(target.decoder_layers)[-config.num_hidden_layers :]
    for layer, source in zip(model.layers, sources, strict=True):
        weights = source.state_dict()
        own = layer.state_dict()
        if any(weights[name].shape != own[name].shape for name in own if name in weights):
            return model
        layer.load_state_dict({name: weights.get(name, own[name]).float() for name in own})
    model.fc.weight.zero_()
    size = config.hidden_size
    model.fc.weight[:, -size:] = torch.eye(size)
    model.fc.weight += 0.005 * torch.randn_like(model.fc.weight)
    model.hidden_norm.weight.copy_(sources[-1].state_dict()["input_layernorm.weight"].float())
    model.norm.weight.copy_(target.final_norm_weight.float())
    return model


def learning_rate(step: int, training: DrafterTraining) -> float:
    """Warm-up, constant, then linear to zero; a function of the step alone, so a resumed run continues it."""
    decay_steps = max(1, round(training.steps * training.decay_fraction))
    warm = min(1.0, (step + 1) / max(1, training.warmup_steps))
    left = min(1.0, max(0.0, (training.steps - step) / decay_steps))
    return training.learning_rate * min(warm, left)


def order(num_sequences: int, training: DrafterTraining, first_step: int) -> Iterator[list[tuple[int, int]]]:
    """Per step the (epoch, index) pairs of its sequences: a function of (seed, epoch, position) alone.

    Position p of an epoch comes from lane p % LANES; see `LANES`.
    """
    lanes = min(LANES, num_sequences)
    rows = num_sequences // lanes
    shuffled: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))
    for step in range(first_step, training.steps):
        batch = []
        for position in range(step * training.sequences_per_step, (step + 1) * training.sequences_per_step):
            epoch, offset = divmod(position, rows * lanes)
            if shuffled[0] != epoch:
                rng = np.random.default_rng((training.seed, epoch))
                dealt = [lane + lanes * rng.permutation(rows) for lane in range(lanes)]
                shuffled = (epoch, np.stack(dealt, axis=1).ravel())
            batch.append((epoch, int(shuffled[1][offset])))
        yield batch


def worker() -> tuple[int, int]:
    """This process's (rank, number of workers) in a `torch.distributed` group, or (0, 1)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def add_over_workers(tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by its sum over all workers; all on the device that the workers' group communicates from."""
    if not dist.is_initialized():
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


@dataclass
class LessonCache:
    """Lessons of the training answers, kept in memory up to a number of bytes and computed again beyond it."""

    target: Target
    answers: Sequence[Answer]
    tap_layers: Sequence[int]
    top_k: int
    max_bytes: int
    num_bytes: int = 0
    num_set_aside: int = 0
    kept: dict[int, Lesson | None] = field(default_factory=dict)

    def get(self, index: int) -> Lesson | None:
        """The lesson of answer `index`; `None` when the target's pass over it was not finite."""
        if index in self.kept:
            return self.kept[index]
        lesson: Lesson | None
        try:
            lesson = teach(self.target, self.answers[index], self.tap_layers, self.top_k)
        except DrafterError:
            self.num_set_aside += 1
            self.kept[index] = lesson = None
            return lesson
        if self.num_bytes + lesson.num_bytes <= self.max_bytes:
            self.kept[index] = lesson
            self.num_bytes += lesson.num_bytes
        return lesson


class DrafterTrainer:
    """One training run: a model, its optimizers, and a folder with checkpoints and a log.

    The folder holds `drafter/` (the public checkpoint), `state-STEP.safetensors` + `state.json` (to resume) and
    `log.jsonl`. Under `torch.distributed` every worker runs the same code on its own lanes; the first one writes.
    """

    def __init__(
        self,
        target: Target,
        config: DrafterConfig,
        training: DrafterTraining,
        answers: Sequence[Answer],
        held_out: Sequence[Answer],
        folder: Path,
    ) -> None:
        if not answers:
            raise DrafterError("there are no answers to train on")
        usable = [answer for answer in answers if len(answer.output_token_ids) >= 2]
        if not usable:
            raise DrafterError(
                f"none of the {len(answers)} answers has two tokens or more; there is nothing to predict"
            )
        self.target, self.config, self.training, self.folder = target, config, training, folder
        self.answers = usable
        self._answers_sha256 = answers_sha256(usable)
        self.rank, self.num_workers = worker()
        if LANES % self.num_workers or training.sequences_per_step % min(LANES, len(usable)):
            raise DrafterError(
                f"{self.num_workers} workers and {training.sequences_per_step} sequences a step do not divide into "
                f"{min(LANES, len(usable))} lanes; use 1, 2, 4 or 8 workers and a multiple of the lanes"
            )
        self.vocabulary = TrainingVocabulary.of(usable, target.vocab_size, training.core_vocabulary)
        taps = config.target_layer_ids
        self.cache = LessonCache(target, usable, taps, training.teacher_top_k, training.feature_cache_bytes)
        long_enough = [answer for answer in held_out if len(answer.output_token_ids) >= 2]
        self.held_out = [
            teach(target, answer, taps, training.teacher_top_k) for answer in long_enough[self.rank :: self.num_workers]
        ]
        self.has_held_out = bool(long_enough)
        self.model = initial_model(config, target, training.seed).to(target.device)
        self.step = 0
        self.optimizers = _optimizers(self.model, training)
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        if self.rank == 0:
            cut_log(folder / "log.jsonl", self.step)

    def run(self, report: Callable[[dict[str, Any]], None] = lambda row: None) -> DrafterScore | None:
        """Train to the last step, reporting progress rows; returns the final score (None without held-out answers)."""
        started, losses, score = time.monotonic(), [], None
        first_step = self.step
        for batch in order(len(self.answers), self.training, self.step):
            losses.append(self._train_step(batch))
            self.step += 1
            is_last = self.step == self.training.steps
            if is_last or self.step % self.training.evaluate_every == 0:
                score = self._evaluate()
                elapsed = time.monotonic() - started
                row = {
                    "step": self.step,
                    "loss": round(sum(losses) / len(losses), 4),
                    "learning_rate": learning_rate(self.step, self.training),
                    "epoch": round(self.step * self.training.sequences_per_step / len(self.answers), 3),
                    "elapsed_s": round(elapsed, 1),
                    "left_s": round(elapsed / (self.step - first_step) * (self.training.steps - self.step), 1),
                    "set_aside": self.cache.num_set_aside,
                    **(asdict(score) if score else {}),
                }
                losses = []
                if self.rank == 0:
                    with (self.folder / "log.jsonl").open("a") as log:
                        log.write(json.dumps(row) + "\n")
                    report(row)
            if self.rank == 0 and (is_last or self.step % self.training.checkpoint_every == 0):
                self._save()
        return score

    def _train_step(self, batch: Sequence[tuple[int, int]]) -> float:
        """Accumulate the gradients of the batch's sequences, one at a time (no padding), and take one step."""
        head = self.target.lm_head_weight
        total = torch.zeros(1, device=self.target.device)  # where the gradients are: they are summed together
        for position, (epoch, index) in enumerate(batch):
            lesson = self.cache.get(index) if position % self.num_workers == self.rank else None
            if lesson is None:
                continue
            rng = np.random.default_rng((self.training.seed, epoch, index))
            anchors = draw_anchors(lesson, self.training.anchors_per_sequence, rng)
            with self._autocast():
                hidden = block_hidden(self.model, self.target.embed, lesson, anchors)
                loss = block_loss(hidden, lesson, anchors, head, self.vocabulary, self.training, rng)
            (loss / len(batch)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() / len(batch)
        gradients = [_gradient(parameter) for parameter in self.model.parameters()]
        add_over_workers([*gradients, total])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rate = learning_rate(self.step, self.training)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(total)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.target.dtype == torch.bfloat16)

    def _evaluate(self) -> DrafterScore | None:
        if not self.has_held_out:
            return None
        with self._autocast():
            counts = count_hits(self.model, self.target, self.held_out)
        add_over_workers([counts])
        return score_of(counts)

    def _save(self) -> None:
        """Write the checkpoint and the state aside, then rename; last the state's JSON, which resuming reads first."""
        save_drafter(self.model, self.folder / "drafter", tokenizer_sha256=self.target.tokenizer_sha256)
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for key, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{key}.{name}": torch.as_tensor(value) for name, value in state.items()}
        state_file = f"state-{self.step}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.folder / state_file)
        aside = self.folder / "state.json.writing"
        aside.write_text(json.dumps({"step": self.step, "file": state_file, "identity": self._identity()}))
        aside.rename(self.folder / "state.json")
        for old in self.folder.glob("state-*.safetensors"):
            if old.name != state_file:
                old.unlink()

    def _identity(self) -> dict[str, Any]:
        """What must not change between a run and its resumption (the number of steps may: the schedule follows it)."""
        free = {"steps", "evaluate_every", "checkpoint_every", "feature_cache_bytes", "decay_fraction"}
        fixed = {name: value for name, value in asdict(self.training).items() if name not in free}
        answers = {"num_answers": len(self.answers), "answers_sha256": self._answers_sha256}
        return {"config": self.config.to_json(), "training": fixed, **answers}

    def _resume(self) -> None:
        path = self.folder / "state.json"
        if not path.exists():
            return
        state = json.loads(path.read_text())
        if state["identity"] != json.loads(json.dumps(self._identity())):
            raise DrafterError(f"{self.folder} holds a run with another recipe or other answers; choose another folder")
        tensors = load_file(self.folder / state["file"])
        self.model.load_state_dict(
            {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
        )
        for number, optimizer in enumerate(self.optimizers):
            states: dict[int, dict[str, torch.Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith(f"optimizer.{number}."):
                    key, entry = name.removeprefix(f"optimizer.{number}.").split(".", 1)
                    states.setdefault(int(key), {})[entry] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        self.step = state["step"]


def cut_log(path: Path, step: int) -> None:
    """Keep the rows of a log up to `step`: a run that goes on from there writes the later ones again.

    A row that a killed process left half written goes too. Written aside, then renamed.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["step"] <= step:
            kept.append(line + "\n")
    aside = path.with_name(path.name + ".writing")
    aside.write_text("".join(kept))
    aside.rename(path)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The parameter's gradient; zeros when none of this worker's sequences reached it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _optimizers(model: DFlashModel, training: DrafterTraining) -> list[torch.optim.Optimizer]:
    """Muon for the matrices (Jordan et al., 2024: the most progress per sample we know of), AdamW for the norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    rate, decay = training.learning_rate, training.weight_decay
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
