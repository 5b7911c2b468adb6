"""`report.html`: scores, the best, median and worst captions and words, and curves, in one file."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vlattn.captioner import Captioner
from vlattn.data.records import Record
from vlattn.faithfulness import NAMES
from vlattn.files import write_aside
from vlattn.grounding import Scores
from vlattn.images import Box
from vlattn.metrics import Scores as CaptionScores
from vlattn.visualization import contact_sheet

SHOWN = 6  # of the best, of the median, and of the worst
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c1c22; background: #fff }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #d9d9de }
th:first-child, td:first-child { text-align: left }
.words { display: flex; flex-wrap: wrap; gap: 1rem }
figure { margin: 0; width: 11.5rem } figcaption { font-size: .85rem }
img, svg { max-width: 100% } .note { color: #6e6e78 }
"""
MEASURES = {
    "phrases": "phrases",
    "correctness": "attention correctness",
    "uniform": "of the uniform map",
    "pointing": "pointing",
    "center": "of the centre",
    "pointing_large": "pointing, boxes of 5 % or more",
    "center_large": "of the centre",
    "iou": "IoU",
    "iou_uniform": "of the uniform map",
    "rank": "rank of the boxes' patches",
}
COLOURS = dict(zip(NAMES, ("#bc3754", "#d9a3ae", "#1f6fb4", "#a5c4de")))


def write_report(
    path: Path,
    captioner: Captioner,
    records: Sequence[Record],
    report: Mapping[str, Any],
    written: Mapping[str, str],
    scores: CaptionScores,
    grounded: Scores | None,
) -> None:
    """Replaces the file in one step; it needs no other file and no server.

    Args:
        records: what was evaluated.
        report: what `evaluate --json` writes.
        written, scores: the captions and their scores.
        grounded: the scores of the reference captions' phrases, where they were measured.
    """
    captions, grounding = report["captions"], report.get("grounding", {})
    names = [*(f"BLEU-{n}" for n in range(1, 5)), "ROUGE-L", "CIDEr", "images"]
    values = [*captions["bleu"], captions["rouge_l"], captions["cider"]]
    parts = ["<h1>A captioner's report</h1>", "<h2>Captions</h2>"]
    parts.append(_table(["", *names], [["", *map(_number, values), f"{captions['images']:,}"]]))
    if grounded is not None:
        parts.append("<h2>Words and regions</h2>")
        parts += [
            f"<h3>{'Reference' if how == 'teacher_forced' else 'Written'} captions</h3>"
            + _grounding_table(grounding[how])
            for how in ("teacher_forced", "generated")
            if how in grounding
        ]
        parts += _words(captioner, records, grounded)
    if "faithfulness" in grounding:
        parts.append(_curves(grounding["faithfulness"]))
    parts += _captions(captioner, records, written, scores)
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>Report</title><style>{STYLE}</style><body>{''.join(parts)}</body></html>"
    )
    with write_aside(path) as aside:
        aside.write_text(page, encoding="utf-8")


def _number(value: float | None) -> str:
    return "–" if value is None or value != value else f"{100 * value:.1f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head_cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><tr>{head_cells}</tr>{body}</table>"


def _grounding_table(summary: Mapping[str, Any]) -> str:
    """A row per measure, a column for all phrases and one per kind."""
    kinds = sorted(summary["kinds"], key=lambda kind: -summary["kinds"][kind]["phrases"])
    columns = [summary, *(summary["kinds"][kind] for kind in kinds)]
    rows = [
        [title, *(f"{c[key]:,}" if key == "phrases" else _number(c[key]) for c in columns)]
        for key, title in MEASURES.items()
    ]
    return _table(["", "all", *kinds], rows)


def _best_median_worst(order: Sequence[int]) -> dict[str, Sequence[int]]:
    """Some of each; `order` is from the best to the worst."""
    count = min(SHOWN, -(-len(order) // 3))
    middle = (len(order) - count) // 2
    best, median = order[:count], order[middle : middle + count]
    return {"Best": best, "Median": median, "Worst": order[-count:]}


def _words(captioner: Captioner, records: Sequence[Record], grounded: Scores) -> list[str]:
    parts = [
        '<p class="note">Words by the share of their map inside their boxes, less that of the '
        "uniform map. Boxes are people's.</p>"
    ]
    order = np.argsort(grounded.uniform - grounded.correctness, kind="stable")
    for title, places in _best_median_worst(order).items():
        figures = []
        for place in places:
            index, text, word = grounded.places[place]
            caption = captioner.explain(records[index].image, text)
            found = caption.words[word]
            picture = _outlined(caption.overlay(word), grounded.boxes[place])
            marked = (
                f"{escape(text[: found.start])}<b>{escape(found.text)}</b>"
                if caption.text == text
                else f"<b>{escape(found.text)}</b> in: {escape(text)}"
            )
            rest = escape(text[found.end :]) if caption.text == text else ""
            share = f"{100 * grounded.correctness[place]:.0f} % inside"
            figures.append(
                f"<figure>{_picture(picture, 230)}"
                f"<figcaption>{marked}{rest}<br>{share}</figcaption></figure>"
            )
        parts.append(f'<h3>{title} words</h3><div class="words">{"".join(figures)}</div>')
    return parts


def _outlined(picture: Image.Image, boxes: Sequence[Box]) -> Image.Image:
    pen, (width, height) = ImageDraw.Draw(picture), picture.size
    line = max(1, min(picture.size) // 100)
    for x0, y0, x1, y1 in boxes:
        corners = (x0 * (width - 1), y0 * (height - 1), x1 * (width - 1), y1 * (height - 1))
        pen.rectangle(corners, outline="#37d5ff", width=line)
    return picture


def _picture(image: Image.Image, side: int) -> str:
    small, content = image.convert("RGB"), io.BytesIO()
    small.thumbnail((side, side))
    small.save(content, "JPEG", quality=85)
    return (
        f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}">'
    )


def _captions(
    captioner: Captioner,
    records: Sequence[Record],
    written: Mapping[str, str],
    scores: CaptionScores,
) -> list[str]:
    """Contact sheets of captions by their own CIDEr; by ROUGE-L where that is not defined."""
    image_of = {record.name: record.image for record in records}
    names = [name for name in scores.per_image if written[name].strip()]
    key = "rouge_l" if np.isnan(scores.cider) else "cider"
    order = sorted(names, key=lambda name: -scores.per_image[name][key])
    return [
        f"<h2>{title} captions</h2>"
        + _picture(contact_sheet([captioner.explain(image_of[n], written[n]) for n in some]), 2400)
        for title, some in _best_median_worst(order).items()
        if some
    ]


def _curves(curves: Mapping[str, Any]) -> str:
    """Log-probability over the share of patches, as a drawing."""
    width, height, left, bottom = 560, 260, 60, 40
    values = [value for name in NAMES for value in curves[name]] + [curves["whole"]]
    low, high = min(values) - 0.1, max(values) + 0.1

    def point(share: float, value: float) -> str:
        x = left + share * (width - left - 10)
        return f"{x:.1f},{10 + (high - value) / (high - low) * (height - bottom - 10):.1f}"

    lines, texts = [], []
    for name in NAMES:
        pairs = list(zip(curves["shares"], curves[name]))
        ends = [(0, curves["whole"])] if name.startswith("deletion") else []
        points = " ".join(point(*pair) for pair in (*ends, *pairs))
        lines.append(
            f'<polyline fill="none" stroke="{COLOURS[name]}" stroke-width="2" points="{points}"/>'
        )
        texts.append(
            f'<tspan x="{left + 10}" dy="16" fill="{COLOURS[name]}">'
            f"{name.replace('_random', ' of random patches')}</tspan>"
        )
    axis = (
        f'<text x="{left - 6}" y="18" text-anchor="end">{high:.1f}</text>'
        f'<text x="{left - 6}" y="{height - bottom}" text-anchor="end">{low:.1f}</text>'
        f'<text x="{left}" y="{height - 16}">0</text>'
        f'<text x="{width - 10}" y="{height - 16}" text-anchor="end">share of the patches: 1</text>'
    )
    return (
        "<h2>Does the model need what it looks at?</h2>"
        f'<p class="note">Log-probability of {curves["words"]:,} words, one a picture, as their '
        "map's hottest patches are hidden (deletion) or alone shown (insertion), against random "
        f"ones. Mean gain: {curves['deletion_gain']:.2f} and {curves['insertion_gain']:.2f} nats."
        f'</p><svg viewBox="0 0 {width} {height}" width="{width}" font-size="13">{"".join(lines)}'
        f'{axis}<text y="{height - bottom - 76}">{"".join(texts)}</text></svg>'
    )
