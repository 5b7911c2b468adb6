"""What a captioner hands out: a text, its words, and a map of the picture for each.

L layers, H heads, gh, gw grid of patches.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlattn import visualization
from vlattn.images import Geometry

OVERLAY_VIEWS = ("where", "more_than_usual", "matters")


def maps_to_show(
    layer_attention: Tensor,
    relevance: Tensor | None,
    *,
    layer: int | None,
    head: int | None,
    view: str,
) -> Tensor:
    """One map per word of a caption, each of sum 1.

    Args:
        layer_attention: (words, L, H, gh, gw).
        relevance: (words, L, H, gh, gw), see `ReadTexts.relevance`; "matters" needs it.
        layer, head: which to show; the mean over all of them where None.
        view: "where", the attention as it is, or "more_than_usual", the attention times its ratio
            to the mean over the words of the caption: with less of what every word looks at; or
            "matters", the attention times its relevance: with less of what changes nothing.

    Raises:
        ValueError: there is no such view, or what it needs is not given.
    """
    if view not in OVERLAY_VIEWS:
        raise ValueError(f"view must be one of {', '.join(OVERLAY_VIEWS)}, got {view!r}")
    if view == "matters" and relevance is None:
        raise ValueError("view 'matters' needs layer_relevance, got None")
    layers = slice(None) if layer is None else [layer]
    heads = slice(None) if head is None else [head]

    def mean(x: Tensor) -> Tensor:
        return x[:, layers][:, :, heads].mean((1, 2))  # (words, gh, gw)

    maps = mean(layer_attention)
    maps = maps / maps.sum((1, 2), keepdim=True)  # prefix tokens may have had their share
    if view == "where" or len(maps) == 0:
        return maps
    usual = maps.mean(0).clamp(min=1e-9)
    more = maps * (maps / usual if view == "more_than_usual" else mean(relevance))
    total = more.sum((1, 2), keepdim=True)
    return torch.where(total > 0, more / total.clamp(min=torch.finfo(total.dtype).tiny), maps)


@dataclass(frozen=True)
class Word:
    """A word of a caption, with the white space before it.

    Args:
        text: the characters `start` to `end` of the caption.
        start, end: where it stands in the caption, in characters.
        logprob: log-probability of its tokens together.
    """

    text: str
    start: int
    end: int
    logprob: float


@dataclass(frozen=True)
class Caption:
    """A caption, and where the model looked for each of its words.

    Args:
        text: the caption; the words' texts joined.
        words: its words, in order.
        layer_attention: (words, L, H, gh, gw) cross-attention that wrote each word, the mean over
            its tokens; each map sums to the share of the picture's patches, mostly 1.
        attention: (words, gh, gw) the map that is shown for each word; it sums to 1. The
            captioner's `config.overlay_layer`, `overlay_head` and `overlay_view` say which.
        score: see `beam_search`.
        finished: whether the end token was reached.
        image: the upright original picture.
        geometry: the way from the model's input back to the picture.
        layer_relevance: (words, L, H, gh, gw) how much its attention helped each word, see
            `ReadTexts.relevance`; None where that is not known.
    """

    text: str
    words: tuple[Word, ...]
    layer_attention: Tensor
    attention: Tensor
    score: float
    finished: bool
    image: Image.Image
    geometry: Geometry
    layer_relevance: Tensor | None = None

    def select(
        self, layer: int | None = None, head: int | None = None, view: str = "where"
    ) -> "Caption":
        """The same caption, shown another way; see `maps_to_show`."""
        attention, relevance = self.layer_attention, self.layer_relevance
        shown = maps_to_show(attention, relevance, layer=layer, head=head, view=view)
        return replace(self, attention=shown)

    def heatmap(self, word: int) -> np.ndarray:
        """Map of a word over the original picture: sum 1, NaN where the model saw nothing.

        Returns:
            (H, W) float array.
        """
        density = self.geometry.to_image(self.attention[word])
        return density / np.nansum(density)

    def overlay(self, word: int, *, opacity: float = 0.6) -> Image.Image:
        """The picture under the map of a word; all words of the caption share one colour scale."""
        peak = max(float(np.nanmax(self.heatmap(i))) for i in range(len(self.words)))
        return visualization.overlay(self.image, self.heatmap(word), peak=peak, opacity=opacity)
