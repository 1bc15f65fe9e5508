"""The one taxonomy of operators: the class of each by its name, and the finer kinds that advice is fitted to.

Every count of work and every share of time is told in these classes. Imports no torch: traces, profiles and
advice are read without it.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

SMALL_MAP = (
    64  # pixels an image, up to which convolutions on a CPU were seen to be slower than matrix products
)
LEAST_MASK = 4096  # numbers: of fewer, to read and write a generator's state takes as long as to draw

TILE = 4  # pixels along a side of what one tile of Winograd's filtering gives
NARROWEST_WINDOW = 32  # channels: of fewer, its transforms take what its products save
FEWEST_TILES = 32  # of a batch: of fewer, the transforms of the weights do
LEAST_FILLED = 60  # percent of the tiles' pixels that lie on the map

LEAST_SCORES = 16_384  # of queries and keys: of fewer, to go through Python takes as long as they do
LEAST_DROPPED, LEAST_DROPPED_FLOAT = 2**17, 2**21  # where weights are dropped, in bfloat16 and in float32
MOST_KEYS = 1024  # with more, PyTorch's attention, which never holds all scores of a query, is as fast
LEAST_ONE_BY_ONE = 16_384  # numbers: of fewer, to go through Python takes as long as they do
ONE_BY_ONE: tuple[str, ...] = ("where", "masked_fill", "masked_fill_", "_prelu_kernel_backward")
ONE_BY_ONE += ("max_pool2d_with_indices", "index_put", "index_put_", "_index_put_impl_")


def tiles_along(size: int) -> int:
    """How many of Winograd's tiles cover so many pixels."""
    return -(-size // TILE)


def gains_by_winograd(weight: Sequence[int], result: Sequence[int]) -> bool:
    """Do the shapes of a convolution's weights and result, at a stride of one, suit Winograd's filtering?"""
    (outputs, inputs, *window), (images, _, high, wide) = weight, result
    tiles = images * tiles_along(high) * tiles_along(wide)
    filled = 100 * images * high * wide >= LEAST_FILLED * TILE**2 * tiles
    return window == [3, 3] and min(outputs, inputs) >= NARROWEST_WINDOW and tiles >= FEWEST_TILES and filled


def _words(*words: str) -> str:
    """A pattern of whole words between underscores, each of them a pattern."""
    return rf"(^|_)({'|'.join(words)})(_|$)"


# The first class with a pattern that matches a name has the operator; what matches none is elementwise:
# arithmetic on each number and reductions, losses and softmax too.
_PATTERNS = {
    "attention": ("attention", _words("attn")),
    "recurrent": (_words("lstm", "gru", "rnn"),),
    "convolution": ("conv(?!ert)", "^depthwise_", "^winograd"),
    "norm": ("(batch|layer|group|instance|rms)_norm",),
    # Windows, orders, scans, transforms, decompositions, random numbers: neither a product nor one pass.
    "other": (
        "pool|upsample|interpolate|lanczos|grid_sample|im2col|col2im",
        "sort|topk|unique|nms|roi_|(?<!count_)nonzero|histogram|hist(c|ogramdd)",
        _words("kthvalue", "(nan)?median", "(nan)?quantile", "bucketize", "bincount", "segment_reduce"),
        "^mode$|ctc_loss|fft|^i?stft$|(^|_|log)cum(sum|prod|max|min)|sobol",
        "linalg_(?!matmul|multi_dot|norm|vector_norm|matrix_norm|vecdot|cross|diagonal|vander|_powsum)",
        "cholesky|triangular_solve|matrix_(exp|power)|^(svd|geqrf|orgqr|ormqr|p?inverse)$|(^|log)det$",
        "lu_(solve|unpack|with_info)|spsolve|[cp]dist(_|$)|euclidean_dist",
        "random|bernoulli|uniform|multinomial|^rand|_philox|dirichlet|^(log_)?normal$|normal_functional",
        _words("exponential", "geometric", "cauchy", "poisson(?!_nll)", "binomial", "standard_gamma"),
    ),
    "matmul": (
        _words("s?mm", "ss?paddmm|hspmm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "v?dot"),
        _words(
            "(chain_)?matmul",
            "(q|bi|tri)?linear(?!_(prepack|combination|quantize))",
            "einsum|tensordot|inner",
        ),
    ),
    # Numbers moved, written or found elsewhere, and what only describes them anew.
    "memory": (
        "copy(?!sign)|clone|(?<!is_)contiguous|embedding(?!_loss)|channel_shuffle|pixel_(un)?shuffle",
        _words(
            "(block_)?cat|concat|concatenate", "[hvd]?stack", "block_diag", "tile", "repeat", "roll", "rot90"
        ),
        _words("zeros?", "ones", "(?<!masked_)fill", "full", "empty", "eye", "arange", "tri[lu]", "constant"),
        _words("pad([123]d)?", "flip|fliplr|flipud", "index", "gather", "scatter", "take", "put", "one_hot"),
        _words("unfold", "slice", "select", "diagonal|diag_embed|diagflat", "narrow", "[hvd]?split", "chunk"),
        _words("as_strided", "view", "reshape", "(un)?flatten|ravel", "expand", "broadcast", "(un)?squeeze"),
        _words("transpose", "permute", "movedim|moveaxis", "swap(axes|dims)", "unbind", "alias", "detach"),
        _words("resize|resize_as", "pin_memory", "lift", "type_as", "cast", "meshgrid"),
        "^_?to(_|$)|^(t|adjoint|m[TH]|set)$|^lift",
    ),
}
_RULES = {name: re.compile("|".join(patterns)) for name, patterns in _PATTERNS.items()}
CLASSES = (*_RULES, "elementwise")
MATRIX_CLASSES = ("convolution", "matmul", "attention", "recurrent")

# Kinds of kernels that a card runs at different shares of its rates. The shipped tables hold places in this
# order.
MATRIX_KINDS = (
    "conv",
    "pointwise",
    "grouped",
    "irregular",
    "depthwise",
    "matmul",
    "batched",
    "attention",
    "recurrent",
)
KINDS = (*MATRIX_KINDS, "batch_norm", "layer_norm", "softmax", "elementwise", "copy", "memory", "other")
# The kinds that kernels of a class are counted as; the first is that of the class as a whole. No strict tree:
# what memory operators only stream runs as elementwise ones do.
KINDS_OF_CLASS = {
    "attention": ("attention",),
    "recurrent": ("recurrent",),
    "convolution": ("conv", "pointwise", "grouped", "irregular", "depthwise"),
    "norm": ("layer_norm", "batch_norm"),
    "other": ("other",),
    "matmul": ("matmul", "batched"),
    "memory": ("memory", "copy", "elementwise", "other"),
    "elementwise": ("elementwise", "softmax", "other"),
}


@functools.cache
def class_of(name: str) -> str:
    """The class of an operator by its name, bare or whole: ``matmul`` of ``aten::addmm`` and ``addmm_``."""
    short = name.rpartition("::")[2].partition(".")[0].removesuffix("_")
    return next((kind for kind, rule in _RULES.items() if rule.search(short)), "elementwise")


def is_operator(name: str) -> bool:
    """Is a profiler event a call of an operator (``aten::mm``), not a range or a backward node?"""
    return "::" in name and "autograd" not in name


def seconds_by_class(spent: Iterable[tuple[str, float]], *, on_device: bool) -> dict[str, float]:
    """Seconds of each class, from events of the profiler with the seconds that each took by itself.

    On a device every kernel counts, whatever launched it. On the host operators alone do: ranges and backward
    nodes only stand around them.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for name, own in spent:
        if on_device or is_operator(name):
            seconds[class_of(name)] += own
    return dict(seconds)
