"""Training: it learns, it resumes exactly, and it says what is wrong."""

import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from PIL import Image
from safetensors.torch import load_file

from vlattn import steps, training
from vlattn.attention import ATTENTIONS
from vlattn.captioner import Captioner
from vlattn.config import CaptionerConfig
from vlattn.data.scenes import scenes
from vlattn.grounding import choose_overlay
from vlattn.run_folder import RunFolder
from vlattn.self_critical import END, TEMPERATURE, SelfCritical, policy_loss
from vlattn.steps import region_loss, token_loss
from vlattn.training import TrainConfig, train

SMALL = CaptionerConfig(
    image_size=(32, 32),
    encoder_dim=32,
    encoder_depth=1,
    encoder_heads=2,
    dim=32,
    depth=1,
    num_heads=2,
    max_len=64,
)


@pytest.fixture(scope="session")
def pictures():
    return scenes("dev", size=32, count=14)


@pytest.fixture(autouse=True)
def no_drawing(request, monkeypatch):
    if "look_at" not in request.node.name:
        monkeypatch.setattr(training, "draw_curves", nothing)
        monkeypatch.setattr(training, "draw_captions", nothing)


@pytest.fixture
def folder(tmp_path, pictures):
    """An imagefolder data set: 11 pictures to train on, 3 of the dev split."""
    return write_folder(tmp_path / "data", pictures, dev=3)


def write_folder(path, records, *, dev=0, captions=None):
    path.mkdir()
    rows = []
    for i, record in enumerate(records):
        record.image.save(path / f"{i}.png")
        split = "dev" if i < dev else "train"
        for text in record.captions if captions is None else captions[i]:
            rows.append({"file_name": f"{i}.png", "text": text, "split": split})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (path / "metadata.jsonl").write_text(lines, encoding="utf-8")
    return path


def config(folder, out, **settings):
    return TrainConfig(
        data=str(folder),
        out=str(out),
        **{"captioner": SMALL, "batch_size": 3, "warmup_steps": 2, "precision": "fp32"} | settings,
    )


def weights(out):
    return load_file(out / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("attention", sorted(ATTENTIONS))
def test_overfits_four_captions(tmp_path, pictures, attention):
    texts = [
        ["a red circle"],
        ["two blue squares and a very small green star near the border"],
        ["an orange ring , and <eos> in the middle"],
        ["nothing"],
    ]
    folder = write_folder(tmp_path / "data", pictures[:4], captions=texts)
    captioner = train(
        config(
            folder,
            tmp_path / "run",
            captioner=replace(SMALL, attention=attention, dropout=0.0),
            max_steps=200,
            batch_size=4,
            learning_rate=3e-3,
            label_smoothing=0.0,
            average_decay=0.9,
        )
    )
    for num_beams in (1, 3):
        images = [r.image for r in pictures[:4]]
        captions = captioner.caption(images, num_beams=num_beams, max_len=64)
        assert [c.text for c in captions] == [text for (text,) in texts]
        assert all(c.finished for c in captions)


@pytest.mark.parametrize("stopped_after", [5, 8, 13])  # in an epoch, at its end, self-critical
def test_stopped_and_resumed_equals_straight(tmp_path, folder, monkeypatch, stopped_after):
    """Resuming once restored the weights alone: optimiser, rate and order of data began anew."""
    settings = {"accumulation": 2, "epochs": 5, "scst_steps": 6, "checkpoint_every": 1}
    train(config(folder, tmp_path / "straight", **settings))

    update, calls = steps._update, []

    def stop_in_time(*arguments):
        if len(calls) == stopped_after:
            raise KeyboardInterrupt
        calls.append(1)
        return update(*arguments)

    monkeypatch.setattr(steps, "_update", stop_in_time)
    with pytest.raises(KeyboardInterrupt):
        train(config(folder, tmp_path / "resumed", **settings))
    monkeypatch.setattr(steps, "_update", update)
    train(config(folder, tmp_path / "resumed", **settings, resume="auto"))
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "resumed"))


