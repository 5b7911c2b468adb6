import pytest
import torch
from torch import nn

from vlattn.layers import Dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_drops_the_share_and_keeps_the_mean(dtype):
    torch.manual_seed(0)
    x = torch.ones(301, 1003, dtype=dtype, requires_grad=True)
    y = Dropout(0.3)(x)
    dropped = y == 0
    assert y.dtype == dtype
    # 302,000 draws: three standard deviations are 0.0025, over all and at each place of a word
    assert float(dropped.float().mean()) == pytest.approx(0.3, abs=0.0025)
    for place in range(4):
        share = float(dropped.flatten()[place::4].float().mean())
        assert share == pytest.approx(0.3, abs=0.005)
    torch.testing.assert_close(y[~dropped], torch.full_like(y[~dropped], 1 / 0.7))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_dropout_draws_the_same_for_a_seed_and_differs_between_rows():
    x, dropout = torch.ones(5, 4003), Dropout(0.5)
    torch.manual_seed(7)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(7)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)
    same = (first[0] == first[1]).float().mean()
    assert float(same) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_all_is_that_of_pytorch(p):
    x = torch.randn(3, 7)
    assert torch.equal(Dropout(p)(x), nn.Dropout(p)(x))
    assert torch.equal(Dropout(0.9).eval()(x), x)


def test_dropout_of_no_numbers_and_under_compile():
    assert Dropout(0.4)(torch.ones(0, 5)).shape == (0, 5)
    compiled = torch.compile(Dropout(0.4), fullgraph=True, backend="aot_eager")
    y = compiled(torch.ones(64, 65))
    assert 0.3 < float((y == 0).float().mean()) < 0.5
