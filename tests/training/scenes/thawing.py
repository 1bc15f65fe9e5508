"""Jobs of which a schedule sets weights free after the second epoch, for one rank or several."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import vivace

ROWS = torch.randn(80, 2, generator=torch.Generator().manual_seed(0))


class Thaw:
    """Trains all weights of its optimizer from the third epoch on."""

    def __init__(self, optimizer):
        self.optimizer, self.epochs = optimizer, 0

    def step(self):
        self.epochs += 1
        if self.epochs == 2:
            self.thaw()

    def thaw(self):
        for weight in self.optimizer.param_groups[0]["params"]:
            weight.requires_grad_(True)

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


class Unfreeze(Thaw):
    """Gives its optimizer the body of the newest model from the third epoch on, in a group of its own."""

    def thaw(self):
        body = Unfreeze.body.requires_grad_(True)
        self.optimizer.add_param_group({"params": body.parameters(), "lr": 1e-2, "momentum": 0.5})


class Extend(Thaw):
    """Does it within the group that there is."""

    def thaw(self):
        self.optimizer.param_groups[0]["params"].extend(Unfreeze.body.requires_grad_(True).parameters())


def frozen():
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    Unfreeze.body = model[0].requires_grad_(False)
    return model


def job_of(scheduler, weights):
    return vivace.Job(
        model=frozen,
        data=lambda: DataLoader(TensorDataset(ROWS), batch_size=4),
        loss=lambda model, batch: model(batch[0]).pow(2).mean(),
        optimizer=lambda model: torch.optim.SGD(weights(model).parameters(), lr=0.1),
        scheduler=scheduler,
        epochs=4,
    )


thawing = job_of(Thaw, lambda model: model)
unfreezing = job_of(Unfreeze, lambda model: model[2])
extending = job_of(Extend, lambda model: model[2])
