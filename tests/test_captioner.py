"""The captioner: what it writes, where it looked for each word, and its model folder."""

import dataclasses
import io
import json
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from safetensors.torch import load_file, save_file
from torch._dynamo.testing import CompileCounter

from vlattn.attention import ATTENTIONS, modules
from vlattn.captioner import Captioner
from vlattn.config import CaptionerConfig
from vlattn.data.dataset import CaptionDataset, collate
from vlattn.data.records import Record
from vlattn.generation import beam_search
from vlattn.images import ImageError, Preprocess, open_image
from vlattn.network import ReadTexts, token_logprobs
from vlattn.tokenizer import Tokenizer

MODEL_FOLDER = [
    "README.md",
    "config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "tokenizer.json",
]
SCRIPTS = [
    "a family 👨‍👩‍👧 under the 🇫🇷 flag",
    "三只猫 on a mat",
    "قِطَّة سوداء على السجادة",
    "a cafe\u0301 by the sea; a café!",
    "don't stop — black-and-white, 12 o'clock",
]


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def same_caption(one, other):
    assert one.text == other.text and one.finished == other.finished
    assert one.score == pytest.approx(other.score, abs=1e-4)
    assert one.words == tuple(
        dataclasses.replace(word, logprob=pytest.approx(word.logprob, abs=1e-3))
        for word in other.words
    )
    torch.testing.assert_close(one.layer_attention, other.layer_attention, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(one.attention, other.attention, rtol=1e-3, atol=1e-5)
    assert one.geometry == other.geometry
    np.testing.assert_array_equal(np.asarray(one.image), np.asarray(other.image))


def encoded(captioner, images):
    pixels = [captioner.preprocess(open_image(image))[0] for image in images]
    with torch.no_grad():
        return captioner.encode(torch.stack(pixels))


def control_ids(tokenizer):
    return [i for i in (tokenizer.pad_id, tokenizer.bos_id, tokenizer.unk_id) if i is not None]


# ---- writing ----


@pytest.mark.parametrize("num_beams", [1, 4])
def test_written_scores_are_those_of_teacher_forcing(captioner, photos, num_beams):
    """Beams of one picture went on with the kept keys and values of another, or with those of the
    beam that had stood in their place (F1); here each token's log-probability is computed again,
    without a cache."""
    features = encoded(captioner, photos)
    found = captioner.generate(features, num_beams=num_beams, max_len=12)
    tokenizer = captioner.tokenizer
    for picture, (best,) in enumerate(found):
        alone = features._replace(tokens=features.tokens[picture : picture + 1])
        text = [tokenizer.bos_id, *best.tokens, *[tokenizer.eos_id] * best.finished]
        with torch.no_grad():
            logits, weights = captioner.decode(torch.tensor([text[:-1]]), alone)
        assert weights is None
        logprobs = logits[0].log_softmax(-1)
        total = sum(float(logprobs[i, token]) for i, token in enumerate(text[1:]))
        assert best.score == pytest.approx(total / len(text[1:]), abs=1e-4)
        if num_beams == 1:
            logprobs[:, control_ids(tokenizer)] = -torch.inf
            assert logprobs.argmax(-1).tolist() == text[1:]
    assert len({tuple(best.tokens) for (best,) in found}) == 3


def test_captioners_that_write_together_average_their_log_probabilities(make_captioner, photos):
    others = [make_captioner("additive"), make_captioner(depth=3, num_heads=4, max_len=30)]
    captioner = make_captioner()
    features = encoded(captioner, photos)
    writers, tokenizer = [captioner, *others], captioner.tokenizer
    found = captioner.generate(features, ensemble=others, prompt="a", num_beams=1, max_len=12)
    for picture, (best,) in enumerate(found):
        alone = features._replace(tokens=features.tokens[picture : picture + 1])
        text = [tokenizer.bos_id, *best.tokens, *[tokenizer.eos_id] * best.finished]
        with torch.no_grad():
            read = [w.decode(torch.tensor([text[:-1]]), alone).logits[0] for w in writers]
        together = sum(logits.log_softmax(-1) for logits in read) / 3
        logprobs = together.log_softmax(-1)
        written = range(1, len(text) - 1)  # after the prompt
        total = sum(float(logprobs[i, text[i + 1]]) for i in written)
        assert best.score == pytest.approx(total / len(written), abs=1e-4)
        logprobs[:, control_ids(tokenizer)] = -torch.inf
        assert logprobs.argmax(-1).tolist()[1:] == text[2:]
    alone = [w.generate(features, prompt="a", num_beams=1, max_len=12) for w in writers]
    assert found not in alone


def test_maps_of_captioners_that_write_together_are_those_of_the_first(make_captioner, photos):
    captioner, other = make_captioner(), make_captioner("additive")
    other.train()
    caption = captioner.caption(photos, ensemble=[other], num_beams=3, max_len=12)[1]
    assert other.training
    explained = captioner.explain(photos[1], caption.text)
    assert caption.finished and caption.text != captioner.caption(photos, max_len=12)[1].text
    torch.testing.assert_close(caption.attention, explained.attention)
    expected = [word.logprob for word in explained.words]
    assert [word.logprob for word in caption.words] == pytest.approx(expected, abs=1e-4)


def test_captioners_that_cannot_write_together(make_captioner, records, photos):
    captioner = make_captioner()
    captions = [caption for record in records for caption in record.captions]
    larger = Tokenizer.train([*captions, "an aardvark"], kind="word", min_frequency=1)
    others = [make_captioner(tokenizer=larger), make_captioner(resize="pad"), make_captioner()]
    with torch.no_grad():
        next(others[-1].encoder.parameters()).add_(0.01)
    for other, what in zip(others, ("vocabulary", "encoder", "encoder")):
        with pytest.raises(ValueError, match=f"write together must have the same {what}"):
            captioner.caption(photos, ensemble=[other])
    with pytest.raises(ValueError, match="fewer than max_len=4 tokens, got 5"):
        captioner.caption(photos, ensemble=[make_captioner(max_len=4)], prompt="a b c d e")


def test_a_wider_beam_differs_from_greedy(captioner, photos):
    """The tests of beams would show nothing if all of them found the greedy text."""
    greedy = captioner.caption(photos, num_beams=1, max_len=12)
    beams = captioner.caption(photos, num_beams=4, max_len=12)
    assert any(one.text != other.text for one, other in zip(greedy, beams))
    assert {caption.finished for caption in beams} == {True, False}


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"temperature": 0}])
def test_a_batch_gives_what_each_picture_gives_alone(captioner, photos, options):
    """A caption depended on the other pictures of its batch, by padding or by rows that went on
    after their end (F1, F4)."""
    alone = [captioner.caption([photo], max_len=12, **options)[0] for photo in photos]
    order = [2, 0, 1]
    for batch_size in (2, 32):
        together = captioner.caption(
            [photos[i] for i in order], max_len=12, batch_size=batch_size, **options
        )
        for i, caption in zip(order, together):
            same_caption(caption, alone[i])


