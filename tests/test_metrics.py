import dataclasses
import math
import random
from pathlib import Path

import pytest

from vlattn import metrics
from vlattn.metrics import score, tokenize

FLICKR8K = Path(__file__).parents[1] / "../shared/data/flickr8k/Flickr8k_text"
CANDIDATES = {1: "a dog runs on the grass .", 2: "a man in a red shirt", 3: "two cats"}
REFERENCES = {
    1: ["A dog runs on green grass.", "The dog is running on the grass , fast ."],
    2: ["A man wears a red shirt", "a man is in a red shirt with a hat", "A man."],
    3: ["Two cats sleep on a bed ."],
}

# caption -> the words that the toolkit's Java tokeniser gives (pycocoevalcap 1.2)
TOKENIZED = {
    'A man , in an " orange hat " , is starring at something .': "a man in an orange hat is "
    "starring at something",
    "Don't WON'T can't isn't": "do n't wo n't ca n't is n't",
    "A man's T-shirt's sleeve, the dogs' ball": "a man 's t-shirt 's sleeve the dogs ball",
    "you're they'll I've he'd I'm": "you 're they 'll i 've he 'd i 'm",
    "we cannot. I'm gonna wanna gotta gimme lemme": "we can not i 'm gon na wan na got ta gim me "
    "lem me",
    "five o'clock, c'mon ma'am, rock 'n' roll 'til '90s 'em": "five o'clock c'mon ma'am rock 'n' "
    "roll 'til '90s 'em",
    "the dog’s ball “quoted” ‘single’ wait… then": "the dog 's ball quoted single wait then",
    "a dash — here – and there -- start–end ok - yes --- wow": "a dash here and there start end ok "
    "yes wow",
    "a 3-year-old's 6-foot-4 boy in a black-and-white co-worker's van": "a 3-year-old 's 6-foot-4 "
    "boy in a black-and-white co-worker 's van",
    "He's at 3:30 p.m. in the U.S. or Washington D.C.": "he 's at 3:30 p.m. in the u.s. or "
    "washington d.c.",
    "Mr. and Mrs. Smith vs. Jones Jr. on Main St. etc.": "mr. and mrs. smith vs. jones jr. on main "
    "st. etc.",
    "a dog on it. The cat. A bird": "a dog on it the cat a bird",
    "vitamin C. the letter P": "vitamin c. the letter p",
    "a (small) [dog] {cat}": "a -lrb- small -rrb- -lsb- dog -rsb- -lcb- cat -rcb-",
    "It costs $5 or £10 or $1,000.00, 100% wool": "it costs $ 5 or # 10 or $ 1,000.00 100 % wool",
    "1/2 and/or 24/7 10-20 +3 -5 .22 2nd 10x10 555-1234": "1/2 and/or 24/7 10-20 +3 -5 .22 2nd "
    "10x10 555-1234",
    "a man w/ a hat; black & white, R&B, r&b": "a man w / a hat black & white r&b r & b",
    "AT&T and at&t": "at&t and at & t",
    "#1 fan #hashtag @user a_b": "# 1 fan #hashtag @user a_b",
    "mail bob@example.com or see www.example.com or avrovulcan.com now": "mail bob@example.com or "
    "see www.example.com or avrovulcan.com now",
    "x != y <eos> </s> more than one!!! what?!": "x = y <eos> </s> more than one !!! what ?!",
    "love ❤️ a😀b 👨‍👩‍👧 🇫🇷": "love ❤ a b",
    "三只狗 cafe\u0301 كَتَبَ": "三只狗 cafe\u0301 كَتَبَ",
    "  -dog  half- hello,world foo;bar ": "dog half hello world foo bar",
}


@pytest.mark.parametrize("caption", TOKENIZED)
def test_tokenize_as_the_toolkit_does(caption):
    assert " ".join(tokenize(caption)) == TOKENIZED[caption]


def assert_equal_to_toolkit(candidates, references):
    pytest.importorskip("pycocoevalcap")
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    ours = score(candidates, references)
    read = {k: [" ".join(tokenize(text)) for text in v] for k, v in references.items()}
    predicted = {k: [" ".join(tokenize(candidates[k]))] for k in references}
    bleu, bleu_each = Bleu(4).compute_score(read, predicted, verbose=0)
    rouge, rouge_each = Rouge().compute_score(read, predicted)
    cider, cider_each = Cider().compute_score(read, predicted)
    assert [*ours.bleu, ours.rouge_l, ours.cider] == pytest.approx([*bleu, rouge, cider], abs=1e-9)
    for i, key in enumerate(references):
        assert list(ours.per_image[key]) == [
            "bleu_1",
            "bleu_2",
            "bleu_3",
            "bleu_4",
            "rouge_l",
            "cider",
        ]
        theirs = [*(each[i] for each in bleu_each), rouge_each[i], cider_each[i]]
        assert list(ours.per_image[key].values()) == pytest.approx(theirs, abs=1e-9)


def test_equal_to_the_toolkit():
    assert_equal_to_toolkit(CANDIDATES, REFERENCES)


def test_equal_to_the_toolkit_on_odd_candidates():
    """G2: the empty, the one-word and the repeated prediction, each beside ordinary ones."""
    for odd in ("", " ", "a", "😀", "a a a a a a", "dog " * 40):
        assert_equal_to_toolkit({**CANDIDATES, 2: odd}, REFERENCES)
    assert_equal_to_toolkit(CANDIDATES, {**REFERENCES, 2: ["a man", " . "]})


