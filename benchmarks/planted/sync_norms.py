"""Every step asks each weight for its largest entries, one value after another."""

from common import MENDED, fast, mlp, rows, train

model = mlp(128, 30)
history = {}


def log(loss, output, labels):
    if MENDED:
        return
    for name, parameter in model.named_parameters():
        history[name] = (parameter.detach().norm().item(), parameter.detach().abs().max().item())


train(model, fast(rows()), after=log)
