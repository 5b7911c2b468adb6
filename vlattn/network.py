"""The network of a captioner: an image encoder and a text decoder joined by one cross-attention.

B pictures, C captions of each, R = B * C rows, T tokens, N patches, P tokens of the memory before
them, D width, V vocabulary, L layers, H heads.
"""

from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vlattn.config import CaptionerConfig
from vlattn.decoder import TextDecoder
from vlattn.encoder import PatchFeatures, PatchPositions, TimmEncoder, ViT
from vlattn.generation import Hypothesis, beam_search, sample
from vlattn.layers import Dropout, NormedProjection
from vlattn.tokenizer import Tokenizer


class CaptionerOutput(NamedTuple):
    """Logits (R, T, V), and cross-attention weights (R, L, H, T, N) where asked for.

    The weights of a token sum to 1, or to less where it attended to the class or register tokens
    of the encoder too. `Captioner.forward` gives the K real tokens alone: (K, V), (K, L, H, N).
    """

    logits: Tensor
    weights: Tensor | None


class ReadTexts(NamedTuple):
    """What a model finds in given texts of T tokens after the begin token.

    Args:
        logprobs: (R, T) log-probability of each token.
        weights: (R, L, H, T, N) cross-attention that wrote it.
        relevance: (R, L, H, T, N) how much looking there raises the text's probability: weights
            times the gradient of the sum of the tokens' log-probabilities, zero where that is
            negative. A row of the last layer tells of its token alone; one of a layer before it
            tells of those behind it too.
    """

    logprobs: Tensor
    weights: Tensor
    relevance: Tensor


class PackedTokens(NamedTuple):
    """The captions of each picture one after the other in one row, for training.

    Args:
        tokens: (B, T) inputs, each caption with its begin token.
        places: (B, T) place of each token in its caption.
        segments: (B, T) 1 for a row's first caption, 2 for its second, ...; 0 for padding.
    """

    tokens: Tensor
    places: Tensor
    segments: Tensor


