"""A tiny captioner and pictures that several files test with."""

import json
import os
import socket
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: its kernels run on the CPU

from vlattn.attention import ATTENTIONS, AdditiveAttention
from vlattn.captioner import Captioner
from vlattn.config import CaptionerConfig
from vlattn.data.scenes import scenes
from vlattn.tokenizer import Tokenizer


def find_port():
    """One of 127.0.0.1 that nothing listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


TINY = {
    "image_size": (64, 96),
    "patch_size": 16,  # a grid of 4 x 6 patches
    "encoder_dim": 32,
    "encoder_depth": 1,
    "encoder_heads": 2,
    "dim": 32,
    "depth": 2,
    "num_heads": 2,
    "stem": False,
    "dropout": 0.0,
}
# Every attention, the additive one in each backend that has float64.
MODULES = {
    **ATTENTIONS,
    **{
        f"additive-{backend}": type(backend, (AdditiveAttention,), {"backend": backend})
        for backend in ("reference", "chunked", "compiled")
    },
}
SEED = 2  # of weights with which the three photos get different captions, finished and not


@pytest.fixture(scope="session")
def records():
    return scenes("dev", size=48, count=8)


@pytest.fixture(scope="session")
def tokenizer(records):
    captions = [caption for record in records for caption in record.captions]
    return Tokenizer.train(captions, kind="word", min_frequency=1)


@pytest.fixture(scope="session")
def make_captioner(tokenizer):
    """A function of config settings: an untrained captioner in eval mode with much to say.

    Its weights are larger than at the start of training, so that what it writes depends on the
    picture, on the words before and on the place, with the end likelier in later places. They
    depend on their names alone, not on the order in which modules draw theirs.
    """

    def make(attention="scaled_dot_product", tokenizer=tokenizer, **settings):
        captioner = Captioner(CaptionerConfig(attention=attention, **TINY | settings), tokenizer)
        generator = torch.Generator()
        with torch.no_grad():
            for name, weight in captioner.named_parameters():
                if name.endswith("bias"):
                    weight.zero_()
                elif weight.dim() > 1 and weight.numel():
                    generator.manual_seed(zlib.crc32(f"{SEED} {name}".encode()))
                    weight.normal_(std=2 * weight[0].numel() ** -0.5, generator=generator)
            if captioner.decoder.positions is not None:
                places = torch.arange(captioner.config.max_len)[:, None]
                end = captioner.decoder.embed.weight[tokenizer.eos_id]
                captioner.decoder.positions.mul_(3).add_(0.3 * places * end)
        return captioner.eval()

    return make


@pytest.fixture(scope="session", params=ATTENTIONS)
def captioner(request, make_captioner):
    return make_captioner(request.param)


@pytest.fixture(scope="session")
def photos():
    """Three pictures of different shapes."""

    def photo(seed, height, width):
        colours = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
        return Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)

    return [photo(0, 60, 90), photo(1, 75, 50), photo(2, 64, 64)]


@pytest.fixture(scope="session")
def write_imagefolder():
    """A function that writes records as an `imagefolder` data set."""

    def write(folder, records):
        folder.mkdir()
        rows = []
        for i, record in enumerate(records):
            record.image.save(folder / f"{i}.png")
            row = {"file_name": f"{i}.png", "split": record.split}
            rows += [json.dumps(row | {"text": text}) + "\n" for text in record.captions]
        (folder / "metadata.jsonl").write_text("".join(rows), encoding="utf-8")
        return folder

    return write
