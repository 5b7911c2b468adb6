"""Attention maps drawn on the picture: one overlay per word, and a contact sheet of a caption.

Colour stands for density relative to even attention, the same in every map that shares a scale:

- Even attention, and anything below it, gets no colour. The even density is the mean over what the
  model saw: a map that says nothing leaves the picture as it is, only a little dimmer.
- The top colour stands for `peak`, but never for less than `MIN_CONTRAST` times the even density,
  so that no scale stretches a flat map until it looks sharp.
- What the model did not see (NaN in the map) is hatched in grey.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from vlattn.caption import Caption

MIN_CONTRAST = 4.0
# The ramp "inferno" of matplotlib (perceptually uniform, safe for the colour-blind), in steps of a
# tenth; its last step is left out because that pale yellow is lost on a white ground.
RAMP = (
    (0, 0, 4),
    (22, 11, 57),
    (66, 10, 104),
    (106, 23, 110),
    (147, 38, 103),
    (188, 55, 84),
    (221, 81, 58),
    (243, 120, 25),
    (252, 165, 10),
    (246, 215, 70),
)
_DIM = 0.2  # share of the opacity that even attention gets
_INK, _FAINT, _LINE, _PAPER = "#1c1c22", "#6e6e78", "#d9d9de", "#ffffff"
_MARGIN, _GAP = 28, 14


def overlay(
    image: Image.Image,
    heatmap: np.ndarray,
    *,
    peak: float | None = None,
    opacity: float = 0.6,
) -> Image.Image:
    """Lays a heat map over the picture it belongs to.

    Args:
        image: the upright picture, H pixels high and W wide.
        heatmap: `(H, W)`, a density over the picture's pixels; NaN where the model saw nothing.
        peak: the density that gets the top colour, shared by maps that are to be compared; the
            largest value of this map where omitted. See the top of this file for its lower bound.
        opacity: how much of the picture the top colour covers, from 0 to 1.

    Raises:
        ValueError: if the map is not as large as the picture, or the opacity out of range.
    """
    heatmap = np.asarray(heatmap, dtype=np.float32)
    if heatmap.shape != (image.height, image.width):
        raise ValueError(
            f"heatmap must be as high and wide as the picture, {(image.height, image.width)}, "
            f"got shape {heatmap.shape}"
        )
    if not 0 <= opacity <= 1:
        raise ValueError(f"opacity must lie between 0 and 1, got {opacity}")
    unseen = np.isnan(heatmap)
    even, top = _scale(heatmap, unseen, peak)
    heat = (heatmap - even) * (255 / (top - even)) if top > even else np.zeros_like(heatmap)
    heat[unseen] = 0
    picture = _tint(image.convert("RGB"), heat.clip(0, 255), opacity)
    return _hatch(picture, unseen) if unseen.any() else picture


def contact_sheet(
    captions: Sequence["Caption"], *, width: int = 1200, thumbnail: int = 112
) -> Image.Image:
    """Draws one row per caption: the picture, the caption, and each word's overlay in order.

    Under each overlay stand the word and the probability the model gave it. The overlays of one
    caption share one colour scale, drawn under its picture.

    Args:
        captions: what to draw, from top to bottom.
        width: of the sheet, in pixels.
        thumbnail: longer side of a word's overlay, in pixels; up to twice that for a panorama.

    Raises:
        ValueError: without captions, or where the sheet is too narrow for a picture and a word.
    """
    if not captions:
        raise ValueError("captions must hold at least one caption, got none")
    narrowest = 2 * _MARGIN + 4 * thumbnail + 2 * _GAP
    if width < narrowest:
        raise ValueError(
            f"width must be at least {narrowest} for thumbnails of {thumbnail}, got {width}"
        )
    rows = [_row(caption, width - 2 * _MARGIN, thumbnail) for caption in captions]
    height = _MARGIN + sum(row.height + 2 * _MARGIN for row in rows) - _MARGIN
    sheet = Image.new("RGB", (width, height), _PAPER)
    top = _MARGIN
    for k, row in enumerate(rows):
        if k:
            line = (_MARGIN, top - _MARGIN, width - _MARGIN - 1, top - _MARGIN)
            ImageDraw.Draw(sheet).line(line, _LINE)
        sheet.paste(row, (_MARGIN, top))
        top += row.height + 2 * _MARGIN
    return sheet


def _scale(heatmap: np.ndarray, unseen: np.ndarray, peak: float | None) -> tuple[float, float]:
    """The densities that get no colour and the top colour."""
    if unseen.all():
        return 0.0, 0.0
    even = float(heatmap.mean(where=~unseen, dtype=np.float64))
    peak = float(heatmap.max(where=~unseen, initial=0)) if peak is None else peak
    return even, max(peak, MIN_CONTRAST * even)


def _tint(picture: Image.Image, heat: np.ndarray, opacity: float) -> Image.Image:
    """Covers the picture with the ramp's colours, the more the hotter (0 to 255) a pixel is."""
    levels = Image.fromarray(np.round(heat).astype(np.uint8))
    steps = np.linspace(0, len(RAMP) - 1, 256)
    palette = [np.interp(steps, range(len(RAMP)), channel) for channel in zip(*RAMP)]
    colours = levels.copy()
    colours.putpalette(np.stack(palette, axis=1).round().astype(np.uint8).tobytes())
    cover = [round(255 * opacity * (1 - (1 - _DIM) * (1 - k / 255) ** 2)) for k in range(256)]
    return Image.composite(colours.convert("RGB"), picture, levels.point(cover))


