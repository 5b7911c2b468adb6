"""Asks a demo for captions one after the other: how long each takes, and whether memory grows.

    python benchmarks/demo.py [--pictures FOLDER] [--requests 1000]

Starts `vlattn demo` with the model of the package, and asks it as any program would.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
from gradio_client import Client, handle_file

from vlattn.data.scenes import scenes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=Path, help="JPEGs in a folder; drawn ones if not given")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--port", type=int, default=7876)
    args = parser.parse_args()
    command = [Path(sys.executable).with_name("vlattn"), "demo", "--port", str(args.port)]
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(command) as server:
        try:
            client = wait_for(f"http://127.0.0.1:{args.port}", server)
            pictures = sorted(args.pictures.glob("*.jpg")) if args.pictures else drawn(folder)
            seconds = []
            for i, picture in zip(range(1, args.requests + 1), itertools.cycle(pictures)):
                start = time.perf_counter()
                client.predict(handle_file(str(picture)), api_name="/caption")
                seconds.append(time.perf_counter() - start)
                if i % 100 == 0 or i == args.requests:
                    memory = psutil.Process(server.pid).memory_info().rss / 2**20
                    print(
                        f"{i:5} requests: median {statistics.median(seconds):.2f} s, "
                        f"longest {max(seconds):.2f} s, memory {memory:,.0f} MiB",
                        flush=True,
                    )
        finally:
            server.terminate()


def wait_for(address: str, server: subprocess.Popen) -> Client:
    """The client of a server that is starting."""
    while server.poll() is None:
        try:
            return Client(address, verbose=False)
        except httpx.ConnectError:
            time.sleep(0.5)
    raise SystemExit("the demo did not start")


def drawn(folder: str) -> list[Path]:
    """Pictures of the built-in scenes as files."""
    paths = []
    for i, record in enumerate(scenes("test", size=256, count=100)):
        paths.append(Path(folder) / f"{i}.jpg")
        record.image.save(paths[-1])
    return paths


if __name__ == "__main__":
    main()
