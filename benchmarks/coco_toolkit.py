"""Our scores beside those of the COCO caption toolkit, which adds METEOR; needs Java.

vlattn evaluate --model runs/mine --data PICTURES --split test --out runs/mine/test
python benchmarks/coco_toolkit.py runs/mine/test/captions.json --data PICTURES
"""

import argparse
import json
import shutil
from pathlib import Path

from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.meteor.meteor import Meteor
from pycocoevalcap.rouge.rouge import Rouge
from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

from vlattn.data.layouts import read_records
from vlattn.metrics import score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("captions", type=Path, help="captions.json of `vlattn evaluate --out`")
    parser.add_argument("--data", required=True, help="the data set that they are about")
    args = parser.parse_args()
    if shutil.which("java") is None:
        raise SystemExit("the toolkit's tokeniser and METEOR need Java, which is not here")
    written = {r["image_id"]: r["caption"] for r in json.loads(args.captions.read_text("utf-8"))}
    records, _ = read_records(args.data)
    references = {r.name: list(r.captions) for r in records if r.name in written}

    ours = score(written, references)
    tokenizer = PTBTokenizer()
    gts = tokenizer.tokenize({k: [{"caption": c} for c in v] for k, v in references.items()})
    res = tokenizer.tokenize({k: [{"caption": v}] for k, v in written.items()})
    bleu, _ = Bleu(4).compute_score(gts, res, verbose=0)
    rows = [(f"BLEU-{n}", mine, theirs) for n, mine, theirs in zip((1, 2, 3, 4), ours.bleu, bleu)]
    rows += [
        ("METEOR", None, Meteor().compute_score(gts, res)[0]),
        ("ROUGE-L", ours.rouge_l, Rouge().compute_score(gts, res)[0]),
        ("CIDEr", ours.cider, Cider().compute_score(gts, res)[0]),
    ]
    print(f"{len(written):,} pictures {'vlattn':>9} {'toolkit':>9}")
    for name, mine, theirs in rows:
        print(f"{name:14} {'' if mine is None else f'{100 * mine:.2f}':>9} {100 * theirs:9.2f}")


if __name__ == "__main__":
    main()
