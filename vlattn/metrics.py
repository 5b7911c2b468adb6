"""BLEU, ROUGE-L and CIDEr of captions, as the COCO caption toolkit computes them, without Java.

Strings in, numbers out. The toolkit is that of Chen et al., "Microsoft COCO Captions: Data
Collection and Evaluation Server", 2015 (its Python port is pycocoevalcap).
"""

import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

MAX_N = 4  # BLEU and CIDEr look at n-grams of 1 to 4 words


@dataclass(frozen=True)
class Scores:
    """Fractions over all pictures; `str()` shows them times 100.

    Attributes:
        bleu: BLEU-1 to BLEU-4 of the corpus, with the reference length closest to each candidate's.
        rouge_l: ROUGE-L, the mean over pictures.
        cider: CIDEr-D, the mean over pictures. NaN where it is not defined: with one picture, or
            with the same references for all, no n-gram tells one picture from another.
        per_image: key -> `bleu_1` to `bleu_4`, `rouge_l` and `cider` of that picture.
    """

    bleu: tuple[float, float, float, float]
    rouge_l: float
    cider: float
    per_image: dict[Hashable, dict[str, float]]

    def __str__(self) -> str:
        shown = [f"BLEU-{n} {100 * value:.1f}" for n, value in enumerate(self.bleu, start=1)]
        shown.append(f"ROUGE-L {100 * self.rouge_l:.1f}")
        if not math.isnan(self.cider):
            shown.append(f"CIDEr {100 * self.cider:.1f}")
        elif len(self.per_image) == 1:
            shown.append("CIDEr not defined for one picture")
        else:
            shown.append("CIDEr not defined where all pictures have the same references")
        return "  ".join(shown)


def score(
    candidates: Mapping[Hashable, str], references: Mapping[Hashable, Sequence[str]]
) -> Scores:
    """Scores one caption per picture against that picture's references.

    A candidate without a word scores 0. CIDEr weighs n-grams by how few of the pictures given
    have them in their references.

    Args:
        candidates: key of the picture -> its caption.
        references: the same keys -> one or more captions each.

    Raises:
        TypeError: a caption is not a string, or the references of a picture are one string.
        ValueError: no picture, a key on one side only, or a picture without references.
    """
    _check(candidates, references)
    read = {
        key: (_Caption.read(text), [_Caption.read(reference) for reference in references[key]])
        for key, text in candidates.items()
    }
    bleu_counts = {key: _bleu_counts(*captions) for key, captions in read.items()}
    rouge_l = {key: _rouge_l(*captions) for key, captions in read.items()}
    cider = _cider(read)
    return Scores(
        bleu=_bleu([sum(column) for column in zip(*bleu_counts.values())]),
        rouge_l=sum(rouge_l.values()) / len(read),
        cider=sum(cider.values()) / len(read),
        per_image={
            key: {
                **{f"bleu_{n}": x for n, x in enumerate(_bleu(bleu_counts[key]), start=1)},
                "rouge_l": rouge_l[key],
                "cider": cider[key],
            }
            for key in read
        },
    )


def _check(
    candidates: Mapping[Hashable, str], references: Mapping[Hashable, Sequence[str]]
) -> None:
    if not candidates and not references:
        raise ValueError("candidates must hold at least one picture, got none")
    for name, missing in (
        ("candidates", [key for key in references if key not in candidates]),
        ("references", [key for key in candidates if key not in references]),
    ):
        if missing:
            some = ", ".join(map(repr, missing[:5])) + ", ..." * (len(missing) > 5)
            raise ValueError(
                "candidates and references must have the same keys, "
                f"got {name} without {len(missing)} of them: {some}"
            )
    for key, texts in references.items():
        if isinstance(texts, str):
            raise TypeError(f"references[{key!r}] must be a list of strings, got a string")
        if not texts:
            raise ValueError(f"references[{key!r}] must hold at least one caption, got none")
        for text in (candidates[key], *texts):
            if not isinstance(text, str):
                raise TypeError(f"captions of {key!r} must be strings, got {type(text).__name__}")


class _Caption(NamedTuple):
    words: list[str]
    ngrams: Counter[tuple[str, ...]]  # of 1 to 4 words

    @classmethod
    def read(cls, text: str) -> "_Caption":
        words = tokenize(text)
        return cls(words, _ngrams(words))


def _ngrams(words: Sequence[str]) -> Counter[tuple[str, ...]]:
    of_n = (zip(*(words[i:] for i in range(n))) for n in range(1, MAX_N + 1))
    return Counter(chain.from_iterable(of_n))


# ---- BLEU: Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation", 2002


