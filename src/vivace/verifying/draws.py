"""Random numbers in logical order: the same mask whatever memory order or width a tensor has.

torch fills a tensor in the order of its memory, and 16-bit numbers from other bits of the stream. So dropout
on a channels-last tensor leaves out other elements than on a contiguous one, though both leave the stream in
one state. Which elements they are is no property of the model; while judging, all draw alike.
"""

from __future__ import annotations

from typing import Any

import torch

from vivace.tensors.trees import map_tensors
from vivace.torch_internals.tensors import Operator, OperatorMode, schema_of

# Those that fill a tensor like another one; attention's own dropout is its kernel's affair.
LIKE = ("rand_like", "randn_like", "randint_like", "bernoulli", "native_dropout", "normal", "poisson")
ATTENTIONS_SHARE = "dropout_p"  # the argument of its operators, forward and backward
HALVES = (torch.float16, torch.bfloat16)


class LogicalDraws(OperatorMode):  # type: ignore[no-untyped-call]
    """Draw random numbers into contiguous tensors of at least 32 bits, and copy them to where they belong.

    `rearranged` says whether that was ever otherwise than torch's own; `inside` names what drew inside of its
    kernel. With `attention` unset, attention leaves nothing out, forward and backward: its kernels draw their
    masks themselves, those for 16 bits other ones.
    """

    def __init__(self, *, attention: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attention = attention
        self.rearranged = False
        self.inside: set[str] = set()

    def run_operator(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator; one that draws, on plain stand-ins of its tensors."""
        if (place := _place_of_share(func)) is not None:
            share, given = _share(args, kwargs, place)
            if not share:
                return func(*args, **kwargs)  # which draws nothing, though it is tagged so
            if not self.attention:
                self.rearranged = True
                return func(*given[0], **given[1])
        if torch.Tag.nondeterministic_seeded not in func.tags or "out" in kwargs:
            return func(*args, **kwargs)
        first, name = args[0] if args else None, schema_of(func).name.removeprefix("aten::")
        in_place = name.endswith("_")
        if not isinstance(first, torch.Tensor) or not (in_place or name in LIKE):
            found = func(*args, **kwargs)
            if not isinstance(found, torch.Tensor):
                self.inside.add(inside_of(func, args))
            return found
        if _plain(first) and kwargs.get("memory_format") is None and kwargs.get("dtype") not in HALVES:
            return func(*args, **kwargs)
        self.rearranged = True
        plain = {key: map_tensors(value, _as_plain) for key, value in kwargs.items()}
        dtype = kwargs.get("dtype") or first.dtype
        below_one = dtype in HALVES and len(args) == 1 and name in ("rand_like", "uniform_")
        if in_place:
            drawn = func(_as_plain(first), *map_tensors(tuple(args[1:]), _as_plain), **plain)
            return first.copy_(_like(drawn, first, below_one))
        like = torch.empty_like(first, dtype=dtype, memory_format=kwargs.get("memory_format"))
        plain |= {"dtype": _wide(dtype)} if "dtype" in kwargs else {}
        plain |= {"memory_format": torch.contiguous_format} if "memory_format" in kwargs else {}
        drawn = func(*map_tensors(tuple(args), _as_plain), **plain)
        return map_tensors(drawn, lambda tensor: _like(tensor, like, below_one))


def _place_of_share(func: Operator) -> int | None:
    """Where an operator of attention takes what it leaves out; None of any other."""
    names = [argument.name for argument in schema_of(func).arguments]
    return names.index(ATTENTIONS_SHARE) if ATTENTIONS_SHARE in names else None


def _share(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int
) -> tuple[float, tuple[list[Any], dict[str, Any]]]:
    """What attention leaves out, and its arguments with nothing left out."""
    if place < len(args):
        return float(args[place]), ([*args[:place], 0.0, *args[place + 1 :]], kwargs)
    return float(kwargs.get(ATTENTIONS_SHARE, 0.0)), (list(args), {**kwargs, ATTENTIONS_SHARE: 0.0})


def inside_of(func: Operator, args: tuple[Any, ...]) -> str:
    """An operator that draws inside of its kernel, with the dtypes on which its masks may depend."""
    dtypes = {str(a.dtype).removeprefix("torch.") for a in args if isinstance(a, torch.Tensor)}
    return f"{schema_of(func).name.removeprefix('aten::')} in {' and '.join(sorted(dtypes))}"


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype not in HALVES and tensor.is_contiguous()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype


def _as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy where it is not contiguous, or of 16 bits."""
    return tensor.to(_wide(tensor.dtype)).contiguous()


def _like(drawn: torch.Tensor, like: torch.Tensor, below_one: bool) -> torch.Tensor:
    if below_one:  # rounded to 16 bits, a number next to 1 would become 1
        drawn = drawn.clamp(max=1.0 - torch.finfo(like.dtype).eps / 2)
    dtype = like.dtype if drawn.is_floating_point() else drawn.dtype
    return torch.empty_like(like, dtype=dtype).copy_(drawn)
