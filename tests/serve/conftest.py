"""A target that recites: what it says next depends on the last token alone, so that tests know its answers.

Its text has characters of one to four bytes, each byte a token of its own; after the last byte it begins again. A
`Service` with it runs without Ray, behind a real socket; its drafter knows the text and is often right.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import uvicorn
from openai import OpenAI
from transformers import AutoModelForCausalLM

from graft_dist.config import Resources, TargetConfig
from graft_dist.counter_random import hash_counters
from graft_dist.drafter import DFlashModel, save_drafter
from graft_dist.target import Target
from serve import service as service_module
from serve.http_app import create_app
from serve.observer import RequestReport
from serve.serve_args import ServeArgs
from serve.service import Service
from tests.conftest import TINY_VOCAB_SIZE, FakeDrafter, build_tokenizer, tiny_config, tiny_drafter_config

RECITAL = "Stop? é世👋Д\n"
"""What the model recites; no byte comes twice in it."""

MODEL = "reciter"


def reciting_ids(tokenizer: object) -> list[int]:
    """The token of each byte of `RECITAL`."""
    from serve.answer import byte_alphabet

    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    return tokenizer.convert_tokens_to_ids([letters[byte] for byte in RECITAL.encode()])  # type: ignore[attr-defined]


def recite(num_tokens: int) -> str:
    """The model's answer to a prompt that ends in none of its own bytes."""
    again = RECITAL.encode() * (num_tokens // len(RECITAL.encode()) + 1)
    return again[:num_tokens].decode(errors="replace")


def save_reciting_model(folder: Path) -> Path:
    """A llama whose layers do nothing, and whose head maps each byte of `RECITAL` to the next."""
    tokenizer = build_tokenizer()
    ids = reciting_ids(tokenizer)
    assert len(set(ids)) == len(ids), "a byte comes twice"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama", hidden_size=64, head_dim=16, initializer_range=0.02))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        others = [token for token in range(TINY_VOCAB_SIZE) if token not in ids]
        embeddings = torch.randn(TINY_VOCAB_SIZE, 64)
        embeddings[:, 0] = 0
        embeddings[others, 0] = 20  # what all tokens outside of the recital have in common
        embeddings /= embeddings.norm(dim=1, keepdim=True)
        model.model.embed_tokens.weight.copy_(embeddings)
        head = 0.01 * torch.randn(TINY_VOCAB_SIZE, 64)
        for token, following in zip(ids, [*ids[1:], ids[0]], strict=True):
            head[following] += 1.2 * embeddings[token]
        head[ids[0], 0] += 1.2  # after any other token the recital begins
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class RecitingDrafter(FakeDrafter):
    """Proposes the recital's continuation: right at each depth with probability `accuracy`."""

    def _candidates(self, context_length: int, root: int, num_candidates: int) -> np.ndarray:
        ids = reciting_ids(self.target.tokenizer)
        random = np.random.default_rng(hash_counters(self.seed, context_length, root))
        rows = np.zeros((self.draft_depth, num_candidates), np.int32)
        follows = ids[(ids.index(root) + 1) % len(ids) :] + ids if root in ids else ids
        for depth in range(self.draft_depth):
            true, is_right = follows[depth % len(follows)], random.random() < self.accuracy
            wrong = [token for token in random.permutation(TINY_VOCAB_SIZE) if token != true]
            rows[depth] = [true, *wrong[: num_candidates - 1]] if is_right else wrong[:num_candidates]
        return rows


@pytest.fixture(scope="session")
def reciting_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reciting_model(tmp_path_factory.mktemp("reciter") / "model")


@pytest.fixture(scope="session")
def reciting_target(reciting_folder: Path) -> Target:
    return Target.load(str(reciting_folder), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def reciting_drafter_folder(reciting_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter that can be loaded, for replicas in other processes."""
    config = tiny_drafter_config(reciting_target, num_layers=1, head_dim=16)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("reciting-drafter") / "drafter"
    save_drafter(DFlashModel(config), folder, tokenizer_sha256=reciting_target.tokenizer_sha256, dtype=torch.float32)
    return folder


@pytest.fixture(scope="session")
def reciting_config(reciting_folder: Path, reciting_drafter_folder: Path) -> TargetConfig:
    return TargetConfig(
        target=str(reciting_folder),
        drafter=str(reciting_drafter_folder),
        dtype="float32",
        device="cpu",
        threads=1,
        max_length=256,
        max_slots=4,
        num_candidates=4,
        budget=6,
        budgets=(4, 6),
        resources=Resources(num_cpus=0.2),
    )


class Reports:
    """Remembers what a service reports of requests and policies."""

    def __init__(self) -> None:
        self.requests: list[RequestReport] = []
        self.policies: list[tuple[str, str | None]] = []
        self.traffic_outcomes: Counter[str] = Counter()

    def requested(self, report: RequestReport) -> None:
        self.requests.append(report)

    def policy_changed(self, label: str, refused: str | None) -> None:
        self.policies.append((label, refused))

    def traffic(self, outcome: str, number: int) -> None:
        self.traffic_outcomes[outcome] += number


class Running:
    """A service behind a real socket, and what it reported."""

    def __init__(self, service: Service, reports: Reports) -> None:
        self.service = service
        self.reports = reports
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen()  # so that who asks before the thread has come so far waits, and is not refused
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(create_app(service), log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()

    def client(self, **options: object) -> OpenAI:
        fields = {"base_url": f"{self.url}/v1", "api_key": "any", "max_retries": 0, "timeout": 60.0}
        return OpenAI(**(fields | options))  # type: ignore[arg-type]

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(20)
        self.service.close()


@pytest.fixture(scope="session")
def serve_reciter(reciting_target: Target, reciting_config: TargetConfig) -> Callable[..., Running]:
    """Return a function from `ServeArgs` fields to a running service; the caller closes it."""

    def start(accuracy: float = 0.8, **fields: object) -> Running:
        drafter = RecitingDrafter(reciting_target, accuracy=accuracy)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service_module, "load_decoder", lambda config: (reciting_target, drafter))
            reports = Reports()
            args = ServeArgs(config="unused", model=MODEL, **fields)  # type: ignore[arg-type]
            return Running(Service(args, reciting_config, request_observers=[reports]), reports)

    return start


@pytest.fixture(scope="module")
def reciter(serve_reciter: Callable[..., Running]) -> Iterator[Running]:
    """A service with a plain policy and room for eight sequences."""
    running = serve_reciter(methods=("plain", "ddtree"), max_queue=4)
    yield running
    running.close()
