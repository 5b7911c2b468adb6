"""Keys and values that decoding keeps, so that no step computes them again.

B batch, C captions or beams per picture, R = B * C rows, H_kv heads, T tokens, N patches, D head
size, L layers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


class KeyValue(NamedTuple):
    """Projected keys (B, H_kv, N, D) and values (B, H_kv, N, D_v) of one attention."""

    key: Tensor
    value: Tensor


class KVCache:
    """The keys and values of every layer of a decoder while it writes.

    The memory is what cross-attention reads: the patches of each picture, projected once, one row
    per picture however many captions or beams are written about it. What self-attention reads grows
    with each call of `append`, in room that doubles when it is full: a step copies no past.

    N tokens take `2 * N * H_kv * D * L` numbers, which is `2 * N * dim * L` where every query head
    has its own key/value head.

    Args:
        memory: keys and values of the patches, one of each layer.
        dtype: of what is kept, in memory and past: float32, bfloat16, float16, or int8, which keeps
            a number in a byte, and a float32 scale for each head and token; as computed where
            omitted. What is read is in the dtype that came.
    """

    def __init__(self, memory: Sequence[KeyValue], *, dtype: torch.dtype | None = None):
        if dtype is not None and dtype not in DTYPES:
            names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise ValueError(f"dtype of a cache must be one of {names}, got {dtype}")
        self.dtype = dtype
        # In order: every step reads all of it.
        self._memory = [tuple(x.contiguous() for x in self._pack(kv)) for kv in memory]
        self._read_as = [kv.key.dtype for kv in memory]
        self._past: list[tuple[Tensor, ...] | None] = [None] * len(memory)
        self._lengths = [0] * len(memory)

    def __len__(self) -> int:
        """Tokens that every layer holds."""
        return self._lengths[-1] if self._lengths else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the memory and of the tokens that are held; room for more is not counted."""
        held = [part for layer in self._memory for part in layer]
        held += [
            part[:, :, :length]
            for layer, length in zip(self._past, self._lengths)
            for part in layer or ()
        ]
        return sum(part.numel() * part.element_size() for part in held)

    def memory(self, layer: int) -> KeyValue:
        """Keys and values of the patches for a layer's cross-attention, one row per picture."""
        return self._unpack(self._memory[layer], self._read_as[layer])

    def append(self, layer: int, new: KeyValue) -> KeyValue:
        """Add the keys and values of new tokens (R, H_kv, T, D) to a layer, and return all.

        Raises:
            ValueError: there are other rows than before; `reorder` is how rows change.
        """
        past, start = self._past[layer], self._lengths[layer]
        if past is not None and past[0].size(0) != new.key.size(0):
            raise ValueError(
                f"new must have the {past[0].size(0)} rows of the cache, got {new.key.size(0)}"
            )
        parts = self._pack(new)
        end = start + new.key.size(2)
        self._lengths[layer] = end
        if past is None:
            self._past[layer] = parts
            return self._unpack(parts, new.key.dtype)
        if end > past[0].size(2):
            grown = tuple(x.new_empty(*x.shape[:2], 2 * end, x.size(3)) for x in past)
            for room, held in zip(grown, past):
                room[:, :, :start] = held[:, :, :start]
            self._past[layer] = past = grown
        for room, fresh in zip(past, parts):
            room[:, :, start:end] = fresh
        return self._unpack(tuple(room[:, :, :end] for room in past), new.key.dtype)

    def reorder(self, rows: Tensor) -> None:
        """Row i continues what row `rows[i]` wrote; beams of one picture swap, the memory stays.

        Args:
            rows: (R,) rows of one picture after the other. The pictures that have none are no more;
                the others have as many each, whatever it was before.
        """
        if not self._lengths or self._past[0] is None:
            return
        num_rows, num_images = self._past[0][0].size(0), self._memory[0][0].size(0)
        if torch.equal(rows, torch.arange(num_rows, device=rows.device)):
            return
        images = (rows // (num_rows // num_images)).unique_consecutive()
        device = self._past[0][0].device
        if len(images) < num_images:
            self._memory = [
                tuple(x.index_select(0, images.to(device)) for x in memory)
                for memory in self._memory
            ]
        self._past = [
            None if past is None else tuple(x.index_select(0, rows.to(device)) for x in past)
            for past in self._past
        ]

    def _pack(self, kv: KeyValue) -> tuple[Tensor, ...]:
        """(key, value), or (key, its scales, value, its scales)."""
        if self.dtype != torch.int8:
            return tuple(x if self.dtype is None else x.to(self.dtype) for x in kv)
        return tuple(part for x in kv for part in quantise(x))

    @staticmethod
    def _unpack(parts: tuple[Tensor, ...], dtype: torch.dtype) -> KeyValue:
        if len(parts) == 2:
            return KeyValue(*(x.to(dtype) for x in parts))
        key, key_scales, value, value_scales = parts
        return KeyValue((key * key_scales).to(dtype), (value * value_scales).to(dtype))


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8: numbers (..., D), and the float32 scale (..., 1) that they are times of."""
    scales = x.detach().abs().amax(-1, keepdim=True).float() / 127
    numbers = x / scales.clamp(min=torch.finfo(torch.float32).tiny)
    return numbers.round().to(torch.int8), scales
