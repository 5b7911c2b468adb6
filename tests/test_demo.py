"""The demo: through its functions, through HTTP, and in a real browser."""

import gc
import io
import json
import os
import re
import shutil
import sys
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import unescape
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Event
from time import monotonic, sleep

import httpx
import numpy as np
import pytest
import torch
from conftest import find_port
from PIL import Image

gr = pytest.importorskip("gradio", reason="needs vlattn[demo]")

from gradio_client import Client, handle_file  # noqa: E402
from gradio_client.exceptions import AppError  # noqa: E402

from demo.answers import Answers  # noqa: E402
from demo.app import build_demo, launch  # noqa: E402
from demo.glow import as_gif, as_png, at_size, colours, measure  # noqa: E402
from demo.models import Model, pointing_sentence  # noqa: E402
from demo.panels import evidence  # noqa: E402
from demo.uploads import forget_oldest, read_upload  # noqa: E402
from vlattn import cli, model_folder  # noqa: E402
from vlattn.data.scenes import COLOURS  # noqa: E402
from vlattn.images import Preprocess  # noqa: E402
from vlattn.tokenizer import Tokenizer  # noqa: E402
from vlattn.visualization import MIN_CONTRAST, RAMP  # noqa: E402

pytestmark = [  # gradio leaves the event loops open in which it copies files
    pytest.mark.filterwarnings("ignore:unclosed event loop:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

HOSTILE = "<img src=x onerror=alert(1)>${alert(2)}{{value}}`"
CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update"
).split()


@pytest.fixture(scope="module")
def captioner(make_captioner):
    """One whose vocabulary has all colours; three layers, two heads."""
    texts = [f"we see a {colour} circle, and two {colour} stars" for colour in COLOURS]
    tokenizer = Tokenizer.train(texts, kind="word", min_frequency=1)
    return make_captioner(tokenizer=tokenizer, depth=3)


class ColourNamer:
    """Captions a picture by its colour, so that mixed-up results show; black ones by markup."""

    def __init__(self, captioner):
        self.explain = captioner.explain

    def caption(self, images, *, num_beams=3, length_penalty=1.0):
        return [self.one(image) for image in images]

    def alternatives(self, image, count, **options):
        colours = list(COLOURS)[:count]
        return [self.explain(image, f"we see a {colour} circle") for colour in colours]

    def one(self, image):
        mean = np.asarray(image).mean((0, 1))
        colour = min(COLOURS, key=lambda colour: abs(COLOURS[colour] - mean).sum())
        caption = self.explain(image, f"a {colour} circle, and two stars")
        if colour != "black":
            return caption
        return replace(caption, words=(replace(caption.words[0], text=HOSTILE), *caption.words[1:]))


@pytest.fixture(scope="module")
def uploads(tmp_path_factory):
    """The one folder that uploads go to."""
    folder = tmp_path_factory.mktemp("uploads")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder))
        patch.setenv("GRADIO_CACHE_EXAMPLES", "true")  # must not matter
        yield folder


class Serve:
    """Starts servers: the address of one for the given captioners, "tiny", "tiny 2", ..."""

    def __init__(self):
        self.running = []

    def __call__(self, *captioners, port=None, auth=None):
        names = ["tiny", *(f"tiny {i}" for i in range(2, 9))]
        models = [Model(name, captioner) for name, captioner in zip(names, captioners)]
        self.running.append(launch(models, port=port, auth=auth, block=False))
        return self.running[-1].local_url

    def stop(self):
        """The one that was started last."""
        self.running.pop().close(verbose=False)


@pytest.fixture(scope="module")
def serve(uploads):
    serve = Serve()
    yield serve
    while serve.running:
        serve.stop()
    gc.collect()  # what gradio left open, while its warnings are still ignored


@pytest.fixture(scope="module")
def url(serve, captioner):
    return serve(captioner)


@pytest.fixture(scope="module")
def colours_url(serve, captioner):
    return serve(ColourNamer(captioner))


def test_readme_code(url, tmp_path, monkeypatch, photos):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "Client(" in b)
    monkeypatch.chdir(tmp_path)
    photos[0].save("picture.jpg")
    seen = {}
    exec(compile(block.replace("http://127.0.0.1:7860", url), "README.md", "exec"), seen)
    assert seen["words"][0]["text"] == "a"  # the only word of it that the tiny captioner has
    assert seen["text"] == "a"


def plain(folder, colour, size=(90, 60)):
    path = folder / f"{colour}.png"
    Image.new("RGB", size, COLOURS[colour]).save(path)
    return path


def upload(folder, content, name="x.png"):
    """What a request says of an uploaded file."""
    path = folder / name
    path.write_bytes(content)
    return {"path": str(path), "url": None, "orig_name": name}


