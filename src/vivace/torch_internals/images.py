"""Private names of Pillow. Importing this needs Pillow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from PIL.ImageFile import ImageFile

from vivace.torch_internals import attribute, named

if TYPE_CHECKING:
    from PIL.Image import Image

_UNSHARED = "decoded images cannot lie in shared memory"
_map_buffer = named("PIL.Image.core.map_buffer", lost=_UNSHARED)
_is_our_file = attribute(ImageFile, "_exclusive_fp", lost=_UNSHARED)
_may_close = attribute(ImageFile, "_close_exclusive_fp_after_loading", lost=_UNSHARED)


def mapped(image: Image, record: memoryview) -> Any:
    """An image core that lies in `record`; Pillow copies it before anything changes it."""
    return _map_buffer(record, image.size, "raw", 0, (image.mode, 0, 1))


def show(image: ImageFile, record: memoryview) -> None:
    """Let an opened image show a record, as if it had been decoded: what its ``load`` leaves behind."""
    image.im = mapped(image, record)
    image.tile = []
    image.readonly = 1
    if image.fp is not None and _is_our_file(image) and _may_close(image):
        image.fp.close()
    image.fp = None


class _Pixels:
    """The pixels of a picture that lies in memory of others, by their place: once one of them is written, the
    picture lies in memory of its own.
    """

    def __init__(self, image: ImageFile) -> None:
        self._image = image
        self._core: Any = None

    def __getitem__(self, place: tuple[int, int]) -> Any:
        return self._access()[place]

    def __setitem__(self, place: tuple[int, int], color: int | tuple[int, ...]) -> None:
        if self._image.readonly:
            self._image.im = self._image.im.copy()
            self._image.readonly = 0
        self._access()[place] = color

    def _access(self) -> Any:
        if self._image.im is not self._core:
            self._core = self._image.im
            self._found = self._core.pixel_access(self._image.readonly)
        return self._found


def writable(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``load``, of which the pixels can be written as those that Pillow decodes, whatever memory they are in.

    Pillow's own methods copy such a picture before they change it, and what ``load`` gives does not.
    """

    def load_writable(image: ImageFile) -> Any:
        found = load(image)
        return _Pixels(image) if image.readonly else found

    return load_writable
