"""The demo: through its functions, through HTTP, and in a real browser."""

import gc
import io
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

gr = pytest.importorskip("gradio", reason="needs vlattn[demo]")

from gradio_client import Client, handle_file  # noqa: E402
from gradio_client.exceptions import AppError  # noqa: E402

from demo.app import choose, launch, look, read_upload  # noqa: E402
from demo.panels import HINT, draw, for_display, view  # noqa: E402
from vlattn.data.scenes import COLOURS  # noqa: E402
from vlattn.images import Preprocess  # noqa: E402
from vlattn.tokenizer import Tokenizer  # noqa: E402

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

    def caption(self, images, *, num_beams=3):
        return [self.one(image, num_beams) for image in images]

    def one(self, image, num_beams=3):
        mean = np.asarray(image).mean((0, 1))
        colour = min(COLOURS, key=lambda colour: abs(COLOURS[colour] - mean).sum())
        opening = "we see " if num_beams == 1 else ""
        caption = self.explain(image, f"{opening}a {colour} circle, and two stars")
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


@pytest.fixture(scope="module")
def serve(uploads):
    """Start a server for a captioner: its address."""
    running = []

    def start(captioner):
        running.append(launch(captioner, port=None, block=False))
        return running[-1].local_url

    yield start
    for demo in running:
        demo.close(verbose=False)
    gc.collect()  # what gradio left open, while its warnings are still ignored


@pytest.fixture(scope="module")
def url(serve, captioner):
    return serve(captioner)


@pytest.fixture(scope="module")
def colours_url(serve, captioner):
    return serve(ColourNamer(captioner))


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


# --- what is drawn --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def caption(captioner):
    picture = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    return captioner.explain(Image.fromarray(picture), "a red circle, and two stars")


def test_a_click_draws_the_overlay_of_that_word(caption):
    shown = view(for_display(caption), 0, 0)
    for i in range(len(caption.words)):
        expected = np.asarray(for_display(caption).overlay(i, opacity=0.3), int)
        assert abs(draw(shown, i, 0.3).picture - expected).max() <= 1


def test_layers_and_heads_are_counted_from_one_and_zero_is_the_mean(caption):
    for layer, head in ((0, 0), (3, 0), (0, 2), (2, 1)):
        selected = caption.select(layer - 1 if layer else None, head - 1 if head else None)
        shown, *_ = look(caption, 1, layer, head, 0.6)
        assert torch.equal(shown.caption.attention, selected.attention)


@pytest.mark.parametrize("mode", ["squeeze", "crop", "pad"])
def test_the_display_copy_shows_the_map_where_the_picture_had_it(caption, mode):
    """Overlays on a shrunk copy were shifted where the model's input was cropped or padded."""
    image = Image.new("RGB", (1440, 2880))
    _, geometry = Preprocess(size=(64, 64), mode=mode)(image)
    large = replace(caption, image=image, geometry=geometry)
    small = for_display(large)
    assert small.image.size == (360, 720)
    expected, got = large.heatmap(2)[2::4, 2::4], small.heatmap(2) / 16
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_allclose(got, expected, rtol=0.1)


def test_words_join_to_the_caption_and_the_chosen_one_is_marked(caption):
    html = draw(view(caption, 0, 0), 2, 0.6).words
    text, note = html.split('<p class="note"')
    assert "".join(part.split(">")[-1] for part in text.split("<")) == caption.text
    assert text.count('aria-pressed="true"') == 1
    assert text.count("<button") == len(caption.words)
    assert ">circle</b> has a probability of" in note


def test_a_word_is_text_whatever_it_says(caption):
    words = (replace(caption.words[0], text=f" {HOSTILE}"), *caption.words[1:])
    html = draw(view(replace(caption, words=words), 0, 0), 0, 0.6).words
    assert "<img" not in html
    assert html.count("&lt;img") == 2


def test_an_index_that_no_word_has_is_not_trusted(caption):
    shown = view(caption, 0, 0)
    for index in (99, -1, "1", None, [0]):
        event = gr.SelectData(None, {"index": index, "value": ""})
        assert choose(shown, 0.6, event)[0] == 0
    assert choose(None, 0.6, gr.SelectData(None, {"index": 1, "value": ""})) == (
        0,
        HINT,
        None,
        None,
    )


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


