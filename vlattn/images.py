"""Pictures in, maps back: one door for every picture, and a preprocessing that can be undone.

H, W: the upright picture; S_h, S_w: the model's input; gh, gw: the grid of patches.
"""

import io
import math
import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from PIL import ExifTags, Image, ImageChops, ImageOps
from torch import Tensor

# Not every format that Pillow knows: some start other programs, or nest pictures of any size.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "AVIF", "BMP", "TIFF", "PPM", "JPEG2000")

_UPRIGHT = {  # EXIF orientation -> what makes the picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_FILTERS = threading.Lock()


class ImageError(ValueError):
    """A picture that cannot be used; the message is one line with its name and the reason."""


class SourceLost(ValueError):
    """Where pictures come from cannot be reached; the message is one line with the address.

    A worker's error arrives with its traceback as the message, the last line of which is it.
    """

    def __init__(self, message: str):
        *_, last = message.strip().splitlines()
        super().__init__(last.removeprefix(f"{__name__}.SourceLost: "))


def open_image(source: Any, *, max_pixels: float = 100_000_000) -> Image.Image:
    """Open a picture of any origin as an upright RGB image, fully decoded.

    The EXIF orientation is applied, transparency is flattened on white, 16 bits become 8, and an
    animation gives its first frame. `source` is left as it was.

    Args:
        source: a path, bytes, a binary file object, a PIL image, an (H, W) or (H, W, C) array, or a
            (C, H, W) tensor. Arrays and tensors hold uint8, uint16, or floats in 0..1.
        max_pixels: the most pixels (H * W) accepted, checked before anything is decoded.

    Raises:
        ImageError: if the picture is missing, damaged, too large or no picture at all.
        SourceLost: if `source` says so when it is read.
        TypeError: if `source` is none of the above.
    """
    if isinstance(source, np.ndarray | Tensor):
        source = _from_array(source)
    name = _name(source)
    try:
        if isinstance(source, Image.Image):
            return _upright_rgb(source, max_pixels)
        with _stream(source) as stream:
            return _upright_rgb(_read_header(stream), max_pixels)
    except SourceLost:
        raise
    except Exception as error:  # on damaged files decoders raise errors of any type
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageError(f"cannot read {name}: {' '.join(reason.split())}") from error


def _name(source: Any) -> str:
    if isinstance(source, bytes | bytearray | memoryview):
        return "image bytes"
    if isinstance(source, str | os.PathLike):
        return repr(os.fspath(source))
    if not isinstance(source, Image.Image) and not hasattr(source, "read"):
        raise TypeError(
            "image must be a path, bytes, a binary file, a PIL image, an array or a tensor, "
            f"got {type(source).__name__}"
        )
    name = getattr(source, "filename", "") or getattr(source, "name", "")
    return repr(name) if name else type(source).__name__


def _stream(source: Any) -> BinaryIO:
    """A seekable stream that may be closed."""
    if isinstance(source, bytes | bytearray | memoryview):
        return io.BytesIO(source)
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.is_dir():
            raise ImageError("it is a folder")
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ImageError("it is not a regular file")
        return path.open("rb")
    if hasattr(source, "seekable") and source.seekable():
        source.seek(0)
    content = source.read()
    if not isinstance(content, bytes):
        raise ImageError("the file must be opened in binary mode")
    return io.BytesIO(content)


def _read_header(stream: BinaryIO) -> Image.Image:
    """`Image.open` without Pillow's own limit of pixels, which is one setting per process."""
    Image.init()
    start = stream.read(16)
    if not start:
        raise ImageError("it is empty")
    for kind in FORMATS:
        factory, accept = Image.OPEN.get(kind, (None, None))
        if factory and accept(start) is True:
            stream.seek(0)
            with _no_warnings():
                return factory(stream, "")
    raise ImageError(f"not a picture in a known format ({', '.join(FORMATS)})")


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Keep Pillow's remarks on odd metadata quiet; the filters are one per process, so lock."""
    with _FILTERS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _upright_rgb(image: Image.Image, max_pixels: float) -> Image.Image:
    width, height = image.size
    if not 0 < width * height <= max_pixels:
        raise ImageError(f"{width} x {height} pixels, but max_pixels={max_pixels} and at least 1")
    with _no_warnings() if image.format == "TIFF" else nullcontext():  # its tags are read here
        image.load()
    rgb = _rgb(image)
    method = _UPRIGHT.get(_orientation(image))
    upright = rgb.copy() if method is None else rgb.transpose(method)
    upright.info = {}  # no orientation left to apply a second time
    return upright


def _orientation(image: Image.Image) -> int | None:
    try:
        with _no_warnings():
            orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # broken EXIF does not make the pixels worse
        return None
    return orientation if isinstance(orientation, int) else None


def _rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB; may be `image` itself."""
    if image.mode == "I":  # 32 bits wide, but 16 used: PGM and some PNG files
        image = _from_array(np.asarray(image).clip(0, 65535).astype(np.uint16))
    elif image.mode == "F" or image.mode.startswith("I;16"):
        image = _from_array(np.asarray(image))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image)
        return white
    if image.mode == "CMYK" and image.format == "JPEG" and "adobe" not in image.info:
        image = ImageChops.invert(image)  # Pillow takes every CMYK JPEG for one of Adobe's
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_array(source: np.ndarray | Tensor) -> Image.Image:
    """(H, W) or (H, W, C) array, or (C, H, W) tensor, to an L, LA, RGB or RGBA image."""
    if isinstance(source, Tensor):
        tensor = source.detach().cpu()
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        pixels = (tensor.permute(1, 2, 0) if tensor.ndim == 3 else tensor).numpy()
        expected = "(C, H, W)"
    else:
        pixels, expected = source, "(H, W) or (H, W, C)"
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 2, 3, 4) or pixels.size == 0:
        raise ImageError(
            f"image must be {expected} with 1 to 4 channels C, got {tuple(source.shape)}"
        )
    if pixels.dtype.kind == "f":
        low, high = pixels.min(), pixels.max()
        if not (low >= -1e-3 and high <= 1 + 1e-3):  # NaN included
            raise ImageError(f"float pixels must lie in 0..1, got {low:g}..{high:g}")
        pixels = np.rint(pixels.clip(0, 1) * 255).astype(np.uint8)
    elif pixels.dtype.kind == "u" and pixels.dtype.itemsize == 2:
        pixels = (pixels >> 8).astype(np.uint8)
    elif pixels.dtype != np.uint8:
        raise TypeError(f"image must hold uint8, uint16 or float values, got {pixels.dtype}")
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


@dataclass(frozen=True)
class Geometry:
    """Where the model's input lies in the picture.

    Args:
        image_size: (H, W) of the upright picture.
        box: (left, top, right, bottom) of the model's input, in pixels of the picture; it reaches
            outside of the picture where the input was padded.
    """

    image_size: tuple[int, int]
    box: tuple[float, float, float, float]

    def to_image(self, map: np.ndarray | Tensor) -> np.ndarray:
        """Bring a map over the patches back to the picture.

        Values between the centres of patches are bicubic, kept within the map's own range, so that
        no weight turns negative.

        Args:
            map: one value per patch, (gh, gw), or several such maps, (..., gh, gw).

        Returns:
            (..., H, W) float32, NaN where the model saw nothing.
        """
        map = map.detach().float().cpu() if isinstance(map, Tensor) else map
        patches = np.asarray(map, np.float32)
        if patches.ndim < 2:
            raise ValueError(f"map must be (..., gh, gw), got shape {patches.shape}")
        left, top, right, bottom = self.box
        image = np.full((*patches.shape[:-2], *self.image_size), np.nan, np.float32)
        y, rows = _bicubic(top, bottom, patches.shape[-2], self.image_size[0])
        x, columns = _bicubic(left, right, patches.shape[-1], self.image_size[1])
        low, high = (f(patches, axis=(-2, -1), keepdims=True) for f in (np.min, np.max))
        np.clip(rows @ patches @ columns.T, low, high, out=image[..., y, x])
        return image

    def resized(self, image_size: tuple[int, int]) -> "Geometry":
        """That of the same picture at another size (H, W)."""
        y, x = (new / old for new, old in zip(image_size, self.image_size))
        left, top, right, bottom = self.box
        return Geometry(image_size, (left * x, top * y, right * x, bottom * y))


def _bicubic(start: float, stop: float, patches: int, pixels: int) -> tuple[slice, np.ndarray]:
    """The pixels that the patches on start..stop touch, and their weights (pixels, patches).

    Keys, IEEE Transactions on Acoustics, Speech and Signal Processing 29(6), 1981.
    """
    first, last = max(0, math.floor(start + 1e-6)), min(pixels, math.ceil(stop - 1e-6))
    position = (np.arange(first, last) + 0.5 - start) / (stop - start) * patches - 0.5
    weights = np.zeros((last - first, patches), np.float32)
    for offset in (-1, 0, 1, 2):
        patch = np.floor(position).astype(int) + offset
        d = abs(position - patch)
        near, far = (1.5 * d - 2.5) * d * d + 1, ((2.5 - 0.5 * d) * d - 4) * d + 2
        weights[np.arange(last - first), patch.clip(0, patches - 1)] += np.where(d < 1, near, far)
    return slice(first, last), weights


CORNERS = ((0, 0), (1, 1), (1, 0), (0, 1))  # (right, bottom) of the crops, in this order
CROP = 7 / 8  # of either side
VIEWS = 2 + len(CORNERS)

Box = tuple[float, float, float, float]  # x0, y0, x1, y1 in fractions of width and height


def view_of(image: Image.Image, view: int) -> Image.Image:
    """What training shows in place of a picture.

    View 0 is the picture, 1 its mirror image, and those up to `VIEWS` are the picture without a
    strip along two of its edges, every other one mirrored.
    """
    if view >= 2:
        right, bottom = CORNERS[view - 2]
        width, height = (max(1, round(CROP * side)) for side in image.size)
        left, top = right * (image.width - width), bottom * (image.height - height)
        image = image.crop((left, top, left + width, top + height))
    return ImageOps.mirror(image) if view % 2 else image


def boxes_in_view(boxes: Iterable[Box], view: int) -> list[Box]:
    """Where boxes of a picture are in a view of it; without those that its crop leaves out."""
    right, bottom = CORNERS[view - 2] if view >= 2 else (0, 0)
    side = CROP if view >= 2 else 1
    seen = []
    for box in boxes:
        x0, x1 = ((x - right * (1 - side)) / side for x in box[::2])
        y0, y1 = ((y - bottom * (1 - side)) / side for y in box[1::2])
        x0, x1 = (1 - x1, 1 - x0) if view % 2 else (x0, x1)
        x0, y0, x1, y1 = (min(max(place, 0.0), 1.0) for place in (x0, y0, x1, y1))
        if x0 < x1 and y0 < y1:
            seen.append((x0, y0, x1, y1))
    return seen


@dataclass(frozen=True)
class Preprocess:
    """Bring a picture to the size and range that an encoder takes, and say where it came from.

    Args:
        size: (S_h, S_w) of the input.
        mode: "squeeze" stretches the whole picture, "crop" fills the input with the picture's
            middle, "pad" fits the whole picture and fills the rest with `mean`.
        mean: subtracted from the RGB values, which lie in 0..1.
        std: divides what is left.
        resample: how pixels between the picture's are found, "bicubic" or "bilinear".
        share: of each side of what would be seen, around its middle, that is seen.
    """

    size: tuple[int, int] = (224, 224)
    mode: Literal["squeeze", "crop", "pad"] = "squeeze"
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    share: float = 1.0

    def __post_init__(self):
        if self.resample not in ("bicubic", "bilinear"):
            raise ValueError(f"resample must be 'bicubic' or 'bilinear', got {self.resample!r}")
        if not 0 < self.share <= 1 or (self.mode == "pad" and self.share < 1):
            raise ValueError(
                f"share must be above 0 and at most 1, and 1 for mode 'pad', got {self.share}"
            )
        sides = self.size if isinstance(self.size, tuple) else ()
        if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
            raise ValueError(f"size must be a pair (S_h, S_w) of positive int, got {self.size}")
        if self.mode not in ("squeeze", "crop", "pad"):
            raise ValueError(f"mode must be 'squeeze', 'crop' or 'pad', got {self.mode!r}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(
                "mean and std must be three numbers each, those of std positive, "
                f"got mean={self.mean}, std={self.std}"
            )

    def __call__(self, image: Image.Image) -> tuple[Tensor, Geometry]:
        """Preprocess one picture.

        Args:
            image: what `open_image` gives; any other PIL image goes through `open_image` first.

        Returns:
            pixels (3, S_h, S_w) float32, and the way back.
        """
        if not isinstance(image, Image.Image):
            raise TypeError(f"image must be a PIL image, as open_image gives, got {type(image)}")
        if image.mode != "RGB" or image.info:
            image = open_image(image, max_pixels=math.inf)
        (width, height), (rows, columns) = image.size, self.size
        x, y, w, h = 0, 0, columns, rows  # where in the input the picture goes
        box = seen = (0, 0, width, height)
        if self.mode == "crop":
            scale = min(width / columns, height / rows)
            left, top = max(0, width - columns * scale) / 2, max(0, height - rows * scale) / 2
            box = seen = (left, top, width - left, height - top)
        elif self.mode == "pad":
            scale = max(width / columns, height / rows)
            w, h = max(1, round(width / scale)), max(1, round(height / scale))
            x, y = (columns - w) // 2, (rows - h) // 2
            sx, sy = width / w, height / h
            box = (-x * sx, -y * sy, (columns - x) * sx, (rows - y) * sy)
        if self.share < 1:
            left, top, right, bottom = seen
            dx, dy = ((1 - self.share) / 2 * side for side in (right - left, bottom - top))
            box = seen = (left + dx, top + dy, right - dx, bottom - dy)
        how = Image.Resampling[self.resample.upper()]
        resized = image.resize((w, h), how, box=seen, reducing_gap=3.0)
        pixels = torch.zeros(3, rows, columns)  # 0 is what `mean` becomes
        region = pixels[:, y : y + h, x : x + w]
        region.copy_(torch.from_numpy(np.asarray(resized, np.float32)).permute(2, 0, 1)).div_(255)
        region.sub_(torch.tensor(self.mean)[:, None, None])
        region.div_(torch.tensor(self.std)[:, None, None])
        return pixels, Geometry((height, width), tuple(map(float, box)))

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocess":
        """The inverse of `to_dict`."""
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
