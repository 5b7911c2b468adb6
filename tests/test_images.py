"""One door for every picture, and maps that come back to where they came from."""

import io
import json
import math
import os
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageFile

from vlattn.images import (
    FORMATS,
    VIEWS,
    Geometry,
    ImageError,
    Preprocess,
    open_image,
    view_of,
)

RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


def flag() -> Image.Image:
    """No two of its eight orientations look alike: red left third, green top strip."""
    image = Image.new("RGB", (48, 32), "white")
    image.paste(RED, (0, 0, 16, 32))
    image.paste(GREEN, (0, 0, 48, 8))
    return image


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow was built without {kind}")
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    return tags


def photograph(height: int = 30, width: int = 46) -> Image.Image:
    """Smooth, with no symmetry and no flat part."""
    y, x = np.mgrid[:height, :width]
    channels = [120 + 100 * np.sin(x / 9 + y / 13 + k) for k in range(3)]
    return Image.fromarray(np.stack(channels, 2).astype(np.uint8))


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


# How each EXIF orientation is stored: row 0 and column 0 of the file, as sides of the picture.
STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[::-1],
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[:, ::-1],
}


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF", "MPO"])
def test_photos_stored_sideways_become_upright(kind, orientation):
    """Phone photos reached the model sideways, in one format and not in another (C1)."""
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](np.asarray(flag()))))
    options = {"PNG": {}, "TIFF": {}, "WEBP": {"lossless": True}}.get(kind, {"quality": 100})
    if kind == "MPO":
        options |= {"save_all": True, "append_images": [Image.new("RGB", stored.size)]}
    image = open_image(encoded(stored, kind, exif=exif(orientation), **options))
    assert image.size == (48, 32)
    assert abs(pixels(image) - pixels(flag()))[2::4, 2::4].max() < 12
    again = open_image(image)
    assert again.size == image.size and (pixels(again) == pixels(image)).all()


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_unknown_orientations_change_nothing(orientation):
    image = open_image(encoded(flag(), "PNG", exif=exif(orientation)))
    assert (pixels(image) == pixels(flag())).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize(
    "block",
    [
        b"Exif\0\0",
        b"Exif\0\0garbage that is no TIFF header",
        exif(6).tobytes()[:-4],
        exif(6).tobytes()[:15],
        # an orientation that is text, and one whose value lies outside of the block
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x02\0\0\0ab\0\0\0\0\0\0",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\xff\0\0\0\xff\xff\xff\0\0\0\0\0",
    ],
)
def test_broken_exif_does_not_stop_a_picture(kind, block):
    """Metadata cut short ended a run, although the pixels were fine (C1)."""
    image = open_image(encoded(photograph(), kind, exif=block))
    assert sorted(image.size) == [30, 46]  # some blocks can still be read


def ring(background: tuple[int, ...], ink: tuple[int, ...], mode: str) -> Image.Image:
    image = Image.new(mode, (24, 20), background)
    for box in ((4, 4, 20, 6), (4, 14, 20, 16), (4, 4, 6, 16), (18, 4, 20, 16)):
        image.paste(ink, box)
    return image


@pytest.mark.parametrize("kind", ["RGBA", "LA", "palette index", "palette table", "grey key"])
def test_transparent_parts_are_white(kind):
    """A black ring on a clear background turned into a black square (C2)."""
    if kind == "RGBA":
        content = encoded(ring((0, 0, 0, 0), (0, 0, 0, 255), "RGBA"), "PNG")
    elif kind == "LA":
        content = encoded(ring((0, 0), (0, 255), "LA"), "PNG")
    elif kind == "grey key":
        content = encoded(ring(7, 0, "L"), "PNG", transparency=7)
    else:
        image = ring(1, 0, "P")
        image.putpalette([0, 0, 0, 9, 9, 9])
        clear = 1 if kind == "palette index" else b"\xff\x00"
        content = encoded(image, "PNG", transparency=clear)
    for source in (content, Image.open(io.BytesIO(content))):
        image = open_image(source)
        assert image.getpixel((0, 0)) == image.getpixel((12, 10)) == WHITE
        assert image.getpixel((5, 10)) == image.getpixel((12, 5)) == (0, 0, 0)


