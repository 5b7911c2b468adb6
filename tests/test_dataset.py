"""Records to batches: nothing of a caption is lost, and no damaged picture gets in."""

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from vlattn.data.dataset import CaptionDataset, collate, epoch_batches, pack
from vlattn.data.records import Phrase, Record
from vlattn.images import VIEWS, Preprocess
from vlattn.tokenizer import Tokenizer

PREPROCESS = Preprocess((64, 96))


def dataset(records, tokenizer, max_len=64, **options):
    return CaptionDataset(records, tokenizer, PREPROCESS, max_len=max_len, **options)


def cut_jpeg(image):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG")
    return buffer.getvalue()[: len(buffer.getvalue()) * 6 // 10]


# ---- packing ----


def test_captions_of_a_picture_share_a_row():
    captions = [[[1, 7, 8, 2], [1, 2], [1, 9, 2]], [[1, 5, 6, 7, 2]]]
    packed, targets = pack(captions)
    assert packed.tokens.tolist() == [[1, 7, 8, 1, 1, 9], [1, 5, 6, 7, 0, 0]]
    assert packed.places.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 0, 0]]
    assert packed.segments.tolist() == [[1, 1, 1, 2, 3, 3], [1, 1, 1, 1, 0, 0]]
    assert targets.tolist() == [7, 8, 2, 2, 9, 2, 5, 6, 7, 2]


def test_a_batch_holds_each_caption_from_begin_to_end(records, tokenizer):
    data = dataset(records, tokenizer)
    batch = collate([data[i] for i in (3, 0, 5)])
    assert batch.indices == (3, 0, 5) and batch.skipped == ()
    assert batch.images.shape == (3, 3, 64, 96)
    targets = iter(batch.targets.tolist())
    for row, index in enumerate(batch.indices):
        for number, text in enumerate(records[index].captions, start=1):
            inputs = batch.packed.tokens[row][batch.packed.segments[row] == number].tolist()
            outputs = [next(targets) for _ in inputs]
            ids = tokenizer.encode(text)
            assert inputs == [tokenizer.bos_id, *ids] and outputs == [*ids, tokenizer.eos_id]
            assert tokenizer.decode(outputs) == text
    assert next(targets, None) is None
    assert data.lengths() == [sum(len(c) - 1 for c in captions) for captions in data.captions]
    assert data.lengths()[3] == int((batch.packed.segments[0] > 0).sum())


def test_long_captions_are_cut_counted_and_not_ended(tokenizer):
    """A caption that was cut got an end token all the same, and taught to stop there."""
    texts = ("a red ring and a blue star", "a red ring", "a red ring and")
    data = dataset([Record(None, texts)], tokenizer, max_len=4)
    ids = [tokenizer.encode(text) for text in texts]
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert data.captions == [[[bos, *ids[0][:4]], [bos, *ids[1], eos], [bos, *ids[2]]]]
    assert data.truncated == 2
    assert all(len(caption) - 1 <= 4 for caption in data.captions[0])
    assert dataset([Record(None, texts)], tokenizer, max_len=8).truncated == 0


def test_captions_take_turns_from_epoch_to_epoch(records, tokenizer):
    data = dataset(records, tokenizer, captions_per_image=2)
    first = [data.epoch(number)[0].captions for number in range(5)]
    assert all(len(captions) == 2 for captions in first)
    shown = [caption for captions in first for caption in captions]
    assert all(shown.count(caption) == 2 for caption in data.captions[0])  # 5 captions, 10 turns
    assert [len(data[i].captions) for i in range(8)] == [5] * 8  # the data set is as it was
    assert data.epoch(3).lengths()[0] == sum(len(c) - 1 for c in first[3])
    everything = dataset(records, tokenizer, captions_per_image=9)
    assert everything.epoch(4)[0].captions == everything[0].captions


# ---- the text ----


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word"])
def test_captions_that_spell_control_tokens_are_plain_text(kind, records):
    """Text that spelled the end token was cut there, and the model learned a fake end (B1)."""
    text = "stop at the <eos> sign , then <pad> <bos> <unk> go on"
    tokenizer = Tokenizer.train([text, text.replace("stop", "halt")] * 2, kind=kind, vocab_size=400)
    data = dataset([Record(records[0].image, (text,))], tokenizer)
    batch = collate([data[0]])
    targets = batch.targets.tolist()
    assert tokenizer.decode(targets) == text
    assert targets.index(tokenizer.eos_id) == len(targets) - 1
    assert not {tokenizer.bos_id, tokenizer.pad_id, tokenizer.unk_id} & set(targets)
    assert batch.packed.tokens[0].tolist().count(tokenizer.bos_id) == 1


