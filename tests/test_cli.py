"""The command line: what it prints, and one line and status 2 for whatever a user gets wrong."""

import base64
import io
import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from vlattn import cli
from vlattn.config import CaptionerConfig
from vlattn.data.records import Report
from vlattn.training import TrainConfig


@pytest.fixture(scope="module")
def model(make_captioner, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_captioner().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def pictures(photos, tmp_path):
    """The photos as files, with a space and another script in their names."""
    files = []
    for photo, name in zip(photos, ("a b.png", "図.png", "c.d.png")):
        photo.save(tmp_path / name)
        files.append(str(tmp_path / name))
    return files


@pytest.fixture
def dataset(write_imagefolder, records, tmp_path):
    splits = ["train", "train", "dev", "test", "test", "test"]
    some = [r._replace(split=split) for r, split in zip(records, splits)]
    return write_imagefolder(tmp_path / "data", some)


@pytest.fixture
def fails(capsys):
    """A function that runs a command, and gives the one line that it fails with."""

    def run(*arguments):
        assert cli.main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert err.startswith("vlattn: ") and err.count("\n") == 1 and err.endswith("\n")
        assert "Traceback" not in out + err
        return err.removeprefix("vlattn: ").strip()

    return run


def run(capsys, *arguments):
    assert cli.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


# ---- caption ----


def test_caption_prints_a_line_per_picture(model, pictures, make_captioner, capsys):
    captions = make_captioner().caption(pictures, num_beams=2, max_len=9, length_penalty=0.5)
    options = ("--num-beams", 2, "--max-len", 9, "--length-penalty", 0.5)
    out = run(capsys, "caption", "--model", model, *options, *pictures)
    expected = [f"{path}: {caption.text}" for path, caption in zip(pictures, captions)]
    assert out.splitlines() == expected


def test_caption_prints_json_with_every_script_as_written(model, pictures, make_captioner, capsys):
    out = run(capsys, "caption", "--model", model, "--json", *pictures)
    assert pictures[1] in out  # not as \u escapes
    captions = make_captioner().caption(pictures)
    for line, path, caption in zip(out.splitlines(), pictures, captions):
        entry = json.loads(line)
        assert entry.keys() == {"image", "text", "score", "finished", "words"}
        assert (entry["image"], entry["text"]) == (path, caption.text)
        assert entry["finished"] is caption.finished
        assert entry["score"] == pytest.approx(caption.score, abs=1e-4)
        assert "".join(word["text"] for word in entry["words"]) == caption.text
        for word, expected in zip(entry["words"], caption.words):
            assert (word["start"], word["end"]) == (expected.start, expected.end)
            assert word["logprob"] == pytest.approx(expected.logprob, abs=1e-3)
    assert len(out.splitlines()) == 3


def test_models_that_write_together(model, pictures, dataset, make_captioner, capsys, tmp_path):
    captioner, other = make_captioner(), make_captioner("additive")
    other.save_pretrained(tmp_path / "other")
    models = ("--model", model, "--model", tmp_path / "other")
    captions = captioner.caption(pictures, ensemble=[other])
    expected = [f"{path}: {caption.text}" for path, caption in zip(pictures, captions)]
    assert run(capsys, "caption", *models, *pictures).splitlines() == expected
    run(capsys, "evaluate", *models, "--data", dataset, "--out", tmp_path / "results")
    written = json.loads((tmp_path / "results" / "captions.json").read_text())
    paths = [next(Path(dataset).rglob(result["image_id"])) for result in written]
    assert [r["caption"] for r in written] == [
        caption.text for caption in captioner.caption(paths, ensemble=[other])
    ]


def test_caption_writes_an_overlay_per_word(model, pictures, photos, capsys, tmp_path):
    folder = tmp_path / "new" / "overlays"
    options = ("--json", "--max-len", 6, "--overlay", folder)
    out = run(capsys, "caption", "--model", model, *options, *pictures)
    names = []
    for line, path, photo in zip(out.splitlines(), pictures, photos):
        for i, word in enumerate(json.loads(line)["words"], start=1):
            plain = word["text"].strip()
            plain = plain if plain.isalnum() else "sign"
            names.append(f"{Path(path).stem}-{i:02}-{plain}.png")
            with Image.open(folder / names[-1]) as overlay:
                assert overlay.size == photo.size
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_overlays_of_pictures_with_one_name_are_kept_apart(model, photos, capsys, tmp_path):
    paths = []
    for i, photo in enumerate(photos[:2]):
        (tmp_path / str(i)).mkdir()
        paths.append(tmp_path / str(i) / "photo.png")
        photo.save(paths[-1])
    folder = tmp_path / "overlays"
    command = ("caption", "--model", model, "--json", "--max-len", 4, "--overlay", folder)
    lines = run(capsys, *command, *paths).splitlines()
    words = [len(json.loads(line)["words"]) for line in lines]
    sizes = []
    for path in folder.iterdir():
        with Image.open(path) as overlay:
            sizes.append(overlay.size)
    assert [sizes.count(photo.size) for photo in photos[:2]] == words


def test_pictures_that_are_none_are_named_and_the_others_captioned(
    model, pictures, tmp_path, capsys
):
    """One damaged file ended the command with a traceback (C3)."""
    bad = [tmp_path / name for name in ("cut.png", "text.jpg", "folder", "missing.png")]
    bad[0].write_bytes(Path(pictures[0]).read_bytes()[:-400])
    bad[1].write_text("no picture\nat all\n")
    bad[2].mkdir()
    order = [bad[0], pictures[0], bad[1], bad[2], pictures[1], bad[3]]
    assert cli.main(["caption", "--model", model, *map(str, order)]) == 2
    out, err = capsys.readouterr()
    assert [line.split(": ")[0] for line in out.splitlines()] == pictures[:2]
    assert len(err.splitlines()) == 4
    for line, path in zip(err.splitlines(), bad):
        assert line.startswith(f"vlattn: cannot read {str(path)!r}: ")


# ---- evaluate ----


def test_evaluate_prints_and_writes_the_scores(model, dataset, capsys, tmp_path):
    report = tmp_path / "report.json"
    options = ("--num-beams", 1, "--json", report, "--out", tmp_path / "results")
    out = run(capsys, "evaluate", "--model", model, "--data", dataset, *options)
    assert out.startswith("test, 3 images: ") and "end in a function word" in out
    results = json.loads((tmp_path / "results" / "captions.json").read_text())
    assert [result["image_id"] for result in results] == ["3.png", "4.png", "5.png"]
    assert len(json.loads((tmp_path / "results" / "scores.json").read_text())) == 3
    content = json.loads(report.read_text())
    assert content.keys() == {"captions"}
    captions = content["captions"]
    assert captions.keys() == {"bleu", "rouge_l", "cider", "images"}
    assert captions["images"] == 3 and len(captions["bleu"]) == 4
    for score in (*captions["bleu"], captions["rouge_l"]):
        assert 0 <= score <= 1
    assert captions["cider"] >= 0


def test_evaluate_of_perfect_captions(model, dataset, capsys, tmp_path, monkeypatch):
    """Captions and references of two pictures were mixed up: a perfect captioner scores 1."""

    def write(captioner, data, **generation):
        defaults = {"ensemble": [], "num_beams": 3, "max_len": 30, "length_penalty": 1.0}
        assert generation == defaults | {"no_repeat_ngram": None}
        return {record.name: record.captions[0] for record in data.records}

    monkeypatch.setattr(cli, "write_captions", write)
    report = tmp_path / "report.json"
    run(capsys, "evaluate", "--model", model, "--data", dataset, "--json", report)
    captions = json.loads(report.read_text())["captions"]
    assert captions["bleu"] == pytest.approx([1] * 4) and captions["rouge_l"] == pytest.approx(1)


def test_evaluate_leaves_out_damaged_pictures(model, dataset, capsys):
    (dataset / "4.png").write_bytes(b"")
    out = run(capsys, "evaluate", "--model", model, "--data", dataset, "--max-len", 5)
    assert "test, 2 images: " in out and "skipped: cannot read" in out and "4.png" in out


@pytest.mark.parametrize("split", ["tset", "test_novel"])
def test_an_unknown_split(model, dataset, fails, split):
    line = fails("evaluate", "--model", model, "--data", dataset, "--split", split)
    assert line == f"{dataset} has no split '{split}', only train, dev, test"


def test_evaluate_fails_where_no_picture_can_be_read(model, dataset, capsys, tmp_path):
    for i in (3, 4, 5):
        (dataset / f"{i}.png").write_bytes(b"no picture")
    report = tmp_path / "report.json"
    report.write_text("the one before")
    command = ["evaluate", "--model", model, "--data", str(dataset), "--json", str(report)]
    assert cli.main(command) == 2
    *_, line = capsys.readouterr().err.splitlines()  # after what is left of a progress bar
    assert line.endswith("vlattn: none of the pictures of split 'test' could be read")
    assert report.read_text() == "the one before"


# ---- what users get wrong ----


@pytest.mark.parametrize("command", ["caption", "evaluate"])
def test_a_model_that_is_none(command, pictures, dataset, fails, tmp_path):
    rest = pictures if command == "caption" else ["--data", dataset]
    missing = tmp_path / "no" / "model"
    line = fails(command, "--model", missing, *rest)
    assert line == f"no model folder {missing}, and none of that name on the hub"
    line = fails(command, "--model", dataset, *rest)
    assert line.startswith(f"{dataset} is not a vlattn model folder: no config.json, ")


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_data_that_is_none(command, model, fails, tmp_path):
    (tmp_path / "empty").mkdir()
    rest = ["--model", model] if command == "evaluate" else ["--out", tmp_path / "run"]
    line = fails(command, "--data", tmp_path / "nowhere", *rest)
    assert line == f"there is no file or folder '{tmp_path / 'nowhere'}'"
    rest = ["--model", model] if command == "evaluate" else ["--out", tmp_path / "other"]
    line = fails(command, "--data", tmp_path / "empty", *rest)
    assert line.startswith(f"no captions found in '{tmp_path / 'empty'}': no ")
    rest = ["--model", model] if command == "evaluate" else ["--out", tmp_path / "third"]
    line = fails(command, "--data", tmp_path / "empty", "--layout", "zip", *rest)
    assert line.startswith("layout must be one of auto, scenes, ")


def test_train_needs_data_and_a_folder(fails):
    assert fails("train") == "--data must be given"
    assert fails("train", "--data", "scenes") == "--out must be given"
    assert fails("train", "--data", "", "--out", "x") == "data must be given"


def test_train_with_an_unknown_encoder(dataset, fails, tmp_path):
    for name, message in {
        "resnet": "encoder must be 'vit' or 'timm:<name>', got 'resnet'",
        "timm:no_such_model": "encoder 'timm:no_such_model' is not a model of timm",
    }.items():
        out = tmp_path / name.replace(":", "-")
        line = fails("train", "--data", dataset, "--out", out, "--encoder", name)
        assert line.startswith(message)


def test_train_leaves_a_folder_with_something_in_it_alone(dataset, fails, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    line = fails("train", "--data", dataset, "--out", out)
    assert line.startswith(f"{out} is not empty: choose another folder, or ")
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    assert (out / "notes.txt").read_text() == "mine"
    line = fails("train", "--data", dataset, "--out", out / "notes.txt")
    assert line.startswith(f"{out / 'notes.txt'} is not empty")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND (see vlattn --help)"),
        (["fly"], "argument COMMAND: invalid choice: 'fly'"),
        (["caption", "x.png"], "the following arguments are required: --model"),
        (["caption", "--model", "m"], "the following arguments are required: IMAGE"),
        (["caption", "--model", "m", "x.png", "--wings"], "unrecognized arguments: --wings"),
        (["caption", "--model", "m", "x.png", "--num-beams", "two"], "argument --num-beams: "),
        (["evaluate", "--model", "m"], "the following arguments are required: --data"),
        (["train", "--epochs", "1.5"], "argument --epochs: invalid int value: '1.5'"),
        (["train", "--attention", "soft"], "argument --attention: invalid choice: 'soft'"),
        (["train", "--image-size", "64"], "argument --image-size: expected 2 arguments"),
        (["train", "--data", "scenes", "--out", "x", "--epochs", "0"], "there is nothing to do"),
        (["train", "--data", "scenes", "--out", "x", "--dim", "0"], "dim must be above 0, got 0"),
    ],
)
def test_a_command_that_is_none(arguments, message, fails):
    """Some mistakes printed the whole usage before the line that says what is wrong."""
    assert fails(*arguments).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-beams", 0), "num_beams must be at least 1, got 0"),
        (("--max-len", 0), "max_len must be at least 1, got 0"),
        (("--no-repeat-ngram", 0), "no_repeat_ngram must be at least 1, got 0"),
        (("--length-penalty", -1), "length_penalty must be 0 to 10, got -1.0"),
        (("--length-penalty", 1000), "length_penalty must be 0 to 10, got 1000.0"),
    ],
)
def test_generation_out_of_range(model, pictures, fails, options, message):
    assert fails("caption", "--model", model, *options, *pictures) == message


