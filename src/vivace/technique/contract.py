"""The contract of a technique: what it declares, what it may edit, and how it proves that it acted.

One training step is a chain of seams, each a function:

    batch -> place -> step: [ forward -> backward -> finish -> (on_gradients) -> update ] -> mean loss
                              '---- gradients ----'

After `finish` every ``.grad`` is the true, unscaled gradient of the mean loss; after the step all gradients
are ``None``. A technique edits objects (`Build.model`, `Build.optimizer`) in place, and wraps or replaces
seams. At most one technique replaces a seam, any number wrap it, in the order of their stages, inside a stage
of `Card.after`, then of their names: a plan is a set, not a sequence.

This module imports no torch, so that cards can be listed and plans validated anywhere.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vivace.errors import InputError, Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine

if TYPE_CHECKING:
    from vivace.technique.build import Build
    from vivace.technique.plain import Plain

_BITS = {"float64": 53, "float32": 24, "tf32": 11, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4}
UNIT_ROUNDOFF = {dtype: 2.0**-bits for dtype, bits in _BITS.items()}


class Stage(enum.IntEnum):
    """When a technique acts; later stages wrap earlier ones."""

    PROCESS = 0
    DATA = 1
    MODEL = 2
    PARALLEL = 3
    PRECISION = 4
    MEMORY = 5
    COMPILE = 6
    OPTIMIZER = 7
    CAPTURE = 8


class Numerics(enum.IntEnum):
    """The largest change of numbers that a technique causes; a plan's promise is the maximum of its own."""

    EXACT = 0
    ROUNDING = 1
    SEMANTICS = 2