def encoded(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


NOISE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (60, 90, 3), dtype=np.uint8))
BAD_FILES = {
    "empty.png": b"",
    "text.png": b"not a picture",
    "drawing.svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "cut.jpg": encoded(NOISE, "JPEG")[:1500],
    "huge.png": encoded(Image.new("1", (20000, 20000)), "PNG"),
}


# --- what is drawn --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def caption(captioner):
    picture = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    return captioner.explain(Image.fromarray(picture), "a red circle, and two stars")


def looking_at(caption, *maps):
    """The caption with given maps, one word each."""
    return replace(caption, words=caption.words[: len(maps)], attention=torch.stack(maps))


def test_levels_are_the_words_heat_maps_on_one_scale(caption):
    maps = measure(caption)
    rows, columns = maps.levels.shape[1:]
    assert (rows, columns) == (43, 64)
    heat = [caption.heatmap(i) for i in range(len(caption.words))]
    even = 1 / heat[0].size
    assert maps.times == pytest.approx(max(h.max() for h in heat) / even, rel=0.1)
    for levels, expected in zip(maps.levels, heat):
        for row in range(0, rows, 7):
            for column in range(0, columns, 9):
                y, x = int((row + 0.5) / rows * 200), int((column + 0.5) / columns * 300)
                times = (int(levels[row, column]) - 1) / 254 * maps.times
                assert times == pytest.approx(expected[y, x] / even, abs=0.06 * maps.times)