def test_every_kind_of_source_gives_the_same_caption(captioner, photos, tmp_path):
    photo = photos[0]
    path = tmp_path / "photo.png"
    photo.save(path)
    array = np.asarray(photo)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    sources = [photo, path, str(path), path.read_bytes(), array, tensor, tensor / 255]
    first, *others = captioner.caption(sources, max_len=9)
    for other in others:
        same_caption(other, first)
    (batched,) = captioner.caption(tensor[None], max_len=9)  # a batch in one tensor
    same_caption(batched, first)


def test_captioning_leaves_the_mode_alone_and_has_no_dropout(make_captioner, photos):
    captioner = make_captioner(dropout=0.5, attention_dropout=0.5)
    expected = captioner.caption(photos, max_len=9)
    captioner.train()
    for one, other in zip(captioner.caption(photos, max_len=9), expected):
        same_caption(one, other)
    assert captioner.training and captioner.decoder.dropout.training


def test_compiled_writing_is_compiled_a_few_times(make_captioner, photos):
    """Every step was compiled anew (X3): up to 20 tokens after each of three beginnings."""
    captioner = make_captioner()
    features, _ = captioner.read_pictures([open_image(photo) for photo in photos[:2]])
    steps, counter = [], CompileCounter()
    captioner.decoder.register_forward_pre_hook(lambda *_: steps.append(1))

    def write():
        return [
            [text.tokens for texts in found for text in texts]
            for prompt in ("", "a", "a red circle")
            for found in [captioner.generate(features, prompt=prompt, max_len=20, num_beams=2)]
        ]

    expected = write()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=100):
        captioner.decoder.compile(backend=counter)
        assert write() == expected
    assert counter.frame_count < 12 < len(steps) / 4


def test_sampling_has_a_seed(captioner, photos):
    options = {"temperature": 1.5, "top_k": 20, "top_p": 0.95, "max_len": 9}
    first = [c.text for c in captioner.caption(photos, seed=1, **options)]
    assert first == [c.text for c in captioner.caption(photos, seed=1, **options)]
    assert first != [c.text for c in captioner.caption(photos, seed=2, **options)]


def test_control_tokens_are_never_written(make_captioner, photos, tokenizer, monkeypatch):
    """Captions showed the markers of begin, padding and unknown words (X7): here the model finds
    them the likeliest of all."""
    captioner = make_captioner()
    plain = captioner.decoder.logits
    control = control_ids(tokenizer)

    def logits(hidden):
        return plain(hidden).index_add(
            -1, torch.tensor(control), torch.full((*hidden.shape[:-1], len(control)), 50.0)
        )

    monkeypatch.setattr(captioner.decoder, "logits", logits)
    for options in ({"num_beams": 5}, {"temperature": 1.0}, {"temperature": 0, "top_k": 1}):
        features = encoded(captioner, photos)
        for texts in captioner.generate(features, max_len=9, **options):
            assert all(not set(text.tokens) & {*control, tokenizer.eos_id} for text in texts)
        for caption in captioner.caption(photos, max_len=9, **options):
            assert "<" not in caption.text


