"""Measures of the maps: against loops, on maps whose scores are known, and batched as alone."""

import numpy as np
import pytest
import torch

from vlattn import grounding
from vlattn.data.records import Phrase, Record
from vlattn.grounding import (
    RASTER,
    THRESHOLDS,
    Scores,
    choose_overlay,
    measure_grounding,
    score_maps,
)
from vlattn.images import Geometry
from vlattn.mentions import Mention, Pictured, generated_texts, read_maps, reference_texts

WHOLE = Geometry((RASTER, RASTER), (0, 0, RASTER, RASTER))
BOXES = ((0.0, 0.0, 0.4, 0.5), (0.7, 0.25, 1.0, 1.0))


def one_hot(row, column, gh=4, gw=6):
    map = torch.zeros(gh, gw)
    map[row, column] = 1
    return map


def score(shown, mention):
    return grounding._score(shown[list(mention.words)], mention, WHOLE)


def test_scores_equal_loops_over_the_pixels():
    torch.manual_seed(0)
    shown = torch.rand(3, 4, 6)
    shown /= shown.sum((1, 2), keepdim=True)
    best, area, correctness, uniform, pointing, center, iou, rank = score(
        shown, Mention("x", (0, 2), BOXES)
    )
    inside, mass, total = [], {0: 0.0, 2: 0.0}, {0: 0.0, 2: 0.0}
    rasters = {word: WHOLE.to_image(shown[word]) for word in (0, 2)}
    whole = (shown[0] * shown[2] ** 2) ** (1 / 3)
    phrase = WHOLE.to_image(whole)
    ranks, order = [], sorted(whole.flatten().tolist(), reverse=True)
    for y in range(RASTER):
        for x in range(RASTER):
            u, v = (x + 0.5) / RASTER, (y + 0.5) / RASTER
            hit = any(x0 <= u <= x1 and y0 <= v <= y1 for x0, y0, x1, y1 in BOXES)
            inside.append(hit)
            for word in (0, 2):
                total[word] += rasters[word][y, x]
                mass[word] += rasters[word][y, x] * hit
            if hit:
                row, column = int(v * 4), int(u * 6)
                value = float(whole[row, column])
                ranks.append(order.index(pytest.approx(value, rel=1e-6)) / 23)
    shares = {word: mass[word] / total[word] for word in (0, 2)}
    assert best == max(shares, key=shares.get) and area == pytest.approx(0.225)
    assert correctness == pytest.approx(max(shares.values()), rel=1e-4)
    assert uniform == pytest.approx(np.mean(inside)) and center == 0
    assert rank == pytest.approx(np.mean(ranks), rel=1e-4)
    peak = int(phrase.argmax())
    assert pointing == inside[peak]
    above = phrase.ravel() >= 0.3 * phrase.max()
    expected = (above & inside).sum() / (above | inside).sum()
    assert iou[THRESHOLDS.index(0.3)] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("row", "column", "hit"), [(0, 1, 1.0), (3, 5, 1.0), (3, 0, 0.0)])
def test_one_patch_is_a_hit_or_a_miss(row, column, hit):
    """A grid of 4 x 6, so that swapped rows and columns show."""
    mention = Mention("x", (0,), ((0.17, 0.0, 0.33, 0.25), (0.84, 0.75, 1.0, 1.0)))
    _, _, correctness, uniform, pointing, _, _, rank = score(one_hot(row, column)[None], mention)
    assert pointing == hit
    assert (correctness > 5 * uniform) == bool(hit)
    assert (rank < 0.5) == bool(hit)


@pytest.mark.parametrize("before", [[], ["there"], ["there", "even"]])
def test_the_last_word_of_a_phrase_outweighs_each_before_it(before):
    """Of "a small cross" the article looks around and the noun knows; no word has a veto."""
    maps = {"here": one_hot(0, 0), "there": one_hot(3, 5), "even": torch.full((4, 6), 1 / 24)}
    words = torch.stack([maps[name] for name in [*before, "here"]])
    mention = Mention("x", tuple(range(len(words))), ((0.0, 0.0, 0.17, 0.25),))
    assert score(words, mention)[4] == 1
    assert score(words.flip(0), mention)[4] == (not before)