def test_fifty_kills_at_any_moment_leave_a_run_that_goes_on_to_the_same_model(tmp_path, folder):
    """In an epoch, in a window of two batches, while a checkpoint or a model is written."""
    settings = {
        "accumulation": 2,
        "epochs": 40,
        "scst_steps": 9,
        "checkpoint_every": 2,
        "eval_every": 5,
    }
    started = time.perf_counter()
    train(config(folder, tmp_path / "straight", **settings))
    longest = max(1, (time.perf_counter() - started) / 20)  # a busy machine gets further too
    killed = config(folder, tmp_path / "killed", **settings, resume="auto")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vlattn.training", "torch._dynamo"])  # imports take seconds
    moment = random.Random(0)
    threads = torch.get_num_threads()
    for _ in range(50):
        process = context.Process(target=train_quietly, args=(killed, threads))
        process.start()
        process.join(moment.uniform(0, longest))
        process.kill()
        process.join()
    assert latest_step(tmp_path / "killed") > 0
    train(killed)
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "killed"))


def train_quietly(train_config, threads):
    torch.set_num_threads(threads)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    # os.dup2(nowhere, 2)
    training.draw_curves = training.draw_captions = nothing
    train(train_config)


def nothing(*_):
    """In place of pictures that a test does not look at."""


def latest_step(out):
    found = [int(p.name.removeprefix("step-")) for p in out.glob("checkpoints/step-*")]
    return max(found, default=0)


def test_a_broken_checkpoint_gives_way_to_the_one_before(tmp_path, folder, capsys):
    """A kill while saving once left a cut file as the only checkpoint."""
    settings = {"epochs": 3, "checkpoint_every": 2}
    train(config(folder, tmp_path / "run", **settings))
    straight = weights(tmp_path / "run")
    newest = RunFolder(tmp_path / "run", {}).checkpoints()[0]
    for file in newest.iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    train(config(folder, tmp_path / "run", **settings, resume="auto"))
    assert f"cannot continue from {newest}" in capsys.readouterr().out
    assert same(straight, weights(tmp_path / "run"))


def test_a_failed_save_keeps_the_checkpoint_before(tmp_path, folder, monkeypatch):
    settings = {"epochs": 2, "checkpoint_every": 3}
    save, calls = training.Accelerator.save_state, []

    def full(self, path):
        calls.append(path)
        save(self, path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(training.Accelerator, "save_state", full)
    with pytest.raises(OSError, match="No space left"):
        train(config(folder, tmp_path / "run", **settings))
    assert [p.name for p in RunFolder(tmp_path / "run", {}).checkpoints()] == ["step-3"]
    monkeypatch.setattr(training.Accelerator, "save_state", save)
    train(config(folder, tmp_path / "run", **settings, resume="auto"))
    train(config(folder, tmp_path / "straight", **settings))
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "run"))


def test_resume_refuses_other_settings(tmp_path, folder):
    train(config(folder, tmp_path / "run", max_steps=2))
    with pytest.raises(ValueError, match="other settings of captioner, learning_rate"):
        train(
            config(
                folder,
                tmp_path / "run",
                max_steps=2,
                learning_rate=0.5,
                captioner=replace(SMALL, depth=2),
                resume="auto",
            )
        )


def test_a_run_that_could_not_start_leaves_nothing_in_the_way(tmp_path, folder):
    out = tmp_path / "run"
    wrong = replace(SMALL, encoder="timm:no_such_model")
    with pytest.raises(ValueError, match="is not a model of timm"):
        train(config(folder, out, max_steps=1, captioner=wrong))
    train(config(folder, out, max_steps=1))


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, folder):
    out = tmp_path / "run"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is not empty"):
        train(config(folder, out, max_steps=1))
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("bad", [[0], [10], [0, 4, 10]], ids=["first", "last", "some"])
def test_damaged_pictures_are_named_and_left_out(tmp_path, pictures, capsys, bad):
    """A cut JPEG trained on grey filler, or one bad file ended a long run without a name."""
    folder = write_folder(tmp_path / "data", pictures[:11])
    for i in bad:
        file = folder / f"{i}.png"
        file.write_bytes(file.read_bytes()[:300])
    train(config(folder, tmp_path / "run", max_steps=4))
    shown = capsys.readouterr()
    assert all(f"{i}.png" in shown.out + shown.err for i in bad)


def test_frozen_encoder_is_encoded_once_and_stays(tmp_path, folder):
    captioner = replace(SMALL, encoder="timm:tf_efficientnet_lite0", image_size=(64, 64))
    small = {"captioner": captioner, "max_steps": 3}
    before = Captioner(captioner, tokenizer_of(folder)).encoder.state_dict()
    (folder / "5.png").write_bytes(b"no picture")
    trained = train(config(folder, tmp_path / "run", **small))
    after = trained.encoder.state_dict()
    frozen = {k for k in after if "running" in k or "num_batches" in k}
    assert frozen and all(torch.equal(after[k], before[k]) for k in frozen)
    assert not (tmp_path / "run" / "features").exists()


def test_a_run_ends_with_curves_and_captions_to_look_at(tmp_path, folder, capsys):
    """Resumed, too: the curves are of all steps."""
    settings = {"epochs": 3, "scst_steps": 2}
    train(config(folder, tmp_path / "run", **settings))
    (tmp_path / "run" / "curves.png").unlink()
    train(config(folder, tmp_path / "run", **settings, resume="auto"))
    for name, least in (("curves.png", (1200, 200)), ("captions.png", (600, 300))):
        with Image.open(tmp_path / "run" / name) as image:
            image.load()
            assert image.size >= least and len(set(image.convert("L").tobytes())) > 20


def test_collapsed_captions_are_said(tmp_path, pictures, capsys):
    folder = write_folder(tmp_path / "data", pictures[:9], dev=4, captions=[["a ring"]] * 9)
    train(config(folder, tmp_path / "run", max_steps=40, learning_rate=1e-2))
    shown = capsys.readouterr()
    assert "hardly any caption tells pictures apart: 25.0% different texts" in shown.out + shown.err


@pytest.mark.parametrize("name, classes", [("test_vit", False), ("test_resnet", True)])
def test_kept_features_serve_other_runs(tmp_path, folder, monkeypatch, name, classes):
    """Views in turn, from features that a run before left; as if they had been computed anew."""
    captioner = replace(SMALL, encoder=f"timm:{name}", encoder_classes=classes, image_size=(32, 32))
    same_run = {"captioner": captioner, "max_steps": 9, "views": 2}
    straight = train(config(folder, tmp_path / "a", **same_run)).state_dict()
    kept = {"cache_features": str(tmp_path / "kept")}
    train(config(folder, tmp_path / "b", **same_run | kept))
    monkeypatch.setattr(Captioner, "encode", lambda self, pixels: 1 / 0)
    assert same(straight, train(config(folder, tmp_path / "c", **same_run | kept)).state_dict())


@pytest.mark.parametrize("rate", [1.0, 1e-6])
def test_an_encoder_that_learns_has_a_rate_of_its_own(tmp_path, folder, rate):
    captioner = replace(SMALL, encoder="timm:test_vit", image_size=(32, 32), dropout=0.0)
    torch.manual_seed(0)
    before = Captioner(captioner, tokenizer_of(folder))  # as train makes it, from the same seed
    learning = {"finetune_encoder": 7, "encoder_rate": rate}
    after = train(config(folder, tmp_path / "run", captioner=captioner, max_steps=2, **learning))
    moved = {
        name: (after.state_dict()[name] - value).abs().max()
        for name, value in before.state_dict().items()
        if name.endswith(("qkv.weight", "memory_proj.1.weight"))
    }
    encoder = max(value for name, value in moved.items() if name.startswith("encoder."))
    assert len(moved) > 1 and moved["memory_proj.1.weight"] > 1e-6
    assert 1e-7 < encoder if rate == 1.0 else encoder < 1e-8


