"""A small convolutional network, its loss printed every hundred steps."""

from common import fast, images, small_cnn, train

steps = 0


def report(loss, output, labels):
    global steps
    steps += 1
    if steps % 100 == 0:
        print(f"loss {loss.item():.3f}")


train(small_cnn(32), fast(images()), after=report)