def test_a_folder_that_cannot_be_written(model, pictures, capsys):
    command = ["caption", "--model", model, "--overlay", pictures[1], pictures[0]]
    assert cli.main(command) == 2
    out, err = capsys.readouterr()
    assert out.startswith(f"{pictures[0]}: ")  # what was written before stays
    assert err.count("\n") == 1 and pictures[1] in err


@pytest.mark.parametrize("command", [[], ["train"], ["evaluate"], ["caption"], ["demo"]])
def test_help_is_printed(command, capsys):
    """A percent sign in a help text made --help crash."""
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    assert stop.value.code == 0 and "usage: vlattn" in capsys.readouterr().out


# ---- the settings of a run ----


@pytest.fixture
def trained(monkeypatch):
    """The configs that training was called with; nothing is trained."""
    configs = []
    monkeypatch.setattr("vlattn.training.train", configs.append)
    return configs


def test_flags_beat_the_config_file_which_beats_the_defaults(trained, tmp_path, capsys):
    file = tmp_path / "settings.json"
    captioner = {"dim": 96, "attention": "additive", "image_size": [64, 96], "stem": False}
    settings = {"data": "here", "epochs": 3, "learning_rate": 2e-4, "resume": None, "seed": 7}
    file.write_text(json.dumps(settings | {"captioner": captioner}))
    flags = ("--out", "there", "--epochs", 5, "--dim", 128, "--no-lowercase", "--norm", "rms")
    out = run(capsys, "train", "--config", file, *flags)
    assert out == "the model is in there\n"
    assert trained == [
        TrainConfig(
            data="here",
            out="there",
            epochs=5,
            learning_rate=2e-4,
            seed=7,
            lowercase=False,
            captioner=CaptionerConfig(
                dim=128, attention="additive", image_size=(64, 96), stem=False, norm="rms"
            ),
        )
    ]


