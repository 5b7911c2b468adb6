"""Overlays and contact sheets: honest scales, the right place, nothing that overlaps."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vlattn.images import Preprocess
from vlattn.visualization import MIN_CONTRAST, RAMP, contact_sheet, overlay

H, W = 60, 90
PICTURE = Image.fromarray(np.random.default_rng(0).integers(60, 200, (H, W, 3), dtype=np.uint8))


def one_patch(row, column, gh=2, gw=3, share=1.0):
    """A density over H x W: `share` in one patch of a (gh, gw) grid, the rest spread evenly."""
    grid = np.full((gh, gw), (1 - share) / (gh * gw))
    grid[row, column] += share
    return np.kron(grid, np.ones((H // gh, W // gw))) * (gh * gw) / (H * W)


def difference(image, other=PICTURE):
    return np.abs(np.asarray(image, dtype=int) - np.asarray(other, dtype=int)).max(axis=2)


def covered(image):
    """Brightness in red minus blue: the ramp's upper half is red to yellow."""
    pixels = np.asarray(image, dtype=int)
    return pixels[..., 0] - pixels[..., 2]


@pytest.mark.parametrize(("row", "column"), [(0, 0), (0, 2), (1, 0), (1, 1)])
def test_heat_lies_on_its_patch(row, column):
    """Maps were drawn with rows and columns swapped: a 2 x 3 grid on a picture wider than high."""
    grey = Image.new("RGB", (W, H), "#808080")
    result = overlay(grey, one_patch(row, column))
    hot = covered(result) > 20
    expected = np.zeros((H, W), bool)
    expected[row * 30 : row * 30 + 30, column * 30 : column * 30 + 30] = True
    assert result.size == grey.size and result.mode == "RGB"
    np.testing.assert_array_equal(hot, expected)


def test_the_peak_has_the_top_colour_and_colours_rise_in_brightness():
    """Heat maps were drawn with red and blue swapped, hot regions cold."""
    heatmap = np.tile(np.linspace(0, 10, W), (H, 1))
    pixels = np.asarray(overlay(PICTURE, heatmap, peak=20, opacity=1.0), dtype=int)
    assert tuple(np.asarray(overlay(PICTURE, one_patch(0, 1), opacity=1.0))[5, 45]) == RAMP[-1]
    assert not (pixels == RAMP[-1]).all(axis=2).any()  # 10 is half of the peak
    lightness = np.array(RAMP) @ (0.2126, 0.7152, 0.0722)
    assert (np.diff(lightness) > 0).all()


def test_flat_maps_look_alike_and_pale_on_any_scale():
    """Each map was stretched to the full range: rounding noise on even attention looked sharp."""
    even = np.full((H, W), 1 / (H * W))
    noise = np.random.default_rng(1).normal(size=(6, 9)) * 1e-6
    noisy = np.kron(1 / 54 + noise, np.ones((10, 10))) / 100
    for peak in (None, 1 / (H * W), 1.01 / (H * W), 1.0):
        plain = overlay(PICTURE, even, peak=peak)
        assert difference(plain, overlay(PICTURE, noisy, peak=peak)).max() <= 1
        assert difference(plain).max() < 0.15 * 255
        shade = np.asarray(plain, dtype=float) / np.asarray(PICTURE, dtype=float)
        assert shade.std() < 0.01  # every pixel of every channel is dimmed alike
    for scale in (1e-6, 1.0, 1e6):  # only the ratio to even attention counts
        assert difference(plain, overlay(PICTURE, even * scale)).max() <= 1


@pytest.mark.parametrize("peak", [None, 0.0, 0.5])
def test_a_map_of_zeros_is_pale(peak):
    """A constant map was divided by its range, zero, and came out as NaN."""
    assert difference(overlay(PICTURE, np.zeros((H, W)), peak=peak)).max() < 0.15 * 255


def test_maps_that_share_a_peak_can_be_compared():
    strong, weak = one_patch(0, 0, share=0.9), one_patch(0, 0, share=0.4)
    peak = strong.max()
    inside = (slice(0, 30), slice(0, 30))
    shared = difference(overlay(PICTURE, weak, peak=peak))[inside].mean()
    assert shared < 0.8 * difference(overlay(PICTURE, strong, peak=peak))[inside].mean()
    own = overlay(PICTURE, strong)
    assert difference(own, overlay(PICTURE, strong, peak=peak)).max() == 0


def test_a_low_peak_does_not_stretch_a_map():
    """The top colour stands for at least MIN_CONTRAST times even attention."""
    twice = one_patch(0, 0, share=0.2)  # twice the even density in one patch of six
    bound = MIN_CONTRAST / (H * W)
    np.testing.assert_allclose(twice.max() * H * W, 2)
    assert difference(overlay(PICTURE, twice), overlay(PICTURE, twice, peak=bound)).max() == 0


