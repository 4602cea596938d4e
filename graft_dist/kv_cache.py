"""SlotCache: the keys and values of many sequences, preallocated, written in place.

Owns memory and row bookkeeping; knows nothing of tokens, masks or models. One instance serves the target, another the
drafter, with the same slot numbers. It is handed to unmodified transformers models as their cache: they call `update`.

Letters: L layers, S slots, G key/value heads, R rows written at once, W width (columns attended to), d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class SlotCache:
    """Per layer one K and one V tensor [slots, G, length, d], all in one allocation that grows by doubling.

    Live slots are packed at the front: `add` appends one, `remove` moves the last one into the hole. A slot's first
    `lengths[slot]` rows are committed; rows behind them are scratch, where a tree is written until `keep` moves its
    accepted path down. Scratch rows must be finite, so that an additive mask hides them: `clear` a slot where they are
    not.

    `max_length` bounds the doubling, not the writes: a tree near the context limit may need scratch rows beyond it.
    With `limit_bytes`, memory grows to exactly what is asked for when doubling would pass the limit; the caller decides
    whom to admit (see `bytes_for`). While growing, the old and the new memory exist side by side.
    """

    def __init__(  # noqa: PLR0913 - the shape of one allocation, known to the caller by name
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        initial_length: int = 256,
        limit_bytes: int | None = None,
    ) -> None:
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.max_slots = max_slots
        self.max_length = max_length
        self.dtype = dtype
        self.device = torch.device(device)
        self.limit_bytes = limit_bytes
        self.lengths: list[int] = []
        self._num_allocated = 0
        self._capacity = min(initial_length, max_length)
        self._data: torch.Tensor
        self._allocate(0, self._capacity)
        self._views: tuple[torch.Tensor, ...] = ()
        self._index = torch.empty(0, dtype=torch.int64)
        self._gather: torch.Tensor | None = None

    @property
    def num_live(self) -> int:
        """Number of live slots; they are 0 .. num_live - 1."""
        return len(self.lengths)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row over all layers, K and V together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes allocated now."""
        return self.bytes_for(self._num_allocated, self._capacity)

    def bytes_for(self, num_slots: int, length: int) -> int:
        """Bytes that `num_slots` slots of `length` rows take."""
        return num_slots * length * self.bytes_per_token

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest committed length; part of the transformers cache interface."""
        return max(self.lengths, default=0)

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for `num_slots` slots of `length` rows each (scratch included), growing by doubling.

        Raises ValueError for more than `max_slots` slots.
        """
        if num_slots > self.max_slots:
            raise ValueError(f"{num_slots} slots asked for, at most {self.max_slots} fit")
        if num_slots <= self._num_allocated and length <= self._capacity:
            return
        slots, rows = self._num_allocated, self._capacity
        if num_slots > slots:
            slots = max(num_slots, min(2 * slots, self.max_slots))
        if length > rows:
            rows = max(length, min(2 * rows, self.max_length))
        if self.limit_bytes is not None and self.bytes_for(slots, rows) > self.limit_bytes:
            slots, rows = max(num_slots, self.num_live), max(length, self.get_seq_length())
        self._allocate(slots, rows)

    def add(self) -> int:
        """Open an empty slot behind the live ones and return its index; raises ValueError when all are live."""
        self.reserve(self.num_live + 1, 1)
        self.lengths.append(0)
        return self.num_live - 1

    def remove(self, slot: int) -> int | None:
        """Close `slot`; returns the old index of the slot that moved into the hole (the last), None if none moved."""
        last = self.num_live - 1
        self._check_live(slot)
        if slot != last:
            length = self.lengths[last]
            self._data[:, slot, :, :length] = self._data[:, last, :, :length]
            self.lengths[slot] = length
        self.lengths.pop()
        return last if slot != last else None

    def clear(self, slot: int) -> None:
        """Zero all rows of a live slot, scratch included: NaN or infinite ones would show through the next mask."""
        self._check_live(slot)
        self._data[:, slot] = 0

    def swap(self, first: int, second: int) -> None:
        """Exchange two live slots' places."""
        self._check_live(first)
        self._check_live(second)
        length = max(self.lengths[first], self.lengths[second])
        rows = self._data[:, [second, first], :, :length]
        self._data[:, first, :, :length] = rows[:, 0]
        self._data[:, second, :, :length] = rows[:, 1]
        self.lengths[first], self.lengths[second] = self.lengths[second], self.lengths[first]

    def begin(self, positions: torch.Tensor, width: int, slots: Sequence[int] | None = None) -> None:
        """Say where the following `update` calls (one per layer) write, and how wide a view they return.

        Row r of the s-th slot goes to row `positions[s, r]` of that slot (int64 [S, R], distinct within a slot, all
        below `width`). The slots are 0 .. S - 1, or `slots` when given. Nothing is committed: see `keep`, `advance`.
        """
        num_slots = positions.shape[0]
        chosen = range(num_slots) if slots is None else slots
        if len(chosen) != num_slots or not all(0 <= slot < self.num_live for slot in chosen):
            raise ValueError(f"slots {list(chosen)} for {num_slots} rows of positions, {self.num_live} slots are live")
        self.reserve(self.num_live, width)
        first = chosen[0]
        if all(slot == first + i for i, slot in enumerate(chosen)):
            self._gather = None
            self._views = self._data[:, first : first + num_slots, :, :width].unbind(0)
        else:
            self._gather = torch.as_tensor(list(chosen), device=self.device)
            self._views = self._data[:, :, :, :width].unbind(0)
        heads = torch.arange(self.num_kv_heads).view(1, -1, 1)
        blocks = torch.as_tensor(list(chosen)).view(-1, 1, 1) * self.num_kv_heads + heads
        offsets = (blocks * self._capacity).to(self.device, non_blocking=True)
        self._index = (offsets + positions.to(self.device, non_blocking=True).unsqueeze(1)).reshape(-1)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's `key` and `value` [S, G, R, d] as `begin` said; returns its K and V, each [S, G, W, d]."""
        key_row, value_row = 2 * layer_idx, 2 * layer_idx + 1
        self._rows[key_row].index_copy_(0, self._index, key.reshape(-1, self.head_dim))
        self._rows[value_row].index_copy_(0, self._index, value.reshape(-1, self.head_dim))
        if self._gather is not None:
            return (
                self._views[key_row].index_select(0, self._gather),
                self._views[value_row].index_select(0, self._gather),
            )
        return self._views[key_row], self._views[value_row]

    def advance(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Commit, for each of `slots`, the `counts[i]` rows that were written right behind the committed ones."""
        for slot, count in zip(slots, counts, strict=True):
            self._check_live(slot)
            self.lengths[slot] += count

    def keep(self, kept: Sequence[Sequence[int]]) -> None:
        """Commit one path per slot, for slots 0 .. len(kept) - 1: row `kept[s][i]` becomes row `lengths[s] + i`.

        Positions are absolute rows, ascending, none below the slot's length. All layers move at once.
        """
        sources: list[int] = []
        targets: list[int] = []
        for slot, rows in enumerate(kept):
            base = slot * self.num_kv_heads * self._capacity
            for target, source in enumerate(rows, start=self.lengths[slot]):
                if source != target:
                    sources.append(base + source)
                    targets.append(base + target)
            self.lengths[slot] += len(rows)
        if not sources:
            return
        moves = np.array([sources, targets], np.int64)[:, :, None] + np.arange(self.num_kv_heads) * self._capacity
        index = torch.from_numpy(moves.reshape(2, -1)).to(self.device, non_blocking=True)
        rows_all = self._data.view(2 * self.num_layers, -1, self.head_dim)
        rows_all.index_copy_(1, index[1], rows_all.index_select(1, index[0]))

    def rows(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Committed keys and values of one slot, each [L, G, length, d] (views)."""
        self._check_live(slot)
        committed = self._data[:, slot, :, : self.lengths[slot]]
        return committed[0::2], committed[1::2]

    def _check_live(self, slot: int) -> None:
        if not 0 <= slot < self.num_live:
            raise ValueError(f"slot {slot} is not live, there are {self.num_live} live slots")

    def _allocate(self, num_slots: int, capacity: int) -> None:
        """Move to new memory of `num_slots` slots of `capacity` rows; live rows (and their scratch) come along."""
        shape = (2 * self.num_layers, num_slots, self.num_kv_heads, capacity, self.head_dim)
        with torch.inference_mode(False):  # memory made inside inference mode could not be written outside of it
            data = torch.zeros(shape, dtype=self.dtype, device=self.device)
            if self.num_live:
                shared = min(capacity, self._capacity)
                data[:, : self.num_live, :, :shared] = self._data[:, : self.num_live, :, :shared]
        self._data = data
        self._rows = data.view(2 * self.num_layers, -1, self.head_dim).unbind(0)
        self._num_allocated, self._capacity = num_slots, capacity
