"""How long a script's own loops say that they are going to be: ``for epoch in range(args.epochs)``, or
``while step < max_steps``, also as ``if step >= max_steps: break``.

The loops around the step are read as they stand in the source, with the values that their names have.
Nothing of the script's is called but the length of a list and the size of a tensor. Lightning is asked for
its epochs.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import textwrap
from collections import ChainMap
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch

from vivace.live.frames import variables

Place = tuple[CodeType, int]  # a function, and a line in it
# What goes once through all that it is given: Python's own, and bars that show how far it is.
IN_ORDER = {"enumerate", "list", "iter", "tqdm", "tqdm_notebook"}
IN_ORDER |= {"track", "progress_bar", "master_bar", "alive_it"}
OFTEN = 8  # steps at most between two changes of a number that counts them, and not what is without success
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
}


class Length:
    """Looked at from time to time, at the end of a step; `num_steps` is what the run is said to have, and
    `is_said` whether by loops, and not by the pass over the data alone.
    """

    def __init__(self) -> None:
        self.num_steps = 0.0
        self.is_said = False
        self._at = 0  # the step of the last look
        self._seen: dict[Place, Rounds] = {}

    def look(self, step: int, left_of_pass: float, steps_a_pass: float) -> None:
        """`step` steps are done; a pass over the data has so many, or 0 where that is not known.

        A loop that has gone on takes the steps that it took, or those of what it goes round: of the loops
        inside it, or the pass. The first that has not is believed to go round the same, if it is a `for`;
        what is around that one says nothing.
        """
        to_come, a_round = left_of_pass, steps_a_pass
        seen = {}
        is_sure, was_said = True, self.is_said  # a first look sees no loop go on
        for place, left, total in rounds_left(inspect.currentframe()):
            before = self._seen.get(place)
            seen[place] = rounds = (
                Rounds(left, step, total or left + 1)
                if before is None
                else before.after(left, step, self._at)
            )
            counts = total is not None or 0 < rounds.steps <= OFTEN
            self.is_said = self.is_said or (before is not None and counts)
            if is_sure and counts:
                to_come, a_round = rounds.with_those_inside(to_come, a_round)
            is_sure = is_sure and counts and rounds.steps > 0
        self._at, self._seen = step, seen
        self.num_steps = max(self.num_steps if was_said else 0.0, step + to_come)


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Of a loop: so many are `left` since a step, of `total`, and each takes so many `steps`, at least; 0
    until it has gone on. Has it begun `again`?
    """

    left: int
    since: int
    total: int
    steps: float = 0.0
    again: bool = False

    def after(self, left: int, step: int, at: int) -> Rounds:
        """As it is found at a step, after a look at step `at`. When it went on between both is not known."""
        if left == self.left:
            return self
        if left > self.left:  # it has begun again
            return Rounds(left, step, max(self.total, left + 1), self.steps, again=True)
        took = (step - at if self.since == at else at - self.since) / (self.left - left)
        return Rounds(left, step, self.total, max(self.steps, took), self.again)

    def with_those_inside(self, to_come: float, a_round: float) -> tuple[float, float]:
        """The steps to come of this loop and what is inside, and its steps in all, by those of what it goes
        round. A pass over the data that it does not go round ends with it, or goes round it, once it has
        begun again.
        """
        whole = self.total * self.steps
        if 2 * self.steps < a_round:
            if self.again and whole <= a_round:
                return to_come, a_round
            if self.steps:
                return self.left * self.steps, whole
        a_round = max(a_round, self.steps)
        return to_come + self.left * a_round, self.total * a_round


def rounds_left(frame: FrameType | None) -> Iterator[tuple[Place, int, int | None]]:
    """Of each loop around the step that says so, the innermost first: rounds after this one, and in all,
    where it goes over a range.
    """
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module not in ("torch", "vivace"):
            for loop in reversed(_loops(frame.f_code)):
                if loop.body[0].lineno <= frame.f_lineno <= (loop.body[-1].end_lineno or 0):
                    names = ChainMap(dict(variables(frame)), frame.f_globals)
                    rounds = _of_for(loop, names) if isinstance(loop, ast.For) else _of_while(loop, names)
                    if rounds is not None:
                        yield (frame.f_code, loop.lineno), *rounds
        if module in ("lightning", "pytorch_lightning"):
            yield from _epochs_of_lightning(frame)
        frame = frame.f_back


def _epochs_of_lightning(frame: FrameType) -> Iterator[tuple[Place, int, int]]:
    """Where epochs, and not steps, end the training."""
    loop: Any = frame.f_locals.get("self")
    if type(loop).__name__ == "_FitLoop" and frame.f_code.co_name == "advance" and loop.max_steps == -1:
        total, done = loop.max_epochs, loop.epoch_progress.current.processed
        if isinstance(total, int) and done < total:
            yield (frame.f_code, 0), total - 1 - done, total