@dataclasses.dataclass(frozen=True)
class Card:
    """What a technique declares about itself; documentation pages are generated from it.

    `unit_roundoff` is the width of the envelope in which it is judged: bfloat16's at most, where it promises
    ROUNDING. `after` names techniques that act before it inside its stage, where both are in a plan. What the
    search, `train` and `verify` must know of a technique they read here, and never from its name:

    Args:
        saves_memory: what it keeps out of memory: ``activations``, or ``states`` of the weights (gradients,
            optimizer). It is tried where a job does not fit; see `Technique.rescues`.
        by_block: it saves memory in each block of the model by itself, in ways that a memory budget chooses
            among; see `Technique.ways`.
        lowers_peak: what it computes takes less room while a step runs; tried within a memory budget, too.
        cuts_batches: it runs a batch in pieces, in more of them where a run is out of memory; see
            `Technique.in_pieces`.
        baseline: the name under which its speed alone stands among the baselines of every report.
        averages_ranks: it makes several ranks train one model.
        shards_weights: each rank holds a part of the weights (`Build.shards`).
        on_shards: why it does not act where ranks do; empty where it has been tried and does. What feeds the
            step never sees a weight, and need not say so.
        step_memory: what a step under it holds on a GPU beside what it holds without: ``same``, nothing;
            ``batch``, one more batch. Where it is empty, a step has to be followed to be told.
        compiles: it is slow to start, and compiled code draws random numbers in an order of its own.
        captures: it replays a recorded step, in which no Python runs.
        uncompiled: it acts on what is not compiled alone, and makes way for what compiles.
        varies: what it brings differs from process to process: a plan keeps it unless a trial without it is
            clearly faster.
    """

    stage: Stage
    numerics: Numerics
    summary: str
    source: str
    slot: str | None = None
    unit_roundoff: float = 0.0
    devices: tuple[str, ...] = ("cpu", "cuda")
    measured_on: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    saves_memory: Literal["", "activations", "states"] = ""
    by_block: bool = False
    lowers_peak: bool = False
    cuts_batches: bool = False
    baseline: str = ""
    averages_ranks: bool = False
    shards_weights: bool = False
    on_shards: str = "it has not been tried on weights that are divided among the ranks"
    step_memory: Literal["", "same", "batch"] = ""
    compiles: bool = False
    captures: bool = False
    uncompiled: bool = False
    varies: bool = False

    def __post_init__(self) -> None:
        coarsest = UNIT_ROUNDOFF["bfloat16"]
        if self.numerics == Numerics.ROUNDING and self.unit_roundoff > coarsest:
            raise InputError(
                f"a card with numerics=ROUNDING may have a unit_roundoff of {coarsest} (bfloat16) at most, "
                f"not {self.unit_roundoff}: what rounds more coarsely is SEMANTICS, judged by the metric"
            )

    @property
    def acts_on_shards(self) -> bool:
        """Can it stand in a plan in which each rank holds a part of the weights?"""
        return self.shards_weights or not self.on_shards or self.stage <= Stage.DATA


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run one block of the model in less memory.

    Args:
        around: ``around(block, call, arguments, keywords)`` returns the block's result, or raises Refused.
        spared: bytes that the latest call of each block did not keep, by its name.
    """

    around: Callable[..., Any]
    spared: Mapping[str, int]


class Technique:
    """One way to train faster or in less memory. Subclass as a frozen dataclass whose fields are the
    settings.

    The name is the name of its file or, for a class registered from elsewhere, the class attribute `name`.
    """

    card: ClassVar[Card]
    name: ClassVar[str]
    first_pass_differs: ClassVar[bool] = False
    """Is the first pass over the data slower, as while a cache fills? Then a later pass is measured."""

    def __init_subclass__(cls) -> None:
        package, _, file = cls.__module__.rpartition(".")
        if package == "vivace.techniques":
            cls.name = file

    def apply(self, build: Build) -> None:
        """Edit `build`, or raise `Refused` through `build.require`. Raises nothing else on purpose."""
        raise NotImplementedError

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """Return the evidence that the technique acted, or raise `Refused`: it changed nothing."""
        raise Refused("it has no confirm(), and so nothing shows that it acts")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """The settings worth measuring on this job and machine, the most promising first."""
        return [cls()]

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Bounds (low, high) of the speed ratio that the technique can bring; (1.0, 1.0): nothing."""
        return (1.0, 1.0)

    @classmethod
    def rescues(cls) -> list[Technique]:
        """The settings to try on a job that runs out of memory as it is, the least slow first.

        Of a technique whose card says that it saves memory.
        """
        return [cls()] if cls.card.saves_memory else []

    @classmethod
    def ways(cls, build: Build, block: str) -> dict[str, Way]:
        """The ways in which it can run the block of this name, by words of its own.

        Of a technique whose card says `by_block`; `deciding` makes settings of what is chosen.
        """
        return {}

    @classmethod
    def deciding(cls, chosen: Callable[..., tuple[str, ...]]) -> Technique:
        """The settings that run blocks in the ways chosen for them.

        ``chosen(*words)`` are the names of the blocks for which one of these ways was chosen, or ``("*",)``
        where that is all of them.
        """
        raise NotImplementedError

    @property
    def pieces(self) -> int:
        """In how many pieces it runs each batch."""
        return 1

    @classmethod
    def in_pieces(cls, num: int) -> Technique:
        """The settings that run each batch in `num` pieces. Of a technique whose card says `cuts_batches`."""
        raise NotImplementedError

    def refined(self) -> Technique | None:
        """The settings to try once these have helped, and again while each is clearly faster; None: no more.

        For a setting that is not worth a trial where its technique does not help, such as a queue's depth.
        """
        return None

    def company(self, profile: Profile, machine: Machine) -> list[dict[str, dict[str, Any]]]:
        """Beside which techniques these settings are worth a trial: ``{name: settings}``, the best first.

        ``{}`` is alone. For what helps only together with what another technique sets, such as workers that
        load data on the cores which the step's threads leave to them.
        """
        return [{}]

    def stricter(self) -> Technique | None:
        """The settings to try where these broke the promise, nearer to the job's own numbers; None: none."""
        return None

    def plain(self) -> Plain | None:
        """The same with these settings in plain PyTorch and in trainers' words; None: it needs Vivace."""
        return None

    @property
    def slot(self) -> str | None:
        """What it occupies alone in a plan: the card's slot, unless the settings decide."""
        return self.card.slot

    def settings(self) -> dict[str, Any]:
        """The settings that differ from their defaults, by field name."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}