def test_the_encoder_of_a_trained_captioner_can_learn_later(tmp_path, folder):
    """Its last stage, teacher-forced and self-critical; stopped in between or not."""
    captioner = replace(
        SMALL, encoder="timm:test_resnet", image_size=(32, 48), encoder_classes=True
    )
    first = train(config(folder, tmp_path / "first", captioner=captioner, max_steps=2))
    later = {"init": str(tmp_path / "first"), "finetune_encoder": 1, "encoder_rate": 0.5}
    later |= {"captioner": CaptionerConfig(), "max_steps": 3, "scst_steps": 2}
    later |= {"checkpoint_every": 2}
    straight = train(config(folder, tmp_path / "later", **later)).state_dict()
    shutil.rmtree(tmp_path / "later" / "checkpoints" / "step-5")
    again = train(config(folder, tmp_path / "later", **later, resume="auto")).state_dict()
    assert same(straight, again)
    before = first.encoder.state_dict().items()
    moved = {name for name, x in before if not torch.equal(x, straight[f"encoder.{name}"])}
    assert {name.split(".")[1] for name in moved} == {"layer4"}
    assert any(name.endswith("weight") for name in moved)


def test_self_critical_training_alone_goes_on_from_a_trained_captioner(tmp_path, folder):
    first = train(config(folder, tmp_path / "first", max_steps=3)).state_dict()
    later = {"init": str(tmp_path / "first"), "captioner": CaptionerConfig(), "scst_rate": 1e-2}
    later |= {"epochs": 0, "scst_steps": 4, "checkpoint_every": 2}
    straight = train(config(folder, tmp_path / "later", **later)).state_dict()
    shutil.rmtree(tmp_path / "later" / "checkpoints" / "step-4")
    again = train(config(folder, tmp_path / "later", **later, resume="auto")).state_dict()
    assert same(straight, again) and not same(straight, first)
    with pytest.raises(ValueError, match="nothing to do: epochs and scst_steps are 0"):
        config(folder, tmp_path / "none", epochs=0)


def test_a_vit_of_our_own_has_no_stages_to_choose(tmp_path, folder):
    with pytest.raises(ValueError, match="finetune_encoder is for an encoder of timm"):
        train(config(folder, tmp_path / "run", finetune_encoder=1, max_steps=1))


def tokenizer_of(folder):
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    return training.Tokenizer.train(row["text"] for row in rows)


def test_nothing_readable_is_an_error(tmp_path, pictures):
    folder = write_folder(tmp_path / "data", pictures[:4])
    for file in folder.glob("*.png"):
        file.write_bytes(b"no picture")
    captioner = replace(SMALL, encoder="timm:tf_efficientnet_lite0", image_size=(64, 64))
    with pytest.raises(ValueError, match="none of the pictures to train on could be read"):
        train(config(folder, tmp_path / "a", captioner=captioner, max_steps=2))


def test_unknown_words_are_never_written(tmp_path, folder, pictures):
    captioner = train(
        config(folder, tmp_path / "run", tokenizer="word", min_frequency=25, max_steps=10)
    )
    assert captioner.tokenizer.unknown_rate(pictures[0].captions) > 0.1
    for caption in captioner.caption([r.image for r in pictures[:3]], temperature=1.0, seed=3):
        assert "unk" not in caption.text


