"""The reference that `make docs` writes, and the pages beside it: links lead on, code runs."""

import inspect
import re
import subprocess
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from vlattn.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
FILES = [path.relative_to(ROOT) for path in ROOT.glob("vlattn/**/*.py") if path.stat().st_size]
MODULES = [
    ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    for path in FILES
    if "kernels" not in path.parts
]


class Page(HTMLParser):
    """What a page links to, and the places in it that can be linked to."""

    def __init__(self, text):
        super().__init__()
        self.links, self.places = [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]
        self.places |= {attributes["id"]} if "id" in attributes else set()


def command_modules():
    """`make -n docs` shows the command that it would run, which names the modules."""
    command = ["make", "--no-print-directory", "-n", "docs", "-o", ".venv/ready"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return shown.split("build/docs ")[-1].split()


def test_reference_has_every_module_and_no_broken_link(tmp_path):
    pdoc = pytest.importorskip("pdoc", reason="the reference is made by pdoc")
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*command_modules(), output_directory=tmp_path)
    pages = {path: Page(path.read_text()) for path in tmp_path.rglob("*.html")}
    names = {path.relative_to(tmp_path).as_posix() for path in pages}
    assert names >= {f"{name.replace('.', '/')}.html" for name in MODULES}
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / url.path).resolve() if url.path else path
            assert target.is_file(), (path.name, link)
            if target in pages:
                assert unquote(url.fragment) in pages[target].places, (path.name, link)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_no_broken_link(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, place = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not place or place in headings(target), link


def headings(page):
    """The names by which a link reaches the headings of a page of Markdown."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_pages_take_their_flags(page, capsys):
    text = page.read_text().replace("\\\n", " ")
    for command, flags in re.findall(r"^vlattn (\w+)(.*)$", text, re.MULTILINE):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        known = re.findall(r"--[\w-]+", capsys.readouterr().out)
        assert set(re.findall(r"--[\w-]+", flags)) <= set(known), command


def test_code_in_docstrings_runs(tmp_path, monkeypatch, captioner, photos):
    """Each block runs in a folder that has the model and the picture that it names."""
    blocks = []
    for name in MODULES:
        module = import_module(name)
        members = [x for x in vars(module).values() if getattr(x, "__module__", "") == name]
        for documented in (module, *members):
            text = inspect.getdoc(documented) or ""
            blocks += re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    captioner.save_pretrained(tmp_path / "runs" / "mine")
    photos[0].save(tmp_path / "picture.jpg")
    for block in blocks:
        exec(compile(block, "docstring", "exec"), {})
