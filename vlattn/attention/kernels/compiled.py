"""Additive scores by loops that are compiled for this machine's processor: `additive.cpp`.

The compiler runs once; its library is kept in the user's cache folder for later processes.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vlattn.attention.kernels import chunked, reference
from vlattn.attention.kernels.operator import Gradients, Scores, additive_operator
from vlattn.files import cache_folder, write_aside

SOURCE = Path(__file__).with_name("additive.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")
SECONDS = 15  # that a compiler may take
log = logging.getLogger(__name__)


class CompilerError(RuntimeError):
    """There is no compiler, or it is of no use."""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled loops, built where the cache does not hold them, and tried out.

    Raises:
        CompilerError: they cannot be had; the message says why.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise CompilerError("no C++ compiler was found")
    name = hashlib.sha256(
        "\n".join((SOURCE.read_text(), compiler, *FLAGS, _processor())).encode()
    ).hexdigest()[:16]
    path = cache_folder() / f"additive-{name}.so"
    if path.is_file():
        with suppress(CompilerError):  # a damaged file is built again
            return _load(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_aside(path) as aside:
            _compile(compiler, aside)
            return _load(aside)
    except OSError as error:
        raise CompilerError(str(error)) from error


def _processor() -> str:
    """What tells this processor from others: a cache may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(
        sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))})
    )


def _compile(compiler: str, path: Path) -> None:
    reason = ""
    for threads in (("-fopenmp",), ()):  # Apple's compiler has no OpenMP: one thread then
        command = [compiler, *FLAGS, *threads, "-x", "c++", str(SOURCE), "-o", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
            return
        except subprocess.TimeoutExpired as error:
            raise CompilerError(f"{compiler} took over {SECONDS} s") from error
        except subprocess.CalledProcessError as error:
            reason = (error.stderr.strip().splitlines() or [str(error)])[0]
    raise CompilerError(f"{compiler} failed: {reason}")


def _load(path: Path) -> ctypes.CDLL:
    """The library of a file, tried out."""
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerError(str(error)) from error
    query, key, weight = (torch.linspace(-2, 2, n * 6).view(1, 1, n, 6) for n in (3, 5, 1))
    scores = _call_scores(found, query, key, weight[0, 0])
    wanted = reference.additive_scores(query, key, weight[0, 0])
    if scores is None or not torch.allclose(scores, wanted, atol=1e-5):
        raise CompilerError("the compiled loops compute wrong numbers")
    return found


def _pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(x.data_ptr()) for x in tensors]


def _call(
    found: ctypes.CDLL, name: str, tensors: tuple[Tensor, ...], sizes: tuple[int, ...]
) -> bool:
    """Call a loop of `additive.cpp`; returns whether the numbers were in its range."""
    function = getattr(found, f"{name}_{str(tensors[0].dtype).removeprefix('torch.')}")
    return bool(
        function(*_pointers(*tensors), *map(ctypes.c_longlong, sizes), torch.get_num_threads())
    )


def _call_scores(
    found: ctypes.CDLL, query: Tensor, key: Tensor, score_weight: Tensor
) -> Tensor | None:
    """The scores, or None where exponentials leave the range."""
    batch, heads, num_queries, dim = query.shape
    num_keys = key.size(2)
    weight = F.pad(score_weight, (0, -dim % 4))
    exp_query = query.new_empty(batch, heads, num_queries, weight.size(1))
    scores = query.new_empty(batch, heads, num_queries, num_keys)
    tensors = (query.contiguous(), key.contiguous(), weight, scores, exp_query)
    sizes = (batch * heads, heads, num_queries, num_keys, dim)
    return scores if _call(found, "scores", tensors, sizes) else None


def _scores(query: Tensor, key: Tensor, score_weight: Tensor) -> Tensor:
    scores = _call_scores(library(), query, key, score_weight)
    return chunked.scores(query, key, score_weight) if scores is None else scores


def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, score_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, num_queries, dim = query.shape
    inputs = tuple(x.contiguous() for x in (query, key, score_weight, grad))
    found = tuple(torch.empty_like(x) for x in inputs[:2])
    to_weight = score_weight.new_empty(batch, heads, dim)
    sizes = (batch * heads, heads, num_queries, key.size(2), dim)
    if not _call(library(), "gradients", (*inputs, *found, to_weight), sizes):
        return chunked.gradients(grad, query, key, score_weight)
    return *found, to_weight.sum(0)


additive_scores = additive_operator("compiled", _scores, _gradients)


@functools.cache
def _fastest() -> tuple[Scores, Gradients]:
    """These loops, or the chunked ones where they cannot be had; said once."""
    try:
        library()
    except CompilerError as error:
        log.warning("additive attention runs without compiled loops: %s", error)
        return chunked.scores, chunked.gradients
    return _scores, _gradients


additive_scores_if_possible = additive_operator(
    "auto", lambda *tensors: _fastest()[0](*tensors), lambda *tensors: _fastest()[1](*tensors)
)