class CaptioningNetwork(nn.Module):
    """Encoder, memory and decoder: pixels and tokens in, logits, texts and weights out.

    Args:
        config: sizes and kinds.
        tokenizer: its vocabulary is that of the decoder.
        pretrained: load timm's weights of the encoder from the hub.
    """

    def __init__(self, config: CaptionerConfig, tokenizer: Tokenizer, *, pretrained: bool = False):
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.encoder = _make_encoder(config, pretrained)
        self.memory_proj = _make_projection(config.memory, self.encoder.dim, config.dim)
        self.memory_positions = None
        if config.memory == "normed":
            self.memory_positions = PatchPositions(self.encoder.grid_size, config.dim)
        self.memory_dropout = Dropout(config.dropout)
        self.decoder = TextDecoder(
            tokenizer.vocab_size,
            dim=config.dim,
            memory_dim=self.encoder.dim if config.memory == "plain" else config.dim,
            depth=config.depth,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            attention=config.attention,
            mlp_ratio=config.mlp_ratio,
            activation=config.activation,
            norm=config.norm,
            norm_eps=config.norm_eps,
            norm_first=config.norm_first,
            positions=config.positions,
            max_len=config.max_len,
            embed_norm=config.embed_norm,
            tie_embeddings=config.tie_embeddings,
            head_layer=config.head_layer,
            head_bias=config.head_bias,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
        )

    @property
    def device(self) -> torch.device:
        return self.decoder.embed.weight.device

    def encode(self, pixels: Tensor) -> PatchFeatures:
        """Pixels (B, 3, S_h, S_w), as `preprocess` makes them, to patch features."""
        return self.encoder(pixels)

    def features(self, images: Tensor) -> PatchFeatures:
        """Pixels (B, 3, S_h, S_w) are encoded; features (B, P + N, D) that were kept are these."""
        if images.dim() == 4:
            return self.encode(images)
        return PatchFeatures(images.to(self.decoder.embed.weight.dtype), self.encoder.grid_size)

    def memory(self, features: PatchFeatures) -> Tensor:
        """What the decoder attends to, (B, P + N, D); `CaptionerConfig.memory` says how."""
        tokens = self.memory_proj(features.tokens)
        if self.memory_positions is not None:
            tokens = self.memory_positions(PatchFeatures(tokens, features.grid_size))
        return self.memory_dropout(tokens)

    def decode(
        self,
        tokens: Tensor,
        features: PatchFeatures,
        need_weights: bool | Sequence[int] = False,
    ) -> CaptionerOutput:
        """Teacher forcing: the logits of the token that follows each of the given ones.

        Args:
            tokens: (R, T) captions from the begin token on, right-padded; R is a multiple of the
                pictures in `features`, and the captions of a picture stand together.
            need_weights: also return the weights of cross-attention, of all layers or of those
                whose numbers are given.
        """
        cache = self.decoder.start(self.memory(features))
        hidden, weights = self.decoder(tokens, cache, need_weights=need_weights)
        if weights is not None:
            weights = weights[..., features.num_prefix :]
        return CaptionerOutput(self.decoder.logits(hidden), weights)

    def forward(
        self,
        images: Tensor,
        packed: PackedTokens,
        need_weights: bool | Sequence[int] = False,
    ) -> CaptionerOutput:
        """The training pass: the K real tokens, row by row, without padding.

        Args:
            images: pixels, or kept features; see `features`.
            packed: the captions of each picture in one row.
            need_weights: see `decode`.
        """
        features = self.features(images)
        cache = self.decoder.start(self.memory(features))
        segments = packed.segments
        same_caption = segments[:, :, None] == segments[:, None]  # (B, T, T)
        hidden, weights = self.decoder(
            packed.tokens,
            cache,
            places=packed.places,
            mask=same_caption.tril(),
            need_weights=need_weights,
        )
        real = segments > 0
        if weights is not None:
            weights = weights[..., features.num_prefix :]
            weights = weights.permute(0, 3, 1, 2, 4)[real]  # (K, L, H, N)
        return CaptionerOutput(self.decoder.logits(hidden[real]), weights)

    @torch.inference_mode()
    def generate(
        self,
        features: PatchFeatures,
        *,
        ensemble: Sequence["CaptioningNetwork"] = (),
        prompt: str = "",
        num_beams: int = 3,
        max_len: int = 30,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] | None = None,
        no_repeat_ngram: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        num_return: int = 1,
        num_samples: int = 1,
        generator: torch.Generator | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> list[list[Hypothesis]]:
        """Write texts about encoded pictures: beam search, or sampling where `temperature` is set.

        Args:
            ensemble: captioners with the same encoder and vocabulary that write with this one: each
                word by the mean of their log-probabilities and its own.
            prompt: what every text begins with; the scores are of what is written after it.
            max_len: most tokens that are written; at most what the decoder's positions allow.
            num_return: texts per picture of beam search, at most `num_beams`.
            num_samples: texts drawn per picture.
            cache_dtype: what keys and values are kept in; see `KVCache`.

        Other arguments are those of `beam_search` and `sample`.

        Returns:
            per picture the texts found, best first, or the texts drawn.
        """
        if temperature is None and (top_k is not None or top_p is not None):
            raise ValueError("top_k and top_p are for sampling: set temperature too")
        tokenizer = self.tokenizer
        for other in ensemble:
            self._check_reads_the_same(other)
        writers = [self, *ensemble]
        begin = tokenizer.encode(prompt)
        longest = min(writer.config.max_len for writer in writers)
        room = longest - len(begin)
        if room < 1:
            raise ValueError(
                f"prompt must have fewer than max_len={longest} tokens, got {len(begin)}"
            )

        def step(tokens: Tensor, rows: Tensor) -> Tensor:
            tokens = tokens[:, None]
            if len(caches[0]) == 0:
                tokens = torch.cat([tokens, torch.tensor(begin).long().expand(len(rows), -1)], 1)
            tokens = tokens.to(self.device)
            logits = []
            for writer, cache in zip(writers, caches):
                cache.reorder(rows)
                hidden, _ = writer.decoder(tokens, cache)
                logits.append(writer.decoder.logits(hidden[:, -1]))
            if len(logits) == 1:
                return logits[0]
            return torch.stack(logits).float().log_softmax(-1).mean(0)

        common = {
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "banned": sorted(tokenizer.control_ids - {tokenizer.eos_id}),
            "max_len": min(max_len, room),
            "no_repeat_ngram": no_repeat_ngram,
        }
        with ExitStack() as stack:
            for writer in writers:
                stack.enter_context(writer._evaluating())
            caches = [
                writer.decoder.start(writer.memory(features), cache_dtype=cache_dtype)
                for writer in writers
            ]
            if temperature is None:
                found = beam_search(
                    step,
                    len(features.tokens),
                    num_beams=num_beams,
                    length_penalty=length_penalty,
                    early_stopping=early_stopping,
                    num_return=num_return,
                    **common,
                )
            else:
                drawn = sample(
                    step,
                    len(features.tokens),
                    num_samples=num_samples,
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    generator=generator,
                    **common,
                )
                found = [drawn[i : i + num_samples] for i in range(0, len(drawn), num_samples)]
        return [[t._replace(tokens=begin + t.tokens) for t in texts] for texts in found]

    def _check_reads_the_same(self, other: "CaptioningNetwork") -> None:
        """Captioners that write together read the same features, and mean the same by a token."""
        if other.tokenizer.digest != self.tokenizer.digest:
            raise ValueError("captioners that write together must have the same vocabulary")
        ours, theirs = self.encoder.state_dict(), other.encoder.state_dict()
        if (
            other.config.resize != self.config.resize
            or other.encoder.image_size != self.encoder.image_size
            or ours.keys() != theirs.keys()
            or not all(torch.equal(ours[name], theirs[name]) for name in ours)
        ):
            raise ValueError("captioners that write together must have the same encoder")

    def pad_texts(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """(R, T + 1) tokens, as `read_texts` takes them, of texts without their begin token."""
        rows = [torch.tensor([self.tokenizer.bos_id, *text]) for text in texts]
        return pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_id)

    def read_texts(self, tokens: Tensor, features: PatchFeatures) -> ReadTexts:
        """The probability of given texts, where the model looked, and how much that helped.

        After Chefer et al., "Generic Attention-model Explainability for Interpreting Bi-Modal and
        Encoder-Decoder Transformers", ICCV 2021.

        Args:
            tokens: (R, T + 1) texts from begin token on, right-padded; see `decode`.
        """
        decoder = self.decoder
        with self._evaluating(), torch.inference_mode(False), torch.enable_grad():
            # no inference tensors
            tokens, patches = tokens.to(self.device, copy=True), features.tokens.clone()
            memory = self.memory(features._replace(tokens=patches)).detach().requires_grad_()
            cache = decoder.start(memory)
            layers = range(len(decoder.blocks))
            (hidden, weights), seen = decoder.trace(tokens[:, :-1], cache, wanted=layers)
            targets = tokens[:, 1:]
            logprobs = token_logprobs(decoder.logits(hidden), targets)
            total = logprobs[targets != self.tokenizer.pad_id].sum()
            gradients = torch.autograd.grad(total, seen)  # each (R, T, D)
        raised = [
            block.cross_attn.weight_gradient(gradient, cache.memory(layer))
            for layer, (block, gradient) in enumerate(zip(decoder.blocks, gradients))
        ]
        helped = (weights * torch.stack(raised, dim=1)).clamp(min=0)
        weights, helped = (x.detach()[..., features.num_prefix :] for x in (weights, helped))
        return ReadTexts(logprobs.detach(), weights, helped)

    @contextmanager
    def _evaluating(self):
        training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(training)


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """(R, T) log-probability of each target: logits (R, T, V), targets (R, T)."""
    return logits.float().log_softmax(-1).gather(2, targets[:, :, None]).squeeze(2)


