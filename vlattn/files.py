"""Files that are either the old ones or the new ones, whenever the process is killed."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Where a user's programs keep what they can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlattn"


@contextmanager
def write_aside(path: str | os.PathLike) -> Iterator[Path]:
    """A path beside `path` to write to; flushed and renamed to `path` when all went well."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, values: Any) -> None:
    """Replaces the file in one step."""
    with write_aside(path) as aside:
        aside.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
