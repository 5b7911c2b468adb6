"""What the demo answers: each a function of the request alone, which the server then forgets.

Requests come from anyone, so every value in them is checked here, whatever the page allows.
"""

from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import wraps
from html import escape
from math import exp
from typing import Any, NamedTuple

import gradio as gr
from PIL import Image

from vlattn.caption import OVERLAY_VIEWS, Caption

from .glow import as_gif, as_png, measure
from .models import Model
from .panels import HINT, evidence, python_lines, saved_page
from .uploads import forget_oldest, read_upload

OWN = "own"
MAX_BEAMS, MAX_PENALTY, MAX_TEMPERATURE, MAX_TEXT = 8, 4, 2, 500
Upload = dict[str, Any] | None


def in_panel(answer: Callable[..., str]) -> Callable[..., str]:
    """What cannot be answered becomes a warning, and a panel that can be used again."""

    @wraps(answer)
    def answer_or_hint(*request: Any) -> str:
        try:
            return answer(*request)
        except gr.Error as error:
            gr.Warning(error.message)
            return HINT

    return answer_or_hint


class Answers:
    """The endpoints, and the panels of the page.

    Args:
        models: what can be asked.
        uploads: paths of the files that visitors have uploaded.
    """

    def __init__(self, models: Sequence[Model], uploads: set[str]):
        self._models, self._uploads = {model.name: model for model in models}, uploads

    # --- endpoints: a text, and its words with their probabilities and maps ---

    def caption(self, picture: Upload, num_beams: int, length_penalty: float, model: str):
        """Caption a picture."""
        return _as_data(self._caption(picture, num_beams, length_penalty, model))

    def explain(self, picture: Upload, text: str, model: str):
        """Find where a model looks for each word of a text, and how likely it finds them."""
        return _as_data(self._explain(picture, text, model))

    # --- panels ---

    def write(self, picture, model, num_beams, length_penalty, view, layer, head) -> str:
        """The panel of a caption."""
        written = self._caption(picture, num_beams, length_penalty, model)
        call = (
            f'(caption,) = captioner.caption(["picture.jpg"], num_beams={num_beams}, '
            f"length_penalty={length_penalty})"
        )
        return self._panel([written], model, call, view, layer, head)

    def write_others(
        self, picture, model, count, temperature, length_penalty, view, layer, head
    ) -> str:
        """The panel of several captions: of a beam search, or drawn where it is warm."""
        if _number("temperature", temperature, 0, MAX_TEMPERATURE):
            options = {"temperature": temperature, "seed": 0}
        else:
            _number("length_penalty", length_penalty, 0, MAX_PENALTY)
            options = {"length_penalty": length_penalty}
        count = _whole("count", count, 1, MAX_BEAMS)
        found = self._model(model).alternatives(self._read(picture), count, **options)
        given = "".join(f", {name}={value}" for name, value in options.items())
        call = f'caption, *others = captioner.alternatives("picture.jpg", {count}{given})'
        return self._panel(found, model, call, view, layer, head)

    def look_for(self, picture, text, model, view, layer, head) -> str:
        """The panel of a visitor's own words."""
        found = self._explain(picture, text, model)
        call = f'caption = captioner.explain("picture.jpg", {text!r})'
        return self._panel([found], model, call, view, layer, head)

    def compare(self, picture, one, other, num_beams, length_penalty, view, layer, head) -> str:
        """The panel of two models side by side."""
        sides = [
            f"<section><h3>{escape(name)}</h3>"
            f"{self.write(picture, name, num_beams, length_penalty, view, layer, head)}</section>"
            for name in (one, other)
        ]
        return f'<div class="sides">{"".join(sides)}</div>'

    def save(self, picture, view, layer, head, event: gr.EventData) -> dict[str, str]:
        """A file to save: its name, and its content as an address."""
        asked = {"kind": None, "model": None, "text": None, "word": 0} | dict(event._data or {})
        found = self._explain(picture, asked["text"], asked["model"])
        found, _ = _look(found, view, layer, head)
        if asked["kind"] == "png":
            word = _whole("word", asked["word"], 0, len(found.words) - 1)
            return _file("word.png", "image/png", as_png(found, word))
        if asked["kind"] == "gif":
            return _file("words.gif", "image/gif", as_gif(found))
        call = f'caption = captioner.explain("picture.jpg", {found.text!r})'
        model = self._model(asked["model"])
        lines = python_lines(model.name, call)
        page = saved_page(evidence([found], model, lines, saving=False))
        return _file("caption.html", "text/html", page.encode())

    # --- steps ---

    def _model(self, name: Any) -> Model:
        if not isinstance(name, str) or name not in self._models:
            raise gr.Error(f"model must be one of {', '.join(self._models)}.")
        return self._models[name]

    def _read(self, picture: Upload) -> Image.Image:
        forget_oldest(self._uploads)
        return read_upload(picture)

    def _caption(self, picture, num_beams, length_penalty, model) -> Caption:
        options = {
            "num_beams": _whole("num_beams", num_beams, 1, MAX_BEAMS),
            "length_penalty": _number("length_penalty", length_penalty, 0, MAX_PENALTY),
        }
        return self._model(model).caption(self._read(picture), **options)

    def _explain(self, picture, text, model) -> Caption:
        if not isinstance(text, str) or not text.strip() or len(text) > MAX_TEXT:
            raise gr.Error(f"Write a caption of 1 to {MAX_TEXT} characters.")
        image = self._read(picture)
        try:
            return self._model(model).explain(image, text)
        except ValueError as error:
            raise gr.Error(f"{escape(str(error), quote=False)}.") from error

    def _panel(
        self, captions: list[Caption], model: str, call: str, view: str, layer: int, head: int
    ) -> str:
        captions = [written for written in captions if written.words]
        if not captions:
            raise gr.Error("The model wrote no words about this picture.")
        looks = [_look(written, view, layer, head) for written in captions]
        lines = python_lines(model, call + looks[0].call)
        return evidence([look.caption for look in looks], self._model(model), lines)


