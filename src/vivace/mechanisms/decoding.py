"""What Pillow makes of a JPEG file is a function of the file: it can be kept, and read again instead.

Acts on `JpegImageFile.load`: every dataset that reads images through Pillow is served as it is, whatever it
does with the picture afterwards. Imports no torch.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import multiprocessing
import os
import stat
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

from vivace.errors import Refused
from vivace.mechanisms.shared_store import SharedStore
from vivace.technique import Build, Seam
from vivace.torch_internals.loaders import workers_run

if TYPE_CHECKING:
    from PIL.JpegImagePlugin import JpegImageFile

    from vivace.job import Batch

CHECKED = 3
_BYTES_A_PIXEL = {"L": 1, "RGB": 4, "CMYK": 4}  # as Pillow stores them


class _InPlaceOfLoad:
    """While entered, `replacing` stands in for `JpegImageFile.load`; workers forked inside keep it."""

    def __init__(self) -> None:
        self.entered = 0
        self._before: Any = None

    def __enter__(self) -> Self:
        self.entered += 1
        if self.entered == 1:
            from PIL.JpegImagePlugin import JpegImageFile

            self._before = vars(JpegImageFile).get("load")
            JpegImageFile.load = self.replacing(JpegImageFile.load)  # type: ignore
        return self

    def __exit__(self, *_: object) -> None:
        self.entered -= 1
        if self.entered == 0:
            from PIL.JpegImagePlugin import JpegImageFile

            if self._before is not None:
                JpegImageFile.load = self._before  # type: ignore
            else:
                del JpegImageFile.load

    def replacing(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What loads an image in the place of `original`, for which it stands."""
        raise NotImplementedError


class DecodingSeen(_InPlaceOfLoad):
    """While entered, counts the JPEGs that Pillow decodes in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def replacing(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A wrapper around the decoder that counts its calls."""

        def load(image: JpegImageFile) -> Any:
            self.count += 1
            return original(image)

        return load


