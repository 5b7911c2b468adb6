"""Everything that wants a GPU to be checked, in one go of under eight minutes.

    python benchmarks/gpu_check.py --out runs/gpu

The tests of the attention kernels, the attention table with the share of the rate that the chip's
arithmetic allows, and two minutes of bfloat16 training on the built-in scenes, with captions/s and
how busy the device was. Needs no network, no gradio and no file outside the repository. Ends with
status 1 when a part failed.
"""

import argparse
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
# Instructions of a pair of a query and a key, per feature: multiply, bound, add one; half each of
# product, two for the numerator, multiply by reciprocal, add. The reciprocals run beside them.
INSTRUCTIONS = 5.5


def run(title: str, command: list[str], limit: int) -> bool:
    print(f"\n=== {title}: {' '.join(command)}", flush=True)
    try:
        done = subprocess.run([sys.executable, *command], cwd=ROOT, timeout=limit)
    except subprocess.TimeoutExpired:
        print(f"stopped after {limit} s")
        return False
    return done.returncode == 0


def shares(path: Path) -> None:
    """What part of the chip's float32 instruction rate each shape's forward pass runs at."""
    chip = torch.cuda.get_device_properties(0)
    rate = chip.multi_processor_count * 128 * chip.clock_rate * 1e3 / INSTRUCTIONS
    print(f"{chip.name}: at most {rate / 1e12:.2f} T pair features a second")
    for row in json.loads(path.read_text())["table"]:
        if row["passes"] == "forward":
            count = row["B"] * row["T"] * row["N"] * row["D"]
            share = count / row["times"]["triton"]["seconds"] / rate
            print(f"{row['dtype']:<10}{row['shape']:<18}D = {row['D']:<5}{100 * share:5.1f} %")


@contextmanager
def busy():
    """Says how busy the device was meanwhile, as nvidia-smi sees it twice a second."""
    query = "nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits -i 0 -lms 500"
    watch = subprocess.Popen(query.split(), stdout=subprocess.PIPE, text=True)
    yield
    watch.terminate()
    shares = sorted(int(line) for line in watch.communicate()[0].split() if line.isdigit())
    if shares:
        print(f"device busy: median {shares[len(shares) // 2]} %, highest {shares[-1]} %")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    out = parser.parse_args().out.resolve()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to check", file=sys.stderr)
        return 1
    tests = ["tests/test_kernels.py", "tests/test_attention.py"]
    passed = [
        run("tests", ["-m", "pytest", "-x", *tests], 180),
        run("table", ["benchmarks/attention.py", "--seconds", "0.1", "--out", str(out)], 120),
    ]
    if passed[-1]:
        shares(out / "attention.json")
    training = "examples/train_scenes.py --precision bf16 --attention additive --num-workers 4"
    with busy():
        passed.append(run("training", [*training.split(), "--out", str(out / "scenes")], 150))
    print("\n" + ("all passed" if all(passed) else "FAILED"))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
