"""Additive against scaled dot-product attention: the well-known comparison, with measured cells.

Minutes on two CPU cores; longer by the second line, with more seeds and features of width 1280:
    python examples/compare_attention.py
    python examples/compare_attention.py --seeds 3 --steps 600 --encoder-weights FILE
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.attention import contenders, forward, make_inputs, measure, peak_memory
from vlattn import CaptionerConfig, TrainConfig, read_records, train
from vlattn.attention import ATTENTIONS
from vlattn.data.dataset import CaptionDataset
from vlattn.evaluation import score_captions, write_captions
from vlattn.features import encode_pictures
from vlattn.grounding import score_maps
from vlattn.mentions import reference_texts
from vlattn.page import Page

SIZE, QUERIES = 64, 64
WAYS = {"eager additive": 6, "fused additive": 7, "eager product": 4, "fused product": 4}


def written_out(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    return (query @ key.mT / query.size(-1) ** 0.5).softmax(-1) @ value


def compare_cost(page: Page, device: str) -> None:
    """64 queries of size 64 look at more and more keys; forward, one head, float32. Eager additive
    attention takes an addition, a tanh (counted as one operation) and a multiply-add for each
    query, key and feature, and stores them; fused, there is no tanh, and nothing of that size is
    stored. A product takes one multiply-add; so does the weighted sum of either."""
    page.section("Operations, time and memory", compare_cost.__doc__)
    rows = {"million operations": [], "milliseconds": [], "MiB beyond the inputs": []}
    for keys in (64, 256, 1024, 4096):
        tensors = make_inputs(1, QUERIES, keys, SIZE, torch.float32, device)
        known = contenders(device)
        fused = known["triton" if device == "cuda" else "compiled"]
        functions = (known["eager"], fused, written_out, known["dot product"])
        calls = {name: forward(function, tensors) for name, function in zip(WAYS, functions)}
        times = measure(calls, device, 0.2)
        operations = [f"{n * QUERIES * keys * SIZE / 1e6:,.1f}" for n in WAYS.values()]
        milliseconds = [f"{1e3 * times[name]['seconds']:.3f}" for name in WAYS]
        mebibytes = [f"{(peak_memory(call, device) or 0) / 2**20:.1f}" for call in calls.values()]
        for found, cells in zip(rows.values(), (operations, milliseconds, mebibytes)):
            found.append([keys, *cells])
    for what, found in rows.items():
        page.table([f"keys, {what}", *WAYS], found)


def compare_sizes(page: Page, device: str) -> None:
    """A bare dot product needs queries and keys of one size; with projections to a common size, as
    both modules have them, sizes may differ: 20 queries of width 64, 49 keys, 32 pictures."""
    page.section("Equal and unequal sizes", compare_sizes.__doc__)
    rows = []
    for width in (64, 1280):
        query = torch.randn(32, 20, 64, device=device)
        key = torch.randn(32, 49, width, device=device)
        modules = {n: kind(64, width, num_heads=4).to(device) for n, kind in ATTENTIONS.items()}
        calls = {name: forward(module, [query, key]) for name, module in modules.items()}
        times = measure(calls, device, 0.2)
        for name, module in modules.items():
            parameters = sum(p.numel() for p in module.parameters())
            rows.append([width, parameters, f"{1e3 * times[name]['seconds']:.2f}", name])
    page.table(["key width", "parameters", "milliseconds", "score"], rows)


def nearest(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers from -1 to 1: attend to the key nearest to the query."""
    query, key = 2 * torch.rand(count, 1, 1) - 1, 2 * torch.rand(count, 8, 1) - 1
    return query, key, (query - key).abs().argmin(1).flatten()


