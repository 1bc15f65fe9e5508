"""Classes of operators by their names. Imports no torch: a trace is read without it."""

from __future__ import annotations

import re

# The first pattern that matches an operator's name names its class; what matches none is elementwise.
CLASSES = {
    "attention": r"attention",
    "recurrent": r"(^|_)(lstm|gru|rnn)(_|$)",
    "convolution": r"conv(?!ert)",
    "norm": r"(batch|layer|group|instance|rms)_norm",
    "matmul": r"(^|_)(mm|addmm|bmm|baddbmm|mv|addmv|dot|matmul)(_|$)|linear(?!_)|linear_backward",
    "memory": r"copy|clone|contiguous|(slice|select|diagonal|as_strided)_backward|(?<!masked)(^|_)(cat|stack"
    r"|zeros?|ones|full|fill|index|gather|scatter|roll|flip|pad|repeat|constant|arange|eye|tril|triu)(_|$)",
    "other": r"pool|embedding|sort|topk|upsample|interpolate|grid_sample|unique|nonzero|fft|cumsum|unfold"
    r"|im2col|col2im|linalg|cdist|random|bernoulli|uniform|normal_|multinomial|nms|roi",
}


def work_class(name: str) -> str:
    """The class of an operator by its bare name, such as ``matmul`` for ``addmm``."""
    short = name.rpartition("::")[2].partition(".")[0].removesuffix("_")
    return next((kind for kind, pattern in CLASSES.items() if re.search(pattern, short)), "elementwise")
