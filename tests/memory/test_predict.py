import copy
import functools
import io

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional

import vivace
from vivace.errors import JobError, Refused
from vivace.memory.fits import Fit, draw, fits
from vivace.memory.predict import PARTS, predict
from vivace.memory.workspace import GpuWorkspaces, Workspace
from vivace.observing.observe import observe
from vivace.plan import Plan
from vivace.session.opening import first_batches, start
from vivace.technique import registry
from vivace.testing import jobs

pytestmark = pytest.mark.usefixtures("one_thread")
MIB = 2**20


def wide():
    """Activations of a MiB each, so that nothing small matters."""
    return vivace.Job(
        model=lambda: nn.Sequential(
            nn.Linear(64, 256),
            *(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)),
            nn.Linear(256, 8),
        ),
        data=lambda: [(torch.ones(1024, 64), torch.zeros(1024, dtype=torch.long))] * 2,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
        on_gradients=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )


def convolving():
    """Layers for most techniques: convolutions of all kinds that they know, with norms and dropout."""
    layers = (
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.Conv2d(32, 32, 5, padding=2, groups=32),
        nn.Conv2d(32, 8, 1),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(8 * 256, 8),
    )
    return vivace.Job(
        model=lambda: nn.Sequential(*copy.deepcopy(layers)),
        data=lambda: [(torch.ones(8, 3, 16, 16), torch.zeros(8, dtype=torch.long))] * 2,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", registry.own_names())
def test_a_plan_is_predicted_or_refused_in_words_of_its_own(name, device):
    """No technique looks at the numbers of fake tensors, in Python or in C."""
    try:
        assert predict(convolving(), Plan.from_dict({name: {}}), device=device).peak_bytes > MIB
    except Refused as refused:
        assert "it fails on this job" not in str(refused)  # noqa: PT017  (either is right)


def test_what_is_for_processors_alone_is_left_out_of_a_cards_answer_and_told():
    plan = Plan.from_dict({"host_allocator": {}, "vectorized_dropout": {}, "bf16_autocast": {}})
    cards = {"one": 2**34}
    (found,), (bare,) = (fits(convolving(), cards, p) for p in (plan, Plan.from_dict({"bf16_autocast": {}})))
    assert found.left_out == ("host_allocator", "vectorized_dropout")
    assert (found.needed_bytes, bare.left_out) == (bare.needed_bytes, ())
    console = Console(file=io.StringIO(), width=200)
    draw([found], console)
    assert "without host_allocator and vectorized_dropout: of processors alone" in console.file.getvalue()


def test_lazy_layers_have_nothing_to_follow():
    job = vivace.Job(**{**vars(wide()), "model": lambda: nn.LazyLinear(8)})
    with pytest.raises(JobError, match="'weight' has no shape yet"):
        predict(job)


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"checkpoint": {}},
        {"checkpoint": {"cheap": ["*"]}},
        {"micro_batches": {"num": 4}},
        {"bf16_autocast": {}},
        {"fp16_autocast": {}},
        {"fp16_autocast": {}, "fused_optimizer": {}},
        {"optimizer_in_backward": {}},
    ],
)
def test_the_prediction_is_near_the_measurement(plan):
    job = wide()
    if "optimizer_in_backward" in plan:
        job = vivace.Job(**{**vars(job), "on_gradients": None})
    batches = first_batches(job.data(), 2)
    with start(job, Plan.from_dict(plan), vivace.inspect()) as session:
        measured = observe(session, batches).peak_bytes
    found = predict(job, Plan.from_dict(plan), batch=batches[0])
    assert found.peak_bytes == pytest.approx(measured, rel=0.08)
    assert sum(found.parts.values()) == found.peak_bytes
    assert tuple(found.parts) == PARTS
    weights = sum(p.numel() * 4 for p in job.model().parameters())
    assert found.parts["parameters"] == weights
    assert found.parts["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    assert found.parts["batch"] == 1024 * 64 * 4 + 1024 * 8


SCENE = """
import torch
from torch import nn

import vivace
from vivace.memory.predict import predict
from vivace.observing.observe import peak_of
from vivace.session.opening import start


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


job = vivace.Job(
    model=lambda: nn.Sequential(nn.Linear(64, 256), *(Block() for _ in range(8)), nn.Linear(256, 8)),
    data=lambda: [(torch.ones(64, 64), torch.zeros(64, dtype=torch.long))] * 2,
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
)
plan, batch = vivace.Plan.from_dict({"fsdp": {}}), job.data()[0]
predicted = {ranks: predict(job, plan if ranks > 1 else None, ranks=ranks) for ranks in (1, 2, 4)}
share = [tensor[RANK * 32 : RANK * 32 + 32] for tensor in batch]
with start(job, plan, vivace.inspect()) as session:
    session.step(share)
    held = [p.to_local() for p in session.model.parameters()]
    held += [s.to_local() for state in session.optimizer.state.values() for s in list(state.values())[1:]]
    held = sum(t.numel() * t.element_size() for t in held)
    peaks = [peak_of(lambda: session.step(share), session.build.device) for _ in range(4)]
    measured = held + min(peaks)  # what a rank waits for lies in memory longer where others use the processor
found = {n: p.to_dict() for n, p in predicted.items()}, measured
"""


def test_one_of_two_ranks_that_divide_the_weights(on_two_ranks, tmp_path):
    predicted, measured = on_two_ranks(SCENE, tmp_path)[0]
    alone, two, four = (predicted[ranks] for ranks in (1, 2, 4))
    for part in ("parameters", "optimizer"):
        assert two["parts"][part] == pytest.approx(alone["parts"][part] / 2, rel=0.01)
        assert four["parts"][part] == pytest.approx(alone["parts"][part] / 4, rel=0.01)
    assert four["peak_bytes"] < two["peak_bytes"] < alone["peak_bytes"]
    assert two["peak_bytes"] == pytest.approx(measured, rel=0.1)


def test_ranks_that_divide_nothing_are_refused():
    with pytest.raises(vivace.Refused, match="for a plan that divides the weights"):
        predict(wide(), Plan.from_dict({"ddp": {}}), ranks=2)


def test_nothing_of_the_prediction_stays_and_no_gpu_is_needed():
    before = torch.get_rng_state()
    there = predict(wide(), device="cuda")
    assert torch.equal(torch.get_rng_state(), before)
    assert there.reserved_bytes >= there.peak_bytes
    assert there.reserved_bytes % (2 * MIB) == 0
    here = predict(wide())
    assert there.parts["activations"] == pytest.approx(here.parts["activations"], rel=0.1)


class Positions(nn.Module):
    """Adds positions, which are computed once for each length and kept in `cache`."""

    def __init__(self, cache):
        super().__init__()
        self.cached = cache(lambda length: torch.arange(length, dtype=torch.float32))

    def forward(self, x):
        return x + self.cached(x.shape[1])


def in_a_dictionary(function):
    return lambda length: KEPT[length] if length in KEPT else KEPT.setdefault(length, function(length))


KEPT = {}


@pytest.mark.parametrize("cache", [functools.cache, functools.lru_cache(8), in_a_dictionary])
def test_tensors_of_a_prediction_in_a_jobs_own_cache_are_taken_out_or_told(cache, recwarn):
    positions = Positions(cache)
    job = vivace.Job(**{**vars(wide()), "model": lambda: nn.Sequential(copy.copy(positions), wide().model())})
    found = predict(job)
    warned = [str(told.message) for told in recwarn if "in this process" in str(told.message)]
    KEPT.clear()
    assert len(warned) == (cache is in_a_dictionary)
    assert all("such as one of shape (64,)" in text for text in warned)
    assert predict(job) == found
    KEPT.clear()
    assert type(positions(torch.ones(2, 64))) is torch.Tensor


def test_a_model_that_looks_at_its_weights_while_it_draws_them_is_predicted():
    def model():
        built = wide().model()
        while float(built[0].weight.detach().std()) > 1:  # as transformers draw theirs, within bounds
            nn.init.normal_(built[0].weight)
        return built

    before = torch.get_rng_state()
    found = predict(vivace.Job(**{**vars(wide()), "model": model}), device="cuda")
    assert torch.equal(torch.get_rng_state(), before)
    assert found == predict(wide(), device="cuda")


def test_attention_and_dropout_are_a_gpus():
    """Fused attention keeps no scores, and dropout a byte for each number; on a CPU with dropout both do."""

    def job(dropout):
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
        return vivace.Job(
            model=lambda: nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            data=lambda: [torch.ones(2, 256, 32)] * 2,
            loss=lambda model, batch: model(batch).mean(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )

    numbers, scores = 2 * 256 * (3 * 32 + 64), 2 * 4 * 256**2 * 4
    plain, dropped = (predict(job(share), device="cuda").parts["activations"] for share in (0.0, 0.1))
    assert plain < dropped <= plain + 2 * 5 * numbers
    assert predict(job(0.1)).parts["activations"] > dropped + 2 * scores
    assert functional.dropout(torch.ones(8), 0.5, False).sum() == 8


def test_workspaces_follow_torch_and_its_settings(monkeypatch):
    assert GpuWorkspaces.of_torch().blas_bytes == 32 * MIB
    before = predict(wide(), device="cuda").peak_bytes
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert GpuWorkspaces.of_torch().blas_bytes == 8 * MIB + 2**17
    assert predict(wide(), device="cuda").peak_bytes < before
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    kept = GpuWorkspaces.of_torch()
    product, pair = torch.ops.aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2))
    told = [kept.taken(product, pair, phase) for phase in ("forward", "forward", "backward", "backward")]
    assert told == [Workspace(8 * MIB + 2**17, stays=True), Workspace(0, stays=True)] * 2


