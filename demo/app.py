"""The demo: a picture in, a caption out, each word a button that shows where the model looked.

Start it with `vlattn demo --model FOLDER`, or `launch([Model.load(FOLDER)])`. The server keeps
nothing about a visitor: what a page shows is in the page, and a click on a word is answered there.
"""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import gradio as gr
from PIL import Image

from vlattn.data.scenes import scenes
from vlattn.images import open_image
from vlattn.visualization import RAMP

from .answers import MAX_BEAMS, MAX_PENALTY, MAX_TEMPERATURE, MAX_TEXT, OWN, Answers, in_panel
from .models import Model
from .panels import HERE, HINT
from .uploads import MAX_PIXELS

_PHOTOGRAPHS = ("cheetah.jpg", "cheetah2.jpg", "lion.jpg", "tower.jpg")  # in the gradio package
_AT_ONCE = 8  # requests that gather for a model; who waits longer sees a place in the queue
_VIEWS = [
    ("As the model points best", OWN),
    ("Where each word looked", "where"),
    ("Where it looked more than the other words", "more_than_usual"),
    ("Where looking mattered to the word", "matters"),
]
_DOWNLOAD = """(file) => {
    if (!file) return;
    const link = document.createElement("a");
    link.href = file.address;
    link.download = file.name;
    link.click();
}"""


def launch(
    models: Sequence[Model],
    *,
    host: str = "127.0.0.1",
    port: int | None = 7860,
    auth: tuple[str, str] | None = None,
    block: bool = True,
) -> gr.Blocks:
    """Serve the demo.

    Args:
        models: the first one writes unless another is chosen; two or more can be compared.
        host: address to listen on; only this machine reaches the default one.
        port: a free one from 7860 on where None.
        auth: user and password that the page asks for.
        block: return only when the server is stopped.

    Returns:
        the running demo; `close()` stops it.
    """
    demo = build_demo(models)
    demo.queue(max_size=200)
    _, url, _ = demo.launch(
        server_name=host,
        server_port=port,
        auth=auth,
        share=False,
        max_file_size="64mb",
        run_history=False,
        enable_monitoring=False,
        footer_links=[],
        theme=_theme(),
        css_paths=HERE / "style.css",
        prevent_thread_lock=True,
        quiet=True,
    )
    print(f"vlattn demo on {url} (Ctrl+C stops it)", flush=True)
    if block:
        demo.block_thread()
    return demo


