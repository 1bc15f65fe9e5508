"""torch is told to use one thread."""

import os

import torch
from common import MENDED, fast, images, small_cnn, train

torch.set_num_threads(len(os.sched_getaffinity(0)) if MENDED else 1)
train(small_cnn(64), fast(images()))
