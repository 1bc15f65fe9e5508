import contextlib
import io
import os
import tarfile

import numpy
import pyarrow
import pytest
from PIL import Image, ImageDraw, ImageFile, JpegImagePlugin
from PIL.TarIO import TarIO

from vivace.mechanisms.decoding import KeptDecoding, OtherDecoder, Within, require_pillow, simplejpeg_decode
from vivace.mechanisms.shared_store import SharedStore


@pytest.fixture
def kept():
    store = SharedStore(1 << 24)
    yield KeptDecoding(store)
    store.close()


def picture(mode="RGB", size=(67, 41), seed=0):
    pixels = numpy.random.default_rng(seed).integers(256, size=(5, 7, 4), dtype=numpy.uint8)
    return Image.fromarray(pixels, "RGBA").resize(size, Image.Resampling.BICUBIC).convert(mode)


@pytest.fixture(params=["RGB", "L", "CMYK"])
def path(request, tmp_path):
    picture(request.param).save(tmp_path / "a.jpg", quality=90)
    return tmp_path / "a.jpg"


def pixels(source):
    with Image.open(source) as image:
        return numpy.asarray(image).copy()


def in_memory(path):
    return io.BytesIO(path.read_bytes())


def test_what_is_read_again_is_bit_for_bit_what_was_decoded(kept, path):
    wanted = pixels(path)
    with Image.open(path) as image:
        converted = numpy.asarray(image.convert("RGB"))
    with kept, path.open("rb") as file:
        for source in (path, in_memory(path), pyarrow.BufferReader(path.read_bytes()), file):
            for _ in range(3):
                with Image.open(source) as image:
                    assert numpy.array_equal(numpy.asarray(image), wanted)
                    assert numpy.array_equal(numpy.asarray(image.convert("RGB")), converted)
        assert kept.store.counts()["records"] == 2  # one for the file, one for the bytes in memory
        assert kept.store.counts()["hits"] > 6


def test_the_image_behaves_as_any_other(kept, path):
    with kept:
        for _ in range(2):
            image = Image.open(path)
            image.load()
            image.load()
            assert (image.format, image.size, image.fp) == ("JPEG", (67, 41), None)
            assert image.getexif() == {}
            ImageDraw.Draw(image).rectangle((0, 0, 30, 30), fill=0)
            image.paste(0, (0, 0, 9, 9))
            image.putpixel((1, 1), image.getpixel((3, 3)))
        wanted = pixels(path)
    assert numpy.array_equal(wanted, pixels(path))


def test_a_smaller_draft_is_another_decoding(kept, tmp_path):
    picture(size=(320, 200)).save(tmp_path / "a.jpg")
    with kept:
        for _ in range(2):
            pixels(tmp_path / "a.jpg")
            image = Image.open(tmp_path / "a.jpg")
            image.draft("L", (80, 50))
            assert numpy.asarray(image).shape == (50, 80)
    assert kept.store.counts()["records"] == 2


def test_a_changed_file_is_decoded_again(kept, path):
    with kept:
        pixels(path)
        stamp = path.stat()
        path.write_bytes(path.read_bytes()[:-2] + b"\xff\xd9")  # the same length and the same bytes
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        pixels(path)
        assert kept.store.counts()["hits"] == 0


def test_a_damaged_record_is_decoded_again(kept, path):
    wanted = pixels(path)
    with kept:
        pixels(path)
        kept.store._map[kept.store.records_at + 7] ^= 64
        assert numpy.array_equal(pixels(path), wanted)
        assert numpy.array_equal(pixels(path), wanted)
    assert kept.store.counts()["damaged"] == 1
    assert kept.store.counts()["hits"] == 1


def test_another_decoder_below_fills_it_too(kept, path):
    wanted = pixels(path)
    with OtherDecoder(simplejpeg_decode) as other, kept:
        for _ in range(6):
            assert numpy.array_equal(pixels(path), wanted)
            assert numpy.array_equal(pixels(in_memory(path)), wanted)
    assert kept.store.counts()["hits"] >= 10
    assert sum(other.counts().values()) == (0 if len(wanted.shape) == 3 and wanted.shape[2] == 4 else 2)


def test_what_cannot_be_decoded_raises_as_ever_and_is_not_kept(kept, path):
    path.write_bytes(path.read_bytes()[:-100])
    for _ in range(2):
        with kept, pytest.raises(OSError, match="truncated"):
            pixels(path)
    assert kept.store.counts()["bytes"] == 0
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        with kept:
            wanted = pixels(path)
            assert numpy.array_equal(pixels(path), wanted)
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False
    with kept, pytest.raises(OSError, match="truncated"):
        pixels(path)


@pytest.mark.parametrize("beside", [False, True])
def test_what_is_left_of_a_broken_picture_is_there_as_ever(kept, beside):
    buffer = io.BytesIO()
    picture().save(buffer, "JPEG")
    data = buffer.getvalue()
    size = data[data.index(b"\xff\xc0") :][:19]  # stands a second time amid the pixels

    def accepted():
        image = Image.open(io.BytesIO(data[:-60] + size + b"\xff\xd9"))
        with pytest.raises(OSError, match="broken data stream"):
            image.load()
        return numpy.asarray(image.convert("RGB"))

    wanted = accepted()
    with contextlib.ExitStack() as entered:
        if beside:
            entered.enter_context(OtherDecoder(simplejpeg_decode))
        entered.enter_context(kept)
        for _ in range(2):
            found = accepted()
            assert kept.store.put(bytes(range(16)), bytes(10_000))  # where its pixels lay
            assert numpy.array_equal(found, wanted)


def test_other_formats_and_files_without_identity_are_left_alone(kept, tmp_path):
    class Nameless:
        def __init__(self, data):
            self.data = io.BytesIO(data)

        def read(self, size=-1):
            return self.data.read(size)

        def seek(self, *position):
            return self.data.seek(*position)

        def tell(self):
            return self.data.tell()

    picture().save(tmp_path / "a.png")
    picture().save(tmp_path / "a.jpg")
    with kept:
        assert numpy.array_equal(pixels(tmp_path / "a.png"), numpy.asarray(picture()))
        assert kept.store.counts()["misses"] == 0
        nameless = pixels(Nameless((tmp_path / "a.jpg").read_bytes()))
        assert kept.store.counts()["unknown"] == 1
    assert numpy.array_equal(nameless, pixels(tmp_path / "a.jpg"))


def test_pillow_is_its_own_again_outside(kept, path):
    require_pillow()
    source = Within([1, 2], kept, lambda: None)
    for batch in source:
        assert batch in (1, 2)
        assert "load" not in vars(JpegImagePlugin.JpegImageFile)
    with kept, KeptDecoding(kept.store):
        pixels(path)
    assert "load" not in vars(JpegImagePlugin.JpegImageFile)
    assert kept.store.counts()["records"] == 1


def test_pictures_of_one_archive_are_not_one(kept, tmp_path):
    """Pillow's reader of a tar file hands on the number of the whole archive."""
    names = ["a.jpg", "b.jpg"]
    for seed, name in enumerate(names):
        Image.new("RGB", (8, 8), (200 * seed, 30, 60)).save(tmp_path / name)
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for name in names:
            archive.add(tmp_path / name, name)
    wanted = [pixels(tmp_path / name) for name in names]
    found = []
    with kept:
        for name in names:
            with TarIO(str(tmp_path / "all.tar"), name) as file:
                found.append(pixels(file))
    assert all(map(numpy.array_equal, found, wanted))