def test_an_even_map_gets_no_light_and_a_sharp_one_the_top_colour(caption):
    even, sharp = torch.full((4, 6), 1 / 24), torch.zeros(4, 6)
    sharp[1, 4] = 1
    maps = measure(looking_at(caption, even, sharp))
    table = colours(maps.times)
    flat, hot = (table[levels] for levels in maps.levels)
    assert (flat[..., :3].max(), len(np.unique(flat))) < (60, 5)
    y, x = np.unravel_index(maps.levels[1].argmax(), maps.levels[1].shape)
    assert (y * 4 // 43, x * 6 // 64) == (1, 4)
    assert tuple(hot[y, x, :3]) == RAMP[-1]
    assert maps.halves[0] == pytest.approx(0.5, abs=0.01)
    assert maps.halves[1] < 1 / 24
    lone = measure(looking_at(caption, even))
    assert lone.times == MIN_CONTRAST  # no scale stretches a flat map


def test_what_the_model_did_not_see_has_level_zero(caption):
    image = Image.new("RGB", (1440, 2880))
    _, geometry = Preprocess(size=(64, 96), mode="crop")(image)
    maps = measure(replace(caption, image=image, geometry=geometry))
    unseen = np.isnan(replace(caption, image=image, geometry=geometry).heatmap(0))
    share = unseen.mean()
    assert share > 0.5
    assert (maps.levels == 0).mean() == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("mode", ["squeeze", "crop", "pad"])
def test_the_display_copy_shows_the_map_where_the_picture_had_it(caption, mode):
    """Overlays on a shrunk copy were shifted where the model's input was cropped or padded."""
    image = Image.new("RGB", (1440, 2880))
    _, geometry = Preprocess(size=(64, 64), mode=mode)(image)
    large = replace(caption, image=image, geometry=geometry)
    small = at_size(large, 720)
    assert small.image.size == (360, 720)
    expected, got = large.heatmap(2)[2::4, 2::4], small.heatmap(2) / 16
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_allclose(got, expected, rtol=0.1)


def test_words_join_to_the_caption_whatever_they_say(caption, captioner):
    words = (replace(caption.words[0], text=f" {HOSTILE}"), *caption.words[1:])
    hostile = replace(caption, words=words, text=caption.text.replace("a", f" {HOSTILE}", 1))
    for shown in (caption, hostile):
        model = Model(HOSTILE, captioner, pointing=HOSTILE)
        html = evidence([shown, shown], model, HOSTILE)
        assert "<img src=x" not in html
        for text in re.findall(r'<p class="caption".*?</p>', html):
            joined = "".join(part.split(">")[-1] for part in text.split("<"))
            assert unescape(joined) == "".join(word.text for word in shown.words)
            assert text.count("<button") == len(shown.words)


def test_the_first_light_is_that_of_a_word_that_names_something(caption, captioner):
    for named in range(len(caption.words)):
        texts = [" dog" if i == named else (" the", " .")[i % 2] for i in range(len(caption.words))]
        words = tuple(replace(word, text=text) for word, text in zip(caption.words, texts))
        shown = replace(caption, words=words, text="".join(texts))
        html = evidence([shown], Model("tiny", captioner), "")
        data = json.loads(unescape(re.search(r'data-maps="(.*?)"', html)[1]))
        assert data["first"] == named


def test_a_saved_gif_has_a_frame_for_each_word_and_a_png_its_light(caption):
    with Image.open(io.BytesIO(as_gif(caption))) as gif:
        assert (gif.n_frames, gif.width) == (len(caption.words), 480)
        assert gif.height > 320  # the caption stands under the picture
    with Image.open(io.BytesIO(as_png(caption, 2))) as png:
        assert png.size == (1280, 853)
        shown = np.asarray(png, int)
    maps = measure(caption)
    y, x = np.unravel_index(maps.levels[2].argmax(), maps.levels[2].shape)
    around = np.s_[y * 20 : y * 20 + 20, x * 20 : x * 20 + 20]
    plain = np.asarray(at_size(caption, 1280).image, int)
    dark = maps.levels[2].argmin()
    y, x = np.unravel_index(dark, maps.levels[2].shape)
    elsewhere = np.s_[y * 20 : y * 20 + 20, x * 20 : x * 20 + 20]
    lit, dim = ((shown[place].mean() / plain[place].mean()) for place in (around, elsewhere))
    assert dim < 0.5 < lit


# --- models ---------------------------------------------------------------------------------------


class Slow:
    """Notes which pictures are captioned together; the first call lasts until it is let go."""

    def __init__(self):
        self.batches, self.go = [], Event()

    def caption(self, pictures, *, num_beams):
        self.batches.append((num_beams, len(pictures)))
        if len(self.batches) == 1:
            assert self.go.wait(20)
        if num_beams == 7:
            raise ValueError("no seven")
        return [(picture, num_beams) for picture in pictures]


def test_pictures_that_wait_at_the_same_time_are_captioned_together():
    slow = Slow()
    model = Model("slow", slow)
    with ThreadPoolExecutor(32) as pool:
        first = pool.submit(model.caption, "first", num_beams=3)
        while not slow.batches:
            sleep(0.01)
        asked = [(f"picture {i}", 7 if i == 5 else 2 + i % 2) for i in range(24)]
        found = [pool.submit(model.caption, name, num_beams=beams) for name, beams in asked]
        while len(model._waiting) < 24:
            sleep(0.01)
        slow.go.set()
        assert first.result(20) == ("first", 3)
        for (name, beams), answer in zip(asked, found):
            if beams == 7:
                with pytest.raises(ValueError, match="no seven"):
                    answer.result(20)
            else:
                assert answer.result(20) == (name, beams)
    assert sorted(slow.batches) == [(2, 4), (2, 8), (3, 1), (3, 3), (3, 8), (7, 1)]
    assert not model._waiting


def test_the_pointing_score_is_one_honest_sentence_or_absent(tmp_path):
    assert pointing_sentence(tmp_path) == ""
    for content in ('{"captions": {}}', "[3]", '{"grounding": {}}'):
        (tmp_path / "a.json").write_text(content)
        assert pointing_sentence(tmp_path) == ""
    measured = {"phrases": 4321, "pointing": 0.443, "center": 0.381, "correctness": 0.2}
    scores = {"grounding": {"teacher_forced": measured}}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    sentence = pointing_sentence(tmp_path)
    assert all(part in sentence for part in ("4,321 phrases", "44%", "38%"))


def test_the_lines_of_python_give_what_the_page_shows(
    make_captioner, uploads, tmp_path, monkeypatch
):
    make_captioner(dim=24).save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    NOISE.save("picture.jpg", quality=95)
    picture = upload(uploads, Path("picture.jpg").read_bytes(), "picture.jpg")
    answers = Answers([Model.load("tiny")], set())
    panels = {
        "written": answers.write(picture, "tiny", 2, 1.5, "own", 0, 0),
        "others": answers.write_others(picture, "tiny", 3, 0, 1, "where", 2, 1),
        "warm": answers.write_others(picture, "tiny", 3, 1.2, 1, "where", 0, 2),
        "own": answers.look_for(picture, "a red circle", "tiny", "more_than_usual", 1, 0),
    }
    for html in panels.values():
        found = {}
        exec(unescape(re.search(r"<pre>(.*?)</pre>", html, re.DOTALL)[1]), found)
        reading = re.search(r'data-text="([^"]*)" data-maps="([^"]*)"', html)
        assert unescape(reading[1]) == found["caption"].text
        levels = [b64decode(text) for text in json.loads(unescape(reading[2]))["words"]]
        assert levels == [each.tobytes() for each in measure(found["caption"]).levels]
        assert Path("first_word.png").is_file()


def test_the_command_serves_its_models(captioner, tmp_path, monkeypatch, capsys):
    served = []

    def launch(models, **options):
        served.append(([model.name for model in models], options["auth"]))

    monkeypatch.setattr("vlattn.demo.app.launch", launch)
    monkeypatch.setattr(model_folder, "PACKAGED", tmp_path)
    captioner.save_pretrained(tmp_path / "flickr8k-small", dtype=torch.float16)
    captioner.save_pretrained(tmp_path / "b")
    own = str(tmp_path / "b")
    assert cli.main(["demo"]) == 0  # the model that comes with the package
    command = ["demo", "--model", own, "--model", "flickr8k-small", "--auth", "ada:love:lace"]
    assert cli.main(command) == 0
    assert served == [
        (["flickr8k-small"], None),
        ([own, "flickr8k-small"], ("ada", "love:lace")),
    ]
    for wrong in ("ada", ":love", "ada:", ""):
        assert cli.main(["demo", "--auth", wrong]) == 2
        assert capsys.readouterr().err == "vlattn: --auth must be USER:PASSWORD\n"
    assert cli.main(["demo", "--model", str(tmp_path / "none")]) == 2
    assert "no model folder" in capsys.readouterr().err


def test_the_page_says_the_licence_of_each_model(captioner):
    models = [Model("a", captioner, licence="For <i>research</i>."), Model("b", captioner)]
    page = json.dumps(build_demo(models).get_config_file())
    assert "<b>a</b> For &lt;i&gt;research&lt;/i&gt;." in page
    assert "<b>b</b>" not in page


# --- uploads --------------------------------------------------------------------------------------


def test_a_sideways_photo_and_a_clear_ground_are_read_as_everywhere(uploads):
    """The demo's own decoding ignored the EXIF orientation and turned clear areas black."""
    exif = Image.Exif()
    exif[274] = 6
    sideways = Image.new("RGB", (40, 20), "red")
    content = encoded(sideways, "JPEG", exif=exif)
    assert read_upload(upload(uploads, content, "x.jpg")).size == (20, 40)
    clear = Image.new("RGBA", (9, 7), (0, 0, 0, 0))
    assert read_upload(upload(uploads, encoded(clear, "PNG"))).getpixel((3, 3)) == (255, 255, 255)


@pytest.mark.parametrize("name", BAD_FILES)
def test_an_unusable_file_gets_one_sentence_without_its_path(uploads, name):
    with pytest.raises(gr.Error) as caught:
        read_upload(upload(uploads, BAD_FILES[name], name))
    assert caught.value.message.startswith("This file cannot be used: ")
    assert str(uploads) not in caught.value.message
    assert "\n" not in caught.value.message


def test_no_path_outside_of_the_uploads_is_opened(uploads, tmp_path):
    """A path in the body of a request was opened by the server: CVE-2023-51449."""
    secret = tmp_path / "secret.png"
    NOISE.save(secret)
    for path in (
        secret,
        uploads / ".." / secret.name,
        uploads / "none.png",
        "/etc/passwd",
        "",
        None,
    ):
        with pytest.raises(gr.Error, match="not among the uploads"):
            read_upload({"path": path and str(path)})
    with pytest.raises(gr.Error, match=r"^'Choose a picture first.'$"):
        read_upload(None)


def test_uploads_beyond_so_many_files_or_bytes_are_deleted_oldest_first(tmp_path):
    for limits, kept in (({"files": 3}, 3), ({"size": 450}, 4)):
        paths = [tmp_path / f"{i}.png" for i in range(6)]
        for age, path in enumerate(paths):
            path.write_bytes(bytes(100))
            os.utime(path, ns=(10**18 - age, 10**18 - age))
        uploads = {*map(str, paths), str(tmp_path / "gone.png")}
        forget_oldest(uploads, **limits)
        assert [path.exists() for path in paths] == [i < kept for i in range(6)]
        assert uploads == {str(path) for path in paths[:kept]}


# --- over HTTP ------------------------------------------------------------------------------------


http = httpx.Client(timeout=60)


def connect(url, **options):
    patient = {"timeout": 60}
    return Client(url, verbose=False, analytics_enabled=False, httpx_kwargs=patient, **options)


def test_the_endpoint_needs_a_picture_alone(url, captioner, tmp_path):
    NOISE.save(tmp_path / "noise.png")
    client = connect(url)
    (expected,) = captioner.caption([NOISE])
    text, words = client.predict(handle_file(tmp_path / "noise.png"), api_name="/caption")
    assert text == expected.text
    same_words(words, expected)
    for num_beams in (0, 9, 2.5, "3", True):
        with pytest.raises(AppError, match="whole number from 1 to 8"):
            client.predict(handle_file(tmp_path / "noise.png"), num_beams, api_name="/caption")
    with pytest.raises(AppError, match="length_penalty must be a number from 0 to 4"):
        client.predict(handle_file(tmp_path / "noise.png"), 2, -1, api_name="/caption")
    with pytest.raises(AppError, match="model must be one of tiny"):
        client.predict(handle_file(tmp_path / "noise.png"), 2, 1, "/etc", api_name="/caption")


def same_words(words, expected):
    assert [word["text"] for word in words] == [word.text.strip() for word in expected.words]
    probabilities = np.exp([word.logprob for word in expected.words])
    np.testing.assert_allclose([word["probability"] for word in words], probabilities, rtol=1e-4)
    np.testing.assert_allclose([word["map"] for word in words], expected.attention, atol=1e-5)


def test_the_endpoint_for_own_words_takes_a_picture_and_a_text(url, captioner, tmp_path):
    NOISE.save(tmp_path / "noise.png")
    client, picture = connect(url), handle_file(tmp_path / "noise.png")
    expected = captioner.explain(NOISE, "a blue circle")
    text, words = client.predict(picture, "a blue circle", api_name="/explain")
    assert text == "a blue circle"
    same_words(words, expected)
    for wrong in ("", "  ", "x" * 501, None, 3):
        with pytest.raises(AppError, match="caption of 1 to 500 characters"):
            client.predict(picture, wrong, api_name="/explain")
    for wrong, reason in (("&&&", "must have a word"), ("a " * 200, "must have at most 63 tokens")):
        with pytest.raises(AppError, match=reason):
            client.predict(picture, wrong, api_name="/explain")


def test_a_bad_file_leaves_the_endpoint_usable(url, tmp_path):
    """No picture, and pictures that cannot be read (H1), cut (C3), or huge (C4)."""
    client = connect(url)
    for name, reason in {
        "text.png": "not a picture in a known format",
        "empty.png": "it is empty",
        "cut.jpg": "truncated",
        "huge.png": "20000 x 20000 pixels",
    }.items():
        (tmp_path / name).write_bytes(BAD_FILES[name])
        with pytest.raises(AppError, match=f"cannot be used: .*{reason}"):
            client.predict(handle_file(tmp_path / name), api_name="/caption")
    with pytest.raises(AppError, match="Choose a picture first"):
        client.predict(None, api_name="/caption")
    client.predict(handle_file(plain(tmp_path, "red")), api_name="/caption")


def test_every_form_of_a_picture_gets_the_caption_of_the_upright_one(url, tmp_path):
    """Orientation (C1), transparency (C2), an animation's first frame (H1)."""
    client = connect(url)

    def ask(name, kind, image, **options):
        path = tmp_path / name
        path.write_bytes(encoded(image, kind, **options))
        return client.predict(handle_file(path), api_name="/caption")

    picture = NOISE.resize((45, 30)).resize((90, 60), Image.Resampling.NEAREST)
    expected = ask("plain.png", "PNG", picture)
    back = {
        3: Image.Transpose.ROTATE_180,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
    }
    for orientation, method in back.items():
        exif = Image.Exif()
        exif[274] = orientation
        assert ask(f"{orientation}.png", "PNG", picture.transpose(method), exif=exif) == expected
    ring = Image.new("RGBA", (90, 60), (0, 0, 0, 0))
    ring.paste((200, 10, 10, 255), (20, 20, 50, 40))
    flat = Image.new("RGB", (90, 60), "white")
    flat.paste((200, 10, 10), (20, 20, 50, 40))
    assert ask("clear.png", "PNG", ring) == ask("flat.png", "PNG", flat)
    frames = {"save_all": True, "append_images": [flat], "lossless": True}
    assert ask("moving.webp", "WEBP", picture, **frames) == expected


def test_fifty_parallel_requests_get_their_own_captions_and_leave_few_files(
    colours_url, uploads, tmp_path
):
    """H2 and X26: pictures of different content, so that no upload is another one's file."""
    names = list(COLOURS)[:4]
    client = connect(colours_url)
    before = sum(path.is_file() for path in uploads.rglob("*"))

    def ask(i):
        path = tmp_path / f"{i}.png"
        Image.new("RGB", (90 + i, 60), COLOURS[names[i % 4]]).save(path)
        text, words = client.predict(handle_file(path), api_name="/caption")
        return text, len(words)

    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(ask, range(50)))
    assert got == [(f"a {names[i % 4]} circle, and two stars", 7) for i in range(50)]
    files = sum(path.is_file() for path in uploads.rglob("*")) - before
    assert files <= 50  # the uploads alone: no answer is a file


