"""The `vlattn` command: train, evaluate, caption, demo, convert, export.

Exit status 0 only when the work was done; a user's mistake is one line on stderr and status 2.
"""

import argparse
import json
import sys
import types
import typing
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NoReturn

from vlattn import metrics
from vlattn.captioner import Captioner
from vlattn.config import CaptionerConfig, TrainConfig
from vlattn.data.dataset import CaptionDataset
from vlattn.data.entities import with_phrases
from vlattn.data.layouts import read_records
from vlattn.data.records import DataError
from vlattn.evaluation import Habits, score_captions, write_captions, write_results
from vlattn.evaluation_report import write_report
from vlattn.files import write_json
from vlattn.grounding import grounding_line, measure_grounding
from vlattn.images import ImageError
from vlattn.model_folder import PACKAGED_MODEL


def main(argv: list[str] | None = None) -> int:
    """Run the command; the result is the exit status."""
    try:
        arguments = vars(_parser().parse_args(argv))
        run = arguments.pop("run")
        return run(**arguments) or 0
    except (ValueError, OSError) as error:
        print(f"vlattn: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vlattn: stopped", file=sys.stderr)
        return 130


def train_main(argv: list[str] | None = None) -> int:
    """`vlattn train`, for the example scripts."""
    return main(["train", *(sys.argv[1:] if argv is None else argv)])


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="vlattn", description="Captioners whose words point at regions of the picture."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("train", help="train a captioner")
    command.set_defaults(run=_train)
    command.add_argument("--config", metavar="FILE", help="JSON settings, as in a run's train.json")
    _add_settings(command, TrainConfig)
    _add_settings(command.add_argument_group("the captioner's sizes and kinds"), CaptionerConfig)

    command = commands.add_parser("evaluate", help="score a captioner on a data set")
    command.set_defaults(run=_evaluate)
    _add_models(command, "write together, and the maps are the first's")
    command.add_argument("--data", required=True, help="data set: a folder, a table, or 'scenes'")
    command.add_argument("--layout", default="auto", help="its layout; found by looking")
    command.add_argument("--image-column", help="column of a table that names the picture")
    command.add_argument("--caption-column", help="column of a table that holds the caption")
    command.add_argument("--split", default="test")
    command.add_argument(
        "--grounding",
        nargs="?",
        const="",
        metavar="FILE",
        help="measure whether words look into their boxes: those of an entities.jsonl, or without "
        "FILE those of the data set",
    )
    command.add_argument("--json", dest="report", metavar="FILE", help="write the scores to a file")
    command.add_argument(
        "--out",
        metavar="DIR",
        help="write report.html, captions.json (COCO's result format) and scores.json",
    )
    _add_generation(command)

    command = commands.add_parser("caption", help="caption pictures")
    command.set_defaults(run=_caption)
    _add_models(command, "write together, and the maps are the first's")
    command.add_argument("images", nargs="+", metavar="IMAGE")
    command.add_argument("--overlay", metavar="DIR", help="write a picture of each word's map")
    command.add_argument(
        "--json", dest="as_json", action="store_true", help="print a JSON object per picture"
    )
    _add_generation(command)

    command = commands.add_parser("demo", help="open the demo in a browser")
    command.set_defaults(run=_demo)
    _add_models(command, "are compared (default: the package's own)", required=False)
    command.add_argument("--host", default="127.0.0.1")
    command.add_argument("--port", type=int, default=7860)
    command.add_argument("--auth", metavar="USER:PASSWORD", help="what the page asks for")

    command = commands.add_parser("convert", help="make a model folder of another's captioner")
    command.set_defaults(run=_convert)
    command.add_argument(
        "source", metavar="SOURCE", help="checkpoint of transformers: hub id or folder"
    )
    command.add_argument("out", metavar="OUT", help="the model folder")
    command.add_argument("--revision", help="branch, tag or commit on the hub")

    command = commands.add_parser("export", help="write a captioner as ONNX graphs")
    command.set_defaults(run=_export)
    command.add_argument("--model", required=True, metavar="FOLDER", help="model folder or hub id")
    command.add_argument("out", metavar="OUT", help="folder of the graphs")
    command.add_argument("--int8", action="store_true", help="weights in a byte each")
    return parser


