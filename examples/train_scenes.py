"""Train a small captioner from scratch on the built-in scenes, and look at what it looks at.

    python examples/train_scenes.py --out runs/scenes

Under four minutes on two slow CPU cores. Writes a model folder and `words.png`, a contact sheet of
the region that each word came from, and prints how many of the test pictures are described with
every object's colour and shape right. Takes the flags of `vlattn train`, which beat the recipe
below.
"""

import argparse
import sys
from pathlib import Path

from vlattn import Captioner
from vlattn.cli import train_main
from vlattn.data.dataset import CaptionDataset
from vlattn.data.scenes import described, scenes
from vlattn.evaluation import score_captions, write_captions
from vlattn.visualization import contact_sheet

RECIPE = (
    "--data scenes --encoder-depth 1 --dim 128 --num-heads 4 --dropout 0 --label-smoothing 0 "
    "--max-steps 1500 --batch-size 16 --captions-per-image 1 --sort-window 1 --warmup-steps 100 "
    "--learning-rate 1.5e-3 --average-decay 0.97 --eval-every 6 --attention-supervision 1"
).split()


def main(flags: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out", default="runs/scenes")
    out = parser.parse_known_args(flags)[0].out

    # 1. Train.
    status = train_main([*RECIPE, "--out", out, *flags])
    if status:
        return status
    captioner = Captioner.from_pretrained(out)

    # 2. Score: on pictures like those it saw, and on pairs of colour and shape that it never saw.
    for split in ("test", "test_novel"):
        records = scenes(split)
        data = CaptionDataset(
            records, captioner.tokenizer, captioner.preprocess, max_len=captioner.config.max_len
        )
        written = write_captions(captioner, data)
        scores = score_captions(written, records)
        right = sum(described(written[r.name]) == described(r.captions[0]) for r in records)
        share = f"every colour and shape right in {100 * right / len(records):.1f} %"
        print(f"{split}, {len(records)} images: {share}  {scores}")

    # 3. Look: one row per picture, and the region of each word.
    pictures = [record.image for record in scenes("test", count=6)]
    sheet = Path(out) / "words.png"
    contact_sheet(captioner.caption(pictures)).save(sheet)
    print(f"the words and their regions are in {sheet}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
