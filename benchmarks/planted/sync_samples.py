"""Correct answers are counted one sample at a time."""

from common import MENDED, fast, mlp, rows, train

correct = 0


def count(loss, output, labels):
    global correct
    chosen = output.argmax(dim=1)
    if MENDED:
        correct += (chosen == labels).sum()
        return
    for index in range(len(labels)):
        correct += int(chosen[index].item() == labels[index].item())


train(mlp(256), fast(rows(), 256), after=count)