def test_the_order_of_the_pictures_does_not_matter():
    assert score(CANDIDATES, dict(reversed(REFERENCES.items()))) == score(CANDIDATES, REFERENCES)


@pytest.mark.skipif(not FLICKR8K.exists(), reason="needs the captions of Flickr8k")
def test_equal_to_the_toolkit_on_flickr8k():
    names = set((FLICKR8K / "Flickr_8k.testImages.txt").read_text().split())
    captions = {}
    for line in (FLICKR8K / "Flickr8k.token.txt").read_text(encoding="utf-8").splitlines():
        name, caption = line.split("\t")
        if (name := name.split("#")[0]) in names:
            captions.setdefault(name, []).append(caption)
    rng = random.Random(0)
    candidates = {}
    for name, (first, *_) in captions.items():
        words = first.split()
        del words[rng.randrange(len(words))]
        words.insert(rng.randrange(len(words) + 1), rng.choice(["dog", "a", "xyzzy"]))
        candidates[name] = " ".join(words[: rng.randrange(3, 20)])
    assert len(captions) == 1000
    assert_equal_to_toolkit(candidates, {name: texts[1:] for name, texts in captions.items()})


def test_longest_common_subsequence():
    def loops(a, b):
        table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                grown = table[i][j] + 1
                table[i + 1][j + 1] = grown if x == y else max(table[i][j + 1], table[i + 1][j])
        return table[-1][-1]

    rng = random.Random(0)
    for _ in range(300):
        a, b = (rng.choices("abcd", k=rng.randrange(12)) for _ in range(2))
        assert metrics._common_length(a, b) == loops(a, b)


def test_perfect_captions():
    scores = score(
        {k: v[0] for k, v in REFERENCES.items()}, {k: v[:1] for k, v in REFERENCES.items()}
    )
    assert scores.bleu == pytest.approx([1] * 4)
    assert scores.rouge_l == pytest.approx(1)
    assert scores.cider == pytest.approx(10)


def test_cider_is_not_defined_for_one_picture():
    """G1: CIDEr was 0 beside BLEU 1 for one picture with a perfect caption."""
    one = score({"x": "a dog runs on grass"}, {"x": ["A dog runs on grass."]})
    assert one.bleu == pytest.approx([1] * 4)
    assert math.isnan(one.cider) and math.isnan(one.per_image["x"]["cider"])
    assert str(one).endswith("CIDEr not defined for one picture")
    same = score({1: "a dog", 2: "a cat"}, {1: ["a dog"], 2: ["A dog."]})
    assert math.isnan(same.cider)
    assert str(same).endswith("CIDEr not defined where all pictures have the same references")
    two = score({1: "a dog runs on grass", 2: "the cat"}, {1: ["a dog runs on grass"], 2: ["cats"]})
    assert two.per_image[1]["cider"] == pytest.approx(10)


@pytest.mark.parametrize("empty", ["", " ", ".", "😀"])
def test_empty_captions_score_nothing(empty):
    """G2: an empty prediction divided by zero, or scored 1."""
    for references in (REFERENCES, {key: ["a dog", ""] for key in REFERENCES}):
        nothing = score(dict.fromkeys(CANDIDATES, empty), references)
        assert nothing.bleu == (0, 0, 0, 0) and nothing.rouge_l == 0
    assert score(dict.fromkeys(CANDIDATES, empty), REFERENCES).cider == 0
    assert score({1: empty}, {1: [empty]}).bleu == (0, 0, 0, 0)
    assert score({1: empty}, {1: [empty]}).rouge_l == 0
    some = score({**CANDIDATES, 2: empty}, REFERENCES)
    assert list(some.per_image[2].values()) == [0] * 6
    without = [{k: v for k, v in given.items() if k != 2} for given in (CANDIDATES, REFERENCES)]
    assert 0 < some.bleu[0] < score(*without).bleu[0]  # the missing words count


def test_one_word_is_not_a_perfect_caption():
    """G2: the brevity penalty was left out for captions of one word."""
    one = score({1: "dog"}, {1: ["a dog runs on the green grass"]})
    assert one.bleu[0] == pytest.approx(math.exp(1 - 7 / 1))
    assert one.bleu[3] < 1e-6 and one.rouge_l < 0.3


def test_scores_print_as_one_line_of_percentages():
    scores = metrics.Scores((0.634, 0.4, 0.3, 0.2351), 0.45, 0.589, {1: {}, 2: {}})
    assert str(scores) == (
        "BLEU-1 63.4  BLEU-2 40.0  BLEU-3 30.0  BLEU-4 23.5  ROUGE-L 45.0  CIDEr 58.9"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        scores.cider = 1.0


@pytest.mark.parametrize(
    ("candidates", "references", "message"),
    [
        ({}, {}, "candidates must hold at least one picture, got none"),
        ({1: "a"}, {1: ["a"], 2: ["b"], "x": ["c"]}, "got candidates without 2 of them: 2, 'x'$"),
        (
            {**dict.fromkeys(range(7), "a")},
            {3: ["a"]},
            "got references without 6 .*: 0, 1, 2, 4, 5, ...$",
        ),
        ({1: "a"}, {1: []}, r"references\[1\] must hold at least one caption, got none"),
        ({1: "a"}, {1: "a dog"}, r"references\[1\] must be a list of strings, got a string"),
        ({1: None}, {1: ["a"]}, "captions of 1 must be strings, got NoneType"),
        ({1: "a"}, {1: ["a", 2.5]}, "captions of 1 must be strings, got float"),
    ],
)
def test_errors(candidates, references, message):
    with pytest.raises((ValueError, TypeError), match=message):
        score(candidates, references)
