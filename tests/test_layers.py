import pytest
import torch
from torch import nn

from vlattn.layers import FEW_ROWS, Dropout, Linear, NormedProjection, lay_out_to_write, product


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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2,), (3, 5), (FEW_ROWS + 1,), (0, 4), ()])
def test_product_is_that_of_pytorch_in_either_order_of_storage(shape, bias):
    torch.manual_seed(0)
    linear, x = Linear(7, 11, bias=bias), torch.randn(*shape, 7)
    expected = nn.functional.linear(x, linear.weight, linear.bias)
    double = [None if p is None else p.double() for p in (linear.weight, linear.bias)]
    for _ in range(2):
        with torch.inference_mode():
            torch.testing.assert_close(linear(x), expected)
            in_double = product(x.double(), *double)
        torch.testing.assert_close(in_double, nn.functional.linear(x.double(), *double))
        lay_out_to_write(linear)


def test_product_under_autocast_is_in_its_precision():
    linear, x = Linear(7, 11), torch.randn(3, 7)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16


def test_weights_laid_out_to_write_learn_as_before():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Embedding(13, 7), Linear(7, 11), Linear(11, 5)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    lay_out_to_write(models[1])
    assert models[1][1].weight.stride() == (1, 11)
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for tokens in torch.arange(12).view(4, 3):
            model(tokens).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(one, other)


def test_a_projection_of_still_features_learns_what_one_of_learning_features_does():
    projection = NormedProjection(7, 5)
    for parameter in projection.parameters():
        nn.init.normal_(parameter)
    x, slope = 3 + 2 * torch.randn(2, 3, 7), torch.randn(2, 3, 5)
    outputs, gradients = [], []
    for learning in (False, True):
        projection.zero_grad()
        outputs.append(projection(x.clone().requires_grad_(learning)))
        outputs[-1].backward(slope)
        gradients.append([parameter.grad for parameter in projection.parameters()])
    outputs.append(projection.eval()(x))
    for found in outputs[1:]:
        torch.testing.assert_close(found, outputs[0])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)
