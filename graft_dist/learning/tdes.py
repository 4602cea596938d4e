"""Fitting the target-distilled edge scorer (TDES) of GRAFT (arXiv 2608.20375) to recorded rounds.

A round teaches in three ways. At every *parent* on the path that the target took, the target's distribution over the
candidates of the next depth is known (KL term). In a *mismatched* round the wanted edge is known, and so are edges that
took its place (pair term). And for every verified *edge* it is known whether its child is what the target wanted after
its parent (cross-entropy term).

Dense rounds have no tree. They teach at the tokens that followed, as far as a tree could have held them, and for pairs
and edges they get the tree that DDTree would have built; what the target wanted off the path is not known there.

Fitting is plain torch; under `torch.distributed` every worker computes its share of each batch, so the result does not
depend on the number of workers beyond rounding. Workers may all hold the same `Lessons`, or each a `Share` of them.

Letters: S rounds, D draft depth, K candidates per depth, H hidden size, N parents, M edges, Q pairs, U tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from graft_dist.draft_tree import build_tree
from graft_dist.edge_scorer import MarginalScorer, TdesNetwork
from graft_dist.errors import PolicyError
from graft_dist.learning.drafter import add_over_workers, worker
from graft_dist.rounds import RoundRecord

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.int64] | npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

Table = TypeVar("Table", "Parents", "Edges", "Pairs")

UNKNOWN = -1
"""Target token of a node whose continuation was not observed."""

_EVALUATION_ROUNDS = 2048  # rounds whose KL is computed at a time


# ---- losses


def kl_loss(log_q: torch.Tensor, f: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return KL( target || softmax_C(log q + f) ) of each parent, [N], from three tensors [N, K].

    `target` is a distribution over the candidates: softmax_C of the target's logits, or one candidate alone.
    """
    log_p = (log_q + f).log_softmax(dim=-1)
    return (torch.xlogy(target, target) - target * log_p).sum(dim=-1)


def pair_loss(f_wanted: torch.Tensor, f_other: torch.Tensor, margin: float) -> torch.Tensor:
    """Return softplus(margin - f(v+) + f(v-)) of each pair, [Q]."""
    return F.softplus(margin - f_wanted + f_other)


def edge_loss(f: torch.Tensor, labels: torch.Tensor, positive_weight: float) -> torch.Tensor:
    """Return -(w1 y log sigmoid(f) + (1 - y) log(1 - sigmoid(f))) of each edge, [M]; `labels` are 0 or 1."""
    return positive_weight * labels * F.softplus(-f) + (1 - labels) * F.softplus(f)


# ---- what rounds teach


@dataclass(frozen=True, eq=False)
class Parents:
    """N parents whose next token's distribution over the candidates is known."""

    rounds: Int64Array  # [N], rising: index of the round
    depths: IntArray  # [N], depth of the children, counted from 0
    tokens: IntArray  # [N]
    targets: Float32Array  # [N, K], the target's distribution over the candidates of that depth
    is_accepted: npt.NDArray[np.bool_]  # [N], on the target's path; elsewhere only its next token is known


@dataclass(frozen=True, eq=False)
class Edges:
    """M edges for which it is known whether the target wanted them."""

    rounds: Int64Array  # [M], rising
    depths: IntArray  # [M], depth of the child, counted from 0
    parents: IntArray  # [M], token
    children: IntArray  # [M], token
    labels: Float32Array  # [M], 1 if the child is the target's next token at the parent, else 0


@dataclass(frozen=True, eq=False)
class Pairs:
    """Q pairs of edges at one depth: column 0 the edge that the target wanted, column 1 one that stood in its place."""

    rounds: Int64Array  # [Q], rising
    depths: IntArray  # [Q], depth of the children, counted from 0
    parents: IntArray  # [Q, 2], tokens
    children: IntArray  # [Q, 2], tokens


@dataclass(frozen=True, eq=False)
class Lessons:
    """What S rounds of one shape [D, K] teach."""

    candidate_ids: IntArray  # [S, D, K]
    log_probs: Float32Array  # [S, D, K]
    hidden: Float32Array | None  # [S, D, H], for scorers with a gate
    parents: Parents
    edges: Edges
    pairs: Pairs

    def __len__(self) -> int:
        return len(self.candidate_ids)


