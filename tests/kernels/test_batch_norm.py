"""Training BatchNorm with add and activation: the Triton kernels in their interpreter, and the reference."""

import copy
import itertools

import pytest
import torch
from torch.nn import functional

from vivace.techniques.fused_batchnorm.kernels.batch_norm import (
    ACTIVATIONS,
    Norm,
    fused,
    fused_twice,
    pack,
    unpack,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = 45
NEITHER = (None, None)
PLAIN = Norm(*NEITHER, *NEITHER, 0.1, 1e-5)
# Sums in fp32 of numbers whose mean is up to fifty deviations off; a rounding of the output in fp16.
ALLOWED = {"torch.float32": 2e-5, "torch.float16": 1e-3}


@pytest.mark.slow
def test_kernels_are_their_reference_on_random_shapes(interpreted):
    cases = interpreted("interpreted.py", SHAPES)
    wrong = [c for c in cases if not max(c["errors"].values()) < ALLOWED[c["dtype"]]]
    assert wrong == []
    assert {c["activation"] for c in cases} == set(ACTIVATIONS)
    assert {c["order"] for c in cases} == {"nhwc", "nchw", "sliced", "expanded"}
    assert any(c["shape"][0] == 1 for c in cases)
    assert any(c["shape"][1] % 8 for c in cases)
    assert {(c["gradients"], c["joined"]) for c in cases} == {(1, False), (1, True), (2, False), (2, True)}


@pytest.mark.parametrize(
    ("activation", "with_residual", "affine"),
    [
        (activation, with_residual, affine)
        for activation, with_residual, affine in itertools.product(ACTIVATIONS, (False, True), (False, True))
        if not with_residual or activation in ("none", "relu", "relu6")
    ],
)
def test_the_references_gradients_are_those_of_its_values(activation, with_residual, affine):
    numbers = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=numbers, dtype=torch.float64, requires_grad=True)

    inputs = [draw(2, 3, 2, 3), draw(2, 3, 2, 3) if with_residual else None]
    inputs += [draw(3), draw(3)] if affine else [None, None]

    def function(*given):
        x, residual, *affine = given
        one, other = fused_twice(x, residual, Norm(*affine, *NEITHER, 0.1, 1e-5), activation)
        return one, other.sin()

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradcheck(lambda *given: function(*given)[1], inputs)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "relu6"])
def test_two_norms_that_are_added_are_pytorchs(activation, affine):
    numbers = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=numbers, dtype=torch.float64, requires_grad=True)

    inputs = [draw(2, 3, 2, 3), draw(2, 3, 2, 3), *([draw(3) for _ in range(4)] if affine else [])]

    def function(x, residual, *given):
        affines = [*given, *(None,) * 4][:4]
        norms = [Norm(*affines[2 * k : 2 * k + 2], *NEITHER, 0.1, 10.0**-k) for k in range(2)]
        one, other = fused_twice(x, residual, norms[0], activation, norms[1])
        return one, other.sin()

    assert torch.autograd.gradcheck(function, inputs)
    x, residual, *affines = inputs
    affines = [*affines, *(None,) * 4]
    first = functional.batch_norm(x, *NEITHER, *affines[:2], True, 0.1, 1.0)
    second = functional.batch_norm(residual, *NEITHER, *affines[2:4], True, 0.1, 0.1)
    wanted = {"none": lambda z: z, "relu": functional.relu, "relu6": functional.relu6}[activation](
        first + second
    )
    torch.testing.assert_close(function(*inputs)[0], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 5, 3, 2), (6, 3), (2, 4, 5), (2, 3, 2, 3, 2)])
def test_it_is_pytorchs_batch_norm(shape, dtype):
    torch.manual_seed(0)
    x, residual = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(2))
    mean, variance = torch.randn(shape[1]), torch.rand(shape[1])
    weight, bias = (torch.randn(shape[1], requires_grad=True) for _ in range(2))
    theirs, mine = (mean.clone(), variance.clone()), (mean.clone(), variance.clone())
    wanted = functional.relu(functional.batch_norm(x, *theirs, weight, bias, True, 0.3, 1e-3) + residual)
    seen = fused(x, residual, Norm(weight, bias, *mine, 0.3, 1e-3), "relu")
    rough = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(seen, wanted, rtol=rough, atol=rough)
    assert seen.dtype == dtype
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    gradient = torch.randn(shape).to(dtype)
    inputs = (x, residual, weight, bias)
    pairs = zip(
        torch.autograd.grad(seen, inputs, gradient),
        torch.autograd.grad(wanted, inputs, gradient),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=rough, atol=10 * rough)


def test_not_a_number_stays_one():
    """A ReLU must not hide an overflow from the loss scaler."""
    x = torch.randn(2, 3, 2, 2)
    x[0, 1] = float("nan")
    assert fused(x, None, PLAIN, "relu")[:, 1].isnan().all()


def test_one_value_a_channel_is_an_error_as_in_pytorch():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fused(torch.randn(1, 3, 1, 1), None, PLAIN)


def test_a_residual_of_another_type_widens_the_output():
    x, residual = (
        torch.randn(2, 8, 2, 2).bfloat16().requires_grad_(),
        torch.randn(2, 8, 2, 2, requires_grad=True),
    )
    seen = fused(x, residual, PLAIN, "relu")
    assert seen.dtype == torch.float32
    seen.sum().backward()
    assert (x.grad.dtype, residual.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("width", [1, 7, 8, 9, 24])
def test_bits_come_back(width):
    bits = torch.rand(5, width) > 0.5
    packed = pack(bits)
    assert packed.shape == (5, -(-width // 8))
    assert torch.equal(unpack(packed, width), bits)


def test_shapes_are_known_without_numbers():
    """What memory is predicted from, and what torch.compile sees."""
    numbers = [torch.rand(6) for _ in range(6)]
    x, residual = torch.randn(18, 6), torch.randn(18, 6)
    operators = torch.ops.vivace
    arguments = (x, None, 18, 0, *numbers[:2], 0.1, 1e-5)
    torch.library.opcheck(operators.batch_norm_moments.default, copy.deepcopy(arguments))
    moments = operators.batch_norm_moments(*arguments)
    for other in ([], [*numbers[2:4]], [*numbers[2:6]]):
        arguments = (x, *moments, *numbers[:2], residual, other, "relu")
        torch.library.opcheck(operators.batch_norm_apply.default, arguments)
        output, mask = operators.batch_norm_apply(*arguments)
        for again in (None, output):
            joined = [residual, *other] if other else []
            saved = (mask, *moments, *numbers[:2], "relu", True, again, joined)
            torch.library.opcheck(operators.batch_norm_backward.default, (output, x, *saved))


def test_results_can_be_changed_in_place():
    """As PyTorch's can, by a Dropout for instance."""
    x = torch.randn(2, 3, 2, 2, requires_grad=True)
    result = fused(x, None, PLAIN, "relu")
    result *= 2
    result.sum().backward()
    wanted = x.detach().requires_grad_()
    (2 * functional.relu(functional.batch_norm(wanted, None, None, training=True))).sum().backward()
    torch.testing.assert_close(x.grad, wanted.grad)
