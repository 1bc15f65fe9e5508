"""A job counted on fake tensors is the work that the shipped table holds for the same network."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

import vivace
from vivace.advising.catalogue import find_gpu
from vivace.advising.demand import Demand, load_models
from vivace.advising.predict import Predictor
from vivace.advising.source import UNKNOWN_MEMORY, counted_model, open_subject
from vivace.errors import JobError
from vivace.memory.fits import fits
from vivace.memory.imagine import imagine
from vivace.memory.predict import predict
from vivace.work.count import count_work


def image_job(model, pixels, batch_size=8):
    images = torch.zeros(batch_size, 3, pixels, pixels)
    labels = torch.zeros(batch_size, dtype=torch.long)

    def loss(model, batch):
        output = model(batch[0])
        return functional.cross_entropy(output[0] if isinstance(output, tuple) else output, batch[1])

    return vivace.Job(
        model=model,
        data=lambda: [(images, labels)],
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )


def text_job(model, length, loss, batch_size=4):
    return vivace.Job(
        model=model,
        data=lambda: [torch.zeros(batch_size, length, dtype=torch.long)],
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    )


@pytest.fixture
def without_memory(monkeypatch):
    """Only what is counted is asked for: to predict the memory of a step, twice, takes longer."""
    monkeypatch.setattr("vivace.memory.imagine._memory", lambda job, batch, *, mixed: {})


def same_work(job, key):
    """Count a job; it must ask for what the table says of `key`, to 3 % and in three digits."""
    document = imagine(job, key)
    assert document["counted"] == "fake"
    found, listed = Demand.from_dict(document["demand"]), load_models()[key]
    constant = sum(b.constant_bytes for b in listed.bins) / document["batch_size"]
    assert (found.num_parameters, found.num_tensors) == (listed.num_parameters, listed.num_tensors)
    assert found.count == pytest.approx(listed.count, rel=0.03)
    assert found.flops == pytest.approx(listed.flops, rel=0.03)
    assert found.bytes == pytest.approx(listed.bytes + constant, rel=0.03)
    assert found.saved_bytes == pytest.approx(listed.saved_bytes, rel=0.03)
    entry = counted_model(key, document["batch_size"])
    assert entry is not None
    mine = dataclasses.replace(entry, demand=found)
    for card in ("A100-SXM4-80GB", "RTX 3090"):
        there, here = (Predictor(subject, "amp").one(find_gpu(card)).seconds for subject in (entry, mine))
        assert here == pytest.approx(there, rel=0.03), card


# The last three draw their weights again until they fit, which fake tensors cannot say.
@pytest.mark.parametrize(
    "key",
    [
        "resnet50@224", "vgg16@224", "alexnet@224", "mobilenet_v2@224", "squeezenet1_0@224",
        "shufflenet_v2_x1_0@224", "efficientnet_b0@224", "convnext_tiny@224", "vit_b_16@224", "swin_t@224",
    ],
)  # fmt: skip
def test_an_image_network_as_a_job_is_the_tables_entry(key, without_memory):
    models = pytest.importorskip("torchvision").models
    name, _, pixels = key.partition("@")
    same_work(image_job(getattr(models, name), int(pixels)), f"torchvision:{key}")


@pytest.mark.parametrize(("attention", "library"), [("eager", "own"), ("sdpa", "fused")])
def test_bert_as_a_job_is_the_tables_entry(attention, library, without_memory):
    """Attention in single operators, as in the published figures, which are older than fused ones, and
    fused."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(attn_implementation=attention)
    job = text_job(
        lambda: transformers.BertForQuestionAnswering(config),
        384,
        lambda model, tokens: model(tokens, start_positions=tokens[:, 0], end_positions=tokens[:, 1]).loss,
    )
    same_work(job, f"{library}:bert_base_squad")


def test_gpt2_as_a_job_is_the_tables_entry(without_memory):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=1280, n_layer=36, n_head=20, attn_implementation="eager")
    job = text_job(
        lambda: transformers.GPT2LMHeadModel(config),
        1024,
        lambda model, tokens: model(tokens, labels=tokens, use_cache=False).loss,
    )
    same_work(job, "own:gpt2_large")