@dataclass(frozen=True, eq=False)
class Share:
    """The rounds of which one worker computes the losses; every round belongs to exactly one worker."""

    lessons: Lessons
    rows: Int64Array  # [n], this worker's rounds in `lessons`
    numbers: Int64Array  # [n], rising: the same rounds' places among the rounds of all workers
    num_rounds: int  # of all workers

    @classmethod
    def of(cls, lessons: Lessons) -> Share:
        """This worker's share where every worker holds all lessons: each so many-th round."""
        rank, num_workers = worker()
        numbers = np.arange(rank, len(lessons), num_workers)
        return cls(lessons, numbers, numbers, len(lessons))

    def rows_of(self, numbers: Int64Array) -> Int64Array:
        """Return the rows, rising, of those of the rounds `numbers` that are this worker's."""
        places = np.minimum(np.searchsorted(self.numbers, numbers), max(len(self.numbers) - 1, 0))
        is_own = self.numbers[places] == numbers if len(self.numbers) > 0 else np.zeros(len(numbers), np.bool_)
        return np.sort(self.rows[places[is_own]])


def lessons_of(
    records: Sequence[RoundRecord], *, dense_budget: int = 64, hidden: Float32Array | None = None
) -> Lessons:
    """Read rounds that drafted, all of one shape [D, K].

    Args:
        records: decoded and dense rounds; rounds that drafted nothing are an error.
        dense_budget: nodes of the tree that DDTree builds for a dense round.
        hidden: [S, D, H] the drafter's hidden states of the same rounds; None takes the recorded ones, where every
            round has them.

    Raises:
        PolicyError: no rounds, rounds of several shapes, or another number of hidden states.
    """
    shapes = {record.candidate_ids.shape for record in records}
    if len(shapes) != 1 or 0 in next(iter(shapes)):
        raise PolicyError(f"an edge scorer learns from drafted rounds of one shape [D, K], not from {sorted(shapes)}")
    if hidden is None:
        hidden = _recorded_hidden(records)
    if hidden is not None and hidden.shape[:2] != (len(records), next(iter(shapes))[0]):
        raise PolicyError(f"hidden states {hidden.shape} do not fit {len(records)} rounds {next(iter(shapes))}")
    found = _Findings(next(iter(shapes))[1])
    for index, record in enumerate(records):
        found.add(index, record, _grown(record, dense_budget))
    return Lessons(
        candidate_ids=np.stack([record.candidate_ids for record in records]).astype(np.int64),
        log_probs=np.stack([record.candidate_log_probs for record in records]).astype(np.float32),
        hidden=hidden,
        parents=found.parents(),
        edges=found.edges(),
        pairs=found.pairs(),
    )


def _recorded_hidden(records: Sequence[RoundRecord]) -> Float32Array | None:
    """The recorded hidden states [S, D, H], or None where a round lacks them or has another number of them."""
    known = [record.hidden for record in records if record.hidden is not None]
    if len(known) < len(records) or len({hidden.shape for hidden in known}) != 1:
        return None
    return np.stack(known).astype(np.float32)


def join_lessons(parts: Sequence[Lessons]) -> Lessons:
    """Return the lessons of all parts as one, in order."""
    if not parts:
        raise PolicyError("there are no lessons to join")
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    hidden = [part.hidden for part in parts if part.hidden is not None]
    if 0 < len(hidden) < len(parts):
        raise PolicyError(f"{len(hidden)} of {len(parts)} parts have hidden states; all or none must have them")
    return Lessons(
        candidate_ids=np.concatenate([part.candidate_ids for part in parts]),
        log_probs=np.concatenate([part.log_probs for part in parts]),
        hidden=np.concatenate(hidden) if hidden else None,
        parents=_join([part.parents for part in parts], starts),
        edges=_join([part.edges for part in parts], starts),
        pairs=_join([part.pairs for part in parts], starts),
    )


def _join(tables: Sequence[Table], starts: Int64Array) -> Table:
    moved = [replace(table, rounds=table.rounds + start) for table, start in zip(tables, starts, strict=True)]
    columns = {
        field.name: np.concatenate([getattr(table, field.name) for table in moved]) for field in fields(tables[0])
    }
    return replace(tables[0], **columns)


