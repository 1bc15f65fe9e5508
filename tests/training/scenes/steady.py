"""A job whose weights hardly depend on the number of ranks; the step `dies_in` ends as if it were killed."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import vivace

SAMPLES, BATCH, EPOCHS = 32, 8, 4
STEPS = SAMPLES // BATCH * EPOCHS


class Killed(BaseException):
    """No error of a job: nothing is kept, as at a SIGKILL."""


class Steps:
    taken = 0
    dies_in = None


def data():
    inputs = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=BATCH, shuffle=True)


def loss(model, batch):
    Steps.taken += 1
    if Steps.taken == Steps.dies_in:
        raise Killed
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


job = vivace.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)),
    data=data,
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7),
    epochs=EPOCHS,
)
