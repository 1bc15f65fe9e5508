"""oneDNN was turned off to hunt a bug, and stayed off."""

import torch
from common import MENDED, fast, images, small_cnn, train

torch.backends.mkldnn.enabled = MENDED
train(small_cnn(32), fast(images()))