@dataclass(frozen=True, eq=False)
class _Grown:
    """A verified tree, or the one DDTree would have verified; node 0 is the root."""

    tokens: Int32Array
    parents: Int32Array
    depths: Int32Array
    wanted: Int32Array  # the target's next token at every node, or `UNKNOWN`
    path: list[int]  # the nodes the target walked through, root included


def _grown(record: RoundRecord, dense_budget: int) -> _Grown:
    if record.kind == "decoded":
        path = [0, *record.accepted.tolist()]
        return _Grown(record.tree_tokens, record.tree_parents, record.tree_depths, record.target_tokens, path)
    scores = MarginalScorer().score(
        np.array([record.root_token]), record.candidate_ids[None], record.candidate_log_probs[None]
    )
    tree = build_tree(record.root_token, record.candidate_ids, scores[0], dense_budget, len(record.followed))
    wanted = np.full(tree.num_nodes + 1, UNKNOWN, np.int32)
    path = [0, *tree.follow(record.followed)]
    for node, token in zip(path, record.followed.tolist(), strict=False):  # the deepest node may have nothing after it
        wanted[node] = token
    return _Grown(tree.tokens, tree.parents, tree.depths, wanted, path)


class _Findings:
    """Rows of the three tables as they are found, round by round."""

    def __init__(self, num_candidates: int) -> None:
        self._parents: list[tuple[int, int, int, bool]] = []
        self._targets: list[Float32Array] = [np.zeros((0, num_candidates), np.float32)]
        self._edges: list[Int64Array] = [np.zeros((0, 5), np.int64)]
        self._pairs: list[tuple[int, int, int, int, int, int]] = []

    def add(self, index: int, record: RoundRecord, tree: _Grown) -> None:
        """Add what round number `index` teaches."""
        self._add_parents(index, record, tree)
        self._add_edges(index, tree)
        self._add_pairs(index, record, tree)

    def _add_parents(self, index: int, record: RoundRecord, tree: _Grown) -> None:
        tokens = _path_tokens(record, tree)
        logits = record.parent_logits[: len(tokens)].astype(np.float32)
        targets = np.exp(logits - logits.max(axis=1, keepdims=True))
        self._targets.append(targets / targets.sum(axis=1, keepdims=True))
        self._parents += [(index, depth, token, True) for depth, token in enumerate(tokens[: len(logits)])]
        if record.kind == "dense":
            return
        on_path = set(tree.path)
        for node, token in enumerate(tree.tokens.tolist()):
            depth = int(tree.depths[node])
            if node in on_path or depth >= len(record.candidate_ids):
                continue
            is_wanted = (record.candidate_ids[depth] == tree.wanted[node])[None]
            if is_wanted.any():
                self._parents.append((index, depth, token, False))
                self._targets.append(is_wanted.astype(np.float32))

    def _add_edges(self, index: int, tree: _Grown) -> None:
        above = tree.parents[1:]
        wanted = tree.wanted[above]
        columns = (tree.depths[1:] - 1, tree.tokens[above], tree.tokens[1:], wanted == tree.tokens[1:])
        rows = np.stack([np.full(len(above), index), *columns], axis=1).astype(np.int64)
        self._edges.append(rows[wanted != UNKNOWN])

    def _add_pairs(self, index: int, record: RoundRecord, tree: _Grown) -> None:
        """Pairs of a mismatched round: the wanted token sits at the next depth, but under other parents."""
        last = tree.path[-1]
        wanted, depth = int(tree.wanted[last]), int(tree.depths[last])
        holders = np.flatnonzero((tree.depths == depth + 1) & (tree.tokens == wanted))
        if wanted == UNKNOWN or record.num_tokens < len(record.accepted) + (record.kind == "decoded"):
            return
        if len(holders) == 0:
            return
        right = int(tree.tokens[last])
        # The same token may also sit elsewhere in the depth above: an edge from it would be the wanted one itself.
        wrong = [token for token in tree.tokens[tree.parents[holders]].tolist() if token != right]
        rivals = tree.tokens[tree.parents == last].tolist() or _best_rival(record, depth, wanted)
        self._pairs += [(index, depth, right, parent, wanted, wanted) for parent in wrong]
        self._pairs += [(index, depth, right, right, wanted, rival) for rival in rivals]

    def parents(self) -> Parents:
        rounds, depths, tokens, is_accepted = np.array(self._parents, np.int64).reshape(-1, 4).T
        return Parents(rounds, depths, tokens, np.concatenate(self._targets), is_accepted == 1)

    def edges(self) -> Edges:
        rounds, depths, parents, children, labels = np.concatenate(self._edges).T
        return Edges(rounds, depths, parents, children, labels.astype(np.float32))

    def pairs(self) -> Pairs:
        columns = np.array(self._pairs, np.int64).reshape(-1, 6)
        return Pairs(columns[:, 0], columns[:, 1], columns[:, 2:4], columns[:, 4:6])


