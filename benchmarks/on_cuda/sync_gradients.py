"""Python asks for the norm of every gradient in every step: the device waits for each question."""

from common import MENDED, learn, ready, small, train

model = small(layers=48)


def step(optimizer, inputs, labels):
    learn(model, optimizer, inputs, labels)
    norms = [weight.grad.norm() for weight in model.parameters()]
    if not MENDED:
        sum(norm.item() for norm in norms)


train(model, ready((64, 64)), step)