def _make_projection(memory: str, encoder_dim: int, dim: int) -> nn.Module:
    if memory == "plain":
        return nn.Identity()
    if memory == "linear":
        return nn.Linear(encoder_dim, dim)
    if memory == "normed":
        return NormedProjection(encoder_dim, dim)
    raise ValueError(f"memory must be 'normed', 'linear' or 'plain', got {memory!r}")


def _make_encoder(config: CaptionerConfig, pretrained: bool) -> ViT | TimmEncoder:
    kind, _, name = config.encoder.partition(":")
    if kind == "timm" and name:
        return TimmEncoder(
            name,
            pretrained=pretrained,
            image_size=config.image_size,
            classes=config.encoder_classes,
        )
    if config.encoder != "vit":
        raise ValueError(f"encoder must be 'vit' or 'timm:<name>', got {config.encoder!r}")
    return ViT(
        config.image_size or (96, 96),
        config.patch_size,
        dim=config.encoder_dim,
        depth=config.encoder_depth,
        num_heads=config.encoder_heads,
        mlp_ratio=config.encoder_mlp_ratio,
        activation=config.encoder_activation,
        norm_eps=config.encoder_norm_eps,
        positions=config.encoder_positions,
        num_registers=config.num_registers,
        keep_registers=config.keep_registers,
        stem=config.stem,
        dropout=config.dropout,
    )
