"""Tiny random models, a tokenizer and a fake drafter: everything tests need without a network or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from graft_dist.counter_random import hash_counters
from graft_dist.drafter import DrafterConfig
from graft_dist.kv_cache import SlotCache
from graft_dist.target import Target
from jobs.ray_head import RayHead

ROOT = Path(__file__).resolve().parents[1]

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral")

_needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 instructions"
)
PACKED_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=_needs_bfloat16)])
"""What oneDNN has packed products for, where the processor has the instructions."""

TINY_VOCAB_SIZE = 320

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = (
    "the target verifies what the drafter proposes, one tree at a time",
    "def add(a, b):\n    return a + b\n",
    "a round is draft, build, verify, accept, commit; café, naïve, 12 + 30 = 42",
)


class FilesTogether(LoadScopeScheduling):
    """Of several test processes each takes whole files, and one all files that start Ray, which it begins with.

    Two clusters would fight over the CPUs. pytest-xdist's own groups do not hold together under pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if ROOT / nodeid.partition("::")[0] in _ray_files() else nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if "ray" in self.workqueue:
            self.workqueue.move_to_end("ray", last=False)
        super()._assign_work_unit(node)


@cache
def _ray_files() -> frozenset[Path]:
    return frozenset(file for file in ROOT.glob("tests/**/test_*.py") if "mark.ray" in file.read_text(encoding="utf-8"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether:
    """Called where `--numprocesses` is given."""
    return FilesTogether(config, log)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models are slower with more threads, and other processes want theirs."""
    torch.set_num_threads(1)


def build_tokenizer(vocab_size: int = TINY_VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template; needs a vocabulary of at least 260."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def tiny_config(model_type: str, vocab_size: int = TINY_VOCAB_SIZE, **overrides: Any) -> Any:
    """A configuration of 8 layers and 2 query heads per key/value head.

    Weights are drawn wide, so that random models answer with varied tokens instead of one.
    """
    classes = {
        "llama": LlamaConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
        "qwen3_moe": Qwen3MoeConfig,
        "mistral": MistralConfig,
    }
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
    if model_type == "qwen3_moe":
        fields |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    if model_type == "mistral":
        fields["sliding_window"] = None
    return classes[model_type](**(fields | overrides))


def tiny_drafter_config(target: Target, num_layers: int = 2, head_dim: int = 8) -> DrafterConfig:
    """A drafter for a tiny target: block 5, taps 1 and 4, mask token 0."""
    return DrafterConfig(
        hidden_size=target.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        intermediate_size=48,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=512,
        vocab_size=target.vocab_size,
        block_size=5,
        num_target_layers=target.num_layers,
        mask_token_id=0,
        target_layer_ids=(1, 4),
    )


def save_tiny_model(folder: Path, model_type: str, *, vocab_size: int = TINY_VOCAB_SIZE, seed: int = 0) -> Path:
    """Write a random float32 model and, if the vocabulary is large enough for one, its tokenizer."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(tiny_config(model_type, vocab_size)).save_pretrained(folder)
    build_tokenizer(max(vocab_size, 260)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a model type to the folder of its tiny model, built once per session."""
    root = tmp_path_factory.mktemp("tiny-models")
    folders: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in folders:
            folders[model_type] = save_tiny_model(root / model_type, model_type)
        return folders[model_type]

    return folder


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Callable[[str], Path]) -> Callable[[str], Target]:
    """Return a function from a model type to its tiny float32 target, loaded once per session."""
    targets: dict[str, Target] = {}

    def target(model_type: str = "llama") -> Target:
        if model_type not in targets:
            targets[model_type] = Target.load(str(tiny_folder(model_type)), dtype="float32", device="cpu")
        return targets[model_type]

    return target


@pytest.fixture(scope="session")
def ray_head() -> Iterator[RayHead]:
    """One Ray head with two CPUs for all tests that submit to one: starting it takes ten seconds.

    Ray gives its workers the lowest priority; on a busy machine loading would take minutes.
    """
    with RayHead(num_cpus=2, environment={"RAY_worker_niceness": "0", "PYTHONPATH": str(ROOT)}) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_llama(tiny_target: Callable[[str], Target]) -> Target:
    return tiny_target("llama")


@dataclass(frozen=True)
class FakeProposal:
    candidate_ids: np.ndarray
    log_probs: np.ndarray
    hidden: torch.Tensor


class FakeDrafter:
    """Obeys the drafter's interface, with an accuracy that can be set, and checks what it is given.

    It knows `sequences` (prompt and continuation, token ids) and proposes their next tokens: at each depth the true one
    is the first candidate with probability `accuracy`, otherwise it sits at a random rank or, half the time, nowhere.
    The other candidates are random. Its context cache stores the features it was handed as keys and values, so that a
    test can compare them with a fresh prefill's.
    """

    def __init__(
        self,
        target: Target,
        sequences: Sequence[Sequence[int]] = (),
        *,
        accuracy: float = 0.8,
        block_size: int = 6,
        target_layer_ids: tuple[int, ...] = (1, 4),
        seed: int = 0,
    ) -> None:
        self.target = target
        self.sequences = [list(sequence) for sequence in sequences]
        self.accuracy = accuracy
        self.block_size = block_size
        self.draft_depth = block_size - 1
        self.max_positions = 1 << 20
        self.target_layer_ids = target_layer_ids
        self.fingerprint = f"fake-{seed}"
        self.seed = seed
        self.num_calls = 0

    def new_cache(self, max_slots: int, max_length: int) -> SlotCache:
        feature_size = len(self.target_layer_ids) * self.target.hidden_size
        return SlotCache(1, 1, feature_size, max_slots, max_length, self.target.dtype, self.target.device)

    def extend(self, cache: SlotCache, slots: Sequence[int], features: torch.Tensor, counts: Sequence[int]) -> None:
        num_rows = features.shape[1]
        positions = torch.tensor([[cache.lengths[slot]] for slot in slots]) + torch.arange(num_rows)
        cache.begin(positions, int(positions.max()) + 1, slots=slots)
        cache.update(features.unsqueeze(1), features.unsqueeze(1), 0)
        cache.advance(slots, counts)

    def propose(
        self,
        cache: SlotCache,
        features: torch.Tensor,
        counts: Sequence[int],
        root_tokens: Sequence[int],
        num_candidates: int,
    ) -> FakeProposal:
        num_slots = features.shape[0]
        assert cache.num_live == num_slots == len(counts) == len(root_tokens)
        assert features.shape[1] == max(counts) and min(counts) >= 1
        self.num_calls += 1
        self.extend(cache, range(num_slots), features, counts)
        ids = np.zeros((num_slots, self.draft_depth, num_candidates), np.int32)
        for slot, root in enumerate(root_tokens):
            ids[slot] = self._candidates(cache.lengths[slot], root, num_candidates)
        log_probs = -0.5 - 1.5 * np.arange(num_candidates, dtype=np.float32)
        hidden = torch.stack([self.hidden_at(cache.lengths[slot], root) for slot, root in enumerate(root_tokens)])
        shape = (num_slots, self.draft_depth, num_candidates)
        return FakeProposal(ids, np.broadcast_to(log_probs, shape).copy(), hidden)

    def hidden_at(self, context_length: int, root: int) -> torch.Tensor:
        """Hidden states [D, H] of the position, exact in float16 as records keep them."""
        generator = torch.Generator().manual_seed(hash_counters(self.seed, context_length, root) % 2**63)
        return torch.randn(self.draft_depth, self.target.hidden_size, generator=generator).half().float()

    def _candidates(self, context_length: int, root: int, num_candidates: int) -> np.ndarray:
        random = np.random.default_rng(hash_counters(self.seed, context_length, root))
        known = [tokens for tokens in self.sequences if tokens[context_length : context_length + 1] == [root]]
        follows = known[0][context_length + 1 :] if known else []
        ids = np.zeros((self.draft_depth, num_candidates), np.int32)
        for depth in range(self.draft_depth):
            row = random.choice(self.target.vocab_size, num_candidates, replace=False)
            draw, place = random.random(), int(random.integers(num_candidates))
            if depth < len(follows) and (draw < self.accuracy or random.random() < 0.5):
                true = follows[depth]
                row[row == true] = row[0]
                rank = 0 if draw < self.accuracy else place
                row[0], row[rank] = row[rank], row[0]
                row[rank] = true
                if len(set(row.tolist())) < num_candidates:
                    row = np.array([true, *[t for t in range(num_candidates) if t != true]])[:num_candidates]
            ids[depth] = row
        return ids
