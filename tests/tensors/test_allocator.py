import torch

from vivace.tensors import allocator


def test_a_gpus_allocator_counts_how_often_it_started_anew(monkeypatch):
    assert allocator.retries(torch.device("cpu")) == 0
    told = {}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: told)
    assert allocator.retries(torch.device("cuda")) == 0, "nothing was allocated yet"
    told["num_alloc_retries"] = 3
    assert allocator.retries(torch.device("cuda")) == 3