def test_the_settings_of_a_run_make_the_same_run(trained, tmp_path, capsys):
    """`train.json` of a run folder is a config file."""
    config = TrainConfig(
        data="here",
        out=str(tmp_path / "run"),
        clip_norm=0.5,
        captioner=CaptionerConfig(image_size=(32, 48), num_kv_heads=2, tie_embeddings=False),
    )
    settings = json.dumps(asdict(config))
    (tmp_path / "train.json").write_text(settings, encoding="utf-8")
    run(capsys, "train", "--config", tmp_path / "train.json")
    assert trained == [config]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON: "),
        ("\xff", "is not JSON: "),
        ("[]", "must hold one JSON object"),
        ('{"captioner": 5}', "must hold one JSON object, and so must its captioner"),
        ('{"colour": "red"}', "unknown setting colour"),
        ('{"captioner": {"colour": 1, "dim": 96}}', "unknown setting colour"),
        ('{"dim": 96}', "unknown setting dim"),
        ('{"epochs": "many"}', "argument --epochs: invalid int value: 'many'"),
        ('{"epochs": 1.5}', "argument --epochs: invalid int value: '1.5'"),
        ('{"epochs": true}', "argument --epochs: expected one argument"),
        ('{"epochs": [1, 2]}', "unrecognized arguments: 2"),
        ('{"learning_rate": {}}', "argument --learning-rate: invalid float value: '{}'"),
        ('{"lowercase": "no"}', "argument --lowercase/--no-lowercase: "),
        ('{"precision": "int8"}', "argument --precision: invalid choice: 'int8'"),
        ('{"captioner": {"image_size": [64]}}', "argument --image-size: expected 2 arguments"),
        ('{"captioner": {"image_size": 64}}', "argument --image-size: expected 2 arguments"),
    ],
)
def test_a_bad_config_file(trained, fails, tmp_path, content, message):
    """Values of the wrong type went through, and came out as a traceback from deep inside."""
    file = tmp_path / "settings.json"
    file.write_bytes(content.encode("latin-1"))
    line = fails("train", "--data", "here", "--out", "there", "--config", file)
    assert line.startswith(str(file)) and message in line
    assert trained == []


