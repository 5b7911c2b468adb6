"""How far to believe the maps: whether a phrase's words look where people put its boxes.

L layers, H heads, gh, gw grid of patches, R side of the raster that maps are drawn on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlattn.caption import OVERLAY_VIEWS, maps_to_show
from vlattn.captioner import Captioner
from vlattn.data.records import Record
from vlattn.faithfulness import hide_patches
from vlattn.images import Box, Geometry
from vlattn.mentions import Mention, Text, generated_texts, read_maps, reference_texts

RASTER = 96
THRESHOLDS = tuple(k / 20 for k in range(1, 20))  # of a map's peak, for IoU
LARGE = 0.05  # share of the picture: boxes that are easier to hit
LEAST = 1e-4  # of a word's attention, so that one that looks elsewhere has no veto
CHOSEN_ON = 200  # pictures of the dev split


class Scores(NamedTuple):
    """What was measured of P phrases; each array is (P,) but `iou`, (P, thresholds).

    Args:
        kinds: of the phrases.
        places: of each phrase, the record, the text, and the word that looks most into the boxes.
        boxes: of the phrases.
        area: share of the picture that the largest box takes.
        correctness: attention correctness (Liu et al., "Attention Correctness in Neural Image
            Captioning", AAAI 2017): the mass of a word's map inside the boxes, of the best word.
        uniform: the same of the uniform map.
        pointing: whether the highest pixel of the phrase's map is in a box (Akbari et al.,
            "Multi-level Multimodal Common Semantic Space for Image-Phrase Grounding", CVPR 2019).
            That map is the product of its words', a later word counting more: the further the
            phrase has been written, the better it is known what it names.
        center: the same of the picture's centre.
        iou: of the boxes and the map above a threshold, a share of its peak.
        rank: mean rank of the boxes' patches, 0 the hottest and 1 the coldest; 0.5 by chance.
    """

    kinds: list[str]
    places: list[tuple[int, str, int]]
    boxes: list[tuple[Box, ...]]
    area: np.ndarray
    correctness: np.ndarray
    uniform: np.ndarray
    pointing: np.ndarray
    center: np.ndarray
    iou: np.ndarray
    rank: np.ndarray

    def best_threshold(self) -> float:
        return THRESHOLDS[int(self.iou.mean(0).argmax())]

    def summary(self, threshold: float) -> dict[str, Any]:
        """Means over all phrases and per kind, as JSON values.

        Args:
            threshold: of IoU, the best on other pictures.
        """
        kinds = np.array(self.kinds)
        overall = self._means(np.ones(len(kinds), bool), threshold)
        overall["iou_threshold"] = threshold
        overall["kinds"] = {
            str(kind): self._means(kinds == kind, threshold) for kind in np.unique(kinds)
        }
        return overall

    def _means(self, chosen: np.ndarray, threshold: float) -> dict[str, Any]:
        large = chosen & (self.area >= LARGE)
        columns = {
            "correctness": self.correctness[chosen],
            "uniform": self.uniform[chosen],
            "pointing": self.pointing[chosen],
            "center": self.center[chosen],
            "pointing_large": self.pointing[large],
            "center_large": self.center[large],
            "iou": self.iou[chosen, THRESHOLDS.index(threshold)],
            "iou_uniform": self.uniform[chosen],
            "rank": self.rank[chosen],
        }
        means = {name: float(x.mean()) if x.size else None for name, x in columns.items()}
        return {"phrases": int(chosen.sum()), "phrases_large": int(large.sum()), **means}


def score_maps(
    captioner: Captioner, records: Sequence[Record], texts: Sequence[Sequence[Text]]
) -> Scores:
    """Measure the maps that the captioner's overlays show.

    Args:
        texts: of each record, as `reference_texts` or `generated_texts` give them.

    Raises:
        ValueError: no text has a phrase with boxes.
    """
    rows = []
    for index, geometry, maps in read_maps(captioner, records, texts):
        geometry = geometry.resized((RASTER, RASTER))
        for text, (attention, relevance) in zip(texts[index], maps):
            shown = captioner.maps_to_show(attention, relevance)
            for mention in text.mentions:
                words = list(mention.words)
                best, *values = _score(shown[words], mention, geometry)
                place = (index, text.text, best)
                rows.append((mention.kind, place, mention.boxes, *values))
    if not rows:
        raise ValueError("none of the captions has a phrase with boxes")
    kinds, places, boxes, *columns = zip(*rows)
    return Scores(list(kinds), list(places), list(boxes), *map(np.array, columns))


def _phrase_map(words: Tensor) -> Tensor:
    """The geometric mean of maps (words, ..., gh, gw), the n-th of which counts n times."""
    counts = torch.arange(1.0, len(words) + 1)
    logs = words.clamp(min=LEAST).log().movedim(0, -1)
    return (logs @ (counts / counts.sum())).exp()


def _score(words: Tensor, mention: Mention, geometry: Geometry) -> tuple:
    """The best word of a phrase, and the values of `Scores` from `area` on.

    Args:
        words: (words, gh, gw) what is shown of the phrase's words.
    """
    whole = _phrase_map(words)
    rasters = geometry.to_image(torch.cat([words, whole[None]]))  # (words + 1, R, R)
    seen = ~np.isnan(rasters[0])
    rasters[:, ~seen] = 0
    inside = _mask(mention.boxes)
    area = max((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in mention.boxes)
    shares = rasters[:-1, inside].sum(1) / rasters[:-1].sum((1, 2))
    phrase = rasters[-1]
    above = phrase >= np.array(THRESHOLDS, np.float32)[:, None, None] * phrase.max()
    iou = (above & inside).sum((1, 2)) / (above | inside).sum((1, 2))
    return (
        mention.words[int(shares.argmax())],
        area,
        float(shares.max()),
        float((inside & seen).sum() / seen.sum()),
        _is_inside(_peak(phrase), mention.boxes),
        _is_inside((0.5, 0.5), mention.boxes),
        iou,
        _rank(whole, inside, geometry),
    )


def _mask(boxes: Sequence[Box]) -> np.ndarray:
    """(R, R) which pixels of the raster have their centre in a box."""
    centres = (np.arange(RASTER) + 0.5) / RASTER
    inside = np.zeros((RASTER, RASTER), bool)
    for x0, y0, x1, y1 in boxes:
        columns, rows = (centres >= x0) & (centres <= x1), (centres >= y0) & (centres <= y1)
        inside |= rows[:, None] & columns
    return inside


def _peak(raster: np.ndarray) -> tuple[float, float]:
    """(x, y) of the highest pixel in fractions; the middle of those that are alike."""
    rows, columns = np.nonzero(raster == raster.max())
    return (columns.mean() + 0.5) / RASTER, (rows.mean() + 0.5) / RASTER


def _is_inside(point: tuple[float, float], boxes: Sequence[Box]) -> float:
    x, y = point
    return float(any(x0 <= x <= x1 and y0 <= y <= y1 for x0, y0, x1, y1 in boxes))


def _rank(map: Tensor, inside: np.ndarray, geometry: Geometry) -> float:
    """Mean rank of the patches under the boxes, each counted by its pixels."""
    grid, (left, top, right, bottom) = tuple(map.shape), geometry.box
    pixels = np.arange(RASTER) + 0.5
    rows = np.floor((pixels - top) / (bottom - top) * grid[0]).astype(int)
    columns = np.floor((pixels - left) / (right - left) * grid[1]).astype(int)
    y, x = np.nonzero(inside)
    y, x = rows[y], columns[x]
    seen = (y >= 0) & (y < grid[0]) & (x >= 0) & (x < grid[1])
    if not seen.any():
        return 0.5
    values = map.flatten()
    hotter, alike = (f(values, values[:, None]).sum(1) for f in (torch.gt, torch.eq))
    ranks = (hotter + (alike - 1) / 2) / max(1, len(values) - 1)
    return float(ranks.view(grid)[y[seen], x[seen]].mean())


def measure_grounding(
    captioner: Captioner,
    records: Sequence[Record],
    dev: Sequence[Record],
    written: Mapping[str, str],
) -> tuple[Scores, dict[str, Any]]:
    """All measures of a captioner's maps.

    Args:
        records: what to measure on.
        dev: other pictures, of which some choose the threshold of IoU; the measured ones do where
            none of these has phrases.
        written: the captions that the captioner wrote, by the record's name.

    Returns:
        the scores of the reference captions, and a JSON object of the means: "teacher_forced",
        "generated" where captions name a reference phrase, and "faithfulness".
    """
    forced = score_maps(captioner, records, [reference_texts(captioner, r) for r in records])
    dev = [record for record in dev if any(record.phrases)][:CHOSEN_ON]
    dev_texts = [reference_texts(captioner, record) for record in dev]
    other = score_maps(captioner, dev, dev_texts) if any(dev_texts) else forced
    threshold = other.best_threshold()
    means = {"teacher_forced": forced.summary(threshold)}
    generated = [generated_texts(captioner, r, written.get(r.name, "")) for r in records]
    if any(generated):
        means["generated"] = score_maps(captioner, records, generated).summary(threshold)
    if curves := hide_patches(captioner, records, written):
        means["faithfulness"] = curves.summary()
    return forced, means


def grounding_line(summary: Mapping[str, Any]) -> str:
    """The main figures in one line, times 100."""
    figures = (
        f"{title} {100 * summary[key]:.1f} ({beside} {100 * summary[other]:.1f})"
        for title, key, beside, other in (
            ("correctness", "correctness", "uniform", "uniform"),
            ("pointing", "pointing", "centre", "center"),
            ("IoU", "iou", "uniform", "iou_uniform"),
        )
    )
    return f"{summary['phrases']:,} phrases, {', '.join(figures)}"


def choose_overlay(captioner: Captioner, records: Sequence[Record]) -> Captioner:
    """Let overlays show the layer and view of the highest attention correctness plus pointing.

    Args:
        records: pictures that the captioner was not trained on; those with phrases count.

    Returns:
        the captioner, whose config says so; as it was where no phrase has boxes.
    """
    records = [record for record in records if any(record.phrases)][:CHOSEN_ON]
    texts = [reference_texts(captioner, record) for record in records]
    layers = (None, *range(captioner.config.depth))
    choices = list(product(layers, OVERLAY_VIEWS))
    sums = []  # of the two measures: a row per phrase, a column per choice
    for index, geometry, maps in read_maps(captioner, records, texts):
        geometry = geometry.resized((RASTER, RASTER))
        for text, (attention, relevance) in zip(texts[index], maps):
            shown = [
                maps_to_show(attention, relevance, layer=layer, head=None, view=view)
                for layer, view in choices
            ]
            shown = torch.stack(shown, dim=1)  # (words, choices, gh, gw)
            for mention in text.mentions:
                words = shown[list(mention.words)]
                whole = _phrase_map(words)
                rasters = np.nan_to_num(geometry.to_image(torch.cat([words, whole[None]])))
                shares = rasters[..., _mask(mention.boxes)].sum(-1) / rasters.sum((-2, -1))
                hits = [_is_inside(_peak(raster), mention.boxes) for raster in rasters[-1]]
                sums.append(shares[:-1].max(0) + hits)
    if sums:
        layer, view = choices[int(np.mean(sums, axis=0).argmax())]
        captioner.config = replace(
            captioner.config, overlay_layer=layer, overlay_head=None, overlay_view=view
        )
    return captioner
