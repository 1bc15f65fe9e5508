"""The random numbers of a step under a plan, kept and handed to the same step under the reference.

A plan may draw in another order than the reference: dropout on channels-last tensors goes through memory,
pieces of a batch draw one after the other, and 16-bit numbers come from other bits of the stream. Which
elements a mask leaves out is no property of the model. So the masks of the real step are kept, as they come,
and the repetition under the reference uses the same ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vivace.tensors.trees import Digest, digest
from vivace.torch_internals.tensors import Operator, OperatorMode, schema_of
from vivace.verifying.draws import inside_of
from vivace.verifying.tap import random_state, recomputing

FUSED_DROPOUT = "native_dropout"  # gives its input, partly zero, and the mask
MASKS = (FUSED_DROPOUT, "bernoulli", "bernoulli_")  # operators that draw zeros and ones
LEAST_RARE = 16  # elements of the rarer kind: two masks with as many are not equal by chance


class Unlike(Exception):
    """The repetition does not draw what the real step drew; the message says how."""


class Drawn(NamedTuple):
    """What one operator drew: `kind` is its name, or that of all that draw masks."""

    kind: str
    numbers: torch.Tensor


class Counted(NamedTuple):
    """How many numbers a step drew, place by place.

    `repeats`: the same numbers twice, where chance does not? `hidden`: by what inside of its kernel, unseen?
    `stays`: some of them in the step after it again?
    """

    places: tuple[int, ...]
    repeats: bool
    hidden: str
    stays: bool = False


class Kept(OperatorMode):  # type: ignore[no-untyped-call]
    """While a step runs, keeps what its random operators draw, piece by piece of the batch.

    The step computes what it would without. `hidden` names an operator that draws inside of its kernel: what
    that drew cannot be handed on.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: list[list[Drawn]] = [[]]
        self.hidden = ""
        self._begun = False

    def begin_piece(self) -> None:
        """What is drawn from here on belongs to another piece of the batch."""
        if self._begun:
            self.pieces.append([])
        self._begun = True

    def run_operator(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, and keep what it drew."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = _state(kwargs)
        found = func(*args, **kwargs)
        if recomputing() or torch.equal(before, _state(kwargs)):
            return found
        drawn = found[1] if _name(func) == FUSED_DROPOUT else found
        if isinstance(drawn, torch.Tensor):
            copied = drawn.detach().clone(memory_format=torch.contiguous_format)
            self.pieces[-1].append(Drawn(_kind(func), copied))
        else:
            self.hidden = f"{inside_of(func, args)}, inside of its kernel"
        return found

    @property
    def counted(self) -> Counted:
        """How much the step drew."""
        places = tuple(drawn.numbers.numel() for piece in self.pieces for drawn in piece)
        mine = self.digests()
        return Counted(places, len(set(mine)) < len(mine), self.hidden)

    def digests(self) -> list[Digest]:
        """Of what it drew, but for what chance may draw twice."""
        every = (drawn.numbers for piece in self.pieces for drawn in piece)
        return [digest(numbers) for numbers in every if _varied(numbers)]


def fault_of(mine: Counted, theirs: Counted, whose: str = "the plan") -> str:
    """What is wrong with how a step draws, beside how the reference's does; empty where nothing is."""
    if mine.hidden or theirs.hidden:
        return ""
    if len(mine.places) < len(theirs.places) and sum(mine.places) < sum(theirs.places):
        places = f"{len(mine.places)} instead of {len(theirs.places)} places of a step"
        return f"{whose} draws random numbers at {places}: some dropout or noise is off, or shares its masks"
    if mine.repeats and not theirs.repeats:
        return f"{whose} draws the same random numbers twice in a step: parts of it share their masks"
    if mine.stays and not theirs.stays:
        return f"{whose} draws the same random numbers in each step"
    return ""


def shared_by_samples(
    mine: tuple[Counted, Counted], theirs: tuple[Counted, Counted], whose: str = "the plan"
) -> str:
    """Do samples share what the reference draws for each? Both of a whole batch and of half of one: where the
    reference draws less for that, and this draws as much, and less than the reference. Empty where not.
    """
    if any(each.hidden for each in (*mine, *theirs)) or len({len(e.places) for e in (*mine, *theirs)}) > 1:
        return ""
    for whole, half, due, of_half in zip(*(each.places for each in (*mine, *theirs)), strict=True):
        if of_half < due and half == whole < due:
            return f"{whose} draws {whole} random numbers, and {due} are due: samples share their masks"
    return ""


class Handed(OperatorMode):  # type: ignore[no-untyped-call]
    """While a step is repeated, random operators give what the real step's `pieces` drew.

    Raises Unlike where there is nothing of the right shape left for one.
    """

    def __init__(self, pieces: list[list[Drawn]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces = pieces
        self.num_drawn = 0

    def run_operator(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator; one that draws gives what the real step's gave."""
        if torch.Tag.nondeterministic_seeded not in func.tags or recomputing():
            return func(*args, **kwargs)
        before = _state(kwargs)
        found = func(*args, **kwargs)
        if torch.equal(before, _state(kwargs)):
            return found
        if _name(func) == FUSED_DROPOUT:
            values, share = args[0], args[1]
            mask = self._next(func, found[1])
            return values * mask * (1.0 / (1.0 - share)), found[1].copy_(mask)
        if not isinstance(found, torch.Tensor):
            raise Unlike(f"{_name(func)} draws inside of its kernel")
        return found.copy_(self._next(func, found))

    def _next(self, func: Operator, like: torch.Tensor) -> torch.Tensor:
        index, self.num_drawn = self.num_drawn, self.num_drawn + 1
        if any(index >= len(piece) for piece in self.pieces):
            raise Unlike("the plan draws fewer random numbers")
        if any(piece[index].kind != _kind(func) for piece in self.pieces):
            raise Unlike("the plan draws random numbers of another kind")
        drawn = [piece[index].numbers for piece in self.pieces]
        joined = drawn[0] if len(drawn) == 1 else torch.cat(drawn) if drawn[0].dim() else None
        if joined is None or joined.shape != like.shape:
            raise Unlike("the plan draws random numbers of other shapes")
        return joined


def _state(named: dict[str, Any]) -> torch.Tensor:
    """Of the stream that an operator with these arguments draws from."""
    own = named.get("generator")
    return random_state() if own is None else own.get_state()


def _kind(func: Operator) -> str:
    return "masks" if _name(func) in MASKS else _name(func)


def _varied(numbers: torch.Tensor) -> bool:
    """Are there so many different ones that another draw would not give the same?"""
    _, counts = numbers.unique(return_counts=True)  # type: ignore[no-untyped-call]
    return len(counts) > LEAST_RARE or (len(counts) > 1 and int(counts.min()) >= LEAST_RARE)


def _name(func: Operator) -> str:
    return str(schema_of(func).name).removeprefix("aten::")
