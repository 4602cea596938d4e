"""Training a drafter: the same computation as drafting, blocks that do not see each other, losses by hand, resuming."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graft_dist.drafter import DFlashDrafter, DFlashModel, DrafterConfig, load_drafter
from graft_dist.errors import DrafterError
from graft_dist.learning.drafter import (
    IGNORED,
    Answer,
    DistillationLoss,
    DrafterTrainer,
    DrafterTraining,
    Lesson,
    TrainingVocabulary,
    block_hidden,
    block_labels,
    block_loss,
    count_hits,
    draw_anchors,
    initial_model,
    learning_rate,
    order,
    score_of,
    teach,
)
from graft_dist.target import Target


def config_for(target: Target, **changes: Any) -> DrafterConfig:
    fields: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "vocab_size": target.vocab_size, "block_size": 5, "num_target_layers": target.num_layers, "mask_token_id": 0,
        "target_layer_ids": (1, 3, 6),
    }  # fmt: skip
    return DrafterConfig(**(fields | changes))


def random_answer(target: Target, seed: int, prompt: int = 9, output: int = 20) -> Answer:
    rng = np.random.default_rng(seed)
    return Answer(tuple(rng.integers(3, target.vocab_size, prompt)), tuple(rng.integers(3, target.vocab_size, output)))


def greedy_answer(target: Target, seed: int, output: int = 24) -> Answer:
    prompt = np.random.default_rng(seed).integers(3, target.vocab_size, 6).tolist()
    tokens = list(prompt)
    for _ in range(output):
        logits = target.read(torch.tensor(tokens), (), len(tokens) - 1).logits
        tokens.append(int(logits.argmax()))
    return Answer(tuple(prompt), tuple(tokens[len(prompt) :]))


def random_model(target: Target) -> DFlashModel:
    torch.manual_seed(0)
    model = DFlashModel(config_for(target))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_training_and_decoding_give_the_same_logits(tiny_llama: Target) -> None:
    model = random_model(tiny_llama)
    lesson = teach(tiny_llama, random_answer(tiny_llama, 1), model.config.target_layer_ids, 4)
    anchors = torch.tensor([9, 10, 14, 22, 27])
    hidden = block_hidden(model, tiny_llama.embed, lesson, anchors)
    drafter = DFlashDrafter(model, tiny_llama, "test")
    for row, anchor in enumerate(anchors.tolist()):
        cache = drafter.new_cache(max_slots=1, max_length=64)
        cache.add()
        features = lesson.features[None, :anchor]
        proposal = drafter.propose(cache, features, [anchor], [int(lesson.tokens[anchor])], num_candidates=4)
        torch.testing.assert_close(hidden[row], proposal.hidden[0], atol=1e-4, rtol=1e-4)
        logits = tiny_llama.lm_head(hidden[row]).log_softmax(dim=-1)
        chosen = torch.from_numpy(proposal.candidate_ids[0].astype(np.int64))
        np.testing.assert_allclose(logits.gather(1, chosen).detach(), proposal.log_probs[0], atol=1e-4)


def test_blocks_do_not_see_each_other(tiny_llama: Target) -> None:
    """Another token at one block's anchor, or another set of anchors, leaves the other blocks as they were."""
    model = random_model(tiny_llama)
    lesson = teach(tiny_llama, random_answer(tiny_llama, 2), model.config.target_layer_ids, 4)
    anchors = torch.tensor([9, 11, 12, 20])
    before = block_hidden(model, tiny_llama.embed, lesson, anchors)
    tokens = lesson.tokens.clone()
    tokens[11] = (tokens[11] + 1) % tiny_llama.vocab_size
    after = block_hidden(model, tiny_llama.embed, replace(lesson, tokens=tokens), anchors)
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert not torch.allclose(before[1], after[1])
    fewer = block_hidden(model, tiny_llama.embed, lesson, anchors[[0, 3]])
    torch.testing.assert_close(fewer, before[[0, 3]], atol=1e-5, rtol=1e-5)


def test_an_anchor_sees_only_features_before_it(tiny_llama: Target) -> None:
    model = random_model(tiny_llama)
    lesson = teach(tiny_llama, random_answer(tiny_llama, 3), model.config.target_layer_ids, 4)
    anchors = torch.tensor([12, 16])
    before = block_hidden(model, tiny_llama.embed, lesson, anchors)
    features = lesson.features.clone()
    features[12:] += 1.0
    after = block_hidden(model, tiny_llama.embed, replace(lesson, features=features), anchors)
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1])


def test_labels_by_hand() -> None:
    tokens = torch.tensor([50, 51, 52, 53, 54])
    labels = block_labels(tokens, torch.tensor([1, 3]), depth=3)
    assert labels.tolist() == [[52, 53, 54], [54, IGNORED, IGNORED]]