def test_a_norm_in_evaluation_reads_its_input_once():
    layer, images = torch.nn.BatchNorm2d(3, device="meta"), torch.zeros(2, 3, 8, 8, device="meta")
    for training, passes in ((True, 2), (False, 1)):
        layer.train(training)
        (kernel,) = [k for k in count_work(lambda: layer(images)).kernels if k.operator == "norm"]
        assert kernel.passes == passes


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float64, "fp64")],
)
def test_a_job_of_another_precision_asks_for_the_same_work(dtype, precision):
    nn = torch.nn

    def counted(dtype):
        images, labels = torch.zeros(4, 3, 8, 8, dtype=dtype), torch.zeros(4, dtype=torch.long)
        job = vivace.Job(
            model=lambda: nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
            ).to(dtype),
            data=lambda: [(images, labels)],
            loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        )
        return imagine(job, "job")

    found, plain = counted(dtype), counted(torch.float32)
    assert (found["precision"], plain["precision"]) == (precision, "fp32")
    assert found["operators"]["convolution"]["bytes"] != plain["operators"]["convolution"]["bytes"]
    one, same = (Demand.from_dict(document["demand"]) for document in (plain, found))
    assert same.bytes == pytest.approx(one.bytes, rel=0.01)
    assert same.saved_bytes == pytest.approx(one.saved_bytes, rel=0.05)
    assert same.flops == one.flops


