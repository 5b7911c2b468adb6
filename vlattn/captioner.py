"""The captioner: pictures in, captions and their maps out; model folders and the hub.

R texts, T tokens, L layers, H heads, gh, gw grid of patches.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor

from vlattn.caption import Caption, Word, maps_to_show
from vlattn.config import CaptionerConfig
from vlattn.encoder import PatchFeatures
from vlattn.files import write_aside, write_json
from vlattn.generation import Hypothesis
from vlattn.images import Geometry, Preprocess, open_image
from vlattn.layers import lay_out_to_write
from vlattn.model_folder import find_model, model_card, read_json, read_weights, write_weights
from vlattn.network import CaptioningNetwork
from vlattn.tokenizer import Tokenizer


class Captioner(CaptioningNetwork):
    """Writes captions about pictures, and says where it looked for each word.

    Args:
        config: sizes and kinds.
        tokenizer: its vocabulary is that of the decoder.
        pretrained: load timm's weights of the encoder from the hub.
    """

    def __init__(self, config: CaptionerConfig, tokenizer: Tokenizer, *, pretrained: bool = False):
        super().__init__(config, tokenizer, pretrained=pretrained)
        self.preprocess = Preprocess(
            size=self.encoder.image_size,
            mode=config.resize,
            mean=self.encoder.mean,
            std=self.encoder.std,
        )

    def caption(
        self,
        images: Sequence[Any],
        *,
        ensemble: Sequence["Captioner"] = (),
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
            ensemble: captioners that write with this one, whose own the maps and the words'
                probabilities are; see `generate`.
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
                ensemble=ensemble,
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
        tokens = self.pad_texts([t.tokens + [self.tokenizer.eos_id] * t.finished for t in texts])
        # Row t of what is read wrote token t + 1.
        logprobs, *read = (x.float().cpu() for x in self.read_texts(tokens, features))
        maps, raised = (
            x.permute(0, 3, 1, 2, 4).unflatten(-1, features.grid_size) for x in read
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
            lay_out_to_write(captioner.decoder)
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
