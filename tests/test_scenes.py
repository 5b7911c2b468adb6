"""The built-in scenes: captions that are true, boxes that are tight, pairs that stay held out."""

import itertools
import re
from collections import Counter

import numpy as np
import pytest

from vlattn.data.scenes import COLOURS, HELD_OUT, SHAPES, SPLITS, described, scenes

SIZE = 128


@pytest.fixture(scope="module")
def splits():
    return {split: scenes(split, size=48 if split == "train" else SIZE) for split in SPLITS}


@pytest.fixture(scope="module")
def records(splits):
    return [record for split in splits.values() for record in split]


def noun(caption, phrase):
    return caption[phrase.start : phrase.end]


def test_splits_have_their_sizes_and_unique_names(splits, records):
    assert {split: len(part) for split, part in splits.items()} == SPLITS
    assert all(record.split == split for split, part in splits.items() for record in part)
    assert len({record.name for record in records}) == len(records)
    assert all(record.image.mode == "RGB" for record in records)


def test_every_caption_names_every_object(records):
    counts = Counter()
    for record in records:
        assert len(record.captions) == len(record.phrases) == 5
        truth = described(record.captions[0])
        boxes = {box for phrase in record.phrases[0] for box in phrase.boxes}
        assert len(boxes) == truth.total()
        counts[len(boxes)] += 1
        for caption, phrases in zip(record.captions, record.phrases):
            assert described(caption) == truth
            named = [box for phrase in phrases for box in phrase.boxes]
            assert len(named) == len(boxes) and set(named) == boxes
    assert set(counts) == {1, 2, 3, 4} and min(counts.values()) > 0.1 * len(records)


def test_captions_are_short_and_grammatical(records):
    singular = rf"(a|an)( \w+)? ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
    plural = rf"(two|three|four)( \w+)? ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})(s|es)"
    for record in records:
        for caption, phrases in zip(record.captions, record.phrases):
            assert caption == caption.lower().strip()
            assert len(re.findall(r"\w+|,", caption)) <= 24
            assert not re.search(r"\ba [aeiou]|\ban [^aeiou]|crosss", caption)
            assert not re.search(r"there is (two|three|four)|there are (a|an)\b", caption)
            for phrase in phrases:
                form = plural if len(phrase.boxes) > 1 else singular
                assert re.fullmatch(form, noun(caption, phrase)), caption
                assert phrase.kind == "object"


def test_relations_are_true_of_the_picture(records):
    """What the caption says of two phrases is checked against every pair of their boxes."""
    seen = Counter()
    for record in records:
        for caption, phrases in zip(record.captions, record.phrases):
            for first, second in itertools.pairwise(phrases):
                between = caption[first.end : second.start]
                found = re.search("above|below|left|right", between)
                if found is None:
                    continue
                seen[found[0]] += 1
                for a in first.boxes:
                    for b in second.boxes:
                        gap = {
                            "above": b[1] - a[3],
                            "below": a[1] - b[3],
                            "left": b[0] - a[2],
                            "right": a[0] - b[2],
                        }
                        assert gap[found[0]] == max(gap.values()) >= 0.03, caption
    assert set(seen) == {"above", "below", "left", "right"} and min(seen.values()) > 400


def test_objects_are_told_column_by_column_and_from_the_top_down(records):
    for record in records:
        for phrases in record.phrases[:3]:
            firsts = [min(map(column_and_height, phrase.boxes)) for phrase in phrases]
            assert firsts == sorted(firsts)


def column_and_height(box):
    x0, y0, x1, y1 = box
    return int(3 * (x0 + x1) / 2), y0 + y1


def test_boxes_are_tight_around_pixels_of_the_named_colour(splits):
    """Grounds are pale in every channel; the colours of objects are not."""
    slack = []
    for record in splits["dev"]:
        pixels = np.asarray(record.image).astype(int)
        inked = pixels.min(axis=2) < 190
        assert pixels[~inked].min() >= 190
        for phrase in record.phrases[0]:
            colour = next(c for c in COLOURS if c in noun(record.captions[0], phrase).split())
            for box in phrase.boxes:
                x0, y0, x1, y1 = (round(side * SIZE) for side in box)
                assert 0 <= x0 < x1 <= SIZE and 0 <= y0 < y1 <= SIZE
                inside = pixels[y0:y1, x0:x1]
                rows, columns = np.nonzero(inked[y0:y1, x0:x1])
                slack += [rows.min(), columns.min()]
                slack += [y1 - y0 - 1 - rows.max(), x1 - x0 - 1 - columns.max()]
                full = sorted(inside.reshape(-1, 3).tolist(), key=min)[: len(rows) // 4]
                nearest = [
                    min(COLOURS, key=lambda c: np.abs(np.subtract(pixel, COLOURS[c])).sum())
                    for pixel in full[::5]
                ]
                assert set(nearest) == {colour}
        for phrase in record.phrases[0]:
            for box in phrase.boxes:
                x0, y0, x1, y1 = (round(side * SIZE) for side in box)
                inked[y0:y1, x0:x1] = False
        assert not inked.any()
    assert np.mean(slack) < 1 and max(slack) <= 6


def test_held_out_pairs_are_met_in_test_novel_alone(splits):
    for split, part in splits.items():
        for record in part:
            novel = any(pair in HELD_OUT for pair in described(record.captions[0]))
            assert novel == (split == "test_novel")
    seen = Counter(pair for r in splits["train"] for pair in set(described(r.captions[0])))
    assert len(seen) == len(COLOURS) * len(SHAPES) - len(HELD_OUT)
    assert min(seen.values()) > 100


def test_the_same_scenes_every_time_and_none_twice(splits, records):
    again = scenes("dev")
    for record, same in zip(splits["dev"], again):
        assert record[1:] == same[1:] and record.image.tobytes() == same.image.tobytes()
    assert len({record.image.tobytes() for record in records}) == len(records)
    assert scenes("dev", size=40)[3].captions == again[3].captions
    assert again[3].image.size == (128, 128)


@pytest.mark.parametrize(
    ("caption", "claims"),
    [
        ("two red circles and a blue star", {("red", "circle"): 2, ("blue", "star"): 1}),
        ("A small red circle , a large  red circle", {("red", "circle"): 2}),
        ("an orange cross above three striped orange crosses", {("orange", "cross"): 4}),
        ("the red thing near four circles, a pink star and a red", {}),
        ("a red blue ring of a of yellow squares", {("blue", "ring"): 1, ("yellow", "square"): 1}),
        ("a covered circle and a red starfish", {}),
        ("", {}),
    ],
)
def test_described_reads_imperfect_captions(caption, claims):
    assert described(caption) == claims


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split must be one of train, dev, test, test_novel, got"):
        scenes("val")