class KeptDecoding(_InPlaceOfLoad):
    """While entered, a JPEG that was decoded before, by any process that shares `store`, comes from there.

    A file is known by device, inode, size and times of change, one in memory by its bytes; what cannot be
    identified is decoded as ever.
    """

    def __init__(self, store: SharedStore) -> None:
        super().__init__()
        self.store = store

    def replacing(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """From the store, or by `original` and into the store."""
        from vivace.torch_internals import images

        def load(image: JpegImageFile) -> Any:
            if not _is_fresh(image):
                return original(image)
            key, length = key_of(image), image.width * image.height * _BYTES_A_PIXEL[image.mode]
            if key is None:
                self.store.count("unknown")
                return original(image)
            found = self.store.get(key, length)
            if found is not None:
                images.show(image, found)
                return original(image)  # with no tile left it does the rest
            room = self.store.reserve(key, length)
            if room is None:
                return original(image)
            try:
                self._decode(original, image, room.view)
            except BaseException:
                image.im = image.im.copy()  # where it was, another record will lie
                self.store.give_back(room)
                raise
            self.store.publish(key, room)
            return original(image)

        return images.writable(load)

    def _decode(self, original: Callable[[Any], Any], image: JpegImageFile, place: memoryview) -> None:
        """Let `original` decode into `place`, which new memory of the image's own would cost as much as."""
        from vivace.torch_internals import images

        image.im = ours = images.mapped(image, place)
        original(image)
        if image.im is not ours:  # another decoder gave it memory of its own
            ours.paste(image.im, (0, 0, *image.size))
            image.im = ours
        image.readonly = 1


class OtherDecoder(_InPlaceOfLoad):
    """While entered, JPEGs are decoded by `decode`; Pillow does what it cannot do or would do otherwise.

    Of each kind of file (mode, sampling of colours, progressive or not) the first `CHECKED` in each process
    are decoded both ways. A kind of which one bit differs is left to Pillow.

    Args:
        decode: ``(bytes of a file, mode) -> rows`` of pixels as Pillow stores them, in one buffer.
    """

    def __init__(self, decode: Callable[[bytes, str], Any]) -> None:
        super().__init__()
        self.decode = decode
        self._counts = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the workers that are forked
        self._equal: dict[object, int] = {}

    def counts(self) -> dict[str, int]:
        """Files decoded otherwise, and those left to Pillow because their kind comes out with other bits."""
        decoded, differing = struct.unpack_from("<QQ", self._counts)
        return {"decoded": decoded, "differing": differing}

    def replacing(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """By `decode` where that gives what `original` gives."""
        from vivace.torch_internals import images

        def load(image: JpegImageFile) -> Any:
            if not _is_fresh(image) or image.mode == "CMYK" or image.decoderconfig:
                return original(image)
            kind = (
                image.mode,
                tuple(map(tuple, image.layer)),
                "progressive" in image.info,
                image.info.get("adobe_transform"),
            )
            if self._equal.get(kind, 0) < 0:
                self._count(1)
                return original(image)
            pixels = self._decoded(image)
            if pixels is None:  # Pillow says what is wrong with it
                return original(image)
            if self._equal.get(kind, 0) < CHECKED:
                original(image)
                found = image.tobytes("raw", "RGBX" if image.mode == "RGB" else image.mode)
                self._equal[kind] = self._equal.get(kind, 0) + 1 if found == bytes(pixels) else -1
            else:
                images.show(image, pixels)
            self._count(0 if self._equal[kind] > 0 else 1)
            return original(image)

        return images.writable(load)

    def _decoded(self, image: JpegImageFile) -> memoryview | None:
        assert image.fp is not None  # it is fresh
        image.fp.seek(0)
        try:
            pixels = memoryview(self.decode(image.fp.read(), image.mode)).cast("B")
        except (RuntimeError, ValueError):
            return None
        expected = image.width * image.height * _BYTES_A_PIXEL[image.mode]
        return pixels if len(pixels) == expected else None

    def _count(self, number: int) -> None:
        (before,) = struct.unpack_from("<Q", self._counts, 8 * number)
        struct.pack_into("<Q", self._counts, 8 * number, before + 1)


def simplejpeg_decode(data: bytes, mode: str) -> Any:
    """By simplejpeg, which gives libjpeg-turbo the whole file at once. Raises ValueError, on warnings too."""
    import simplejpeg

    colors = "RGBX" if mode == "RGB" else "GRAY"
    return simplejpeg.decode_jpeg(data, colorspace=colors, fastdct=False, fastupsample=False)


class Within:
    """The batches of `source`, each made inside `context`; `after` is called with the context left again."""

    def __init__(
        self, source: Iterable[Any], context: AbstractContextManager[object], after: Callable[[], Any]
    ) -> None:
        self.source, self.context, self.after = source, context, after

    def __iter__(self) -> Iterator[Any]:
        with self.context:
            batches = iter(self.source)
        while True:
            with self.context:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            self.after()
            yield batch


def _is_fresh(image: JpegImageFile) -> bool:
    """Is it a JPEG of one frame, opened and not decoded yet, in a mode that is known here?"""
    from PIL.JpegImagePlugin import JpegImageFile

    plain = type(image) is JpegImageFile and image.mode in _BYTES_A_PIXEL
    return bool(plain and image.tile)


def key_of(image: JpegImageFile) -> bytes | None:
    """16 bytes that stand for a JPEG's content and how it is decoded; None where nothing identifies it."""
    content = _content(image.fp)
    if content is None:
        return None
    from PIL import ImageFile, features

    how = (image.mode, image.size, image.tile, image.decoderconfig, ImageFile.LOAD_TRUNCATED_IMAGES)
    decoder = features.version_codec("jpg"), features.version_feature("libjpeg_turbo")
    return hashlib.blake2b(repr((content, how, decoder)).encode(), digest_size=16).digest()


def _content(file: Any) -> object:
    """What changes when the bytes of a file do: its identity on the disk, or a digest of its bytes.

    Others hand on the number of a file that they are a part of, such as a picture in an archive.
    """
    try:
        whole = type(file) in (io.BufferedReader, io.BufferedRandom, io.FileIO)
        found = os.fstat(file.fileno()) if whole else None
    except OSError:
        found = None
    if found is None:
        if not getattr(file, "seekable", bool)():
            return None
        position = file.seek(0, os.SEEK_CUR)
        file.seek(0)
        found_bytes = hashlib.sha256(file.read()).digest()
        file.seek(position)
        return found_bytes
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_within(
    build: Build,
    name: str,
    decoder: AbstractContextManager[object],
    counts: Callable[[], dict[str, int]],
    refusal: Callable[[Iterable[Batch]], str] = lambda _: "",
) -> None:
    """Let every loader of the session be read with `decoder` entered, in its workers too.

    Args:
        build: gets what `counts` says in its notes, under the technique's `name`.
        refusal: why a loader that was not read yet is refused, beside `unserved`; else empty.
    """
    from torch.utils.data import DataLoader

    served: weakref.WeakSet[Any] = weakref.WeakSet()

    def note() -> None:
        build.notes[name] = counts()

    def batches(following: Callable[[Any], Iterable[Any]], loader: Iterable[Batch]) -> Iterable[Any]:
        if loader not in served:
            reason = unserved(loader) or refusal(loader)
            build.require(not reason, reason)
            if isinstance(loader, DataLoader):
                served.add(loader)
        return Within(following(loader), decoder, note)

    build.wrap(Seam.BATCHES, batches)
    build.wrap(Seam.VALIDATION, batches)
    build.on_close(served.clear)


def unserved(loader: Any) -> str:
    """Why the workers of a loader not read yet would not inherit what is entered; else empty."""
    if not getattr(loader, "num_workers", 0):
        return ""
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method != "fork":
        return f"your workers start by {method}, and only forked ones inherit the decoder"
    return "your persistent workers run already" if workers_run(loader) else ""


def require_pillow() -> None:
    """Raises Refused where no Pillow is there, or one that cannot look at memory of others."""
    try:
        from PIL import Image

        from vivace.torch_internals import images

        image = Image.new("RGB", (1, 1))
        image.im = images.mapped(image, memoryview(bytearray((1, 2, 3, 255))))
        sound = image.getpixel((0, 0)) == (1, 2, 3)
    except (ImportError, AttributeError, TypeError, ValueError):
        sound = False
    if not sound:
        raise Refused("it needs Pillow, and one whose images can lie in shared memory")
