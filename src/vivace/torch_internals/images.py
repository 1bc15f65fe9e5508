"""Private names of Pillow. Importing this needs Pillow."""

from __future__ import annotations

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