def test_gradient_is_of_the_mean_over_the_tokens_of_the_window(tmp_path, pictures, monkeypatch):
    """Averages of averages once gave a short caption the weight of a long one."""
    texts = [["a red ring"], [" ".join(["one two three"] * 4)], ["blue"], ["a b c d e"]]
    folder = write_folder(tmp_path / "data", pictures[:4], captions=texts)
    gradients = {}

    def keep(accelerator, model, optimizer, clip_norm):
        gradients[len(gradients)] = {k: p.grad.clone() for k, p in model.named_parameters()}
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "_update", keep)
    for batch_size, accumulation in ((4, 1), (2, 2), (1, 4)):
        settings = {"batch_size": batch_size, "accumulation": accumulation}
        captioner = replace(SMALL, dropout=0.0, stem=False)  # no batch norm
        with pytest.raises(KeyboardInterrupt):
            train(config(folder, tmp_path / f"{batch_size}", captioner=captioner, **settings))
    for name, expected in gradients[0].items():
        for other in (1, 2):
            torch.testing.assert_close(gradients[other][name], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_token_loss_equals_a_loop(label_smoothing):
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 7, dtype=torch.float64).float(), torch.tensor([3, 0, 6, 6, 1])
    expected = 0.0
    for row, target in zip(logits.log_softmax(-1).tolist(), targets.tolist()):
        for token, logprob in enumerate(row):
            share = label_smoothing / 7 + (1 - label_smoothing) * (token == target)
            expected -= share * logprob
    assert float(token_loss(logits, targets, label_smoothing)) == pytest.approx(expected, rel=1e-6)


def test_self_critical_rewards_only_captions_that_end(pictures):
    from vlattn.data.dataset import CaptionDataset
    from vlattn.images import Preprocess

    tokenizer = training.Tokenizer.train(t for r in pictures for t in r.captions)
    data = CaptionDataset(pictures, tokenizer, Preprocess(size=(32, 32)), max_len=32)
    reward = SelfCritical(data).reward
    words = pictures[2].captions[0].replace(",", "").split()
    assert reward(2, [*words, END]) > reward(2, words) > reward(2, words[:-1])


def test_policy_loss_pushes_towards_the_better_caption():
    logits = torch.zeros(2, 5, requires_grad=True)
    policy_loss(logits, torch.tensor([1, 3]), torch.tensor([0.5, -0.5])).backward()
    expected = np.full((2, 5), 0.1)
    expected[1] *= -1
    expected[0, 1], expected[1, 3] = 0.1 - 0.5, 0.5 - 0.1
    np.testing.assert_allclose(logits.grad, expected / TEMPERATURE, atol=1e-6)


def test_self_critical_training_raises_the_reward(tmp_path, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    settings = {"epochs": 60, "eval_every": 60, "scst_steps": 120, "scst_rate": 5e-4}
    train(config(folder, out, **settings))
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    reward = [event.value for event in events.Scalars("train/reward")]
    assert len(reward) == 120
    assert np.mean(reward[-20:]) > 1.4 * np.mean(reward[:20])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": ""}, "data must be given"),
        ({"out": ""}, "out must be given"),
        ({"epochs": -1}, "epochs must be at least 0, got -1"),
        ({"accumulation": -1}, "accumulation must be at least 1, got -1"),
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"scst_samples": 1}, "scst_samples must be at least 2, got 1"),
        ({"scst_steps": -1}, "scst_steps must be at least 0, got -1"),
        ({"learning_rate": 0.0}, "learning_rate must be positive, got 0.0"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1, got 1.0"),
        (
            {"attention_supervision": 1.0, "captioner": replace(SMALL, resize="crop")},
            "attention_supervision needs pictures that are seen whole",
        ),
        ({"views": 7}, "views must be 1 to 6, got 7"),
        ({"encoder_weights": "x"}, "encoder_weights are for an encoder of timm, got encoder 'vit'"),
    ],
)
def test_config_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"data": "a", "out": "b"} | settings)


def nan_loss(loss, logits):
    return loss * np.nan


def nan_gradient(loss, logits):
    return loss + (logits.sum() * 0).abs().sqrt()  # the slope of the root is infinite at zero