def test_who_waits_sees_a_place_in_the_queue(serve, captioner, tmp_path):
    """More requests than gather for a model: the others are told how many are before them."""
    namer = ColourNamer(captioner)
    go, caption = Event(), namer.caption

    def slowly(images, **options):
        assert go.wait(60)
        return caption(images, **options)

    url = serve(namer)
    namer.caption = slowly
    client, picture = connect(url), handle_file(plain(tmp_path, "red"))
    jobs = [client.submit(picture, api_name="/caption") for _ in range(10)]
    until = monotonic() + 40
    ranks = set()
    while monotonic() < until and not {0, 1} <= ranks:
        sleep(0.1)
        ranks = {job.status().rank for job in jobs}
    go.set()
    assert {0, 1} <= ranks
    assert {job.result(30)[0] for job in jobs} == {"a red circle, and two stars"}


def test_a_large_photograph_is_answered_with_a_small_page(captioner, uploads):
    """Large pictures timed out, and were shown at full size (X28)."""
    content = encoded(Image.new("RGB", (8000, 6000), COLOURS["red"]), "JPEG", quality=95)
    picture = upload(uploads, content, "large.jpg")
    model = Model("m", ColourNamer(captioner))
    html = Answers([model], set()).write(picture, "m", 3, 1, "own", 0, 0)
    assert len(html) < 200_000
    with Image.open(io.BytesIO(b64decode(re.search(r"base64,([^\"]*)", html)[1]))) as shown:
        assert shown.size == (960, 720)


