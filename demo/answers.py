"""What the demo answers: each a function of the request alone, which the server then forgets.

Requests come from anyone, so every value in them is checked here, whatever the page allows.
"""

from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import wraps
from html import escape
from math import exp
from typing import Any

import gradio as gr
from PIL import Image

from vlattn.generation import Caption

from .glow import as_gif, as_png, measure
from .models import Model
from .panels import HINT, evidence, python_lines, saved_page
from .uploads import forget_oldest, read_upload

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

    def write(self, picture, model, num_beams, length_penalty, layer, head) -> str:
        """The panel of a caption."""
        written = self._caption(picture, num_beams, length_penalty, model)
        call = (
            f'(caption,) = captioner.caption(["picture.jpg"], num_beams={num_beams}, '
            f"length_penalty={length_penalty})"
        )
        return self._panel([written], model, call, layer, head)

    def write_others(self, picture, model, count, temperature, length_penalty, layer, head) -> str:
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
        return self._panel(found, model, call, layer, head)

    def look_for(self, picture, text, model, layer, head) -> str:
        """The panel of a visitor's own words."""
        found = self._explain(picture, text, model)
        call = f'caption = captioner.explain("picture.jpg", {text!r})'
        return self._panel([found], model, call, layer, head)

    def compare(self, picture, one, other, num_beams, length_penalty, layer, head) -> str:
        """The panel of two models side by side."""
        sides = [
            f"<section><h3>{escape(name)}</h3>"
            f"{self.write(picture, name, num_beams, length_penalty, layer, head)}</section>"
            for name in (one, other)
        ]
        return f'<div class="sides">{"".join(sides)}</div>'

    def save(self, picture, layer, head, event: gr.EventData) -> dict[str, str]:
        """A file to save: its name, and its content as an address."""
        asked = {"kind": None, "model": None, "text": None, "word": 0} | dict(event._data or {})
        found = self._explain(picture, asked["text"], asked["model"])
        found = found.select(*self._layer_and_head(found, layer, head))
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

    def _panel(self, captions: list[Caption], model: str, call: str, layer: int, head: int) -> str:
        captions = [written for written in captions if written.words]
        if not captions:
            raise gr.Error("The model wrote no words about this picture.")
        chosen = self._layer_and_head(captions[0], layer, head)
        if chosen != (None, None):
            call += f"\ncaption = caption.select(layer={chosen[0]}, head={chosen[1]})"
        lines = python_lines(model, call)
        return evidence([c.select(*chosen) for c in captions], self._model(model), lines)

    def _layer_and_head(self, caption: Caption, layer: int, head: int) -> tuple[int | None, ...]:
        """Counted from 1 by visitors, who say 0 for the mean of all."""
        counts = caption.layer_attention.shape[1:3]
        asked = zip(("layer", "head"), (layer, head), counts)
        return tuple(
            _whole(name, value, 0, count) - 1 if value else None for name, value, count in asked
        )


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
