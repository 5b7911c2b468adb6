"""The backends of additive attention: each is the reference, in value, gradient and manners."""

import importlib.util
import logging
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vlattn.attention import AdditiveAttention, additive_attention
from vlattn.attention.functional import BACKENDS
from vlattn.attention.kernels import chunked, compiled

HAS_TRITON = importlib.util.find_spec("triton") is not None
# On a machine without a GPU the kernels run in Triton's interpreter; see conftest.py.
TRITON = pytest.param(
    "triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="needs triton, which comes on Linux")
)
FAST = ["chunked", "compiled", TRITON]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, H, T, N, D, D_V = 2, 6, 5, 7, 3, 4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def device_of(backend: str) -> str:
    return DEVICE if backend == "triton" else "cpu"


def inputs(backend: str, *, kv_heads: int = H, scale: float = 1.0, dtype=torch.float32, sizes=None):
    """Query, key, value and score weight that want gradients."""
    batch, queries, keys, dim, value_dim = sizes or (B, T, N, D, D_V)
    shapes = [
        (batch, H, queries, dim),
        (batch, kv_heads, keys, dim),
        (batch, kv_heads, keys, value_dim),
        (H, dim),
    ]
    scales = (scale, scale, 1.0, 1.0)
    return [
        (s * torch.randn(shape)).to(dtype).to(device_of(backend)).requires_grad_()
        for s, shape in zip(scales, shapes)
    ]


def run(tensors, mask=None, **options) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, weights, and the gradients of a sum that weighs each of their numbers on its own."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    if mask is not None:
        mask = mask.to(tensors[0].device)
    output, weights = additive_attention(*tensors, mask, need_weights=True, **options)
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (x.float() * torch.randn(x.shape, generator=generator).to(x.device)).nan_to_num().sum()
        for x in (output, weights)
    )
    return output, weights, torch.autograd.grad(loss, tensors)


def assert_same(found, wanted, **tolerance):
    for one, two in zip([*found[:2], *found[2]], [*wanted[:2], *wanted[2]]):
        torch.testing.assert_close(one.cpu(), two.cpu(), equal_nan=True, **tolerance)


