import dataclasses
import io
import random
from typing import ClassVar

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchvision import datasets, transforms

from vivace.data.order import ordered
from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.job import Job
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import Numerics, registry
from vivace.testing import TINY_JOBS, TechniqueContract, plain_profile

DecodedCache = registry.find("decoded_cache")
LoaderWorkers = registry.find("loader_workers")
SIZE = 24


def jpeg(seed):
    numbers = random.Random(seed)
    image = Image.new("RGB", (SIZE, SIZE), tuple(numbers.randrange(256) for _ in range(3)))
    image.paste(tuple(numbers.randrange(256) for _ in range(3)), (3, 5, 12, 20))
    file = io.BytesIO()
    image.save(file, "jpeg")
    return file.getvalue()


class InMemory(Dataset):
    """A dataset of a person's own: bytes in memory, decoded and cropped anew at each reading."""

    def __init__(self):
        self.files = [jpeg(seed) for seed in range(24)]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(io.BytesIO(self.files[index])).convert("RGB")
        left = int(torch.randint(8, ()))
        return transforms.functional.to_tensor(image.crop((left, 0, left + 16, 16))), index % 4


class Streamed(IterableDataset):
    def __iter__(self):
        return (Image.open(io.BytesIO(jpeg(seed))).convert("L").getpixel((4, 6)) for seed in range(8))


def pictures():
    return Job(
        model=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 14 * 14, 4)),
        data=lambda: DataLoader(InMemory(), batch_size=8, shuffle=True),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    )


class TestDecodedCache(TechniqueContract):
    technique = DecodedCache
    jobs: ClassVar = {"mlp": TINY_JOBS["mlp"], "pictures": pictures}


@pytest.fixture
def folder(tmp_path):
    for seed in range(12):
        (tmp_path / f"class{seed % 2}").mkdir(exist_ok=True)
        (tmp_path / f"class{seed % 2}" / f"{seed}.jpg").write_bytes(jpeg(seed))
    transform = transforms.Compose([transforms.RandomCrop(16), transforms.ToTensor()])
    return datasets.ImageFolder(tmp_path, transform)


def session_with(*techniques):
    machine = dataclasses.replace(inspect(), num_cores=4)
    return start(TINY_JOBS["mlp"](), Plan(techniques or [DecodedCache(budget_gib=0.05)]), machine)


def epochs(loader, session=None, count=3):
    found = []
    for epoch in range(count):
        loader = ordered(loader, seed=1, epoch=epoch)
        found += [batch[0] for batch in (session.batches(loader) if session else loader)]
    return found


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
@pytest.mark.parametrize("settings", [{}, {"num_workers": 2, "persistent_workers": True}, {"num_workers": 1}])
def test_every_epoch_of_an_image_folder_is_bit_for_bit_the_same_with_other_crops_each_time(folder, settings):
    wanted = epochs(DataLoader(folder, batch_size=5, shuffle=True))
    with session_with() as session:
        found = epochs(DataLoader(folder, batch_size=5, shuffle=True, **settings), session)
        counts = session.build.notes["decoded_cache"]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert counts["records"] == 12
    assert counts["misses"] == 12
    assert counts["hits"] == 25  # 24 in the two later epochs, and sample 0 was looked at beforehand


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_of_another_number_share_it_too(folder):
    wanted = epochs(DataLoader(folder, batch_size=4))
    with session_with(DecodedCache(budget_gib=0.05), LoaderWorkers(num_workers=2)) as session:
        found = epochs(DataLoader(folder, batch_size=4), session)
        assert session.build.notes["decoded_cache"]["records"] == 12
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_does_not_fit_is_decoded_as_ever(folder):
    wanted = epochs(DataLoader(folder, batch_size=4))
    with session_with(DecodedCache(budget_gib=10_000 / 2**30)) as session:
        found = epochs(DataLoader(folder, batch_size=4), session)
        counts = session.build.notes["decoded_cache"]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert 0 < counts["records"] < 12
    assert counts["full"] > 0


def test_a_file_on_disk_serves_the_next_run(folder, tmp_path):
    for hits in (1, 14):
        with session_with(DecodedCache(budget_gib=0.05, file=str(tmp_path / "kept"))) as session:
            epochs(DataLoader(folder, batch_size=4), session, count=1)
            assert session.build.notes["decoded_cache"]["hits"] == hits


def test_an_iterable_dataset_that_decodes_is_served():
    with session_with() as session:
        loader = DataLoader(Streamed(), batch_size=4)
        first, second = (torch.cat(list(session.batches(loader))) for _ in range(2))
        assert torch.equal(first, second)
        assert session.build.notes["decoded_cache"]["hits"] == 8


def test_what_decodes_nothing_or_starts_otherwise_is_refused(folder):
    with session_with() as session, pytest.raises(Refused, match="a sample of your TensorDataset decodes no"):
        session.batches(TINY_JOBS["mlp"]().data())
    loader = DataLoader(folder, num_workers=1, multiprocessing_context="spawn")
    with session_with() as session, pytest.raises(Refused, match="your workers start by spawn"):
        session.batches(loader)
    with pytest.raises(Refused, match="no JPEG file was decoded"):
        DecodedCache().confirm(Observation({}, {}, 0, 0.0), Observation({}, {}, 0, 0.0))


def test_the_promise_is_exact_and_one_epoch_is_no_reason_for_it():
    assert DecodedCache.card.numerics == Numerics.EXACT
    profile = plain_profile()
    assert len(DecodedCache.candidates(profile, inspect())) == 1
    profile.features["epochs"] = 1
    assert DecodedCache.candidates(profile, inspect()) == []
    profile.features["epochs"] = 2
    profile.features["loader"]["decodes_jpeg"] = False
    assert DecodedCache.candidates(profile, inspect()) == []


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_validation_data_are_kept_too_and_read_by_workers(folder):
    wanted = epochs(DataLoader(folder, batch_size=4), count=1)
    with session_with(DecodedCache(budget_gib=0.05), LoaderWorkers(num_workers=1)) as session:
        for _ in range(2):
            fed = session.validation(ordered(DataLoader(folder, batch_size=4), seed=1, epoch=0))
            assert all(torch.equal(batch[0], one) for batch, one in zip(fed, wanted, strict=True))
        counts = session.build.notes["decoded_cache"]
        assert (counts["records"], counts["misses"]) == (12, 12)
        assert session.build.notes["loader_workers"] == (0, 1, 2)


def test_what_will_not_all_be_kept_is_refused_where_only_a_part_was_read():
    """Read again and again, that part says nothing of a pass over all."""
    reference, cache = Observation({}, {}, 0, 0.0), DecodedCache(budget_gib=1.0)
    counts = {"records": 10, "hits": 40, "damaged": 0, "bytes": 2**28}
    seen = dataclasses.replace(reference, notes={"decoded_cache": counts, "share_read": 0.5})
    assert "10 pictures in 256 MiB" in cache.confirm(seen, reference)
    seen = dataclasses.replace(reference, notes={"decoded_cache": counts, "share_read": 0.1})
    with pytest.raises(Refused, match=r"all pictures take about 2\.50 GiB, and 1\.0 GiB of them may be kept"):
        cache.confirm(seen, reference)
