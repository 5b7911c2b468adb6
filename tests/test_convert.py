"""Converted captioners compute what transformers computes, and write what its `generate` writes.

No hub is asked: the checkpoints are small, with random weights, and every size is another one.
"""

import json
import pickle
import shutil
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer

from vlattn import Captioner, TrainConfig, train
from vlattn.cli import main
from vlattn.convert import convert

transformers = pytest.importorskip("transformers", reason="needs transformers (vlattn[dev])")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZE, PATCH = (24, 40), 8  # a grid of 3 x 5
CAPTIONS = ["a dog runs on the grass.", "Two men, one in red, sit by the dog's bed!", "a red bus"]
WORDS = "a dog run ##s on the grass . two men , one in red sit by ' s bed ! bus ##es man".split()
WORDPIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]

VIT = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3}
VIT |= {"intermediate_size": 53, "image_size": SIZE, "patch_size": PATCH}
BERT = {"hidden_size": 28, "num_hidden_layers": 3, "num_attention_heads": 4}
BERT |= {"intermediate_size": 45, "max_position_embeddings": 31}
DECODER = {"is_decoder": True, "add_cross_attention": True}


def wordpieces(folder):
    (folder / "vocab.txt").write_text("\n".join(WORDPIECES), encoding="utf-8")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return len(WORDPIECES)


def byte_pairs(folder, *controls):
    library = ByteLevelBPETokenizer()
    library.train_from_iterator(CAPTIONS, vocab_size=271, special_tokens=list(controls))
    library.save_model(str(folder))
    return library.get_vocab_size()


def blip(folder, tied=True):
    vocab_size = wordpieces(folder) + 2  # [DEC] and [ENC] are not in the tokenizer's files
    text = BERT | {"vocab_size": vocab_size, "bos_token_id": vocab_size - 2, "sep_token_id": 3}
    config = transformers.BlipConfig(
        text_config=text | {"tie_word_embeddings": tied},
        vision_config=VIT | {"image_size": 24, "hidden_act": "gelu_new"},
        tie_word_embeddings=tied,
    )
    transformers.BlipImageProcessor(size={"height": 24, "width": 24}).save_pretrained(folder)
    return transformers.BlipForConditionalGeneration(config)


def joined(folder, encoder, decoder, **ids):
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    for name, value in ids.items():
        setattr(config, name, value)
    height, width = SIZE
    processor = transformers.ViTImageProcessor(size={"height": height, "width": width})
    processor.save_pretrained(folder)
    model = transformers.VisionEncoderDecoderModel(config)
    for name, value in ids.items():
        setattr(model.generation_config, name, value)
    return model


