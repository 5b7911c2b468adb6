"""Times captioning and training against the transformers library, on the same weights.

    python benchmarks/captioner.py [--bfloat16] [--vocab-size 50257]

A ViT-GPT2 of random weights (decoder of 3 layers, width 384, 50 memory tokens) is converted.
Captions are 14 tokens, the encoder left out; both sides write the same ones, which is checked.
Training has five captions a picture (12 words, give or take 4) and a frozen encoder, whose features
are kept, or which runs once per picture on both sides, or once per caption on the other side, as it
does in `model(pixel_values, labels)`. The two take turns in one process, and the table has medians,
and what share of its time each spends in products with weights, which both have to compute. Takes
about six minutes on two CPU cores.
"""

import argparse
import platform
import tempfile
from pathlib import Path

import tokenizers
import torch
import transformers
from accelerate import Accelerator
from attention import measure
from torch import Tensor, nn
from training import random_captions
from transformers.modeling_outputs import BaseModelOutput

from vlattn import Captioner
from vlattn.convert import convert
from vlattn.data.dataset import Batch, pack
from vlattn.encoder import PatchFeatures
from vlattn.steps import teacher_step

NEW_TOKENS = 14
PRODUCTS = ("aten::addmm", "aten::mm", "mkldnn::_linear_pointwise")
ENCODER = ("features kept", "encoder per picture", "theirs per caption")


def make_pair(vocab_size: int) -> tuple[transformers.VisionEncoderDecoderModel, Captioner]:
    """A model of transformers with random weights, and the captioner that it converts to."""
    encoder = transformers.ViTConfig(
        hidden_size=384, num_hidden_layers=4, num_attention_heads=6, image_size=112
    )
    decoder = transformers.GPT2Config(
        vocab_size=vocab_size, n_positions=64, n_embd=384, n_layer=3, n_head=6
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 2
    model = transformers.VisionEncoderDecoderModel(config).eval()
    for name, weight in model.named_parameters():  # so that what is written depends on the picture
        if weight.dim() > 1 and "decoder" in name:
            nn.init.normal_(weight, std=0.06)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        words = {f"w{i}": i for i in range(vocab_size)}
        library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
        library.save(str(Path(folder) / "tokenizer.json"))
        processor = transformers.ViTImageProcessor(size={"height": 112, "width": 112})
        processor.save_pretrained(folder)
        captioner = convert(folder, Path(folder) / "converted")
    for name in ("eos_token_id", "pad_token_id", "decoder_start_token_id"):
        setattr(model.generation_config, name, getattr(config, name))
    return model, captioner


def generation(model, captioner: Captioner, batch_size: int, num_beams: int) -> dict:
    """What to time, by name; raises where the two do not write the same."""
    tokens = torch.randn(batch_size, 50, 384, dtype=model.dtype)
    banned = sorted(captioner.tokenizer.control_ids)
    rules = {"early_stopping": False} if num_beams > 1 else {}

    @torch.no_grad()
    def theirs():
        return model.generate(
            encoder_outputs=BaseModelOutput(tokens),
            max_new_tokens=NEW_TOKENS,
            num_beams=num_beams,
            do_sample=False,
            suppress_tokens=banned,
            **rules,
        )

    def ours():
        features = PatchFeatures(tokens, captioner.encoder.grid_size)
        return captioner.generate(features, max_len=NEW_TOKENS, num_beams=num_beams, **rules)

    written = [best.tokens for (best,) in ours()]
    if model.dtype == torch.float32:
        assert written == [row[1:] for row in theirs().tolist()], "they write other captions"
    return {"transformers": theirs, "vlattn": ours}


def training(model, captioner: Captioner, half: bool, encoder: str) -> dict:
    """A step of 16 pictures each, by name; `encoder` is one of `ENCODER`."""
    captions = random_captions(16, 5)
    pixels = torch.randn(16, 3, 112, 112)
    with torch.no_grad():
        features = captioner.encode(pixels).tokens
    packed, targets = pack(captions)
    flat = [torch.tensor(text[1:]) for texts in captions for text in texts]
    labels = nn.utils.rnn.pad_sequence(flat, True, -100)
    for net in (model, captioner):
        net.train()
        net.encoder.requires_grad_(False).eval()
    optimizers = [
        torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-5, fused=True)
        for net in (model, captioner)
    ]
    accelerator = Accelerator(mixed_precision="bf16" if half else "no")
    prepared = accelerator.prepare_model(captioner, evaluation_mode=True)
    optimizer = accelerator.prepare_optimizer(optimizers[1])

    def theirs():
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            if encoder == "theirs per caption":
                given = {"pixel_values": pixels.repeat_interleave(5, dim=0)}
            else:
                kept = encoder == "features kept"
                states = features if kept else model.encoder(pixels).last_hidden_state
                given = {"encoder_outputs": BaseModelOutput(states.repeat_interleave(5, dim=0))}
            loss = model(**given, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers[0].step()
        optimizers[0].zero_grad()

    def ours():
        images: Tensor = features if encoder == "features kept" else pixels
        batch = Batch(tuple(range(16)), images, packed, targets, None, ())
        teacher_step(
            accelerator,
            prepared,
            optimizer,
            [batch],
            label_smoothing=0.0,
            attention_supervision=0.0,
            clip_norm=1.0,
        )

    return {"transformers": theirs, "vlattn": ours}


def report(title: str, calls: dict, captions: int, seconds: float) -> None:
    times = {name: found["seconds"] for name, found in measure(calls, "cpu", seconds).items()}
    rates = {name: captions / time for name, time in times.items()}
    ratio = rates["vlattn"] / rates["transformers"]
    numbers = "".join(f"{rate:12.1f}" for rate in rates.values())
    shares = "".join(f"{100 * seconds_in_products(calls[n]) / times[n]:7.0f} %" for n in calls)
    print(f"{title:34}{numbers}{ratio:9.2f}x{shares}", flush=True)


def seconds_in_products(call) -> float:
    with torch.profiler.profile() as seen:
        call()
    return sum(row.self_cpu_time_total for row in seen.key_averages() if row.key in PRODUCTS) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bfloat16", action="store_true", help="both sides; float32 if not given")
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--seconds", type=float, default=10, help="of each contender")
    parser.add_argument("--only", choices=("generation", "training"))
    args = parser.parse_args()
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, captioner = make_pair(args.vocab_size)
    dtype = torch.bfloat16 if args.bfloat16 else torch.float32
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{platform.processor()}, {torch.get_num_threads()} threads, {dtype}"
    )
    print(f"{'captions/s':34}{'transformers':>12}{'vlattn':>12}{'ratio':>10}{'in products':>18}")
    if args.only != "training":
        nets = (model.to(dtype), captioner.to(dtype))
        for batch_size in (1, 16):
            for num_beams in (1, 3):
                calls = generation(*nets, batch_size, num_beams)
                title = f"generate, batch {batch_size}, beams {num_beams}"
                report(title, calls, batch_size, args.seconds)
    if args.only != "generation":
        nets = (model.float(), captioner.float())
        for encoder in ENCODER:
            calls = training(*nets, args.bfloat16, encoder)
            report(f"train, {encoder}", calls, 16 * 5, args.seconds)


if __name__ == "__main__":
    main()