def test_rare_words_are_no_markers_in_captions(make_captioner, records, photos):
    """With a high least count most words were unknown, and the marker was written (X7)."""
    captions = [caption for record in records for caption in record.captions]
    tokenizer = Tokenizer.train(captions, kind="word", min_frequency=30)
    assert 0.2 < tokenizer.unknown_rate(captions) < 0.9
    captioner = make_captioner(tokenizer=tokenizer)
    for caption in captioner.caption(photos, max_len=9):
        assert tokenizer.unk_id not in tokenizer.encode(caption.text)
        assert "unk" not in caption.text


@pytest.mark.parametrize(("num_beams", "max_len"), [(5, 5), (1, 5), (3, 1), (3, 60)])
def test_a_caption_that_does_not_end_has_a_map_per_word(
    make_captioner, photos, num_beams, max_len, monkeypatch
):
    """Where no text ended the search crashed, or the caption had no maps (F2). With a limit above
    the decoder's own (here 8 places) the caption had a token more than there are places."""
    captioner = make_captioner(max_len=8)
    plain = captioner.decoder.logits
    eos = torch.tensor([captioner.tokenizer.eos_id])
    monkeypatch.setattr(
        captioner.decoder, "logits", lambda hidden: plain(hidden).index_fill(-1, eos, -1e4)
    )
    for caption in captioner.caption(photos, num_beams=num_beams, max_len=max_len):
        assert not caption.finished
        assert len(captioner.tokenizer.encode(caption.text)) == min(max_len, 8)
        assert caption.attention.shape == (len(caption.words), 4, 6)
        torch.testing.assert_close(caption.attention.sum((1, 2)), torch.ones(len(caption.words)))
        assert "".join(word.text for word in caption.words) == caption.text


def test_an_empty_caption_has_no_words_and_no_maps(make_captioner, photos, monkeypatch):
    captioner = make_captioner()
    eos = torch.tensor([captioner.tokenizer.eos_id])
    plain = captioner.decoder.logits
    monkeypatch.setattr(
        captioner.decoder, "logits", lambda hidden: plain(hidden).index_fill(-1, eos, 1e3)
    )
    (caption,) = captioner.caption(photos[:1])
    assert caption.text == "" and caption.words == () and caption.finished
    assert caption.attention.shape == (0, 4, 6)


def test_bad_requests_are_refused_and_the_next_one_works(captioner, photos):
    with pytest.raises(TypeError, match="images must be a list of pictures, got str"):
        captioner.caption("photo.png")
    with pytest.raises(TypeError, match="images must be a list of pictures, got Image"):
        captioner.caption(photos[0])
    with pytest.raises(ValueError, match="top_k and top_p are for sampling: set temperature too"):
        captioner.caption(photos, top_k=3)
    with pytest.raises(ValueError, match="max_len must be at least 1, got 0"):
        captioner.caption(photos, max_len=0)
    assert captioner.caption([]) == []
    assert len(captioner.caption(photos, max_len=3)) == 3


# ---- pictures ----


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_stored_sideways_are_captioned_upright(make_captioner, orientation):
    """Phone photos reached the model sideways, and the overlay lay on the turned picture (C1)."""
    upright = np.full((40, 66, 3), 255, np.uint8)
    upright[:, :22] = (255, 0, 0)  # red left third, green top strip
    upright[:10] = (0, 255, 0)
    turned = upright.swapaxes(0, 1) if orientation > 4 else upright
    rows = -1 if orientation in (3, 4, 6, 7) else 1
    columns = -1 if orientation in (2, 3, 7, 8) else 1
    stored = Image.fromarray(np.ascontiguousarray(turned[::rows, ::columns]))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    buffer = io.BytesIO()
    stored.save(buffer, "PNG", exif=exif)

    captioner = make_captioner(resize="pad")
    expected, caption = captioner.caption([upright, buffer.getvalue()], max_len=5)
    same_caption(caption, expected)
    overlays = (np.asarray(c.overlay(0)) for c in (caption, expected))
    np.testing.assert_array_equal(*overlays)
    assert caption.heatmap(0).shape == (40, 66)