def test_a_plan_for_gpus_is_predicted_without_one():
    """A plan for a card is what one asks about before renting it."""
    plan = {"checkpoint": {}, "tf32": {}, "cudnn_benchmark": {}, "allocator": {}}
    alone = predict(wide(), Plan.from_dict({"checkpoint": {}}), device="cuda")
    assert predict(wide(), Plan.from_dict(plan), device="cuda") == alone
    ahead = predict(wide(), Plan.from_dict(plan | {"pinned_prefetch": {}}), device="cuda")
    batch = alone.parts["batch"]
    assert ahead.parts == alone.parts | {"batch": 2 * batch}
    assert ahead.peak_bytes == alone.peak_bytes + batch
    with pytest.raises(vivace.Refused, match="it acts on cuda, and this job runs on cpu"):
        predict(wide(), Plan.from_dict(plan))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_autocast_computes_in_float32_what_it_does_on_a_gpu():
    """A CPU's leaves a norm, a softmax and a power of sixteen bits in sixteen bits."""

    class Halves(nn.Module):
        def forward(self, x):
            seen.extend((functional.layer_norm(x, (8,)).dtype, x.softmax(1).dtype, x.exp().dtype))
            return x.sum(1, keepdim=True) + x.pow(2)

    seen = []
    job = vivace.Job(**{**vars(wide()), "model": lambda: nn.Sequential(nn.Linear(64, 8), Halves())})
    plan = Plan.from_dict({"bf16_autocast": {}})
    predict(job, plan)
    assert set(seen[:3]) == {torch.bfloat16}
    seen.clear()
    predict(job, plan, device="cuda")
    assert set(seen[:3]) == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ones(2, 2, dtype=torch.bfloat16).softmax(1).dtype == torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_rms_norm_keeps_its_input_and_a_number_for_each_row():
    rows = 2**16  # so that the peak is that of the activations
    job = vivace.Job(
        model=lambda: nn.Sequential(nn.Linear(64, 256), nn.RMSNorm(256), nn.Linear(256, 8)),
        data=lambda: [(torch.ones(rows, 64), torch.zeros(rows, dtype=torch.long))],
        loss=wide().loss,
        optimizer=wide().optimizer,
    )
    loss, normed = 4, rows * 256 * 4
    assert predict(job, device="cuda").parts["activations"] == 2 * normed + rows * 4 + loss


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("name", ["offload_activations", "cuda_graph_step", "fused_batchnorm"])
def test_what_only_a_gpu_shows_is_refused_without_one(name):
    with pytest.raises(vivace.Refused, match=rf"{name}: .* only where there is a GPU"):
        predict(wide(), Plan.from_dict({name: {}}), device="cuda")