def _path_tokens(record: RoundRecord, tree: _Grown) -> list[int]:
    """The parents on the target's path whose children have candidates; of dense rounds those a tree could hold."""
    depth = len(record.candidate_ids)
    if record.kind == "decoded":
        return tree.tokens[tree.path].tolist()[:depth]
    tokens = [record.root_token]
    for at, token in enumerate(record.followed[: depth - 1].tolist()):
        if token not in record.candidate_ids[at]:
            break
        tokens.append(token)
    return tokens


def _best_rival(record: RoundRecord, depth: int, wanted: int) -> list[int]:
    """The drafter's best candidate at a depth (from 0) that is not the wanted one."""
    order = np.argsort(-record.candidate_log_probs[depth], kind="stable")
    rivals = [int(token) for token in record.candidate_ids[depth][order] if token != wanted]
    return rivals[:1]


# ---- fitting


@dataclass(frozen=True, kw_only=True)
class TdesTraining:
    """How an edge scorer is fitted; every field is part of the run's identity."""

    steps: int = 1500
    """Optimizer steps at most."""
    seed: int = 0
    """Decides the order of the data."""
    rounds_per_step: int = 256
    learning_rate: float = 2e-3
    """Peak rate: constant, then linear to zero over the last `decay_fraction` of the steps."""
    decay_fraction: float = 0.5
    weight_decay: float = 0.01
    kl_weight: float = 1.0
    pair_weight: float = 0.1
    edge_weight: float = 0.3
    margin: float = 1.0
    """The pair term's gamma: how much more the wanted edge should be worth."""
    every_parent: bool = False
    """Whether the KL term also learns from verified parents off the path, where only the target's token is known."""
    evaluate_every: int = 100
    """Steps between two looks at the held-out rounds."""
    patience: int = 5
    """Looks without an improvement after which fitting stops."""

    def __post_init__(self) -> None:
        for name in ("steps", "rounds_per_step", "evaluate_every", "patience"):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("kl_weight", "pair_weight", "edge_weight", "weight_decay", "decay_fraction"):
            if getattr(self, name) < 0:
                raise PolicyError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if not (self.learning_rate > 0 and self.decay_fraction <= 1):
            raise PolicyError("learning_rate must be above 0 and decay_fraction at most 1")


@dataclass(frozen=True)
class Evaluation:
    """One look at the fit."""

    step: int
    """Optimizer steps taken."""
    loss: float
    """Mean training loss since the last look."""
    held_out_kl: float
    """Mean KL over the accepted parents of the held-out rounds."""


@dataclass(frozen=True)
class Fit:
    """What fitting ends with."""

    network: TdesNetwork
    """The weights of the best look."""
    best: Evaluation
    evaluations: tuple[Evaluation, ...]
    """Every look in order; the first is at step 0, with a loss of 0."""


def fit(
    network: TdesNetwork,
    embeddings: torch.Tensor,
    lessons: Lessons,
    held_out: Lessons,
    training: TdesTraining,
    report: Callable[[Evaluation], None] = lambda evaluation: None,
) -> Fit:
    """Fit `network` in place and return a copy with its weights at the lowest held-out KL.

    `embeddings` [V, E] are the target's, frozen. The order of the data is a function of (seed, epoch, position).
    """
    trainer = TdesTrainer(network, embeddings, lessons, held_out, training)
    while not trainer.is_done:
        report(trainer.advance())
    return trainer.result()