def _bleu_counts(candidate: _Caption, references: list[_Caption]) -> list[int]:
    """What BLEU adds up over pictures: for n = 1 to 4 the n-grams that a reference matches, then
    all n-grams; then the length, and the closest length of a reference."""
    matched, total = [0] * MAX_N, [0] * MAX_N
    for ngram, count in candidate.ngrams.items():
        matched[len(ngram) - 1] += min(count, max(r.ngrams[ngram] for r in references))
        total[len(ngram) - 1] += count
    length = len(candidate.words)
    _, closest = min((abs(len(r.words) - length), len(r.words)) for r in references)
    return [*matched, *total, length, closest]


def _bleu(counts: list[int]) -> tuple[float, ...]:
    """BLEU-1 to BLEU-4; the toolkit adds the same small constants."""
    *ngrams, length, reference_length = counts
    ratio = (length + 1e-15) / (reference_length + 1e-9)
    brevity_penalty = math.exp(min(0.0, 1 - 1 / ratio))
    bleu, product = [], 1.0
    for n, (matched, total) in enumerate(zip(ngrams[:MAX_N], ngrams[MAX_N:]), start=1):
        product *= (matched + 1e-15) / (total + 1e-9)
        bleu.append(product ** (1 / n) * brevity_penalty)
    return tuple(bleu)


# ---- ROUGE-L: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004


def _rouge_l(candidate: _Caption, references: list[_Caption], beta: float = 1.2) -> float:
    """F-measure of the best precision and the best recall over the references."""
    common = [(_common_length(candidate.words, r.words), len(r.words)) for r in references]
    longest = max(length for length, _ in common)
    if longest == 0:
        return 0.0
    precision = longest / len(candidate.words)
    recall = max(length / total for length, total in common if total)
    return (1 + beta**2) * precision * recall / (recall + beta**2 * precision)


def _common_length(a: list[str], b: list[str]) -> int:
    """Length of the longest common subsequence, a row of the table at a time in one integer.

    Hyyrö, "Bit-parallel LCS-length computation revisited", 2004.
    """
    places = dict.fromkeys(a, 0)
    for i, word in enumerate(a):
        places[word] |= 1 << i
    every = (1 << len(a)) - 1
    free = every  # a 0 bit for each word of a where the subsequence of the words so far grows
    for word in b:
        hits = free & places.get(word, 0)
        free = ((free + hits) | (free - hits)) & every
    return len(a) - free.bit_count()


# ---- CIDEr-D: Vedantam et al., "CIDEr: Consensus-based Image Description Evaluation", 2015


class CiderD:
    """CIDEr-D of captions against fixed references, whose document frequencies are counted once.

    Args:
        references: key of the picture -> the words of each of its captions.
    """

    def __init__(self, references: Mapping[Hashable, Sequence[Sequence[str]]]):
        counted = {key: [_ngrams(words) for words in texts] for key, texts in references.items()}
        pictures_with = Counter(
            ngram for texts in counted.values() for ngram in set().union(*texts)
        )
        self._unseen = math.log(len(counted))
        self._rarity = {n: self._unseen - math.log(count) for n, count in pictures_with.items()}
        self._references = {key: [self._weigh(t) for t in texts] for key, texts in counted.items()}

    @property
    def is_defined(self) -> bool:
        """False where every n-gram of the references has weight 0: nothing tells pictures apart."""
        return any(self._rarity.values())

    def __call__(self, key: Hashable, words: Sequence[str]) -> float:
        """The score of a caption of one of the pictures."""
        total = 0.0
        weights, norms, length = self._weigh(_ngrams(words))
        for reference, reference_norms, reference_length in self._references[key]:
            delta = max(1, length) - max(1, reference_length)  # of 2-grams
            penalty = math.exp(-(delta**2) / (2 * 6.0**2))
            for a, a_norm, b, b_norm in zip(weights, norms, reference, reference_norms):
                clipped = sum(min(w, b[ngram]) * b[ngram] for ngram, w in a.items() if ngram in b)
                total += penalty * clipped / (a_norm * b_norm or 1.0)
        return 10 * total / MAX_N / len(self._references[key])

    def _weigh(self, ngrams: Counter[tuple[str, ...]]) -> tuple[list[dict], list[float], int]:
        """For n = 1 to 4, the TF-IDF weights of the n-grams and their norm; the number of words."""
        weights = [{} for _ in range(MAX_N)]
        for ngram, count in ngrams.items():
            weights[len(ngram) - 1][ngram] = count * self._rarity.get(ngram, self._unseen)
        norms = [math.sqrt(sum(w * w for w in of_n.values())) for of_n in weights]
        return weights, norms, sum(c for ngram, c in ngrams.items() if len(ngram) == 1)


