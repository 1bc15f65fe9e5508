"""Experiments on what bounds a step, on copies."""

import dataclasses

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from vivace.profiling.record.bounding import doubled, updater
from vivace.profiling.record.shadow import Shadow


def test_a_doubled_batch_holds_every_sample_twice_and_odd_arguments_are_left():
    model = nn.Linear(4, 2)
    call = ((torch.ones(3, 4),), {})
    other = doubled(Shadow(model, call, ("cpu", False, torch.bfloat16)))
    assert other.arguments[0].shape == (6, 4)
    other.runner()()
    assert (
        doubled(Shadow(model, ((torch.ones(3, 4), torch.ones(5)), {}), ("cpu", False, torch.bfloat16)))
        is None
    )


def test_where_the_first_dimension_is_time_the_second_is_doubled():
    model = nn.RNN(4, 2)
    shadow = Shadow(model, ((torch.ones(5, 3, 4), torch.zeros(5, 3, 1)), {}), ("cpu", False, torch.bfloat16))
    assert [tuple(t.shape) for t in doubled(shadow, 3).arguments] == [(5, 6, 4), (5, 6, 1)]
    assert [tuple(t.shape) for t in doubled(shadow, 5).arguments] == [(10, 3, 4), (10, 3, 1)]


@dataclasses.dataclass
class Out:
    logits: torch.Tensor


class Classifier(nn.Linear):
    def forward(self, inputs):
        return Out(super().forward(inputs))


def test_of_a_dataclass_the_backward_pass_runs_too():
    shadow, passes = Shadow(Classifier(4, 2), ((torch.ones(3, 4),), {}), ("cpu", False, torch.bfloat16)), []
    shadow.module.weight.register_hook(passes.append)
    shadow.runner()()
    assert len(passes) == 1


def test_a_copied_update_leaves_the_optimizer_alone():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.9))
    model(torch.ones(1, 4)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    seen = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        updater(optimizer)()
        updater(optimizer, foreach=None, fused=True)()
    finally:
        handle.remove()
    assert seen == []
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
