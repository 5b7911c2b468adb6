"""Text to tokens and back, over the `tokenizers` library, and the words that tokens belong to."""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tokenizers
from tokenizers import (
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from vlattn.files import write_aside

PAD, BOS, EOS, UNK = CONTROLS = ("<pad>", "<bos>", "<eos>", "<unk>")

# A word of a script that writes spaces: letters and digits, each with its combining marks (and
# joiners, U+200C and U+200D), with single apostrophes and hyphens inside.
_LETTER = (
    r"[\p{L}\p{N}&&[^\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}ー]]"
    r"[\p{M}\u200c\u200d]*"
)
# Any other word is one grapheme cluster (\X). Each word takes the white space before it.
_WORDS = pre_tokenizers.Split(Regex(rf"\s*(?:{_LETTER}(?:['’‐-]?{_LETTER})*|\X)"), "isolated")

# The character that stands for each byte in a vocabulary: itself if it can be seen, else one of the
# characters from U+0100 on, in order (as in GPT-2).
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_VISIBLE = [char for char in _ALPHABET if ord(char) < 256]
_BYTES = dict(zip(_VISIBLE, map(ord, _VISIBLE))) | dict(
    zip(_ALPHABET[len(_VISIBLE) :], sorted(set(range(256)) - set(map(ord, _VISIBLE))))
)


class WordSpan(NamedTuple):
    """A word of a decoded text, with the white space before it.

    Attributes:
        text: the characters `start` to `end` of the decoded text.
        start: first character.
        end: one past the last character.
        first: index of its first token.
        last: one past the index of its last token.
    """

    text: str
    start: int
    end: int
    first: int
    last: int


class Tokenizer:
    """Captions to token ids and back; made by `Tokenizer.train` or `Tokenizer.load`.

    Text is put in Unicode form NFC, in lower case unless told otherwise, with one space for a run
    of white space and none at the ends. `decode(encode(text))` is that text, whatever it holds; a
    tokenizer of kind "word" alone leaves out the words that it does not know, whose id is `unk_id`.

    A word is the white space before it and
    - a run of letters and digits with their marks, single apostrophes and hyphens inside ("don't",
      "black-and-white"), in a script that writes spaces between words,
    - one character with its marks, in one that does not (Chinese, Japanese kana, Thai, Lao, Khmer,
      Burmese),
    - else one sign: a punctuation mark, a symbol, a whole emoji sequence or flag.

    Captions are cut into words before tokens, so no token of a caption spans two. The control
    tokens <pad>, <bos>, <eos> and <unk> are no such words: a text that spells "<eos>" is "<",
    "eos", ">". Decoded text never shows them.

    `Tokenizer.adopt` takes the tokenizer of another software, with its own control tokens and its
    own rules for text; byte-level ones and WordPiece can be decoded here.
    """

    def __init__(self, library: tokenizers.Tokenizer):
        # The library looks for its "added tokens" inside text, so there must be none: the control
        # tokens are plain entries of the vocabulary, and no piece of text comes out as one of them.
        self._spec = json.loads(library.to_str()) | {"added_tokens": [], "truncation": None}
        bare = self._spec | {"padding": None}
        self._library = tokenizers.Tokenizer.from_str(json.dumps(bare))
        ids = self._library.get_vocab()
        pad, bos, eos, controls = _controls(self._spec)
        self._is_wordpiece = self._spec["model"]["type"] == "WordPiece"
        foreign = [
            piece
            for piece in ids
            if not (self._is_wordpiece or piece in controls or _BYTES.keys() >= set(piece))
        ]
        if foreign or not ids.keys() >= {pad, bos, eos}:
            raise ValueError(
                f"the vocabulary must be byte-level or WordPiece, with {pad}, {bos} and {eos}, "
                f"got one of {len(ids)} entries such as {sorted(foreign or ids)[:5]}"
            )
        self.vocab_size: int = len(ids)
        self.pad_id, self.bos_id, self.eos_id = ids[pad], ids[bos], ids[eos]
        # None: nothing is unknown to bytes
        self.unk_id: int | None = ids.get(self._spec["model"].get("unk_token"))
        self.control_ids = frozenset(ids[piece] for piece in controls if piece in ids)

    @classmethod
    def train(
        cls,
        captions: Iterable[str],
        *,
        kind: Literal["bpe", "unigram", "word"] = "bpe",
        vocab_size: int = 8000,
        min_frequency: int = 2,
        lowercase: bool = True,
    ) -> "Tokenizer":
        """Builds a vocabulary from captions.

        Args:
            captions: the text to learn from.
            kind: "bpe", byte-pair encoding (Sennrich et al., ACL 2016), or "unigram", the unigram
                language model (Kudo, ACL 2018), both over bytes; or "word", whole words.
            vocab_size: the most entries to have, control tokens and 256 single bytes included
                ("word" has no bytes).
            min_frequency: how often "bpe" must see a pair to merge it, and "word" a word to keep
                it; "unigram" has no such limit.
            lowercase: whether to put text in lower case.

        Raises:
            TypeError: `captions` is one string, or holds something else than strings.
            ValueError: unknown `kind`, or `vocab_size` too small to learn anything.
        """
        if isinstance(captions, str):
            raise TypeError("captions must be several strings, got one string")
        if kind not in ("bpe", "unigram", "word"):
            raise ValueError(f"kind must be 'bpe', 'unigram' or 'word', got {kind!r}")
        controls = list(CONTROLS if kind == "word" else CONTROLS[:3])
        least = len(controls) + (0 if kind == "word" else len(_ALPHABET))
        if vocab_size <= least:
            raise ValueError(f"vocab_size must be over {least} for {kind!r}, got {vocab_size}")

        options = {"vocab_size": vocab_size, "special_tokens": controls, "show_progress": False}
        if kind == "word":
            model = models.WordLevel(unk_token=UNK)
            trainer = trainers.WordLevelTrainer(min_frequency=min_frequency, **options)
        elif kind == "unigram":
            model = models.Unigram()
            trainer = trainers.UnigramTrainer(initial_alphabet=_ALPHABET, **options)
        else:
            model = models.BPE()
            trainer = trainers.BpeTrainer(
                min_frequency=min_frequency, initial_alphabet=_ALPHABET, **options
            )
        library = tokenizers.Tokenizer(model)
        steps = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        steps.append(normalizers.Prepend(" "))  # the first word gets the tokens of a later one
        library.normalizer = normalizers.Sequence([normalizers.Lowercase()] * lowercase + steps)
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = pre_tokenizers.Sequence([_WORDS, to_bytes])
        library.decoder = decoders.ByteLevel()
        library.train_from_iterator(map(_plain, captions), trainer)
        return cls(_reproducible(library) if kind == "unigram" else library)

    @classmethod
    def adopt(
        cls, spec: dict[str, Any], *, vocab_size: int, pad_id: int, bos_id: int, eos_id: int
    ) -> "Tokenizer":
        """The tokenizer of another software's captioner.

        Args:
            spec: JSON of the `tokenizers` library, as in a checkpoint's `tokenizer.json`.
            vocab_size: rows of the captioner's embeddings; ids without a piece are control tokens.
            pad_id, bos_id, eos_id: which pad, begin and end a text there; may be one and the same.

        Raises:
            ValueError: the captioner has fewer embeddings, or the vocabulary is of another kind.
        """
        added = {token["content"]: token for token in spec["added_tokens"]}
        vocab = spec["model"]["vocab"] | {piece: token["id"] for piece, token in added.items()}
        if isinstance(vocab, list) or max(vocab.values()) >= vocab_size:
            raise ValueError(
                f"tokenizer of {len(vocab)} entries does not belong to {vocab_size} embeddings"
            )
        controls = {piece for piece, token in added.items() if token["special"]}
        pieces = {i: piece for piece, i in vocab.items()}
        for i in range(vocab_size):
            if i not in pieces:
                pieces[i] = f"<no piece {i}>"
                controls.add(pieces[i])
        controls |= {pieces[i] for i in (pad_id, bos_id, eos_id)}
        vocab = {pieces[i]: i for i in range(vocab_size)}
        spec = spec | {"model": spec["model"] | {"vocab": vocab}}
        spec |= {"added_tokens": [], "post_processor": None}
        library = tokenizers.Tokenizer.from_str(json.dumps(spec))
        library.enable_padding(pad_id=pad_id, pad_token=pieces[pad_id])
        library.post_processor = processors.TemplateProcessing(
            single=[pieces[bos_id], "$A", pieces[eos_id]],
            special_tokens=[(piece, vocab[piece]) for piece in sorted(controls)],
        )
        return cls(library)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Reads what `save` wrote.

        Raises:
            ValueError: the file is not a tokenizer of this package.
        """
        content = Path(path).read_bytes()
        try:
            return cls(tokenizers.Tokenizer.from_buffer(content))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer file of vlattn: {error}") from error

    def save(self, path: str | os.PathLike) -> None:
        """Writes one JSON file of the `tokenizers` library."""
        with write_aside(path) as aside:
            content = json.dumps(self._spec, ensure_ascii=False, indent=2)
            aside.write_text(content, encoding="utf-8")

    @property
    def digest(self) -> str:
        """Tells vocabularies apart that differ in a piece or in an id."""
        pieces = sorted((i, piece) for piece, i in self._library.get_vocab().items())
        return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without begin and end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of each text, as `encode` gives them; fast, on all processor cores."""
        plain = list(map(_plain, texts))
        encodings = self._library.encode_batch_fast(plain, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def offsets(self, texts: Iterable[str]) -> list[list[tuple[int, int]]]:
        """Which characters of each text its tokens are of, unknown words included."""
        encodings = self._library.encode_batch(list(map(_plain, texts)))
        return [encoding.offsets for encoding in encodings]

    def unknown_rate(self, captions: Iterable[str]) -> float:
        """The share of the captions' tokens that are unknown; always 0 but for kind "word"."""
        if self.unk_id is None:
            return 0.0
        ids = list(chain.from_iterable(self.encode_batch(captions)))
        return ids.count(self.unk_id) / max(1, len(ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids, without control tokens and without white space at the ends.

        Bytes that are no character, as only a model can put them together, are left out.
        """
        return b"".join(self._pieces(ids)).decode("utf-8", "ignore").strip()

    def words(self, ids: Iterable[int]) -> list[WordSpan]:
        """The words of `decode(ids)`, in order; see the class for what a word is.

        Words that share a token are one. The texts join to exactly `decode(ids)`, and each id but
        those of control tokens belongs to exactly one word. Where the text is empty though there
        are such ids, they make one empty word.
        """
        pieces = self._pieces(ids)
        chars = b"".join(pieces).decode("utf-8", "surrogateescape")  # a stray byte: a surrogate
        kept = "".join(char for char in chars if not _is_surrogate(char))
        text = kept.strip()
        starts = [start for _, (start, _) in _WORDS.pre_tokenize_str(text)] or [0]
        ends = [*starts[1:], len(text)]

        word_of_byte = []
        position = -kept.index(text)  # in text; what is stripped or stray goes to the nearest word
        for char in chars:
            stray = _is_surrogate(char)
            word = max(0, bisect_right(starts, position) - 1)
            word_of_byte += [word] * (1 if stray else len(char.encode()))
            position += not stray

        words: list[WordSpan] = []
        offset, reached = 0, -1  # the bytes and the words that have their tokens
        for i, piece in enumerate(pieces):
            if not piece:
                continue
            low, high = word_of_byte[offset], word_of_byte[offset + len(piece) - 1]
            start, first = starts[low], i
            if low == reached:  # goes on with the word of the token before
                _, start, _, first, _ = words.pop()
            words.append(WordSpan(text[start : ends[high]], start, ends[high], first, i + 1))
            offset, reached = offset + len(piece), high
        return words

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Each token for people to read: a space as "_", a control token by its name.

        A token that ends within a character is its bytes in hexadecimal, as in "e4b8".
        """
        ids = list(ids)
        controls = {self.pad_id: PAD, self.bos_id: BOS, self.eos_id: EOS, self.unk_id: UNK}
        texts = []
        for i, piece in zip(ids, self._pieces(ids)):
            try:
                texts.append(controls.get(i) or piece.decode().replace(" ", "_"))
            except UnicodeDecodeError:
                texts.append(piece.hex())
        return texts

    def _pieces(self, ids: Iterable[int]) -> list[bytes]:
        """The bytes of each id; none for a control token."""
        pieces = []
        for i in map(int, ids):
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"ids must be 0 to {self.vocab_size - 1}, got {i}")
            pieces.append("" if i in self.control_ids else self._library.id_to_token(i))
        if self._is_wordpiece:
            return _spaced(pieces)
        return [bytes(map(_BYTES.__getitem__, piece)) for piece in pieces]


def _controls(spec: dict[str, Any]) -> tuple[str, str, str, set[str]]:
    """Pad, begin and end token, and all that are no text."""
    if spec["post_processor"] is None:  # our own
        return PAD, BOS, EOS, set(CONTROLS)
    template, special = (spec["post_processor"][key] for key in ("single", "special_tokens"))
    bos, eos = (template[place]["SpecialToken"]["id"] for place in (0, -1))
    return spec["padding"]["pad_token"], bos, eos, set(special)


def _spaced(pieces: list[str]) -> list[bytes]:
    """WordPiece: a space before each piece that begins a word or is a sign, as people write it."""
    spaced, before = [], ""
    for piece in pieces:
        if piece.startswith("##"):
            spaced.append(piece[2:].encode())
        else:
            joined = not piece or piece in ".,?!'" or before == "'"
            spaced.append(f"{'' if joined else ' '}{piece}".encode())
        before = piece or before
    return spaced


def _plain(text: str) -> str:
    """The text without lone surrogates: they are no characters, and the library refuses them."""
    if not isinstance(text, str):
        raise TypeError(f"captions must be strings, got {type(text).__name__}")
    return text.encode("utf-8", "ignore").decode()


def _is_surrogate(char: str) -> bool:
    return "\ud800" <= char <= "\udfff"


def _reproducible(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same unigram vocabulary in an order, and with scores, that do not change from run to run.

    The library gives the bytes that it saw too seldom to score scores in steps of 1e-4, in an order
    drawn anew each time, and its threads add up in any order. They all get one score here.
    """
    spec = json.loads(library.to_str())
    controls, scored = spec["model"]["vocab"][:3], spec["model"]["vocab"][3:]
    lowest = min(score for _, score in scored)
    rare = lowest + 1e-4 * len(_ALPHABET)
    scored = [
        (piece, round(lowest if len(piece) == 1 and score < rare else score, 9))
        for piece, score in scored
    ]
    spec["model"]["vocab"] = controls + sorted(scored, key=lambda entry: (-entry[1], entry[0]))
    return tokenizers.Tokenizer.from_str(json.dumps(spec))
