"""The models that a demo serves: whoever waits for one at the same time is answered together."""

import json
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from PIL import Image

from vlattn.caption import Caption
from vlattn.captioner import Captioner
from vlattn.model_folder import find_model, licence_note


class Model:
    """A captioner that many visitors ask at the same time.

    One of them computes while the others wait, and captions what has gathered meanwhile together:
    eight pictures take two to three times as long as one.

    Args:
        name: as visitors see it, and as `Captioner.from_pretrained` takes it.
        captioner: whose turns are taken here.
        pointing: how well its maps point, in one sentence; empty if that was not measured.
        licence: the licence note of its card.
    """

    def __init__(self, name: str, captioner: Captioner, pointing: str = "", licence: str = ""):
        self.name, self.pointing, self.licence = name, pointing, licence
        self._captioner, self._turn = captioner, Lock()
        self._waiting: list[_Request] = []

    @classmethod
    def load(cls, source: str) -> "Model":
        """From a model folder, or by the name of a model of the package or the hub."""
        captioner, folder = Captioner.from_pretrained(source), find_model(source)
        return cls(source, captioner, pointing_sentence(folder), licence_note(folder))

    def caption(self, picture: Image.Image, **options: Any) -> Caption:
        """`Captioner.caption` for one picture."""
        request = _Request(picture, options, Future())
        self._waiting.append(request)
        with self._turn:
            while not request.answer.done():
                self._answer(options)
        return request.answer.result()

    def _answer(self, options: dict[str, Any], largest: int = 8) -> None:
        batch = [request for request in self._waiting if request.options == options][:largest]
        for request in batch:
            self._waiting.remove(request)
        try:
            captions = self._captioner.caption([request.picture for request in batch], **options)
        except Exception as error:
            for request in batch:
                request.answer.set_exception(error)
        else:
            for request, caption in zip(batch, captions):
                request.answer.set_result(caption)

    def alternatives(self, picture: Image.Image, count: int, **options: Any) -> list[Caption]:
        with self._turn:
            return self._captioner.alternatives(picture, count, **options)

    def explain(self, picture: Image.Image, text: str) -> Caption:
        with self._turn:
            return self._captioner.explain(picture, text)


@dataclass(frozen=True, eq=False)
class _Request:
    picture: Image.Image
    options: dict[str, Any]
    answer: Future


def pointing_sentence(folder: Path) -> str:
    """What `vlattn evaluate --grounding --json` measured about a model's maps, where it wrote the
    scores into the model folder, under any name; else nothing."""
    for path in sorted(folder.glob("*.json")):
        scores = json.loads(path.read_text(encoding="utf-8"))
        measured = scores.get("grounding") if isinstance(scores, dict) else None
        if isinstance(measured, dict) and "teacher_forced" in measured:
            forced = measured["teacher_forced"]
            return (
                f"How far to trust these maps: for {forced['phrases']:,} phrases whose boxes are "
                f"known, the brightest spot lay in the right box {forced['pointing']:.0%} of the "
                f"time; the middle of the picture alone would score {forced['center']:.0%}."
            )
    return ""