def _hatch(picture: Image.Image, unseen: np.ndarray) -> Image.Image:
    """Marks what the model did not see: grey, in two tones of diagonal bands."""
    band = max(3, min(picture.size) // 40)
    rows, columns = np.ogrid[: picture.height, : picture.width]
    tones = np.where((rows + columns) // band % 2, np.uint8(120), np.uint8(168))
    cover = Image.fromarray(np.where(unseen, np.uint8(190), np.uint8(0)))
    return Image.composite(Image.fromarray(tones).convert("RGB"), picture, cover)


def _row(caption: "Caption", width: int, thumbnail: int) -> Image.Image:
    """One caption's part of the sheet: picture and scale left, text and words right."""
    picture = _fit(caption.image, 2 * thumbnail)
    stretch = max(picture.size) / min(picture.size) / 2  # a panorama's overlays may be longer
    small = _fit(caption.image, round(thumbnail * min(max(stretch, 1), 2)))
    maps = [_resize(caption.heatmap(i), small.size) for i in range(len(caption.words))]
    left = 2 * thumbnail + 2 * _GAP
    text_font, word_font, note_font = (ImageFont.load_default(size) for size in (22, 16, 13))
    lines = list(_wrap(caption.text.strip(), text_font, width - left))

    cell_width, cell_height = max(small.width, thumbnail * 3 // 4), small.height + 54
    columns = (width - left + _GAP) // (cell_width + _GAP)
    words_top = 30 * len(lines) + 10
    words_height = math.ceil(len(maps) / columns) * cell_height
    row = Image.new("RGB", (width, max(picture.height + 48, words_top + words_height)), _PAPER)
    pen = ImageDraw.Draw(row)
    row.paste(picture, ((2 * thumbnail - picture.width) // 2, 0))
    for k, line in enumerate(lines):
        pen.text((left, 30 * k), line, _INK, text_font)
    if not maps:
        return row

    peak = max(float(np.nanmax(heatmap, initial=0)) for heatmap in maps)
    even, top = _scale(maps[0], np.isnan(maps[0]), peak)
    bar = Image.new("RGB", (2 * thumbnail, 12), "#f2f2f2")
    ramp = np.broadcast_to(np.linspace(0, 255, bar.width), (bar.height, bar.width))
    row.paste(_tint(bar, ramp, 0.6), (0, picture.height + 12))
    ends = f"{top / even:.0f} times even" if even else "no attention"
    pen.text((0, picture.height + 28), "even attention", _FAINT, note_font)
    pen.text((bar.width, picture.height + 28), ends, _FAINT, note_font, anchor="ra")

    for k, (word, heatmap) in enumerate(zip(caption.words, maps)):
        x = left + k % columns * (cell_width + _GAP)
        y = words_top + k // columns * cell_height
        centre = x + cell_width // 2
        row.paste(overlay(small, heatmap, peak=peak), (centre - small.width // 2, y))
        text = _cut(word.text.strip(), word_font, cell_width)
        pen.text((centre, y + small.height + 18), text, _INK, word_font, anchor="ms")
        chance = f"{math.exp(word.logprob):.0%}"
        pen.text((centre, y + small.height + 36), chance, _FAINT, note_font, anchor="ms")
    return row


def _fit(image: Image.Image, side: int) -> Image.Image:
    """The picture with its longer side scaled to `side`."""
    scale = side / max(image.size)
    size = tuple(max(1, round(scale * length)) for length in image.size)
    return image.convert("RGB").resize(size, Image.Resampling.LANCZOS, reducing_gap=3)


def _resize(heatmap: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A heat map at the size (width, height) of a thumbnail; densities stay as they are."""
    image = Image.fromarray(np.asarray(heatmap, dtype=np.float32))
    return np.asarray(image.resize(size, Image.Resampling.BOX))


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> Iterator[str]:
    """Breaks a text into lines between words."""
    line = ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and font.getlength(longer) > width:
            yield _cut(line, font, width)
            longer = word
        line = longer
    yield _cut(line, font, width)


def _cut(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The text, or as much of its beginning as fits, with an ellipsis."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
