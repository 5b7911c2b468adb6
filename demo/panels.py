"""What the page says of a picture, as HTML: captions, maps, how sure they are, where to save them.

What a model or a visitor wrote is text, and escaped here. `gr.HTML` must take it as a value and not
as a property of a template, which would run `${...}`.
"""

import io
import json
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from math import exp
from pathlib import Path

from vlattn.caption import Caption
from vlattn.evaluation import NEVER_LAST
from vlattn.metrics import tokenize
from vlattn.visualization import RAMP

from .glow import Maps, at_size, colours, measure
from .models import Model

HERE = Path(__file__).parent
HINT = '<p class="hint">Choose a picture. Its caption appears here, each word a button.</p>'


def evidence(captions: Sequence[Caption], model: Model, python: str, *, saving: bool = True) -> str:
    """One article: the picture, its captions, and where the model looked for each word.

    Args:
        captions: of one picture, each with at least one word.
        python: the lines that give the same result.
        saving: with the buttons that save it.
    """
    shown = [at_size(caption, 960) for caption in captions]
    maps = [measure(caption) for caption in shown]
    readings = "".join(
        _reading(i, c, m, len(captions)) for i, (c, m) in enumerate(zip(shown, maps))
    )
    details = "".join(_detail(i, c, m) for i, (c, m) in enumerate(zip(shown, maps)))
    stream = io.BytesIO()
    shown[0].image.save(stream, "JPEG", quality=86)
    width, height = shown[0].image.size
    pointing = f'<p class="pointing">{escape(model.pointing)}</p>' if model.pointing else ""
    return (
        f'<article class="evidence" data-model="{escape(model.name)}">'
        f'<div class="readings">{readings}</div>'
        f'<p class="note" role="status"></p>'
        f'<figure class="stage" style="--shape: {width / height:.4f}"><img alt="The picture" '
        f'src="data:image/jpeg;base64,{_text(stream.getvalue())}">'
        '<canvas aria-hidden="true"></canvas><span class="marker" hidden></span></figure>'
        f"{_legend()}{details}{pointing}"
        f'<details class="python"><summary>Use from Python</summary><pre>{escape(python)}</pre>'
        f"</details>{_SAVE if saving else ''}</article>"
    )


def saved_page(article: str) -> str:
    """An article as a page of its own, which needs nothing else."""
    style = (HERE / "style.css").read_text(encoding="utf-8")
    script = (HERE / "page.js").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>vlattn</title>'
        '<meta name="viewport" content="width=device-width"><style>'
        f"{style}</style><body class='saved'>{article}<script>"
        f"{{const element = document.body, watch = () => {{}}; {script}}}</script></body></html>"
    )


def python_lines(model: str, call: str) -> str:
    """The four lines that give what the page shows."""
    return (
        "from vlattn import Captioner\n\n"
        f"captioner = Captioner.from_pretrained({model!r})\n"
        f"{call}\n"
        'caption.overlay(0).save("first_word.png")'
    )


_SAVE = (
    '<div class="save"><span>Save</span>'
    '<button type="button" data-save="png">This word, PNG</button>'
    '<button type="button" data-save="gif">All words, GIF</button>'
    '<button type="button" data-save="html">Everything, one HTML file</button></div>'
)


def _reading(index: int, caption: Caption, maps: Maps, count: int) -> str:
    """A caption's words as buttons, and their maps."""
    data = {
        "rows": maps.levels.shape[1],
        "columns": maps.levels.shape[2],
        "times": round(maps.times, 3),
        "first": _first(caption, maps),
        "colours": _text(colours(maps.times).tobytes()),
        "words": [_text(levels.tobytes()) for levels in maps.levels],
    }
    buttons = []
    for i, (word, half) in enumerate(zip(caption.words, maps.halves)):
        text, probability = word.text.strip(), exp(word.logprob)
        buttons.append(
            f"{'' if text == word.text else ' '}"
            f'<button type="button" data-word="{i}" data-probability="{probability:.4f}" '
            f'data-half="{half:.4f}" style="--probability: {probability:.3f}; --i: {i}">'
            f"{escape(text)}</button>"
        )
    score = f'<span class="score">{exp(caption.score):.2f}</span>' if count > 1 else ""
    return (
        f'<section class="reading" data-reading="{index}" data-text="{escape(caption.text)}" '
        f'data-maps="{escape(json.dumps(data))}">'
        f'<p class="caption" dir="auto" role="group" aria-label="Caption">{"".join(buttons)}</p>'
        f"{score}</section>"
    )


def _first(caption: Caption, maps: Maps) -> int:
    """The word that is lit at first: of those that name something, the one that points best."""
    names = [i for i, word in enumerate(caption.words) if set(tokenize(word.text)) - NEVER_LAST]
    return min(names or range(len(caption.words)), key=lambda i: maps.halves[i])


def _detail(index: int, caption: Caption, maps: Maps) -> str:
    """The strip of small maps, and how sure the model is of each word."""
    cells, rows = [], []
    for i, (word, half) in enumerate(zip(caption.words, maps.halves)):
        text, probability = escape(word.text.strip()), exp(word.logprob)
        cells.append(
            f'<button type="button" data-word="{i}"><canvas></canvas><span>{text}</span></button>'
        )
        rows.append(
            f'<tr><th scope="row">{text}</th>{_bar(probability)}{_bar(max(0, 1 - 2 * half), half)}'
            "</tr>"
        )
    return (
        f'<div class="detail" data-reading="{index}"><div class="strip">{"".join(cells)}</div>'
        '<details class="sure"><summary>How sure?</summary><table><thead><tr><th>Word</th>'
        "<th>Probability</th><th>Half of its attention is on</th></tr></thead><tbody>"
        f"{''.join(rows)}</tbody></table><p>Probability is how likely the model found the word at "
        "its place. Attention spread evenly would have its half on 50 % of the picture.</p>"
        "</details></div>"
    )


def _bar(share: float, value: float | None = None) -> str:
    value = share if value is None else value
    return f'<td><i style="--share: {share:.3f}"></i>{value:.0%}</td>'


def _legend() -> str:
    """The scale of colours, and how strong they are laid on."""
    ramp = ", ".join(f"rgb{colour}" for colour in RAMP)
    return (
        '<div class="legend"><span>even attention or less</span>'
        f'<div class="ramp" style="background: linear-gradient(to right, {ramp})"></div>'
        "<span>most</span>"
        '<label>Glow <input type="range" name="strength" min="0" max="1" step="0.05" value="0.75">'
        "</label></div>"
    )


def _text(content: bytes) -> str:
    return b64encode(content).decode()
