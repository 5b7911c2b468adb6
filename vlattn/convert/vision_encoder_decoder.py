"""transformers' VisionEncoderDecoderModel: a ViT or DeiT with GPT-2, BERT or RoBERTa."""

from torch import Tensor

from vlattn.config import CaptionerConfig
from vlattn.convert import bert, gpt2, vit
from vlattn.convert.checkpoint import Checkpoint
from vlattn.tokenizer import Tokenizer

ENCODERS = {"vit": vit.read, "deit": vit.read}
DECODERS = {"gpt2": gpt2.read, "bert": bert.read, "roberta": bert.read}


def read(checkpoint: Checkpoint) -> tuple[CaptionerConfig, dict[str, Tensor], Tokenizer]:
    """Config, weights and tokenizer of our captioner."""
    weights, state, settings = checkpoint.weights, {}, {"memory": "plain"}
    for part, known in (("encoder", ENCODERS), ("decoder", DECODERS)):
        kind = checkpoint.config[part]["model_type"]
        if kind not in known:
            raise ValueError(f"its {part} is {kind!r}, not one of {', '.join(known)}")
        new_settings, new_state = known[kind](checkpoint.config[part], weights)
        settings, state = settings | new_settings, state | new_state
    if "enc_to_dec_proj.weight" in weights:
        settings["memory"] = "linear"
        state |= weights.layer("enc_to_dec_proj", "memory_proj")
    bos = checkpoint.token_id("decoder_start_token_id", "bos_token_id")
    eos = checkpoint.token_id("eos_token_id", "sep_token_id")
    if bos is None or eos is None:
        raise ValueError("no config says which tokens begin and end a text")
    pad = checkpoint.token_id("pad_token_id")
    tokenizer = checkpoint.tokenizer(
        vocab_size=len(state["decoder.embed.weight"]),
        pad_id=eos if pad is None else pad,
        bos_id=bos,
        eos_id=eos,
    )
    return CaptionerConfig(**settings), state, tokenizer
