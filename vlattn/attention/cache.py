"""Keys and values that decoding keeps, so that no step computes them again.

B batch, C captions or beams per picture, R = B * C rows, H_kv heads, T tokens, N patches, D head
size, L layers.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class KeyValue(NamedTuple):
    """Projected keys (B, H_kv, N, D) and values (B, H_kv, N, D_v) of one attention."""

    key: Tensor
    value: Tensor


class KVCache:
    """The keys and values of every layer of a decoder while it writes.

    `memory` holds what cross-attention reads: the patches of each picture, projected once, one row
    per picture however many captions or beams are written about it. What self-attention reads grows
    with each call of `append`, in room that doubles when it is full: a step copies no past.
    """

    def __init__(self, memory: Sequence[KeyValue]):
        self.memory = tuple(memory)
        self._past: list[KeyValue | None] = [None] * len(self.memory)
        self._lengths = [0] * len(self.memory)

    def __len__(self) -> int:
        """Tokens that every layer holds."""
        return self._lengths[-1] if self._lengths else 0

    def append(self, layer: int, new: KeyValue) -> KeyValue:
        """Add the keys and values of new tokens (R, H_kv, T, D) to a layer, and return all.

        Raises:
            ValueError: there are other rows than before; `reorder` is how rows change.
        """
        past, start = self._past[layer], self._lengths[layer]
        if past is not None and past.key.size(0) != new.key.size(0):
            raise ValueError(
                f"new must have the {past.key.size(0)} rows of the cache, got {new.key.size(0)}"
            )
        end = start + new.key.size(2)
        self._lengths[layer] = end
        if past is None:
            self._past[layer] = new
            return new
        if end > past.key.size(2):
            grown = KeyValue(*(x.new_empty(*x.shape[:2], 2 * end, x.size(3)) for x in past))
            for room, held in zip(grown, past):
                room[:, :, :start] = held[:, :, :start]
            self._past[layer] = past = grown
        for room, fresh in zip(past, new):
            room[:, :, start:end] = fresh
        return KeyValue(*(room[:, :, :end] for room in past))

    def reorder(self, rows: Tensor) -> None:
        """Row i continues what row `rows[i]` wrote; beams of one picture swap, the memory stays."""
        self._past = [
            None if past is None else KeyValue(*(x.index_select(0, rows) for x in past))
            for past in self._past
        ]
