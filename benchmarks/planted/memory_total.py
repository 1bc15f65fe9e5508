"""The running loss is a tensor with its whole history."""

from common import MENDED, fast, mlp, rows, train

total = 0.0


def add(loss, output, labels):
    global total
    total = total + (loss.item() if MENDED else loss)


train(mlp(64), fast(rows()), after=add)
