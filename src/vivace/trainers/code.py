"""What the code of a person's functions looks up."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any


def names_in(member: Any) -> frozenset[str]:
    """All names that a function, a method, a property or an object that can be called looks up, functions
    inside of it included; none where that is no Python code.
    """
    found = member.fget if isinstance(member, property) else getattr(member, "func", member)
    found = getattr(found, "__func__", found)
    if not isinstance(found, FunctionType):
        found = inspect.getattr_static(type(found), "__call__", None)
    inner = inspect.unwrap(found) if isinstance(found, FunctionType) else None
    return frozenset(_names(inner.__code__)) if isinstance(inner, FunctionType) else frozenset()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
