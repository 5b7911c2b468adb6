"""Shards behind a URL are read like those on a disk, and a bad connection is said in one line."""

import re
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from test_shards import png, write_shard
from test_training import same, weights
from torch.utils.data import DataLoader

from vlattn.cli import main
from vlattn.data import remote
from vlattn.data.dataset import CaptionDataset, collate
from vlattn.data.layouts import read_records
from vlattn.data.records import DataError
from vlattn.images import SourceLost, open_image

httpx = pytest.importorskip("httpx", reason="shards of a URL are read by httpx")


class Server(ThreadingHTTPServer):
    """Files of a folder in ranges; `breaks` answers in a row are cut off, `ranges` may be off."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.breaks, self.ranges, self.status = folder, 0, True, None
        self.asked, self.bytes, self.together = Counter(), 0, threading.Barrier(1)
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server, name = self.server, self.path.partition("?")[0].strip("/")
        server.asked[name] += 1
        server.together.wait(10)
        file = server.folder / name
        if server.status or not file.is_file():
            self.send_error(server.status or 404)
            return
        content = file.read_bytes()
        start, end = map(int, re.match(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        part = content[start : end + 1] if server.ranges else content
        if not part:
            self.send_error(416)
            return
        self.send_response(206 if server.ranges else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(content)}")
        self.send_header("ETag", f'"{hash(content)}"')
        self.end_headers()
        server.bytes += len(part)
        if server.breaks:
            server.breaks -= 1
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
        else:
            self.wfile.write(part)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.001)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "bucket"
    folder.mkdir()
    for shard, colours in (("train-0", ("red", "blue", "lime")), ("val-0", ("white", "black"))):
        members = [m for c in colours for m in ((f"{c}.png", png(c)), (f"{c}.txt", f"{c}\n"))]
        write_shard(folder / f"{shard}.tar", *members)
    with Server(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def read(server):
    return read_records(f"{server.url}/{{train,val}}-0.tar")


def test_a_url_gives_what_the_files_give(server):
    local, report = read_records(server.folder)
    records, remote_report = read(server)
    assert (report.images, report.captions) == (remote_report.images, remote_report.captions)
    assert [r._replace(image=None) for r in records] == [r._replace(image=None) for r in local]
    for here, there in zip(local, records):
        assert open_image(here.image).tobytes() == open_image(there.image).tobytes()


def test_an_index_is_made_once_and_again_for_another_file(server):
    read(server)
    server.bytes = 0
    before, _ = read(server)
    assert server.bytes == 2  # of each shard, one byte to see whether it has changed
    write_shard(server.folder / "val-0.tar", ("a.png", png("gold")), ("a.txt", "gold"))
    after, _ = read(server)
    assert [r.captions for r in after] == [r.captions for r in before if r.split == "train"] + [
        ("gold",)
    ]


def test_large_members_are_not_read_for_the_index(server, monkeypatch):
    monkeypatch.setattr(remote.RemoteShard.open, "__defaults__", ("rb", 1000))
    write_shard(server.folder / "big.tar", ("a.png", b"0" * 500_000), ("a.txt", "a"))
    (record,), _ = read_records(f"{server.url}/big.tar")
    assert server.bytes < 10_000 and record.image.size == 500_000


def test_broken_answers_are_asked_for_again(server):
    expected = [open_image(r.image).tobytes() for r in read_records(server.folder)[0]]
    server.breaks = 3
    records, _ = read(server)
    for record, picture in zip(records, expected):
        server.breaks = 2
        assert open_image(record.image).tobytes() == picture


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ({"status": 404}, r"0\.tar: HTTP 404 Not Found$"),
        ({"status": 403}, r"0\.tar: HTTP 403 Forbidden$"),
        ({"status": 503}, r"0\.tar: HTTP 503 Service Unavailable \(5 tries\)$"),
        ({"breaks": 99}, r"0\.tar: peer closed connection .* \(5 tries\)$"),
        ({"ranges": False}, r"0\.tar: its server gives no byte ranges; download it$"),
    ],
)
def test_what_is_wrong_with_a_server_is_said(server, trouble, message):
    for name, value in trouble.items():
        setattr(server, name, value)
    with pytest.raises(SourceLost, match=message):
        read(server)
    assert max(server.asked.values()) <= 5
    server.status = server.breaks = None
    server.ranges = True
    assert len(read(server)[0]) == 5  # nothing half read was kept


def test_a_missing_shard_or_server_is_said(server):
    with pytest.raises(SourceLost, match=r"/train-1\.tar: HTTP 404 Not Found$"):
        read_records(f"{server.url}/train-{{0..1}}.tar")
    with pytest.raises(SourceLost, match=r"^http://127\.0\.0\.1:9/a\.tar: .*refused \(5 tries\)$"):
        read_records("http://127.0.0.1:9/a.tar?signature=secret")
    with pytest.raises(DataError, match=r"^s3://bucket/00\.tar: shards are read from a disk, http"):
        read_records("s3://bucket/{00..99}.tar")
    (server.folder / "no.tar").write_bytes(b"no tar file" * 99)
    with pytest.raises(DataError, match=r"/no\.tar is not a tar file without compression"):
        read_records(f"{server.url}/no.tar")


def test_without_httpx_the_extra_is_named(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(DataError, match=r"pip install 'vlattn\[scale\]'"):
        read(server)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_lost_server_ends_reading_in_one_line(server, make_captioner, num_workers):
    """It is no damaged picture, which would be left out; a worker's error keeps its text (X14)."""
    captioner = make_captioner()
    records, _ = read(server)
    data = CaptionDataset(records, captioner.tokenizer, captioner.preprocess, max_len=9)
    loader = DataLoader(data, 2, collate_fn=collate, num_workers=num_workers)
    batches = list(loader)
    expected = [captioner.preprocess(open_image(r.image))[0] for r in records]
    torch.testing.assert_close(torch.cat([b.images for b in batches]), torch.stack(expected))
    server.status = 500
    with pytest.raises(SourceLost) as lost:
        list(loader)
    assert re.fullmatch(r"http://\S+-0\.tar: HTTP 500 .* \(5 tries\)", str(lost.value))