def test_the_uniform_map_scores_as_the_uniform_map_and_points_to_the_centre():
    even = torch.full((1, 4, 6), 1 / 24)
    for boxes, center in ((BOXES, 0.0), (((0.25, 0.25, 0.75, 0.9),), 1.0)):
        mention = Mention("x", (0,), boxes)
        _, _, correctness, uniform, pointing, at_center, iou, _ = score(even, mention)
        assert correctness == pytest.approx(uniform) == pytest.approx(iou[0])
        assert pointing == at_center == center


def test_a_map_of_a_crop_is_measured_where_the_crop_is():
    """The right half alone was seen: its first patch lies in the middle of the picture."""
    right = Geometry((RASTER, RASTER), (RASTER / 2, 0, RASTER, RASTER))
    boxes = ((0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 0.75, 0.5))
    _, _, correctness, uniform, pointing, *_, rank = grounding._score(
        one_hot(0, 0, 2, 2)[None], Mention("x", (0,), boxes), right
    )
    assert pointing == 1 and rank == 0 and uniform == pytest.approx(0.25)
    assert correctness > 0.6


def boxed(caption, *words, boxes=BOXES):
    starts = [caption.index(word) for word in words]
    return tuple(Phrase(s, s + len(w), "object", boxes) for s, w in zip(starts, words))


def test_maps_are_those_of_explain_however_many_captions_a_picture_has(
    captioner, records, photos, capsys
):
    captions = [r.captions[0] for r in records]
    pictures = [
        Record(photos[0], (captions[0], "a red ring"), phrases=((), boxed("a red ring", "red"))),
        Record(b"no picture", ("a ring",), phrases=(boxed("a ring", "a ring"),)),
        Record(photos[1], (captions[2],) * 2, phrases=(boxed(captions[2], "a"),) * 2),
        Record(photos[2], (captions[3],)),
    ]
    texts = [reference_texts(captioner, record) for record in pictures]
    assert [len(of_picture) for of_picture in texts] == [1, 1, 2, 0]
    assert texts[0][0].mentions == (Mention("object", (1,), BOXES),)
    found = {p.index: p for p in read_maps(captioner, pictures, texts)}
    assert found.keys() == {0, 2} and "image bytes" in capsys.readouterr().out
    for index, pictured in found.items():
        assert len(pictured.maps) == len(texts[index])
        for text, maps in zip(texts[index], pictured.maps):
            caption = captioner.explain(pictures[index].image, text.text)
            torch.testing.assert_close(maps[0], caption.layer_attention)
            torch.testing.assert_close(maps[1], caption.layer_relevance, rtol=1e-3, atol=1e-6)


def test_written_phrases_count_where_they_equal_a_reference_phrase(captioner):
    """Longer ones first, whole words alone, and the boxes of all of that name."""
    first, second = (("a red ring", "A ring"), ("a ring", "a star"))
    boxes = [((0.0, 0.0, 0.1 * k, 1.0),) for k in range(1, 5)]
    phrases = tuple(
        tuple(boxed(f"{p} and {q}", w, boxes=boxes[2 * i + j])[0] for j, w in enumerate((p, q)))
        for i, (p, q) in enumerate((first, second))
    )
    record = Record("?", tuple(f"{p} and {q}" for p, q in (first, second)), phrases=phrases)
    (text,) = generated_texts(captioner, record, "A red ring above a ring, a starfish")
    words = [w.text.strip() for w in captioner.tokenizer.words(text.tokens)]
    named = [" ".join(words[i] for i in m.words) for m in text.mentions]
    assert sorted(named) == ["a red ring", "a ring"]
    by_name = dict(zip(named, text.mentions))
    assert by_name["a ring"].boxes == (*boxes[1], *boxes[2])
    assert generated_texts(captioner, record, "two blue circles") == []


