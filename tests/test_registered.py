"""Techniques that a stranger registers: all that Vivace's own can ask for is in the contract."""

import ast
import dataclasses
from pathlib import Path

import pytest

import vivace
from vivace.measuring.worker import Worker
from vivace.technique import Card, Numerics, Seam, Stage, Technique, registry
from vivace.testing import TINY_JOBS

ROOT = Path(vivace.__file__).parent


def card(stage=Stage.DATA, **more):
    return Card(stage=stage, numerics=Numerics.EXACT, summary="counts", source="here", **more)


def test_no_hook_of_a_technique_is_found_by_its_name_alone():
    """A hook that the core calls is an attribute of Technique, with a default, and is called as one."""
    hooks = {name for name in vars(Technique) if not name.startswith("_")}
    asked = [
        f"{path.relative_to(ROOT)}, line {call.lineno}: {call.args[1].value}"
        for path in ROOT.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("getattr", "hasattr")
        and isinstance(call.args[1], ast.Constant)
        and call.args[1].value in hooks
    ]
    assert asked == []


@pytest.mark.parametrize("name", registry.own_names())
def test_a_technique_has_no_public_attribute_beside_the_contract_and_its_settings(name):
    cls = registry.find(name)
    settings = {field.name for field in dataclasses.fields(cls)}
    public = {attribute for attribute in vars(cls) if not attribute.startswith("_")}
    assert public - settings <= set(dir(Technique)) | {"card", "name"}


@pytest.mark.parametrize("later", [False, True])
def test_a_later_pass_is_measured_where_the_first_differs(register, later):
    read = []

    @register
    @dataclasses.dataclass(frozen=True)
    class Counting(Technique):
        card = card()
        name = "counting"
        first_pass_differs = later

        def apply(self, build):
            def batches(following, loader):
                for batch in following(loader):
                    read.append(len(read))
                    yield batch

            build.wrap(Seam.BATCHES, batches)

    worker = Worker(TINY_JOBS["mlp"](), vivace.inspect().to_dict())
    worker.open({"counting": {}})
    try:
        assert len(read) == (4 if later else 0)  # batches of an epoch
    finally:
        worker.session.close()
