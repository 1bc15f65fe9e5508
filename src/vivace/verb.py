"""A verb is a folder and a function of one name: `vivace.tune(job)` and `vivace.tuning.search` both work."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Verb(ModuleType):
    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        function = getattr(self, self.__name__.rpartition(".")[2])
        return function(*arguments, **keywords)


def make_callable(package: str) -> None:
    """Let calling the package's module call the function of the same name inside it."""
    module = sys.modules[package]
    module.__class__ = _Verb
    function = getattr(module, package.rpartition(".")[2])
    module.__dict__["__wrapped__"] = function
    module.__doc__ = function.__doc__