def _add_models(command: argparse.ArgumentParser, several: str, *, required: bool = True) -> None:
    command.add_argument(
        "--model",
        dest="models",
        action="append",
        required=required,
        metavar="FOLDER",
        help=f"model folder or hub id; more than one {several}",
    )


def _add_generation(command: argparse.ArgumentParser) -> None:
    command.add_argument("--num-beams", type=int, default=3, help="1 is greedy decoding")
    command.add_argument("--max-len", type=int, default=30, help="most tokens of a caption")
    command.add_argument(
        "--length-penalty", type=float, default=1.0, help="0 favours short captions, more long ones"
    )
    command.add_argument(
        "--no-repeat-ngram", type=int, metavar="N", help="no caption has a run of N tokens twice"
    )


def _add_settings(group: Any, config: type) -> None:
    """A flag for each field of a config; a flag that is not given is absent from the result."""
    hints = typing.get_type_hints(config)
    for setting in fields(config):
        kind = hints[setting.name]
        if kind is CaptionerConfig:
            continue
        flag = "--" + setting.name.replace("_", "-")
        text = setting.metadata["help"]
        if setting.default not in ("", None):
            text += f" (default: {setting.default})"
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            (kind,) = (k for k in typing.get_args(kind) if k is not types.NoneType)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is Literal:
            options["choices"] = typing.get_args(kind)
        elif typing.get_origin(kind) is tuple:
            options |= {"type": int, "nargs": 2, "metavar": ("HEIGHT", "WIDTH")}
        else:
            options |= {"type": kind, "metavar": kind.__name__.upper()}
        group.add_argument(flag, **options)


def _train(config: str | None = None, **flags: Any) -> None:
    if config is not None:
        flags = _read_settings(Path(config)) | flags
    for name in ("data", "out"):
        if name not in flags:
            raise ValueError(f"--{name} must be given")
    from vlattn.training import train  # brings accelerate and tensorboard with it

    sizes = {f.name: flags.pop(f.name) for f in fields(CaptionerConfig) if f.name in flags}
    train(TrainConfig(captioner=CaptionerConfig.from_dict(sizes), **flags))
    print(f"the model is in {flags['out']}")


