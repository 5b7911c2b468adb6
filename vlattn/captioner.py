"""The captioner: an image encoder and a text decoder joined by one cross-attention.

B pictures, C captions of each, R = B * C rows, T tokens, N patches, P tokens of the memory before
them, D width, V vocabulary, L layers, H heads.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn

from vlattn.config import CaptionerConfig
from vlattn.decoder import TextDecoder
from vlattn.encoder import PatchFeatures, PatchPositions, TimmEncoder, ViT
from vlattn.files import write_aside, write_json
from vlattn.generation import Caption, Hypothesis, Word, beam_search, maps_to_show, sample
from vlattn.images import Geometry, Preprocess, open_image
from vlattn.model_folder import find_model, model_card, read_json, read_weights, write_weights
from vlattn.tokenizer import Tokenizer


class CaptionerOutput(NamedTuple):
    """Logits (R, T, V), and cross-attention weights (R, L, H, T, N) where asked for.

    The weights of a token sum to 1, or to less where it attended to the class or register tokens
    of the encoder too. `Captioner.forward` gives the K real tokens alone: (K, V), (K, L, H, N).
    """

    logits: Tensor
    weights: Tensor | None


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


class Captioner(nn.Module):
    """Writes captions about pictures, and says where it looked for each word.

    Args:
        config: sizes and kinds.
        tokenizer: its vocabulary is that of the decoder.
        pretrained: load timm's weights of the encoder from the hub.
    """

    def __init__(self, config: CaptionerConfig, tokenizer: Tokenizer, *, pretrained: bool = False):
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.encoder = _make_encoder(config, pretrained)
        self.preprocess = Preprocess(
            size=self.encoder.image_size,
            mode=config.resize,
            mean=self.encoder.mean,
            std=self.encoder.std,
        )
        self.memory_proj = _make_projection(config.memory, self.encoder.dim, config.dim)
        self.memory_positions = None
        if config.memory == "normed":
            self.memory_positions = PatchPositions(self.encoder.grid_size, config.dim)
        self.memory_dropout = nn.Dropout(config.dropout)
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
        begin = tokenizer.encode(prompt)
        room = self.config.max_len - len(begin)
        if room < 1:
            raise ValueError(
                f"prompt must have fewer than max_len={self.config.max_len} tokens, "
                f"got {len(begin)}"
            )

        def step(tokens: Tensor, rows: Tensor) -> Tensor:
            cache.reorder(rows)
            tokens = tokens[:, None]
            if len(cache) == 0:
                tokens = torch.cat([tokens, torch.tensor(begin).long().expand(len(rows), -1)], 1)
            hidden, _ = self.decoder(tokens.to(self.device), cache)
            return self.decoder.logits(hidden[:, -1])

        common = {
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "banned": sorted(tokenizer.control_ids - {tokenizer.eos_id}),
            "max_len": min(max_len, room),
            "no_repeat_ngram": no_repeat_ngram,
        }
        with self._evaluating():
            cache = self.decoder.start(self.memory(features), cache_dtype=cache_dtype)
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
                    len(features.tokens) * num_samples,
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    generator=generator,
                    **common,
                )
                found = [drawn[i : i + num_samples] for i in range(0, len(drawn), num_samples)]
        return [[t._replace(tokens=begin + t.tokens) for t in texts] for texts in found]

    def caption(
        self,
        images: Sequence[Any],
        *,
        prompt: str = "",
        num_beams: int = 3,
        max_len: int = 30,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] | None = None,
        no_repeat_ngram: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        batch_size: int = 32,
    ) -> list[Caption]:
        """Caption pictures.

        Args:
            images: paths, bytes, PIL images, arrays or tensors; see `open_image`.
            seed: of the sampling; the global random numbers where omitted.
            batch_size: pictures at a time.

        Other arguments are those of `generate`.
        """
        if isinstance(images, str | bytes | Path) or not isinstance(images, Sequence | Tensor):
            raise TypeError(f"images must be a list of pictures, got {type(images).__name__}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        captions = []
        for start in range(0, len(images), batch_size):
            pictures = [open_image(image) for image in images[start : start + batch_size]]
            features, geometries = self.read_pictures(pictures)
            found = self.generate(
                features,
                prompt=prompt,
                num_beams=num_beams,
                max_len=max_len,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                no_repeat_ngram=no_repeat_ngram,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                generator=generator,
            )
            texts = [best for best, *_ in found]
            captions += self.explain_texts(texts, features, pictures, geometries)
        return captions

    def alternatives(
        self,
        image: Any,
        count: int,
        *,
        temperature: float | None = None,
        seed: int | None = None,
        **generation: Any,
    ) -> list[Caption]:
        """Several captions of one picture, best first.

        Args:
            count: most captions; equal ones count once, so there may be fewer.
            temperature: draw them; where omitted, the best that a beam search of `count` beams
                finds.
            generation: as for `caption`.
        """
        picture = open_image(image)
        features, geometries = self.read_pictures([picture])
        (found,) = self.generate(
            features,
            num_beams=count,
            num_return=count,
            num_samples=count,
            temperature=temperature,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
            **generation,
        )
        texts = list({tuple(text.tokens): text for text in found}.values())
        texts.sort(key=lambda text: (text.finished, text.score), reverse=True)
        pictures, geometries = [picture] * len(texts), geometries * len(texts)
        return self.explain_texts(texts, features, pictures, geometries)

    def explain(self, image: Any, text: str) -> Caption:
        """Where the model looks for each word of a given text, and how likely it finds them.

        Raises:
            ValueError: the text has no word that the tokenizer knows, or more tokens than the
                decoder has places for.
        """
        tokens = self.tokenizer.encode(text)
        limit = self.config.max_len - 1
        if not self.tokenizer.words(tokens):
            raise ValueError(f"text must have a word of the vocabulary, got {text!r}")
        if len(tokens) > limit:
            raise ValueError(f"text must have at most {limit} tokens, got {len(tokens)}")
        picture = open_image(image)
        features, geometries = self.read_pictures([picture])
        given = Hypothesis(tokens, None, True)
        return self.explain_texts([given], features, [picture], geometries)[0]

    def relevance(self, tokens: Tensor, features: PatchFeatures) -> Tensor:
        """How much looking there raises the text's probability: attention times its gradient.

        After Chefer et al., "Generic Attention-model Explainability for Interpreting Bi-Modal and
        Encoder-Decoder Transformers", ICCV 2021.

        Args:
            tokens: (R, T + 1) texts from begin token on, right-padded; see `decode`.

        Returns:
            (R, L, H, T, N) weights times the gradient of the sum of the tokens' log-probabilities,
            zero where that is negative. A row of the last layer tells of the next token alone; one
            of a layer before it tells of those behind it too.
        """
        decoder = self.decoder
        with self._evaluating(), torch.inference_mode(False), torch.enable_grad():
            tokens, patches = tokens.clone(), features.tokens.clone()  # no inference tensors
            memory = self.memory(features._replace(tokens=patches)).detach().requires_grad_()
            cache = decoder.start(memory)
            layers = range(len(decoder.blocks))
            (hidden, weights), seen = decoder.trace(tokens[:, :-1], cache, wanted=layers)
            targets = tokens[:, 1:]
            logprobs = decoder.logits(hidden).float().log_softmax(-1)
            logprobs = logprobs.gather(2, targets[:, :, None]).squeeze(2)
            total = logprobs[targets != self.tokenizer.pad_id].sum()
            gradients = torch.autograd.grad(total, seen)  # each (R, T, D)
        raised = [
            block.cross_attn.weight_gradient(gradient, cache.memory(layer))
            for layer, (block, gradient) in enumerate(zip(decoder.blocks, gradients))
        ]
        helped = weights * torch.stack(raised, dim=1)
        return helped[..., features.num_prefix :].detach().clamp(min=0)

    def maps_to_show(self, layer_attention: Tensor, relevance: Tensor) -> Tensor:
        """The maps of a caption's words that overlays show by default; see `maps_to_show`."""
        config = self.config
        return maps_to_show(
            layer_attention,
            relevance,
            layer=config.overlay_layer,
            head=config.overlay_head,
            view=config.overlay_view,
        )

    @torch.inference_mode()
    def read_pictures(self, pictures: list[Image.Image]) -> tuple[PatchFeatures, list[Geometry]]:
        """Upright pictures, as `open_image` gives, to patch features and the way back."""
        pixels, geometries = zip(*map(self.preprocess, pictures))
        with self._evaluating():
            return self.encode(torch.stack(pixels).to(self.device)), list(geometries)

    @torch.inference_mode()
    def explain_texts(
        self,
        texts: list[Hypothesis],
        features: PatchFeatures,
        pictures: list[Image.Image],
        geometries: list[Geometry],
    ) -> list[Caption]:
        """One teacher-forced pass over the texts gives each word's log-probability and maps."""
        bos, eos, pad = self.tokenizer.bos_id, self.tokenizer.eos_id, self.tokenizer.pad_id
        rows = [[bos, *text.tokens] + [eos] * text.finished for text in texts]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])  # (R, T + 1)
        with self._evaluating():
            logits, weights = self.decode(tokens[:, :-1].to(self.device), features, True)
        # Row t of logits and weights wrote token t + 1.
        logprobs = logits.float().log_softmax(-1).cpu().gather(2, tokens[:, 1:, None]).squeeze(2)
        raised = self.relevance(tokens.to(self.device), features)
        maps, raised = (
            x.float().cpu().permute(0, 3, 1, 2, 4).unflatten(-1, features.grid_size)
            for x in (weights, raised)
        )  # (R, T, L, H, gh, gw)
        rows = zip(texts, logprobs, maps, raised, pictures, geometries)
        return [self._make_caption(*row) for row in rows]

    def _make_caption(
        self,
        text: Hypothesis,
        logprobs: Tensor,
        maps: Tensor,
        raised: Tensor,
        picture: Image.Image,
        geometry: Geometry,
    ) -> Caption:
        spans = self.tokenizer.words(text.tokens)
        words = tuple(
            Word(s.text, s.start, s.end, float(logprobs[s.first : s.last].sum())) for s in spans
        )
        layer_attention, relevance = (
            torch.stack([x[s.first : s.last].mean(0) for s in spans]) if spans else x[:0]
            for x in (maps, raised)
        )  # (words, L, H, gh, gw)
        score = float(logprobs[: len(text.tokens) + 1].mean()) if text.score is None else text.score
        return Caption(
            text=self.tokenizer.decode(text.tokens),
            words=words,
            layer_attention=layer_attention,
            layer_relevance=relevance,
            attention=self.maps_to_show(layer_attention, relevance),
            score=score,
            finished=text.finished,
            image=picture,
            geometry=geometry,
        )

    def save_pretrained(
        self, folder: str | Path, *, dtype: torch.dtype | None = None, scores: str = ""
    ) -> None:
        """Write a model folder; each file replaces the one before it in one step.

        Args:
            dtype: of the stored weights, as float16 for a folder of half the size; their own where
                omitted. A loaded captioner has float32 weights either way.
            scores: what the model card says of its quality.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", asdict(self.config))
        write_json(folder / "preprocessor_config.json", self.preprocess.to_dict())
        self.tokenizer.save(folder / "tokenizer.json")
        with write_aside(folder / "README.md") as path:
            card = model_card(self.config, self.tokenizer.vocab_size, scores)
            path.write_text(card, encoding="utf-8")
        write_weights(folder / "model.safetensors", self.state_dict(), self.tokenizer.digest, dtype)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> "Captioner":
        """Load a model folder, or by its name a model of the package or of the Hugging Face hub.

        Args:
            revision: branch, tag or commit of the model on the hub.
            cache_dir: where downloads are kept; the hub's own folder where omitted.
            token: of the hub; True for that of the login, which is the default.
            local_files_only: nothing is downloaded.

        Raises:
            ValueError: no such folder or model, or one with a missing or foreign file.
        """
        hub = {"revision": revision, "cache_dir": cache_dir, "token": token}
        folder = find_model(str(source), local_files_only=local_files_only, **hub)
        try:
            config = CaptionerConfig.from_dict(read_json(folder / "config.json"))
            preprocess = Preprocess.from_dict(read_json(folder / "preprocessor_config.json"))
            captioner = cls(config, Tokenizer.load(folder / "tokenizer.json"))
            captioner.preprocess = preprocess
            weights = read_weights(folder / "model.safetensors", captioner.tokenizer.digest)
            captioner.load_state_dict(weights)
        except (ValueError, TypeError, AttributeError, SafetensorError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"cannot load {source}: {reason[:300]}") from error
        return captioner.eval()

    def push_to_hub(
        self,
        repo_id: str,
        *,
        scores: str = "",
        private: bool | None = None,
        token: str | bool | None = None,
        **kwargs: Any,
    ) -> str:
        """Upload the model folder to the Hugging Face hub; needs a login there, or a token.

        Args:
            repo_id: name of the model, "user/name"; made where it does not exist.
            scores: see `save_pretrained`.
            private: whether a model that is made is seen by you alone; as your account has it if
                omitted.
            token: of the hub; that of the login where omitted.
            kwargs: `commit_message`, `revision`, `create_pr`, ...; see
                `huggingface_hub.HfApi.upload_folder`.

        Returns:
            the address of the commit.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, scores=scores)
            return api.upload_folder(repo_id=repo_id, folder_path=folder, **kwargs).commit_url

    @contextmanager
    def _evaluating(self):
        training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(training)


def _make_projection(memory: str, encoder_dim: int, dim: int) -> nn.Module:
    if memory == "plain":
        return nn.Identity()
    if memory == "linear":
        return nn.Linear(encoder_dim, dim)
    if memory == "normed":
        return nn.Sequential(
            nn.LayerNorm(encoder_dim), nn.Linear(encoder_dim, dim), nn.LayerNorm(dim)
        )
    raise ValueError(f"memory must be 'normed', 'linear' or 'plain', got {memory!r}")


def _make_encoder(config: CaptionerConfig, pretrained: bool) -> ViT | TimmEncoder:
    kind, _, name = config.encoder.partition(":")
    if kind == "timm" and name:
        return TimmEncoder(
            name,
            pretrained=pretrained,
            frozen=not config.finetune_encoder,
            image_size=config.image_size,
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