def test_the_lesson_holds_what_the_target_would_say(tiny_llama: Target) -> None:
    answer = greedy_answer(tiny_llama, 4)
    lesson = teach(tiny_llama, answer, (1, 3), 4)
    assert lesson.features.shape == (len(lesson.tokens), 64)
    said = lesson.teacher_ids[lesson.prompt_length :, 0]
    assert said.tolist() == list(answer.output_token_ids)
    assert bool((lesson.teacher_log_probs[lesson.prompt_length :] <= 0).all())


def test_anchors_lie_in_the_answer_and_leave_a_label(tiny_llama: Target) -> None:
    lesson = teach(tiny_llama, random_answer(tiny_llama, 5, prompt=7, output=6), (1,), 2)
    anchors = draw_anchors(lesson, 64, np.random.default_rng(0))
    assert anchors.tolist() == [7, 8, 9, 10, 11]
    assert len(draw_anchors(lesson, 3, np.random.default_rng(0))) == 3


def test_the_fused_loss_equals_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistillationLoss, "ROWS", 4)
    torch.manual_seed(0)
    hidden = torch.randn(10, 6, dtype=torch.float32, requires_grad=True)
    head, bias = torch.randn(15, 6), torch.randn(15)
    columns, weights = torch.randint(15, (10, 3)), torch.rand(10, 3)
    DistillationLoss.apply(hidden, head, bias, columns, weights).backward()
    fused = hidden.grad
    plain = hidden.detach().clone().requires_grad_(True)
    log_probs = (plain @ head.T + bias).log_softmax(dim=-1)
    expected = -(weights * log_probs.gather(1, columns)).sum()
    expected.backward()
    loss = DistillationLoss.apply(hidden, head, bias, columns, weights)
    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(fused, plain.grad, atol=1e-5, rtol=1e-4)


def test_the_block_loss_by_hand() -> None:
    """One block of depth 2 whose second label is behind the end: weight 1 for depth 1, half soft, half hard."""
    head = torch.eye(4)
    lesson = Lesson(
        tokens=torch.tensor([0, 1, 2]),
        prompt_length=1,
        features=torch.zeros(3, 4),
        teacher_ids=torch.tensor([[0, 0], [1, 2], [2, 3]], dtype=torch.int32),
        teacher_log_probs=torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.75, 0.25]]).log(),
    )
    hidden = torch.tensor([[[0.0, 0.0, 1.0, 0.0], [9.0, 0.0, 0.0, 0.0]]])
    vocabulary = TrainingVocabulary(torch.arange(4), torch.empty(0, dtype=torch.int64))
    training = DrafterTraining(steps=1, soft_weight=0.5)
    loss = block_loss(hidden, lesson, torch.tensor([1]), head, vocabulary, training, np.random.default_rng(0))
    log_probs = torch.tensor([0.0, 0.0, 1.0, 0.0]).log_softmax(dim=0)
    expected = -(0.5 * (0.75 * log_probs[2] + 0.25 * log_probs[3]) + 0.5 * log_probs[2])
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_the_sampled_vocabulary_holds_what_is_wanted_and_corrects_for_the_rest() -> None:
    answers = [Answer((1,), (5, 5, 5, 7, 7, 9))]
    vocabulary = TrainingVocabulary.of(answers, vocab_size=100, core_size=2)
    assert vocabulary.core.tolist() == [5, 7]
    tokens, bias = vocabulary.draw(torch.tensor([42, 5]), 10, np.random.default_rng(0))
    assert {5, 7, 42} <= set(tokens.tolist()) and len(set(tokens.tolist())) == len(tokens)
    num_drawn = int((bias != 0).sum())
    assert float(bias.exp().sum()) == pytest.approx(100, rel=1e-4)
    assert num_drawn in (9, 10)