def vit_gpt2(folder, tied=True, wide=False, **options):
    size = byte_pairs(folder, "<|endoftext|>")
    if tied:  # as many repositories have it
        files = (str(folder / name) for name in ("vocab.json", "merges.txt"))
        transformers.GPT2Tokenizer(*files).save_pretrained(folder)
    decoder = transformers.GPT2Config(
        vocab_size=size,
        n_positions=31,
        n_embd=36 if wide else 28,
        n_layer=3,
        n_head=4,
        n_inner=45,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tied,
        **DECODER,
        **options,
    )
    encoder = transformers.ViTConfig(**VIT, qkv_bias=not wide)
    ids = {"decoder_start_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return joined(folder, encoder, decoder, **ids)


def deit_bert(folder, tied=True):
    size = wordpieces(folder)
    decoder = transformers.BertConfig(vocab_size=size, tie_word_embeddings=tied, **BERT, **DECODER)
    ids = {"decoder_start_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    return joined(folder, transformers.DeiTConfig(**VIT), decoder, **ids)


def vit_roberta(folder, tied=True):
    size = byte_pairs(folder, "<s>", "<pad>", "</s>", "<unk>", "<mask>")
    decoder = transformers.RobertaConfig(
        vocab_size=size, tie_word_embeddings=tied, hidden_act="relu", **BERT, **DECODER
    )
    ids = {"decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    return joined(folder, transformers.ViTConfig(**VIT), decoder, **ids)


CHECKPOINTS = {
    "blip": blip,
    "blip-untied": lambda folder: blip(folder, tied=False),
    "vit-gpt2": vit_gpt2,
    "vit-gpt2-untied": lambda folder: vit_gpt2(
        folder, tied=False, wide=True, scale_attn_by_inverse_layer_idx=True
    ),
    "vit-gpt2-unscaled": lambda folder: vit_gpt2(folder, wide=True, scale_attn_weights=False),
    "deit-bert": deit_bert,
    "deit-bert-untied": lambda folder: deit_bert(folder, tied=False),
    "vit-roberta": vit_roberta,
    "vit-roberta-untied": lambda folder: vit_roberta(folder, tied=False),
}


@torch.no_grad()
def randomise(model):
    """Large weights, so that what is written depends on picture, words and places."""
    generator = torch.Generator()
    for name, weight in model.named_parameters():
        generator.manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1 and "norm" in name.lower() + ".ln_" and name.endswith("weight"):
            weight.copy_(1 + 0.2 * noise)
        elif weight.dim() == 1:
            weight.copy_(0.2 * noise)
        elif "embed" in name or "wte" in name or "wpe" in name or "token" in name:
            weight.copy_(0.3 * noise)
        else:
            weight.copy_(noise * weight[0].numel() ** -0.5)


def save(kind, folder):
    model = CHECKPOINTS[kind](folder).eval()
    randomise(model)
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pair(request, tmp_path_factory):
    """A model of transformers, and the captioner that is converted from its folder."""
    folder = tmp_path_factory.mktemp("theirs")
    model = save(request.param, folder)
    return model, convert(folder, folder / "converted")


@pytest.fixture(params=["blip", "vit-gpt2"])
def folder(request, tmp_path):
    (tmp_path / "theirs").mkdir()
    save(request.param, tmp_path / "theirs")
    return tmp_path / "theirs"


def pixels_for(captioner, count=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, *captioner.encoder.image_size, generator=generator)


def theirs(model, pixels, tokens, **options):
    """Logits (B, T, V), and cross-attention (B, L, H, T, P + N)."""
    if isinstance(model, transformers.BlipForConditionalGeneration):
        memory = model.vision_model(pixels).last_hidden_state
        out = model.text_decoder(
            tokens, encoder_hidden_states=memory, output_attentions=True, **options
        )
    else:
        out = model(
            pixel_values=pixels, decoder_input_ids=tokens, output_attentions=True, **options
        )
    return out, torch.stack(out.cross_attentions, dim=1)


def texts_for(captioner, count=3, length=7):
    generator = torch.Generator().manual_seed(1)
    size = captioner.tokenizer.vocab_size
    tokens = torch.randint(5, size - 2, (count, length), generator=generator)
    tokens[:, 0] = captioner.tokenizer.bos_id
    return tokens


@torch.no_grad()
def test_logits_and_attention_are_theirs(pair):
    model, captioner = pair
    pixels, tokens = pixels_for(captioner), texts_for(captioner)
    expected, seen = theirs(model, pixels, tokens)
    features = captioner.encode(pixels)
    memory = captioner.memory(features)
    hidden, weights = captioner.decoder(tokens, captioner.decoder.start(memory), need_weights=True)
    logits = captioner.decoder.logits(hidden)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights, seen, rtol=1e-5, atol=1e-5)
    assert logits.std() > 0.2 and weights.max() > 2 / weights.size(-1)  # far from all alike
    # The maps that are shown are those of the patches.
    decoded = captioner.decode(tokens, features, need_weights=True)
    torch.testing.assert_close(decoded.logits, logits)
    assert torch.equal(decoded.weights, weights[..., features.num_prefix :])
    grid_size = captioner.encoder.grid_size
    assert features.num_prefix == memory.size(1) - grid_size[0] * grid_size[1] > 0


@torch.no_grad()
def test_token_by_token_is_theirs(pair):
    model, captioner = pair
    pixels, tokens = pixels_for(captioner), texts_for(captioner)
    cache, kept = captioner.decoder.start(captioner.memory(captioner.encode(pixels))), None
    for t in range(tokens.size(1)):
        new = tokens[:, t : t + 1]
        expected, seen = theirs(model, pixels, new, cache=kept, use_cache=True)
        kept = expected.cache
        hidden, weights = captioner.decoder(new, cache, need_weights=True)
        logits = captioner.decoder.logits(hidden)
        torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weights, seen, rtol=1e-5, atol=1e-5)


SEARCHES = (
    {"num_beams": 1},
    {"num_beams": 3, "early_stopping": False},
    {"num_beams": 3, "early_stopping": False, "max_len": 4},
    {"num_beams": 5, "early_stopping": False, "length_penalty": 0.0},
    {"num_beams": 4, "early_stopping": True, "length_penalty": 0.6},
    {"num_beams": 3, "early_stopping": False, "length_penalty": 2.0},
    {"num_beams": 2, "early_stopping": "never", "length_penalty": 1.3},
)


@torch.no_grad()
def test_captions_are_those_of_generate(pair):
    model, captioner = pair
    tokenizer = captioner.tokenizer
    pixels = pixels_for(captioner, 5)
    features, texts = captioner.encode(pixels), set()
    for options in SEARCHES:
        options = {"max_len": 13, **options}
        found = captioner.generate(features, **options)
        written = model.generate(
            pixel_values=pixels,
            max_new_tokens=options.pop("max_len"),
            do_sample=False,
            suppress_tokens=sorted(tokenizer.control_ids - {tokenizer.eos_id}) or None,
            **options,
        )
        for (best,), row in zip(found, written.tolist()):
            text = row[1:]
            if tokenizer.eos_id in text:
                text = text[: text.index(tokenizer.eos_id)]
            assert best.tokens == text
            texts.add(tuple(text))
    assert len(texts) >= 3  # they depend on the picture and on the search


@torch.no_grad()
def test_a_prompt_is_gone_on_from(pair):
    model, captioner = pair
    tokenizer, pixels = captioner.tokenizer, pixels_for(captioner, 2)
    begin = tokenizer.encode("a dog")
    found = captioner.generate(captioner.encode(pixels), prompt="a dog", num_beams=1, max_len=6)
    tokens = torch.tensor([[tokenizer.bos_id, *begin]] * 2)
    banned = sorted(tokenizer.control_ids - {tokenizer.eos_id})
    for row, (best,) in enumerate(found):
        text = tokens[row : row + 1]
        while text.size(1) < 1 + len(begin) + 6:
            logits = theirs(model, pixels[row : row + 1], text)[0].logits[0, -1]
            logits[banned] = -torch.inf
            if logits.argmax() == tokenizer.eos_id:
                break
            text = torch.cat([text, logits.argmax()[None, None]], 1)
        assert best.tokens == text[0, 1:].tolist()


def test_words_and_pixels_are_theirs(folder, photos):
    captioner = convert(folder, folder / "converted")
    library = transformers.AutoTokenizer.from_pretrained(folder)
    for caption in (*CAPTIONS, "Caf\u00e9 bed, isn't it?"):
        ids = library.encode(caption, add_special_tokens=False)
        assert captioner.tokenizer.encode(caption) == ids
        if library.unk_token_id not in ids:
            text = library.decode(ids, clean_up_tokenization_spaces=True)
            assert captioner.tokenizer.decode(ids) == text
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    for photo in photos:
        expected = processor(photo, return_tensors="np")["pixel_values"][0]
        pixels = captioner.preprocess(photo)[0].numpy()
        assert np.abs(pixels - expected).max() < 0.03  # of 4: two of 255 levels


def test_a_converted_folder_does_everything(folder, photos, tmp_path, capsys):
    out = tmp_path / "ours"
    assert main(["convert", str(folder), str(out)]) == 0
    assert f"the model is in {out}" in capsys.readouterr().out
    captioner = Captioner.from_pretrained(out)
    for caption in captioner.caption(photos, max_len=7):
        assert "".join(word.text for word in caption.words) == caption.text
        assert caption.attention.shape == (len(caption.words), *captioner.encoder.grid_size)
        torch.testing.assert_close(caption.attention.sum((1, 2)), torch.ones(len(caption.words)))
        # The class token has its share of each map before.
        assert caption.layer_attention.sum((-2, -1)).max() < 1
        caption.overlay(0)
    explained = captioner.explain(photos[0], "a dog runs on the bed")
    assert [word.text.strip() for word in explained.words] == "a dog runs on the bed".split()


def test_a_converted_captioner_learns_more(folder, records, write_imagefolder, tmp_path):
    convert(folder, tmp_path / "ours")
    write_imagefolder(tmp_path / "data", [r._replace(split="train") for r in records])
    options = {"max_steps": 2, "batch_size": 3, "warmup_steps": 0, "precision": "fp32"}
    trained = train(
        TrainConfig(
            data=str(tmp_path / "data"),
            out=str(tmp_path / "run"),
            init=str(tmp_path / "ours"),
            **options,
        )
    )
    start = Captioner.from_pretrained(tmp_path / "ours")
    assert trained.config == start.config and trained.tokenizer.digest == start.tokenizer.digest
    assert trained.preprocess == start.preprocess
    moved = (trained.decoder.embed.weight - start.decoder.embed.weight).abs().max()
    assert 0 < moved < 0.1


def test_a_foreign_folder_says_how_to_convert_it(folder):
    with pytest.raises(ValueError, match=f"'vlattn convert {folder} OUT' makes a model folder"):
        Captioner.from_pretrained(folder)


def test_pickled_weights_are_read_as_tensors_alone(folder, tmp_path):
    """A booby-trapped pickle ran its code when the weights were loaded (X17)."""
    expected = convert(folder, tmp_path / "one").state_dict()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    state = convert(folder, tmp_path / "other").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())

    class Trap:
        def __reduce__(self):
            return (print, ("caught",))

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Trap()}, protocol=2))
    with pytest.raises(ValueError, match=r"pytorch_model.bin holds more than tensors"):
        convert(folder, tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_what_cannot_be_converted_is_one_line(folder, tmp_path):
    def message(**changes):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True)
        (tmp_path / "copy" / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError) as error:
            convert(tmp_path / "copy", tmp_path / "out")
        assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
        return str(error.value)

    assert "is a checkpoint of 'git', vlattn converts blip, vision-" in message(model_type="git")
    swin = {"model_type": "vision-encoder-decoder", "encoder": {"model_type": "swin"}}
    assert "its encoder is 'swin', not one of vit, deit" in message(**swin)
    weights = load_file(folder / "model.safetensors")
    name = next(
        name
        for name in weights
        if name.endswith("crossattention.c_proj.weight")
        or name.endswith("crossattention.output.dense.weight")
    )
    save_file(weights | {"adapter.weight": torch.zeros(2)}, folder / "model.safetensors")
    assert "no place for 1 tensors: adapter.weight" in message()
    save_file({k: v for k, v in weights.items() if k != name}, folder / "model.safetensors")
    assert f"the weights lack {name}" in message()
    (folder / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "copy")
    assert "no model.safetensors and no pytorch_model.bin" in message()
    with pytest.raises(ValueError, match="no model folder"):
        convert(tmp_path / "nowhere", tmp_path / "out")
