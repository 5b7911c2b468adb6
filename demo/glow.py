"""Attention as light: what a word looked at glows on the photograph, the rest is dimmed.

A word's map is kept as levels, one byte per cell of a coarse grid over the picture: 0 where the
model saw nothing, else 1 to 255 from no attention to the top of the caption's scale. One table of
256 colours turns levels into light, here and in `page.js` alike.
"""

import io
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vlattn.caption import Caption
from vlattn.images import Geometry
from vlattn.visualization import MIN_CONTRAST, RAMP

_CELLS = 64  # along the longer side
_UNSEEN = (110, 110, 116, 205)


class Maps(NamedTuple):
    """The maps of a caption, on one scale.

    Args:
        levels: (words, rows, columns) uint8.
        times: attention of the top level, in multiples of even attention.
        halves: per word the smallest share of what the model saw that has half of its attention;
            a half for even attention, less the more concentrated it is.
    """

    levels: np.ndarray
    times: float
    halves: list[float]


def at_size(caption: Caption, side: int) -> Caption:
    """The same caption of a picture whose longer side is `side`: maps get that size too."""
    scale = side / max(caption.image.size)
    size = tuple(max(1, round(scale * length)) for length in caption.image.size)
    image = caption.image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3)
    x, y = (new / old for new, old in zip(size, caption.image.size))
    left, top, right, bottom = caption.geometry.box
    geometry = Geometry(size[::-1], (x * left, y * top, x * right, y * bottom))
    return replace(caption, image=image, geometry=geometry)


def measure(caption: Caption) -> Maps:
    """The maps of a caption's words; there is at least one word."""
    small = at_size(caption, _CELLS)
    heat = np.stack([small.heatmap(i) for i in range(len(small.words))])  # (words, rows, columns)
    seen = ~np.isnan(heat[0])
    times = heat * seen.sum()  # multiples of even attention
    top = max(float(np.nanmax(times)), MIN_CONTRAST)
    levels = np.where(seen, np.rint(1 + 254 * times.clip(0) / top), 0).astype(np.uint8)
    hottest = -np.sort(-times[:, seen], axis=1)  # (words, cells that were seen)
    shares = hottest.cumsum(1) / hottest.sum(1, keepdims=True)
    halves = ((shares < 0.5).sum(1) + 1) / seen.sum()
    return Maps(levels, top, halves.tolist())


def colours(times: float) -> np.ndarray:
    """(256, 4) RGBA of each level: dark up to even attention, then the ramp, ever clearer.

    Args:
        times: see `Maps`.
    """
    heat = ((np.arange(256) - 1) / 254 * times - 1) / (times - 1)  # 0 even attention, 1 the top
    heat = heat.clip(0, 1)
    steps = np.linspace(0, 1, len(RAMP))
    colour = np.stack([np.interp(heat, steps, channel) for channel in zip(*RAMP)], axis=1)
    cover = np.interp(heat, (0, 0.35, 1), (0.64, 0.34, 0.42))  # light enough to see through
    table = np.concatenate([colour, 255 * cover[:, None]], axis=1)
    table[0] = _UNSEEN
    return table.round().astype(np.uint8)


def glow(picture: Image.Image, levels: np.ndarray, table: np.ndarray) -> Image.Image:
    """The picture in the light of one map (rows, columns)."""
    light = Image.fromarray(table[levels], "RGBA").resize(picture.size, Image.Resampling.BILINEAR)
    return Image.alpha_composite(picture.convert("RGBA"), light).convert("RGB")


def as_png(caption: Caption, word: int) -> bytes:
    """The picture in the light of a word."""
    shown, maps = at_size(caption, 1280), measure(caption)
    stream = io.BytesIO()
    glow(shown.image, maps.levels[word], colours(maps.times)).save(stream, "PNG")
    return stream.getvalue()


def as_gif(caption: Caption, side: int = 480) -> bytes:
    """The words one after the other: the picture in the light of each, the caption under it."""
    picture, maps = at_size(caption, side).image, measure(caption)
    table = colours(maps.times)
    frames = [
        _above_caption(glow(picture, levels, table), caption, word)
        for word, levels in enumerate(maps.levels)
    ]
    stream = io.BytesIO()
    frames[0].save(
        stream, "GIF", save_all=True, append_images=frames[1:], duration=700, loop=0, optimize=False
    )
    return stream.getvalue()


def _above_caption(picture: Image.Image, caption: Caption, chosen: int) -> Image.Image:
    """The picture with the caption's words under it, the chosen one in the ramp's colour."""
    font = ImageFont.load_default(20)
    width, space = max(picture.width, 240), font.getlength(" ")
    places, x, y = [], 12.0, 10.0
    for word in caption.words:
        text = word.text.strip()
        x += space if word.text != text else 0
        if x + font.getlength(text) > width - 12 and x > 12 + space:
            x, y = 12.0, y + 28
        places.append((x, y, text))
        x += font.getlength(text)
    frame = Image.new("RGB", (width, picture.height + round(y) + 40), (24, 22, 26))
    frame.paste(picture, ((width - picture.width) // 2, 0))
    pen = ImageDraw.Draw(frame)
    for i, (x, y, text) in enumerate(places):
        colour = RAMP[-1] if i == chosen else (150, 146, 152)
        pen.text((x, picture.height + y), text, colour, font)
    return frame