MASKS = {
    "none": lambda: None,
    "pairs": lambda: torch.rand(T, N) < 0.6,
    "keys": lambda: torch.rand(B, 1, N) < 0.6,
    "rows": lambda: (torch.rand(B, T, N) < 0.6) & (torch.arange(T)[:, None] != 2),  # a hidden row
    "heads": lambda: torch.rand(B, H, T, N) < 0.6,
}


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("backend", FAST)
def test_backends_are_the_reference(backend, kv_heads, mask, scale):
    tensors = inputs(backend, kv_heads=kv_heads, scale=scale)
    mask = MASKS[mask]()
    assert_same(
        run(tensors, mask, backend=backend),
        run(tensors, mask, backend="reference"),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("sizes", [(2, 1, 49, 6, 20), (1, 37, 70, 5, 3), (1, 66, 33, 4, 18)])
@pytest.mark.parametrize("backend", FAST)
def test_tiles_that_are_not_full(backend, sizes):
    tensors = inputs(backend, sizes=sizes)
    found, wanted = run(tensors, backend=backend), run(tensors, backend="reference")
    assert_same(found, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", FAST)
def test_weights_are_free_to_be_left_out(backend):
    tensors = inputs(backend)
    asked, _ = additive_attention(*tensors, backend=backend, need_weights=True)
    output, weights = additive_attention(*tensors, backend=backend)
    assert weights is None
    assert torch.equal(output, asked)


@pytest.mark.parametrize("backend", ["chunked", "compiled"])
def test_gradients_are_those_of_finite_differences(backend):
    tensors = inputs(backend, kv_heads=3, dtype=torch.float64, sizes=(2, 3, 4, 5, 2))
    mask = torch.rand(2, 3, 4) < 0.7
    torch.autograd.gradcheck(
        lambda *x: additive_attention(*x, mask, backend=backend, need_weights=True), tensors
    )


@pytest.mark.parametrize("backend", FAST)
def test_second_derivative_is_refused(backend):
    tensors = inputs(backend)
    output, _ = additive_attention(*tensors, backend=backend)
    (grad,) = torch.autograd.grad(output.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match=f"{backend}.* has no second derivative; .*'reference'"):
        grad.sum().backward()


@pytest.mark.parametrize("backend", FAST)
def test_torch_compile_takes_it_whole(backend):
    attn = AdditiveAttention(24, 12, num_heads=6, num_kv_heads=2).to(device_of(backend))
    query, key = torch.randn(B, T, 24), torch.randn(B, N, 12)
    query, key = query.to(device_of(backend)), key.to(device_of(backend))

    def forward(query, key):
        heads = attn.q_proj(query).unflatten(-1, (6, -1)).transpose(1, 2)
        kv = attn.project_kv(key)
        return additive_attention(heads, *kv, attn.score_weight, backend=backend)[0]

    whole = torch.compile(forward, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(forward(query, key).square().sum(), attn.q_proj.weight)
    found = torch.autograd.grad(whole(query, key).square().sum(), attn.q_proj.weight)
    torch.testing.assert_close(found, wanted)


def test_module_compiles_without_graph_breaks():
    attn = AdditiveAttention(24, 12, num_heads=6)
    query, key = torch.randn(B, T, 24), torch.randn(B, N, 12)
    mask = torch.rand(B, T, N) < 0.7
    whole = torch.compile(attn, fullgraph=True, backend="aot_eager")
    found, wanted = whole(query, key, mask=mask)[0], attn(query, key, mask=mask)[0]
    torch.testing.assert_close(found, wanted)


# --- magnitudes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", FAST)
def test_opposite_extremes_meet(backend, dtype):
    """tanh(60 - 60) = 0 where exp(120) has long overflowed; what is left decides."""
    query = torch.full((1, 1, 2, 4), 60.0, dtype=dtype, device=device_of(backend))
    key = torch.full((1, 1, 3, 4), -60.0, dtype=dtype, device=device_of(backend))
    key[0, 0, 1] = -59.5
    key[0, 0, 2] = -1e4
    value = torch.eye(3, dtype=dtype, device=key.device)[None, None]
    weight = torch.ones(1, 4, dtype=dtype, device=key.device)
    output, _ = additive_attention(query, key, value, weight, backend=backend)
    scores = torch.tensor([0.0, 4 * torch.tanh(torch.tensor(0.5)), -4.0])
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    for row in output[0, 0].cpu().float():
        torch.testing.assert_close(row, scores.softmax(0), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_scale", [1e-30, 1e4])
@pytest.mark.parametrize("scale", [1e-40, 1e-3, 1.0, 20.0, 42.9, 43.1, 1e4])
@pytest.mark.parametrize("backend", FAST)
def test_any_magnitude_is_as_right_as_the_reference(backend, scale, weight_scale, dtype):
    """Against float64, with the inputs of the smaller type; scores up to 1e4 times the features."""
    tensors = inputs(backend, scale=scale)
    with torch.no_grad():
        tensors[3] *= weight_scale
    tensors = [x.detach().to(dtype) for x in tensors]
    truth, _ = additive_attention(*(x.double() for x in tensors), backend="reference")
    found, _ = additive_attention(*tensors, backend=backend)
    eager, _ = additive_attention(*tensors, backend="reference")
    assert found.isfinite().all()
    error, allowed = ((x.double() - truth).abs().max().item() for x in (found, eager))
    # One float32 rounding of a score of this size moves its weight by as much, in relation.
    rounding = 4e-7 * max(1.0, weight_scale) * D
    assert error <= 2 * allowed + min(rounding, 1.0)


@pytest.mark.parametrize("backend", FAST)
def test_what_is_not_finite_shows_where_it_is_seen_and_nowhere_else(backend):
    tensors = inputs(backend)
    with torch.no_grad():
        tensors[0][0, 1, 2] = torch.nan
        tensors[1][1, 3, 4, 0] = torch.inf
        tensors[2][0, 5, 6] = -torch.inf
    mask = torch.ones(B, T, N, dtype=torch.bool)
    mask[1, :, 4] = False
    mask[0, 0, 6] = False
    found = run(tensors, mask, backend=backend)
    assert_same(found, run(tensors, mask, backend="reference"), atol=1e-5, rtol=1e-5)
    assert found[0][1].isfinite().all() and found[0][0, 5, 1:].isnan().all()
    assert found[0][0, 5, 0].isfinite().all() and found[0][0, 1, 2].isnan().all()
    assert all(grad.isfinite().all() for grad in found[2])


# --- storage --------------------------------------------------------------------------------------


class _Largest(TorchDispatchMode):
    """The numbers of the largest tensor that an operator made."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else [made]:
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.numel())
        return made


@pytest.mark.parametrize("backend", ["chunked", "compiled"])
def test_no_pair_stores_its_features(backend):
    tensors = inputs(backend, sizes=(1, 300, 400, 16, 8))
    with _Largest() as eager:
        run(tensors, backend="reference")
    with _Largest() as ours:
        run(tensors, backend=backend)
    assert eager.numbers == H * 300 * 400 * 16
    assert ours.numbers == H * 300 * 400 > chunked.BUFFER["cpu"]


@pytest.mark.parametrize("backend", ["chunked", "compiled"])
def test_threads_do_not_change_the_numbers(backend):
    tensors = inputs(backend, sizes=(2, 33, 29, 20, 6))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(tensors, backend=backend)
        torch.set_num_threads(2)
        two = run(tensors, backend=backend)
    finally:
        torch.set_num_threads(before)
    assert_same(two, one, atol=1e-6, rtol=1e-6)


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", FAST)
def test_dropout_drops_weights_and_keeps_their_mean(backend):
    tensors = [x.detach() for x in inputs(backend, sizes=(2, 40, 50, 3, 50))]
    tensors[2] = torch.eye(50, device=tensors[2].device).expand(2, H, 50, 50)  # output = weights
    dropped, weights = additive_attention(
        *tensors, dropout_p=0.3, need_weights=True, backend=backend
    )
    plain, _ = additive_attention(*tensors, backend=backend)
    torch.testing.assert_close(weights, plain, atol=1e-6, rtol=1e-5)
    gone = dropped == 0
    assert abs(gone.float().mean().item() - 0.3) < 0.01
    torch.testing.assert_close(dropped[~gone], (plain / 0.7)[~gone], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("backend", FAST)
def test_dropout_has_the_gradients_of_what_was_kept(backend):
    """With the values as the identity the output shows what was kept."""
    query, key, _, weight = (x.detach() for x in inputs(backend, sizes=(2, 9, 12, 3, 12)))
    value = torch.eye(12, device=query.device).expand(2, H, 12, 12)
    given = [x.clone().requires_grad_() for x in (query, key, value, weight)]
    output, _ = additive_attention(*given, dropout_p=0.4, backend=backend)
    pull = torch.randn(output.shape).to(output.device)
    found = torch.autograd.grad((output * pull).sum(), given)
    kept = (output.detach() != 0) / 0.6
    again = [x.clone().requires_grad_() for x in (query, key, value, weight)]
    _, weights = additive_attention(*again, need_weights=True, backend="reference")
    output = (weights * kept) @ again[2]
    wanted = torch.autograd.grad((output * pull).sum(), again)
    for one, two in zip(found, wanted):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


# --- the compiler ---------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No library built yet, an empty cache; everything is forgotten again afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled.library.cache_clear()
    compiled._fastest.cache_clear()
    yield tmp_path
    compiled.library.cache_clear()
    compiled._fastest.cache_clear()


def script(path, text: str):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


BROKEN = {
    "missing": ("/nowhere/c++", "No such file"),
    "failing": ("echo it cannot be >&2; exit 1", "failed: it cannot be"),
    "rubbish": ('for last; do :; done; echo rubbish > "$last"', "file too short"),
    "wrong": (
        'for last; do :; done; echo "void scores_float32(void){} void gradients_float32(void){}'
        'void scores_float64(void){} void gradients_float64(void){}" > "$last.c";'
        ' exec cc -shared -fPIC -o "$last" "$last.c"',
        "compute wrong numbers",
    ),
    "slow": ("exec sleep 60", "took over"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_without_a_good_compiler_auto_falls_back_and_says_so_once(fresh, monkeypatch, caplog, kind):
    command, reason = BROKEN[kind]
    if not command.startswith("/"):
        command = script(fresh / "compiler", command)
    monkeypatch.setenv("CXX", command)
    monkeypatch.setattr(compiled, "SECONDS", 1)
    tensors = inputs("chunked")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            output, _ = additive_attention(*tensors)
    assert torch.equal(output, additive_attention(*tensors, backend="chunked")[0])
    (line,) = caplog.messages
    assert "without compiled loops" in line and reason in line
    with pytest.raises(compiled.CompilerError, match=reason):
        additive_attention(*tensors, backend="compiled")


def test_no_compiler_at_all(fresh, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(compiled.CompilerError, match="no C\\+\\+ compiler was found"):
        compiled.library()


def test_library_is_compiled_once_for_all_processes(fresh):
    count = fresh / "count"
    compiler = script(fresh / "compiler", f'echo x >> {count}; exec c++ "$@"')
    code = (
        "import torch; from vlattn.attention.kernels import compiled; x = torch.randn(1, 1, 2, 3);"
        "print(compiled.additive_scores(x, x, x[0, 0, :1]).shape)"
    )
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", code], check=True, env={**os.environ, "CXX": compiler}
        )
    assert count.read_text() == "x\n"


@pytest.mark.parametrize("backend", ["reference", "chunked", "compiled", "auto"])
def test_autocast_leaves_scores_in_float32(backend):
    """The first use inside autocast compared the loops with products in bfloat16, and failed."""
    tensors = inputs("chunked")
    pull = torch.randn(B, H, T, N)

    def weights_and_gradients():
        _, weights = additive_attention(*tensors, need_weights=True, backend=backend)
        sources = (tensors[0], tensors[1], tensors[3])
        return weights, *torch.autograd.grad((weights * pull).sum(), sources)

    wanted = weights_and_gradients()
    compiled.library.cache_clear()
    compiled._fastest.cache_clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = weights_and_gradients()
    if backend == "reference":  # its gradients are products of autograd, as autocast wants them
        found = found[:1]
    for one, two in zip(found, wanted):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


def test_damaged_library_in_the_cache_is_built_again(fresh):
    compiled.library()
    (path,) = (fresh / "cache" / "vlattn").glob("*.so")
    compiled.library.cache_clear()
    path.unlink()  # the loaded one stays mapped
    path.write_bytes(b"damaged")
    compiled.library()
    assert path.read_bytes() != b"damaged"


# --- properties -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "triton"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_attention_keeps_its_laws(backend, data):
    """Hidden keys never matter, weights are distributions, and keys have no order."""
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    batch, kv_heads, groups, dim = draw(1, 3), draw(1, 3), draw(1, 3), draw(1, 9)
    queries, keys = draw(1, 9), draw(1, 9)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    torch.manual_seed(draw(0, 10_000))
    query = torch.randn(batch, kv_heads * groups, queries, dim, dtype=dtype)
    key, value = torch.randn(2, batch, kv_heads, keys, dim, dtype=dtype)
    weight = torch.randn(kv_heads * groups, dim, dtype=dtype)
    mask = torch.rand(batch, queries, keys) < data.draw(st.sampled_from([0.2, 0.7, 1.0]))

    def attend(query, key, value, mask):
        return additive_attention(
            query, key, value, weight, mask, need_weights=True, backend=backend
        )

    output, weights = attend(query, key, value, mask)
    close = (
        {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    )
    sums = mask.any(-1)[:, None].expand(weights.shape[:3]).to(dtype)
    torch.testing.assert_close(weights.sum(-1), sums, **close)
    assert weights.masked_select(~mask[:, None]).eq(0).all()

    order = torch.randperm(keys)
    moved, moved_weights = attend(query, key[:, :, order], value[:, :, order], mask[..., order])
    torch.testing.assert_close(moved, output, **close)
    torch.testing.assert_close(moved_weights, weights[..., order], **close)

    unseen = ~mask.any(1)[:, None, :, None]  # keys that no query may attend to
    spoiled = (x.masked_fill(unseen, torch.nan) for x in (key, value))
    torch.testing.assert_close(attend(query, *spoiled, mask)[0], output, **close)

    alone = torch.cat(
        [attend(*(x[b : b + 1] for x in (query, key, value, mask)))[0] for b in range(batch)]
    )
    torch.testing.assert_close(alone, output, **close)
