"""A job of a few milliseconds a step that meets a fault at one step of one rank; see ../faults.py.

FAULT says which, AT at which step of this process, WHO on which rank, FOLDER where its pictures lie.
"""

import os
import shutil
import signal
import time
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, get_worker_info

import vivace

FAULT, AT = os.environ.get("FAULT", ""), int(os.environ.get("AT", "0"))
RANK, WHO = os.environ.get("RANK", "0"), os.environ.get("WHO", "0")
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
SAMPLES, BATCH, EPOCHS = 96, 8, 2
steps = 0


def falls(*faults):
    return FAULT in faults and steps == AT and RANK == WHO and FIRST


class Data(Dataset):
    """Numbers, or pictures of a folder; some faults fall in its workers."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if get_worker_info() is not None and index == 41:
            once = Path(os.environ["FOLDER"], "once")
            if FAULT == "worker_raises":
                raise ValueError("this sample is odd")
            if FAULT == "worker_hangs":
                time.sleep(1000)
            if FAULT == "worker_killed" and not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if FAULT.startswith("pictures"):
            with Image.open(Path(os.environ["FOLDER"], "pictures", f"{index}.png")) as picture:
                return torch.tensor(list(picture.convert("L").getdata())).float()[:8] / 255, index % 3
        noise = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return noise + 0.1 * torch.rand(8), int(noise[:3].argmax())


def data():
    workers = 2 if FAULT.startswith("worker") else 0
    return DataLoader(
        Data(), BATCH, shuffle=True, num_workers=workers, timeout=5 if FAULT == "worker_hangs" else 0
    )


class Net(torch.nn.Sequential):
    """Two layers; some faults fall in its forward pass."""

    def __init__(self):
        super().__init__(
            torch.nn.Linear(8, 32), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(32, 3)
        )

    def forward(self, x):
        if FAULT == "memory" and RANK == WHO and steps >= AT and len(x) > BATCH // 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        out = super().forward(x)
        if falls("inf_gradient"):
            out.register_hook(lambda gradient: gradient * float("inf"))
        return out


def loss(model, batch):
    global steps
    steps += 1
    time.sleep(0.01)
    if falls("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if falls("terminate", "hang_up", "slurm"):
        name = {"terminate": "SIGTERM", "hang_up": "SIGHUP", "slurm": "SIGUSR1"}[FAULT]
        os.kill(os.getpid(), signal.Signals[name])
    if falls("interrupt_twice"):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
    if falls("hang"):
        time.sleep(1000)
    if falls("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if falls("raise"):
        raise ValueError("the sky \x1b[31mfell\x1b]0;x\x07")
    if falls("leave"):
        os._exit(0)
    if falls("pictures_vanish"):
        shutil.rmtree(Path(os.environ["FOLDER"], "pictures"))
    found = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    return found * float("nan") if falls("nan") or (FAULT == "nan_always" and steps >= AT) else found


job = vivace.Job(
    model=Net,
    data=data,
    loss=loss,
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=float(os.environ.get("LR", "0.01"))),
    epochs=EPOCHS,
    damaged="replace" if FAULT == "pictures_damaged" else "raise",
)
