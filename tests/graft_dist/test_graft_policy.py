"""The saved policy: whole through a round trip, refused in one sentence when anything is wrong, the same trees."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graft_dist.budget import (
    AcceptanceGain,
    DraftState,
    FixedBudget,
    PowerGain,
    RawProbabilities,
    StateCalibration,
    UtilityBudget,
)
from graft_dist.draft_tree import build_tree
from graft_dist.edge_scorer import MarginalScorer, TdesScorer, fold_projection, hidden_projection, unfold_projection
from graft_dist.errors import PolicyError
from graft_dist.hardware import describe_hardware
from graft_dist.policy import GraftPolicy, shipped_policy
from graft_dist.target import Target
from tests.graft_dist.policies import CURVE, make_policy, random_network

SIZE, DEPTH, VOCAB = 12, 3, 40
STATE = DraftState(conf=0.4, degen=0.1, hist=0.0, context_length=10, max_budget=99, sequence_key=1, round_index=0)

GAINS: list[dict[str, Any]] = [
    {"gain": AcceptanceGain(RawProbabilities()), "form": "ratio"},
    {"gain": AcceptanceGain(StateCalibration((0.5, -0.25, 0.0), (-2.0, 0.0), (0.1, 0.8)))},
    {"kind": "saba", "gain": PowerGain((0.1, 0.2, 0.3, 0.4), (0.5, 0.6, 0.7, 0.8), 3.0)},
    {"kind": "fixed", "gain": None, "fixed_budget": 7, "cost_curves": {}, "reading": "sum"},
]


def draft(num_hidden: int) -> tuple[Any, Any, Any, torch.Tensor]:
    rng = np.random.default_rng(0)
    ids = np.stack([[rng.permutation(VOCAB)[:5] for _ in range(DEPTH)]]).astype(np.int32)
    log_probs = np.log(rng.dirichlet(np.ones(6), (1, DEPTH))[..., :5]).astype(np.float32)
    return np.array([3]), ids, log_probs, torch.from_numpy(rng.normal(0, 1, (1, DEPTH, num_hidden))).float()


def embeddings() -> torch.Tensor:
    return torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("changes", [{}, *GAINS], ids=["piecewise", "raw", "state", "saba", "fixed"])
@pytest.mark.parametrize("gate_hidden", [0, 7])
def test_a_round_trip_changes_nothing(changes: dict[str, Any], gate_hidden: int, tmp_path: Path) -> None:
    policy = make_policy(random_network(SIZE, DEPTH, gate_hidden, reliance=gate_hidden > 0), **changes)
    assert policy.save(tmp_path / "policy") == tmp_path / "policy"
    again = GraftPolicy.load(tmp_path / "policy")
    for name in GraftPolicy.__dataclass_fields__:
        if name != "tdes":
            assert getattr(again, name) == getattr(policy, name), name
    assert again.tdes is not None and policy.tdes is not None
    assert again.tdes.config == policy.tdes.config
    for name, values in policy.tdes.state_dict().items():
        torch.testing.assert_close(again.tdes.state_dict()[name], values, rtol=0, atol=0)
    assert again.fingerprint == policy.fingerprint and len(policy.fingerprint) == 16
    scores = [one.scorer(embeddings()).score(*draft(gate_hidden)) for one in (policy, again)]
    np.testing.assert_array_equal(*scores)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"], "nothing is left aside"


def test_a_policy_without_a_scorer_and_a_second_save(tmp_path: Path) -> None:
    make_policy(random_network(SIZE, DEPTH)).save(tmp_path / "policy")
    policy = make_policy(None)
    policy.save(tmp_path / "policy")
    assert [path.name for path in (tmp_path / "policy").iterdir()] == ["policy.json"]
    assert isinstance(GraftPolicy.load(tmp_path / "policy").scorer(embeddings()), MarginalScorer)


def test_the_fingerprint_is_of_all_that_is_saved() -> None:
    policy = make_policy(random_network(SIZE, DEPTH))
    others = [
        make_policy(random_network(SIZE, DEPTH, seed=2)),
        make_policy(random_network(SIZE, DEPTH), metrics={"mat": 2.6}),
        make_policy(random_network(SIZE, DEPTH), max_budget=21),
        make_policy(None),
    ]
    assert len({one.fingerprint for one in (policy, *others)}) == 5
    assert make_policy(random_network(SIZE, DEPTH)).fingerprint == policy.fingerprint


def test_the_shipped_policy_is_the_one_of_its_card(tmp_path: Path) -> None:
    folder = shipped_policy("smollm2-135m")
    assert folder is not None
    shipped = GraftPolicy.load(folder)
    assert f"| policy | `{shipped.fingerprint}` |" in (folder / "README.md").read_text()
    assert len(shipped.data.cost_run_ids) > 0
    shipped.save(tmp_path / "policy")
    assert (tmp_path / "policy" / "policy.json").read_text() == (folder / "policy.json").read_text()


def test_a_policy_that_does_not_name_the_runs_of_its_costs_loads_and_keeps_its_fingerprint(tmp_path: Path) -> None:
    before = make_policy(None)
    folder = before.save(tmp_path / "policy")
    edited(folder, lambda content: content["data"].pop("cost_run_ids", None))
    policy = GraftPolicy.load(folder)
    assert policy.data.cost_run_ids == () and policy.fingerprint == replace(before, data=policy.data).fingerprint
    text = (folder / "policy.json").read_text()
    policy.save(folder)
    assert json.loads((folder / "policy.json").read_text()) == json.loads(text)


def test_another_target_or_drafter_is_refused_with_both_sides() -> None:
    policy = make_policy(None)
    policy.check("t" * 64, "d" * 16)
    with pytest.raises(PolicyError, match=r"^the policy was fitted with target t{12}, this target is u{12}: use"):
        policy.check("u" * 64, "d" * 16)
    with pytest.raises(PolicyError, match=r"fitted with drafter dddddddddddd, this drafter is eeeeeeeeeeee"):
        policy.check("t" * 64, "e" * 16)
    with pytest.raises(PolicyError, match=r"fitted with drafter dddddddddddd, and there is no drafter"):
        policy.check("t" * 64, None)


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((folder / "policy.json").read_text())
    change(content)
    (folder / "policy.json").write_text(json.dumps(content))


def tensors_edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "scorer.safetensors")
    change(tensors)
    save_file(tensors, folder / "scorer.safetensors")


BROKEN: list[tuple[str, Callable[[Path], object], str]] = [
    ("no folder", lambda p: p.rename(p.with_name("gone")), "holds no policy.json"),
    ("no json", lambda p: (p / "policy.json").unlink(), "holds no policy.json"),
    ("half a json", lambda p: (p / "policy.json").write_text('{"slug": '), "cannot be read as JSON"),
    ("a list", lambda p: (p / "policy.json").write_text("[]"), "schema version None"),
    ("newer", lambda p: edited(p, lambda c: c.update(schema_version=9)), "schema version 9; this program reads"),
    ("NaN", lambda p: edited(p, lambda c: c["metrics"].update(mat=float("nan"))), "NaN is not a number"),
    ("infinite", lambda p: (p / "policy.json").write_text(
        (p / "policy.json").read_text().replace("2.5", "1e999")), "metrics.mat is wrong"),
    ("unknown key", lambda p: edited(p, lambda c: c.update(mood=1)), "mood is wrong"),
    ("missing key", lambda p: edited(p, lambda c: c.pop("gain")), "gain is wrong"),
    ("wrong type", lambda p: edited(p, lambda c: c.update(max_budget="20")), "max_budget is wrong"),
    ("no such gain", lambda p: edited(p, lambda c: c["gain"].update(kind="log")), "gain is wrong"),
    ("falling curve", lambda p: edited(p, lambda c: next(iter(c["cost_curves"].values())).update(
        round_ms=[10, 9, 8, 7])), "must not fall"),
    ("gain of another kind", lambda p: edited(p, lambda c: c.update(kind="saba")), "kind 'saba' does not go with"),
    ("no tensors", lambda p: (p / "scorer.safetensors").unlink(), "scorer.safetensors is missing"),
    ("no safetensors", lambda p: (p / "scorer.safetensors").write_bytes(b"nonsense"), "cannot be read as safetensors"),
    ("missing", lambda p: tensors_edited(p, lambda t: t.pop("bias")), "missing bias"),
    ("extra", lambda p: tensors_edited(p, lambda t: t.update(extra=torch.zeros(2))), "unknown extra"),
    ("misshapen", lambda p: tensors_edited(p, lambda t: t.update(bias=torch.zeros(3))),
     r"bias is \[3\] where the configuration gives \[8\]"),
    ("NaN weight", lambda p: tensors_edited(p, lambda t: t["bias"].fill_(torch.nan)), "bias holds values that are not"),
    ("other weights", lambda p: tensors_edited(p, lambda t: t["bias"].fill_(1.0)), "is not the one that"),
    ("another shape", lambda p: edited(p, lambda c: c["scorer"].update(width=9)), r"mix_parent is \[8, 6\] where"),
    ("scorer unknown to the json", lambda p: edited(p, lambda c: c.update(scorer=None)), "knows of no scorer"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "damage", "sentence"), BROKEN, ids=[case[0] for case in BROKEN])
def test_anything_wrong_is_one_sentence(
    what: str, damage: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    folder = make_policy(random_network(SIZE, DEPTH)).save(tmp_path / "policy")
    GraftPolicy.load(folder)
    damage(folder)
    with pytest.raises(PolicyError, match=sentence) as raised:
        GraftPolicy.load(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slug": "a/b"}, "slug is 'a/b'"),
        ({"num_candidates": 0}, "at least 1"),
        ({"kind": "fixed"}, "kind 'fixed' does not go with"),
        ({"kind": "fixed", "gain": None, "fixed_budget": 30}, "fixed budget is 30"),
        ({"form": "sum"}, "form 'sum'"),
        ({"reading": "product"}, "reading 'product'"),
    ],
)
def test_parts_that_contradict_each_other(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        make_policy(None, **changes)


def test_what_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    network = random_network(SIZE, DEPTH)
    network.bias.data[0] = torch.nan
    with pytest.raises(PolicyError, match="not all finite"):
        make_policy(network).save(tmp_path / "policy")
    with pytest.raises(PolicyError, match="cannot be written as JSON"):
        make_policy(None, metrics={"mat": float("inf")}).save(tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []


def test_it_decodes_as_its_parts_do(tiny_llama: Target) -> None:
    network = random_network(tiny_llama.hidden_size, DEPTH)
    here = describe_hardware("float32", tiny_llama.device)
    fitting = {"target_fingerprint": tiny_llama.fingerprint, "cost_curves": {here: CURVE}}
    policy = make_policy(network, **fitting)
    first, second = (policy.decoding_policy(tiny_llama, None) for _ in range(2))
    assert (first.name, first.num_candidates) == ("graft", 4)
    assert first.budget is not second.budget, "each has running averages of its own"
    assert isinstance(policy.gain, AcceptanceGain)
    budget = UtilityBudget(policy.gain, CURVE, 20, "price")
    roots, ids, log_probs, _ = draft(0)
    scores = first.scorer.score(roots, ids, log_probs)
    np.testing.assert_array_equal(
        scores, TdesScorer(network, tiny_llama.embedding_weight, "conditional").score(roots, ids, log_probs)
    )
    tree = build_tree(3, ids[0], scores[0], first.budget.limits([STATE])[0])
    assert first.budget.choose([tree], [STATE]) == budget.choose([tree], [STATE])
    with pytest.raises(PolicyError, match=f"this target is {tiny_llama.fingerprint[:12]}"):
        make_policy(network).decoding_policy(tiny_llama, None)
    unseen = make_policy(network, **{**fitting, "cost_curves": {"a box": CURVE}})
    with pytest.raises(PolicyError, match="needs a cost curve of this hardware, and knows the hardware: a box"):
        unseen.decoding_policy(tiny_llama, None)
    assert unseen.decoding_policy(tiny_llama, None, replace(CURVE, token_ms=0.0)).budget is not None
    fixed = make_policy(None, kind="fixed", gain=None, fixed_budget=7, **{**fitting, "cost_curves": {}})
    assert fixed.decoding_policy(tiny_llama, None).budget == FixedBudget(7)


def test_replay_scores_projected_hidden_states_alike() -> None:
    """A gate fitted on projected states, folded for decoding, is the same gate again for replay."""
    projection = hidden_projection("d" * 16, 11, 4)
    assert torch.allclose(projection.T @ projection, torch.eye(4), atol=1e-5)
    torch.testing.assert_close(projection, hidden_projection("d" * 16, 11, 4))
    assert not torch.allclose(projection, hidden_projection("e" * 16, 11, 4))
    fitted = random_network(SIZE, DEPTH, gate_hidden=4)
    policy = make_policy(fold_projection(fitted, projection))
    roots, ids, log_probs, hidden = draft(11)
    whole = policy.scorer(embeddings()).score(roots, ids, log_probs, hidden)
    recorded = policy.replay_scorer(embeddings(), 4).score(roots, ids, log_probs, hidden @ projection)
    np.testing.assert_allclose(whole, recorded, atol=1e-4)
    with pytest.raises(PolicyError, match="recorded without any"):
        policy.replay_scorer(embeddings(), 0)
    for wrong in (0, 12):
        with pytest.raises(PolicyError, match=f"projected to {wrong}"):
            hidden_projection("d", 11, wrong)
    with pytest.raises(PolicyError, match="does not fit a gate"):
        unfold_projection(fitted, projection)


def test_no_policy_ships_for_an_unknown_target() -> None:
    assert shipped_policy("no-such-target") is None