def test_a_hand_made_request_cannot_name_a_server_file(url, tmp_path):
    """Gradio 6.31 checks a path only where the request says `meta`: without it, it was opened."""
    secret = str(plain(tmp_path, "red"))
    meta = {"meta": {"_type": "gradio.FileData"}}
    for body in (
        {"path": secret},
        {"path": secret, **meta},
        {"path": secret, "orig_name": "x.svg"},
    ):
        for name, data in (("caption", [body, 3, 1, "tiny"]), ("explain", [body, "a", "tiny"])):
            call = f"{url}gradio_api/call/{name}"
            event = http.post(call, json={"data": data}).json()["event_id"]
            assert "event: error" in http.get(f"{call}/{event}").text


def test_server_files_are_not_served(url, captioner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    captioner.save_pretrained(tmp_path)
    Path(".env").write_text("secret")
    for path in ("/etc/passwd", "../../etc/passwd", "model.safetensors", ".env"):
        for name in (path, str(Path(path).absolute())):
            assert http.get(f"{url}gradio_api/file={name}").status_code in (403, 404)


def test_the_server_stays_on_this_machine(url):
    assert url.startswith("http://127.0.0.1:")
    config = http.get(f"{url}config").json()
    assert not config["analytics_enabled"]
    assert config["stylesheets"] == []
    public = [d["api_name"] for d in config["dependencies"] if d["api_visibility"] == "public"]
    assert public == ["caption", "explain"]


def test_a_password_is_asked_for(serve, captioner, tmp_path):
    url = serve(captioner, auth=("ada", "lovelace"))
    assert http.get(f"{url}config").status_code == 401
    client = connect(url, auth=("ada", "lovelace"))
    client.predict(handle_file(plain(tmp_path, "red")), api_name="/caption")


def test_a_killed_server_starts_again_in_the_same_place(captioner, tmp_path):
    """By the command, on the same port, with the same captions, and only its uploads left."""
    captioner.save_pretrained(tmp_path / "tiny")
    port = find_port()
    command = [sys.executable, "-c", "import sys; from vlattn.cli import main; sys.exit(main())"]
    command += ["demo", "--model", str(tmp_path / "tiny"), "--port", str(port)]
    environment = os.environ | {"GRADIO_TEMP_DIR": str(tmp_path / "uploads")}
    answers = []
    for _ in range(2):
        server = Popen(command, stdout=PIPE, text=True, env=environment)
        try:
            assert f"http://127.0.0.1:{port}/" in server.stdout.readline()
            client = connect(f"http://127.0.0.1:{port}/")
            answers += [client.predict(handle_file(plain(tmp_path, "red")), api_name="/caption")]
        finally:
            server.kill()
            server.wait(20)
            server.stdout.close()
    assert answers[0] == answers[1]


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs vlattn[dev]")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as session:
        browser = session.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    contexts = []

    def open_page(url, width=1280, **options):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.goto(url)
        page.wait_for_selector("#examples button")
        return page

    yield open_page
    for context in contexts:
        context.close()


def choose_file(page, path):
    """Upload a picture, and wait for its caption."""
    page.set_input_files("input[type=file]", path)
    page.wait_for_selector("#written [aria-pressed=true]")


def words_of(page, panel="#written"):
    return page.locator(f"{panel} .caption [data-word]")


def chosen(page, panel="#written"):
    return int(page.get_attribute(f"{panel} .chosen [aria-pressed=true]", "data-word"))


def light(page, panel="#written"):
    """The light laid over the picture: RGBA of each cell."""
    return page.evaluate(
        """panel => {
            const canvas = document.querySelector(`${panel} .stage canvas`);
            const pen = canvas.getContext("2d");
            return [...pen.getImageData(0, 0, canvas.width, canvas.height).data];
        }""",
        panel,
    )


def test_each_word_has_its_light_by_click_by_hover_and_by_arrow(open_page, colours_url, tmp_path):
    page = open_page(colours_url)
    elsewhere = []
    page.on("request", lambda request: elsewhere.append(request.url))
    choose_file(page, plain(tmp_path, "green"))
    assert page.inner_text("#written .caption") == "a green circle, and two stars"
    words, requests = words_of(page), len(elsewhere)
    lights = []
    for i in range(7):
        words.nth(i).click()
        assert chosen(page) == i
        lights.append(light(page))
        assert words.nth(i).inner_text() in page.inner_text("#written .note b")
    assert len({tuple(each) for each in lights}) == 7

    words.nth(4).hover()
    assert (light(page), chosen(page)) == (lights[4], 6)
    page.mouse.move(5, 5)
    assert light(page) == lights[6]

    words.nth(0).focus()
    page.keyboard.press("ArrowLeft")  # from the chosen last one
    assert (light(page), chosen(page)) == (lights[5], 5)
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert (light(page), chosen(page)) == (lights[1], 1)
    assert page.evaluate("document.activeElement.dataset.word") == "1"

    page.locator("#written .strip button").nth(3).click()
    assert (light(page), chosen(page)) == (lights[3], 3)
    page.locator("#written [name=strength]").fill("0.2")
    assert page.evaluate("document.querySelector('#written .stage canvas').style.opacity") == "0.2"
    assert len(elsewhere) == requests  # the server was not asked
    assert all(address.startswith((colours_url, "data:", "blob:")) for address in elsewhere)


def test_a_click_takes_less_than_a_blink(open_page, colours_url, tmp_path):
    page = open_page(colours_url)
    choose_file(page, plain(tmp_path, "green", size=(900, 700)))
    taken = page.evaluate(
        """async () => {
            const times = [];
            for (const button of document.querySelectorAll("#written .caption [data-word]")) {
                const start = performance.now();
                button.click();
                await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)));
                times.push(performance.now() - start);
            }
            return times;
        }"""
    )
    assert sorted(taken)[len(taken) // 2] < 150


def test_a_region_lights_the_words_that_looked_there(open_page, colours_url, tmp_path):
    page = open_page(colours_url)
    choose_file(page, plain(tmp_path, "green", size=(900, 600)))
    for x, y in ((0.1, 0.2), (0.6, 0.9)):
        box = page.locator("#written .stage").bounding_box()
        page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])
        maps = json.loads(page.get_attribute("#written .reading", "data-maps"))
        cell = int(y * maps["rows"]) * maps["columns"] + int(x * maps["columns"])
        looked = [b64decode(levels)[cell] for levels in maps["words"]]  # of each word, there
        over_even = [w for w in range(7) if (looked[w] - 1) * maps["times"] / 254 > 1]
        ranks = page.eval_on_selector_all(
            "#written .caption [data-rank]",
            "nodes => nodes.map(n => [Number(n.dataset.rank), Number(n.dataset.word)]).sort()",
        )
        assert sorted(word for _, word in ranks) == over_even
        order = [looked[word] for _, word in ranks]
        assert order == sorted(order, reverse=True)
        assert page.is_visible("#written .marker")
        if ranks:
            assert chosen(page) == ranks[0][1]
            assert "strongest first" in page.inner_text("#written .note")
    words_of(page).nth(2).click()
    assert page.locator("#written [data-rank]").count() == 0
    assert not page.is_visible("#written .marker")


