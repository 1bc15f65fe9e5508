"""What Pillow makes of a JPEG file is a function of the file: it can be kept, and read again instead.

Acts on `JpegImageFile.load`: every dataset that reads images through Pillow is served as it is, whatever it
does with the picture afterwards. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from vivace.errors import Refused
from vivace.shared_store import SharedStore

_BYTES_A_PIXEL = {"L": 1, "RGB": 4, "CMYK": 4}  # as Pillow stores them


class KeptDecoding:
    """While entered, a JPEG that was decoded before, by any process that shares `store`, comes from there.

    A file is known by device, inode, size and times of change, one in memory by its bytes; what cannot be
    identified is decoded as ever. Workers forked inside are served for life.
    """

    def __init__(self, store: SharedStore) -> None:
        self.store = store
        self.entered = 0
        self._before: Any = None

    def __enter__(self) -> Self:
        self.entered += 1
        if self.entered == 1:
            from PIL.JpegImagePlugin import JpegImageFile

            self._before = vars(JpegImageFile).get("load")
            JpegImageFile.load = self._replacing(JpegImageFile.load)  # type: ignore
        return self

    def __exit__(self, *_: object) -> None:
        self.entered -= 1
        if self.entered == 0:
            from PIL.JpegImagePlugin import JpegImageFile

            if self._before is not None:
                JpegImageFile.load = self._before  # type: ignore
            else:
                del JpegImageFile.load

    def _replacing(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        from PIL.JpegImagePlugin import JpegImageFile

        def load(image: Any) -> Any:
            width = _BYTES_A_PIXEL.get(image.mode)
            if type(image) is not JpegImageFile or not image.tile or image._im is not None or width is None:
                return original(image)
            key, length = key_of(image), image.width * image.height * width
            if key is None:
                self.store.count("unknown")
                return original(image)
            found = self.store.get(key, length)
            if found is not None:
                _give(image, found)
                return original(image)  # with no tile left it does the rest
            original(image)
            self.store.put(key, image.tobytes("raw", "RGBX" if image.mode == "RGB" else image.mode))
            return original(image)

        return load


class Within:
    """The batches of `source`, each made inside `context`; `after` is called with the context left again."""

    def __init__(self, source: Iterable[Any], context: Any, after: Callable[[], Any]) -> None:
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


def key_of(image: Any) -> bytes | None:
    """16 bytes that stand for a JPEG's content and how it is decoded; None where nothing identifies it."""
    content = _content(image.fp)
    if content is None:
        return None
    from PIL import ImageFile, features

    how = (image.mode, image.size, image.tile, image.decoderconfig, ImageFile.LOAD_TRUNCATED_IMAGES)
    decoder = features.version_codec("jpg"), features.version_feature("libjpeg_turbo")
    return hashlib.blake2b(repr((content, how, decoder)).encode(), digest_size=16).digest()


def _content(file: Any) -> object:
    """What changes when the bytes of a file do: its identity on the disk, or a digest of bytes in memory."""
    try:
        found = os.fstat(file.fileno())
    except (AttributeError, OSError):
        getbuffer = getattr(file, "getbuffer", None)
        return hashlib.sha256(getbuffer()).digest() if getbuffer is not None else None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _give(image: Any, record: memoryview) -> None:
    """Let an opened image show a record, as if it had been decoded."""
    image.im = _mapped(image, record)
    image.tile = []
    image.readonly = 1
    if image._exclusive_fp and image._close_exclusive_fp_after_loading:
        image.fp.close()
    image.fp = None


def _mapped(image: Any, record: memoryview) -> Any:
    """An image core that lies in `record`; Pillow copies it before anything changes it."""
    from PIL import Image

    core: Any = vars(Image)["core"]
    return core.map_buffer(record, image.size, "raw", 0, (image.mode, 0, 1))


def require_pillow() -> None:
    """Raises Refused where no Pillow is there, or one that cannot look at memory of others."""
    try:
        from PIL import Image

        image = Image.new("RGB", (1, 1))
        image.im = _mapped(image, memoryview(bytearray((1, 2, 3, 255))))
        sound = image.getpixel((0, 0)) == (1, 2, 3)
    except (ImportError, AttributeError, TypeError, ValueError):
        sound = False
    if not sound:
        raise Refused("it needs Pillow, and one whose images can lie in shared memory")
