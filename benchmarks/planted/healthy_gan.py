"""Two networks, two optimizers, one loop."""

import torch
from common import fast, functional, mlp, rows, train

generator, judge = mlp(512, 3, inputs=32), mlp(512, 3, inputs=10)
second = torch.optim.Adam(generator.parameters(), lr=1e-4)


def step(judge, optimizer, real, labels):
    made = generator(torch.randn(len(real), 32))
    optimizer.zero_grad()
    loss = functional.softplus(judge(made.detach())).mean() + functional.softplus(-judge(real[:, :10])).mean()
    loss.backward()
    optimizer.step()
    second.zero_grad()
    functional.softplus(-judge(made)).mean().backward()
    second.step()


train(judge, fast(rows(), 256), torch.optim.Adam(judge.parameters(), lr=1e-4), step=step)
