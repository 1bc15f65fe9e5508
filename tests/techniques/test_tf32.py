import pytest
import torch

from vivace import registry
from vivace.engine.opening import start
from vivace.errors import Refused
from vivace.inspect import inspect
from vivace.ledger import Observation
from vivace.plan import Plan
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_allows_tf32_inside_of_the_session_only():
    with start(TINY_JOBS["mlp"](), Plan([Tf32()]), inspect()):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"
