"""A stand-in that computes: training there is training on the processor, by whatever path torch takes."""

import json

import pytest

SAME = """
import json, multiprocessing, os
import torch
from torch.nn.functional import dropout
from vivace import inspect
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.testing import jobs

torch.backends.cudnn.conv.fp32_precision = "ieee"

def trained(shown, settings):
    os.environ["CUDA_VISIBLE_DEVICES"] = shown
    machine, found = inspect(), {}
    for name in ("mlp", "cnn", "lstm"):
        job = jobs.TINY_JOBS[name]()
        with start(job, Plan.from_dict(settings), machine) as session:
            losses = [float(session.step(batch)) for batch in [*job.data(), *job.data()]]
            losses += [float(buffer.sum()) for buffer in session.build.model.buffers()]
            found[name] = [str(session.build.device), losses, session.build.facts.replays or 0]
    return found

def set_free(shown, settings):
    os.environ["CUDA_VISIBLE_DEVICES"] = shown
    job = jobs.TINY_JOBS["mlp"]()
    with start(job, Plan.from_dict(settings), inspect()) as session:
        first, last = list(session.build.model.parameters())[:2], list(session.build.model.parameters())[-1]
        losses = []
        for number, batch in enumerate([*job.data(), *job.data(), *job.data()]):
            for weight in first:
                weight.requires_grad_(number >= 5)
            last.requires_grad_(number < 8)
            losses.append(float(session.step(batch)))
        return losses, session.build.facts.replays or 0

def masks():
    ones = torch.ones(1000, device="cuda")
    torch.cuda.manual_seed(1)
    own, eager = torch.get_rng_state(), [dropout(ones) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = dropout(ones)
    torch.cuda.manual_seed(1)
    replayed = []
    for _ in range(3):
        graph.replay()
        replayed.append(mask.clone())
    shares = [float((one == 0).float().mean()) for one in eager]
    same = all(torch.equal(a, b) for a, b in zip(eager, replayed))
    return same, torch.equal(eager[0], eager[1]), shares, torch.equal(own, torch.get_rng_state())

def ask(function, *arguments):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)
graph = {"fused_optimizer": {}, "cuda_graph_step": {}}
asked = [("", {}), ("0", {}), ("0", graph)]
free = [ask(set_free, *each) for each in asked[::2]]
print(json.dumps([*(ask(trained, *each) for each in asked), ask(masks), free]))
"""


@pytest.fixture(scope="module")
def found(stand_in):
    """Losses on the processor, on the GPU, in a graph there; and masks of dropout."""
    return json.loads(stand_in.python(SAME, computes=True).splitlines()[-1])


@pytest.mark.parametrize("job", ["mlp", "cnn", "lstm"])
def test_losses_are_the_processors(found, job):
    """Bit for bit but for what CPUs have no operator for, and a graph's optimizer, which rounds otherwise."""
    (device, losses, _), (gpu, seen, _), (_, captured, replays) = (one[job] for one in found[:3])
    assert (device, gpu, replays) == ("cpu", "cuda:0", 6)
    assert losses[0] != losses[-1]
    assert seen == (pytest.approx(losses, rel=1e-5) if job == "lstm" else losses)
    assert captured == pytest.approx(losses, rel=1e-4)


def test_weights_that_are_frozen_or_set_free_get_a_graph_of_their_own(found):
    (losses, _), (captured, replays) = found[4]
    assert captured == pytest.approx(losses, rel=1e-4)
    assert replays > 4


def test_masks_of_dropout_follow_the_gpus_stream_also_in_graphs(found):
    same, repeated, shares, own_stream_is_kept = found[3]
    assert same
    assert not repeated
    assert all(0.4 < share < 0.6 for share in shares)
    assert own_stream_is_kept
