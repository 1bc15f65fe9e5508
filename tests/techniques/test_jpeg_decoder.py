import dataclasses
import io
from typing import ClassVar

import numpy
import pytest
import simplejpeg
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.job import Job
from vivace.ledger import Observation
from vivace.observing.reference import profile_reference
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import registry
from vivace.testing import TINY_JOBS, TechniqueContract

JpegDecoder = registry.find("jpeg_decoder")


def jpeg(seed, **settings):
    pixels = numpy.random.default_rng(seed).integers(256, size=(4, 5, 3), dtype=numpy.uint8)
    image = Image.fromarray(pixels).resize((40, 30), Image.Resampling.BICUBIC)
    if settings.pop("gray", False):
        image = image.convert("L")
    file = io.BytesIO()
    image.save(file, "jpeg", **settings)
    return file.getvalue()


class Pictures(Dataset):
    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        with Image.open(io.BytesIO(self.files[index])) as image:
            return numpy.asarray(image).astype(numpy.int64)


class Labelled(Pictures):
    def __getitem__(self, index):
        return torch.from_numpy(super().__getitem__(index)[..., 0]).float(), index % 4


def pictures():
    files = [jpeg(seed) for seed in range(24)]
    return Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(1200, 4)),
        data=lambda: DataLoader(Labelled(files), batch_size=8),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0] / 255), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    )


class TestJpegDecoder(TechniqueContract):
    technique = JpegDecoder
    jobs: ClassVar = {"mlp": TINY_JOBS["mlp"], "pictures": pictures}


@pytest.fixture
def session():
    with start(TINY_JOBS["mlp"](), Plan([JpegDecoder()]), inspect()) as found:
        yield found


def read(files, session=None, **settings):
    loader = DataLoader(Pictures(files), batch_size=None, **settings)
    return [batch.tolist() for batch in (session.batches(loader) if session else loader)]


class Written(Pictures):
    """Writes pixels, by the person's code, by Pillow's own, and once more behind a change by Pillow."""

    def __getitem__(self, index):
        with Image.open(io.BytesIO(self.files[index])) as image:
            pixels = image.load()
            first = pixels[0, 0]
            pixels[0, 0] = pixels[1, 1]
            ImageDraw.floodfill(image, (5, 5), pixels[2, 2])
            image.putpixel((3, 3), pixels[0, 0])
            image.load()[4, 4] = first
            assert pixels[4, 4] == first
            return numpy.asarray(image).astype(numpy.int64)


@pytest.mark.parametrize("plan", [{"jpeg_decoder": {}}, {"decoded_cache": {"budget_gib": 0.01}}])
@pytest.mark.parametrize("gray", [False, True])
def test_pictures_can_be_written_to_and_the_next_pass_begins_with_the_file_again(plan, gray):
    """The first ones come from Pillow, and lie in memory of their own."""
    loader = DataLoader(Written([jpeg(seed, gray=gray) for seed in range(6)]), batch_size=None)
    wanted = [picture.tolist() for picture in loader]
    with start(TINY_JOBS["mlp"](), Plan.from_dict(plan), inspect()) as session:
        for _ in range(2):
            assert [picture.tolist() for picture in session.batches(loader)] == wanted


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [{}, {"subsampling": 0}, {"progressive": True}, {"gray": True}])
def test_pictures_are_the_same_and_come_from_the_library(session, workers, kind):
    files = [jpeg(seed, **kind) for seed in range(6)]
    assert read(files, session, num_workers=workers) == read(files)
    counts = session.build.notes["jpeg_decoder"]
    assert counts == {"decoded": 6, "differing": 0}
    seen = Observation({}, {}, 0, 0.0, notes={"jpeg_decoder": counts})
    assert JpegDecoder().confirm(seen, seen) == "6 files decoded by simplejpeg, 0 by Pillow"


def test_a_kind_that_comes_out_otherwise_stays_with_pillow(session, monkeypatch):
    files, calls = [jpeg(seed) for seed in range(6)], []
    right = simplejpeg.decode_jpeg

    def wrong(data, **settings):
        calls.append(data)
        pixels = bytearray(right(data, **settings))
        pixels[0] ^= 1
        return pixels

    monkeypatch.setattr(simplejpeg, "decode_jpeg", wrong)
    assert read(files, session) == read(files)
    assert session.build.notes["jpeg_decoder"] == {"decoded": 0, "differing": 6}
    assert len(calls) == 1
    seen = Observation({}, {}, 0, 0.0, notes=session.build.notes)
    with pytest.raises(Refused, match="only such that it decodes to other bits"):
        JpegDecoder().confirm(seen, seen)


def test_a_damaged_file_fails_as_in_pillow(session):
    with pytest.raises(OSError, match="truncated"):
        read([jpeg(1)[:-60]], session)


def test_validation_data_are_served_too_or_left_as_they_are(session):
    files = [jpeg(seed) for seed in range(4)]
    loader = DataLoader(Pictures(files), batch_size=None)
    assert [batch.tolist() for batch in session.validation(loader)] == read(files)
    assert session.build.notes["jpeg_decoder"]["decoded"] == 4
    other = DataLoader(Pictures(files), num_workers=1, multiprocessing_context="spawn")
    assert session.validation(other) is other
    assert "your workers start by spawn" in session.build.facts.validation_left_alone["jpeg_decoder"]


def test_without_the_library_it_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Refused, match="simplejpeg is not installed"):
        start(TINY_JOBS["mlp"](), Plan([JpegDecoder()]), inspect())


def test_it_is_offered_where_a_sample_decodes_a_jpeg():
    job = pictures()
    numbers = dataclasses.replace(job, data=lambda: [(pictures, labels) for pictures, labels in job.data()])
    memory = dataclasses.replace(job, data=lambda: DataLoader(TensorDataset(*next(iter(job.data())))))
    for tried, offered in ((job, 1), (memory, 0), (numbers, 0)):  # a list of batches has been decoded already
        batches = list(tried.data())
        with start(tried, Plan(), inspect()) as session:
            profile = profile_reference(session, tried, batches)
        assert len(JpegDecoder.candidates(profile, inspect())) == offered


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
@pytest.mark.parametrize("plan", [{"jpeg_decoder": {}}, {"decoded_cache": {"budget_gib": 0.01}}])
def test_workers_that_go_on_may_be_read_again_after_other_loaders(plan):
    """As those of the training data after each evaluation."""
    data, settings = Labelled([jpeg(seed) for seed in range(4)]), {"num_workers": 1}
    training, *others = (DataLoader(data, persistent_workers=True, **settings) for _ in range(3))
    with start(TINY_JOBS["mlp"](), Plan.from_dict(plan), inspect()) as session:
        for _ in range(2):
            assert len(list(session.batches(training))) == 4
            for other in others:
                assert len(list(session.validation(other))) == 4
        assert not session.build.facts.validation_left_alone