def test_half_transparent_is_blended_with_white():
    image = open_image(np.full((3, 4, 4), [255, 0, 0, 128], np.uint8))
    assert np.allclose(pixels(image), [255, 127, 127], atol=1)


def test_sixteen_bits_are_scaled(tmp_path):
    grey = np.array([[0, 257 * 128, 65535]], np.uint16).repeat(2, 0)
    expected = np.array([[0, 128, 255]]).repeat(2, 0)
    header = b"P5 3 2 65535\n"
    for content in (
        encoded(Image.fromarray(grey), "PNG"),
        encoded(Image.fromarray(grey), "TIFF"),
        header + grey.astype(">u2").tobytes(),
    ):
        assert (pixels(open_image(content)) == expected[:, :, None]).all()
    assert (pixels(open_image(grey)) == expected[:, :, None]).all()
    assert (pixels(open_image(Image.fromarray(grey.astype(np.int32)))) == expected[..., None]).all()


def without_adobe_marker(jpeg: bytes) -> bytes:
    start = jpeg.index(b"\xff\xee")
    (length,) = struct.unpack(">H", jpeg[start + 2 : start + 4])
    return jpeg[:start] + jpeg[start + 2 + length :]


def test_cmyk_is_not_inverted_with_or_without_adobes_marker():
    """Adobe stores CMYK inverted and says so; readers inverted all files, or none (X9)."""
    red = Image.new("CMYK", (24, 16), (0, 255, 255, 0))
    adobe = encoded(red, "JPEG", quality=95)
    inverted = Image.new("CMYK", (24, 16), (255, 0, 0, 255))
    plain = without_adobe_marker(encoded(inverted, "JPEG", quality=95))
    for content in (adobe, plain, encoded(red, "TIFF")):
        assert np.allclose(pixels(open_image(content)), RED, atol=6)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_gives_its_first_frame(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    frames = [Image.new("RGB", (14, 10), colour) for colour in ("red", "blue")]
    content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    image = open_image(content)
    assert image.size == (14, 10) and np.allclose(pixels(image), RED)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "YCbCr", "HSV", "CMYK", "F"])
def test_every_way_in_gives_the_same_picture(tmp_path, mode):
    values = pixels(photograph()).astype(np.float32) / 255
    image = photograph().convert(mode) if mode != "F" else Image.fromarray(values[:, :, 0])
    before = image.tobytes()
    result = open_image(image)
    assert result.mode == "RGB" and result.size == (46, 30)
    result.paste(0, (0, 0, 46, 30))
    assert image.tobytes() == before  # the source is left alone


def test_sources(tmp_path):
    expected = np.asarray(photograph())
    path = tmp_path / "ein Bild 图.png"
    photograph().save(path)
    content = path.read_bytes()
    at_end = io.BytesIO(content)
    at_end.seek(0, io.SEEK_END)
    with path.open("rb") as file:
        sources = [path, str(path), content, bytearray(content), file, at_end, photograph()]
        sources += [
            expected,
            expected[::-1][::-1],
            expected / 255,
            expected.astype(np.uint16) * 257,
        ]
        tensor = torch.from_numpy(expected.copy()).permute(2, 0, 1)
        sources += [tensor, tensor / 255, (tensor / 255).requires_grad_(), tensor.double() / 255]
        for source in sources:
            assert (np.asarray(open_image(source)) == expected).all()
    grey = expected[:, :, :1]
    for source in (grey, grey[:, :, 0], torch.from_numpy(grey.copy()).permute(2, 0, 1)):
        assert (np.asarray(open_image(source)) == grey).all()
    half = open_image((tensor / 255).to(torch.bfloat16))
    assert abs(pixels(half) - expected).max() <= 1
    lazy = Image.open(path)
    assert (np.asarray(open_image(lazy)) == expected).all()
    lazy.close()


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (7, TypeError, "image must be a path, bytes, .* got int"),
        (None, TypeError, "got NoneType"),
        (np.zeros((2, 3, 5)), ImageError, r"\(H, W\) or \(H, W, C\) with 1 to 4 .*\(2, 3, 5\)"),
        (np.zeros((2, 3, 4, 3)), ImageError, r"got \(2, 3, 4, 3\)"),
        (np.zeros((0, 4, 3)), ImageError, r"got \(0, 4, 3\)"),
        (torch.zeros(6, 7, 3), ImageError, r"must be \(C, H, W\) with 1 to 4 .*\(6, 7, 3\)"),
        (np.full((2, 3), 200.0), ImageError, r"float pixels must lie in 0\.\.1, got 200\.\.200"),
        (np.full((2, 3), np.nan), ImageError, r"must lie in 0\.\.1, got nan\.\.nan"),
        (np.zeros((2, 3), np.int64), TypeError, "uint8, uint16 or float values, got int64"),
        (io.StringIO("text"), ImageError, "StringIO: the file must be opened in binary mode"),
        (b"", ImageError, "cannot read image bytes: it is empty"),
        (b"not a picture at all", ImageError, "not a picture in a known format"),
        (Image.new("RGB", (0, 2)), ImageError, "cannot read Image: 0 x 2 pixels, .* at least 1"),
    ],
)
def test_what_is_no_picture_is_refused(source, error, message):
    with pytest.raises(error, match=message):
        open_image(source)


