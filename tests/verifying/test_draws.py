"""Random numbers are the same whatever memory order and width a tensor has, while plans are judged."""

import pytest
import torch
from torch.nn import functional

from vivace.verifying.draws import LogicalDraws

DRAWS = {
    "dropout": lambda x: functional.dropout(torch.ones_like(x), 0.3) != 0,
    "dropout in place": lambda x: functional.dropout(torch.ones_like(x), 0.3, inplace=True) != 0,
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "randn_like with an order": lambda x: torch.randn_like(x, memory_format=torch.channels_last),
    "rand_like with a width": lambda x: torch.rand_like(x, dtype=torch.float32),
}
FORMS = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "bfloat16": lambda x: x.bfloat16(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("draw", DRAWS)
def test_all_forms_of_a_tensor_draw_alike(draw, form):
    plain = torch.zeros(4, 6, 5, 7)

    def drawn(tensor):
        torch.manual_seed(3)
        with LogicalDraws():
            return DRAWS[draw](tensor)

    expected, found = drawn(plain), drawn(FORMS[form](plain))
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=2**-7)
    torch.manual_seed(3)
    torch.testing.assert_close(drawn(plain), expected)


def test_what_is_drawn_keeps_its_form():
    tensor = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    with LogicalDraws() as draws:
        found = torch.randn_like(tensor)
        assert draws.rearranged
    assert found.dtype == torch.bfloat16
    assert found.stride() == tensor.stride()


def test_sixteen_bits_draw_below_one():
    with LogicalDraws():
        assert torch.rand_like(torch.zeros(200_000, dtype=torch.bfloat16)).max() < 1


def test_contiguous_tensors_draw_as_ever():
    torch.manual_seed(1)
    expected = torch.randn_like(torch.zeros(3, 4)), functional.dropout(torch.ones(5, 5))
    torch.manual_seed(1)
    with LogicalDraws() as draws:
        found = torch.randn_like(torch.zeros(3, 4)), functional.dropout(torch.ones(5, 5))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not draws.rearranged


@pytest.mark.parametrize("attention", [True, False])
def test_attention_that_leaves_nothing_out_draws_nothing(attention):
    """Torch tags its operators as drawing."""
    heads = torch.randn(2, 2, 8, 8, requires_grad=True)
    before = torch.get_rng_state()
    with LogicalDraws(attention=attention) as draws:
        functional.scaled_dot_product_attention(heads, heads, heads).sum().backward()
    assert not draws.inside
    assert torch.equal(before, torch.get_rng_state())
