"""Pictures that visitors upload: only these are opened, within bounds; only so many are kept."""

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


def forget_oldest(uploads: set[str], files: int = _KEPT_FILES, size: int = _KEPT_BYTES) -> None:
    """Delete the oldest uploads beyond so many files or bytes; gradio's own limit is their age.

    Args:
        uploads: paths of all; those of files that are no more are taken out.
    """
    found = []
    for path in list(uploads):
        try:
            status = Path(path).stat()
            found.append((status.st_mtime_ns, status.st_size, path))
        except FileNotFoundError:
            uploads.discard(path)
    total = 0
    for kept, (_, length, path) in enumerate(sorted(found, reverse=True)):
        total += length
        if kept >= files or total > size:
            Path(path).unlink(missing_ok=True)
            uploads.discard(path)