def test_a_small_file_of_a_huge_picture_is_refused_before_it_is_decoded(captioner, photos):
    """A few kB that say 20000 x 20000 took gigabytes, and the worker died (C4)."""

    def chunk(kind, content):
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    rows = chunk(b"IDAT", zlib.compress(bytes(60_001)))
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + rows + chunk(b"IEND", b"")
    for request in ([bomb], [photos[0], bomb]):
        with pytest.raises(ImageError, match="20000 x 20000 pixels"):
            captioner.caption(request)
    with pytest.raises(ImageError, match="20000 x 20000 pixels"):
        captioner.explain(bomb, "a ring")
    assert captioner.caption(photos[:1], max_len=4)[0].words


def test_what_training_reads_is_what_captioning_reads(make_captioner, photos, tmp_path):
    """The picture was prepared in one way for training and in another for use (X10): here with
    settings that are no defaults, through a saved folder."""
    captioner = make_captioner()
    captioner.preprocess = Preprocess((64, 96), "pad", (0.1, 0.2, 0.3), (0.9, 0.8, 0.7))
    captioner.save_pretrained(tmp_path / "model")
    loaded = Captioner.from_pretrained(tmp_path / "model")
    assert loaded.preprocess == captioner.preprocess

    read = []
    plain = loaded.encode
    loaded.encode = lambda pixels: (read.append(pixels), plain(pixels))[1]
    loaded.caption(photos, max_len=3)
    records = [Record(png(photo), ("a ring",)) for photo in photos]
    data = CaptionDataset(records, captioner.tokenizer, captioner.preprocess, max_len=9)
    assert torch.equal(collate([data[i] for i in range(3)]).images, read[0])


# ---- where it looked ----


def test_explaining_a_caption_gives_its_maps_and_probabilities(captioner, photos):
    for caption, photo in zip(captioner.caption(photos, num_beams=4, max_len=12), photos):
        explained = captioner.explain(photo, caption.text)
        if not caption.finished:  # a given text ends, and its score counts the end
            explained = dataclasses.replace(explained, finished=False, score=caption.score)
        same_caption(explained, caption)


