"""1x1 convolutions that leave BatchNorm's statistics: the Triton kernel interpreted, and the reference."""

import copy

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from vivace.techniques.fused_batchnorm.kernels import splits
from vivace.techniques.fused_batchnorm.kernels.batch_norm import Norm, fused
from vivace.techniques.fused_batchnorm.kernels.product import product
from vivace.techniques.fused_batchnorm.kernels.splits import split_rows, tile_of
from vivace.work.count import count_work

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = 40
# Sums in fp32, the output's of numbers whose mean is some deviations off; a rounding of the results in fp16.
ALLOWED = {"torch.float32": 1e-5, "torch.float16": 1e-3}


@pytest.mark.slow
def test_the_kernel_is_its_reference_on_random_shapes(interpreted):
    cases = interpreted("interpreted_products.py", SHAPES)
    wrong = [c for c in cases if not max(c["errors"].values()) < ALLOWED[c["dtype"]]]
    assert wrong == []
    exact = ("running mean", "running variance")  # of the numbers as they are rounded, in every type
    assert max(c["errors"][name] for c in cases for name in exact) < 1e-6
    assert {c["order"] for c in cases} == {"nhwc", "nchw", "sliced", "expanded"}
    assert {1, 2, 3} <= {c["splits"] for c in cases}


def drawn(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype)


def test_gradients_are_those_of_its_values(monkeypatch):
    monkeypatch.setattr(splits, "TILE", 128)
    monkeypatch.setattr(splits, "PROGRAMS", 3)
    inputs = [t.requires_grad_() for t in (drawn(2, 8, 3, 4), drawn(16, 8, 1, 1), drawn(16), drawn(16) + 1)]

    def function(x, weight, *affine):
        y, statistics = product(x, weight)
        assert statistics.shape == (2, 3, 16)
        spared = (statistics, split_rows(24, 16))
        return fused(y, None, Norm(*affine, None, None, 0.1, 1e-5, spared), "relu")

    assert torch.autograd.gradcheck(function, inputs)
    z = functional.batch_norm(functional.conv2d(*inputs[:2]), None, None, *inputs[2:], True, 0.1, 1e-5)
    torch.testing.assert_close(function(*inputs), functional.relu(z))


def test_a_mean_far_from_zero_does_not_drown_the_variance():
    """The difference of two large sums would leave nothing of a variance of one beside a mean of 4096."""
    x = drawn(4, 8, 16, 16, dtype=torch.float32)
    weight = torch.eye(8)[:, :, None, None]
    y, statistics = product(x + 4096, weight)
    found = [torch.zeros(8), torch.zeros(8)]
    fused(y, None, Norm(None, None, *found, 1.0, 1e-5, (statistics, split_rows(1024, 8))))
    wanted = (x + 4096).double().var((0, 2, 3))
    torch.testing.assert_close(found[1].double(), wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (802_816, 64), (12_544, 2048), (200_704, 24)])
def test_splits_are_whole_tiles_and_few(num_rows, width):
    rows, columns = tile_of(width)
    split = split_rows(num_rows, width)
    assert split % rows == 0
    assert -(-num_rows // split) * -(-width // columns) <= splits.PROGRAMS


def test_shapes_and_operations_are_known_without_numbers():
    x, weight = drawn(60, 8, dtype=torch.float32), drawn(24, 8, dtype=torch.float32)
    torch.library.opcheck(torch.ops.vivace.statistics_mm.default, (x, weight))
    _, statistics = torch.ops.vivace.statistics_mm(x, weight)
    arguments = (None, statistics, 60, split_rows(60, 24), torch.zeros(24), torch.ones(24), 0.1, 1e-5)
    torch.library.opcheck(torch.ops.vivace.batch_norm_moments.default, copy.deepcopy(arguments))
    with FlopCounterMode(display=False) as counter:
        torch.ops.vivace.statistics_mm(x, weight)
    assert counter.get_total_flops() == 2 * 60 * 8 * 24


def test_one_read_of_the_feature_map_is_spared_and_counted():
    x, weight = torch.empty(2, 8, 16, 16, device="meta"), torch.empty(16, 8, 1, 1, device="meta")

    def step(spare):
        y, statistics = product(x, weight)
        spared = (statistics, split_rows(512, 16)) if spare else None
        fused(y, None, Norm(None, None, None, None, 0.1, 1e-5, spared), "relu")

    with_it, without = (
        count_work(lambda spare=spare: step(spare)).operators["norm"] for spare in (True, False)
    )
    (statistics,) = {4 * 2 * 16 * -(-512 // split_rows(512, 16))}
    assert without.bytes - with_it.bytes == 4 * 2 * 16 * 16 * 16 - statistics
