import io
import mmap
import time

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import vivace
from vivace.inspection import inspect
from vivace.observing import reference
from vivace.observing.observe import kept_by_graphs, live_bytes, observe
from vivace.observing.reference import PARTS, profile_reference
from vivace.operators import LEAST_ONE_BY_ONE as MANY
from vivace.plan import Plan
from vivace.session.opening import attach, start
from vivace.testing import TINY_JOBS

pytestmark = pytest.mark.usefixtures("one_thread")
MACHINE = inspect()
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="counts bytes of the CPU")


def observed(name):
    job = TINY_JOBS[name]()
    with start(job, Plan(), MACHINE) as session:
        return observe(session, list(session.batches(job.data())))


@pytest.mark.parametrize("name", TINY_JOBS)
def test_every_job_can_be_observed(name):
    seen = observed(name)
    assert seen.operators
    assert set(seen.dtypes) == {"float32"}
    assert seen.peak_bytes > 0
    assert seen.kernels == {} or torch.cuda.is_available()


def features_of(model, batch):
    """What a profile of a job with this model says of it."""
    job = vivace.Job(
        model=lambda: model,
        data=lambda: [batch],
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with start(job, Plan(), MACHINE) as session:
        return profile_reference(session, job, [batch]).features


def test_a_profile_says_which_share_of_convolutions_is_small():
    layers = [
        nn.Conv2d(4, 8, 3, padding=1),  # 12 x 12 pixels: large; 4 * 9 * 8 multiplications a pixel
        nn.Conv2d(8, 4, 1),  # 8 * 4
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1),  # 6 x 6 pixels: small, a quarter as many as the first
        nn.Conv2d(8, 8, 3, padding=1, groups=2),  # groups; a quarter of 4 * 9 * 8
    ]
    found = features_of(nn.Sequential(*layers), torch.randn(2, 4, 12, 12))["small_convolutions"]
    large, one, small, grouped = 4 * 9 * 8, 8 * 4, 4 * 9 * 8 / 4, 4 * 9 * 8 / 4
    assert found == pytest.approx((one + small) / (large + one + small + grouped))


@pytest.mark.parametrize(
    ("layer", "slow"),
    [
        (nn.Conv2d(4, 4, 3, groups=4), False),
        (nn.Conv2d(4, 4, (1, 5), groups=4), True),
        (nn.Conv2d(4, 4, 3, stride=(1, 2), groups=4), True),
        (nn.Conv2d(4, 4, 3, dilation=(2, 1), groups=4), True),
        (nn.Conv2d(4, 4, 5, groups=2), False),
        (nn.Conv2d(4, 8, 5, groups=4), False),
        (nn.Conv2d(4, 4, 5), False),
        (nn.ConvTranspose2d(4, 4, 5, groups=4), False),
        (nn.Sequential(nn.Conv2d(4, 4, 5, groups=4), nn.Conv2d(4, 4, 3, groups=4)), True),
    ],
)
def test_a_profile_says_whether_depthwise_convolutions_have_slow_gradients(layer, slow):
    assert features_of(layer, torch.randn(2, 4, 12, 12))["slow_depthwise"] is slow


def test_a_profile_says_which_share_of_convolutions_suits_winograds_filtering():
    layers = {  # with how many multiplications a pixel of 8 images of 12 x 12
        nn.Conv2d(4, 32, 3, padding=1): 4 * 9 * 32,  # few channels
        nn.Conv2d(32, 64, 3, padding=1): 32 * 9 * 64,  # suits
        nn.Conv2d(64, 32, 1): 64 * 32,  # another window
        nn.Conv2d(32, 32, 3, padding=2, dilation=2): 32 * 9 * 32,
        nn.ConvTranspose2d(32, 32, 3, padding=1): 32 * 9 * 32,
        nn.Conv2d(32, 64, 3, padding=1, groups=2): 16 * 9 * 64,
        nn.Conv2d(64, 32, 3, padding=1, stride=2): 64 * 9 * 32 / 4,  # of a quarter of the pixels
        nn.Conv2d(32, 32, 3): 32 * 9 * 32 * 4 * 4 / 144,  # 8 tiles, of 4 x 4 pixels
    }
    found = features_of(nn.Sequential(*layers), torch.randn(8, 4, 12, 12))
    assert found["winograd_convolutions"] == pytest.approx(32 * 9 * 64 / sum(layers.values()))
    assert features_of(nn.Conv2d(4, 8, 3), torch.randn(2, 4, 12, 12))["winograd_convolutions"] == 0
    assert features_of(nn.Linear(12, 2), torch.randn(2, 4, 12, 12))["winograd_convolutions"] == 0


