"""What a smaller key/value cache costs: bytes, error of the logits, captions that come out changed.

    python benchmarks/cache.py --model runs/scenes --data scenes

Greedy captions of the test pictures with the cache in each storage, against float32.
"""

import argparse

import torch

from vlattn import Captioner, read_records
from vlattn.attention.cache import DTYPES
from vlattn.data.dataset import CaptionDataset, collate


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="runs/scenes")
    parser.add_argument("--data", default="scenes")
    args = parser.parse_args()
    captioner = Captioner.from_pretrained(args.model)
    records = [r for r in read_records(args.data)[0] if r.split == "test"]
    max_len = captioner.config.max_len
    data = CaptionDataset(records, captioner.tokenizer, captioner.preprocess, max_len=max_len)
    totals = {dtype: [0, 0, 0.0, 0.0] for dtype in DTYPES}  # bytes, changed, error, size; squared
    for start in range(0, len(data), 100):
        batch = collate([data[i] for i in range(start, min(start + 100, len(data)))])
        features = captioner.encode(batch.images)
        memory, first, truth = captioner.memory(features), None, None
        for dtype, total in totals.items():
            found = captioner.generate(features, num_beams=1, cache_dtype=dtype)
            texts = [best.tokens for best, *_ in found]
            first = texts if first is None else first
            total[1] += sum(one != two for one, two in zip(texts, first))
            rows = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor([captioner.tokenizer.bos_id, *text]) for text in first], True
            )  # the captions of float32, token by token
            cache = captioner.decoder.start(memory, cache_dtype=dtype)
            steps = [captioner.decoder(t, cache).hidden for t in rows.split(1, dim=1)]
            logits = captioner.decoder.logits(torch.cat(steps, dim=1))
            truth = logits if truth is None else truth
            total[0] += cache.nbytes
            total[2] += float((logits - truth).square().sum())
            total[3] += float(truth.square().sum())
    print(f"{args.model} on {len(data)} test pictures of {args.data}")
    for dtype, (size, changed, error, norm) in totals.items():
        name = str(dtype).removeprefix("torch.")
        print(
            f"{name:<10}{size / len(data) / 1024:8.1f} KiB a picture   logits off by "
            f"{100 * (error / norm) ** 0.5:.3f} %   captions changed: {changed}"
        )


if __name__ == "__main__":
    main()