def test_scores_by_hand(tiny_llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    assert score_of(torch.tensor([10.0, 15.0, 30.0, 8.0, 5.0], dtype=torch.float64)).chain_mat == 2.5
    assert score_of(torch.tensor([10.0, 15.0, 30.0, 8.0, 5.0], dtype=torch.float64)).depth_accuracy == (0.8, 0.5)


def test_the_order_is_a_function_of_seed_epoch_and_position() -> None:
    training = DrafterTraining(steps=9, sequences_per_step=8)
    whole = list(order(40, training, 0))
    assert whole[4:] == list(order(40, training, 4))
    first_epoch = [index for batch in whole[:5] for epoch, index in batch]
    assert sorted(first_epoch) == list(range(40))
    assert {epoch for batch in whole[5:] for epoch, _ in batch} == {1}
    assert [index for batch in whole[5:] for _, index in batch] != first_epoch[:32]
    assert all(index % 8 == position % 8 for batch in whole for position, (_, index) in enumerate(batch))


def test_the_schedule_warms_up_and_ends_at_zero() -> None:
    training = DrafterTraining(steps=100, warmup_steps=10, decay_fraction=0.5, learning_rate=1.0)
    assert [learning_rate(step, training) for step in (0, 9, 50, 75, 100)] == [0.1, 1.0, 1.0, 0.5, 0.0]


def small_run(target: Target, folder: Path, steps: int, first_seed: int = 0, **changes: Any) -> DrafterTrainer:
    training = DrafterTraining(
        steps=steps, sequences_per_step=8, anchors_per_sequence=8, warmup_steps=2, learning_rate=3e-3,
        teacher_top_k=4, evaluate_every=2, checkpoint_every=2, **changes,
    )  # fmt: skip
    answers = [greedy_answer(target, seed) for seed in range(first_seed, first_seed + 16)]
    return DrafterTrainer(target, config_for(target), training, answers[2:], answers[:2], folder)


def test_a_resumed_run_equals_an_uninterrupted_one(tiny_llama: Target, tmp_path: Path) -> None:
    whole = small_run(tiny_llama, tmp_path / "whole", 6)
    score = whole.run()
    assert score is not None and whole.step == 6
    first = small_run(tiny_llama, tmp_path / "parts", 6)
    stopped = []

    def stop_at_four(row: dict[str, Any]) -> None:
        stopped.append(row["step"])
        if row["step"] == 4:
            first._save()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(stop_at_four)
    second = small_run(tiny_llama, tmp_path / "parts", 6)
    assert second.step == 4
    second.run()
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], tensor, atol=1e-6, rtol=1e-5)
    assert [json.loads(line)["step"] for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()] == [
        2,
        4,
        6,
    ]
    load_drafter(tmp_path / "parts" / "drafter", tiny_llama)
    assert len(list((tmp_path / "parts").glob("state-*"))) == 1


def test_training_learns_and_another_recipe_is_refused(tiny_llama: Target, tmp_path: Path) -> None:
    trainer = small_run(tiny_llama, tmp_path, 30)
    before = score_of(count_hits(trainer.model, tiny_llama, trainer.held_out))
    rows: list[dict[str, Any]] = []
    trainer.run(rows.append)
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert before.chain_mat >= 1.0
    with pytest.raises(DrafterError, match="another recipe"):
        small_run(tiny_llama, tmp_path, 30, depth_gamma=7.0)


def test_other_answers_are_refused_also_when_they_are_as_many(tiny_llama: Target, tmp_path: Path) -> None:
    small_run(tiny_llama, tmp_path, 2).run()
    with pytest.raises(DrafterError, match="other answers"):
        small_run(tiny_llama, tmp_path, 4, first_seed=1)


def test_a_resumed_run_writes_no_step_twice(tiny_llama: Target, tmp_path: Path) -> None:
    small_run(tiny_llama, tmp_path, 2).run()
    log = tmp_path / "log.jsonl"
    row = json.loads(log.read_text())
    # As a process leaves it that is killed behind its last checkpoint.
    log.write_text(log.read_text() + json.dumps(row | {"step": 4}) + "\n" + json.dumps(row | {"step": 6})[:30])
    small_run(tiny_llama, tmp_path, 4).run()
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [2, 4]


def test_features_beyond_the_cache_limit_are_computed_again(tiny_llama: Target, tmp_path: Path) -> None:
    kept = small_run(tiny_llama, tmp_path / "a", 2)
    forgetful = small_run(tiny_llama, tmp_path / "b", 2, feature_cache_bytes=0)
    kept.run()
    forgetful.run()
    assert kept.cache.num_bytes > 0 and forgetful.cache.num_bytes == 0
    for name, tensor in kept.model.state_dict().items():
        assert torch.equal(forgetful.model.state_dict()[name], tensor)


def test_nothing_to_learn_from_is_said(tiny_llama: Target, tmp_path: Path) -> None:
    training = DrafterTraining(steps=1)
    for answers, message in (([], "no answers"), ([Answer((1,), (2,))], "two tokens or more")):
        with pytest.raises(DrafterError, match=message):
            DrafterTrainer(tiny_llama, config_for(tiny_llama), training, answers, [], tmp_path)


def test_a_sequence_that_is_not_finite_is_set_aside(
    tiny_llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = small_run(tiny_llama, tmp_path, 2)
    read = tiny_llama.read

    def broken(token_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = read(token_ids, *args, **kwargs)
        return replace(output, features=output.features * float("nan")) if int(token_ids[0]) % 2 else output

    monkeypatch.setattr(tiny_llama, "read", broken)
    trainer.run()
    assert trainer.cache.num_set_aside > 0
    assert all(bool(torch.isfinite(parameter).all()) for parameter in trainer.model.parameters())


def test_a_drafter_of_the_targets_own_shapes_starts_from_its_last_layers(tiny_llama: Target) -> None:
    weights = initial_model(config_for(tiny_llama), tiny_llama, seed=0).state_dict()
    last = tiny_llama.decoder_layers[-1].state_dict()
    assert torch.equal(weights["layers.1.mlp.up_proj.weight"], last["mlp.up_proj.weight"])
    other = initial_model(config_for(tiny_llama, intermediate_size=64), tiny_llama, seed=0).state_dict()
    assert other["layers.1.mlp.up_proj.weight"].shape == (64, 32)
