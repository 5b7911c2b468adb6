"""Train a captioner on your own pictures: any layout that vlattn reads, any encoder of timm.

    python examples/train_captioner.py --data PICTURES --out runs/mine \\
        --encoder timm:tf_efficientnet_lite0 --pretrained

Takes the flags of `vlattn train`; `--help` lists them.
"""

from vlattn.cli import train_main

if __name__ == "__main__":
    raise SystemExit(train_main())
