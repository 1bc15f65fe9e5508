"""Kinds of kernels that a card runs at different shares of its rates: the words in which a profile counts and
an advice predicts. Imports no torch."""

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
