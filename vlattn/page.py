"""A page of text, tables, matrices and pictures: printed as it grows, and kept as one HTML file."""

import base64
import io
import math
import textwrap
import unicodedata
from collections.abc import Sequence
from html import escape
from pathlib import Path

from PIL import Image
from torch import Tensor

from vlattn.files import write_aside

WIDTH = 92  # of the terminal
SHOWN = 8  # numbers of a row there
STYLE = """
:root { --ink: #1c1c22; --faint: #6e6e78; --line: #d9d9de; --paper: #fff; --plus: #bc3754;
  --minus: #2166ac }
body { max-width: 62rem; margin: 3.5rem auto; padding: 0 1.5rem; color: var(--ink);
  background: var(--paper); font: 17px/1.6 system-ui, "DejaVu Sans", sans-serif }
h1 { font-size: 2.3rem; line-height: 1.2; margin: 0 0 1rem }
h2 { margin: 4rem 0 1rem; padding-top: 1.4rem; border-top: 1px solid var(--line) }
h2 b { color: var(--plus); margin-right: .8rem }
p { max-width: 46rem; margin: .8rem 0 }
figure { display: inline-block; vertical-align: top; max-width: 100%; overflow-x: auto;
  margin: .9rem 2.6rem .9rem 0 }
figcaption { color: var(--faint); font-size: .9rem; margin-bottom: .4rem }
figcaption b { color: var(--ink); font-size: 1rem; margin-right: .6rem }
table { border-collapse: collapse; font: 13.5px/1.5 ui-monospace, "DejaVu Sans Mono", monospace }
th { color: var(--faint); font-weight: normal; text-align: right; padding: .15rem .7rem;
  white-space: nowrap }
.text th { text-align: left; border-bottom: 1px solid var(--ink) }
.text td { padding: .3rem .7rem; border-bottom: 1px solid #ececef; vertical-align: top }
.text td:first-child { white-space: nowrap }
.text span { display: inline-block; margin: 0 .25rem .15rem 0; padding: 0 .3rem;
  background: #f4f4f6; border-bottom: 2px solid var(--line) }
.cells tr:first-child th { text-align: center; padding: .15rem .3rem }
.cells td { min-width: 3.2rem; padding: .3rem 0; border: 1px solid var(--paper); text-align: center;
  background: color-mix(in srgb, var(--tone, var(--plus)) calc(var(--v) * 75%), #f4f4f6) }
.cells td.minus { --tone: var(--minus) }
.cells td.off { background: repeating-linear-gradient(45deg, #dcdce1 0 3px, #f4f4f6 3px 6px) }
.wide td { min-width: 0; width: 3px; height: 1.4rem; padding: 0; border-width: 1px 0 }
tr.here th:first-child { color: var(--plus); font-weight: bold }
tr.here td { border-color: var(--ink) var(--paper) }
img { max-width: 100% }
@media (max-width: 40rem) {
  body { margin: 2rem auto; padding: 0 1rem }
  h1 { font-size: 1.7rem }
  figure { margin-right: 0 }
  .text:has(span) tr { display: flex; flex-wrap: wrap; border-bottom: 1px solid #ececef }
  .text:has(span) :is(th, td) { flex: 1; border: 0 }
  .text td:has(span) { flex: 0 0 100% }
}
"""


