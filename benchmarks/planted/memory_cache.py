"""Each step's outputs are appended to a list for later."""

from common import MENDED, fast, images, small_cnn, train

seen = []


def keep(loss, output, labels):
    seen.append(output.detach().repeat(64, 32))
    if MENDED:
        seen.clear()


train(small_cnn(8), fast(images()), after=keep)
