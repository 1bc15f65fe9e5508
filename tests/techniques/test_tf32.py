import pytest
import torch

from vivace import registry
from vivace.engine.opening import start
from vivace.errors import Refused
from vivace.inspect import inspect
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.testing import TINY_JOBS, TechniqueContract
from vivace.testing.fake_cuda import fake_cuda

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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_allows_tf32_inside_of_the_session_only():
    with start(TINY_JOBS["mlp"](), Plan([Tf32()]), inspect()):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"


def switches():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def test_the_older_switches_say_the_same_in_every_session():
    """Where they disagree, reading them raises: `torch.backends.cudnn.flags` and torch.compile read them."""
    before = switches()
    with start(TINY_JOBS["mlp"](), Plan(), inspect()):
        assert switches() == (False, False)
        with torch.backends.cudnn.flags(enabled=False):
            assert switches()[0] is False
        with fake_cuda(), start(TINY_JOBS["mlp"](), Plan([Tf32()]), inspect()):
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