def test_pictures_of_a_batch_are_asked_for_together(server, make_captioner):
    """One after the other, each would wait for its answer."""
    captioner = make_captioner()
    records, _ = read(server)
    data = CaptionDataset(records, captioner.tokenizer, captioner.preprocess, max_len=9)
    server.together = threading.Barrier(5)  # passes five requests at a time, and none alone
    (batch,) = DataLoader(data, 5, collate_fn=collate)
    assert batch.indices == (0, 1, 2, 3, 4)


def test_training_reads_a_url_and_goes_on_where_it_stopped(server, tmp_path, capsys):
    flags = (
        "--max-steps 4 --batch-size 2 --dim 32 --depth 1 --num-heads 2 --encoder-dim 32 "
        "--encoder-depth 1 --encoder-heads 2 --image-size 32 32 --precision fp32 --resume auto "
        "--checkpoint-every 1"
    ).split()
    urls = f"{server.url}/{{train,val}}-0.tar"
    here = ["train", "--data", str(server.folder), "--out", str(tmp_path / "here"), *flags]
    there = ["train", "--data", urls, "--out", str(tmp_path / "there"), *flags]
    assert main(here) == 0
    read(server)
    server.asked.clear()
    do_get = Handler.do_GET

    def end_soon(handler):
        server.status = 500 if sum(server.asked.values()) > 7 else None
        do_get(handler)

    Handler.do_GET = end_soon
    assert main(there) == 2
    Handler.do_GET = do_get
    server.status = None
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("vlattn:")]
    assert re.fullmatch(r"vlattn: http://\S+-0\.tar: HTTP 500 .* \(5 tries\)", line)
    assert main(there) == 0
    assert "continuing from" in capsys.readouterr().out
    assert same(*(weights(tmp_path / run) for run in ("here", "there")))
