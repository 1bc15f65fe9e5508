"""What the kernels of `fused_batchnorm` are tried on; imports no torch."""

from __future__ import annotations

# Rows of one image, and channels: the BatchNorms of ResNet-50, the last two with an addition.
SHAPES = {
    "112x112x64": (112 * 112, 64, False),
    "56x56x64": (56 * 56, 64, False),
    "28x28x128": (28 * 28, 128, False),
    "14x14x256": (14 * 14, 256, False),
    "7x7x512": (7 * 7, 512, False),
    "56x56x256 + add": (56 * 56, 256, True),
    "28x28x512 + add": (28 * 28, 512, True),
    "14x14x1024 + add": (14 * 14, 1024, True),
    "7x7x2048 + add": (7 * 7, 2048, True),
}
# Rows of one image, and channels before and after: 1x1 convolutions of ResNet-50.
PRODUCTS = {
    "56x56 64-256": (56 * 56, 64, 256),
    "56x56 256-64": (56 * 56, 256, 64),
    "28x28 128-512": (28 * 28, 128, 512),
    "14x14 1024-256": (14 * 14, 1024, 256),
    "7x7 512-2048": (7 * 7, 512, 2048),
}
BATCH, ROUNDS = 256, 10
FEW_CASES, NUM_CASES = 5, 60
# Of the norm of what is compared: a rounding of the output, and sums in fp32.
ALLOWED = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}
