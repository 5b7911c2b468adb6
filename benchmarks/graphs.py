"""What ONNX graphs of a captioner cost and are worth, float32 and int8, against PyTorch.

    python benchmarks/graphs.py --data flickr8k [--model flickr8k-small] [--pictures 1000]

Size on disk, captions per second, CIDEr, and how many captions are those of PyTorch. The graphs are
run by examples/onnx_caption.py, picture by picture, greedily; so is PyTorch here, in float32.
Loading is not counted: the time for one picture is taken off.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vlattn import Captioner, metrics, open_image, read_records
from vlattn.export import export_onnx
from vlattn.model_folder import PACKAGED_MODEL, find_model

EXAMPLE = Path(__file__).parent.parent / "examples" / "onnx_caption.py"


def with_graphs(folder: Path, pictures: list[str]) -> list[str]:
    command = [sys.executable, str(EXAMPLE), str(folder), *pictures]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.removeprefix(f"{name}: ") for line, name in zip(lines, pictures)]


def with_torch(captioner: Captioner, pictures: list[str]) -> list[str]:
    captions = []
    for picture in pictures:
        features, _ = captioner.read_pictures([open_image(picture)])
        ((best,),) = captioner.generate(features, num_beams=1)
        captions.append(captioner.tokenizer.decode(best.tokens))
    return captions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="data set with pictures in files")
    parser.add_argument("--split", default="test")
    parser.add_argument("--model", default=PACKAGED_MODEL, help="model folder or hub id")
    parser.add_argument("--pictures", type=int, default=1000, help="at most")
    args = parser.parse_args()
    records = [r for r in read_records(args.data)[0] if r.split == args.split][: args.pictures]
    pictures = [str(record.image) for record in records]
    references = dict(enumerate(record.captions for record in records))
    captioner = Captioner.from_pretrained(args.model)
    weights = find_model(args.model) / "model.safetensors"
    print(f"{len(pictures)} pictures{'':16}{'MB':>8}{'captions/s':>12}{'CIDEr':>8}{'the same':>10}")
    with tempfile.TemporaryDirectory() as folder:
        ways = {"PyTorch": ([weights], lambda pictures: with_torch(captioner, pictures))}
        for name, int8 in (("ONNX float32", False), ("ONNX int8", True)):
            graphs = Path(folder, name)
            export_onnx(captioner, graphs, int8=int8)
            files = sorted(graphs.glob("*.onnx"))
            ways[name] = files, lambda pictures, graphs=graphs: with_graphs(graphs, pictures)
        written = {}
        for name, (files, write) in ways.items():
            times = []
            for some in (pictures[:1], pictures):
                start = time.perf_counter()
                written[name] = write(some)
                times.append(time.perf_counter() - start)
            rate = (len(pictures) - 1) / (times[1] - times[0])
            size = sum(file.stat().st_size for file in files) / 1e6
            cider = metrics.score(dict(enumerate(written[name])), references).cider
            same = sum(a == b for a, b in zip(written[name], written["PyTorch"]))
            print(f"{name:28}{size:8.1f}{rate:12.1f}{100 * cider:8.1f}{same:10}", flush=True)


if __name__ == "__main__":
    main()
