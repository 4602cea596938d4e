"""SlotCache against brute force: plain lists of rows, and fresh prefills of the committed tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft_dist.draft_tree import DraftTree, ancestor_masks
from graft_dist.kv_cache import SlotCache
from graft_dist.target import Target, tree_mask

LAYERS, HEADS, SIZE = 2, 3, 4


class ListCache:
    """The same bookkeeping with one list of rows per slot; rows are [2 * LAYERS, HEADS, SIZE]."""

    def __init__(self) -> None:
        self.slots: list[list[torch.Tensor]] = []


def write(cache: SlotCache, rows: torch.Tensor, positions: torch.Tensor, slots: list[int] | None = None) -> None:
    """Write `rows` [S, R, 2 * LAYERS, HEADS, SIZE] and check the views that the layers get."""
    width = int(positions.max()) + 1
    cache.begin(positions, width, slots)
    for layer in range(LAYERS):
        key, value = rows[:, :, 2 * layer].transpose(1, 2), rows[:, :, 2 * layer + 1].transpose(1, 2)
        seen_key, seen_value = cache.update(key, value, layer)
        assert seen_key.shape == seen_value.shape == (rows.shape[0], HEADS, width, SIZE)
        for slot in range(rows.shape[0]):
            assert torch.equal(seen_key[slot][:, positions[slot]], key[slot])
            assert torch.equal(seen_value[slot][:, positions[slot]], value[slot])


def check_equal(cache: SlotCache, reference: ListCache) -> None:
    assert cache.num_live == len(reference.slots)
    assert cache.lengths == [len(rows) for rows in reference.slots]
    for slot, rows in enumerate(reference.slots):
        keys, values = cache.rows(slot)
        for position, row in enumerate(rows):
            assert torch.equal(keys[:, :, position], row[0::2])
            assert torch.equal(values[:, :, position], row[1::2])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), limit=st.sampled_from([None, 40 * 2 * LAYERS * HEADS * SIZE * 4]))
def test_any_interleaving_equals_lists_of_rows(data: st.DataObject, limit: int | None) -> None:
    cache = SlotCache(LAYERS, HEADS, SIZE, 4, 64, torch.float32, initial_length=2, limit_bytes=limit)
    reference = ListCache()
    random = torch.Generator().manual_seed(0)
    for _ in range(data.draw(st.integers(1, 25))):
        choices = ["add"] if len(reference.slots) < 4 else []
        choices += ["tree", "prefill", "remove", "swap"] if reference.slots else []
        operation = data.draw(st.sampled_from(choices))
        live = len(reference.slots)
        if operation == "add":
            assert cache.add() == live
            reference.slots.append([])
        elif operation == "tree":
            # All slots at once, or the first few (the rest are being prefilled), padded to the widest.
            num_slots, num_rows = data.draw(st.integers(1, live)), data.draw(st.integers(1, 6))
            rows = torch.rand(num_slots, num_rows, 2 * LAYERS, HEADS, SIZE, generator=random)
            lengths = torch.tensor(cache.lengths[:num_slots])
            write(cache, rows, lengths[:, None] + torch.arange(num_rows))
            kept = [sorted(data.draw(st.sets(st.integers(0, num_rows - 1)))) for _ in range(num_slots)]
            cache.keep([[int(lengths[slot]) + node for node in nodes] for slot, nodes in enumerate(kept)])
            for slot, nodes in enumerate(kept):
                reference.slots[slot] += [rows[slot, node] for node in nodes]
        elif operation == "prefill":
            slots = data.draw(st.lists(st.integers(0, live - 1), min_size=1, max_size=live, unique=True))
            num_rows = data.draw(st.integers(1, 6))
            counts = [data.draw(st.integers(0, num_rows)) for _ in slots]
            rows = torch.rand(len(slots), num_rows, 2 * LAYERS, HEADS, SIZE, generator=random)
            starts = torch.tensor([cache.lengths[slot] for slot in slots])
            write(cache, rows, starts[:, None] + torch.arange(num_rows), slots)
            cache.advance(slots, counts)
            for i, slot in enumerate(slots):
                reference.slots[slot] += list(rows[i, : counts[i]])
        elif operation == "remove":
            slot = data.draw(st.integers(0, live - 1))
            assert cache.remove(slot) == (live - 1 if slot != live - 1 else None)
            reference.slots[slot] = reference.slots[-1]
            reference.slots.pop()
        else:
            first, second = data.draw(st.integers(0, live - 1)), data.draw(st.integers(0, live - 1))
            cache.swap(first, second)
            swapped = reference.slots
            swapped[first], swapped[second] = swapped[second], swapped[first]
        check_equal(cache, reference)


def random_tree(random: np.random.Generator, num_rows: int, vocab_size: int) -> DraftTree:
    parents = np.array([-1, *(random.integers(0, row) for row in range(1, num_rows))], np.int32)
    depths = np.zeros(num_rows, np.int32)
    for row in range(1, num_rows):
        depths[row] = depths[parents[row]] + 1
    tokens = random.integers(0, vocab_size, num_rows).astype(np.int32)
    return DraftTree(tokens, parents, depths, np.zeros(num_rows, np.float32), np.full(num_rows, -1, np.int32))


def verify(target: Target, cache: SlotCache, trees: list[DraftTree]) -> torch.Tensor:
    """One forward over the trees of slots 0 .. len(trees) - 1; returns the logits [S, R, V]."""
    num_rows = max(tree.num_nodes + 1 for tree in trees)
    lengths = cache.lengths[: len(trees)]
    token_ids = torch.zeros(len(trees), num_rows, dtype=torch.int64)
    positions = torch.tensor(lengths)[:, None].repeat(1, num_rows)
    for slot, tree in enumerate(trees):
        token_ids[slot, : tree.num_nodes + 1] = torch.from_numpy(tree.tokens)
        positions[slot, : tree.num_nodes + 1] += torch.from_numpy(tree.depths)
    width = max(lengths) + num_rows
    seen = ancestor_masks(trees, num_rows)
    mask = tree_mask(lengths, seen, width, target.dtype, target.device, target.groups)
    cache.begin(torch.tensor(lengths)[:, None] + torch.arange(num_rows), width)
    return target.forward(token_ids, positions, mask, cache).logits


@pytest.mark.parametrize("seed", range(4))
def test_equals_a_fresh_prefill(seed: int, tiny_llama: Target) -> None:
    """After adds, tree writes, path keeps and removals, keys and values are those of the committed tokens alone."""
    random = np.random.default_rng(seed)
    cache = tiny_llama.new_cache(max_slots=4, max_length=200)
    committed: list[list[int]] = []
    for _ in range(25):
        draw = random.random()
        if not committed or (draw < 0.25 and len(committed) < 4):
            slot = cache.add()
            tokens = random.integers(0, tiny_llama.vocab_size, random.integers(1, 12)).tolist()
            half = len(tokens) // 2
            for chunk in (tokens[:half], tokens[half:]):
                if chunk:
                    tiny_llama.prefill(chunk, cache, slot)
            committed.append(tokens)
        elif draw < 0.4:
            slot = int(random.integers(len(committed)))
            cache.remove(slot)
            committed[slot] = committed[-1]
            committed.pop()
        else:
            trees = [random_tree(random, int(random.integers(1, 9)), tiny_llama.vocab_size) for _ in committed]
            verify(tiny_llama, cache, trees)
            paths = [[0, *tree.path(int(random.integers(tree.num_nodes + 1)))] for tree in trees]
            cache.keep([[length + node for node in path] for length, path in zip(cache.lengths, paths, strict=True)])
            for slot, (tree, path) in enumerate(zip(trees, paths, strict=True)):
                committed[slot] = committed[slot] + tree.tokens[path].tolist()
    assert cache.lengths == [len(tokens) for tokens in committed]
    for slot, tokens in enumerate(committed):
        fresh = tiny_llama.new_cache(1, 200)
        fresh.add()
        tiny_llama.prefill(tokens, fresh, 0)
        for ours, theirs in zip(cache.rows(slot), fresh.rows(0), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_memory() -> None:
    cache = SlotCache(2, 3, 4, max_slots=8, max_length=100, dtype=torch.bfloat16, initial_length=16)
    assert cache.bytes == 0
    assert cache.bytes_per_token == 2 * 2 * 3 * 4 * 2
    cache.add()
    assert cache.bytes == 16 * cache.bytes_per_token
    cache.reserve(1, 17)
    assert cache.bytes == 32 * cache.bytes_per_token, "grown by doubling"
    cache.reserve(3, 90)
    assert cache.bytes == 3 * 90 * cache.bytes_per_token, "doubled slots and rows were not enough"
    cache.reserve(3, 120)
    assert cache.bytes == 3 * 120 * cache.bytes_per_token, "scratch rows beyond max_length are allowed"


def test_memory_limit_grows_exactly() -> None:
    cache = SlotCache(1, 1, 2, max_slots=8, max_length=1000, dtype=torch.float32, initial_length=8)
    cache.limit_bytes = 50 * cache.bytes_per_token
    cache.reserve(1, 30)
    assert cache.bytes == 30 * cache.bytes_per_token
    cache.reserve(1, 40)
    assert cache.bytes == 40 * cache.bytes_per_token


def test_refusals() -> None:
    cache = SlotCache(1, 1, 2, max_slots=1, max_length=8, dtype=torch.float32)
    with pytest.raises(ValueError, match="slot 0 is not live"):
        cache.remove(0)
    cache.add()
    with pytest.raises(ValueError, match="at most 1"):
        cache.add()
    with pytest.raises(ValueError, match="1 slots are live"):
        cache.begin(torch.zeros(2, 1, dtype=torch.int64), 1)


def test_views_share_memory_with_the_cache() -> None:
    """No copy per layer: what `update` returns is the cache itself."""
    cache = SlotCache(1, 1, 2, max_slots=2, max_length=8, dtype=torch.float32)
    cache.add()
    cache.begin(torch.tensor([[0]]), 1)
    key, _ = cache.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0)
    cache.advance([0], [1])
    assert key.data_ptr() == cache.rows(0)[0].data_ptr()