def test_other_captions_own_words_and_two_models(
    open_page, serve, captioner, make_captioner, tmp_path
):
    second = make_captioner("additive", tokenizer=captioner.tokenizer)
    url = serve(ColourNamer(captioner), ColourNamer(second))
    page = open_page(url)
    choose_file(page, plain(tmp_path, "blue"))

    page.get_by_role("tab", name="Other captions").click()
    page.get_by_role("button", name="Write other captions").click()
    page.wait_for_selector("#others [aria-pressed=true]")
    rows = page.locator("#others .reading")
    assert rows.count() == 5
    first = light(page, "#others")
    rows.nth(3).locator("[data-word]").nth(2).click()
    assert "chosen" in rows.nth(3).get_attribute("class")
    assert light(page, "#others") != first
    assert page.locator("#others .detail:visible .strip button").count() == (
        rows.nth(3).locator("[data-word]").count()
    )

    page.get_by_role("tab", name="Your words").click()
    page.locator("#own-text textarea").fill("we see two stars")
    page.get_by_role("button", name="Find these words").click()
    page.wait_for_selector("#own [aria-pressed=true]")
    assert page.inner_text("#own .caption") == "we see two stars"
    page.get_by_text("How sure?").locator("visible=true").click()
    assert page.locator("#own tbody tr").count() == 4
    assert "%" in page.inner_text("#own tbody tr >> nth=1")

    page.get_by_role("tab", name="Compare").click()
    page.get_by_role("button", name="Compare on this picture").click()
    page.wait_for_selector("#sides [aria-pressed=true]")
    assert page.locator("#sides h3").all_inner_texts() == ["tiny", "tiny 2"]
    sides = page.locator("#sides .evidence")
    sides.nth(1).locator(".caption [data-word]").nth(4).click()
    for side in (0, 1):
        pressed = sides.nth(side).locator(".caption [aria-pressed=true]")
        assert pressed.get_attribute("data-word") == "4"

    page.get_by_label("Remove Image").click()
    page.wait_for_selector("#sides .hint")
    assert page.locator(".evidence").count() == 0


