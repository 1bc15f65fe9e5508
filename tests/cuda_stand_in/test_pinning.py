"""Which thread copies batches into page-locked memory, and what of the training that changes."""

import json

import pytest

READ = """
import dataclasses, json, sys, threading
import torch
from torch.utils.data import DataLoader, TensorDataset
from vivace import inspect
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.testing import TINY_JOBS

def data():
    rows = torch.arange(48.0).reshape(24, 2)
    order = torch.Generator().manual_seed(7)
    return DataLoader(TensorDataset(rows), batch_size=4, shuffle=True, num_workers=workers, generator=order)

def read(settings):
    torch.manual_seed(0)
    del pinned[:]
    loader = data()
    job = dataclasses.replace(TINY_JOBS["mlp"](), data=data)
    with start(job, Plan.from_dict(settings), inspect()) as session:
        torch.manual_seed(1)
        batches = list(session.batches(loader))
        stream = torch.get_rng_state().sum().item()
    there = all(rows.is_cuda for rows, in batches)
    return [rows.cpu().tolist() for rows, in batches], stream, sorted(set(pinned)), there, loader.pin_memory

def noted(tensor, *arguments, real=torch.Tensor.pin_memory):
    pinned.append(threading.current_thread() is threading.main_thread())
    return real(tensor, *arguments)

pinned, workers, torch.Tensor.pin_memory = [], int(sys.argv[1]), noted
print(json.dumps([read({}), *(read(settings) for settings in json.loads(sys.argv[2]))]))
"""
OWN, MORE = {"pinned_prefetch": {}}, {"pinned_prefetch": {}, "loader_workers": {"num_workers": 1}}


@pytest.mark.parametrize(
    ("workers", "plan", "on_the_main_thread"), [(2, OWN, False), (0, OWN, True), (0, MORE, False)]
)
def test_batches_of_workers_are_pinned_by_another_thread_than_the_training(
    stand_in, workers, plan, on_the_main_thread
):
    """In the same order, and with the same random numbers left to the training."""
    printed = stand_in.python(READ, workers, json.dumps([plan]), computes=True)
    (plain, stream, unpinned, _, _), found = json.loads(printed.splitlines()[-1])
    assert unpinned == []
    assert found[2] == [on_the_main_thread]
    assert found[:2] == [plain, stream]
    assert found[3:] == [True, False], "on the GPU, and the loader as it was"
