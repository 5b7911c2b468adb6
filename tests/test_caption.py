"""The maps of a `Caption`."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from vlattn.caption import Caption, Word
from vlattn.images import Preprocess


def caption(mode, image_size):
    height, width = image_size
    image = Image.new("RGB", (width, height), "grey")
    _, geometry = Preprocess((32, 48), mode)(image)
    maps = torch.rand(2, 3, 5, 2, 3, generator=torch.Generator().manual_seed(0))
    maps = maps / maps.sum((-2, -1), keepdim=True)
    return Caption(
        text="a ring",
        words=(Word("a", 0, 1, -0.1), Word(" ring", 1, 6, -0.7)),
        layer_attention=maps,  # (2 words, 3 layers, 5 heads, 2, 3)
        layer_relevance=maps,
        attention=maps.mean((1, 2)),
        score=-0.4,
        finished=True,
        image=image,
        geometry=geometry,
    )


@pytest.mark.parametrize("mode", ["squeeze", "crop", "pad"])
@pytest.mark.parametrize(
    ("image_size", "cropped"),  # to 2 : 3, to the 60 middle columns or the 23.3 middle rows
    [((40, 100), (slice(0, 40), slice(20, 80))), ((90, 35), (slice(33, 57), slice(0, 35)))],
)
def test_heat_maps_sum_to_one_over_what_the_model_saw(mode, image_size, cropped):
    shown = caption(mode, image_size)
    for word in range(2):
        heatmap = shown.heatmap(word)
        assert heatmap.shape == image_size
        assert np.nansum(heatmap, dtype=np.float64) == pytest.approx(1, abs=1e-5)
        assert np.nanmin(heatmap) >= 0
        seen = np.zeros(image_size, bool)
        seen[cropped if mode == "crop" else ...] = True
        np.testing.assert_array_equal(~np.isnan(heatmap), seen)
        assert shown.overlay(word).size == shown.image.size


def test_select_shows_one_layer_or_head():
    shown = caption("squeeze", (20, 30))
    maps = shown.layer_attention
    for layer in (None, 0, 2):
        for head in (None, 0, 4):
            expected = torch.zeros(2, 2, 3)
            layers = range(3) if layer is None else [layer]
            heads = range(5) if head is None else [head]
            for i in layers:
                for j in heads:
                    expected += maps[:, i, j] / (len(layers) * len(heads))
            chosen = shown.select(layer=layer, head=head)
            torch.testing.assert_close(chosen.attention, expected)
            assert torch.equal(chosen.layer_attention, maps)
    np.testing.assert_allclose(shown.select().heatmap(1), shown.heatmap(1), rtol=1e-5)


def test_words_of_a_caption_share_one_colour_scale():
    """Each map was stretched to its own range, so that flat ones looked sharp: here the second word
    looks at one patch and the first nearly evenly."""
    shown = caption("squeeze", (20, 30))
    maps = torch.full((2, 2, 3), 1 / 6)
    maps[0, 0, 0] += 0.02
    maps[1] = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    shown = replace(shown, attention=maps)
    strength = [np.asarray(shown.overlay(i), dtype=float).std() for i in range(2)]
    assert strength[0] < 0.1 * strength[1]