def test_what_looks_at_numbers_is_refused():
    job = wide()

    def loss(model, batch):
        value = job.loss(model, batch)
        return value * 2 if value > 0 else value

    with pytest.raises(vivace.Refused, match="looks at numbers, which a prediction does not have"):
        predict(vivace.Job(**{**vars(job), "loss": loss}))
    with pytest.raises(vivace.Refused, match="looks at numbers, which a prediction does not have"):
        predict(vivace.Job(**{**vars(job), "loss": loss}), Plan.from_dict({"fp16_autocast": {}}))
    with pytest.raises(vivace.Refused, match="own step cannot be predicted"):
        predict(jobs.gan())
    with pytest.raises(vivace.Refused, match="a recurrent layer keeps what its library chooses"):
        predict(jobs.lstm())


class Tied(nn.Module):
    """Its table is read at both ends."""

    def __init__(self):
        super().__init__()
        self.table, self.middle = nn.Embedding(4000, 256), nn.Linear(256, 256)

    def forward(self, x):
        return torch.tanh(self.middle(self.table(x))) @ self.table.weight.t()


def test_the_gradients_of_a_weight_that_is_used_twice_are_added_up_beside_them():
    job = vivace.Job(
        model=Tied,
        data=lambda: [(torch.ones(4, 16, dtype=torch.long), torch.ones(64, dtype=torch.long))] * 2,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with start(job, Plan(), vivace.inspect()) as session:
        measured = observe(session, job.data()).peak_bytes
    assert predict(job).peak_bytes == pytest.approx(measured, rel=0.01)


class ChannelsAtTheEnd(nn.Module):
    """Normalises over channels, so that a convolution gets its gradient in another order than it wants."""

    def __init__(self):
        super().__init__()
        self.stem, self.inner = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3, padding=1)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.norm((x + self.inner(x)).permute(0, 2, 3, 1)).mean((1, 2)))


