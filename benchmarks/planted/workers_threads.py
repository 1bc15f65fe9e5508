"""torch is told to use one thread; on one core, many."""

import os

import torch
from common import MENDED, fast, images, small_cnn, train

cores = len(os.sched_getaffinity(0))
wrong = 1 if cores > 1 else 16
torch.set_num_threads(cores if MENDED else wrong)
train(small_cnn(64), fast(images()))
