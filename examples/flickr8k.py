"""Flickr8k from raw pictures to scores: two captioners, trained at once, that write together.

    python examples/flickr8k.py --data flickr8k \\
        --encoder-weights tf_efficientnet_lite0.in1k.safetensors --out runs/flickr8k

One learns from the captions alone, the other from the boxes of flickr8k/entities.jsonl too. Takes
about an hour on two CPU cores. Killed or stopped, the same command goes on where it was. Takes the
flags of `vlattn train`, which beat the recipe below.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

TRAIN = [sys.executable, Path(__file__).with_name("train_captioner.py")]
EVALUATE = [Path(sys.executable).with_name("vlattn"), "evaluate", "--split", "test"]
RECIPE = "--encoder timm:tf_efficientnet_lite0 --encoder-classes --image-size 352 352".split()
MODELS = {
    "boxes": "--seed 1 --attention-supervision 1".split(),
    "plain": "--seed 0".split(),
}
NEWS = ("step ", "test, ")  # what the lines begin with that are shown; all are in the logs


def run(name: str, command: list, out: Path, threads: int) -> bool:
    """Run a command that prints to a log, and show its news; whether all went well."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    with (
        (out / f"{name}.log").open("a", encoding="utf-8", buffering=1) as log,
        subprocess.Popen(
            [*map(str, command)], env=environment, text=True, stdout=subprocess.PIPE, stderr=log
        ) as process,
    ):
        for line in process.stdout:
            log.write(line)
            if line.startswith(NEWS):
                print(f"{name:9} {line}", end="", flush=True)
    if process.returncode:
        print(f"{name:9} failed; the end of {log.name} tells why", flush=True)
    return process.returncode == 0


def side_by_side(commands: dict[str, list], out: Path) -> None:
    """Run commands at once, the cores shared out; those that can end well do, whatever others do.

    Raises:
        SystemExit: one failed.
    """
    threads = max(1, os.cpu_count() // len(commands))
    with ThreadPoolExecutor() as pool:
        ended = pool.map(run, commands, commands.values(), repeat(out), repeat(threads))
    if not all(ended):
        raise SystemExit(1)


def main(flags: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="flickr8k", help="folder of the data set")
    parser.add_argument("--out", type=Path, default=Path("runs/flickr8k"))
    args, flags = parser.parse_known_args(flags)
    out, data = args.out, ["--data", args.data]
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    print(f"training {', '.join(MODELS)}; their progress: tail -f {out}/*.log", flush=True)

    # 1. Train; both share the work of encoding the pictures.
    train = [*TRAIN, *RECIPE, *data, "--cache-features", out / "features", "--resume", "auto"]
    runs = {name: [*train, "--out", out / name, *own, *flags] for name, own in MODELS.items()}
    side_by_side(runs, out)

    # 2. Score each, and then both together: each word by the mean of their log-probabilities.
    score = [*EVALUATE, *data]
    models = {name: f"--model={out / name}" for name in MODELS}
    alone = {name: [*score, models[name], "--out", out / name / "test"] for name in MODELS}
    side_by_side(alone, out)
    together = [*score, *models.values(), "--num-beams", "5", "--out", out / "together"]
    side_by_side({"together": together}, out)
    print(f"{(time.monotonic() - started) / 60:.0f} minutes")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on where it was") from None
