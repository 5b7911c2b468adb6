"""The demo: a picture in, a caption out, each word a button that shows where the model looked.

Start it with `vlattn demo --model FOLDER`, or `launch(captioner)`. A page's caption and maps live
in that page's session; clicking a word draws a map that is already there.
"""

from collections.abc import Iterator
from html import escape
from math import exp
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder
from PIL import Image

from vlattn.captioner import Captioner
from vlattn.data.scenes import scenes
from vlattn.generation import Caption
from vlattn.images import ImageError, open_image
from vlattn.visualization import RAMP

from .panels import HINT, ON_CLICK, View, draw, for_display, view

MAX_BEAMS = 8
_PHOTOGRAPHS = ("cheetah1.jpg", "lion.jpg", "tower.jpg", "bus.png")  # in the gradio package


def launch(
    captioner: Captioner, *, host: str = "127.0.0.1", port: int | None = 7860, block: bool = True
) -> gr.Blocks:
    """Serve the demo.

    Args:
        host: address to listen on; only this machine reaches the default one.
        port: a free one from 7860 on where None.
        block: return only when the server is stopped.

    Returns:
        the running demo; `close()` stops it.
    """
    demo = build_demo(captioner)
    _, url, _ = demo.launch(
        server_name=host,
        server_port=port,
        share=False,
        max_file_size="64mb",
        state_session_capacity=500,
        run_history=False,
        enable_monitoring=False,
        footer_links=[],
        theme=_theme(),
        css_paths=Path(__file__).with_name("style.css"),
        prevent_thread_lock=True,
        quiet=True,
    )
    print(f"vlattn demo on {url} (Ctrl+C stops it)", flush=True)
    if block:
        demo.block_thread()
    return demo


def build_demo(captioner: Captioner) -> gr.Blocks:
    """The page, and its endpoint `/caption`; `launch` adds the look."""
    examples = list(_examples())
    (first,) = captioner.caption(examples[:1])  # says how many there are, and warms up
    _, layers, heads, *_ = first.layer_attention.shape

    def describe(picture: dict[str, Any] | None, num_beams: float) -> Caption:
        if num_beams not in range(1, MAX_BEAMS + 1):
            raise gr.Error(f"num_beams must be a whole number from 1 to {MAX_BEAMS}.")
        return captioner.caption([read_upload(picture)], num_beams=int(num_beams))[0]

    def caption(picture, num_beams):
        """Caption a picture: the text, and its words with their probabilities."""
        written = describe(picture, num_beams)
        words = [{"text": w.text.strip(), "probability": exp(w.logprob)} for w in written.words]
        return written.text.strip(), words

    def write(picture, num_beams):
        """For the page: the caption, or None, and the word with the sharpest map."""
        if picture is None:
            return None, 0
        try:
            written = describe(picture, num_beams)
        except gr.Error as error:
            gr.Warning(error.message)
            return None, 0
        if not written.words:
            gr.Warning("The model wrote no words about this picture.")
            return None, 0
        return for_display(written), int(written.attention.amax((1, 2)).argmax())

    def write_on_demand(picture, num_beams):
        if picture is None:
            gr.Warning("Choose a picture first.")
        return write(picture, num_beams)

    with gr.Blocks(title="vlattn", analytics_enabled=False, delete_cache=(600, 3600)) as demo:
        gr.HTML(
            "<h1>Words that <em>point</em></h1><p>vlattn writes a caption for your picture and "
            "shows, word by word, which region it was looking at.</p>",
            elem_id="title",
            apply_default_css=False,
        )
        written, chosen, shown = gr.State(), gr.State(0), gr.State()
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
                    "up to 100 megapixels; of an animation, the first frame",
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
            with gr.Column(min_width=300, scale=3):
                words = gr.HTML(HINT, js_on_load=ON_CLICK, apply_default_css=False, elem_id="words")
                with gr.Column(visible=False) as evidence:
                    under_map = gr.Image(
                        label="Where the model looked",
                        show_label=False,
                        interactive=False,
                        format="jpeg",
                        buttons=["download", "fullscreen"],
                        alt_text="The picture under the map of the chosen word",
                        elem_id="under-map",
                    )
                    legend = gr.HTML(apply_default_css=False, elem_id="legend")
                    opacity = gr.Slider(0, 1, 0.6, step=0.05, label="Opacity", buttons=[])
                with gr.Accordion("Advanced", open=False):
                    beams = gr.Slider(1, MAX_BEAMS, 3, step=1, label="Beams", buttons=[])
                    with gr.Row():
                        layer, head = _choice("Layer", layers), _choice("Head", heads)
        text = gr.Textbox(visible=False, label="caption")
        details = gr.JSON(visible=False, label="words")

        # Without preprocessing: `open_image` is to read the uploads, not gradio.
        model = {"preprocess": False, "concurrency_id": "model", "concurrency_limit": 1}
        quick = {"api_visibility": "private", "show_progress": "hidden", "queue": False}
        panels = [words, under_map, legend]
        looking = [look, [written, chosen, layer, head, opacity], [shown, evidence, *panels]]
        gr.on([], caption, [picture, beams], [text, details], api_name="caption", **model)
        for events, function in (
            ([button.click], write_on_demand),
            ([picture.change, beams.change], write),
        ):
            gr.on(
                events,
                function,
                [picture, beams],
                [written, chosen],
                api_visibility="private",
                show_progress_on=words,
                **model,
            ).then(*looking, **quick)
        quick["trigger_mode"] = "always_last"
        gr.on([layer.change, head.change], *looking, **quick)
        opacity.change(draw, [shown, chosen, opacity], panels, **quick)
        words.select(choose, [shown, opacity], [chosen, *panels], **quick)
    return demo


