"""DataParallel: one process feeds all GPUs, and copies the model in each step."""

from common import MENDED, convolutions, learn, ready, train
from torch import nn

model = convolutions(64, 2)
if not MENDED:
    model = nn.DataParallel(model)
train(model, ready((64, 3, 32, 32)), lambda *batch: learn(model, *batch))