def _cider(read: dict[Hashable, tuple[_Caption, list[_Caption]]]) -> dict[Hashable, float]:
    """CIDEr-D of each picture; NaN where it is not defined."""
    cider = CiderD({key: [r.words for r in references] for key, (_, references) in read.items()})
    if not cider.is_defined:
        return dict.fromkeys(read, math.nan)
    return {key: cider(key, candidate.words) for key, (candidate, _) in read.items()}


# ---- Words, as the Penn Treebank tokeniser of the toolkit cuts them

_ABBREVIATIONS = (
    "adj adm adv al ala alex apr ariz assn assoc asst atty aug ave bhd bldg blvd brig bros calif "
    "capt cf cie cmdr co col colo conn corp cos cpl ct dak dec dept det dr drs elec ens esq est "
    "etc ext feb fla fri ft ga gen gov govs hon inc ind insp intl invt jan jos jr jul jun kan kans "
    "ky lieut lt ltd maj mar md messrs mfg mich minn mlle mme mo mon mont mr mrs ms msgr mt mtg "
    "natl neb nev nov oct okla penn pfc ph plc pres prof pte pty pvt rd rep reps rev rt sen sens "
    "sep sept seq sfc sgt spc sq sr st ste supt sys tel tenn thu tue tues univ va vs vt wed wis "
    "wisc wm wyo"
)
_W = r"[\w\u0300-\u036f\u0610-\u06ed\u0900-\u0dff\u0e31-\u0e4e]"  # \w lacks combining marks
_CLITIC = rf"'(?:s|m|d|re|ve|ll)(?!{_W})"
_TOKEN = re.compile(
    rf"""
    https?://\S*[\w/] | www\.\S*\w | \w[\w.+-]*@\w+(?:\.\w+)+      # addresses
    | </?[a-z]\w*/?> | [#@][a-z]\w*                                # tags
    | {_CLITIC} | n't(?!{_W}) | 't(?=(?:is|was)\b) | '(?:n'|em|til|cause|\d\ds)(?!{_W})
    | (?:[a-z]\.)+(?!{_W}) | (?:{_ABBREVIATIONS.replace(" ", "|")}|ph\.d)\.(?!{_W})
    | [^\W\d_]+(?:\.[^\W\d_]+)+ | (?-i:[A-Z]&[A-Z](?!{_W}) | AT&T\b)  # file.txt, R&B
    | [+-]?\d+(?:[.,:/-]\d+)+ | [+-]?\.?\d+(?![\w-])                # 10:30, 1,000, -5, .22
    | {_W}+?(?=n't(?!{_W}))
    | {_W}+(?:[-/‐‑]{_W}+|(?!{_CLITIC})'{_W}+)*                     # o'clock, mid-air, and/or
    | [!?]{{2,}} | \S
    """,
    re.VERBOSE | re.IGNORECASE,
)
_UNSEEN = re.compile("[\u200b-\u200f\ufe00-\ufe0f\u20e3\U00010000-\U0010ffff]")
_SPELLING = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "…": " ", "–": " ", "—": " ", "£": "#", "€": "$"}
)
_CONTRACTED = ("can not", "gon na", "wan na", "got ta", "gim me", "lem me")
_REWRITTEN = {
    **{mark: [] for mark in "'`\".?!,:-;"},
    **{mark: [f"-{name}-"] for mark, name in zip("()[]{}", "lrb rrb lsb rsb lcb rcb".split())},
    **{f"{a}{b}": [a, b] for a, b in map(str.split, _CONTRACTED)},
}


def tokenize(caption: str) -> list[str]:
    """The words that scores are counted on: lower case, without punctuation.

    Cuts as Stanford's PTBTokenizer with the toolkit's options does: "Don't" -> "do n't", "dog's" ->
    "dog 's", "cannot" -> "can not", "100%" -> "100 %"; "mid-air", "o'clock", "and/or", "mr." and
    "d.c." stay whole. The marks ' ` " . ? ! , : - ; and emoji are dropped; brackets become words
    ("-lrb-") as they do there, since the toolkit's list of marks to drop has them in capitals.
    Not followed: smileys, HTML entities, telephone numbers, one-sign fractions, "No. 5".
    """
    words = []
    for chunk in _UNSEEN.sub(" ", caption.translate(_SPELLING)).split():
        for token in [chunk] if chunk.isalpha() else _TOKEN.findall(chunk):
            words += _REWRITTEN.get(token.lower(), [token.lower()])
    return words
