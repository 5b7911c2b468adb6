"""Caption pictures with onnxruntime, numpy, Pillow and tokenizers alone: no PyTorch, no vlattn.

    vlattn export --model runs/scenes graphs
    python examples/onnx_caption.py graphs picture.jpg ...

Greedy decoding; pictures are squeezed, as `vlattn train` does by default.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import tokenizers
from PIL import Image

folder, pictures = Path(sys.argv[1]), sys.argv[2:]
encoder, step = (onnxruntime.InferenceSession(folder / f"{n}.onnx") for n in ("encoder", "step"))
settings = json.loads((folder / "caption.json").read_text())
library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
size, mean, std = (np.float32(settings[name]) for name in ("size", "mean", "std"))
for picture in pictures:
    image = Image.open(picture).convert("RGB").resize([int(s) for s in size[::-1]], 3)
    pixels = ((np.float32(image) / 255 - mean) / std).transpose(2, 0, 1)[None]
    memory = encoder.run(None, {"pixels": pixels})
    past = [x[:, :, :, :0] for x in memory]  # (layers, pictures, heads, 0, size of a head)
    text, token = [], settings["bos_id"]
    while len(text) < 30:
        inputs = ([[token]], [[len(text)]], *memory, *past)
        named = {i.name: np.asarray(x) for i, x in zip(step.get_inputs(), inputs)}
        logits, *past = step.run(None, named)
        logits[:, settings["never"]] = -np.inf
        token = int(logits.argmax())
        if token == settings["eos_id"]:
            break
        text.append(token)
    print(f"{picture}: {library.decode(text, skip_special_tokens=False).strip()}")
