"""Pages: what the terminal shows, and that whatever is added is text on the page, never markup."""

import math

import torch
from PIL import Image

from vlattn.page import WIDTH, Page


def test_page_holds_text_tables_matrices_and_pictures(tmp_path, capsys):
    page = Page("<b>Title</b>")
    page.section(
        "<i>One</i>", "first line\nof a paragraph\n\nsecond <s>paragraph</s> " + "word " * 40
    )
    page.table(["name", "count", "pieces"], [["一只", 1_234_567, ["<unk>", "_a"]], ["ab", 2.5, []]])
    matrix = torch.tensor([[1.5, -0.25, -math.inf], [0.0, 2.0, -1.0]])
    page.matrix("M & N", matrix, ["<bos>", "_a"], ["x", "y", "z"], here=1, note="a < b")
    page.matrix("wide", torch.ones(2, 11), ["<bos>", "_a"], here=0)
    page.picture(Image.new("RGB", (3, 2)), 'a "picture"')
    page.save(tmp_path / "page.html")

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "  一只   1,234,567   <unk>  _a" in lines
    assert "  ab           2.5   " in lines
    assert "         <bos>     1.50    -0.25        -" in lines
    assert "  >         _a     0.00     2.00    -1.00" in lines
    assert "  >      <bos>" + 8 * "     1.00" + " ..." in lines
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    for raw in ("<b>Title", "<i>One", "<s>para", "<unk>", "<bos>", "a < b"):
        assert raw not in html
    assert html.count('class="off"') == 1 and html.count('class="minus"') == 2
    assert html.count('<tr class="here">') == 2
    assert "<span>&lt;unk&gt;</span><span>_a</span>" in html
    assert 'alt="a &quot;picture&quot;" src="data:image/png;base64,' in html
