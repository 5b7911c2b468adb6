"""Train a captioner on your own pictures: any layout that vlattn reads, any encoder of timm.

    python examples/train_captioner.py --data PICTURES --out runs/mine \\
        --encoder timm:tf_efficientnet_lite0 --pretrained

Teacher forcing, then self-critical training. Takes the flags of `vlattn train` (`--help` lists
them), which beat the recipe below.
"""

import sys

from vlattn.cli import train_main

RECIPE = (
    "--dim 384 --depth 3 --mlp-ratio 3 --dropout 0.4 --views 2 "
    "--batch-size 24 --epochs 10 --scst-steps 400"
).split()

if __name__ == "__main__":
    raise SystemExit(train_main([*RECIPE, *sys.argv[1:]]))
