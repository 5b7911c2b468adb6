"""What a run leaves to look at: its curves, and some captions with the regions of their words."""

from pathlib import Path

from vlattn.captioner import Captioner
from vlattn.data.records import Record
from vlattn.images import ImageError, open_image
from vlattn.visualization import contact_sheet

SHOWN = 8  # pictures of the sheet


def draw_curves(run: Path) -> None:
    """`curves.png`: what TensorBoard was told, one panel for each tag."""
    import matplotlib
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    events = EventAccumulator(str(run / "tensorboard"), {"scalars": 0}).Reload()
    tags = sorted(events.Tags()["scalars"])
    if not tags:
        return
    figure, axes = plt.subplots(
        1, len(tags), figsize=(4 * len(tags), 3), layout="constrained", squeeze=False
    )
    for axis, tag in zip(axes[0], tags):
        points = [(event.step, event.value) for event in events.Scalars(tag)]
        axis.plot(*zip(*points), linewidth=1, marker="." if len(points) < 50 else None)
        axis.set(title=tag, xlabel="step")
        axis.grid(alpha=0.3)
    figure.savefig(run / "curves.png", dpi=100)
    plt.close(figure)


def draw_captions(run: Path, captioner: Captioner, records: list[Record]) -> None:
    """`captions.png`: the first pictures that can be read, their captions, and each word's map."""
    pictures = []
    for record in records:
        try:
            pictures.append(open_image(record.image))
        except ImageError:
            continue
        if len(pictures) == SHOWN:
            break
    if pictures:
        contact_sheet(captioner.caption(pictures)).save(run / "captions.png")
