"""The folder of a training run: its settings, its tokenizer, and checkpoints to continue from."""

import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from vlattn.files import write_json
from vlattn.tokenizer import Tokenizer


@dataclass
class Progress:
    """Where a run stands; saved with each checkpoint."""

    step: int = 0
    best: float = -math.inf


class RunFolder:
    """What a run keeps on disk, such that a kill at any moment leaves it able to go on.

    Args:
        path: of the folder, which becomes the model folder too.
        settings: of the run; a run goes on with the same ones alone.
    """

    def __init__(self, path: str, settings: dict[str, Any]):
        self.path = Path(path)
        self.settings = json.loads(json.dumps(settings))  # tuples are lists, as in the file

    def open(self, *, resume: bool) -> bool:
        """Whether there is a run to continue, of the same settings; anything else is left alone.

        Raises:
            ValueError: the folder holds something, and it is not this run or not to be resumed.
        """
        file = self.path / "train.json"
        if resume and file.is_file():
            kept, now = json.loads(file.read_text(encoding="utf-8")), self.settings
            names = sorted(kept.keys() | now.keys())
            changed = [name for name in names if kept.get(name) != now.get(name)]
            if changed:
                raise ValueError(
                    f"{self.path} was started with other settings of {', '.join(changed)}: resume "
                    "with the same, or choose another folder"
                )
            return True
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ValueError(
                f"{self.path} is not empty: choose another folder, or continue the run that is "
                "there with --resume auto"
            )
        return False

    def start(self, tokenizer: Tokenizer) -> None:
        """Write down what the run is."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "train.json", self.settings)
        tokenizer.save(self.path / "tokenizer.json")

    def save(self, accelerator: Accelerator, progress: Progress) -> None:
        """A checkpoint: written aside, then renamed; the one before it stays, in case it breaks."""
        folder = self.path / "checkpoints"
        aside, final = folder / ".writing", folder / f"step-{progress.step}"
        if accelerator.is_main_process:
            shutil.rmtree(aside, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(aside))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            text = json.dumps(asdict(progress))
            (aside / "progress.json").write_text(text, encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            aside.rename(final)
            for old in self.checkpoints()[2:]:
                shutil.rmtree(old, ignore_errors=True)

    def checkpoints(self) -> list[Path]:
        """The newest first."""
        found = (self.path / "checkpoints").glob("step-*")
        return sorted(found, key=lambda path: -int(path.name.removeprefix("step-")))

    def restore(self, accelerator: Accelerator) -> Progress:
        """Load the newest checkpoint that is whole; the start of the run where there is none.

        That is one which all processes could load.
        """
        for folder in self.checkpoints():
            error = None
            try:
                progress = Progress(**json.loads((folder / "progress.json").read_text()))
                accelerator.load_state(str(folder))
            except Exception as damage:  # a damaged file raises anything
                error = str(damage) or type(damage).__name__
                print(f"cannot continue from {folder} ({error}): trying the one before", flush=True)
            if not any(gather_object([error])):
                print(f"continuing from {folder}", flush=True)
                return progress
        return Progress()
