"""Times additive attention against what one would write instead, and against dot-product attention.

    python benchmarks/attention.py

Every shape is run by all contenders in turn, in one process, until each has had its share of time;
the table has medians, and the ratio to eager `tanh(q + k) @ w`. Writes `attention.json` and
`attention.png`, which shows how time and memory grow with the number of keys. Takes about ten
minutes on two CPU cores; with a GPU it is timed too.
"""

import argparse
import ctypes
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlattn.attention import ScaledDotProductAttention, additive_attention

SHAPES = {  # name: pictures, queries, keys
    "caption step": (32, 1, 196),
    "training, short": (16, 20, 49),
    "training, long": (8, 100, 196),
    "long": (1, 1024, 1024),
}
DIMS = (64, 256)
GROWTH = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # keys, for 64 queries of size 64
OPERATIONS = (
    5  # of a pair and a feature, forward: multiply, add, two multiply-adds, half a division
)


def eager(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    scores = (torch.tanh(query[:, :, :, None] + key[:, :, None]) @ weight[0]).softmax(-1)
    return scores @ value


def keras(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """As `keras.layers.AdditiveAttention` does it: a product and a sum in place of `@`."""
    scores = (weight[0] * torch.tanh(query[:, :, :, None] + key[:, :, None])).sum(-1)
    return scores.softmax(-1) @ value


def ours(backend: str) -> Callable[..., Tensor]:
    return lambda *tensors: additive_attention(*tensors, backend=backend)[0]


def dot_product(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def contenders(device: str) -> dict[str, Callable[..., Tensor]]:
    fast = "triton" if device == "cuda" else "compiled"
    return {
        "eager": eager,
        "keras": keras,
        "chunked": ours("chunked"),
        fast: ours(fast),
        "dot product": dot_product,
    }


def make_inputs(batch: int, queries: int, keys: int, dim: int, dtype, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (batch, 1, queries, dim), (batch, 1, keys, dim), (batch, 1, keys, dim), (1, dim)
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def forward(function: Callable, tensors: list[Tensor], learned=()) -> Callable[[], None]:
    def call():
        with torch.no_grad():
            function(*tensors)

    return call


def training(function: Callable, tensors: list[Tensor], learned=()) -> Callable[[], None]:
    """Forward and backward, with the gradients of the tensors and of parameters."""
    tensors = [x.clone().requires_grad_() for x in tensors]
    wanted = [*tensors, *learned]

    def call():
        torch.autograd.grad(function(*tensors).sum(), wanted, allow_unused=True)

    return call


def seconds(call: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(calls: dict[str, Callable[[], None]], device: str, share: float) -> dict[str, dict]:
    """Median and quartiles of each in seconds: one of each in turn, each for its share of time."""
    runs = {name: [] for name in calls}
    for call in calls.values():
        call()  # warm-up
    while any(sum(times) < share or len(times) < 3 for times in runs.values()):
        for name, call in calls.items():
            if sum(runs[name]) < share or len(runs[name]) < 3:
                runs[name].append(seconds(call, device))
    found = {}
    for name, times in runs.items():
        low, middle, high = statistics.quantiles(times, n=4)
        found[name] = {"seconds": middle, "low": low, "high": high, "runs": len(times)}
    return found


def peak_memory(call: Callable[[], None], device: str) -> int | None:
    """Bytes that a call holds at most beyond what is there before it."""
    call()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    try:  # Linux: give back what is free, and forget the peak so far
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        return None
    before = _status("VmRSS")
    call()
    return max(_status("VmHWM") - before, 0)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def table(device: str, threads: tuple[int, ...], dtypes, share: float) -> list[dict]:
    rows = []
    for count in threads:
        torch.set_num_threads(count)
        where = device if device == "cuda" else f"{count} thread{'s' if count > 1 else ''}"
        for dtype in dtypes:
            kind = str(dtype).removeprefix("torch.")
            for passes, make in (("forward", forward), ("forward + backward", training)):
                print(f"\n{where}, {kind}, {passes}: milliseconds, and times as fast as eager")
                names = list(contenders(device))
                print(f"{'shape':<16}{'B':>4}{'T':>6}{'N':>6}{'D':>5}", end="")
                print("".join(f"{name:>19}" for name in names))
                for name, (batch, queries, keys) in SHAPES.items():
                    for dim in DIMS:
                        tensors = make_inputs(batch, queries, keys, dim, dtype, device)
                        calls = {n: make(f, tensors) for n, f in contenders(device).items()}
                        found = measure(calls, device, share)
                        row = {
                            **{"where": where, "dtype": kind, "passes": passes, "shape": name},
                            **{"B": batch, "T": queries, "N": keys, "D": dim, "times": found},
                        }
                        rows.append(row)
                        print(_line(row), flush=True)
    return rows


def _line(row: dict) -> str:
    eager_seconds = row["times"]["eager"]["seconds"]
    cells = "".join(
        f"{1e3 * t['seconds']:>11.3f}{eager_seconds / t['seconds']:>7.1f}x"
        for t in row["times"].values()
    )
    return f"{row['shape']:<16}{row['B']:>4}{row['T']:>6}{row['N']:>6}{row['D']:>5}{cells}"


def by_hand(attn: ScaledDotProductAttention) -> Callable[..., Tensor]:
    """The same projections around `F.scaled_dot_product_attention`."""

    def call(query: Tensor, key: Tensor) -> Tensor:
        q = attn.q_proj(query).unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)
        k, v = (
            proj(key).unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)
            for proj in (attn.k_proj, attn.v_proj)
        )
        return attn.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    return call


def modules(device: str, dtypes, share: float) -> list[dict]:
    """`ScaledDotProductAttention` against PyTorch by hand, and against `nn.MultiheadAttention`."""
    print("\nDot-product modules, width 256, 8 heads: milliseconds, and times as fast as by hand")
    rows = []
    for dtype in dtypes:
        for passes, make in (("forward", forward), ("forward + backward", training)):
            for name, (batch, queries, keys) in SHAPES.items():
                theirs = nn.MultiheadAttention(256, 8, batch_first=True).to(device, dtype)
                attn = ScaledDotProductAttention.from_torch(theirs)
                query = torch.randn(batch, queries, 256, device=device, dtype=dtype)
                key = torch.randn(batch, keys, 256, device=device, dtype=dtype)
                ways = {
                    "by hand": (by_hand(attn), attn),
                    "ours": (lambda q, k, attn=attn: attn(q, k)[0], attn),
                    "torch, weights": (
                        lambda q, k, m=theirs: m(q, k, k, average_attn_weights=False)[0],
                        theirs,
                    ),
                    "ours, weights": (
                        lambda q, k, attn=attn: attn(q, k, need_weights=True)[0],
                        attn,
                    ),
                }
                calls = {
                    way: make(function, [query, key], list(module.parameters()))
                    for way, (function, module) in ways.items()
                }
                found = measure(calls, device, share)
                kind = str(dtype).removeprefix("torch.")
                rows.append({"dtype": kind, "passes": passes, "shape": name, "times": found})
                base = found["by hand"]["seconds"]
                cells = [
                    f"{way} {1e3 * t['seconds']:.3f} ({base / t['seconds']:.2f}x)"
                    for way, t in found.items()
                ]
                print(f"{kind:<10}{passes:<20}{name:<17}{'   '.join(cells)}", flush=True)
    return rows


def growth(device: str, share: float) -> list[dict]:
    print("\nHow they grow: 64 queries of size 64, forward; milliseconds, MiB")
    rows = []
    for keys in GROWTH:
        tensors = make_inputs(1, 64, keys, 64, torch.float32, device)
        calls = {n: forward(f, tensors) for n, f in contenders(device).items()}
        found = measure(calls, device, share)
        for name, call in calls.items():
            found[name]["bytes"] = peak_memory(call, device)
        rows.append({"N": keys, "times": found})
        cells = [
            f"{name} {1e3 * t['seconds']:.2f}, {(t['bytes'] or 0) / 2**20:.1f}"
            for name, t in found.items()
        ]
        print(f"N = {keys:<6}{'   '.join(cells)}", flush=True)
    return rows


def memory(device: str) -> dict[str, float]:
    """Peak extra memory of T = N = 1024, D = 256, over the size of the scores (B*H*T*N floats)."""
    tensors = make_inputs(1, 1024, 1024, 256, torch.float32, device)
    found = {}
    for name, function in contenders(device).items():
        peak = peak_memory(forward(function, tensors), device)
        found[name] = None if peak is None else peak / (4 * 1024 * 1024)
    print("\nPeak extra memory at T = N = 1024, D = 256, in sizes of the scores:")
    print(
        "   ".join(
            f"{name} {size}" if size is None else f"{name} {size:.2f}"
            for name, size in found.items()
        )
    )
    return found


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in rows[0]["times"]:
        for axis, key, scale in ((axes[0], "seconds", 1e3), (axes[1], "bytes", 2**-20)):
            points = [(r["N"], scale * (r["times"][name][key] or 0)) for r in rows]
            axis.plot(*zip(*points), marker="o", markersize=3, label=name)
    for axis, label in zip(axes, ("milliseconds", "MiB beyond the inputs")):
        axis.set(xscale="log", xlabel="keys (64 queries of size 64)", ylabel=label)
    axes[0].set(yscale="log")
    axes[1].set(yscale="symlog", ylim=(0, None))
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=0.25, help="of each contender and shape")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    print(f"torch {torch.__version__}, {args.device} {machine}")
    threads = (1,) if args.device == "cuda" else (1, 2)
    dtypes = (torch.float32, torch.bfloat16)
    rows = table(args.device, threads, dtypes, args.seconds)
    dot_product_rows = modules(args.device, dtypes, args.seconds)
    grown = growth(args.device, args.seconds)
    result = {"torch": torch.__version__, "table": rows, "growth": grown}
    result |= {"modules": dot_product_rows, "memory": memory(args.device)}
    (args.out / "attention.json").write_text(json.dumps(result, indent=1))
    plot(grown, args.out / "attention.png")
    print(f"\nwritten to {args.out}/attention.json and attention.png")


if __name__ == "__main__":
    main()
