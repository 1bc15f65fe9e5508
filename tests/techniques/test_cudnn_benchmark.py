import pytest
import torch

from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import registry
from vivace.testing import TINY_JOBS, TechniqueContract

CudnnBenchmark = registry.find("cudnn_benchmark")


class TestCudnnBenchmark(TechniqueContract):
    technique = CudnnBenchmark


def seen(*kernels):
    return Observation({}, {}, 0, 0.0, kernels=dict.fromkeys(kernels, 1))


def test_confirms_by_kernels_that_the_reference_did_not_run():
    assert (
        CudnnBenchmark().confirm(seen("winograd"), seen("implicit_gemm")) == "1 kernels not in the reference"
    )
    with pytest.raises(Refused, match="changed nothing"):
        CudnnBenchmark().confirm(seen("winograd"), seen("winograd"))


def test_where_no_kernels_are_shown_cudnns_convolutions_are_the_proof():
    def unseen(**operators):
        return Observation({f"aten::{name}": n for name, n in operators.items()}, {}, 0, 0.0)

    evidence = CudnnBenchmark().confirm(unseen(cudnn_convolution=3), unseen(cudnn_convolution=3))
    assert "shows no kernels" in evidence
    assert "3 convolutions" in evidence
    with pytest.raises(Refused, match="no convolution"):
        CudnnBenchmark().confirm(unseen(mm=3), unseen(mm=3))


@pytest.mark.gpu
def test_searches_inside_of_the_session_only():
    with start(TINY_JOBS["cnn"](), Plan([CudnnBenchmark()]), inspect()):
        assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark
