"""Converted captioners compute what transformers computes, and write what its `generate` writes.

No hub is asked: the checkpoints are small, with random weights, and every size is another one.
"""

import zlib

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer

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


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pair(request, tmp_path_factory):
    """A model of transformers, and the captioner that is converted from its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    model = CHECKPOINTS[request.param](folder).eval()
    randomise(model)
    for part in (model, *model.children()):
        part.set_attn_implementation("eager") if hasattr(part, "set_attn_implementation") else None
    model.save_pretrained(folder)
    return model, convert(folder, folder.with_name(request.param + "-converted"))


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
    assert logits.std() > 0.5 and weights.max() > 2 / weights.size(-1)  # far from all alike
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


SEARCHES = {
    "greedy": {"num_beams": 1},
    "beam": {"num_beams": 3, "early_stopping": False},
    "wide": {"num_beams": 5, "early_stopping": False, "length_penalty": 0.0},
    "first": {"num_beams": 4, "early_stopping": True, "length_penalty": 0.6},
    "long": {"num_beams": 3, "early_stopping": False, "length_penalty": 2.0},
    "never": {"num_beams": 2, "early_stopping": "never", "length_penalty": 1.3},
}


@torch.no_grad()
@pytest.mark.parametrize("max_len", [4, 13])
@pytest.mark.parametrize("search", SEARCHES)
def test_captions_are_those_of_generate(pair, search, max_len):
    model, captioner = pair
    tokenizer, options = captioner.tokenizer, SEARCHES[search]
    pixels = pixels_for(captioner, 7)
    found = captioner.generate(captioner.encode(pixels), max_len=max_len, **options)
    rules = {"early_stopping": False} | options if options["num_beams"] > 1 else options
    banned = sorted(tokenizer.control_ids - {tokenizer.eos_id})
    written = model.generate(
        pixel_values=pixels,
        max_new_tokens=max_len,
        do_sample=False,
        suppress_tokens=banned or None,
        **rules,
    )
    for (best,), row in zip(found, written.tolist()):
        text = row[1:]
        if tokenizer.eos_id in text:
            text = text[: text.index(tokenizer.eos_id)]
        assert best.tokens == text
    lengths = {len(best.tokens) for (best,) in found}
    assert max_len < 13 or len(lengths) > 1 or lengths == {13}