def test_a_complex_network_computes_in_numbers_of_half_the_bytes():
    def counted(dtype):
        batch = torch.zeros(4, 16, dtype=dtype)
        job = vivace.Job(
            model=lambda: torch.nn.Linear(16, 8, dtype=dtype),
            data=lambda: [batch],
            loss=lambda model, batch: model(batch).abs().square().mean(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )
        return imagine(job, "job")

    found, real = counted(torch.complex64), counted(torch.float32)
    assert (found["precision"], counted(torch.complex128)["precision"]) == ("fp32", "fp64")
    assert found["num_parameters"] == 2 * real["num_parameters"]
    assert found["parameter_bytes"] == 4 * found["num_parameters"]
    assert found["demand"]["saved_bytes"] == found["activation_bytes"] / 4
    products = [document["operators"]["matmul"] for document in (found, real)]
    assert products[0]["flops"] == 4 * products[1]["flops"]


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(4)


def test_a_stream_has_no_length_and_is_counted(monkeypatch):
    monkeypatch.setattr("vivace.memory.imagine.LOOKING_SECONDS", 0.1)
    job = vivace.Job(
        model=lambda: torch.nn.Linear(4, 2),
        data=lambda: torch.utils.data.DataLoader(Endless(), batch_size=8),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    assert imagine(job, "stream")["steps_per_epoch"] is None


@dataclasses.dataclass
class Pair:
    first: torch.nn.Module
    second: torch.nn.Module


WAYS = {
    "a dataclass": (Pair, lambda built: (built.first, built.second)),
    "a namespace": (lambda a, b: SimpleNamespace(a=a, b=b), lambda built: (built.a, built.b)),
    "a dictionary": (lambda a, b: {"a": a, "b": b}, lambda built: built.values()),
    "a tuple": (lambda *parts: parts, lambda built: built),
}


@pytest.mark.parametrize("way", WAYS)
def test_several_modules_are_handed_on_as_the_job_returned_them(way):
    made, parts = WAYS[way]

    def step(built, optimizer, batch):
        first, second = parts(built)
        loss = second(first(batch)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    job = vivace.Job(
        model=lambda: made(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)),
        data=lambda: [torch.ones(8, 4)],
        step=step,
        optimizer=lambda built: torch.optim.SGD([p for part in parts(built) for p in part.parameters()], 0.1),
    )
    found = imagine(job, way)
    assert (found["counted"], found["num_parameters"], found["num_tensors"]) == ("fake", 58, 4)


class Damaged(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 1:
            raise OSError("the file is truncated")
        return torch.ones(4)


def test_damaged_samples_are_left_out_as_the_job_says():
    job = vivace.Job(
        model=lambda: torch.nn.Linear(4, 2),
        data=lambda: torch.utils.data.DataLoader(Damaged(), batch_size=20),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        damaged="skip",
    )
    assert imagine(job, "damaged")["batch_size"] in (19, 20)  # of the first batch, or the second
    assert fits(job, {"card": 2**31})[0].fits


def test_a_job_that_cannot_be_built_is_named_with_its_line(tmp_path):
    (tmp_path / "job.py").write_text(
        "import vivace\n\ndef data():\n    return open('/nowhere.csv')\n\n"
        "job = vivace.Job(model=print, data=data, loss=print, optimizer=print)\n"
    )
    with pytest.raises(JobError, match=r"be built: FileNotFoundError: .*nowhere.csv' \(.*job.py, line 4"):
        vivace.advise(f"{tmp_path / 'job.py'}:job", steps=10)


CACHED = """
import functools
import os
import torch
import vivace


@functools.cache
def positions(length):
    return torch.arange(length, dtype=torch.float32)


def loss(model, batch):
    os.write(1, b"\\xe9t\\xe9")
    os.write(2, b"\\xe9t\\xe9")
    found = (model(batch) + positions(batch.shape[1])).square().mean()
    if found.item() > 1000:
        raise ValueError("diverged")
    return found


job = vivace.Job(
    model=lambda: torch.nn.Linear(16, 16),
    data=lambda: [torch.ones(8, 16)],
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
"""


def test_a_job_that_looks_at_numbers_finds_no_tensor_without_them_in_its_own_cache(tmp_path):
    """It is told how it was counted; that it prints what is no text is no matter."""
    (tmp_path / "job.py").write_text(CACHED)
    found = open_subject(f"{tmp_path / 'job.py'}:job")
    assert found.counted == "real"
    assert [note.partition(",")[0] for note in found.notes[:-1]] == ["the step looks at numbers"]
    assert found.notes[-1] == UNKNOWN_MEMORY


def test_a_job_that_was_counted_is_told_where_predicting_its_memory_ends_the_process(tmp_path):
    often = (
        "    global built\n    built += 1\n    return torch.nn.Linear(16, 16) if built < 2 else os._exit(3)\n"
    )
    job = CACHED.replace("job =", f"built = 0\n\n\ndef model():\n{often}\n\njob =")
    job = job.replace("lambda: torch.nn.Linear(16, 16)", "model").replace("found.item() > 1000", "False")
    (tmp_path / "job.py").write_text(job)
    found = open_subject(f"{tmp_path / 'job.py'}:job")
    assert (found.counted, found.notes, found.demand.num_tensors) == ("fake", (UNKNOWN_MEMORY,), 2)


def test_a_job_that_was_counted_is_told_where_predicting_its_memory_takes_too_long(monkeypatch):
    work = imagine(lengths((8,)), "job")

    def run(command, **_):
        if command[-2] == "counted.py":
            Path(command[-1]).write_text(json.dumps({"work": work}))
        raise subprocess.TimeoutExpired(command, 600)

    monkeypatch.setattr("vivace.advising.source.subprocess.run", run)
    assert open_subject("counted.py").batch_size == 8
    with pytest.raises(JobError, match="was not counted within 600 s"):
        open_subject("other.py")


def test_the_memory_of_a_step_is_predicted_no_more_often_than_there_are_answers(monkeypatch):
    asked = []

    def predict_once(job, plan, **more):
        asked.append(plan)
        return predict(job, plan, **more)

    def narrow(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).square().mean()

    monkeypatch.setattr("vivace.memory.imagine.predict", predict_once)
    plain = lengths((8,))
    found = imagine(plain, "job")
    assert (len(asked), found["step_memory"] == found["mixed_memory"]) == (2, False)
    found = imagine(dataclasses.replace(plain, loss=narrow), "job")
    assert (len(asked), found["step_memory"] == found["mixed_memory"]) == (3, True)
    found = imagine(dataclasses.replace(plain, loss=None, step=own_step), "job")
    assert (len(asked), "step_memory" in found, "mixed_memory" in found) == (4, False, False)


class Doubled(torch.autograd.Function):
    """In float32 on a GPU, as its author asks for."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, values):
        assert values.dtype == torch.float32
        return 2 * values

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        return 2 * gradient


class Multiplied(torch.autograd.Function):
    """In what autocast computes in on a GPU, backward too."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, values, weight):
        ctx.save_for_backward(values, weight)
        return values @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        values, weight = ctx.saved_tensors
        return gradient @ weight.T, values.T @ gradient


AUTOCASTS = {
    "by a name": lambda: torch.autocast("cuda"),
    "in bfloat16": lambda: torch.autocast("cuda", torch.bfloat16),
    "the CPU's": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("kind", AUTOCASTS)
def test_autocast_for_gpus_counts_as_it_acts_on_one(kind):
    def loss(model, batch):
        with AUTOCASTS[kind]():
            return model(batch).square().mean()

    plain = lengths((8,))
    same = dataclasses.replace(plain, loss=in_bfloat16)
    found, told = imagine(dataclasses.replace(plain, loss=loss), "job"), imagine(same, "job")
    assert found["precision"] == "amp"
    assert {**found, "step_memory": 0, "mixed_memory": 0} == {**told, "step_memory": 0, "mixed_memory": 0}
    assert found["step_memory"] == told["step_memory"] == found["mixed_memory"]
    region = torch.autocast("cpu", torch.bfloat16)
    with region:  # torch is as it was
        assert not torch.is_autocast_enabled("cuda")


def in_bfloat16(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch).square().mean()


def test_autocast_for_gpus_that_is_turned_off_stays_so():
    def loss(model, batch):
        with torch.autocast("cuda", torch.bfloat16, enabled=False):
            return model(batch).square().mean()

    assert imagine(dataclasses.replace(lengths((8,)), loss=loss), "job")["precision"] == "fp32"


def test_functions_for_gpus_under_autocast_are_counted():
    def loss(model, batch):
        with torch.autocast("cuda", torch.float16):
            halves = model(batch)
            doubled = Doubled.apply(halves)
            assert (halves.dtype, doubled.dtype) == (torch.float16, torch.float32)
            return Multiplied.apply(doubled, model.weight).square().mean()

    found = imagine(dataclasses.replace(lengths((8,)), loss=loss), "job")
    assert (found["precision"], found["counted"]) == ("amp", "fake")


OUTSIDE = """
import torch
import vivace

region = torch.autocast("cuda", torch.float16)


def loss(model, batch):
    with region:
        output = model(batch)
    READ
    return output.float().square().mean()


job = vivace.Job(
    model=lambda: torch.nn.Linear(256, 4096),
    data=lambda: [torch.ones(4096, 256)],
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
"""


@pytest.mark.parametrize("reads", [False, True])
def test_autocast_for_gpus_may_be_made_as_the_jobs_file_is_loaded(tmp_path, reads):
    (tmp_path / "job.py").write_text(OUTSIDE.replace("READ", "output.sum().item()" if reads else ""))
    found = open_subject(f"{tmp_path / 'job.py'}:job")
    assert (found.precision, found.counted) == ("amp", "real" if reads else "fake")


def own_step(model, optimizer, batch):
    model(batch).square().mean().backward()
    optimizer.step()


def lengths(*rows):
    """A job whose batches have so many rows."""
    return vivace.Job(
        model=lambda: torch.nn.Linear(16, 8),
        data=lambda: (torch.ones(number, 16) for number in itertools.chain(*rows)),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


def test_where_batches_differ_the_time_is_of_the_mean_and_the_memory_of_the_largest(monkeypatch):
    found, alike = imagine(lengths((8, 8, 8, 64, 32)), "job"), imagine(lengths((24,)), "job")
    flops, one = (Demand.from_dict(d["demand"]).flops * d["batch_size"] for d in (found, alike))
    assert flops == pytest.approx(one)
    assert found["activation_bytes"] == imagine(lengths((64,)), "job")["activation_bytes"]
    assert not found["notes"]
    monkeypatch.setattr("vivace.memory.imagine.LOOKING_SECONDS", 0.1)
    (note,) = imagine(lengths((8,), itertools.repeat(16)), "job")["notes"]
    assert "later ones may be larger" in note
    assert not imagine(lengths(itertools.repeat(16)), "job")["notes"]


class Averaged(torch.nn.Module):
    """A network with BatchNorm beside a copy of itself, as for an average of its weights."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten())
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, images):
        return self.net(images)


def test_a_network_that_holds_a_copy_of_itself_is_counted_and_told_nothing(capfd):
    found = imagine(image_job(Averaged, 8), "averaged")
    assert (found["counted"], found["num_parameters"]) == ("fake", 8 * 27 + 3 * 8)
    assert capfd.readouterr().err == ""


def test_sparse_gradients_are_counted_by_their_places_and_numbers():
    job = vivace.Job(
        model=lambda: torch.nn.Embedding(50_000, 16, sparse=True),
        data=lambda: [torch.zeros(8, 4, dtype=torch.long)],
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SparseAdam(model.parameters()),
    )
    found = imagine(job, "table")
    assert found["counted"] == "fake"
    moved = sum(totals["bytes"] for totals in found["operators"].values())
    assert 0 < moved < 4 * 50_000 * 16  # less than the whole table once
