"""After a prediction: tensors without numbers that a person's own caches would give to their next step."""

from __future__ import annotations

import functools
import gc
import warnings

from vivace.tensors.trees import tensors
from vivace.torch_internals.tensors import FakeTensor, FakeTensorMode

_CACHE = type(functools.cache(len))


def empty_caches(mode: FakeTensorMode) -> None:
    """Empty each `functools.cache` and `lru_cache` that holds a tensor of `mode`, such as positions or masks:
    what they hold is computed anew when it is asked for.
    """
    for cache in [found for found in gc.get_objects() if type(found) is _CACHE]:
        if any(_is_of(mode, tensor) for tensor in tensors(gc.get_referents(cache))):
            cache.cache_clear()


def warn_of_others(mode: FakeTensorMode) -> None:
    """Warn where a tensor of `mode` lives on elsewhere: a step that finds it would train nothing."""
    gc.collect()
    left = next((found for found in gc.get_objects() if _is_of(mode, found)), None)
    if left is not None:
        warnings.warn(
            f"the job keeps tensors for later steps, such as one of shape {tuple(left.shape)}, in a "
            "dictionary or an attribute; in this process that one is the prediction's now, which has no "
            "numbers: empty what keeps it, or start again, before you train here",
            stacklevel=3,
        )


def _is_of(mode: FakeTensorMode, found: object) -> bool:
    return type(found) is FakeTensor and found.fake_mode is mode
