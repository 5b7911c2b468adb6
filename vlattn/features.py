"""Features of a frozen encoder: computed once for a picture and view, kept on disk, read in place.

P tokens before the patches, N patches, D width of the encoder.
"""

import hashlib
import json
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from vlattn.captioner import Captioner
from vlattn.data.dataset import CaptionDataset, Example
from vlattn.data.shards import READERS, ShardImage
from vlattn.evaluation import picture_bar, picture_batches
from vlattn.files import write_aside, write_json
from vlattn.images import ImageError, open_image

ROWS = 512  # pictures of a file, and the most that a kill loses
BATCH_SIZE = 32


class KeptFeatures:
    """Features of a data set's pictures: `kept[index, view]` is (P + N, D) float16, or None.

    Args:
        folder: where they lie, in files of many; made where it does not exist.
        keys: of each picture and view; None for a picture that is not there.
    """

    def __init__(self, folder: str | Path, keys: Sequence[Sequence[str | None]]):
        self.folder, self.keys = Path(folder), keys
        self._files: dict[str, np.ndarray] = {}
        self._places: dict[str, tuple[str, int]] = {}  # key -> file and row
        self._found: set[str] = set()  # files whose keys are in `_places`
        self.folder.mkdir(parents=True, exist_ok=True)
        self.look()

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __getitem__(self, place: tuple[int, int]) -> np.ndarray | None:
        """Read in place; None where the picture could not be read."""
        index, view = place
        found = self._places.get(self.keys[index][view] or "")
        if found is None:
            return None
        name, row = found
        if name not in self._files:
            # "c": what is written, if anything, stays in memory
            self._files[name] = np.load(self.folder / f"{name}.npy", mmap_mode="c")
        return self._files[name][row]

    def look(self) -> None:
        """Find what the folder holds, what others have put there meanwhile included."""
        for path in sorted(self.folder.glob("*.json")):
            if path.stem not in self._found:
                self._find(path)

    def add(self, keys: list[str], features: np.ndarray) -> None:
        """Keep a file of features, then the list of their keys, which makes it count."""
        name = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]
        path = self.folder / f"{name}.json"
        with write_aside(path.with_suffix(".npy")) as aside, aside.open("wb") as file:
            np.save(file, features)
        write_json(path, keys)
        self._find(path)

    def _find(self, path: Path) -> None:
        self._found.add(path.stem)
        for row, key in enumerate(json.loads(path.read_text(encoding="utf-8"))):
            self._places[key] = (path.stem, row)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}  # a worker opens them itself


@torch.inference_mode()
def encode_pictures(
    captioner: Captioner,
    dataset: CaptionDataset,
    folder: str | Path,
    *,
    title: str = "encoding",
    num_workers: int = 0,
) -> KeptFeatures:
    """The features of all views of a data set's pictures, as far as the folder lacks them.

    Programs that encode into one folder at the same time share the work: each goes through the
    pictures in an order of its own, and passes over what is there by then.

    Their keys are digests of the picture's content, of the encoder's weights and precision, and of
    the preprocessing, so that those of another picture, encoder or size are never taken.

    Args:
        captioner: its encoder is frozen.
        title: of the progress bar.
        num_workers: processes that decode pictures ahead.
    """
    encoder = _encoder_digest(captioner)
    with ThreadPoolExecutor(READERS) as pool:
        pictures = list(pool.map(_picture_digest, [record.image for record in dataset.records]))
    keys = [
        [picture and f"{encoder}-{picture}-{view}" for view in range(dataset.views)]
        for picture in pictures
    ]
    kept = KeptFeatures(folder, keys)
    for picture, record in zip(pictures, dataset.records):
        if picture is None:
            tqdm.write(f"skipped: cannot read {record.name!r}")
    places = {
        key: (index, view)
        for index, views in enumerate(keys)
        for view, key in enumerate(views)
        if key and key not in kept
    }
    todo = list(places)
    parts = [todo[start : start + ROWS] for start in range(0, len(todo), ROWS)]
    random.SystemRandom().shuffle(parts)
    with picture_bar(len(todo), title) as bar:
        for part in parts:
            kept.look()
            names = [key for key in part if key not in kept]
            bar.update(len(part) - len(names))
            if not names:
                continue
            views = _Views(dataset, [places[name] for name in names])
            new_keys, new = [], []
            for batch in picture_batches(views, bar, BATCH_SIZE, num_workers):
                tokens = captioner.encode(batch.images.to(captioner.device)).tokens
                new_keys += [names[i] for i in batch.indices]
                new.append(tokens.half().cpu().numpy())
            if new_keys:
                kept.add(new_keys, np.concatenate(new))
    return kept


def _encoder_digest(captioner: Captioner) -> str:
    """Tells encoders with other weights or precision, or another preprocessing, apart."""
    device = captioner.device.type
    half = torch.is_autocast_enabled(device) and str(torch.get_autocast_dtype(device))
    settings = [captioner.preprocess.to_dict(), captioner.config.encoder, half]
    digest = hashlib.sha256(json.dumps(settings).encode())
    for name, tensor in captioner.encoder.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _picture_digest(source: Any) -> str | None:
    """Tells pictures with another content apart; None for one that is not there."""
    try:
        if isinstance(source, str | os.PathLike):
            content = Path(source).read_bytes()
        elif isinstance(source, ShardImage):
            content = source.read()
        else:
            image = open_image(source)
            content = repr(image.size).encode() + image.tobytes()
    except (OSError, ImageError):
        return None
    return hashlib.sha256(content).hexdigest()[:32]


class _Views(Dataset):
    """Some views of a data set's pictures, without captions."""

    def __init__(self, dataset: CaptionDataset, places: list[tuple[int, int]]):
        self.dataset, self.places = dataset, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> Example:
        try:
            return Example(i, self.dataset.pixels(*self.places[i]), [])
        except ImageError as error:
            return Example(i, error, [])
