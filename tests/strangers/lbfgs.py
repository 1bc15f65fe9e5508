"""L-BFGS, which calls a closure several times a step."""

import torch
from torch import nn

import vivace

x = torch.linspace(-1, 1, 64).unsqueeze(1)


def step(model, optimizer, batch):
    inputs, targets = batch

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    return optimizer.step(closure).item()


job = vivace.Job(
    model=lambda: nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1)),
    data=lambda: [(x, torch.sin(3 * x))] * 5,
    optimizer=lambda model: torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe"
    ),
    step=step,
)