def test_maps_follow_the_beam_that_won(captioner, photos):
    """The maps were those of the beam that stood in the winner's place (F1): here they are computed
    again from the text."""
    tokenizer = captioner.tokenizer
    features = encoded(captioner, photos)
    for picture, caption in enumerate(captioner.caption(photos, num_beams=4, max_len=12)):
        alone = features._replace(tokens=features.tokens[picture : picture + 1])
        tokens = [tokenizer.bos_id, *tokenizer.encode(caption.text)]
        with torch.no_grad():
            logits, weights = captioner.decode(torch.tensor([tokens]), alone, need_weights=True)
        logprobs = logits[0].log_softmax(-1)
        assert len(caption.words) == len(tokens) - 1  # whole words are its tokens
        for i, word in enumerate(caption.words):  # token i + 1 is written at place i
            expected = weights[0, :, :, i].reshape(2, 2, 4, 6)
            torch.testing.assert_close(caption.layer_attention[i], expected, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(
                caption.attention[i], expected.mean((0, 1)), rtol=1e-3, atol=1e-5
            )
            assert word.logprob == pytest.approx(float(logprobs[i, tokens[i + 1]]), abs=1e-3)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("text", SCRIPTS)
def test_words_join_to_the_text_in_any_script(make_captioner, photos, kind, text):
    """Words that were decoded token by token were broken emoji and Chinese, and Arabic without its
    marks (B3)."""
    tokenizer = Tokenizer.train(SCRIPTS * 2, kind=kind, vocab_size=400)
    captioner = make_captioner(tokenizer=tokenizer, max_len=200)
    caption = captioner.explain(photos[0], text)
    assert caption.text == tokenizer.decode(tokenizer.encode(text))
    assert "".join(word.text for word in caption.words) == caption.text
    assert "\ufffd" not in caption.text
    place = 0
    for word in caption.words:
        assert (word.start, word.end) == (place, place + len(word.text))
        assert caption.text[word.start : word.end] == word.text and word.text.strip()
        place = word.end
    assert len(caption.attention) == len(caption.words) > 3
    torch.testing.assert_close(caption.attention.sum((1, 2)), torch.ones(len(caption.words)))


def test_both_spellings_of_an_accent_are_explained_alike(make_captioner, photos):
    tokenizer = Tokenizer.train(SCRIPTS * 2, kind="bpe", vocab_size=400)
    captioner = make_captioner(tokenizer=tokenizer)
    one, other = (captioner.explain(photos[0], text) for text in ("a café", "a cafe\u0301"))
    same_caption(one, other)


def test_maps_belong_to_the_word_they_were_written_with(make_captioner, photos, monkeypatch):
    """Maps belonged to the word before or after, or a word of several tokens shifted those behind
    it (I3): here the decoder looks at patch i while it writes token i, and at the last patch while
    it writes the end."""
    text = "a black-and-white zebra, a quagga and a zebra"
    words = ["a", "black-and-white", "zebra", ",", "a", "quagga", "and", "a", "zebra"]
    tokenizer = Tokenizer.train(["a zebra and a black horse"] * 2, vocab_size=270)
    captioner = make_captioner(tokenizer=tokenizer, patch_size=8)  # 8 x 12 patches
    tokens = tokenizer.encode(text)

    def read_texts(given, features):
        number = given.size(1) - 1
        assert number == len(tokens) + 1
        looked = torch.zeros(1, 2, 2, number, 96)
        for i in range(number - 1):
            looked[:, :, :, i, i] = 1
        looked[:, :, :, -1, 95] = 1
        logprobs = token_logprobs(torch.zeros(1, number, tokenizer.vocab_size), given[:, 1:])
        return ReadTexts(logprobs, looked, looked)

    monkeypatch.setattr(captioner, "read_texts", read_texts)
    caption = captioner.explain(photos[0], text)
    assert [word.text.strip() for word in caption.words] == words

    # The word of each token, by counting letters; a space belongs to the word behind it.
    pieces = [tokenizer.decode([token]) for token in tokens]
    ends = np.cumsum([len(word) for word in words])
    letters = np.cumsum([len(piece) for piece in pieces]) - [bool(piece) for piece in pieces]
    owners = np.searchsorted(ends, letters, "right").tolist()
    for i, word in enumerate(words):
        mine = [k for k, owner in enumerate(owners) if owner == i]
        expected = torch.zeros(96)
        expected[mine] = 1 / len(mine)
        torch.testing.assert_close(caption.attention[i].flatten(), expected, msg=word)
        assert caption.words[i].logprob == pytest.approx(
            -len(mine) * np.log(tokenizer.vocab_size), rel=1e-5
        )
    assert {1, 3} <= {owners.count(i) for i in range(len(words))}  # a word of three pieces
    assert not torch.equal(caption.attention[2], caption.attention[-1])  # zebra, and zebra again


def test_heat_maps_are_nan_where_a_crop_saw_nothing(make_captioner, photos):
    captioner = make_captioner(resize="crop")  # of 75 x 50 it sees the middle 33 rows
    caption = captioner.explain(photos[1], "a red ring")
    for i in range(3):
        heatmap = caption.heatmap(i)
        assert heatmap.shape == (75, 50)
        assert np.isnan(heatmap[:20]).all() and np.isnan(heatmap[55:]).all()
        assert not np.isnan(heatmap[22:53]).any()
        assert np.nansum(heatmap, dtype=np.float64) == pytest.approx(1, abs=1e-5)
        assert caption.overlay(i).size == (50, 75)


def test_select_shows_a_layer_and_head_of_the_decoder(captioner, photos):
    caption = captioner.explain(photos[0], "a red ring")
    tokens = [captioner.tokenizer.bos_id, *captioner.tokenizer.encode("a red ring")]
    with torch.no_grad():
        output = captioner.decode(torch.tensor([tokens]), encoded(captioner, photos[:1]), True)
    for layer in range(2):
        for head in range(2):
            shown = caption.select(layer, head).attention.flatten(1)
            torch.testing.assert_close(shown, output.weights[0, layer, head, :3])
    torch.testing.assert_close(caption.select().attention, caption.attention)


def test_more_than_usual_removes_what_every_word_looks_at(captioner, photos):
    """The map times its ratio to the mean over the words, as loops; a word alone is as usual."""
    caption = captioner.explain(photos[0], "a red ring")
    maps = caption.attention
    shown = caption.select(view="more_than_usual").attention
    for word in range(3):
        ratios = torch.empty(4, 6)
        for y in range(4):
            for x in range(6):
                usual = sum(maps[w, y, x] for w in range(3)) / 3
                ratios[y, x] = maps[word, y, x] ** 2 / usual
        torch.testing.assert_close(shown[word], ratios / ratios.sum())
    alone = captioner.explain(photos[0], "ring")
    torch.testing.assert_close(alone.select(view="more_than_usual").attention, alone.attention)
    with pytest.raises(
        ValueError, match="view must be one of where, more_than_usual, matters, got 'hot'"
    ):
        caption.select(view="hot")


@pytest.mark.parametrize("num_kv_heads", [None, 1])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_relevance_is_attention_times_what_a_little_more_of_it_would_give(
    make_captioner, photos, monkeypatch, attention, num_kv_heads
):
    """Against differences: a little of one weight is added, and the text's probability grows."""
    captioner = make_captioner(attention, num_kv_heads=num_kv_heads)
    features, tokenizer = encoded(captioner, photos[:1]), captioner.tokenizer
    captioner, features = captioner.double(), features._replace(tokens=features.tokens.double())
    ids = tokenizer.encode("a red ring")
    tokens = torch.tensor([[tokenizer.bos_id, *ids, tokenizer.eos_id]])
    found = captioner.read_texts(tokens, features).relevance
    assert found.shape == (1, 2, 2, 4, 24) and not found.requires_grad
    weights = captioner.decode(tokens[:, :-1], features, True).weights
    functional = {"additive": "additive_attention"}.get(attention, "scaled_dot_product_attention")
    plain, added = getattr(modules, functional), {}

    def attend(query, key, value, *args, **kwargs):
        output, given = plain(query, key, value, *args, **kwargs)
        if key.size(2) == 24:  # cross-attention
            layer = added.setdefault("calls", 0)
            added["calls"] += 1
            if layer == added["layer"]:
                head, place, patch = added["where"]
                row = value[:, head % value.size(1), patch]
                output = output.clone()
                output[:, head, place] += 1e-5 * row
        return output, given

    monkeypatch.setattr(modules, functional, attend)

    def total(layer, where):
        added.update(calls=0, layer=layer, where=where)
        logprobs = captioner.decode(tokens[:, :-1], features, True).logits.log_softmax(-1)
        return float(logprobs.gather(2, tokens[:, 1:, None]).sum())

    with torch.no_grad():
        for layer, head, place, patch in [(0, 0, 0, 3), (0, 1, 2, 17), (1, 0, 3, 23), (1, 1, 1, 8)]:
            slope = (total(layer, (head, place, patch)) - total(None, None)) / 1e-5
            expected = max(0.0, slope * float(weights[0, layer, head, place, patch]))
            got = float(found[0, layer, head, place, patch])
            assert got == pytest.approx(expected, rel=1e-3, abs=1e-7)


def test_what_matters_is_attention_times_relevance(captioner, photos):
    caption = captioner.explain(photos[0], "a red ring")
    product = caption.attention * caption.layer_relevance.mean((1, 2))
    expected = product / product.sum((1, 2), keepdim=True)
    torch.testing.assert_close(caption.select(view="matters").attention, expected)
    nothing = dataclasses.replace(caption, layer_relevance=caption.layer_relevance * 0)
    torch.testing.assert_close(nothing.select(view="matters").attention, caption.attention)


def test_a_models_overlay_setting_is_what_it_shows(make_captioner, photos, tmp_path):
    settings = {"overlay_layer": 1, "overlay_head": 0, "overlay_view": "more_than_usual"}
    captioner = make_captioner(**settings)
    captioner.save_pretrained(tmp_path)
    caption = Captioner.from_pretrained(tmp_path).explain(photos[0], "a red ring")
    expected = caption.select(1, 0, "more_than_usual").attention
    torch.testing.assert_close(caption.attention, expected)
    assert not torch.allclose(expected, caption.select().attention)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text must have a word of the vocabulary, got ''"),
        (" \n", "text must have a word of the vocabulary"),
        ("zebra quagga", "text must have a word of the vocabulary, got 'zebra quagga'"),
        ("a ring " * 6, "text must have at most 9 tokens, got 12"),
    ],
)
def test_texts_that_cannot_be_explained(make_captioner, photos, text, message):
    captioner = make_captioner(max_len=10)
    with pytest.raises(ValueError, match=message):
        captioner.explain(photos[0], text)
    assert len(captioner.explain(photos[0], "a ring and a star and a ring and").words) == 9


# ---- the training pass ----


@pytest.mark.parametrize("attention", ["additive", "scaled_dot_product"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_packed_captions_are_read_as_if_alone(make_captioner, records, attention, positions):
    """Captions of different numbers and lengths share a row; none sees another, or the padding."""
    captioner = make_captioner(attention, positions=positions)
    some = [r._replace(captions=r.captions[:n]) for r, n in zip(records, (2, 5, 1))]
    data = CaptionDataset(some, captioner.tokenizer, captioner.preprocess, max_len=64)
    batch = collate([data[i] for i in range(3)])
    with torch.no_grad():
        logits, _ = captioner(batch.images, batch.packed)
        expected = []
        for i in range(3):
            features = captioner.encode(batch.images[i : i + 1])
            for caption in data.captions[i]:
                expected.append(captioner.decode(torch.tensor([caption[:-1]]), features).logits[0])
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-4, atol=1e-4)
    assert len(logits) == len(batch.targets)


def test_captions_of_a_picture_stand_together_in_decode(captioner, photos):
    features = encoded(captioner, photos)
    tokens = torch.randint(4, 20, (6, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, weights = captioner.decode(tokens, features, need_weights=True)
        for row in range(6):
            alone = features._replace(tokens=features.tokens[row // 2 : row // 2 + 1])
            one = captioner.decode(tokens[row : row + 1], alone, need_weights=True)
            torch.testing.assert_close(logits[row], one.logits[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(weights[row], one.weights[0], rtol=1e-3, atol=1e-5)
    assert weights.shape == (6, 2, 2, 7, 24)


# ---- the model folder ----


@pytest.fixture
def folder(make_captioner, tmp_path):
    make_captioner().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def one_line_error(folder):
    with pytest.raises(ValueError) as error:
        Captioner.from_pretrained(folder)
    message = str(error.value)
    assert "\n" not in message and len(message) < 600
    return message


def test_a_loaded_model_is_the_saved_one(captioner, photos, tmp_path):
    captioner.save_pretrained(tmp_path / "model")
    captioner.save_pretrained(tmp_path / "model")  # over the one before
    loaded = Captioner.from_pretrained(tmp_path / "model")
    assert not loaded.training
    assert loaded.config == captioner.config and loaded.preprocess == captioner.preprocess
    features = encoded(captioner, photos)
    tokens = torch.randint(4, 20, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, logits = (c.decode(tokens, features).logits for c in (captioner, loaded))
    assert torch.equal(logits, expected)
    for one, other in zip(loaded.caption(photos), captioner.caption(photos)):
        same_caption(one, other)


def test_a_model_folder_holds_exactly_its_files_and_nothing_pickled(folder):
    assert sorted(path.name for path in folder.iterdir()) == MODEL_FOLDER
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        assert isinstance(json.loads((folder / name).read_text(encoding="utf-8")), dict)
    assert load_file(folder / "model.safetensors")
    assert "pipeline_tag: image-to-text" in (folder / "README.md").read_text(encoding="utf-8")
    for path in folder.iterdir():
        content = path.read_bytes()
        assert not content.startswith((b"PK", b"\x80")) and b"pickle" not in content


@pytest.mark.parametrize("name", [name for name in MODEL_FOLDER if name != "README.md"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert f"is not a vlattn model folder: no {name}" in one_line_error(folder)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", '{"architectures": ["Blip"], "hidden_size": 768}', "unknown setting arch"),
        ("config.json", "[]", "config.json must hold one JSON object"),
        ("config.json", "{", "cannot load"),
        ("config.json", '{"encoder": 5}', "cannot load"),
        ("config.json", '{"dim": "wide"}', "cannot load"),
        ("preprocessor_config.json", '{"do_resize": true}', "do_resize"),
        ("tokenizer.json", "{}", "is not a tokenizer file of vlattn"),
        ("model.safetensors", "not tensors", "cannot load"),
        ("model.safetensors", "", "cannot load"),
    ],
)
def test_foreign_and_damaged_files_are_one_line(folder, name, content, reason):
    (folder / name).write_text(content, encoding="utf-8")
    assert reason in one_line_error(folder)


def test_weights_of_another_model_are_refused(folder, make_captioner, tmp_path):
    """A tolerant load left layers at their random start without a word (X16)."""
    weights = load_file(folder / "model.safetensors")
    key = "decoder.blocks.0.cross_attn.q_proj.weight"
    changes = [
        {"extra": torch.zeros(2)},
        {key: weights[key].repeat(1, 2)},
        {"decoder.embed.weight": weights["decoder.embed.weight"].T},  # a shuffled shape
    ]
    for change in changes:
        save_file(
            {k: v.contiguous() for k, v in (weights | change).items()},
            folder / "model.safetensors",
        )
        assert next(iter(change)) in one_line_error(folder)
    del weights[key]
    save_file(weights, folder / "model.safetensors")
    assert key in one_line_error(folder)
    make_captioner("additive").save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").replace(folder / "model.safetensors")
    assert "score_weight" in one_line_error(folder)


def test_a_hub_id_is_downloaded(folder, photos, monkeypatch):
    asked = []

    def download(repo_id, *, allow_patterns, **options):
        asked.append((repo_id, sorted(allow_patterns), options))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    options = {"revision": "v1", "cache_dir": "cache", "token": "t", "local_files_only": True}
    loaded = Captioner.from_pretrained("someone/tiny-captioner", **options)
    name = "someone/tiny-captioner"
    assert asked == [(name, ["config.json"], options), (name, MODEL_FOLDER, options)]
    expected = Captioner.from_pretrained(folder).caption(photos[:1], max_len=4)
    same_caption(loaded.caption(photos[:1], max_len=4)[0], expected[0])


def test_a_tokenizer_of_the_same_size_with_other_ids_is_refused(folder):
    """The words came out shuffled, and nothing said why (X18)."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(content), encoding="utf-8")
    message = one_line_error(folder)
    assert "tokenizer.json is not the one that the weights were trained with" in message


def test_an_unknown_model_is_one_line(tmp_path, monkeypatch):
    no_hub = "no model folder {}, and none of that name on the hub"
    missing = tmp_path / "no" / "such" / "folder"
    assert one_line_error(missing) == no_hub.format(missing)  # refused as an id, nothing is asked

    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(repo_id, **options):
        raise LocalEntryNotFoundError("cannot find the snapshot\non the Hub,\nand no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert one_line_error("someone/none") == no_hub.format("someone/none")


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "none of that name on the hub" in one_line_error("someone/none")


def test_push_to_hub_uploads_the_model_folder(make_captioner, monkeypatch):
    calls = []

    class Hub:
        def __init__(self, token):
            assert token == "secret"

        def create_repo(self, repo_id, *, private, exist_ok):
            assert private
            calls.append(("create", repo_id, exist_ok))

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            captioner = Captioner.from_pretrained(folder_path)
            card = (Path(folder_path) / "README.md").read_text(encoding="utf-8")
            assert "tokens.\n\nCIDEr 58.9 on the test split.\n\n```python" in card
            calls.append(("upload", repo_id, commit_message, captioner.config))
            return SimpleNamespace(commit_url="https://hub.example/commit/1")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    captioner = make_captioner()
    url = captioner.push_to_hub(
        "someone/tiny",
        scores="CIDEr 58.9 on the test split.",
        private=True,
        token="secret",
        commit_message="first",
    )
    assert url == "https://hub.example/commit/1"
    assert calls == [
        ("create", "someone/tiny", True),
        ("upload", "someone/tiny", "first", captioner.config),
    ]


# ---- the config ----


def test_a_config_is_frozen_and_goes_through_json():
    config = CaptionerConfig(image_size=(64, 96), attention="additive", num_kv_heads=2)
    kept = json.loads(json.dumps(dataclasses.asdict(config)))
    assert CaptionerConfig.from_dict(kept) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dim = 8
    with pytest.raises(ValueError, match="not a vlattn config: unknown setting colour"):
        CaptionerConfig.from_dict({"colour": 1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({name: 0}, f"{name} must be above 0, got 0")
            for name in ("encoder_dim", "encoder_depth", "dim", "depth", "mlp_ratio", "max_len")
        ),
        ({"dim": -8}, "dim must be above 0, got -8"),
        ({"num_registers": -1}, "num_registers must be at least 0, got -1"),
        ({"encoder_classes": True}, "encoder_classes are those of a timm encoder, got .* 'vit'"),
        ({"overlay_layer": 2}, "overlay_layer must be from 0 to 1, got 2"),
        ({"overlay_head": -1}, "overlay_head must be from 0 to 7, got -1"),
        ({"encoder": "resnet"}, "encoder must be 'vit' or 'timm:<name>', got 'resnet'"),
        ({"encoder": "timm:"}, "encoder must be 'vit' or 'timm:<name>', got 'timm:'"),
        ({"attention": "soft"}, "attention must be one of additive, scaled_dot_product"),
        ({"num_heads": 5}, "num_heads"),
    ],
)
def test_settings_that_make_no_captioner(tokenizer, settings, message):
    with pytest.raises(ValueError, match=message):
        Captioner(CaptionerConfig(**settings), tokenizer)


def test_the_toy_of_a_search_is_a_captioner_too(captioner, photos):
    """`beam_search` over a function that decodes each text from its start, without any cache,
    finds what `generate` finds."""
    features, tokenizer = encoded(captioner, photos), captioner.tokenizer
    texts = [[] for _ in photos]

    def step(tokens, rows):
        nonlocal texts
        pictures = [row * len(photos) // len(texts) for row in rows.tolist()]
        texts = [[*texts[row], token] for row, token in zip(rows.tolist(), tokens.tolist())]
        chosen = features._replace(tokens=features.tokens[pictures])
        with torch.no_grad():
            return captioner.decode(torch.tensor(texts), chosen).logits[:, -1]

    expected = beam_search(
        step,
        len(photos),
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        banned=control_ids(tokenizer),
        max_len=10,
        num_beams=4,
    )
    found = captioner.generate(features, num_beams=4, max_len=10)
    assert [best.tokens for (best,) in found] == [best.tokens for (best,) in expected]


# ---- several captions of one picture ----


def test_alternatives_are_different_captions_each_with_its_own_maps(captioner, photos):
    found = captioner.alternatives(photos[1], 5, max_len=9)
    assert len({caption.text for caption in found}) == 5
    order = [(not caption.finished, -caption.score) for caption in found]
    assert order == sorted(order)
    (best,) = captioner.caption([photos[1]], num_beams=5, max_len=9)
    same_caption(found[0], best)
    for caption in found:
        if caption.finished and caption.words:
            alone = captioner.explain(photos[1], caption.text)
            torch.testing.assert_close(caption.attention, alone.attention, rtol=1e-3, atol=1e-5)


def test_drawn_alternatives_repeat_with_their_seed_and_cold_ones_are_one(captioner, photos):
    options = {"temperature": 1.5, "max_len": 8}
    first, again, other = (
        [c.text for c in captioner.alternatives(photos[0], 6, seed=seed, **options)]
        for seed in (3, 3, 4)
    )
    assert first == again != other
    assert len(set(first)) == len(first) > 1
    (cold,) = captioner.alternatives(photos[0], 4, temperature=0, max_len=8)
    (greedy,) = captioner.caption([photos[0]], num_beams=1, max_len=8)
    same_caption(cold, greedy)
