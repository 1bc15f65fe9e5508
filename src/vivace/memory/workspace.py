"""What operators allocate for themselves while they run, where that is known and large.

A convolution on a CPU copies its inputs into oneDNN's blocked layout and its result out of it, unless they
are channels-last. The sums follow the order of its allocations, as torch's profiler shows them (torch 2.15).

A matrix product on a GPU gives cuBLAS a workspace from the caching allocator, of a size that is fixed
(aten/src/ATen/cuda/CublasHandlePool.cpp), and a sum over many rows takes one. LayerNorm copies what is not
contiguous, and the gradient of a softmax takes as much again. What cuDNN takes for a convolution is chosen on
the GPU itself, and not known here.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Any, NamedTuple

import torch

from vivace.torch_internals.tensors import Operator, schema_of

FEW_CHANNELS = 8  # with fewer the input is read as it is
KIB = 2**10
HOPPER = (9, 0)
BLAS_BYTES, BLAS_BYTES_BEFORE_HOPPER = 32 * KIB**2, (2 * 4096 + 8 * 16) * KIB
EPILOGUE_BYTES = KIB**2  # of a product with a bias, which cublasLt adds
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")
# Norms, and of how many inputs they read the numbers in order (ATen/native/cuda/layer_norm_kernel.cu).
READ_CONTIGUOUS = {"aten::native_layer_norm": 1, "aten::native_layer_norm_backward": 2}
FREES_WORKSPACES = (2, 15)  # torch from then on, after each product; before, each thread keeps its own
WARP, MOST_THREADS = 32, 512  # of a block that sums
FEW_VALUES, MANY_VALUES = 16, 256  # of a thread that sums


class Workspace(NamedTuple):
    """What an operator takes beside its result: does it stay taken, and is it there before the result?"""

    num_bytes: int = 0
    stays: bool = False
    first: bool = False


@dataclasses.dataclass
class GpuWorkspaces:
    """What operators of a GPU take; `blas_bytes` for a product, which a thread of torch may keep for good.

    The other figures are a processor's count and threads: a GPU's sum over rows is cut among them.
    """

    blas_bytes: int = BLAS_BYTES
    keeps: bool = False
    processors: int = 132  # an H100's
    threads: int = 2048
    kept: set[bool] = dataclasses.field(default_factory=set)

    @classmethod
    def of_torch(cls) -> GpuWorkspaces:
        """Those of this process's GPU, or of an H100 where there is none, under the installed torch."""
        found, capability = cls(), HOPPER
        if torch.cuda.is_available():
            card = torch.cuda.get_device_properties(torch.cuda.current_device())
            capability = (card.major, card.minor)
            found.processors, found.threads = card.multi_processor_count, card.max_threads_per_multi_processor
        told = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
        if told:
            found.blas_bytes = sum(int(kib) * int(count) for kib, count in told) * KIB
        elif capability < HOPPER:
            found.blas_bytes = BLAS_BYTES_BEFORE_HOPPER
        version = tuple(int(number) for number in torch.__version__.split(".")[:2])
        found.keeps = version < FREES_WORKSPACES
        return found

    def taken(self, function: Operator, arguments: tuple[Any, ...], phase: str) -> Workspace:
        """What one call of an operator in this phase takes beside its result."""
        name = schema_of(function).name
        if name == "aten::sum" and len(arguments) > 1 and arguments[1]:
            return Workspace(self._partial_sums(arguments[0], arguments[1]))
        if name == "aten::_softmax_backward_data":  # gradient times result (ATen/native/cuda/SoftMax.cu)
            return Workspace(_bytes(arguments[0]))
        if name in READ_CONTIGUOUS:
            inputs = arguments[: READ_CONTIGUOUS[name]]
            return Workspace(sum(_bytes(one) for one in inputs if not one.is_contiguous()), first=True)
        if name not in PRODUCTS:
            return Workspace()
        if self.keeps:
            by_autograd = phase == "backward"  # whose thread has one of its own
            is_new = by_autograd not in self.kept
            self.kept.add(by_autograd)
            return Workspace(self.blas_bytes if is_new else 0, stays=True)
        has_epilogue = name == "aten::addmm" and arguments[0].dim() == 1
        return Workspace(EPILOGUE_BYTES if has_epilogue else self.blas_bytes)

    def _partial_sums(self, tensor: torch.Tensor, dims: list[int]) -> int:
        """Of a sum over the outermost dimensions, as of a bias's gradient (ATen/native/cuda/Reduce.cuh)."""
        order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])
        summed = {dim % tensor.dim() for dim in dims}
        if not tensor.permute(order).is_contiguous() or summed != set(order[: len(dims)]):
            return 0
        columns = math.prod(tensor.shape[dim] for dim in order[len(dims) :])
        rows = tensor.numel() // max(1, columns)
        if not rows or not columns or len(dims) >= tensor.dim():
            return 0
        vector = next(size for size in (4, 2, 1) if columns % size == 0)
        most, wide = MOST_THREADS // vector, columns // vector
        across, down = (min(most, 1 << (size.bit_length() - 1)) for size in (wide, rows))
        width = min(across, WARP)
        height = min(down, most // width)
        width = min(across, most // height)
        values, grid = -(-rows // height), -(-wide // width)
        room = self.processors * (self.threads // (width * height))
        if rows < min(height * FEW_VALUES, MANY_VALUES) or values < MANY_VALUES or grid > room:
            return 0
        blocks = max(min(-(-room // grid), -(-values // FEW_VALUES)), -(-values // MANY_VALUES))
        item = max(4, tensor.element_size())  # halves are summed in float32
        return item * columns * blocks * width * vector if blocks > 1 else 0


def workspace_bytes(function: Operator, arguments: tuple[Any, ...], result: Any) -> int:
    """The most bytes that one call of an operator holds at a time, its results among them."""
    name = schema_of(function).name
    if name == "aten::convolution":
        inputs, weight = arguments[0], arguments[1]
        if not _blocked(inputs):
            return 0
        return max(_copied(inputs) + _bytes(weight) + _bytes(result), 2 * _bytes(result))
    if name == "aten::convolution_backward":
        gradient, inputs, weight = arguments[:3]
        if not _blocked(inputs):
            return 0
        copies = _bytes(gradient) + _copied(inputs) + 2 * _bytes(weight)
        wanted = arguments[-1]
        own = _bytes(inputs) if wanted[0] else 0
        in_order = 0 if gradient.is_contiguous() else _bytes(gradient)  # such as that of a mean, or of NHWC
        return in_order + max(_bytes(gradient) + _bytes(weight) + own, own + copies)
    return 0


def _blocked(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dim() in (3, 4, 5) and tensor.is_contiguous()


def _copied(tensor: torch.Tensor) -> int:
    return _bytes(tensor) if tensor.shape[1] >= FEW_CHANNELS else 0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