class Page:
    """What is added is printed at once; `save` writes all of it as one file without links.

    Whatever is added is text, never markup.
    """

    def __init__(self, title: str):
        self.title = title
        self._parts: list[str] = []
        self._sections = 0
        print(f"{title}\n{'=' * len(title)}")

    def section(self, title: str, text: str) -> None:
        """A numbered heading, and what the section is about."""
        self._sections += 1
        print(f"\n\n{self._sections}. {title}\n{'-' * WIDTH}")
        self._parts.append(f"<h2><b>{self._sections}</b>{escape(title)}</h2>")
        self.text(text)

    def text(self, text: str) -> None:
        """Paragraphs, with an empty line between them; other line breaks do not matter."""
        for paragraph in text.split("\n\n"):
            print("", *textwrap.wrap(" ".join(paragraph.split()), WIDTH), sep="\n")
            self._parts.append(f"<p>{escape(paragraph)}</p>")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Columns of text, numbers, or lists of pieces of text; the last column may be long."""
        lines = [[_cell(value) for value in row] for row in rows]
        widths = [max(map(_columns, column)) for column in zip(header, *lines)]
        print()
        for line in (header, *lines):
            first, *middle = (" " * (w - _columns(c)) for c, w in zip(line[:-1], widths))
            cells = [line[0] + first, *(pad + cell for pad, cell in zip(middle, line[1:]))]
            start = "  " + "   ".join(cells) + "   "
            indent = " " * _columns(start)
            wide = textwrap.wrap(line[-1], max(20, WIDTH - len(indent)), break_on_hyphens=False)
            print(start + f"\n{indent}".join(wide))
        head, body = _row("th", header), "".join(_row("td", row) for row in rows)
        self._parts.append(f'<figure><table class="text">{head}{body}</table></figure>')

    def matrix(
        self,
        name: str,
        matrix: Tensor,
        rows: Sequence[str],
        columns: Sequence[str] = (),
        *,
        here: int | None = None,
        note: str = "",
    ) -> None:
        """A matrix in colours: red above zero, blue below, hatched where it is -inf.

        Args:
            rows: a name for each row.
            columns: a name for each column, whose numbers are written out then; without, the
                terminal has the first numbers of row `here` alone.
            here: the row to look at.
            note: what the matrix is.
        """
        size = " x ".join(map(str, matrix.shape))
        print(f"\n  {name}   ({size})   {note}")
        if columns:
            print(" " * 14 + "".join(f"{column[:8]:>9}" for column in columns[:SHOWN]))
        peak = float(matrix[matrix.isfinite()].abs().max().clamp(min=1e-9))
        body = ""
        for i, (label, values) in enumerate(zip(rows, matrix.tolist())):
            if columns or i == here:
                shown = "".join(f"{_number(x):>9}" for x in values[:SHOWN])
                more = " ..." if len(values) > SHOWN else ""
                print(f"  {'>' if i == here else ' '} {label[:10]:>10}{shown}{more}")
            cells = "".join(_matrix_cell(x, peak, bool(columns)) for x in values)
            kind = ' class="here"' if i == here else ""
            body += f"<tr{kind}><th>{escape(label)}</th>{cells}</tr>"
        head = _row("th", ["", *columns]) if columns else ""
        self._parts.append(
            f"<figure><figcaption><b>{escape(name)}</b>{size}&ensp;{escape(note)}</figcaption>"
            f'<table class="cells{"" if columns else " wide"}">{head}{body}</table></figure>'
        )

    def picture(self, image: Image.Image, text: str) -> None:
        """A picture, on the page alone; `text` says what it shows."""
        image.save(png := io.BytesIO(), "png")
        data = base64.b64encode(png.getvalue()).decode()
        self._parts.append(
            f'<figure><img alt="{escape(text)}" src="data:image/png;base64,{data}"></figure>'
        )

    def save(self, path: str | Path) -> None:
        head = (
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style>"
            f"<h1>{escape(self.title)}</h1>"
        )
        with write_aside(Path(path)) as aside:
            page = "\n".join([f'<!doctype html><html lang="en">{head}', *self._parts, "</html>\n"])
            aside.write_text(page, encoding="utf-8")


def _cell(value: object) -> str:
    if isinstance(value, list):
        return "  ".join(value)
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _columns(text: str) -> int:
    """Columns of the terminal that a text takes: two for a Chinese character."""
    return sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in text)


def _row(tag: str, cells: Sequence[object]) -> str:
    """A row of a table; the pieces of a list stand in boxes."""
    texts = [
        "".join(f"<span>{escape(piece)}</span>" for piece in cell)
        if isinstance(cell, list)
        else escape(_cell(cell))
        for cell in cells
    ]
    return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"


def _number(x: float) -> str:
    return "-" if x == -math.inf else f"{x:.2f}"


def _matrix_cell(x: float, peak: float, written: bool) -> str:
    if x == -math.inf:
        return '<td class="off" title="-inf"></td>'
    kind = ' class="minus"' if x < 0 else ""
    text = _number(x) if written else ""
    return f'<td{kind} style="--v:{abs(x) / peak:.2f}" title="{x:.4f}">{text}</td>'
