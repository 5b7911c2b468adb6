"""Times a training step against the same step written plainly with PyTorch's own decoder.

    python benchmarks/training.py [--profile]

The plain step repeats the memory for each caption, pads every caption to the longest, and uses
`nn.TransformerDecoder` in float32; sizes (those of the Flickr8k recipe if not given), dropout, loss
and optimiser are the same. Captions are random, as long as those of Flickr8k (12 words, give or
take 4). Both step through the same 16 batches, the plain one as they come, ours sorted as in
training (`TrainConfig.sort_window`). The encoder is frozen, and both read kept features, or both
run it.
"""

import argparse
import itertools
import platform

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from attention import measure
from torch import Tensor, nn
from torch.profiler import profile

from vlattn import Captioner, CaptionerConfig, Tokenizer
from vlattn.data.dataset import Batch, epoch_batches, pack
from vlattn.steps import teacher_step

ENCODER = "timm:tf_efficientnet_lite0"
WORDS = 4000
BATCHES = 16


class Plain(nn.Module):
    """What one writes first: a row for each caption, PyTorch's decoder, logits for the padding."""

    def __init__(self, captioner: Captioner):
        super().__init__()
        config, vocab_size = captioner.config, captioner.tokenizer.vocab_size
        self.encoder = captioner.encoder
        self.memory_proj = nn.Linear(self.encoder.dim, config.dim)
        self.embed = nn.Embedding(vocab_size, config.dim)
        self.positions = nn.Parameter(0.02 * torch.randn(config.max_len, config.dim))
        layer = nn.TransformerDecoderLayer(
            config.dim,
            config.num_heads,
            int(config.mlp_ratio * config.dim),
            config.dropout,
            "gelu",
            batch_first=True,
            norm_first=True,
        )
        self.decoder = nn.TransformerDecoder(layer, config.depth, nn.LayerNorm(config.dim))

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        """Images (B, ...), tokens (B * C, T) -> logits (B * C, T, V)."""
        features = images if images.dim() == 3 else self.encoder(images).tokens
        memory = self.memory_proj(features).repeat_interleave(len(tokens) // len(images), dim=0)
        x = self.embed(tokens) + self.positions[: tokens.size(1)]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        x = self.decoder(x, memory, mask.to(x.device), tgt_is_causal=True)
        return x @ self.embed.weight.T


def plain_step(model: Plain, optimizer, images: Tensor, captions: list[list[int]]) -> None:
    rows = nn.utils.rnn.pad_sequence([torch.tensor(c) for c in captions], True, -1)
    rows = rows.to(images.device)
    logits = model(images, rows[:, :-1].clamp(min=0))
    F.cross_entropy(
        logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=-1, label_smoothing=0.1
    ).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def random_captions(pictures: int, each: int) -> list[list[list[int]]]:
    lengths = torch.randn(pictures, each).mul(4).add(12).clamp(5, 30).int().tolist()
    return [[[1, *torch.randint(4, WORDS, (n,)).tolist(), 2] for n in sizes] for sizes in lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=24, help="of a batch")
    parser.add_argument("--captions", type=int, default=5, help="of a picture")
    parser.add_argument("--image-size", type=int, default=352, help="side of the pictures")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8, help="of each contender")
    parser.add_argument("--precision", choices=("no", "bf16"), default="no", help="of our step")
    parser.add_argument("--profile", action="store_true", help="show where our step's time goes")
    args = parser.parse_args()
    torch.manual_seed(0)
    words = (f"w{i}" for i in range(WORDS - 4))
    tokenizer = Tokenizer.train(words, kind="word", vocab_size=WORDS, min_frequency=1)
    size = (args.image_size, args.image_size)
    config = CaptionerConfig(
        encoder=ENCODER,
        encoder_classes=True,
        image_size=size,
        dim=args.dim,
        depth=args.depth,
        mlp_ratio=3.0,
        dropout=0.4,
    )
    accelerator = Accelerator(mixed_precision=args.precision)
    captioner = Captioner(config, tokenizer).to(accelerator.device)
    plain = Plain(captioner).to(accelerator.device).train()
    captions = random_captions(BATCHES * args.pictures, args.captions)
    lengths = [sum(len(caption) - 1 for caption in texts) for texts in captions]
    order = epoch_batches(lengths, args.pictures, seed=0, epoch=0, window=BATCHES)
    pixels = torch.randn(args.pictures, 3, *size, device=accelerator.device)
    with torch.no_grad():
        kept = captioner.encode(pixels).tokens
    optimizers = {
        model: torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], 1e-4, fused=True
        )
        for model in (captioner, plain)
    }
    ours = accelerator.prepare(captioner)

    packs = itertools.cycle([pack([captions[i] for i in batch]) for batch in order])
    plain_batches = itertools.cycle(
        [caption for texts in captions[start : start + args.pictures] for caption in texts]
        for start in range(0, len(captions), args.pictures)
    )

    def our_step(images: Tensor) -> None:
        batch = Batch(tuple(range(len(images))), images, *next(packs), None, ())
        teacher_step(
            accelerator,
            ours,
            optimizers[captioner],
            [batch],
            label_smoothing=0.1,
            attention_supervision=0.0,
            clip_norm=1.0,
        )

    calls = {}
    for name, images in (("features kept", kept), ("encoder run", pixels)):
        calls[f"plain, {name}"] = lambda x=images: plain_step(
            plain, optimizers[plain], x, next(plain_batches)
        )
        calls[f"ours, {name}"] = lambda x=images: our_step(x)
    where = platform.processor() or accelerator.device.type
    print(f"torch {torch.__version__}, {where}, {torch.get_num_threads()} threads")
    print(
        f"{args.pictures} pictures of {args.captions} captions, {sum(lengths) // BATCHES} targets"
    )
    found = measure(calls, accelerator.device.type, args.seconds)
    for name, times in found.items():
        low, middle, high = (1e3 * times[key] for key in ("low", "seconds", "high"))
        print(f"{name:22}{middle:9.1f} ms ({low:.1f} to {high:.1f})", end="")
        print(f"{1e3 * args.pictures * args.captions / middle:8.0f} captions/s", end="")
        twin = found[name.replace("ours", "plain")]["seconds"]
        print(f"   {1e3 * twin / middle:.2f}x")
    if args.profile:
        with profile() as seen:
            for _ in range(5):
                our_step(kept)
        print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))


if __name__ == "__main__":
    main()
