"""What the page shows of a caption: its words, the picture under a word's map, the colour scale."""

from dataclasses import replace
from html import escape
from math import exp
from typing import NamedTuple

import numpy as np
from PIL import Image

from vlattn.generation import Caption
from vlattn.images import Geometry
from vlattn.visualization import MIN_CONTRAST, RAMP, overlay

HINT = '<p class="hint">Choose a picture. Its caption appears here, each word a button.</p>'
ON_CLICK = """
element.addEventListener("click", (event) => {
    const word = event.target.closest("[data-word]");
    if (word) trigger("select", {index: Number(word.dataset.word), value: word.textContent});
});
"""


class View(NamedTuple):
    """A caption as it is looked at.

    Args:
        caption: at display size, with the maps of the chosen layer and head.
        peak: the highest density in them, the top of the colour scale.
    """

    caption: Caption
    peak: float


class Panels(NamedTuple):
    """Words and legend as HTML; no picture and no legend without a caption."""

    words: str
    picture: Image.Image | None
    legend: str | None


def for_display(caption: Caption, side: int = 720) -> Caption:
    """The same caption with a picture whose longer side is `side`: maps are drawn at that size."""
    scale = side / max(caption.image.size)
    size = tuple(max(1, round(scale * length)) for length in caption.image.size)
    image = caption.image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3)
    x, y = (new / old for new, old in zip(size, caption.image.size))
    left, top, right, bottom = caption.geometry.box
    geometry = Geometry(size[::-1], (x * left, y * top, x * right, y * bottom))
    return replace(caption, image=image, geometry=geometry)


def view(caption: Caption, layer: int, head: int) -> View:
    """Look at a caption through a layer and a head, counted from 1; 0 is the mean of all."""
    selected = caption.select(layer - 1 if layer else None, head - 1 if head else None)
    maps = (selected.heatmap(i) for i in range(len(selected.words)))
    return View(selected, max(float(np.nanmax(heatmap)) for heatmap in maps))


def draw(shown: View | None, chosen: int, opacity: float) -> Panels:
    """The panels with the word `chosen`, counted from 0."""
    if shown is None:
        return Panels(HINT, None, None)
    heatmap = shown.caption.heatmap(chosen)
    even = float(np.nanmean(heatmap))
    note = f"its map peaks at {np.nanmax(heatmap) / even:.1f} times even attention"
    return Panels(
        _words(shown.caption, chosen, note),
        overlay(shown.caption.image, heatmap, peak=shown.peak, opacity=opacity),
        _legend(max(shown.peak / even, MIN_CONTRAST)),
    )


def _words(caption: Caption, chosen: int, note: str) -> str:
    """The words as buttons with the chosen one marked, and a sentence about it.

    What a vocabulary holds is text, and escaped here. `gr.HTML` must take it as a value and not as
    a property of a template, which would run `${...}`.
    """
    buttons = []
    for i, word in enumerate(caption.words):
        text, probability = word.text.strip(), exp(word.logprob)
        buttons.append(
            f"{'' if text == word.text else ' '}"
            f'<button type="button" data-word="{i}" aria-pressed="{str(i == chosen).lower()}" '
            f'title="probability {probability:.0%}" style="--probability: {probability:.3f}">'
            f"{escape(text)}</button>"
        )
    word = caption.words[chosen]
    return (
        f'<p class="caption" dir="auto" role="group" aria-label="Caption">{"".join(buttons)}</p>'
        f'<p class="note" role="status"><b>{escape(word.text.strip())}</b> '
        f"has a probability of {exp(word.logprob):.0%}, the bar under it; {note}.</p>"
    )


def _legend(top: float) -> str:
    """The colour scale, from even attention to `top` times as much."""
    colours = ", ".join(f"rgb{colour}" for colour in RAMP)
    return (
        f'<div class="ramp" style="background: linear-gradient(to right, {colours})"></div>'
        f'<div class="ends"><span>even attention</span><span>{top:.0f} times even</span></div>'
    )