def test_a_page_outlives_the_server(open_page, serve, captioner, tmp_path):
    """What a page shows is in the page; a server on the same port goes on with it."""
    url = serve(ColourNamer(captioner))
    page = open_page(url)
    choose_file(page, plain(tmp_path, "blue"))
    serve.stop()
    words_of(page).nth(5).click()
    assert chosen(page) == 5
    assert serve(ColourNamer(captioner), port=int(url.rsplit(":", 1)[1].strip("/"))) == url
    page.reload()
    choose_file(page, plain(tmp_path, "red"))
    assert page.inner_text("#written .caption") == "a red circle, and two stars"


def test_what_is_saved(open_page, colours_url, browser, tmp_path):
    page = open_page(colours_url)
    choose_file(page, plain(tmp_path, "green"))
    words_of(page).nth(2).click()
    saved = {}
    for kind in ("png", "gif", "html"):
        with page.expect_download() as download:
            page.click(f"#written [data-save={kind}]")
        saved[kind] = tmp_path / f"saved.{kind}"
        download.value.save_as(saved[kind])
    with Image.open(saved["png"]) as png, Image.open(saved["gif"]) as gif:
        assert (png.size, gif.n_frames) == ((1280, 853), 7)

    alone = browser.new_page()
    asked = []
    alone.on("request", lambda request: asked.append(request.url))
    alone.goto(saved["html"].as_uri())
    alone.wait_for_selector("[aria-pressed=true]")
    alone.locator(".caption [data-word]").nth(2).click()
    assert light(alone, "body") == light(page)
    assert alone.inner_text(".caption") == "a green circle, and two stars"
    assert alone.locator("[data-save]").count() == 0
    assert all(address.startswith(("file:", "data:")) for address in asked)
    alone.close()


