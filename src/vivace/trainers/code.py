"""What the code of a person's functions looks up."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from tokenize import TokenError
from types import CodeType, FunctionType
from typing import Any

SHOWING = ("log", "print", "debug", "info", "warning")


def names_in(member: Any) -> frozenset[str]:
    """All names that a function, a method, a property or an object that can be called looks up, functions
    inside of it included; none where that is no Python code.
    """
    function = _function(member)
    return frozenset(_names(function.__code__)) if function else frozenset()


def computes_with(member: Any, owner: str, name: str) -> bool:
    """Does a function look up `OWNER.NAME`, such as `state.epoch`, for more than to show something?

    Yes where both names occur and its source does not say otherwise, or cannot be read.
    """
    function = _function(member)
    if function is None or not {owner, name} <= set(_names(function.__code__)):
        return False
    code = function.__code__
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found = _shown(code, name)
    return not found or any(not shown and _may_be(node.value, owner, given) for node, shown in found)


@functools.cache
def only_shows(code: CodeType, name: str) -> bool:
    """Does this code look up an attribute, and only to show it? No where its source cannot be read."""
    found = _shown(code, name)
    return bool(found) and all(shown for _, shown in found)


def _shown(code: CodeType, name: str) -> list[tuple[ast.Attribute, bool]]:
    """Where it looks up an attribute, and whether that is to show it; nothing where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TokenError):
        return []
    shown = {id(node) for one in ast.walk(tree) if _shows(one) for node in ast.walk(one)}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == name]
    return [(node, id(node) in shown) for node in found]


def _may_be(node: ast.expr, owner: str, given: tuple[str, ...]) -> bool:
    """Can this be what is called `owner`? Another attribute cannot, nor what the function was given."""
    if isinstance(node, ast.Attribute):
        return node.attr == owner
    return not (isinstance(node, ast.Name) and node.id in given)


def _shows(node: ast.AST) -> bool:
    """Is it a statement that logs or prints, under a condition or not, and does no more?"""
    if isinstance(node, ast.If):
        return all(_shows(one) for one in (*node.body, *node.orelse))
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    return getattr(call.func, "attr", getattr(call.func, "id", "")) in SHOWING


def _function(member: Any) -> FunctionType | None:
    found = member.fget if isinstance(member, property) else getattr(member, "func", member)
    found = getattr(found, "__func__", found)
    if not isinstance(found, FunctionType):
        found = inspect.getattr_static(type(found), "__call__", None)
    inner = inspect.unwrap(found) if isinstance(found, FunctionType) else None
    return inner if isinstance(inner, FunctionType) else None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
