"""Insertion and deletion curves: the patches that are hidden are those that the map says."""

import pytest
import torch

from vlattn import faithfulness
from vlattn.data.records import Record
from vlattn.faithfulness import NAMES, SHARES, hide_patches


@pytest.fixture
def pictures(photos):
    return [Record(photo, ("a ring",), name=f"{i}") for i, photo in enumerate(photos)]


def test_the_whole_memory_in_any_order_gives_the_words_own_probability(captioner, pictures):
    texts = ["a red ring", "two blue stars and a ring", "a ring"]
    captions = [captioner.explain(r.image, t) for r, t in zip(pictures, texts)]
    features, _ = captioner.read_pictures([c.image for c in captions])
    hypotheses = [faithfulness.Hypothesis(captioner.tokenizer.encode(t), 0.0, False) for t in texts]
    with torch.inference_mode():
        memory = captioner.memory(features)[:, torch.randperm(24)]
        found = faithfulness._logprobs(captioner, memory, hypotheses, [1, 2, 0])
    expected = [c.words[i].logprob for c, i in zip(captions, [1, 2, 0])]
    torch.testing.assert_close(found.squeeze(1), torch.tensor(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prefix", [0, 3])
def test_what_is_hidden_and_shown_is_the_hottest_of_the_map(
    make_captioner, pictures, monkeypatch, prefix
):
    """The memory is replaced by the numbers of its patches, and what is left of it is kept. Tokens
    before the patches, below zero here, were counted as patches: their neighbours were hidden."""
    captioner = make_captioner(num_registers=prefix, keep_registers=True)
    left = []

    def logprobs(captioner, memory, texts, words):
        rows = memory[:, :, 0].long()
        assert (rows[:, :prefix] < 0).all() and (rows[:, prefix:] >= 0).all()
        left.append(rows[:, prefix:].tolist())
        return torch.zeros(len(memory), 1)

    numbers = torch.arange(-prefix, 24.0)[None, :, None].expand(3, -1, 5)
    monkeypatch.setattr(captioner, "memory", lambda features: numbers)
    monkeypatch.setattr(faithfulness, "_logprobs", logprobs)
    explained, explain = [], captioner.explain_texts
    with monkeypatch.context() as patch:
        patch.setattr(captioner, "memory", type(captioner).memory.__get__(captioner))
        captions = {r.name: "ring" for r in pictures}
        features, geometries = captioner.read_pictures([r.image for r in pictures])
        ids = captioner.tokenizer.encode("ring")
        texts = [faithfulness.Hypothesis(ids, 0.0, False)] * 3
        explained = explain(texts, features, [r.image for r in pictures], geometries)
    monkeypatch.setattr(captioner, "explain_texts", lambda *_: explained)
    curves = hide_patches(captioner, pictures, captions)
    assert curves.words == 3 and curves.values.shape == (len(NAMES), len(SHARES))
    steps = [left[i : i + 4] for i in range(0, len(left), 4)]
    for share, (kept, kept_random, shown, shown_random) in zip(SHARES, steps, strict=True):
        count = round(share * 24)
        for row, caption in enumerate(explained):
            values = caption.attention[0].flatten()
            hottest = set(values.argsort(descending=True)[:count].tolist())
            assert set(shown[row]) == hottest and set(kept[row]) == set(range(24)) - hottest
            assert set(kept_random[row]) == set(range(24)) - set(shown_random[row])
            assert len(shown_random[row]) == count


def test_curves_are_reproducible_and_leave_out_what_cannot_be_read(captioner, pictures):
    captions = {"0": "a red ring", "1": "a ring", "2": "a"}
    damaged = [pictures[0], pictures[1]._replace(image=b""), pictures[2]]
    curves = hide_patches(captioner, damaged, captions)
    assert curves.words == 1  # one is damaged, one has no long word
    again = hide_patches(captioner, damaged, captions)
    assert curves.summary() == again.summary()
    summary = curves.summary()
    gain = sum(r - d for r, d in zip(summary["deletion_random"], summary["deletion"])) / len(SHARES)
    assert summary["deletion_gain"] == pytest.approx(gain)
    assert hide_patches(captioner, damaged, {"2": "a"}) is None
