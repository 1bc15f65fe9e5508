import sys

import pytest
import torch

from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import registry
from vivace.testing import TINY_JOBS, TechniqueContract

Tf32 = registry.find("tf32")


class TestTf32(TechniqueContract):
    technique = Tf32


def seen(*kernels):
    return Observation({}, {}, 0, 0.0, kernels=dict.fromkeys(kernels, 2))


def test_confirms_by_kernels_that_the_reference_did_not_run():
    evidence = Tf32().confirm(seen("sgemm", "gemm_tf32f32"), seen("sgemm"))
    assert evidence == "1 kernels not in the reference, 2 launches named tf32"


def test_same_kernels_are_no_evidence():
    with pytest.raises(Refused, match="changed nothing"):
        Tf32().confirm(seen("sgemm"), seen("sgemm", "other"))


def unseen(**dtypes):
    """What a machine shows whose CUPTI gives no kernels."""
    return Observation({"aten::mm": 2}, dtypes, 0, 0.0)


@pytest.mark.parametrize(("error", "acts"), [(3e-4, True), (2e-7, False)])
def test_where_no_kernels_are_shown_a_products_rounding_is_the_proof(monkeypatch, error, acts):
    monkeypatch.setattr(sys.modules[Tf32.__module__], "product_error", lambda device: error)
    if acts:
        evidence = Tf32().confirm(unseen(float32=4), unseen(float32=4))
        assert "shows no kernels" in evidence
        assert "off by 3e-04" in evidence
        with pytest.raises(Refused, match="no matrix operator read float32"):
            Tf32().confirm(unseen(bfloat16=4), unseen(float32=4))
    else:
        with pytest.raises(Refused, match="off by 2e-07"):
            Tf32().confirm(unseen(float32=4), unseen(float32=4))


def test_a_products_error_tells_tf32_from_fp32(monkeypatch):
    found = sys.modules[Tf32.__module__]
    assert found.product_error("cpu") < found.FP32_ERROR / 10
    product = torch.Tensor.__matmul__

    def rounded(left, right):  # TF32 keeps 10 bits of the mantissa's 23
        if left.dtype == torch.float32:
            left, right = (
                (t.view(torch.int32) + 2**12 & -(2**13)).view(torch.float32) for t in (left, right)
            )
        return product(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert found.product_error("cpu") > 10 * found.FP32_ERROR


@pytest.mark.gpu
def test_a_build_for_rocm_has_none_whatever_its_capabilities_are(monkeypatch):
    """A gfx90a calls itself 9.0, as an H100 does, and has no TF32."""
    machine = inspect()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(Refused, match="TF32 is NVIDIA's"), start(TINY_JOBS["mlp"](), Plan([Tf32()]), machine):
        pass


@pytest.mark.gpu
def test_allows_tf32_inside_of_the_session_only():
    with start(TINY_JOBS["mlp"](), Plan([Tf32()]), inspect()):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"


def switches():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.gpu
def test_the_older_switches_say_the_same_in_every_session():
    """Where they disagree, reading them raises: `torch.backends.cudnn.flags` and torch.compile read them."""
    before = switches()
    with start(TINY_JOBS["mlp"](), Plan(), inspect()):
        assert switches() == (False, False)
        with torch.backends.cudnn.flags(enabled=False):
            assert switches()[0] is False
        with start(TINY_JOBS["mlp"](), Plan([Tf32()]), inspect()):
            assert switches() == (True, True)
            assert torch.get_float32_matmul_precision() == "high"
        assert switches() == (False, False)
    assert switches() == before


def test_a_person_who_mixed_both_kinds_of_switches_finds_them_so_again():
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision
    mixed = "ieee" if torch.backends.cudnn.rnn.fp32_precision == "tf32" else "tf32"
    conv.fp32_precision = mixed
    try:
        with start(TINY_JOBS["mlp"](), Plan(), inspect()):
            assert conv.fp32_precision == "ieee"
        assert conv.fp32_precision == mixed
        with pytest.raises(RuntimeError, match="mix"):
            switches()
    finally:
        conv.fp32_precision = before