def _read_settings(path: Path) -> dict[str, Any]:
    """The settings of a JSON file, put as flags and parsed, so that they are checked like these."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    sizes = settings.pop("captioner", {}) if isinstance(settings, dict) else None
    if not isinstance(sizes, dict):
        raise ValueError(f"{path} must hold one JSON object, and so must its captioner")
    unknown = [
        *sorted(settings.keys() - {field.name for field in fields(TrainConfig)}),
        *sorted(sizes.keys() - {field.name for field in fields(CaptionerConfig)}),
    ]
    if unknown:
        raise ValueError(f"{path}: unknown setting {', '.join(unknown)}")
    arguments = ["train"]
    for name, value in (settings | sizes).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            arguments += [flag, *map(str, value)]
        elif value is not None:
            arguments.append(f"{flag}={value}")
    try:
        parsed = vars(_parser().parse_args(arguments))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return {name: value for name, value in parsed.items() if name not in ("run", "config")}


def _evaluate(
    models: list[str],
    data: str,
    layout: str,
    image_column: str | None,
    caption_column: str | None,
    split: str,
    grounding: str | None,
    report: str | None,
    out: str | None,
    **generation: Any,
) -> None:
    captioner, *ensemble = map(Captioner.from_pretrained, models)
    records, found = read_records(
        data, layout, image_column=image_column, caption_column=caption_column
    )
    if grounding:
        records = with_phrases(records, grounding)
    chosen = [record for record in records if record.split == split]
    if not chosen:
        raise DataError(f"{data} has no split {split!r}, only {', '.join(found.images)}")
    if grounding is not None and not any(any(record.phrases) for record in chosen):
        raise DataError(f"{data} has no boxes of phrases in split {split!r}: --grounding FILE")
    dataset = CaptionDataset(
        chosen, captioner.tokenizer, captioner.preprocess, max_len=captioner.config.max_len
    )
    written = write_captions(captioner, dataset, ensemble=ensemble, **generation)
    if not written:
        raise DataError(f"none of the pictures of split {split!r} could be read")
    scores = score_captions(written, chosen)
    print(f"{split}, {len(written):,} images: {scores}")
    print(Habits.of(written))
    if out:
        write_results(Path(out), written, scores)
    results = {"captions": _caption_values(scores, len(written))}
    grounded = None
    if grounding is not None:
        dev = [record for record in records if record.split == "dev"]
        grounded, results["grounding"] = measure_grounding(captioner, chosen, dev, written)
        for how in ("teacher_forced", "generated"):
            if how in results["grounding"]:
                print(f"{how}: {grounding_line(results['grounding'][how])}")
    if out:
        page = Path(out) / "report.html"
        write_report(page, captioner, chosen, results, written, scores, grounded)
    if report:
        write_json(Path(report), results)


def _caption_values(scores: metrics.Scores, images: int) -> dict[str, Any]:
    return {
        "bleu": list(scores.bleu),
        "rouge_l": scores.rouge_l,
        "cider": None if scores.cider != scores.cider else scores.cider,  # NaN is no JSON
        "images": images,
    }


def _caption(
    models: list[str], images: list[str], overlay: str | None, as_json: bool, **generation: Any
) -> int:
    captioner, *ensemble = map(Captioner.from_pretrained, models)
    failed = False
    stems = Counter()
    for image in images:
        try:
            (caption,) = captioner.caption([image], ensemble=ensemble, **generation)
        except ImageError as error:
            print(f"vlattn: {error}", file=sys.stderr)
            failed = True
            continue
        print(_as_json(image, caption) if as_json else f"{image}: {caption.text}", flush=True)
        if overlay is not None:
            stem = Path(image).stem
            stems[stem] += 1  # pictures of one name, in two folders
            name = stem if stems[stem] == 1 else f"{stem}~{stems[stem]}"
            _write_overlays(Path(overlay), name, caption)
    return 2 if failed else 0


def _as_json(image: str, caption: Any) -> str:
    words = [
        {"text": w.text, "start": w.start, "end": w.end, "logprob": w.logprob}
        for w in caption.words
    ]
    return json.dumps(
        {
            "image": image,
            "text": caption.text,
            "score": caption.score,
            "finished": caption.finished,
            "words": words,
        },
        ensure_ascii=False,
    )


def _write_overlays(folder: Path, picture: str, caption: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, word in enumerate(caption.words):
        plain = "".join(char for char in word.text if char.isalnum()) or "sign"
        caption.overlay(i).save(folder / f"{picture}-{i + 1:02}-{plain[:40]}.png")


def _export(model: str, out: str, int8: bool) -> None:
    from vlattn.export import export_onnx

    export_onnx(Captioner.from_pretrained(model), out, int8=int8)
    print(f"the graphs are in {out}")


def _convert(source: str, out: str, revision: str | None) -> None:
    from vlattn.convert import convert

    config = convert(source, out, revision=revision).config
    print(
        f"a {config.encoder} of {config.encoder_depth} blocks and a decoder of {config.depth}: "
        f"the model is in {out}"
    )


def _demo(models: list[str] | None, host: str, port: int, auth: str | None) -> None:
    try:
        from vlattn.demo.app import launch
        from vlattn.demo.models import Model
    except ImportError as error:
        raise ValueError(f"the demo needs gradio: pip install 'vlattn[demo]' ({error})") from error
    user, _, password = (auth or "").partition(":")
    if auth is not None and not (user and password):
        raise ValueError("--auth must be USER:PASSWORD")
    sources = dict.fromkeys(models or [PACKAGED_MODEL])
    launch(
        [Model.load(source) for source in sources],
        host=host,
        port=port,
        auth=(user, password) if auth else None,
    )