def build_demo(models: Sequence[Model]) -> gr.Blocks:
    """The page, and its endpoints `/caption` and `/explain`; `launch` adds the look."""
    examples = list(_examples())
    # Captioning once says how many layers and heads there are, and warms up.
    shapes = [model.caption(examples[0]).layer_attention.shape for model in models]
    layers, heads = (min(shape[i] for shape in shapes) for i in (1, 2))
    names = [model.name for model in models]
    script = (HERE / "page.js").read_text(encoding="utf-8")

    def panel(name: str) -> gr.HTML:
        return gr.HTML(HINT, js_on_load=script, apply_default_css=False, elem_id=name)

    def slider(low: float, high: float, value: float, step: float, label: str) -> gr.Slider:
        return gr.Slider(low, high, value, step=step, label=label, buttons=[])

    with gr.Blocks(title="vlattn", analytics_enabled=False, delete_cache=(300, 3600)) as demo:
        gr.HTML(
            "<h1>Words that <em>point</em></h1><p>vlattn writes a caption for your picture and "
            "shows, word by word, which region it was looking at.</p>",
            elem_id="title",
            apply_default_css=False,
        )
        with gr.Row(elem_id="columns"):
            with gr.Column(min_width=300, scale=2):
                picture = gr.Image(
                    label="Picture",
                    show_label=False,
                    sources=["upload", "clipboard", "webcam"],
                    format="png",
                    height=300,
                    buttons=[],
                    placeholder="Drop a picture here, or click to choose one\n"
                    f"up to {MAX_PIXELS // 1_000_000} megapixels; of an animation, the first frame",
                )
                button = gr.Button("Caption", variant="primary")
                gr.Examples(
                    [[example] for example in examples],
                    picture,
                    cache_examples=False,
                    label="Or try one of these",
                    examples_per_page=len(examples),
                    api_visibility="private",
                    elem_id="examples",
                )
                with gr.Accordion("Settings", open=False):
                    model = gr.Dropdown(names, label="Model", visible=len(names) > 1)
                    beams = slider(1, MAX_BEAMS, 3, 1, "Beams")
                    penalty = slider(0, MAX_PENALTY, 1, 0.1, "Length: more is longer")
                    view = gr.Dropdown(_VIEWS, value=OWN, label="Maps")
                    with gr.Row(visible=False) as parts:
                        layer, head = _choice("layer", layers), _choice("head", heads)
            with gr.Column(min_width=300, scale=3), gr.Tabs(elem_id="tabs"):
                with gr.Tab("Caption"):
                    written = panel("written")
                with gr.Tab("Other captions"):
                    with gr.Row():
                        count = slider(2, MAX_BEAMS, 5, 1, "How many")
                        warmth = slider(0, MAX_TEMPERATURE, 0, 0.1, "Temperature: above 0 draws")
                    more = gr.Button("Write other captions")
                    others = panel("others")
                with gr.Tab("Your words"):
                    text = gr.Textbox(
                        label="text",
                        show_label=False,
                        placeholder="a dog runs on the beach",
                        max_length=MAX_TEXT,
                        elem_id="own-text",
                    )
                    look = gr.Button("Find these words")
                    own = panel("own")
                with gr.Tab("Compare", visible=len(names) > 1):
                    with gr.Row():
                        one = gr.Dropdown(names, value=names[0], label="One")
                        other = gr.Dropdown(names, value=names[-1], label="Other")
                    both = gr.Button("Compare on this picture")
                    sides = panel("sides")
        gr.HTML(_footer(models), elem_id="footer", apply_default_css=False)
        answer, details = gr.Textbox(visible=False, label="caption"), gr.JSON(visible=False)
        file = gr.JSON(visible=False)
        answers = Answers(models, demo.upload_file_set)

        # Without preprocessing: `open_image` is to read the uploads, not gradio.
        asking = {"preprocess": False, "concurrency_id": "models", "concurrency_limit": _AT_ONCE}
        result = [answer, details]
        inputs = [picture, beams, penalty, model]
        gr.on([], answers.caption, inputs, result, api_name="caption", **asking)
        inputs = [picture, text, model]
        gr.on([], answers.explain, inputs, result, api_name="explain", **asking)

        asking |= {"api_visibility": "private", "trigger_mode": "always_last"}
        maps = [view, layer, head]
        write, inputs = in_panel(answers.write), [picture, model, beams, penalty, *maps]
        button.click(write, inputs, written, **asking)
        settings = [control.change for control in (model, beams, penalty, *maps)]
        quietly = _unless_empty(write)
        gr.on([picture.change, *settings], quietly, inputs, written, **asking)
        picture.change(
            lambda: [HINT] * 3, None, [others, own, sides], queue=False, api_visibility="private"
        )
        view.change(
            lambda view: gr.Row(visible=view != OWN),
            view,
            parts,
            queue=False,
            api_visibility="private",
        )
        for events, function, inputs, output in (
            (
                [more.click],
                answers.write_others,
                [picture, model, count, warmth, penalty, *maps],
                others,
            ),
            ([look.click, text.submit], answers.look_for, [picture, text, model, *maps], own),
            ([both.click], answers.compare, [picture, one, other, beams, penalty, *maps], sides),
        ):
            gr.on(events, in_panel(function), inputs, output, **asking)
        for shown in (written, others, own, sides):
            shown.click(answers.save, [picture, *maps], file, **asking).success(
                None, file, js=_DOWNLOAD, api_visibility="private"
            )
    return demo


def _unless_empty(write):
    """A page without a picture shows what to do, not a warning."""
    return lambda picture, *settings: HINT if picture is None else write(picture, *settings)


def _choice(name: str, count: int) -> gr.Dropdown:
    """Gives the callbacks 0 for the mean, and n for the n-th."""
    choices = [(f"Mean of all {count} {name}s", 0)]
    choices += [(f"{name.capitalize()} {i + 1}", i + 1) for i in range(count)]
    return gr.Dropdown(choices, value=0, label=name.capitalize())


def _examples() -> Iterator[Image.Image]:
    """Photographs out of the gradio package, and drawn scenes."""
    folder = Path(gr.__file__).parent / "media_assets" / "images"
    for name in _PHOTOGRAPHS:
        if (folder / name).is_file():
            yield open_image(folder / name)
    for record in scenes("dev", size=256, count=4):
        yield record.image


def _footer(models: Sequence[Model]) -> str:
    notes = [
        f"<p><b>{escape(model.name)}</b> {escape(model.licence)}</p>"
        for model in models
        if model.licence
    ]
    return f"{''.join(notes)}<p>Pictures are kept for at most an hour, captions not at all.</p>"


def _theme() -> gr.themes.Base:
    """System fonts, and the middle of the heat map's colours as the accent."""
    accent, bright = ("#{:02x}{:02x}{:02x}".format(*RAMP[i]) for i in (5, 6))
    return gr.themes.Base(
        primary_hue="rose",
        neutral_hue="stone",
        radius_size="lg",
        font=["ui-sans-serif", "system-ui", "Segoe UI", "Roboto", "Helvetica", "sans-serif"],
        font_mono=["ui-monospace", "Consolas", "monospace"],
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="*neutral_400",
        block_background_fill="white",
        block_background_fill_dark="*neutral_900",
        background_fill_secondary="*neutral_200",
        color_accent=accent,
        slider_color=accent,
        slider_color_dark=accent,
        button_primary_background_fill=accent,
        button_primary_background_fill_dark=accent,
        button_primary_background_fill_hover=bright,
        button_primary_background_fill_hover_dark=bright,
    )
