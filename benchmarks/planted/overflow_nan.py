"""The loss takes the logarithm of zero, and is not a number from then on."""

import torch
from common import MENDED, fast, functional, mlp, rows, train


def loss(output, labels):
    chance = torch.softmax(output * (1 if MENDED else 1000), dim=1)
    return functional.nll_loss(torch.log(chance), labels)


train(mlp(256), fast(rows()), loss=loss)
