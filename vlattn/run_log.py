"""What a run says while it trains."""

from pathlib import Path

from accelerate import Accelerator
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from vlattn.data.dataset import Batch


class RunLog:
    """The progress bar and TensorBoard, of the first process alone."""

    def __init__(self, out: Path, accelerator: Accelerator, step: int, total_steps: int):
        quiet = not accelerator.is_main_process
        self.bar = tqdm(
            total=total_steps, initial=step, desc="training", unit="step", disable=quiet
        )
        folder = str(out / "tensorboard")
        self.board = None if quiet else SummaryWriter(folder, purge_step=step + 1)

    def step(
        self, step: int, title: str, value: float, rate: float, window: list[Batch], seconds: float
    ) -> None:
        captions = sum(int(batch.packed.segments.amax(1).sum()) for batch in window)
        self.bar.set_postfix_str(
            f"{title} {value:.3f}, rate {rate:.1e}, {captions / seconds:.0f} captions/s",
            refresh=False,
        )
        self.bar.update()
        self.add(step, {f"train/{title}": value, "train/learning_rate": rate})
        for reason in (reason for batch in window for reason in batch.skipped):
            tqdm.write(f"skipped: {reason}")

    def add(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items() if self.board else ():
            self.board.add_scalar(name, value, step)

    def write(self, text: str) -> None:
        if self.board:
            tqdm.write(text)

    def close(self) -> None:
        self.bar.close()
        if self.board:
            self.board.close()
