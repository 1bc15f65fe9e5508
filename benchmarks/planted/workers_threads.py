"""torch is told to use many more threads than there are cores."""

import os

import torch
from common import MENDED, fast, images, small_cnn, train

cores = len(os.sched_getaffinity(0))
torch.set_num_threads(cores if MENDED else 4 * cores)
train(small_cnn(16), fast(images()))
