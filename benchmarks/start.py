"""Times a cold start: importing vlattn against importing torch, and a first caption.

    python benchmarks/start.py [--model flickr8k-small] [--runs 5]

Each line is a process of its own; they take turns, and the table has medians, in seconds that pass
and seconds of the processor, and their ratios to the first line. A first caption is compared with
what cannot be left out: importing torch and, for such an encoder, timm, making the encoder, and
reading the weights.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from vlattn import Captioner
from vlattn.model_folder import PACKAGED_MODEL, find_model


def loading(model: str) -> str:
    """A program that loads torch, the encoder and the weights, and does nothing with them."""
    kind, _, name = Captioner.from_pretrained(model).config.encoder.partition(":")
    weights = str(find_model(model) / "model.safetensors")
    lines = ["import torch", "from safetensors.torch import load_file", f"load_file({weights!r})"]
    if kind == "timm":
        lines += ["import timm", f"timm.create_model({name!r}, num_classes=0)"]
    return "\n".join(lines)


def cost(program: str) -> tuple[float, float]:
    """Seconds that pass, and seconds of the processor, of a Python program in a new process."""
    start = time.perf_counter()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", program], os.environ)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"a program failed: {program}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime


def report(title: str, programs: dict[str, str], runs: int) -> None:
    """The first program is the 1 of the ratios."""
    for program in programs.values():
        cost(program)  # so that the files are in memory
    costs = {name: [] for name in programs}
    for _ in range(runs):
        for name, program in programs.items():
            costs[name].append(cost(program))
    middle = {name: [statistics.median(x) for x in zip(*found)] for name, found in costs.items()}
    ones = middle[next(iter(programs))]
    print(f"{title:34}{'passed':>10}{'ratio':>8}{'processor':>12}{'ratio':>8}")
    for name, (passed, used) in middle.items():
        ratios = f"{passed / ones[0]:7.2f}x", f"{used / ones[1]:7.2f}x"
        print(f"{name:34}{passed:9.2f}s{ratios[0]}{used:11.2f}s{ratios[1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=PACKAGED_MODEL, help="model folder or hub id")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    imports = ("import torch", "import vlattn")
    report("import", {program: program for program in imports}, args.runs)
    with tempfile.TemporaryDirectory() as folder:
        picture = str(Path(folder) / "picture.jpg")
        Image.effect_noise((640, 480), 64).save(picture)
        caption = (
            "from vlattn import Captioner\n"
            f"captioner = Captioner.from_pretrained({args.model!r})\n"
            f"captioner.caption([{picture!r}])"
        )
        command = ["caption", "--model", args.model, picture]
        programs = {
            "torch, timm, weights": loading(args.model),
            "Captioner(...).caption": caption,
            "vlattn caption": f"from vlattn.cli import main\nassert main({command!r}) == 0",
        }
        report("first caption", programs, args.runs)


if __name__ == "__main__":
    main()