NOISE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (60, 90, 3), dtype=np.uint8))
BAD_FILES = {
    "empty.png": b"",
    "text.png": b"not a picture",
    "drawing.svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "cut.jpg": encoded(NOISE, "JPEG")[:1500],
    "huge.png": encoded(Image.new("1", (20000, 20000)), "PNG"),
}


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


# --- over HTTP ------------------------------------------------------------------------------------


def test_the_endpoint_needs_a_picture_alone(url, captioner, tmp_path):
    NOISE.save(tmp_path / "noise.png")
    client = Client(url, verbose=False, analytics_enabled=False)
    (expected,) = captioner.caption([NOISE])
    text, words = client.predict(handle_file(tmp_path / "noise.png"), api_name="/caption")
    assert text == expected.text
    assert [word["text"] for word in words] == [word.text.strip() for word in expected.words]
    probabilities = np.exp([word.logprob for word in expected.words])
    np.testing.assert_allclose([word["probability"] for word in words], probabilities, rtol=1e-4)
    for num_beams in (0, 9, 2.5, "3"):
        with pytest.raises(AppError, match="whole number from 1 to 8"):
            client.predict(handle_file(tmp_path / "noise.png"), num_beams, api_name="/caption")


def test_a_bad_file_leaves_the_endpoint_usable(url, tmp_path):
    client = Client(url, verbose=False, analytics_enabled=False)
    (tmp_path / "text.png").write_bytes(b"not a picture")
    with pytest.raises(AppError, match="cannot be used: not a picture in a known format"):
        client.predict(handle_file(tmp_path / "text.png"), api_name="/caption")
    with pytest.raises(AppError, match="Choose a picture first"):
        client.predict(None, api_name="/caption")
    client.predict(handle_file(plain(tmp_path, "red")), api_name="/caption")


def test_parallel_requests_get_their_own_captions(colours_url, tmp_path):
    names = list(COLOURS)[:4] * 5
    client = Client(colours_url, verbose=False, analytics_enabled=False)

    def ask(name):
        return client.predict(handle_file(tmp_path / f"{name}.png"), api_name="/caption")[0]

    for name in names[:4]:
        plain(tmp_path, name)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, names)) == [f"a {name} circle, and two stars" for name in names]


def test_a_hand_made_request_cannot_name_a_server_file(url, tmp_path):
    """Gradio 6.31 checks a path only where the request says `meta`: without it, it was opened."""
    secret = str(plain(tmp_path, "red"))
    meta = {"meta": {"_type": "gradio.FileData"}}
    for body in (
        {"path": secret},
        {"path": secret, **meta},
        {"path": secret, "orig_name": "x.svg"},
    ):
        call = f"{url}gradio_api/call/caption"
        event = httpx.post(call, json={"data": [body, 3]}).json()["event_id"]
        assert "event: error" in httpx.get(f"{call}/{event}").text