def test_a_missing_config_file(trained, fails, tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        line = fails("train", "--data", "here", "--out", "there", "--config", path)
        assert str(path) in line


@pytest.mark.parametrize("module", ["vlattn", "vlattn.cli"])
def test_importing_vlattn_loads_no_heavy_package(module):
    """The command loaded accelerate and tensorboard before it wrote its first caption."""
    code = (
        f"import torch, sys; before = {{*sys.modules}}; import {module}; "
        "print(*{name.partition('.')[0] for name in {*sys.modules} - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = {*done.stdout.split()} - {*sys.stdlib_module_names}
    assert new <= {"vlattn", "PIL", "safetensors", "tokenizers", "numpy", "tqdm"}


# ---- evaluate --grounding ----


class Page(HTMLParser):
    """The text of a page, and the addresses that it would load."""

    def __init__(self, html):
        super().__init__()
        self.text, self.sources, self.tags = "", [], Counter()
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.sources += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_evaluate_measures_the_boxes_of_the_data_set_and_writes_a_report(
    model, records, capsys, tmp_path, monkeypatch
):
    splits = ["dev", *["test"] * 5]
    some = [r._replace(split=split) for r, split in zip(records, splits)]
    report = Report("six scenes", {"dev": 1, "test": 5}, {"dev": 5, "test": 25})
    monkeypatch.setattr(cli, "read_records", lambda *_, **__: (some, report))
    monkeypatch.setattr(  # one is a reference caption, one is markup
        cli,
        "write_captions",
        lambda *_, **__: {
            r.name: r.captions[0] if i else "<script>a ring</script>"
            for i, r in enumerate(some[1:])
        },
    )
    files = ("--json", tmp_path / "r.json", "--out", tmp_path / "out")
    out = run(capsys, "evaluate", "--model", model, "--data", "scenes", "--grounding", *files)
    assert "teacher_forced: " in out and "generated: " in out and "centre" in out
    grounding = json.loads((tmp_path / "r.json").read_text())["grounding"]
    assert grounding.keys() == {"teacher_forced", "generated", "faithfulness"}
    for how in ("teacher_forced", "generated"):
        assert grounding[how].keys() >= {"phrases", "correctness", "uniform", "pointing", "center"}
        assert 0 < grounding[how]["correctness"] < 1
    page = Page((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    assert page.tags["script"] == 0 and page.tags["svg"] == 1 and page.tags["figure"] == 18
    assert all(source.startswith("data:image/jpeg;base64,") for source in page.sources)
    for title in ("attention correctness", "pointing", "Worst words", "Median captions", "CIDEr"):
        assert title in page.text
    picture = base64.b64decode(page.sources[0].partition(",")[2])
    assert Image.open(io.BytesIO(picture)).size == (48, 48)


def test_evaluate_reads_the_boxes_of_a_file(model, dataset, records, capsys, tmp_path):
    rows = []
    for i, record in enumerate(records[:6]):
        boxes, sentences = {}, []
        for caption, phrases in zip(record.captions, record.phrases):
            named = []
            for phrase in phrases:
                boxes[str(len(boxes))] = phrase.boxes
                entity = str(len(boxes) - 1)
                place = {"start": phrase.start, "end": phrase.end}
                named.append({"entity": entity, "kind": phrase.kind} | place)
            sentences.append({"caption": caption, "phrases": named})
        rows.append({"image": f"{i}.png", "boxes": boxes, "sentences": sentences})
    file = tmp_path / "entities.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ("--grounding", file, "--json", tmp_path / "r.json", "--num-beams", 1)
    run(capsys, "evaluate", "--model", model, "--data", dataset, *options)
    forced = json.loads((tmp_path / "r.json").read_text())["grounding"]["teacher_forced"]
    assert forced["phrases"] == sum(len(p) for r in records[3:6] for p in r.phrases)


def test_grounding_needs_boxes(model, dataset, fails, tmp_path):
    arguments = ("evaluate", "--model", model, "--data", dataset, "--grounding")
    assert "has no boxes of phrases in split 'test': --grounding FILE" in fails(*arguments)
    assert "cannot read" in fails(*arguments, tmp_path / "none.jsonl")