def test_what_the_model_did_not_see_is_hatched():
    """A centre crop's overlay showed the border as looked at and found unimportant."""
    heatmap = np.full((H, W), np.nan)
    heatmap[:, 15:75] = 1 / (H * 60)
    result = overlay(PICTURE, heatmap)
    outside = np.asarray(result, dtype=int)[:, :15]
    assert difference(result)[:, 15:75].max() < 0.15 * 255
    assert (outside.max(axis=2) - outside.min(axis=2)).mean() < 20  # next to grey
    assert outside[0].mean(axis=1).std() > 10  # in bands
    overlay(PICTURE, np.full((H, W), np.nan))  # nothing seen at all: no warning, no error


@pytest.mark.parametrize("mode", ["squeeze", "crop", "pad"])
def test_heat_finds_its_way_back_through_the_preprocessing(mode):
    """Overlays drifted because the model saw a crop or a resized frame of the picture."""
    picture = Image.new("RGB", (120, 64), "black")
    picture.paste("white", (64, 16, 80, 32))
    pixels, geometry = Preprocess(size=(32, 32), mode=mode, mean=(0,) * 3, std=(1,) * 3)(picture)
    heatmap = geometry.to_image(
        pixels.mean(dim=0).unflatten(0, (8, 4)).unflatten(2, (8, 4)).mean((1, 3))
    )
    result = overlay(picture, heatmap, opacity=1.0)
    y, x = np.argwhere((np.asarray(result) == RAMP[-1]).all(axis=2)).mean(axis=0)
    assert abs(y - 24) < 8 and abs(x - 72) < 8  # within half a patch


def test_overlay_reads_any_picture_and_leaves_it_alone():
    grey = PICTURE.convert("L")
    before = grey.tobytes()
    assert overlay(grey, one_patch(0, 0)).mode == "RGB"
    assert grey.tobytes() == before
    untouched = overlay(PICTURE, one_patch(0, 0), opacity=0.0)
    assert difference(untouched).max() == 0


def test_overlay_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"high and wide as the picture, \(60, 90\), got shape"):
        overlay(PICTURE, np.zeros((W, H)))
    with pytest.raises(ValueError, match=r"opacity must lie between 0 and 1, got 1\.5"):
        overlay(PICTURE, np.zeros((H, W)), opacity=1.5)


@dataclass
class FakeCaption:
    """What a contact sheet needs of a caption; word k looks at patch k of a (3, 4) grid."""

    image: Image.Image
    text: str

    @property
    def words(self):
        return [
            SimpleNamespace(text=" " + w, logprob=-0.1 * k) for k, w in enumerate(self.text.split())
        ]

    def heatmap(self, i):
        grid = np.full((3, 4), 0.01, dtype=np.float32)
        grid[i // 4 % 3, i % 4] = 1
        big = Image.fromarray(grid).resize(self.image.size, Image.Resampling.NEAREST)
        return np.asarray(big) / np.asarray(big).sum()


@pytest.mark.parametrize("size", [(90, 60), (600, 25), (25, 600), (1, 1)])
@pytest.mark.parametrize("words", [0, 1, 24])
def test_contact_sheet_of_any_picture_and_length(size, words):
    caption = FakeCaption(PICTURE.resize(size), " ".join(["hippopotamuses"] * words))
    sheet = np.asarray(contact_sheet([caption, caption], width=700, thumbnail=80))
    assert sheet.shape[1] == 700
    margin = np.concatenate([sheet[:28].ravel(), sheet[-28:].ravel(), sheet[:, :28].ravel()])
    assert (margin == 255).all() and (sheet[:, -28:] == 255).all()


def test_contact_sheet_grows_by_rows_and_holds_the_picture():
    caption = FakeCaption(Image.new("RGB", (50, 50), (10, 200, 30)), "a b c d")
    one = contact_sheet([caption])
    two = contact_sheet([caption, caption])
    pixels = np.asarray(two)
    green = (np.abs(pixels.astype(int) - (10, 200, 30)).max(axis=2) < 3).sum()
    assert two.height - one.height == one.height  # margins are shared, a rule stands between
    assert green == 2 * 224 * 224  # the picture twice, undimmed; overlays are tinted


def test_long_words_and_captions_stay_inside_their_cells():
    """The ink under a thumbnail never reaches the next one's."""
    caption = FakeCaption(Image.new("RGB", (50, 50), "white"), "W" * 90 + " " + "M" * 90)
    pixels = np.asarray(contact_sheet([caption], width=800, thumbnail=100)).min(axis=2)
    left = 28 + 200 + 28
    words = pixels[28 + 2 * 30 + 10 + 100 + 2 :]  # below two lines of text and the thumbnails
    assert (words[:, left - 14 : left] == 255).all()
    assert (words[:, left + 100 : left + 114] == 255).all()
    assert (words[:30, left : left + 100] < 128).any()


def test_contact_sheet_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="captions must hold at least one caption, got none"):
        contact_sheet([])
    with pytest.raises(
        ValueError, match="width must be at least 532 for thumbnails of 112, got 300"
    ):
        contact_sheet([FakeCaption(PICTURE, "a")], width=300)
