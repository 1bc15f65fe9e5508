"""Shadows round what a plan rounds, and nothing else."""

import pytest
import torch
from torch.nn import functional

from vivace.verifying.halves import Halves
from vivace.verifying.shadow import Rounding

ROUNDOFF = 2.0**-8
MASKS = {
    "boolean": torch.ones(5, 5).tril().bool(),
    "-inf": torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf),
    "smallest": torch.zeros(5, 5).masked_fill(
        torch.ones(5, 5).triu(1).bool(), torch.finfo(torch.float32).min
    ),
}


def attended(mask):
    torch.manual_seed(0)
    query = torch.randn(2, 3, 5, 8, requires_grad=True)
    output = functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    output.square().sum().backward()
    return output.detach(), query.grad


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_stays_one_under_rounding(mask):
    with Rounding(ROUNDOFF, seed=0, halves={}):
        found = attended(MASKS[mask])
    for mine, theirs in zip(found, attended(MASKS[mask]), strict=True):
        assert 1e-4 < (mine - theirs).norm() / theirs.norm() < 4 * ROUNDOFF


def test_key_padding_stays_a_mask_under_rounding():
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    inputs, padding = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    with Rounding(ROUNDOFF, seed=0, halves={}):
        output, _ = module(inputs, inputs, inputs, padding, need_weights=False)
    assert output.isfinite().all()


def test_numbers_too_large_to_round_stay_as_they_are():
    large = torch.full((2, 2), 3e38)
    with Rounding(ROUNDOFF, seed=0, halves={}):
        assert (torch.eye(2) @ large).isfinite().all()


def test_products_of_complex_numbers_are_rounded_forward_and_backward():
    torch.manual_seed(0)
    inputs, weight = torch.randn(8, 8, dtype=torch.complex64), torch.randn(8, 8, dtype=torch.complex64)

    def product():
        mine = weight.clone().requires_grad_()
        output = inputs @ mine.mH  # its conjugate is a view that is computed later
        output.abs().square().sum().backward()
        return output.detach(), mine.grad

    plain = product()
    with Rounding(ROUNDOFF, seed=0, halves={}):
        found = product()
    for mine, theirs in zip(found, plain, strict=True):
        assert 1e-4 < (mine - theirs).norm() / theirs.norm() < 4 * ROUNDOFF


@pytest.mark.parametrize(
    ("rounds", "function"),
    [
        (False, torch.lgamma),
        (False, torch.cummax),
        (False, lambda x, _: functional.interpolate(x[None, None], scale_factor=2, mode="bilinear")),
        (True, torch.mv),
        (True, torch.dot),
        (True, lambda x, y: functional.conv1d(x[None], x[:, :, None] + y[0])),
    ],
)
def test_products_are_rounded_and_what_only_sounds_like_one_is_not(rounds, function):
    torch.manual_seed(0)
    matrix, vector = torch.rand(8, 8), torch.rand(8)
    arguments = {torch.lgamma: (matrix,), torch.cummax: (matrix, 0), torch.dot: (vector, vector)}
    given = arguments.get(function, (matrix, vector))
    plain = function(*given)
    with Rounding(ROUNDOFF, seed=0, halves={}):
        found = function(*given)
    plain, found = (x if isinstance(x, torch.Tensor) else x[0] for x in (plain, found))
    assert torch.equal(plain, found) is not rounds


def test_the_statistic_of_attention_is_not_rounded():
    query = torch.randn(2, 3, 5, 8)
    plain = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query)
    rounding = Rounding(ROUNDOFF, seed=0, halves={})
    rounding._round = lambda tensor: tensor * 2 if tensor.dim() == 3 else tensor
    with rounding:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query)
    assert torch.equal(found[1], plain[1])


def masked(inputs, weight):
    torch.manual_seed(0)
    return functional.relu(functional.dropout(inputs @ weight, 0.25)), inputs * 3


def test_what_a_plan_stores_in_half_is_rounded_where_it_does():
    inputs, weight = torch.randn(64, 64), torch.randn(64, 64)
    with Halves() as halves, torch.autocast("cpu", torch.bfloat16):
        masked(inputs, weight)
    assert {place[0] for place in halves.places()} == {"div_.Scalar", "mul.Tensor", "relu.default"}
    ours, theirs = [], masked(inputs, weight)
    for seed in range(8):
        rounding = Rounding(ROUNDOFF, seed, halves.places())
        rounding._round = lambda tensor: tensor * 1.5
        with rounding:
            ours = masked(inputs, weight)
        assert torch.equal(ours[1], theirs[1]), "this product is in fp32 under autocast, too"
        assert ours[0].max() > theirs[0].max()