def test_a_gradient_that_a_convolution_copies_in_order_counts():
    job = vivace.Job(
        model=ChannelsAtTheEnd,
        data=lambda: [(torch.ones(16, 3, 40, 40), torch.ones(16, dtype=torch.long))] * 2,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with start(job, Plan(), vivace.inspect()) as session:
        measured = observe(session, job.data()).peak_bytes
    assert predict(job).peak_bytes == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv3d])
def test_convolutions_of_all_dimensions_copy_on_a_cpu(kind):
    inputs, between, results, size = (64, 128, 64, (512,)) if kind is nn.Conv1d else (1, 32, 32, (16, 20, 20))
    job = vivace.Job(
        model=lambda: nn.Sequential(
            kind(inputs, between, 3), nn.ReLU(), kind(between, results, 3), nn.ReLU()
        ),
        data=lambda: [torch.ones(8, inputs, *size)] * 2,
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with start(job, Plan(), vivace.inspect()) as session:
        measured = observe(session, job.data()).peak_bytes
    assert predict(job).peak_bytes == pytest.approx(measured, rel=0.08)


def test_a_sparse_batch_is_refused_by_name():
    batch = torch.eye(8).to_sparse()
    job = vivace.Job(
        model=lambda: nn.Embedding(8, 8),
        data=lambda: [batch],
        loss=lambda model, batch: torch.sparse.mm(batch, model.weight).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with pytest.raises(vivace.Refused, match=r"^what a sparse tensor takes depends on its numbers"):
        predict(job)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_a_sparse_gradient_takes_the_rows_that_were_looked_up(optimizer):
    rows = torch.randperm(100_000)[:50_000]
    job = vivace.Job(
        model=lambda: nn.Embedding(100_000, 32, sparse=True),
        data=lambda: [rows] * 2,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: optimizer(model.parameters(), lr=0.1),
    )
    with start(job, Plan(), vivace.inspect()) as session:
        measured = observe(session, job.data()).peak_bytes
    found = predict(job)
    assert found.peak_bytes == pytest.approx(measured, rel=0.02)
    tables = 1 if optimizer is torch.optim.SGD else 3  # beside it the optimizer's two means
    assert found.peak_bytes < (tables + 4) * 100_000 * 32 * 4


@pytest.mark.parametrize(("kind", "kept"), [(nn.LSTM, 6), (nn.GRU, 5), (nn.RNN, 1)])
def test_of_a_recurrent_layer_what_its_gradients_need_is_kept_on_a_gpu(kind, kept):
    def job(steps):
        return vivace.Job(
            model=lambda: kind(64, 64, batch_first=True),
            data=lambda: [torch.ones(32, steps, 64)] * 2,
            loss=lambda model, batch: model(batch)[0].sum(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )

    short, long = (predict(job(steps), device="cuda").parts["activations"] for steps in (512, 1024))
    one = 32 * 512 * 64 * 4
    assert (long - short) / one == pytest.approx(kept + 1, abs=0.01)  # and the layer's output
    with pytest.raises(vivace.Refused, match=r"^a recurrent layer keeps what its library chooses to"):
        predict(job(8))


def test_the_lines_of_a_prediction_hold_for_a_part_of_the_batch():
    data = torch.ones(1024, 64), torch.zeros(1024, dtype=torch.long)

    def job(samples, width):
        return vivace.Job(
            model=lambda: nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64 * 1024)),
            data=lambda: [tuple(part[:samples] for part in data)] * 2,
            loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            optimizer=lambda model: torch.optim.Adam(model.parameters()),
        )

    for width in (8, 4096):  # the peak is the loss's, or the update's
        whole, part = (predict(job(samples, width), device="cuda") for samples in (1024, 256))
        told = max(fixed + growing / 4 for fixed, growing in whole.lines)
        assert max(map(sum, whole.lines)) == pytest.approx(whole.reserved_bytes)
        assert 0.9 < told / part.reserved_bytes < 1.15


def test_the_largest_batch_is_what_must_fit():
    sizes = (*[8] * 9, 4096, 8)
    job = wide()
    data = [(torch.ones(n, 64), torch.zeros(n, dtype=torch.long)) for n in sizes]
    ragged = vivace.Job(**{**vars(job), "data": lambda: data})
    largest = vivace.Job(**{**vars(job), "data": lambda: data[9:]})
    assert fits(ragged, {"card": 2**31}) == fits(largest, {"card": 2**31})


def test_cards_are_judged_by_what_would_be_reserved():
    needed = 600 * MIB + predict(wide(), device="cuda").reserved_bytes
    small, large = fits(wide(), {"small": needed - 1, "large": needed})
    assert (small.card, small.fits, large.fits) == ("small", False, True)
    assert small.needed_bytes == large.needed_bytes == needed


def test_cards_of_one_size_share_a_row():
    file = io.StringIO()
    cards = [("A", 8), ("B", 4), ("C", 8)]
    draw([Fit(card, 5 * 2**30, size * 2**30) for card, size in cards], Console(file=file, width=80))
    assert [line.split() for line in file.getvalue().splitlines() if line.strip()][1:] == [
        ["it", "fits", "on", "2", "of", "3", "cards"],
        ["usable", "fits", "cards"],
        ["4.00", "GiB", "no", "B"],
        ["8.00", "GiB", "yes", "A,", "C"],
    ]


@pytest.mark.parametrize("device", ["cuda:0", "mps", "gpu"])
def test_another_device_is_refused_by_name(device):
    with pytest.raises(vivace.InputError, match=f"predicted for 'cpu' or 'cuda', not for '{device}'"):
        predict(wide(), device=device)