@on_cpu
def test_a_profile_says_how_many_numbers_large_masks_have():
    layers = [nn.Linear(8, 300), nn.Dropout(0.3), nn.Dropout(0.0), nn.Linear(300, 256), nn.Dropout(0.5)]
    model = nn.Sequential(*layers, nn.Linear(256, 255), nn.Dropout(0.5))  # 16 x 255 are few
    job = vivace.Job(
        model=lambda: model,
        data=lambda: [torch.ones(16, 8)],
        loss=lambda model, batch: nn.functional.dropout(model(batch), 0.1, training=False).sum(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with start(job, Plan(), MACHINE) as session:
        profile = profile_reference(session, job, job.data())
        model.eval()
        without = profile_reference(session, job, job.data())
    assert profile.features["mask_numbers"] == 16 * 300 + 16 * 256
    assert without.features["mask_numbers"] == 0


class Doing(nn.Module):
    """A function of its input and of a weight for each of its numbers."""

    def __init__(self, function, *shape):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return self.function(x * self.weight)


def put(x, accumulate):
    return x.index_put((torch.arange(MANY) % 9,), torch.ones(MANY), accumulate=accumulate)


ONE_BY_ONE = {  # how many times the numbers of its input
    "where": (lambda x: torch.where(x > 2, x, x * 3), 3),  # and of each of two gradients
    "masked_fill": (lambda x: x.masked_fill(x > 2, 0.0), 2),
    "masked_fill_": (lambda x: (x * 3).masked_fill_(x > 2, 0.0), 2),
    "max_pool2d": (lambda x: functional.max_pool2d(x, (1, 2)), 1),
    "max_pool1d": (lambda x: functional.max_pool1d(x[0], 2), 1),
    "max_pool2d in float16": (lambda x: functional.max_pool2d(x.half(), (1, 2)).float(), 0),
    "rows": (lambda x: x.flatten()[torch.arange(MANY)], 1),
    "few rows": (lambda x: x.flatten()[torch.arange(MANY - 1)], 0),
    "rows that are added": (lambda x: put(x.flatten(), accumulate=True), 1),
    "rows that are put": (lambda x: put(x.flatten(), accumulate=False), 0),
    "prelu": (lambda x: functional.prelu(x, torch.tensor([0.1])), 1),
    "relu": (functional.relu, 0),
    "max_pool2d in channels-last order": (
        lambda x: functional.max_pool2d(x.to(memory_format=torch.channels_last), (1, 2)),
        0,
    ),
}


@on_cpu
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_profile_says_how_many_numbers_are_computed_one_by_one(name):
    function, times = ONE_BY_ONE[name]
    shape = (1, 4, 8, MANY // 32)
    assert features_of(Doing(function, *shape), torch.ones(shape))["one_by_one"] == times * MANY


@on_cpu
@pytest.mark.parametrize("name", [name for name in ONE_BY_ONE if "rows" not in name])
def test_of_few_numbers_a_profile_counts_none(name):
    shape = (1, 4, 8, MANY // 32 - 1)
    assert features_of(Doing(ONE_BY_ONE[name][0], *shape), torch.ones(shape))["one_by_one"] == 0


def attend(x, **options):
    return functional.scaled_dot_product_attention(x, x, x, **options)


ATTENTION = {  # of 4 heads and 192 tokens: how many scores, and whether that is slow
    "float32": (attend, (4, 192, 8), 4 * 192**2, False),
    "causal": (lambda x: attend(x, is_causal=True), (4, 192, 8), 4 * 192**2, False),
    "bfloat16": (lambda x: attend(x.bfloat16()), (4, 192, 8), 4 * 192**2, True),
    "little": (lambda x: attend(x.bfloat16()), (4, 63, 8), 4 * 63**2, False),
    "dropped": (lambda x: attend(x, dropout_p=0.1), (4, 192, 8), 4 * 192**2, True),
    "few dropped": (lambda x: attend(x, dropout_p=0.1), (4, 128, 8), 4 * 128**2, False),
    "twice": (lambda x: attend(attend(x)), (4, 192, 8), 8 * 192**2, False),
    "none": (functional.relu, (4, 192, 8), 0, False),
}


@on_cpu
@pytest.mark.parametrize("name", ATTENTION)
def test_a_profile_says_how_many_scores_attention_has_and_whether_it_is_slow(name, monkeypatch):
    monkeypatch.setattr(reference, "LEAST_DROPPED_FLOAT", 2**17)
    function, shape, scores, slow = ATTENTION[name]
    found = features_of(Doing(lambda x: function(x).float(), 1, *shape), torch.ones(1, *shape))
    assert (found["attention_scores"], found["slow_attention"]) == (scores, slow)


@on_cpu
def test_a_profile_sees_what_runs_in_a_step_of_ones_own():
    layers = [nn.Conv2d(4, 4, 5, groups=4), nn.Dropout(0.3), nn.Conv2d(4, 2, 1), nn.ReLU()]

    def step(models, optimizers, batch):
        models["one"](batch).sum().backward()
        optimizers["one"].step()

    job = vivace.Job(
        model=lambda: {"one": nn.Sequential(*layers)},
        data=lambda: [torch.ones(16, 4, 12, 12)],
        optimizer=lambda models: {"one": torch.optim.SGD(models["one"].parameters(), lr=0.1)},
        step=step,
    )
    with start(job, Plan(), MACHINE) as session:
        found = profile_reference(session, job, job.data()).features
    depthwise, pointwise = 4 * 25, 4 * 2  # multiplications a pixel, of equally many pixels
    assert found["small_convolutions"] == pytest.approx(1.0 * pointwise / (depthwise + pointwise))
    assert found["mask_numbers"] == 16 * 4 * 8 * 8
    assert found["slow_depthwise"]
    assert found["distinct_operators"] > 0


@on_cpu
def test_peak_bytes_are_the_tensors_that_a_step_holds_at_once():
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(1024, 256)
    with attach(Plan(), model=model, optimizer=optimizer, loss=lambda m, b: m(b).relu().sum()) as session:
        peak = observe(session, [batch]).peak_bytes
    weight, activations = 256 * 256 * 4, 1024 * 256 * 4
    # The weight, the batch, the saved output of relu, and both gradients on the way through it.
    assert weight + 3 * activations <= peak <= 2 * weight + 4 * activations + 4096


@on_cpu
def test_dtypes_are_those_that_ran_not_those_that_were_asked_for():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch).sum()

    with attach(Plan(), model=model, optimizer=optimizer, loss=loss) as session:
        assert set(observe(session, [torch.ones(4, 8)]).dtypes) == {"bfloat16"}


@pytest.mark.parametrize("name", TINY_JOBS)
def test_profile_of_every_job(name):
    job = TINY_JOBS[name]()
    with start(job, Plan(), MACHINE) as session:
        seams = dict(vars(session.seams))
        profile = profile_reference(session, job, list(session.batches(job.data())))
        assert vars(session.seams) == seams
    assert set(profile.shares) == set(PARTS)
    assert sum(profile.shares.values()) == pytest.approx(1)
    assert sum(profile.operator_shares.values()) == pytest.approx(1)
    assert profile.step_seconds > 0
    assert profile.features["batch_size"] == 16
    assert profile.features["batch_norm"] == profile.features["convolution_2d"] == (name == "cnn")
    assert profile.features["recurrent"] == (name == "lstm")
    assert profile.features["dropout"] == (name == "transformer")
    assert profile.features["own_step"] == (name == "gan")
    assert profile.features["loader"] == {
        "is_dataloader": True,
        "is_iterable": False,
        "num_workers": 0,
        "batch_size": 16,
        "dataset_length": 64,
        "in_memory": isinstance(job.data().dataset, TensorDataset | list),
        "decodes_jpeg": False,
    }
    if name == "gan":
        assert profile.shares["backward"] == profile.shares["update"] == 0
        assert profile.features["optimizer"] == "Adam"


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_the_parts_of_a_step_in_pieces_are_timed_too(name):
    def shares(plan):
        job = TINY_JOBS[name]()
        with start(job, Plan.from_dict(plan), MACHINE) as session:
            return profile_reference(session, job, list(session.batches(job.data()))).shares

    for _ in range(3):  # in a step of a millisecond another process may have its turn
        both = shares({}), shares({"micro_batches": {"num": 2}})
        whole, pieces = ((s["forward"] + s["backward"]) / (1 - s["data"]) for s in both)
        assert min(both[1]["forward"], both[1]["backward"]) > 0
        if pieces > 0.5 * whole:
            break
    assert pieces > 0.5 * whole  # without the pieces nothing of them is seen


def test_a_loader_that_waits_shows_in_the_share_of_data():
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            import time

            time.sleep(0.02)
            return torch.ones(8)

    job = vivace.Job(
        model=lambda: nn.Linear(8, 1),
        data=lambda: torch.utils.data.DataLoader(Slow(), batch_size=2),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with start(job, Plan(), MACHINE) as session:
        profile = profile_reference(session, job, [torch.ones(2, 8)])
    assert profile.shares["data"] > 0.8
    assert profile.features["loader"]["dataset_length"] == 4
    assert not profile.features["loader"]["in_memory"]


def test_page_faults_of_a_profile_are_the_mean_of_all_steps_that_are_timed():
    """Of five, after one that warms up, the fourth takes 2,048 pages: two steps would show none, or half."""
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) == 5:
            with mmap.mmap(-1, 2048 * mmap.PAGESIZE) as taken:
                taken.write(bytes(len(taken)))
        return model(batch).mean()

    job = vivace.Job(
        model=lambda: nn.Linear(8, 1),
        data=lambda: [torch.ones(2, 8)],
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with start(job, Plan(), MACHINE) as session:
        profile = profile_reference(session, job, [torch.ones(2, 8)])
    assert 2048 / 5 <= profile.page_faults < 2048


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("in_a_loader", [True, False])
def test_of_a_stream_what_comes_first_is_looked_at(in_a_loader, decodes):
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", (8, 8)).save(file, "JPEG")

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            for _ in range(4):
                if decodes:
                    image.open(io.BytesIO(file.getvalue())).load()
                yield torch.ones(8)

    class Batches:
        def __iter__(self):
            return (sample[None] for sample in Stream())

    job = vivace.Job(
        model=lambda: nn.Linear(8, 1),
        data=lambda: torch.utils.data.DataLoader(Stream(), batch_size=2) if in_a_loader else Batches(),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with start(job, Plan(), MACHINE) as session:
        profile = profile_reference(session, job, [torch.ones(2, 8)])
    assert profile.features["loader"]["decodes_jpeg"] is decodes
    assert not profile.has_index


class SlowSamples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.06)
        return torch.ones(8)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_waiting_for_workers_that_take_turns_is_not_overlooked():
    def loss(model, batch):
        time.sleep(0.02)
        return model(batch).mean()

    job = vivace.Job(
        model=lambda: nn.Linear(8, 1),
        data=lambda: torch.utils.data.DataLoader(SlowSamples(), batch_size=2, num_workers=3),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with start(job, Plan(), MACHINE) as session:
        profile = profile_reference(session, job, [torch.ones(2, 8)])
    assert profile.shares["data"] > 0.1  # a batch each 40 ms, 20 ms for a step: 0, 0, 60 ms of waiting


def test_memory_in_the_pools_of_graphs_counts_and_free_memory_of_all_does_not():
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 10},
        {"segment_pool_id": (0, 3), "total_size": 70, "allocated_size": 30},
        {"segment_pool_id": (2, 0), "total_size": 5, "allocated_size": 0},
    ]
    assert kept_by_graphs(segments) == 45
    assert kept_by_graphs([]) == 0


def test_the_limit_of_loading_is_said_beforehand(monkeypatch):
    from vivace.observing import reference

    monkeypatch.setattr(reference, "usable_cores", lambda: 6)
    parts = {"data": 0.1, "place": 0.0, "forward": 0.012, "backward": 0.01, "update": 0.0}
    loader = torch.utils.data.DataLoader(range(8))
    assert reference._loading_limit(parts, 100, loader) == (
        "a core loads 1,000 samples a second, the step consumes 4,545: 5 cores feed it"
    )
    assert reference._loading_limit({**parts, "data": 0.2}, 100, loader) == (
        "6 cores can load 3,000 samples a second, the step consumes 4,545: no number of workers can feed it; "
        "less work for each sample can"
    )
    assert reference._loading_limit({**parts, "data": 0.0001}, 100, loader) == ""
    assert reference._loading_limit({**parts, "data": 0.02}, 100, loader).endswith(": one core feeds it")
    assert reference._loading_limit(parts, 100, torch.utils.data.DataLoader(range(8), num_workers=1)) == ""
    assert reference._loading_limit(parts, 100, [1, 2]) == ""


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("places", [12, 13])
def test_sparse_tensors_count_by_what_they_consist_of(places):
    rows, columns, numbers = torch.arange(7), torch.arange(6), torch.ones(6)
    edges = torch.sparse_csr_tensor(rows, columns, numbers, (6, 6), check_invariants=True)
    if places == 12:
        edges = torch.sparse_coo_tensor(
            torch.stack([columns, columns]), numbers, (6, 6), check_invariants=True
        )
    model = nn.Linear(8, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(Plan(), model=model, optimizer=optimizer, loss=lambda m, b: m(b[0]).mean()) as session:
        assert live_bytes(session, (torch.ones(6, 8), edges)) == 4 * (8 + 48 + 6) + 8 * places


def test_steps_that_write_into_their_batch_are_profiled_on_what_it_was():
    seen = []

    def loss(model, batch):
        x, y = batch
        seen.append(int(y.sum()))
        y -= 1  # labels from 1 on, as some data has them
        return nn.functional.cross_entropy(model(x), y)

    job = vivace.Job(
        model=lambda: nn.Linear(3, 2),
        data=lambda: [(torch.ones(2, 3), torch.tensor([1, 2])) for _ in range(20)],
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with start(job, Plan(), MACHINE) as session:
        profile_reference(session, job, job.data()[:1])
    assert set(seen) == {3}