class _Look(NamedTuple):
    caption: Caption
    call: str  # the line of Python that does the same


def _look(caption: Caption, view: str, layer: int, head: int) -> _Look:
    """Show a caption's maps another way.

    Args:
        view: OWN is the model's choice, whatever layer and head are.
        layer, head: counted from 1; 0 is the mean of all.
    """
    if view == OWN:
        return _Look(caption, "")
    if view not in OVERLAY_VIEWS:
        raise gr.Error(f"view must be one of {', '.join((OWN, *OVERLAY_VIEWS))}.")
    counts = caption.layer_attention.shape[1:3]
    chosen = {
        name: _whole(name, value, 0, count) - 1 if value else None
        for name, value, count in zip(("layer", "head"), (layer, head), counts)
    } | {"view": view}
    given = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
    return _Look(caption.select(**chosen), f"\ncaption = caption.select({given})")


def _as_data(caption: Caption) -> tuple[str, list[dict[str, Any]]]:
    halves = measure(caption).halves if caption.words else []
    words = [
        {
            "text": word.text.strip(),
            "probability": exp(word.logprob),
            "half_of_attention_on": half,
            "map": [[round(value, 6) for value in row] for row in rows.tolist()],
        }
        for word, half, rows in zip(caption.words, halves, caption.attention)
    ]
    return caption.text.strip(), words


def _file(name: str, kind: str, content: bytes) -> dict[str, str]:
    return {"name": name, "address": f"data:{kind};base64,{b64encode(content).decode()}"}


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value not in range(low, high + 1)
    ):
        raise gr.Error(f"{name} must be a whole number from {low} to {high}.")
    return int(value)


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise gr.Error(f"{name} must be a number from {low} to {high}.")
    return float(value)
