"""What the key/value cache of decoding saves, and what a smaller one costs.

    python benchmarks/cache.py --model runs/scenes --data scenes

Operations and bytes of writing 32 tokens with and without it; its size by formula and as it is; and
greedy captions of the test pictures with the cache in each storage, against float32: error of the
logits, and captions that come out changed.
"""

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from vlattn import Captioner, CaptionerConfig, read_records
from vlattn.attention.cache import DTYPES
from vlattn.data.dataset import CaptionDataset, collate
from vlattn.decoder import TextDecoder
from vlattn.encoder import PatchFeatures

aten = torch.ops.aten
FUSED = aten._scaled_dot_product_flash_attention_for_cpu


def counted(call: Callable[[], Tensor]) -> tuple[Tensor, int, int]:
    """A call's result, operations of its matrix products, and bytes that these read and write."""

    def fused(query, key, value, *_, out_shape, **__):
        return sdpa_flop_count(query, key, value)

    def moved(*shapes, out_shape, **_):
        outputs = [out_shape] if isinstance(out_shape, torch.Size) else out_shape[:1]
        shapes = [shape for shape in (*shapes, *outputs) if isinstance(shape, torch.Size)]
        return 4 * sum(map(math.prod, shapes))

    products = (aten.mm, aten.addmm, aten.bmm, FUSED)
    with (
        FlopCounterMode(display=False, custom_mapping={FUSED: fused}) as operations,
        FlopCounterMode(display=False, custom_mapping=dict.fromkeys(products, moved)) as traffic,
    ):
        result = call()
    return result, operations.get_total_flops(), traffic.get_total_flops()


@torch.inference_mode()
def with_and_without(
    captioner: Captioner, tokens: Tensor, features: PatchFeatures
) -> list[tuple[Tensor, int, int]]:
    """Logits (B, T, V), operations and bytes of reading a text token by token.

    First with the cache; then without it, when each step reads text and patches anew.
    """
    decoder = captioner.decoder

    def kept() -> Tensor:
        cache = decoder.start(captioner.memory(features))
        steps = [decoder(token, cache).hidden for token in tokens.split(1, dim=1)]
        return decoder.logits(torch.cat(steps, dim=1))

    def anew() -> Tensor:
        lengths = range(1, tokens.size(1) + 1)
        steps = [captioner.decode(tokens[:, :n], features).logits[:, -1] for n in lengths]
        return torch.stack(steps, dim=1)

    return [counted(kept), counted(anew)]


@torch.inference_mode()
def sizes(
    config: CaptionerConfig, num_tokens: int, num_patches: int
) -> list[tuple[str, int, int, str]]:
    """(kind, bytes by the formula, bytes of a cache, formula) for a picture and a caption."""
    size, rows = config.dim // config.num_heads, []
    for kind, heads, dtype in (
        ("multi-head", config.num_heads, torch.float32),
        ("grouped-query", max(1, config.num_heads // 2), torch.float32),
        ("multi-query", 1, torch.float32),
        ("multi-head, int8", config.num_heads, torch.int8),
        ("multi-query, int8", 1, torch.int8),
    ):
        decoder = TextDecoder(
            5,
            dim=config.dim,
            depth=config.depth,
            num_heads=config.num_heads,
            num_kv_heads=heads,
            max_len=num_tokens,
        )
        cache = decoder.start(torch.randn(1, num_patches, config.dim), cache_dtype=dtype)
        decoder(torch.zeros(1, num_tokens, dtype=torch.long), cache)
        vectors = 2 * (num_patches + num_tokens) * heads * config.depth
        expected = vectors * (size + 4 if dtype == torch.int8 else 4 * size)  # int8: and a scale
        vector = f"({size} + 4)" if dtype == torch.int8 else f"{size} * 4"
        formula = f"2 * ({num_patches} + {num_tokens}) * {heads} * {config.depth} * {vector}"
        rows.append((kind, expected, cache.nbytes, formula))
    return rows


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="runs/scenes")
    parser.add_argument("--data", default="scenes")
    args = parser.parse_args()
    captioner = Captioner.from_pretrained(args.model)
    records = [r for r in read_records(args.data)[0] if r.split == "test"]
    max_len = captioner.config.max_len
    data = CaptionDataset(records, captioner.tokenizer, captioner.preprocess, max_len=max_len)
    totals = {dtype: [0, 0, 0.0, 0.0] for dtype in DTYPES}  # bytes, changed, error, size; squared
    for start in range(0, len(data), 100):
        batch = collate([data[i] for i in range(start, min(start + 100, len(data)))])
        features = captioner.encode(batch.images)
        memory, first, truth = captioner.memory(features), None, None
        for dtype, total in totals.items():
            found = captioner.generate(features, num_beams=1, cache_dtype=dtype)
            texts = [best.tokens for best, *_ in found]
            first = texts if first is None else first
            total[1] += sum(one != two for one, two in zip(texts, first))
            rows = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor([captioner.tokenizer.bos_id, *text]) for text in first], True
            )  # the captions of float32, token by token
            cache = captioner.decoder.start(memory, cache_dtype=dtype)
            steps = [captioner.decoder(t, cache).hidden for t in rows.split(1, dim=1)]
            logits = captioner.decoder.logits(torch.cat(steps, dim=1))
            truth = logits if truth is None else truth
            total[0] += cache.nbytes
            total[2] += float((logits - truth).square().sum())
            total[3] += float(truth.square().sum())
    tokens = torch.randint(captioner.tokenizer.vocab_size, (1, min(32, max_len)))
    one = PatchFeatures(features.tokens[:1], features.grid_size)
    for name, (_, operations, moved) in zip(
        ("with the cache", "without"), with_and_without(captioner, tokens, one)
    ):
        work = f"{operations / 1e6:10.1f} MFLOP   {moved / 2**20:8.1f} MiB read and written"
        print(f"{tokens.size(1)} tokens {name:<16}{work}")
    for kind, expected, found, formula in sizes(
        captioner.config, tokens.size(1), one.tokens.size(1)
    ):
        print(f"{kind:<20}{formula:<34}= {expected:,} bytes; measured {found:,}")
    print(f"{args.model} on {len(data)} test pictures of {args.data}")
    for dtype, (size, changed, error, norm) in totals.items():
        name = str(dtype).removeprefix("torch.")
        print(
            f"{name:<10}{size / len(data) / 1024:8.1f} KiB a picture   logits off by "
            f"{100 * (error / norm) ** 0.5:.3f} %   captions changed: {changed}"
        )


if __name__ == "__main__":
    main()
