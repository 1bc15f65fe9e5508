"""The memory that advice counts on is what the prediction of a step's memory tells of the same job."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.nn import functional

import vivace
from vivace.advising.catalogue import find_gpu
from vivace.advising.formula import Setting, predict_parts
from vivace.advising.predict import Predictor
from vivace.advising.source import StepMemory, counted_model, open_subject
from vivace.machine import CONTEXT_BYTES
from vivace.memory.fits import fits
from vivace.memory.imagine import imagine
from vivace.plan import Plan

WORDS = 30_000
MIB = 2**20


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 64), nn.Linear(64, WORDS)
        self.block = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)

    def forward(self, tokens):
        return self.head(self.block(self.words(tokens)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 64), nn.Linear(256, WORDS)
        self.layer = nn.LSTM(64, 256, 2, batch_first=True)

    def forward(self, tokens):
        return self.head(self.layer(self.words(tokens))[0])


class Hourglass(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.between = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(64, 32, 2, 2), nn.Conv2d(64, 10, 1)
        self.norm = nn.BatchNorm2d(32)

    def forward(self, images):
        large = self.norm(self.down(images)).relu()
        small = self.between(functional.max_pool2d(large, 2)).relu()
        return self.out(torch.cat([self.up(small), large], 1))


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = (nn.Embedding(300_000, 64, sparse=True) for _ in range(2))

    def forward(self, pairs):
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)


def texts(model):
    tokens = torch.zeros(16, 128, dtype=torch.long)
    return vivace.Job(
        model=model,
        data=lambda: [tokens],
        loss=lambda model, batch: functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    )


def in_mixed_precision(job):
    def loss(model, batch):
        with torch.autocast(batch.device.type, torch.bfloat16):
            return job.loss(model, batch)

    return dataclasses.replace(job, loss=loss)


def labelled(model, inputs, labels):
    return vivace.Job(
        model=model,
        data=lambda: [(inputs, labels)],
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
    )


def recommender(optimizer=torch.optim.SparseAdam):
    pairs = torch.zeros(512, 2, dtype=torch.long)
    return vivace.Job(
        model=Recommender,
        data=lambda: [pairs],
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: optimizer(model.parameters(), lr=0.1),
    )


JOBS = {
    "transformer": lambda: texts(Transformer),
    "lstm": lambda: texts(Recurrent),
    "hourglass": lambda: labelled(
        Hourglass, torch.ones(32, 3, 128, 128), torch.zeros(32, 128, 128, dtype=torch.long)
    ),
    "perceptron": lambda: labelled(
        lambda: nn.Sequential(nn.Linear(512, 8192), nn.ReLU(), nn.Linear(8192, 4096)),
        torch.ones(32, 512),
        torch.zeros(32, dtype=torch.long),
    ),
    "recommender": recommender,
}


def subject_of(job, folder):
    """The subject that advice opens where the job is counted in a child process."""
    path = folder / "work.json"
    path.write_text(json.dumps({"work": imagine(job, "job")}))
    return open_subject(str(path))


@pytest.mark.filterwarnings("ignore:the job keeps tensors")  # counted in this process, after other tests
@pytest.mark.parametrize("name", JOBS)
def test_advice_needs_what_the_prediction_of_memory_tells(name, tmp_path):
    subject = subject_of(JOBS[name](), tmp_path)
    mixed = [technique for technique in ("bf16_autocast",) if name != "recommender"]
    for precision, techniques in (("fp32", []), ("amp_bf16", mixed)):
        (fit,) = fits(JOBS[name](), {"card": 2**40}, Plan.from_dict({one: {} for one in techniques}))
        told = Predictor(subject, precision).needed_bytes(Setting(precision, subject.batch_size))
        assert 0.9 < (told - CONTEXT_BYTES) / (fit.needed_bytes - CONTEXT_BYTES) < 1.15


def test_what_fits_is_told_of_autocast_for_gpus():
    def loss(model, batch):
        with torch.autocast("cuda", torch.bfloat16):
            return plain.loss(model, batch)

    plain = texts(Transformer)
    there = dataclasses.replace(plain, loss=loss)
    wide, mixed, told = (
        fits(job, {"card": 2**40})[0].needed_bytes for job in (plain, in_mixed_precision(plain), there)
    )
    assert told == mixed < wide


def test_a_language_model_needs_its_logits_their_logarithms_and_their_gradient(tmp_path):
    subject = subject_of(JOBS["transformer"](), tmp_path)
    predictor = Predictor(subject, "fp32")
    whole, half = (predictor.needed_bytes(Setting("fp32", batch)) - CONTEXT_BYTES for batch in (16, 8))
    logits = 16 * 128 * WORDS * 4
    assert whole > 3 * logits + 12 * subject.demand.num_parameters
    assert 1.4 * logits < whole - half < 2.1 * logits
    assert subject.step_memory.spared_bytes < 0.1 * logits  # computing again spares no logits
    card = find_gpu("RTX 3080")
    room = dataclasses.replace(card, memory_bytes=int((whole - logits / 4 + CONTEXT_BYTES) / 0.97))
    assert predictor.one(room).how == "2 micro-batches"


def test_computing_again_does_not_lower_what_the_update_holds():
    card = find_gpu("H100")
    room = card.usable_bytes - CONTEXT_BYTES
    for update, how in ((0.9 * room, "recompute"), (1.05 * room, "")):
        memory = StepMemory(((0.2 * room, 0.9 * room), (update, 0.0)), 0.8 * room)
        subject = dataclasses.replace(counted_model("torchvision:resnet50@224"), step_memory=memory)
        assert Predictor(subject, "fp32").one(card).how == how


def test_micro_batches_add_to_gradients_that_stay_while_they_run():
    card = find_gpu("H100")
    room = card.usable_bytes - CONTEXT_BYTES
    memory = StepMemory(((0.2 * room, room), (0.6 * room, 0.0)), 0.0)
    subject = dataclasses.replace(counted_model("torchvision:resnet50@224"), step_memory=memory)
    assert (
        Predictor(subject, "fp32").one(card).how == "4 micro-batches"
    )  # of two each holds 1.1 times the room


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD])
def test_of_tables_with_sparse_gradients_only_the_rows_that_were_looked_up_are_updated(optimizer, tmp_path):
    subject = subject_of(recommender(optimizer), tmp_path)
    number = 2 * 300_000 * 64
    demand = subject.demand
    assert (demand.num_parameters, demand.num_updated) == (number, 2 * 512 * 64)
    tables = 3 if optimizer is torch.optim.SparseAdam else 1
    predictor = Predictor(subject, "fp32")
    needed = predictor.needed_bytes(Setting("fp32", 512, num_gpus=2)) - CONTEXT_BYTES
    assert needed == pytest.approx(tables * 4 * number, abs=80 * MIB)
    without = dataclasses.replace(subject, step_memory=None)  # as where its step cannot be predicted
    needed = Predictor(without, "fp32").needed_bytes(Setting("fp32", 512)) - CONTEXT_BYTES
    assert needed == pytest.approx(tables * 4 * number, rel=0.05)
    dense = dataclasses.replace(demand, num_left=0)
    seconds = [
        float(predict_parts(predictor.theta, [(one, find_gpu("H100"), Setting("fp32", 512))])["single"][0])
        for one in (demand, dense)
    ]
    assert seconds[1] > 1.1 * seconds[0]


def test_another_precision_than_was_predicted_takes_as_many_bytes_a_number(tmp_path):
    subject = subject_of(JOBS["perceptron"](), tmp_path)
    single, double = (
        Predictor(subject, precision).needed_bytes(Setting(precision, 32)) - CONTEXT_BYTES
        for precision in ("fp32", "fp64")
    )
    assert double == pytest.approx(2 * single)
    without = dataclasses.replace(subject, mixed_memory=None)
    mixed = Predictor(without, "amp_bf16").needed_bytes(Setting("amp_bf16", 32)) - CONTEXT_BYTES
    assert mixed - single == pytest.approx(2 * subject.demand.num_parameters, rel=0.05)


def test_logits_that_are_wide_in_mixed_precision_are_no_wider_without(tmp_path):
    plain = texts(Transformer)
    single, mixed = (subject_of(job, tmp_path) for job in (plain, in_mixed_precision(plain)))
    assert (single.precision, mixed.precision) == ("fp32", "amp")
    for precision in ("fp32", "tf32", "fp64"):
        alone, told = (
            Predictor(one, precision).needed_bytes(Setting(precision, 16)) - CONTEXT_BYTES
            for one in (single, mixed)
        )
        assert 0.85 < told / alone < 1.2