@pytest.mark.parametrize("spoil", [nan_loss, nan_gradient])
def test_a_run_that_diverges_stops_and_keeps_what_is_good(tmp_path, folder, monkeypatch, spoil):
    """A gradient that was not finite went into the weights, and these into a checkpoint."""
    calls = []

    def diverge(logits, targets, label_smoothing):
        calls.append(1)
        loss = token_loss(logits, targets, label_smoothing)
        return spoil(loss, logits) if len(calls) == 6 else loss

    monkeypatch.setattr(steps, "token_loss", diverge)
    message = r"step 6: the loss or its gradient is not finite: lower the learning rate, \d"
    with pytest.raises(ValueError, match=message):
        train(config(folder, tmp_path / "run", epochs=3, checkpoint_every=2))
    assert latest_step(tmp_path / "run") == 4
    best = Captioner.from_pretrained(tmp_path / "run").state_dict()
    assert all(x.isfinite().all() for x in best.values())


def test_a_loss_scale_that_shrinks_without_end_stops(tmp_path, folder, monkeypatch):
    """float16's scale halved at every step while training "ran" (X19)."""
    monkeypatch.setattr(AcceleratedOptimizer, "step_was_skipped", property(lambda self: True))
    with pytest.raises(ValueError, match="step 20: the gradient is not finite"):
        train(config(folder, tmp_path / "run", max_steps=30))


def test_region_loss_equals_a_loop():
    torch.manual_seed(0)
    weights = torch.rand(3, 2, 4, 6).softmax(-1)  # (K, L, H, N)
    regions = torch.rand(3, 6) * (torch.rand(3, 6) > 0.5)
    regions[1] = 0.0  # a target without boxes
    expected = 0.0
    for target in (0, 2):
        inside = 0.0
        for patch in range(6):
            mean = sum(float(weights[target, i, j, patch]) for i in range(2) for j in range(4)) / 8
            inside += mean * float(regions[target, patch])
        expected -= np.log(inside)
    assert float(region_loss(weights, regions)) == pytest.approx(expected, rel=1e-5)


def test_supervised_attention_looks_into_the_boxes(tmp_path, monkeypatch, pictures):
    """The share of the words' attention that falls into their boxes, with and without."""
    records = [r._replace(split="train") for r in pictures]
    known = records + [r._replace(split="dev") for r in records[:3]]
    monkeypatch.setattr(training, "read_records", lambda *_, **__: (known, "fourteen scenes"))
    captioner = replace(SMALL, patch_size=8)
    inside, chosen = {}, []
    monkeypatch.setattr(
        training,
        "choose_overlay",
        lambda captioner, dev: chosen.append(len(dev)) or choose_overlay(captioner, dev),
    )
    for strength in (0.0, 1.0):
        trained = train(
            config(
                "scenes",
                tmp_path / f"{strength}",
                captioner=captioner,
                attention_supervision=strength,
                max_steps=60,
                learning_rate=3e-3,
                average_decay=0.9,
            )
        )
        data = training._dataset(
            config("a", "b"), trained, records, grid_size=trained.encoder.grid_size
        )
        batch = training.collate([data[i] for i in range(len(data))])
        with torch.no_grad():
            _, weights = trained(batch.images, batch.packed, need_weights=True)
        share = (weights[:, -1].mean(1) * batch.regions).sum(-1)
        inside[strength] = float(share[batch.regions.any(-1)].mean())
    assert inside[1.0] > 1.5 * inside[0.0]
    assert chosen == [3, 3]
    assert Captioner.from_pretrained(tmp_path / "1.0").config == trained.config


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_free_memory_is_given_back():
    """Training held 6 GB, of which 4 were free: batches are of ever other sizes."""

    def held():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    blocks = [torch.ones(25_000) for _ in range(2000)]  # 200 MB, in the heap
    kept, blocks = blocks[::10], None
    before = held()
    training._return_memory()
    assert before - held() > 100e6 and len(kept) == 200
