"""Every private name of torch, torchvision, Pillow, NumPy and Optuna that we touch, and what is lost without.

A private name may go with any release. Each is named here once, in the module of its topic, looked up when
that module is imported, or when it is first needed, and used everywhere else by a name of our own. What is
gone costs the function that needs it, with a sentence; nothing else breaks. `missing` lists what is gone.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Any, NoReturn

from vivace.errors import Refused

TOPICS = {
    "compiler": "torch",
    "groups": "torch",
    "images": "PIL",
    "kernels": "torch",
    "loaders": "torch",
    "modules": "torch",
    "numbers": "numpy",
    "recurrent": "torch",
    "sampling": "optuna",
    "tensors": "torch",
}
DISTRIBUTIONS = {"PIL": "pillow"}  # where it is not called like its package


@dataclasses.dataclass(frozen=True)
class Touch:
    """A private name: where it stands, what does not work without it, and how to see whether it is there."""

    path: str
    lost: str
    is_there: Callable[[], bool]

    def sentence(self) -> str:
        """What is gone from which release, and what that costs."""
        package = self.path.partition(".")[0]
        version = importlib.metadata.version(DISTRIBUTIONS.get(package, package))
        return f"{package} {version} has no {self.path}, without which {self.lost}"


TOUCHES: list[Touch] = []


def named(path: str, lost: str) -> Any:
    """What stands at a dotted path; where nothing does, a class that raises Refused when it is called."""
    touch = _noted(path, lost, lambda: _resolves(path))
    return pkgutil.resolve_name(path) if touch.is_there() else _gone(touch)


def later(path: str, lost: str) -> Callable[[], Any]:
    """A function that gives what stands at a dotted path; for what takes long to import.

    It raises Refused where nothing stands there.
    """
    touch = _noted(path, lost, lambda: _resolves(path))

    def find() -> Any:
        if not touch.is_there():
            raise Refused(touch.sentence())
        return pkgutil.resolve_name(path)

    return find


def attribute(owner: type, name: str, lost: str) -> Callable[[Any], Any]:
    """A function that reads an attribute of the instances of a class; it raises Refused where they have none.

    Instances have what their class has or announces, or what one of its methods mentions.
    """
    touch = _noted(f"{owner.__module__}.{owner.__qualname__}.{name}", lost, lambda: _has(owner, name))

    def read(instance: Any) -> Any:  # torch 2.11's compiler follows no `operator.attrgetter`
        return getattr(instance, name)

    return read if touch.is_there() else _gone(touch)


def missing() -> list[str]:
    """One sentence for each private name that the installed libraries do not have. Imports torch's compiler.

    A library that is not installed lacks nothing.
    """
    for topic, package in TOPICS.items():
        if importlib.util.find_spec(package) is not None:
            importlib.import_module(f"{__name__}.{topic}")
    return [touch.sentence() for touch in TOUCHES if not touch.is_there()]


def _noted(path: str, lost: str, is_there: Callable[[], bool]) -> Touch:
    touch = Touch(path, lost, is_there)
    TOUCHES.append(touch)
    return touch


def _resolves(path: str) -> bool:
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True


def _has(owner: type, name: str) -> bool:
    methods = (getattr(value, "__code__", None) for kind in owner.__mro__ for value in vars(kind).values())
    return (
        hasattr(owner, name)
        or any(name in vars(kind).get("__annotations__", ()) for kind in owner.__mro__)
        or any(name in code.co_names for code in methods if code is not None)
    )


def _gone(touch: Touch) -> Any:
    class Gone:
        def __new__(cls, *_: object, **__: object) -> NoReturn:
            raise Refused(touch.sentence())

    return Gone
