"""Several processes, on CPUs by gloo: what one process does, and no hang whatever happens."""

import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import PartialState
from conftest import find_port
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_training import SMALL, config, latest_step, same, train_quietly, weights, write_folder
from torch.distributed.run import get_args_parser

from vlattn.config import CaptionerConfig
from vlattn.data.scenes import scenes
from vlattn.training import train

ROOT = Path(__file__).parents[1]
DOCS = (ROOT / "docs" / "beyond-one-folder.md").read_text()
LITTLE = (
    "--max-steps 12 --scst-steps 1 --checkpoint-every 1 --dim 32 --depth 1 --num-heads 2 "
    "--encoder-dim 32 --encoder-depth 1 --encoder-heads 2 --image-size 32 32"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """7 pictures to train on, one of them damaged, and 5 of the dev split."""
    folder = write_folder(
        tmp_path_factory.mktemp("data") / "uneven", scenes("dev", size=32, count=12), dev=5
    )
    (folder / "6.png").write_bytes(b"no picture")
    return folder


def start(train_config, *, sharded=False):
    """Two processes that train together."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vlattn.training", "torch._dynamo"])  # imports take seconds
    arguments = (str(find_port()), train_config, sharded)
    ranks = [context.Process(target=train_as_rank, args=(rank, *arguments)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    return ranks


def train_as_rank(rank, port, train_config, sharded):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    os.environ["ACCELERATE_USE_FSDP"] = str(sharded)
    os.environ["OMP_NUM_THREADS"] = "1"  # or accelerate takes all cores for each
    train_quietly(train_config, 1)
    assert PartialState().num_processes == 2


def ends(ranks, seconds=300):
    """Their exit codes; what hangs is killed."""
    until = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0, until - time.monotonic()))
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def read_curves(run):
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize(
    ("encoder", "again", "sharded", "dev"),  # with one picture of the dev split, a process has none
    [
        ("vit", False, False, 5),
        ("timm:test_vit", True, False, 1),
        ("vit", True, True, 1),
        ("timm:test_vit", False, True, 5),
    ],
)
def test_two_processes_learn_what_one_does(tmp_path, encoder, again, sharded, dev):
    """Uneven shares hung, and doubled pictures bent the scores (E4): 7 pictures to train on,
    a damaged one in the second process's share, and a batch of one picture."""
    pictures = scenes("dev", size=32, count=7 + dev)
    folder = write_folder(tmp_path / "data", pictures, dev=dev)
    (folder / f"{dev + 1}.png").write_bytes(b"no picture")
    captioner = replace(SMALL, encoder=encoder, stem=False, dropout=0.0)
    settings = {
        "captioner": captioner,
        "epochs": 4,
        "scst_steps": 2,
        "accumulation": 2,
        "clip_norm": 0.1,
        "average_decay": 0.5,
    }
    if again:
        train(config(folder, tmp_path / "before", **settings))
        settings |= {"init": str(tmp_path / "before"), "captioner": CaptionerConfig()}
    train(config(folder, tmp_path / "one", **settings))
    assert ends(start(config(folder, tmp_path / "both", **settings), sharded=sharded)) == [0, 0]
    one, both = weights(tmp_path / "one"), weights(tmp_path / "both")
    assert one.keys() == both.keys()
    for name, value in one.items():
        torch.testing.assert_close(both[name], value, atol=2e-4, rtol=0)
    curves = [read_curves(tmp_path / name) for name in ("one", "both")]
    assert curves[0].keys() == curves[1].keys() >= {"train/loss", "dev/cider"}
    for tag in ("train/loss", "dev/cider", "dev/bleu_4"):
        assert curves[0][tag] == pytest.approx(curves[1][tag], abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("sharded", [False, True])
def test_one_of_two_killed_ends_the_other_and_the_run_goes_on(tmp_path, folder, sharded):
    settings = {"max_steps": 11, "scst_steps": 1, "checkpoint_every": 1, "eval_every": 4}
    assert ends(start(config(folder, tmp_path / "straight", **settings), sharded=sharded)) == [0, 0]
    killed = config(folder, tmp_path / "killed", **settings, resume="auto")
    ranks = start(killed, sharded=sharded)
    wait_for_step(tmp_path / "killed", 2)
    ranks[1].kill()
    assert ends(ranks, seconds=60) == [1, -9]  # an error of its own; what hangs is killed
    assert 2 <= latest_step(tmp_path / "killed") < 12
    assert ends(start(killed, sharded=sharded)) == [0, 0]
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "killed"))


def wait_for_step(out, step):
    until = time.monotonic() + 300
    while latest_step(out) < step:
        assert time.monotonic() < until
        time.sleep(0.02)


# ---- the commands of the docs ----


def launch(begin, folder, out):
    """Start the command that begins so, for two processes and little data."""
    (line,) = re.findall(rf"`({begin} [^`]+)`", DOCS)
    for written, here in {
        "--nproc-per-node 8": "--nproc-per-node 2",
        "--num_processes 8": "--num_processes 2",
        "--num-workers 8": "--num-workers 1",
        "--data D": f"--data {folder}",
        "--out runs/x": f"--out {out}",
    }.items():
        line = line.replace(written, here)
    program, *flags = shlex.split(line)
    module = "torch.distributed.run" if program == "torchrun" else "accelerate.commands.launch"
    flags = flags[program == "accelerate" :]  # without "launch"
    return subprocess.Popen(
        [sys.executable, "-m", module, *flags, *LITTLE],
        cwd=ROOT,
        env=os.environ
        | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        | {"PYTHONPATH": str(ROOT), "MASTER_PORT": str(find_port())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_torchrun_line_runs_and_goes_on_after_a_process_was_killed(tmp_path, folder):
    straight = launch("torchrun", folder, tmp_path / "straight")
    shown, _ = straight.communicate(timeout=300)
    assert straight.returncode == 0, shown
    killed = launch("torchrun", folder, tmp_path / "killed")
    wait_for_step(tmp_path / "killed", 3)
    psutil.Process(killed.pid).children()[0].kill()
    shown, _ = killed.communicate(timeout=60)
    assert killed.returncode != 0 and "Signal 9 (SIGKILL)" in shown
    again = launch("torchrun", folder, tmp_path / "killed")
    shown, _ = again.communicate(timeout=300)
    assert again.returncode == 0 and "continuing from" in shown, shown
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "killed"))


def test_accelerate_line_shares_out_the_weights(tmp_path, folder):
    run = launch("accelerate launch --use_fsdp", folder, tmp_path / "run")
    shown, _ = run.communicate(timeout=300)
    assert run.returncode == 0, shown
    assert "weights are shared out over 2 processes" in shown
    assert weights(tmp_path / "run")


def test_slurm_line_can_be_parsed():
    (line,) = re.findall(r"`(srun [^`]+)`", DOCS)
    (head,) = re.findall(r"`(HEAD=[^`]+)`", DOCS)
    script = f"{head}\n{line}".replace("\\|", "|")  # a table's cell escapes it
    subprocess.run(["bash", "-n", "-c", script], check=True)
    words = shlex.split(line)
    arguments = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
    assert (arguments.nnodes, arguments.nproc_per_node) == ("4", "8")
    assert (ROOT / arguments.training_script).is_file()
