"""Triton's kernels are compiled for a GPU and launched; what they compute is tested by the interpreter."""

LAUNCHED = """
import warnings
import torch, triton  # what they warn of on import is theirs
from vivace.techniques.untried.fused_batchnorm.kernels.batch_norm_backward import backward
from vivace.techniques.untried.fused_batchnorm.kernels.batch_norm_forward import apply, moments
from vivace.techniques.untried.fused_batchnorm.kernels.product_forward import forward as product
warnings.simplefilter("error")
x, one, zero = torch.ones(64, 16).cuda(1), torch.ones(16).cuda(1), torch.zeros(16).cuda(1)
mean, rstd = moments(x, None, 64, 0, None, None, 0.1, 1e-5)
output, mask = apply(x, mean, rstd, one, zero, None, [], "relu")
gradients = backward(output, x, mask, mean, rstd, one, zero, "relu", False, None, [])
output, mask = apply(x, mean, rstd, one, zero, x, [mean, rstd, one, zero], "relu")
backward(output, x, mask, mean, rstd, one, zero, "relu", True, output, [x, mean, rstd, one, zero])
y, statistics = product(x, torch.ones(8, 16).cuda(1))
print(output.shape, gradients[0].shape, y.shape, statistics.device)
"""


def test_launches_warn_of_nothing(stand_in):
    """Triton 3.9 does where a kernel leaves to it whether a product and a sum are rounded once."""
    printed = stand_in.python(LAUNCHED, gpus=2)
    assert printed.strip() == "torch.Size([64, 16]) torch.Size([64, 16]) torch.Size([64, 8]) cuda:1"