def test_the_end_is_a_target_and_padding_is_none(make_captioner, records):
    """With padding and end as one token the loss left out the end, and none was learned (B2)."""
    captioner = make_captioner()
    tokenizer = captioner.tokenizer
    assert tokenizer.pad_id != tokenizer.eos_id
    texts = ("a red ring", "a red ring and a blue star to the left")
    some = [record._replace(captions=(text,)) for record, text in zip(records, texts)]
    data = dataset(some, tokenizer)
    batch = collate([data[0], data[1]])
    assert batch.targets.tolist().count(tokenizer.eos_id) == 2
    assert len(batch.targets) == sum(len(text.split()) + 1 for text in texts)
    with torch.no_grad():
        logits, _ = captioner(batch.images, batch.packed)
    assert logits.shape == (len(batch.targets), tokenizer.vocab_size)
    losses = F.cross_entropy(logits, batch.targets, reduction="none")
    logits[:, tokenizer.eos_id] -= 1  # the end less likely everywhere
    change = F.cross_entropy(logits, batch.targets, reduction="none") - losses
    ends = batch.targets == tokenizer.eos_id
    assert (change[ends] > 0).all() and (change[~ends] < 0).all()


def test_one_token_and_empty_captions_have_a_finite_loss(make_captioner, records):
    """Such captions left no target at all, and the mean over none was NaN (X8)."""
    captioner = make_captioner()
    some = [record._replace(captions=texts) for record, texts in zip(records, [("",), ("a", "")])]
    data = dataset(some, captioner.tokenizer)
    batch = collate([data[0], data[1]])
    assert len(batch.targets) == 4  # end; a, end; end
    logits, _ = captioner(batch.images, batch.packed)
    loss = F.cross_entropy(logits, batch.targets)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in captioner.parameters() if p.grad is not None)


