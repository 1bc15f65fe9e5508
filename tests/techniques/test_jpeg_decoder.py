import io
import sys
from types import SimpleNamespace

import numpy
import pytest
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from vivace import registry
from vivace.engine.opening import start
from vivace.errors import Refused
from vivace.inspect import inspect
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.testing import TINY_JOBS, TechniqueContract

JpegDecoder = registry.find("jpeg_decoder")


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """A stand-in for simplejpeg, which no extra installs: it decodes through Pillow, and can be wrong."""
    stand_in = SimpleNamespace(calls=0, wrong=False)

    def decode_jpeg(data, colorspace, fastdct, fastupsample):
        stand_in.calls += 1
        if data[-2:] != b"\xff\xd9":
            raise ValueError("premature end of JPEG file")
        mode = "RGB" if colorspace == "RGBX" else "L"
        pixels = bytearray(
            Image.open(io.BytesIO(data + b"\0"))
            .convert(mode)
            .tobytes("raw", colorspace[:4] if mode == "RGB" else "L")
        )
        pixels[0] ^= int(stand_in.wrong)
        return pixels

    def plain_load(data, **settings):
        from PIL.JpegImagePlugin import JpegImageFile

        patched = vars(JpegImageFile)["load"]
        del JpegImageFile.load
        try:
            return decode_jpeg(data, **settings)
        finally:
            JpegImageFile.load = patched

    stand_in.decode_jpeg = plain_load
    stand_in.__spec__ = object()
    monkeypatch.setitem(sys.modules, "simplejpeg", stand_in)
    return stand_in


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


class TestJpegDecoder(TechniqueContract):
    technique = JpegDecoder


@pytest.fixture
def session():
    with start(TINY_JOBS["mlp"](), Plan([JpegDecoder()]), inspect()) as found:
        yield found


def read(files, session=None, **settings):
    loader = DataLoader(Pictures(files), batch_size=None, **settings)
    return [batch.tolist() for batch in (session.batches(loader) if session else loader)]


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


def test_a_kind_that_comes_out_otherwise_stays_with_pillow(session, library):
    files = [jpeg(seed) for seed in range(6)]
    library.wrong = True
    assert read(files, session) == read(files)
    assert session.build.notes["jpeg_decoder"] == {"decoded": 0, "differing": 6}
    assert library.calls == 1
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
    assert "your workers start by spawn" in session.build.notes["validation_as_ever"]["jpeg_decoder"]


def test_without_the_library_it_is_refused(monkeypatch):
    monkeypatch.delitem(sys.modules, "simplejpeg")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Refused, match="simplejpeg is not installed"):
        start(TINY_JOBS["mlp"](), Plan([JpegDecoder()]), inspect())