def read_upload(picture: dict[str, Any] | None) -> Image.Image:
    """Open an uploaded picture.

    Args:
        picture: gradio's `ImageData` as a dictionary, as it came with the request.

    Raises:
        gr.Error: with one sentence for the visitor.
    """
    if picture is None:
        raise gr.Error("Choose a picture first.")
    # Gradio checks only paths that the request itself marks as files; this one is always checked.
    path = Path(picture["path"] or "").resolve()
    if not path.is_relative_to(Path(get_upload_folder()).resolve()) or not path.is_file():
        raise gr.Error("This picture is not among the uploads: choose it again.")
    try:
        return open_image(path.read_bytes())
    except ImageError as error:
        reason = str(error).removeprefix("cannot read image bytes: ")
        raise gr.Error(f"This file cannot be used: {escape(reason, quote=False)}.") from error


def look(written: Caption | None, chosen: int, layer: int, head: int, opacity: float):
    """Show a caption through the layer and the head chosen, or none."""
    shown = None if written is None else view(written, layer, head)
    return shown, gr.Column(visible=shown is not None), *draw(shown, chosen, opacity)


def choose(shown: View | None, opacity: float, event: gr.SelectData):
    """Show the word that was clicked."""
    known = shown is not None and event.index in range(len(shown.caption.words))
    chosen = int(event.index) if known else 0
    return chosen, *draw(shown, chosen, opacity)


def _choice(name: str, count: int) -> gr.Dropdown:
    """Gives the callbacks 0 for the mean, and n for the n-th."""
    choices = [f"Mean of all {count}", *(f"{name} {i + 1}" for i in range(count))]
    return gr.Dropdown(choices, value=choices[0], type="index", label=name)


def _examples() -> Iterator[Image.Image]:
    """Drawn scenes, and photographs out of the gradio package."""
    for record in scenes("dev", size=256, count=4):
        yield record.image
    folder = Path(gr.__file__).parent / "media_assets" / "images"
    for name in _PHOTOGRAPHS:
        if (folder / name).is_file():
            yield open_image(folder / name)


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
