"""Features of a frozen encoder: computed once for a picture and view, kept on disk, read in place.

N patches, D width of the encoder.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from vlattn.captioner import Captioner
from vlattn.data.dataset import CaptionDataset
from vlattn.files import write_aside
from vlattn.images import ImageError, open_image

ROWS = 512  # pictures of a file, and the most that a kill loses
BATCH_SIZE = 32


class KeptFeatures:
    """Features of a data set's pictures: `kept[index, view]` is (N, D) float16, or None.

    Args:
        folder: where they lie, in files of many; made where it does not exist.
        keys: of each picture and view; None for a picture that is not there.
    """

    def __init__(self, folder: str | Path, keys: Sequence[Sequence[str | None]]):
        self.folder, self.keys = Path(folder), keys
        self._files: dict[str, np.ndarray] = {}
        self._places: dict[str, tuple[str, int]] = {}  # key -> file and row
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.glob("*.json")):
            self._find(path)

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

    def add(self, keys: list[str], features: np.ndarray) -> None:
        """Keep a file of features, then the list of their keys, which makes it count."""
        text = json.dumps(keys)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        with write_aside(path.with_suffix(".npy")) as aside, aside.open("wb") as file:
            np.save(file, features)
        with write_aside(path) as aside:
            aside.write_text(text, encoding="utf-8")
        self._find(path)

    def _find(self, path: Path) -> None:
        for row, key in enumerate(json.loads(path.read_text(encoding="utf-8"))):
            self._places[key] = (path.stem, row)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}  # a worker opens them itself


def encode_pictures(
    captioner: Captioner,
    dataset: CaptionDataset,
    folder: str | Path,
    *,
    title: str = "encoding",
    num_workers: int = 0,
) -> KeptFeatures:
    """The features of all views of a data set's pictures, as far as the folder lacks them.

    Their keys are digests of the picture's content, of the encoder's weights and of the
    preprocessing, so that those of another picture, encoder or size are never taken.

    Args:
        captioner: its encoder is frozen.
        title: of the progress bar.
        num_workers: processes that decode pictures ahead.
    """
    encoder = _encoder_digest(captioner)
    pictures = [_picture_digest(record.image) for record in dataset.records]
    keys = [
        [picture and f"{encoder}-{picture}-{view}" for view in range(dataset.views)]
        for picture in pictures
    ]
    kept = KeptFeatures(folder, keys)
    todo = {
        key: (index, view)
        for index, views in enumerate(keys)
        for view, key in enumerate(views)
        if key and key not in kept
    }
    new_keys, new = [], []
    with tqdm(total=len(todo), desc=title, unit="img", leave=False) as bar:
        for picture, record in zip(pictures, dataset.records):
            if picture is None:
                bar.write(f"skipped: cannot read {record.name!r}")
        for batch_keys, batch in _encode(captioner, dataset, todo, num_workers, bar):
            new_keys += batch_keys
            new.append(batch)
            if len(new_keys) >= ROWS:
                kept.add(new_keys, np.concatenate(new))
                new_keys, new = [], []
    if new_keys:
        kept.add(new_keys, np.concatenate(new))
    return kept


def _encoder_digest(captioner: Captioner) -> str:
    """Tells encoders with other weights, or another preprocessing, apart."""
    digest = hashlib.sha256(json.dumps(captioner.preprocess.to_dict()).encode())
    digest.update(captioner.config.encoder.encode())
    for name, tensor in captioner.encoder.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _picture_digest(source: Any) -> str | None:
    """Tells pictures with another content apart; None for one that is not there."""
    try:
        if isinstance(source, str | os.PathLike):
            content = Path(source).read_bytes()
        else:
            image = open_image(source)
            content = repr(image.size).encode() + image.tobytes()
    except (OSError, ImageError):
        return None
    return hashlib.sha256(content).hexdigest()[:32]


class _Views(Dataset):
    """Pixels of some views of a data set's pictures, or what is wrong with them."""

    def __init__(self, dataset: CaptionDataset, places: list[tuple[int, int]]):
        self.dataset, self.places = dataset, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> torch.Tensor | ImageError:
        try:
            return self.dataset.pixels(*self.places[i])
        except ImageError as error:
            return error


@torch.inference_mode()
def _encode(
    captioner: Captioner,
    dataset: CaptionDataset,
    todo: dict[str, tuple[int, int]],
    num_workers: int,
    bar: tqdm,
) -> Iterator[tuple[list[str], np.ndarray]]:
    """(keys, features) batch by batch; pictures that cannot be read are named and left out."""
    loader = DataLoader(
        _Views(dataset, list(todo.values())),
        BATCH_SIZE,
        collate_fn=list,
        num_workers=num_workers,
        generator=torch.Generator(),  # the global random numbers stay as they are
    )
    keys = iter(todo)
    captioner.encoder.eval()
    for batch in loader:
        found = [(key, x) for x, key in zip(batch, keys) if not isinstance(x, ImageError)]
        for reason in (x for x in batch if isinstance(x, ImageError)):
            bar.write(f"skipped: {reason}")
        if found:
            pixels = torch.stack([x for _, x in found]).to(captioner.device)
            tokens = captioner.encode(pixels).tokens
            yield [key for key, _ in found], tokens.half().cpu().numpy()
        bar.update(len(batch))