def same(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of 16 signs: attend to the key that equals the query."""
    key, target = torch.randn(count, 8, 16).sign(), torch.randint(8, (count,))
    return key[torch.arange(count), target][:, None], key, target


def fit(kind: type[nn.Module], task: Callable, steps: int, seed: int) -> float:
    """Percentage of new cases in which the trained attention weighs the right key most."""
    torch.manual_seed(seed)
    size = task(1)[1].size(-1)
    attn = kind(size, hidden_dim=16, num_heads=1, project_value=False, project_out=False)
    optimizer = torch.optim.Adam(attn.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        query, key, target = task(256)
        weights = attn(query, key, need_weights=True)[1].flatten(1)  # (256, 8)
        optimizer.zero_grad()
        F.nll_loss(weights.clamp(min=1e-9).log(), target).backward()
        optimizer.step()
        schedule.step()
    query, key, target = task(10_000)
    weights = attn(query, key, need_weights=True)[1].flatten(1)
    return 100 * float((weights.argmax(1) == target).float().mean())


def compare_expression(page: Page, args: argparse.Namespace) -> None:
    """For a given query, a dot-product score is a straight line over the keys, whatever the
    projections: the highest is at an outermost key, never in the middle. So it cannot attend to the
    key nearest to a number; additive attention, a network with a hidden layer over both, can. Both
    can find the key that equals a code of 16 signs. How often the right one of 8 keys is weighed
    most, hidden size 16; the mean of the seeds, and the lowest and highest."""
    page.section("What each can express", compare_expression.__doc__)
    rows, runs = [], range(args.seeds)
    for task in (nearest, same):
        shares = [[fit(kind, task, args.steps, n) for n in runs] for kind in ATTENTIONS.values()]
        rows.append([task.__name__, *map(spread, shares)])
    page.table(["the right key, %", *ATTENTIONS], rows)


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def compare_quality(page: Page, args: argparse.Namespace) -> None:
    """Captioners of text width 64, trained on the same data with the same seeds and steps, without
    boxes. CIDEr of greedy captions; pointing: how often the point that the words of a phrase attend
    to most lies in the phrase's box, in 200 pictures. The features of a frozen EfficientNet-Lite0
    have width 1280: attended to as they are, or brought to 64 by a linear layer. Without its
    weights, a small encoder learns. The mean of the seeds, and the lowest and highest."""
    page.section("Quality", compare_quality.__doc__)
    records = [r for r in read_records(args.data)[0] if r.split == "test"][:500]
    rows, encoders = [], {"64": {"encoder_dim": 64, "encoder_depth": 1, "memory": "plain"}}
    if args.encoder_weights:
        frozen = {"encoder": "timm:tf_efficientnet_lite0"}
        encoders = {"64": frozen | {"memory": "linear"}, "1280": frozen | {"memory": "plain"}}
    with tempfile.TemporaryDirectory() as folder:
        for width, encoder in encoders.items():
            for attention in ATTENTIONS:
                decoder = {"attention": attention, "dim": 64, "depth": 1, "num_heads": 4}
                config = CaptionerConfig(dropout=0.0, **decoder, **encoder)
                runs = [quality(config, seed, records, args, folder) for seed in range(args.seeds)]
                rows.append([width, *map(spread, zip(*runs)), attention])
    page.table(["image width", "CIDEr", "pointing, %", "centre, %", "score"], rows)
    page.text(f"{args.data}: {args.seeds} seeds, {args.steps} steps, {len(records)} test pictures.")


def quality(config: CaptionerConfig, seed: int, records, args, folder: str) -> list[float]:
    """CIDEr, pointing, and the pointing of the picture's centre, times 100."""
    settings = TrainConfig(
        data=args.data,
        out=tempfile.mkdtemp(dir=folder),
        captioner=config,
        encoder_weights=args.encoder_weights,
        cache_features=f"{folder}/features",
        max_steps=args.steps,
        eval_every=1000,
        batch_size=16,
        warmup_steps=min(100, args.steps // 3),
        average_decay=0.97,
        seed=seed,
    )
    with contextlib.redirect_stdout(sys.stderr):
        captioner = train(settings)
    captioner.config = config  # overlays, and so pointing, of the weights as they are
    data = CaptionDataset(records, captioner.tokenizer, captioner.preprocess, max_len=64)
    if settings.encoder_weights:  # frozen: each picture is encoded once, for all runs
        data.features = encode_pictures(captioner, data, settings.cache_features)
    cider = score_captions(write_captions(captioner, data, num_beams=1), records).cider
    records = records[:200]
    maps = score_maps(captioner, records, [reference_texts(captioner, r) for r in records])
    return [100 * float(x) for x in (cider, maps.pointing.mean(), maps.center.mean())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="scenes", help="data set with boxes of its phrases")
    parser.add_argument("--encoder-weights", help="of timm's tf_efficientnet_lite0, safetensors")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run")
    parser.add_argument("--html", help="also write a page here")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    page = Page("Additive and scaled dot-product attention, compared")
    page.text(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads")
    compare_cost(page, device)
    compare_sizes(page, device)
    compare_expression(page, args)
    compare_quality(page, args)
    if args.html:
        page.save(args.html)


if __name__ == "__main__":
    main()