# ---- damaged pictures ----


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damaged_pictures_are_left_out_and_named(records, tokenizer, tmp_path, num_workers):
    """One bad file killed a long run without its name, or trained on grey filler (C3): here the
    first, the last, and all of a batch."""
    image = records[0].image
    contents = {
        "cut.jpg": cut_jpeg(image),
        "empty.jpg": b"",
        "text.jpg": b"no picture",
        "page.jpg": b"<html></html>",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.jpg").mkdir()
    names = [*contents, "folder.jpg", "missing.jpg"]
    bad = [Record(tmp_path / name, ("a red ring",), name=name) for name in names]
    some = [bad[0], *records[:3], bad[1], *bad[2:], *records[3:6], bad[0]]
    data = dataset(some, tokenizer)
    batches = list(
        DataLoader(
            data, 3, collate_fn=collate, num_workers=num_workers, generator=torch.Generator()
        )
    )
    assert [batch.indices for batch in batches] == [(1, 2), (3,), (), (9, 10, 11), ()]
    assert [len(batch.skipped) for batch in batches] == [1, 2, 3, 0, 1]
    reasons = [reason for batch in batches for reason in batch.skipped]
    for name, reason in zip([*names, names[0]], reasons):
        assert repr(str(tmp_path / name)) in reason and "\n" not in reason
    for batch in batches:
        assert len(batch.images) == len(batch.indices) == len(batch.packed.tokens)
        for row, index in enumerate(batch.indices):
            torch.testing.assert_close(batch.images[row], PREPROCESS(some[index].image)[0])
    for name, content in contents.items():
        assert (tmp_path / name).read_bytes() == content  # nobody's files are rewritten


def test_a_batch_of_damaged_pictures_alone_is_a_batch(tokenizer):
    """Leaving out every item of a batch crashed the collate function (X12), and what counts the
    captions of each row."""
    data = dataset([Record(b"", ("a ring",))] * 2, tokenizer)
    batch = collate([data[0], data[1]]).to(torch.device("cpu"))
    assert batch.indices == () and len(batch.skipped) == 2
    assert batch.targets.numel() == 0 and len(batch.images) == 0
    assert int(batch.packed.segments.amax(1).sum()) == 0
    assert collate([]).targets.numel() == 0


def test_kept_features_are_read_in_place_of_pictures(records, tokenizer):
    kept = np.arange(5 * 7, dtype=np.float16).reshape(5, 7)
    some = [records[0], Record(b"", ("a ring",), name="bad.jpg")]
    data = dataset(some, tokenizer, features={(0, 0): kept, (1, 0): None})
    batch = collate([data[0], data[1]])
    assert batch.indices == (0,) and torch.equal(batch.images[0], torch.tensor(kept))
    assert len(batch.skipped) == 1 and "'bad.jpg'" in batch.skipped[0]


def test_every_view_has_its_turn(records, tokenizer):
    data = dataset(records[:4], tokenizer, views=3)
    for index in range(4):
        seen = [data.epoch(number)[index].image for number in range(6)]
        views = [data.pixels(index, view) for view in range(3)]
        order = [next(v for v in range(3) if torch.equal(x, views[v])) for x in seen]
        assert sorted(order[:3]) == [0, 1, 2] and order[3:] == order[:3]


# ---- regions ----


def test_regions_are_the_patches_under_the_boxes_of_the_targets_phrase(tokenizer):
    """Counted on a raster of 12 x 12 points per patch; so has the word after the phrase."""
    boxes = ((0.0, 0.25, 0.5, 0.625), (0.75, 0.5, 1.0, 1.0))
    text = "we see a red ring and a blue star"
    phrase = Phrase(text.index("a red"), text.index(" and"), "object", boxes)
    image = np.zeros((40, 60, 3), np.uint8)
    record = Record(image, ("a blue star", text), phrases=((), (phrase,)))
    data = dataset([record], tokenizer, captions_per_image=1, grid_size=(4, 6)).epoch(1)
    batch = collate([data[0]])
    expected = np.zeros((4, 6))
    for x0, y0, x1, y1 in boxes:
        for row in range(48):
            for column in range(72):
                x, y = (column + 0.5) / 72, (row + 0.5) / 48
                if x0 <= x < x1 and y0 <= y < y1:
                    expected[row // 12, column // 12] += 1 / 144
    words = [tokenizer.decode([token]) for token in batch.targets.tolist()]
    assert words == [*text.split(), ""]
    for number, word in enumerate(words):
        inside = expected if number in (2, 3, 4, 5) else np.zeros((4, 6))
        np.testing.assert_allclose(
            batch.regions[number].view(4, 6), inside, atol=1e-6, err_msg=word
        )


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word"])
def test_phrases_find_their_tokens_in_any_spelling(kind, records):
    """Offsets were those of the decoded text, which has other spaces and lacks unknown words."""
    text = "A  zebra-like  Ring  beside  a RED  star"
    phrase = Phrase(text.index("a RED"), len(text), "object", ((0.0, 0.0, 1.0, 1.0),))
    tokenizer = Tokenizer.train([c for r in records for c in r.captions], kind=kind)
    record = Record(np.zeros((40, 60, 3), np.uint8), (text,), phrases=((phrase,),))
    batch = collate([dataset([record], tokenizer, grid_size=(4, 6))[0]])
    inside = batch.targets[batch.regions.any(1)].tolist()
    assert inside[-1] == tokenizer.eos_id
    assert tokenizer.decode(inside) == "a red star"


@pytest.mark.parametrize("view", range(VIEWS))
def test_regions_of_a_view_are_where_it_shows_them(view, tokenizer):
    """A bright box is where the region is; a box that the view's crop leaves out is nowhere."""
    image = np.zeros((160, 160, 3), np.uint8)
    image[40:60, 100:140] = 255
    box = (100 / 160, 40 / 160, 140 / 160, 60 / 160)
    outside = (0.0, 0.0, 0.02, 0.02) if view in (3, 4) else (0.98, 0.98, 1.0, 1.0)
    phrase = Phrase(0, 5, "object", (box, outside) if view >= 2 else (box,))
    record = Record(image, ("a red star",), phrases=((phrase,),))
    data = dataset([record], tokenizer, views=VIEWS, grid_size=(8, 8)).epoch(view)
    example = data[0]
    shown = (data.pixels(0, view).mean(0) + 1) / 2  # 0 to 1
    shown = shown.unflatten(0, (8, -1)).unflatten(2, (8, -1)).mean((1, 3))
    region = example.regions[0].view(8, 8)
    torch.testing.assert_close(region, shown, atol=0.12, rtol=0)


def test_a_data_set_without_a_grid_has_no_regions(records, tokenizer):
    data = dataset(records, tokenizer)
    assert collate([data[1]]).regions is None


# ---- the order of an epoch ----


@pytest.mark.parametrize(("number", "batch_size"), [(500, 16), (33, 4), (7, 16), (1, 3), (0, 3)])
def test_an_epoch_shows_each_row_once(number, batch_size):
    lengths = np.random.default_rng(0).integers(5, 60, number).tolist()
    batches = epoch_batches(lengths, batch_size, seed=1, epoch=2, window=3)
    assert sorted(i for batch in batches for i in batch) == list(range(number))
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    assert len(batches) == -(-number // batch_size)


def test_epochs_are_reproducible_and_differ():
    """Every epoch and every worker drew the same order (X15)."""
    lengths = np.random.default_rng(0).integers(5, 60, 200).tolist()
    state = torch.get_rng_state()
    first = epoch_batches(lengths, 8, seed=1, epoch=0, window=16)
    assert torch.equal(torch.get_rng_state(), state)  # the global random numbers stay as they are
    assert epoch_batches(lengths, 8, seed=1, epoch=0, window=16) == first
    others = [
        epoch_batches(lengths, 8, seed=s, epoch=e, window=16) for s, e in ((1, 1), (2, 0), (0, 1))
    ]
    assert all(sorted(map(tuple, other)) != sorted(map(tuple, first)) for other in others)


def test_rows_of_like_length_stand_together():
    lengths = np.random.default_rng(0).integers(5, 60, 800).tolist()

    def padding(batches):
        room = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
        return 1 - sum(lengths) / room

    batches = epoch_batches(lengths, 16, seed=0, epoch=0, window=16)
    order = [i for batch in batches for i in batch]
    unsorted = [order[i : i + 16] for i in range(0, 800, 16)]
    plain = np.random.default_rng(1).permutation(800).reshape(-1, 16).tolist()
    assert padding(batches) == padding(unsorted) < 0.1 < 0.35 < padding(plain)
    means = [np.mean([lengths[i] for i in batch]) for batch in batches]
    assert means != sorted(means) and abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.5
