"""The examples, and the README's code, run as they stand."""

import itertools
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from vlattn.attention import ATTENTIONS
from vlattn.data.scenes import SPLITS

ROOT = Path(__file__).parents[1]
SMALL = (
    "--max-steps 2 --batch-size 4 --dim 32 --depth 1 --num-heads 2 --encoder-dim 32 "
    "--encoder-depth 1 --encoder-heads 2 --image-size 32 32 --precision fp32"
).split()


def run_example(name, flags, monkeypatch):
    """Its exit status; 0 where it ends without one."""
    monkeypatch.setattr("sys.argv", [name, *map(str, flags)])
    try:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.fixture
def few_scenes(monkeypatch):
    for split, count in {"train": 12, "dev": 4, "test": 7, "test_novel": 4}.items():
        monkeypatch.setitem(SPLITS, split, count)


def test_train_scenes(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    assert run_example("train_scenes.py", ["--out", out, *SMALL], monkeypatch) == 0
    shown = capsys.readouterr().out
    for split, count in (("test", 500), ("test_novel", 200)):
        assert f"{split}, {count} images: every colour and shape right in" in shown
    with Image.open(out / "words.png") as sheet:
        assert sheet.width > 500


def test_train_captioner(tmp_path, monkeypatch, capsys, write_imagefolder, records):
    data = write_imagefolder(tmp_path / "data", [r._replace(split="train") for r in records])
    flags = ["--data", data, "--out", tmp_path / "run", "--scst-steps", 1, *SMALL]
    assert run_example("train_captioner.py", flags, monkeypatch) == 0
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert run_example("train_captioner.py", flags, monkeypatch) == 2
    assert "is not empty" in capsys.readouterr().err


def test_flickr8k(tmp_path, monkeypatch, capsys, write_imagefolder, records):
    """On any data, with any encoder; what fails is named, and its log tells why."""
    splits = ["train"] * 4 + ["dev"] * 2 + ["test"] * 2
    data = [record._replace(split=split) for record, split in zip(records, splits)]
    data = write_imagefolder(tmp_path / "data", data)
    out, weights = tmp_path / "runs", tmp_path / "resnet.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), weights)
    flags = ["--data", data, "--out", out, "--encoder", "timm:test_resnet", "--scst-steps", 1]
    flags += ["--encoder-weights", weights]
    assert run_example("flickr8k.py", [*flags, *SMALL], monkeypatch) == 0
    shown = capsys.readouterr().out
    for name in ("plain", "boxes", "together"):
        assert len(re.findall(f"^{name} +test, 2 images: BLEU-1 ", shown, re.MULTILINE)) == 1
    assert (out / "together" / "captions.json").is_file()
    assert run_example("flickr8k.py", [*flags, *SMALL, "--dim", 48], monkeypatch) == 1
    assert f"boxes     failed; the end of {out}/boxes.log tells why" in capsys.readouterr().out
    assert "was started with other settings" in (out / "boxes.log").read_text()


@pytest.mark.parametrize(
    "settings",
    [
        {"attention": "additive", "num_heads": 4, "num_kv_heads": 2},
        {"positions": "rotary", "norm": "rms", "num_heads": 4, "num_kv_heads": 1},
        {"norm_first": False, "depth": 3},
    ],
)
@torch.inference_mode()
def test_walkthrough_computes_what_the_package_computes(make_captioner, photos, settings):
    by_hand = runpy.run_path(str(ROOT / "examples" / "attention_walkthrough.py"))["by_hand"]
    captioner = make_captioner(**settings)
    pixels, _ = captioner.preprocess(photos[0])
    features = captioner.encode(pixels[None])
    tokens = torch.randint(4, captioner.tokenizer.vocab_size, (1, 7))
    layers, logits = by_hand(captioner, tokens, captioner.memory(features))
    expected, weights = captioner.decode(tokens, features, need_weights=True)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    maps = torch.stack([seen.weights for *_, seen in layers], dim=1)
    torch.testing.assert_close(maps, weights, atol=1e-5, rtol=1e-4)


def test_walkthrough(tmp_path, monkeypatch, capsys, captioner, photos):
    captioner.save_pretrained(tmp_path / "model")
    photos[0].save(tmp_path / "photo.png")
    page = tmp_path / "page.html"
    flags = ["a red circle above a star", tmp_path / "photo.png", "--model", tmp_path / "model"]
    assert run_example("attention_walkthrough.py", [*flags, "--html", page], monkeypatch) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    for part in ("_red", "S = Q K^T", "as trained", "not trained", "logits apart", "multi-query"):
        assert part in shown
    for line in re.findall(r"^  multi-.*|^  grouped-.*", shown, re.MULTILINE):
        expected, measured = re.findall(r"  ([\d,]+)", line)[:2]
        assert expected == measured
    html = page.read_text()
    assert "<unk>" not in html and "&lt;unk&gt;" in html
    assert 'src="data:image/png' in html and "http" not in html


def test_compare_attention(monkeypatch, capsys, few_scenes, tmp_path):
    flags = ["--steps", 2, "--seeds", 2, "--html", tmp_path / "page.html"]
    assert run_example("compare_attention.py", flags, monkeypatch) == 0
    shown = capsys.readouterr().out
    for part in ("eager additive", "MiB beyond the inputs", "nearest", "pointing", "2 seeds"):
        assert part in shown
    assert (tmp_path / "page.html").is_file()


def test_nearest_key_is_out_of_reach_for_a_dot_product():
    example = runpy.run_path(str(ROOT / "examples" / "compare_attention.py"))
    found = {
        name: example["fit"](kind, example["nearest"], 300, 0) for name, kind in ATTENTIONS.items()
    }
    _, key, target = example["nearest"](10_000)
    outermost = (target == key[..., 0].argmin(1)) | (target == key[..., 0].argmax(1))
    assert found["scaled_dot_product"] < 100 * outermost.float().mean() + 2 < found["additive"]


def test_show_attend_tell(tmp_path, monkeypatch, capsys, few_scenes):
    flags = ["--out", tmp_path / "run", "--steps", 2]
    assert run_example("show_attend_tell.py", flags, monkeypatch) == 0
    assert "7 test pictures: BLEU" in capsys.readouterr().out
    assert (tmp_path / "run" / "model.safetensors").is_file()
    with Image.open(tmp_path / "run" / "words.png") as sheet:
        assert sheet.width > 500


def test_show_attend_tell_writes_a_batch_as_one_by_one():
    """When some pictures' texts had ended, the others were given their features, or it failed."""
    example = runpy.run_path(str(ROOT / "examples" / "show_attend_tell.py"))
    torch.manual_seed(0)
    encoder = example["ViT"]((32, 48), 16, dim=12, depth=1, num_heads=2)
    model = example["ShowAttendTell"](encoder, vocab_size=11, dim=8).eval()
    tokenizer = SimpleNamespace(bos_id=1, eos_id=2, pad_id=0)
    with torch.no_grad():
        for p in model.lstm.parameters():
            p.mul_(4)  # texts that differ
        model.out.weight.mul_(9)
        model.out.bias[tokenizer.eos_id] += 2
    features = 3 * torch.randn(7, 6, 12)
    texts = example["write"](model, tokenizer, features)
    assert len({len(text.tokens) for text in texts}) > 2
    for text, feature in zip(texts, features):
        (alone,) = example["write"](model, tokenizer, feature[None])
        assert text.tokens == alone.tokens


def test_show_attend_tell_draws_attention_to_every_patch():
    """Its loss is the cross-entropy and how far each patch's attention over the words is from 1."""
    example = runpy.run_path(str(ROOT / "examples" / "show_attend_tell.py"))
    torch.manual_seed(0)
    encoder = example["ViT"]((32, 48), 16, dim=12, depth=1, num_heads=2)
    model = example["ShowAttendTell"](encoder, vocab_size=11, dim=8).eval()
    features = model.look(torch.randn(2, 3, 32, 48))  # (2, 6, 12)
    captions = torch.tensor([[1, 5, 7, 9, 2], [1, 4, 2, 0, 0]])
    expected, count, uneven = 0.0, 0, 0.0
    for feature, caption in zip(features, captions):
        kv, state = model.begin(feature[None])
        looked = torch.zeros(6)
        for token, target in itertools.pairwise(caption):
            if target != 0:
                told, weights, state = model.step(model.embed(token[None]), kv, state)
                expected = expected - model.logits(told).log_softmax(-1)[0, target]
                looked, count = looked + weights[0], count + 1
        uneven = uneven + ((1 - looked) ** 2).mean() / 2
    loss = example["loss_of"](model, features, captions, 0)
    torch.testing.assert_close(loss, expected / count + example["EVENNESS"] * uneven)


def test_readme_code(tmp_path, monkeypatch, make_captioner, photos):
    """Each block runs in a folder that has the models and the picture that it names.

    What needs a running demo is run in test_demo.py.
    """
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    monkeypatch.chdir(tmp_path)
    make_captioner().save_pretrained(tmp_path / "runs" / "mine")
    make_captioner("additive").save_pretrained(tmp_path / "runs" / "other")
    photos[0].save(tmp_path / "picture.jpg")
    for block in blocks:
        if "gradio_client" not in block:
            exec(compile(block, "README.md", "exec"), {})


def test_readme_commands_exist():
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for script in re.findall(r"(?:examples|benchmarks)/\w+\.py", text):
        assert (ROOT / script).is_file(), script
