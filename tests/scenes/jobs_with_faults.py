"""Jobs with one fault each, and some that talk: what the command line has to say a sentence about."""

import os
import subprocess

import torch

import vivace

print("printed at import")
GOOD = {
    "model": lambda: torch.nn.Linear(4, 2),
    "data": lambda: [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(4)],
    "loss": lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


def but(**changes):
    return vivace.Job(**{**GOOD, **changes})


def ask(*_):
    return input("go on? ")


def refuse_to_load(index):
    raise KeyError(f"sample {index} is gone")


def talk(*_):
    print("printed in data", flush=True)
    subprocess.run(["echo", "printed by a child process"], check=True)
    return GOOD["data"]()


def talk_in_loss(model, batch):
    print("printed in loss")
    return GOOD["loss"](model, batch)


def own_step_without_loss(model, optimizer, batch):
    optimizer.zero_grad()
    GOOD["loss"](model, batch).backward()
    optimizer.step()


good = but()
vector_loss = but(loss=lambda model, batch: model(batch[0]).sum(1))
no_loss = but(loss=lambda model, batch: None)
float_loss = but(loss=lambda model, batch: GOOD["loss"](model, batch).item())
nan = but(loss=lambda model, batch: model(batch[0]).sum() * float("nan"))
empty = but(data=list)
raising = but(loss=lambda model, batch: 1 // 0)
quits = but(model=lambda: exit(0))
quits_in_loss = but(loss=lambda model, batch: exit(0))
leaves_at_once = but(loss=lambda model, batch: os._exit(0))
asks = but(loss=ask)
no_module = but(model=lambda: "resnet50")
no_optimizer = but(optimizer=lambda model: None)
foreign_optimizer = but(optimizer=lambda model: torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))
lost_samples = but(data=lambda: map(refuse_to_load, range(3)))
silent_step = vivace.Job(**{**GOOD, "loss": None, "step": own_step_without_loss})
two_losses = vivace.Job(**{**GOOD, "loss": None, "step": lambda *_: (torch.ones(()), torch.ones(()))})
noisy = but(data=talk, loss=talk_in_loss)
text = "not a job"


def asked():
    ask()
    return good