def test_trouble_gets_a_sentence_and_the_page_goes_on(open_page, colours_url, tmp_path):
    page = open_page(colours_url)
    button = page.get_by_role("button", name="Caption", exact=True)
    button.click()
    page.get_by_text("Choose a picture first.").wait_for()
    choose_file(page, plain(tmp_path, "red"))
    page.get_by_label("Remove Image").click()
    page.wait_for_selector("#written .hint")
    (tmp_path / "text.png").write_bytes(b"not a picture")
    page.set_input_files("input[type=file]", tmp_path / "text.png")
    page.get_by_text("This file cannot be used: not a picture").wait_for()
    page.get_by_label("Remove Image").click()
    choose_file(page, plain(tmp_path, "blue"))
    assert page.inner_text("#written .caption") == "a blue circle, and two stars"


def test_two_visitors_see_their_own_results(open_page, colours_url, tmp_path):
    """The last visitor's maps were kept for all: a click showed another one's picture."""
    pages = {colour: open_page(colours_url) for colour in ("red", "blue")}
    for colour, page in pages.items():
        choose_file(page, plain(tmp_path, colour))
    for colour, page in pages.items():
        words_of(page).nth(3).click()
        assert page.inner_text("#written .caption") == f"a {colour} circle, and two stars"
        source = page.get_attribute("#written .stage img", "src")
        shown = Image.open(io.BytesIO(b64decode(source.partition("base64,")[2])))
        assert abs(np.asarray(shown, int) - COLOURS[colour]).max() < 4
        with page.expect_download() as download:
            page.click("#written [data-save=html]")
        assert f"a {colour} circle" in Path(download.value.path()).read_text(encoding="utf-8")


def test_examples_are_captioned_by_the_model_that_is_served(open_page, colours_url):
    """Captions of examples were cached on disk, by the model before (X27)."""
    page = open_page(colours_url)
    page.locator("#examples button").first.click()
    page.wait_for_selector("#written [data-word]")
    assert page.inner_text("#written .caption").endswith(" circle, and two stars")


def test_a_word_is_not_run_as_markup_or_code(open_page, colours_url, tmp_path):
    page = open_page(colours_url)
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    choose_file(page, plain(tmp_path, "black"))
    assert words_of(page).first.inner_text() == HOSTILE
    words_of(page).first.click()
    assert page.inner_text("#written .note b") == HOSTILE
    assert page.locator("#written img").count() == 1
    assert not dialogs


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scroll(open_page, colours_url, tmp_path, scheme):
    """A row of examples was wider than the screen (X29)."""
    page = open_page(colours_url, width=390, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    boxes = [b.bounding_box() for b in page.locator("#examples .gallery-item").all()]
    assert all(abs(box["width"] - box["height"]) < 2 for box in boxes)
    choose_file(page, plain(tmp_path, "green", size=(900, 100)))
    page.get_by_text("Settings").click()
    page.get_by_label("Maps").wait_for()
    for summary in page.locator("#written summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