def test_server_files_are_not_served(url, captioner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    captioner.save_pretrained(tmp_path)
    Path(".env").write_text("secret")
    for path in ("/etc/passwd", "../../etc/passwd", "model.safetensors", ".env"):
        for name in (path, str(Path(path).absolute())):
            assert httpx.get(f"{url}gradio_api/file={name}").status_code in (403, 404)


def test_the_server_stays_on_this_machine(url):
    assert url.startswith("http://127.0.0.1:")
    config = httpx.get(f"{url}config").json()
    assert not config["analytics_enabled"]
    assert config["stylesheets"] == []
    assert [d["api_name"] for d in config["dependencies"] if d["api_visibility"] == "public"] == [
        "caption"
    ]


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
    pages = []

    def open_page(url, width=1280, **options):
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        page.set_default_timeout(15_000)
        page.goto(url)
        page.wait_for_selector("#examples button")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()


def choose_file(page, path):
    """Upload a picture, and wait for its caption."""
    page.set_input_files("input[type=file]", path)
    page.wait_for_selector("#words [data-word]")
    page.wait_for_selector("#under-map img")


def picture_after(page, action):
    """The picture that an action brings under the map."""
    before = page.get_attribute("#under-map img", "src")
    action()
    page.wait_for_function(
        "before => document.querySelector('#under-map img').getAttribute('src') != before",
        arg=before,
    )
    source = page.get_attribute("#under-map img", "src")
    return Image.open(io.BytesIO(httpx.get(source).content)).convert("RGB")


def test_from_picture_to_region(open_page, colours_url, tmp_path):
    page = open_page(colours_url)
    elsewhere = []
    page.on("request", lambda request: elsewhere.append(request.url))
    choose_file(page, plain(tmp_path, "green"))
    assert page.inner_text("#words .caption") == "a green circle, and two stars"
    words = page.locator("#words [data-word]")

    chosen = int(page.get_attribute("#words [aria-pressed=true]", "data-word"))
    second, third = [i for i in range(6) if i != chosen][:2]
    clicked = picture_after(page, words.nth(second).click)
    assert clicked.size == (720, 480)
    assert page.get_attribute("#words [aria-pressed=true]", "data-word") == str(second)
    assert "has a probability of" in page.inner_text("#words .note")

    words.nth(third).focus()
    picture_after(page, lambda: page.keyboard.press("Enter"))
    assert page.evaluate("document.activeElement.dataset.word") == str(third)

    opacity = page.get_by_label("range slider for Opacity")
    faint = picture_after(page, lambda: opacity.fill("0"))
    pixels = np.asarray(faint, int)
    assert abs(pixels - COLOURS["green"]).max() < 4
    picture_after(page, lambda: opacity.fill("0.9"))

    page.get_by_text("Advanced").click()
    page.get_by_label("Layer").click()
    picture_after(page, page.get_by_role("option", name="Layer 2").click)
    page.get_by_label("range slider for Beams").fill("1")
    page.wait_for_function("document.querySelector('.caption').textContent.startsWith('we see')")
    assert all(address.startswith((colours_url, "data:", "blob:")) for address in elsewhere)


def test_trouble_gets_a_sentence_and_the_page_goes_on(open_page, colours_url, tmp_path):
    page = open_page(colours_url)
    button = page.get_by_role("button", name="Caption", exact=True)
    button.click()
    page.get_by_text("Choose a picture first.").wait_for()
    choose_file(page, plain(tmp_path, "red"))
    page.get_by_label("Remove Image").click()
    page.get_by_text("Its caption appears here").wait_for()
    (tmp_path / "text.png").write_bytes(b"not a picture")
    page.set_input_files("input[type=file]", tmp_path / "text.png")
    page.get_by_text("This file cannot be used: not a picture").wait_for()
    page.get_by_label("Remove Image").click()
    choose_file(page, plain(tmp_path, "blue"))
    assert page.inner_text("#words .caption") == "a blue circle, and two stars"


def test_two_visitors_see_their_own_results(open_page, colours_url, tmp_path):
    """The last visitor's maps were kept for all: a click showed another one's picture."""
    pages = {colour: open_page(colours_url) for colour in ("red", "blue")}
    for colour, page in pages.items():
        choose_file(page, plain(tmp_path, colour))
        page.get_by_label("range slider for Opacity").fill("0")
    for colour, page in pages.items():
        assert page.inner_text("#words .caption") == f"a {colour} circle, and two stars"
        before = int(page.get_attribute("#words [aria-pressed=true]", "data-word"))
        page.locator("#words [data-word]").nth(before - 1).click()
        page.wait_for_selector(f'#words [data-word="{(before - 1) % 7}"][aria-pressed=true]')
        source = page.get_attribute("#under-map img", "src")
        shown = Image.open(io.BytesIO(httpx.get(source).content))
        assert abs(np.asarray(shown, int) - COLOURS[colour]).max() < 4


def test_examples_are_captioned_by_the_model_that_is_served(open_page, colours_url):
    """Captions of examples were cached on disk, by the model before."""
    page = open_page(colours_url)
    page.locator("#examples button").first.click()
    page.wait_for_selector("#words [data-word]")
    assert page.inner_text("#words .caption").endswith(" circle, and two stars")


def test_a_word_is_not_run_as_markup_or_code(open_page, colours_url, tmp_path):
    page = open_page(colours_url)
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    choose_file(page, plain(tmp_path, "black"))
    assert page.locator("#words [data-word]").first.inner_text() == HOSTILE
    assert page.locator("#words img").count() == 0
    assert not dialogs


def test_a_phone_needs_no_sideways_scroll(open_page, colours_url, tmp_path):
    """A row of examples was wider than the screen."""
    page = open_page(colours_url, width=390, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    choose_file(page, plain(tmp_path, "green", size=(900, 100)))
    page.get_by_text("Advanced").click()
    page.get_by_label("Layer").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
