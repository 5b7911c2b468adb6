"""Tar files behind http and https, read in place by ranges of bytes."""

import hashlib
import io
import os
import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import unquote, urlsplit

from vlattn.data.records import DataError
from vlattn.files import cache_folder
from vlattn.images import SourceLost

if TYPE_CHECKING:
    import httpx

TRIES = 5
PAUSE = 1.0  # seconds before the second try, doubled for each after it
TIMEOUT = 30.0  # seconds without a byte
BLOCK = 4 * 2**20  # bytes of a request where a file is read from its start
BUSY = (408, 429, 500, 502, 503, 504)  # HTTP's words for "try again"
_MAKING = threading.Lock()


@dataclass(frozen=True)
class RemoteShard:
    """A file of a web server or an object storage; what is used of a `Path` works with it.

    Raises:
        DataError: the URL is of another kind.
    """

    url: str

    def __post_init__(self):
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise DataError(f"{self}: shards are read from a disk, http or https")

    @property
    def name(self) -> str:
        return PurePosixPath(unquote(urlsplit(self.url).path)).name

    def __str__(self) -> str:
        """The URL without its query, which may be a signature."""
        return urlsplit(self.url)._replace(query="").geturl()

    def open(self, mode: str = "rb", buffering: int = BLOCK) -> BinaryIO:
        """A file of bytes; without buffering, each read is one request."""
        file = _RemoteFile(self)
        return io.BufferedReader(file, buffering) if buffering else file

    def index_file(self) -> Path:
        """Where its index is kept: another file once the shard has changed.

        Raises:
            SourceLost: see `fetch`.
        """
        _, headers = self.fetch(0, 1)
        size = headers.get("content-range", "").rpartition("/")[2]
        state = headers.get("etag") or headers.get("last-modified", "")
        digest = hashlib.sha256(f"{self} {size} {state}".encode()).hexdigest()[:32]
        return cache_folder() / "shards" / f"{digest}.json"

    def fetch(self, start: int, count: int) -> tuple[bytes, "httpx.Headers"]:
        """Some bytes, fewer only at the end of the file, and the headers of the answer.

        Raises:
            DataError: httpx is not installed.
            SourceLost: there is no such file, or several tries have failed; in one line.
        """
        try:
            import httpx
        except ImportError as error:
            raise DataError(
                f"shards behind a URL need httpx: pip install 'vlattn[scale]' ({error})"
            ) from error
        ask = {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
        for attempt in range(TRIES):
            time.sleep(PAUSE * 2 ** (attempt - 1) if attempt else 0)
            try:
                with _client().stream("GET", self.url, headers=ask) as answer:
                    if answer.status_code == httpx.codes.PARTIAL_CONTENT:
                        return answer.read(), answer.headers
                    if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                        return b"", answer.headers
                    if answer.status_code == httpx.codes.OK:
                        raise SourceLost(f"{self}: its server gives no byte ranges; download it")
                    reason = f"HTTP {answer.status_code} {answer.reason_phrase}"
                    if answer.status_code not in BUSY:
                        raise SourceLost(f"{self}: {reason}")
            except httpx.HTTPError as error:
                reason = " ".join(str(error).split()) or type(error).__name__
        raise SourceLost(f"{self}: {reason} ({TRIES} tries)")


def _client() -> "httpx.Client":
    """Connections that stay open; a process that was forked does not use those of its parent."""
    with _MAKING:  # one for all threads
        return _client_of(os.getpid())


@lru_cache(maxsize=1)
def _client_of(process: int) -> "httpx.Client":
    import httpx

    return httpx.Client(timeout=TIMEOUT, follow_redirects=True)


class _RemoteFile(io.RawIOBase):
    def __init__(self, shard: RemoteShard):
        self.shard, self.place = shard, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("the end is not known")
        self.place = offset + (self.place if whence == io.SEEK_CUR else 0)
        return self.place

    def tell(self) -> int:
        return self.place

    def readinto(self, buffer: memoryview) -> int:
        content, _ = self.shard.fetch(self.place, len(buffer)) if len(buffer) else (b"", None)
        buffer[: len(content)] = content
        self.place += len(content)
        return len(content)