def _of_for(loop: ast.For, names: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rounds that are left to a loop over a range, and in all."""
    values = _range(loop.iter, names)
    now = _value(loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target, names)
    if values is None or not isinstance(now, int) or now not in values:
        return None
    return len(values) - 1 - values.index(now), len(values)


def _of_while(loop: ast.While, names: Mapping[str, Any]) -> tuple[int, None] | None:
    """How far the number that ends a loop is from there, after this round."""
    known = [end for test, answer in _ends(loop) if (end := _until(test, answer, names)) is not None]
    return (max(0, min(known) - 1), None) if known else None


@functools.lru_cache(maxsize=64)
def _ends(loop: ast.While) -> tuple[tuple[ast.expr, bool], ...]:
    """What ends a loop, and by which answer: its condition, or that of an ``if ...: break``."""
    ends = [(loop.test, False)]
    for statement in loop.body:
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Break):
            ends.append((statement.test, True))
    return tuple(end for end in ends if isinstance(end[0], ast.Compare | ast.BoolOp))


def _until(node: ast.expr, answer: bool, names: Mapping[str, Any]) -> int | None:
    """By how much numbers must change for a comparison to have this answer; None where that is not known."""
    if isinstance(node, ast.BoolOp):
        every = isinstance(node.op, ast.And) == answer
        known = [end for end in (_until(value, answer, names) for value in node.values) if end is not None]
        return (max if every else min)(known, default=None)
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return None
    left, right = _value(node.left, names), _value(node.comparators[0], names)
    if type(left) is not int or type(right) is not int:
        return None
    operator = type(node.ops[0])
    if not answer:
        operator = OPPOSITE.get(operator, operator)
    if operator in (ast.Lt, ast.LtE):
        left, right = right, left
    if operator not in OPPOSITE:
        return None
    return max(0, right - left + (operator in (ast.Lt, ast.Gt)))


@functools.lru_cache(maxsize=64)
def _loops(code: CodeType) -> tuple[ast.For | ast.While, ...]:
    """The loops of a function, or of a module, that may say their length, with the lines of their file."""
    with contextlib.suppress(OSError, TypeError, SyntaxError, ValueError):
        read = inspect.findsource if code.co_name == "<module>" else inspect.getsourcelines
        lines, first = read(code)
        tree = ast.increment_lineno(ast.parse(textwrap.dedent("".join(lines))), max(0, first - 1))
        loops = (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While))
        return tuple(sorted(filter(_says, loops), key=lambda loop: loop.lineno))
    return ()


def _says(loop: ast.For | ast.While) -> bool:
    return bool(_ends(loop) if isinstance(loop, ast.While) else _of_range(loop.iter))


@functools.lru_cache(maxsize=64)
def _of_range(node: ast.expr) -> list[ast.expr]:
    """The ends of a range that is gone through, also inside of the brackets of what keeps its order."""
    if not isinstance(node, ast.Call) or not node.args:
        return []
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name not in ("range", "trange"):
        return _of_range(node.args[0]) if name in IN_ORDER else []
    return node.args


def _range(node: ast.expr, names: Mapping[str, Any]) -> range | None:
    """What is gone through."""
    ends = [_value(argument, names) for argument in _of_range(node)]
    whole = 1 <= len(ends) <= 3 and all(isinstance(end, int) for end in ends)
    return range(*ends) if whole and 0 not in ends[2:] else None


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Of a name, a setting or a sum; None for anything that would have to be run."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return inspect.getattr_static(_value(node.value, names), node.attr, None)
    if isinstance(node, ast.Subscript):
        held, key = _value(node.value, names), _value(node.slice, names)
        return held.get(key) if type(held) is dict and isinstance(key, str) else None
    if isinstance(node, ast.Call):
        return _called(node, [_value(argument, names) for argument in node.args], names)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, names), _value(node.right, names)
        if isinstance(left, int) and isinstance(right, int):
            return _computed(node.op, left, right)
    return None


def _called(node: ast.Call, arguments: list[Any], names: Mapping[str, Any]) -> Any:
    """Of ``int(x)``, ``len(x)`` and a tensor's ``x.size(0)``, which torch and Python answer themselves."""
    name = getattr(node.func, "id", "")
    if name == "int" and len(arguments) == 1:
        return arguments[0]
    if name == "len" and len(arguments) == 1 and type(arguments[0]) in (list, tuple, dict, str, torch.Tensor):
        return len(arguments[0])
    if isinstance(node.func, ast.Attribute) and node.func.attr == "size" and len(arguments) == 1:
        held, number = _value(node.func.value, names), arguments[0]
        sized = type(held) is torch.Tensor and isinstance(number, int) and -held.dim() <= number < held.dim()
        return held.shape[number] if sized else None
    return None


def _computed(operator: ast.operator, left: int, right: int) -> int | None:
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.Mult):
        return left * right
    return left // right if isinstance(operator, ast.FloorDiv) and right else None