class TdesTrainer:
    """One run of fitting, look by look, so that whoever drives it can keep checkpoints in between.

    `state()` and `load_state()` carry everything that a run resumed with the same arguments needs to end the same.
    """

    def __init__(
        self,
        network: TdesNetwork,
        embeddings: torch.Tensor,
        lessons: Lessons | Share,
        held_out: Lessons | Share,
        training: TdesTraining,
    ) -> None:
        self.network, self.embeddings, self.training = network, embeddings, training
        self.share, self.held_out = _share(lessons), _share(held_out)
        _check_lessons(network, self.share, "training")
        _check_lessons(network, self.held_out, "held-out")
        self.step = 0
        self._optimizer = torch.optim.AdamW(_groups(network, training), lr=training.learning_rate)
        self._positive_weight = positive_weight(self.share.lessons.edges)
        self.evaluations = [Evaluation(0, 0.0, self._held_out_kl())]
        self._best_weights = copy.deepcopy(network.state_dict())

    @property
    def best(self) -> Evaluation:
        """The look with the lowest held-out KL; the earlier one of equals."""
        return min(self.evaluations, key=lambda evaluation: evaluation.held_out_kl)

    @property
    def is_done(self) -> bool:
        """Whether the steps are used up, or the last `patience` looks brought nothing."""
        num_since = len(self.evaluations) - 1 - self.evaluations.index(self.best)
        return self.step >= self.training.steps or num_since >= self.training.patience

    def advance(self) -> Evaluation:
        """Train up to the next look and take it."""
        losses = []
        for rounds in batches(self.share.num_rounds, self.training, self.step):
            losses.append(self._train_step(rounds))
            self.step += 1
            if self.step % self.training.evaluate_every == 0:
                break
        evaluation = Evaluation(self.step, sum(losses) / max(len(losses), 1), self._held_out_kl())
        if evaluation.held_out_kl < self.best.held_out_kl:
            self._best_weights = copy.deepcopy(self.network.state_dict())
        self.evaluations.append(evaluation)
        return evaluation

    def result(self) -> Fit:
        """Return the best weights so far, in a network of their own."""
        network = copy.deepcopy(self.network)
        network.load_state_dict(self._best_weights)
        return Fit(network, self.best, tuple(self.evaluations))

    def state(self) -> dict[str, Any]:
        """Return tensors and numbers to resume from, for `torch.save` or a caller's own format."""
        return {
            "step": self.step,
            "network": copy.deepcopy(self.network.state_dict()),
            "best": copy.deepcopy(self._best_weights),
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            "evaluations": [(look.step, look.loss, look.held_out_kl) for look in self.evaluations],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.step = state["step"]
        self.network.load_state_dict(state["network"])
        self._best_weights = copy.deepcopy(state["best"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.evaluations = [Evaluation(*look) for look in state["evaluations"]]

    def _train_step(self, rounds: Int64Array) -> float:
        """Take one optimizer step on a batch of rounds, of which this worker computes its share."""
        lessons, rows = self.share.lessons, self.share.rows_of(rounds)
        terms = batch_terms(self.network, self.embeddings, lessons, rows, self.training, self._positive_weight)
        counts = torch.tensor([float(len(term)) for term in terms], device=self.embeddings.device)
        add_over_workers([counts])
        weights = (self.training.kl_weight, self.training.pair_weight, self.training.edge_weight)
        parts = [
            weight * term.sum() / max(count, 1.0)
            for weight, term, count in zip(weights, terms, counts.tolist(), strict=True)
        ]
        loss = torch.stack(parts).sum()
        self._optimizer.zero_grad(set_to_none=False)
        if loss.requires_grad:
            loss.backward()
        total = loss.detach().clone()
        gradients = [_gradient(parameter) for parameter in self.network.parameters()]
        add_over_workers([*gradients, total])
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.training)
        self._optimizer.step()
        return float(total)

    def _held_out_kl(self) -> float:
        return mean_kl(self.network, self.embeddings, self.held_out.lessons)


def _share(lessons: Lessons | Share) -> Share:
    return lessons if isinstance(lessons, Share) else Share.of(lessons)


def learning_rate(step: int, training: TdesTraining) -> float:
    """Constant, then linear to zero; a function of the step alone, so a resumed run continues it."""
    decay_steps = max(1, round(training.steps * training.decay_fraction))
    return training.learning_rate * min(1.0, (training.steps - step) / decay_steps)


def batches(num_rounds: int, training: TdesTraining, first_step: int) -> Iterator[Int64Array]:
    """Yield each step's rounds: a function of (seed, epoch, position) alone, whatever was done before."""
    size = min(training.rounds_per_step, num_rounds)
    per_epoch = num_rounds // size
    shuffled: tuple[int, Int64Array] = (-1, np.zeros(0, np.int64))
    for step in range(first_step, training.steps):
        epoch, position = divmod(step, per_epoch)
        if shuffled[0] != epoch:
            shuffled = (epoch, np.random.default_rng((training.seed, epoch)).permutation(num_rounds))
        yield shuffled[1][position * size : (position + 1) * size]


def positive_weight(edges: Edges) -> float:
    """Return w1 = edges nobody wanted / edges the target wanted: both classes weigh the same; 1 if one is missing.

    Of all workers' edges together: where all hold the same ones, the ratio is the same.
    """
    counts = torch.tensor([float(edges.labels.sum(dtype=np.float64)), float(len(edges.labels))], dtype=torch.float64)
    add_over_workers([counts])
    num_wanted, num_edges = counts.tolist()
    num_others = num_edges - num_wanted
    return num_others / num_wanted if num_wanted > 0 and num_others > 0 else 1.0


def batch_terms(
    network: TdesNetwork,
    embeddings: torch.Tensor,
    lessons: Lessons,
    rounds: Int64Array,
    training: TdesTraining,
    positive_weight: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the KL [n], pair [q] and edge [m] losses of some rounds (`rounds` rising), each row for itself.

    Terms that weigh 0 are not computed: they come back empty.
    """
    batch = _Batch(network, embeddings, lessons, rounds)
    nothing = embeddings.new_zeros(0, dtype=torch.float32)
    return (
        batch.kl(training.every_parent) if training.kl_weight > 0 else nothing,
        batch.pair(training.margin) if training.pair_weight > 0 else nothing,
        batch.edge(positive_weight) if training.edge_weight > 0 else nothing,
    )


@torch.no_grad()
def mean_kl(network: TdesNetwork, embeddings: torch.Tensor, lessons: Lessons) -> float:
    """Return the mean KL over the accepted parents of all rounds, of all workers together."""
    total, count = 0.0, 0
    for start in range(0, len(lessons), _EVALUATION_ROUNDS):
        rounds = np.arange(start, min(start + _EVALUATION_ROUNDS, len(lessons)))
        losses = _Batch(network, embeddings, lessons, rounds).kl(every_parent=False)
        total, count = total + float(losses.double().sum()), count + len(losses)
    sums = torch.tensor([total, count], dtype=torch.float64)
    add_over_workers([sums])
    return float(sums[0]) / max(float(sums[1]), 1.0)


class _Batch:
    """The losses of some rounds. Each token that occurs is projected once; edges look it up."""

    def __init__(self, network: TdesNetwork, embeddings: torch.Tensor, lessons: Lessons, rounds: Int64Array) -> None:
        self._network, self._lessons, self._rounds = network, lessons, rounds
        self._device = embeddings.device
        parents, edges, pairs = lessons.parents, lessons.edges, lessons.pairs
        self._parent_rows = _rows_of(parents.rounds, rounds)
        self._edge_rows = _rows_of(edges.rounds, rounds)
        self._pair_rows = _rows_of(pairs.rounds, rounds)
        # Children of edges and pairs are candidates of their rounds; parents may be roots as well.
        used = [
            lessons.candidate_ids[rounds].ravel(),
            parents.tokens[self._parent_rows],
            edges.parents[self._edge_rows],
            pairs.parents[self._pair_rows].ravel(),
        ]
        self._tokens = np.unique(np.concatenate(used))
        self._tables = network.token_tables(embeddings[self._tensor(self._tokens)])

    def kl(self, every_parent: bool) -> torch.Tensor:
        table, rows = self._lessons.parents, self._parent_rows
        if not every_parent:
            rows = rows[table.is_accepted[rows]]
        rounds, depths = table.rounds[rows], table.depths[rows]
        children = self._lessons.candidate_ids[rounds, depths]
        f = self._score(rounds[:, None], depths[:, None], table.tokens[rows][:, None], children)
        return kl_loss(self._tensor(self._lessons.log_probs[rounds, depths]), f, self._tensor(table.targets[rows]))

    def pair(self, margin: float) -> torch.Tensor:
        table, rows = self._lessons.pairs, self._pair_rows
        f = self._score(
            table.rounds[rows][:, None], table.depths[rows][:, None], table.parents[rows], table.children[rows]
        )
        return pair_loss(f[:, 0], f[:, 1], margin)

    def edge(self, positive_weight: float) -> torch.Tensor:
        table, rows = self._lessons.edges, self._edge_rows
        f = self._score(table.rounds[rows], table.depths[rows], table.parents[rows], table.children[rows])
        return edge_loss(f, self._tensor(table.labels[rows]), positive_weight)

    def _score(self, rounds: IntArray, depths: IntArray, parents: IntArray, children: IntArray) -> torch.Tensor:
        places = [self._tensor(np.searchsorted(self._tokens, tokens)) for tokens in (parents, children)]
        hidden = None
        if self._network.config.gate_rank > 0 and self._lessons.hidden is not None:
            hidden = self._tensor(self._lessons.hidden[rounds, depths])
        log_q = None
        if self._network.config.reliance:
            above = np.maximum(depths - 1, 0)
            of_parent = np.where(depths > 0, self._log_q(rounds, above, parents), np.float32(0.0))
            log_q = (self._tensor(of_parent), self._tensor(self._log_q(rounds, depths, children)))
        f: torch.Tensor = self._network(self._tables, *places, self._tensor(depths), hidden, log_q)
        return f

    def _log_q(self, rounds: IntArray, depths: IntArray, tokens: IntArray) -> Float32Array:
        """The drafter's log-probabilities of candidates, found by their tokens; 0 for a token that is none."""
        shape = np.broadcast_shapes(rounds.shape, tokens.shape)
        rows = np.broadcast_to(rounds, shape), np.broadcast_to(depths, shape)
        is_token = self._lessons.candidate_ids[rows] == np.broadcast_to(tokens, shape)[..., None]
        return np.where(is_token, self._lessons.log_probs[rows], np.float32(0.0)).sum(axis=-1)

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _rows_of(column: Int64Array, rounds: Int64Array) -> Int64Array:
    """Return the indices at which `column` (rising) holds one of `rounds` (rising)."""
    starts, ends = np.searchsorted(column, rounds, "left"), np.searchsorted(column, rounds, "right")
    lengths = ends - starts
    offsets = np.repeat(starts - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
    return offsets + np.arange(len(offsets))


def _check_lessons(network: TdesNetwork, share: Share, name: str) -> None:
    config, lessons = network.config, share.lessons
    accepted = torch.tensor([float(np.count_nonzero(lessons.parents.is_accepted))], dtype=torch.float64)
    add_over_workers([accepted])
    if float(accepted) == 0:
        raise PolicyError(f"there are no {name} rounds with an accepted parent to fit an edge scorer to")
    if lessons.candidate_ids.shape[1] > config.draft_depth:
        raise PolicyError(
            f"the {name} rounds are {lessons.candidate_ids.shape[1]} deep, the edge scorer knows {config.draft_depth}"
        )
    if config.gate_rank > 0 and (lessons.hidden is None or lessons.hidden.shape[2] != config.hidden_size):
        found = "none" if lessons.hidden is None else str(lessons.hidden.shape[2])
        raise PolicyError(
            f"the edge scorer's gate reads hidden states of {config.hidden_size} numbers, the {name} rounds have "
            f"{found}"
        )


def _groups(network: TdesNetwork, training: TdesTraining) -> list[dict[str, Any]]:
    """Matrices decay; biases, w and the scale do not."""
    parameters = [parameter for parameter in network.parameters() if parameter.numel() > 0]
    return [
        {
            "params": [parameter for parameter in parameters if parameter.dim() == 2],
            "weight_decay": training.weight_decay,
        },
        {"params": [parameter for parameter in parameters if parameter.dim() != 2], "weight_decay": 0.0},
    ]


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