def test_captions_that_are_too_long_to_read_are_left_out(make_captioner):
    captioner = make_captioner(max_len=4)
    captions = ("a red ring and a star", "a ring")
    record = Record("?", captions, phrases=tuple(boxed(c, "ring") for c in captions))
    assert [text.text for text in reference_texts(captioner, record)] == ["a ring"]


def test_summary_is_the_means_of_all_and_of_each_kind():
    columns = {
        name: np.array(values)
        for name, values in {
            "area": [0.01, 0.2, 0.5],
            "correctness": [0.2, 0.6, 0.7],
            "uniform": [0.1, 0.2, 0.6],
            "pointing": [0.0, 1.0, 1.0],
            "center": [0.0, 0.0, 1.0],
            "rank": [0.5, 0.1, 0.3],
        }.items()
    }
    iou = np.tile([[0.3], [0.6], [0.9]], len(THRESHOLDS)) * (np.array(THRESHOLDS) == 0.4)
    scores = Scores(["people", "other", "people"], [], [], iou=iou, **columns)
    assert scores.best_threshold() == 0.4
    summary = scores.summary(0.4)
    assert summary["phrases"] == 3 and summary["phrases_large"] == 2
    assert summary["correctness"] == pytest.approx(0.5) and summary["iou"] == pytest.approx(0.6)
    assert summary["pointing"] == pytest.approx(2 / 3) and summary["pointing_large"] == 1
    assert summary["center_large"] == 0.5 and summary["rank"] == pytest.approx(0.3)
    assert summary["kinds"]["people"]["correctness"] == pytest.approx(0.45)
    assert summary["kinds"]["other"]["phrases"] == 1
    nothing_large = scores._replace(area=scores.area * 0.01).summary(0.4)
    assert nothing_large["pointing_large"] is None


def test_overlays_show_the_layer_that_points_best(make_captioner, photos, monkeypatch):
    captioner = make_captioner()
    record = Record(photos[0], ("a red ring",), phrases=(boxed("a red ring", "red ring"),))
    even = torch.full((4, 6), 1 / 24)
    layers = [one_hot(3, 0), one_hot(0, 1)]  # outside and inside
    maps = torch.stack([torch.stack([layer, layer]) for layer in layers]).expand(3, -1, -1, -1, -1)
    maps = torch.cat([even.expand(1, 2, 2, -1, -1), maps[1:]])
    monkeypatch.setattr(
        grounding, "read_maps", lambda *_: iter([Pictured(0, WHOLE, [(maps, maps)])])
    )
    config = choose_overlay(captioner, [record]).config
    assert (config.overlay_layer, config.overlay_head) == (1, None)


def test_without_phrases_nothing_is_chosen_and_nothing_measured(make_captioner, records):
    captioner = make_captioner()
    bare = [record._replace(phrases=()) for record in records[:2]]
    before = captioner.config
    assert choose_overlay(captioner, bare).config == before
    with pytest.raises(ValueError, match="none of the captions has a phrase with boxes"):
        score_maps(captioner, bare, [reference_texts(captioner, r) for r in bare])


def test_all_measures_of_scenes(captioner, records):
    """A caption that is a reference caption has its phrases and their scores."""
    some = records[:3]
    written = {record.name: record.captions[0] for record in some}
    scores, means = measure_grounding(captioner, some, records[3:5], written)
    assert means.keys() == {"teacher_forced", "generated", "faithfulness"}
    forced, generated = means["teacher_forced"], means["generated"]
    assert forced["phrases"] == sum(len(p) for r in some for p in r.phrases) == len(scores.area)
    assert generated["phrases"] >= sum(len(r.phrases[0]) for r in some)
    assert forced["iou_threshold"] == generated["iou_threshold"]
    for summary in (forced, generated):
        assert 0 < summary["uniform"] < 1 and 0 <= summary["pointing"] <= 1
    assert means["faithfulness"]["words"] == 3