def damaged(folder: Path) -> dict[str, str]:
    """Files that are no pictures, and why."""
    good = encoded(photograph(200, 300), "JPEG")
    png = encoded(photograph(200, 300), "PNG")
    contents = {
        "cut.jpg": (good[: len(good) * 6 // 10], "truncated"),
        "cut.png": (png[: len(png) * 6 // 10], "truncated"),
        "header only.png": (png[:40], ""),
        "zero.jpg": (b"", "it is empty"),
        "text.jpg": (b"a text", "not a picture in a known format"),
        "page.jpg": (b"<!doctype html><html></html>", "not a picture in a known format"),
        "drawing.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture"),
        "print.eps": (encoded(photograph(), "EPS"), "not a picture"),
        "line\nbreak.jpg": (b"\xff\xd8\xff\xe0", ""),
        "short.gif": (encoded(photograph(), "GIF")[:300], ""),
        "short.webp": (encoded(photograph(), "WEBP")[:60], ""),
        "short.tif": (encoded(photograph(), "TIFF")[:60], ""),
        "short.bmp": (encoded(photograph(), "BMP")[:60], ""),
    }
    for name, (content, _) in contents.items():
        (folder / name).write_bytes(content)
    (folder / "folder.jpg").mkdir()
    reasons = {name: reason for name, (_, reason) in contents.items()}
    return reasons | {"folder.jpg": "it is a folder", "gone.jpg": "No such file or directory"}


def test_damaged_files_are_named_in_one_line(tmp_path):
    """A JPEG cut short was trained on as grey, or killed a long run without its name (C3)."""
    for name, reason in damaged(tmp_path).items():
        for source in (tmp_path / name, str(tmp_path / name)):
            with pytest.raises(ImageError) as error:
                open_image(source)
            message = str(error.value)
            assert message.startswith(f"cannot read {str(tmp_path / name)!r}: ")
            assert reason in message and len(message.splitlines()) == 1
    with (tmp_path / "cut.jpg").open("rb") as file, pytest.raises(ImageError, match=r"cut\.jpg"):
        open_image(file)
    with Image.open(tmp_path / "cut.jpg") as lazy, pytest.raises(ImageError, match=r"cut\.jpg"):
        open_image(lazy)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_a_file_that_may_not_be_read_is_named(tmp_path):
    path = tmp_path / "secret.jpg"
    photograph().save(path)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read every file")
    with pytest.raises(ImageError, match=r"secret\.jpg': Permission denied"):
        open_image(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(ImageError, match="it is not a regular file"):
        open_image(tmp_path / "pipe.jpg")


def bomb(width: int, height: int) -> bytes:
    """A valid one-colour PNG of one bit a pixel."""
    packer = zlib.compressobj(1)
    row = bytes(1 + (width + 7) // 8)
    data = b"".join(packer.compress(row * 1000) for _ in range(height // 1000)) + packer.flush()
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))]
    chunks += [(b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def test_a_small_file_of_a_huge_picture_is_refused_before_decoding(tmp_path, monkeypatch):
    """Some kilobytes that decode to gigabytes took the machine down (C4)."""
    limit = Image.MAX_IMAGE_PIXELS
    path = tmp_path / "bomb.png"
    path.write_bytes(bomb(20_000, 20_000))
    assert path.stat().st_size < 500_000
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ImageError, match=r"bomb\.png': 20000 x 20000 pixels, but max_pixels=1"):
        open_image(path)
    monkeypatch.undo()
    assert open_image(photograph()).size == (46, 30)
    assert Image.MAX_IMAGE_PIXELS == limit


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF"])
def test_pillows_own_limit_neither_stops_nor_warns(monkeypatch, kind):
    content = encoded(photograph(), kind)
    for limit in (1000, 100):  # where Pillow would warn, and where it would refuse
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        if kind == "TIFF" and limit == 100:  # Pillow looks once more when it decodes one
            with pytest.raises(ImageError, match="exceeds limit"):
                open_image(content)
        else:
            assert open_image(content).size == (46, 30)
        assert Image.MAX_IMAGE_PIXELS == limit
    for source in (content, photograph(), np.asarray(photograph())):
        with pytest.raises(ImageError, match="46 x 30 pixels, but max_pixels=1379"):
            open_image(source, max_pixels=1379)
    assert open_image(photograph(), max_pixels=1380).size == (46, 30)


def test_warning_filters_are_left_as_they_were():
    before = list(warnings.filters)
    open_image(encoded(photograph(), "JPEG", exif=exif(6)))
    assert warnings.filters == before


@pytest.mark.parametrize("kind", FORMATS)
def test_known_formats_are_read(kind):
    assert open_image(encoded(photograph(), kind)).size == (46, 30)


# Preprocessing


def test_squeeze_is_an_antialiased_resize_of_the_whole_picture():
    image = photograph(90, 140)
    tensor, geometry = Preprocess((22, 33), "squeeze", std=(0.5, 0.25, 0.125))(image)
    expected = np.asarray(image.resize((33, 22), Image.Resampling.BICUBIC), np.float32) / 255
    expected = (expected - 0.5) / [0.5, 0.25, 0.125]
    assert tensor.shape == (3, 22, 33) and tensor.dtype == torch.float32
    assert np.allclose(tensor.permute(1, 2, 0), expected, atol=0.05)
    assert geometry == Geometry((90, 140), (0, 0, 140, 90))


@pytest.mark.parametrize("size", [(22, 22), (20, 60), (60, 20)])
@pytest.mark.parametrize("picture_size", [(90, 150), (150, 90), (10, 15)])
def test_crop_is_the_middle_at_one_scale(size, picture_size):
    (height, width), (rows, columns) = picture_size, size
    tensor, geometry = Preprocess(size, "crop")(photograph(*picture_size))
    left, top, right, bottom = geometry.box
    assert tensor.shape == (3, *size)
    assert math.isclose((right - left) / columns, (bottom - top) / rows)
    assert math.isclose(left + right, width) and math.isclose(top + bottom, height)
    assert min(left, top) == 0


def test_pad_keeps_the_whole_picture_and_fills_with_the_mean():
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    tensor, geometry = Preprocess((20, 28), "pad", mean, std)(photograph(30, 60))
    assert geometry == Geometry((30, 60), (0, -60 / 28 * 3, 60, 60 / 28 * 17))
    assert (tensor[:, :3] == 0).all() and (tensor[:, 17:] == 0).all()
    assert tensor[:, 3:17].abs().amin((0, 2)).max() > 0


@pytest.mark.parametrize("mode", ["squeeze", "crop", "pad"])
@pytest.mark.parametrize("picture_size", [(1, 1), (1, 900), (900, 1), (3, 2), (1, 10_000)])
def test_extreme_pictures_keep_a_part_that_is_seen(mode, picture_size):
    tensor, geometry = Preprocess((32, 48), mode)(Image.new("RGB", picture_size[::-1], "red"))
    heat = geometry.to_image(np.ones((2, 3)))
    assert tensor.shape == (3, 32, 48) and tensor.isfinite().all()
    assert heat.shape == picture_size and np.nanmin(heat) == np.nanmax(heat) == 1


@pytest.mark.parametrize("size", [(64, 64), (64, 96), (96, 64)])
@pytest.mark.parametrize("mode", ["squeeze", "crop", "pad"])
@pytest.mark.parametrize("picture_size", [(300, 600), (600, 300), (333, 517)])
def test_a_bright_patch_comes_back_to_where_it_is(mode, size, picture_size):
    """Overlays drifted where the model had seen a crop or a padded picture (I1)."""
    height, width = picture_size
    grid = (size[0] // 8, size[1] // 8)
    preprocess = Preprocess(size, mode, mean=(0, 0, 0))  # padding as dark as the picture
    for y, x in [(0.05, 0.05), (0.05, 0.95), (0.5, 0.5), (0.95, 0.05), (0.95, 0.95), (0.3, 0.6)]:
        y, x = round(y * height), round(x * width)
        image = Image.new("RGB", (width, height))
        image.paste(WHITE, (x - 12, y - 12, x + 12, y + 12))
        tensor, geometry = preprocess(image)
        cells = tensor.mean(0).unflatten(1, (grid[1], 8)).unflatten(0, (grid[0], 8)).mean((1, 3))
        heat = geometry.to_image((cells == cells.max()).float())
        left, top, right, bottom = geometry.box
        if not (left <= x < right and top <= y < bottom):
            assert mode == "crop" and np.isnan(heat[y, x])
            continue
        peak_y, peak_x = np.unravel_index(np.nanargmax(heat), heat.shape)
        assert abs(peak_y - y) <= (bottom - top) / grid[0]
        assert abs(peak_x - x) <= (right - left) / grid[1]


def test_to_image_is_nan_exactly_outside_of_the_box():
    heat = Geometry((10, 30), (10, 0, 20, 10)).to_image(np.ones((2, 3)))
    assert np.isnan(heat[:, :10]).all() and np.isnan(heat[:, 20:]).all()
    assert (heat[:, 10:20] == 1).all()
    assert np.isfinite(Geometry((10, 30), (0, -10, 30, 20)).to_image(np.ones((2, 3)))).all()


def keys(distance: float) -> float:
    d = abs(distance)
    if d < 1:
        return 1.5 * d**3 - 2.5 * d**2 + 1
    return -0.5 * d**3 + 2.5 * d**2 - 4 * d + 2 if d < 2 else 0.0


@pytest.mark.parametrize("box", [(0, 0, 17, 11), (3.5, 0, 13.5, 11), (0, -3, 17, 14)])
def test_to_image_is_bicubic_within_the_maps_range(box):
    """Compared with a sum over the neighbouring patches of each pixel, written out."""
    grid = np.random.default_rng(0).random((2, 5)).astype(np.float32)
    left, top, right, bottom = box
    expected = np.full((11, 17), np.nan)
    for y in range(11):
        for x in range(17):
            if not (left - 1 < x < right and top - 1 < y < bottom):
                continue
            v = (y + 0.5 - top) / (bottom - top) * 2 - 0.5
            u = (x + 0.5 - left) / (right - left) * 5 - 0.5
            expected[y, x] = 0
            for i in range(-3, 6):
                for j in range(-3, 9):
                    value = grid[min(max(i, 0), 1), min(max(j, 0), 4)]
                    expected[y, x] += keys(v - i) * keys(u - j) * value
    heat = Geometry((11, 17), box).to_image(torch.from_numpy(grid))
    assert heat.dtype == np.float32
    expected = expected.clip(grid.min(), grid.max())
    np.testing.assert_allclose(heat, expected, atol=1e-5)


def test_to_image_keeps_rows_and_columns_apart():
    """A hot patch in the first row and last column has to show at the top right (I2)."""
    grid = np.zeros((2, 3))
    grid[0, 2] = 1
    heat = Geometry((40, 90), (0, 0, 90, 40)).to_image(grid)
    assert heat.shape == (40, 90) and heat.min() >= 0
    y, x = np.unravel_index(heat.argmax(), heat.shape)
    assert heat[y, x] == 1 and y < 20 and x >= 60
    assert max(heat[30:].max(), heat[:, :45].max()) < 0.01


def test_preprocess_opens_pictures_that_are_not_upright_rgb(tmp_path):
    preprocess = Preprocess((32, 48))
    stored = flag().transpose(Image.Transpose.ROTATE_90)
    sideways = Image.open(io.BytesIO(encoded(stored, "PNG", exif=exif(6))))
    tensor, geometry = preprocess(sideways)
    assert torch.equal(tensor, preprocess(flag())[0]) and geometry.image_size == (32, 48)
    clear = preprocess(Image.new("RGBA", (20, 10), (0, 0, 0, 0)))[0]
    assert (clear == 1).all()


def test_preprocess_survives_json():
    preprocess = Preprocess((160, 224), "pad", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    stored = json.loads(json.dumps(preprocess.to_dict()))
    assert stored == preprocess.to_dict()
    assert Preprocess.from_dict(stored) == preprocess


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Preprocess((224,)), ValueError, r"size must be a pair .*got \(224,\)"),
        (lambda: Preprocess((224, 0)), ValueError, r"size must be .*got \(224, 0\)"),
        (lambda: Preprocess(224), ValueError, r"\(S_h, S_w\) of positive int, got 224"),
        (lambda: Preprocess(mode="zoom"), ValueError, "'squeeze', 'crop' or 'pad', got 'zoom'"),
        (lambda: Preprocess(std=(1, 0, 1)), ValueError, r"mean and std .*std=\(1, 0, 1\)"),
        (lambda: Preprocess(mean=(0.5,)), ValueError, r"three numbers each.*mean=\(0\.5,\)"),
        (lambda: Preprocess()("a.jpg"), TypeError, "must be a PIL image, as open_image gives"),
        (
            lambda: Geometry((5, 7), (0, 0, 7, 5)).to_image(np.ones(6)),
            ValueError,
            r"map must be \(..., gh, gw\), got shape \(6,\)",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_views_are_the_picture_its_mirror_image_and_crops():
    array = np.arange(40 * 24 * 3, dtype=np.uint32).astype(np.uint8).reshape(24, 40, 3)
    image = Image.fromarray(array)
    expected = [
        array,
        array[:, ::-1],
        array[:21, :35],
        array[3:, 5:][:, ::-1],
        array[:21, 5:],
        array[3:, :35][:, ::-1],
    ]
    assert len(expected) == VIEWS
    for view, pixels in enumerate(expected):
        np.testing.assert_array_equal(np.asarray(view_of(image, view)), pixels)
    view_of(Image.new("RGB", (1, 1)), 5)


def test_a_share_of_each_side_is_seen():
    """DeiT's pictures are brought to 256 pixels, of which the middle 224 are seen."""
    image = Image.new("RGB", (60, 40))
    for mode, box in (("squeeze", (15, 10, 45, 30)), ("crop", (20, 10, 40, 30))):
        _, geometry = Preprocess((8, 8), mode=mode, share=0.5)(image)
        assert geometry.box == box
    for options in ({"share": 0}, {"share": 1.5}, {"share": 0.5, "mode": "pad"}):
        with pytest.raises(ValueError, match="share must be above 0 and at most 1"):
            Preprocess(**options)


def test_pixels_between_are_found_as_asked():
    image = Image.fromarray(np.arange(96, dtype=np.uint8).reshape(8, 12) * 2).convert("RGB")
    for resample in ("bicubic", "bilinear"):
        pixels, _ = Preprocess((16, 18), resample=resample)(image)
        expected = image.resize((18, 16), Image.Resampling[resample.upper()])
        expected = (np.asarray(expected, np.float32) / 255 - 0.5) / 0.5
        np.testing.assert_allclose(pixels.permute(1, 2, 0), expected, atol=1e-6)
    with pytest.raises(ValueError, match="resample must be 'bicubic' or 'bilinear', got 'box'"):
        Preprocess(resample="box")
