"""Pictures that visitors upload: only these are opened, within bounds; only so many are kept."""

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder
from PIL import Image

from vlattn.images import ImageError, open_image

MAX_PIXELS = 64_000_000
_KEPT_FILES, _KEPT_BYTES = 300, 500_000_000


def read_upload(picture: dict[str, Any] | None) -> Image.Image:
    """Open an uploaded picture.

    Args:
        picture: gradio's `ImageData` as a dictionary, as it came with the request.

    Raises:
        gr.Error: with one sentence for the visitor.
    """
    if picture is None:
        raise gr.Error("Choose a picture first.")
    # Gradio checks only paths that the request itself marks as files; this one is always checked.
    path = Path(picture["path"] or "").resolve()
    if not path.is_relative_to(Path(get_upload_folder()).resolve()) or not path.is_file():
        raise gr.Error("This picture is not among the uploads: choose it again.")
    try:
        return open_image(path.read_bytes(), max_pixels=MAX_PIXELS)
    except ImageError as error:
        reason = str(error).removeprefix("cannot read image bytes: ")
        raise gr.Error(f"This file cannot be used: {escape(reason, quote=False)}.") from error


def forget_oldest(
    uploads: Iterable[str], files: int = _KEPT_FILES, size: int = _KEPT_BYTES
) -> None:
    """Delete the oldest uploads beyond so many files or bytes; gradio's own limit is their age."""
    found = []
    for path in list(uploads):
        try:
            status = Path(path).stat()
        except FileNotFoundError:
            continue
        found.append((status.st_mtime_ns, status.st_size, Path(path)))
    found.sort(reverse=True)
    total = 0
    for kept, (_, length, path) in enumerate(found):
        total += length
        if kept >= files or total > size:
            path.unlink(missing_ok=True)
