"""The catalogue: its numbers agree, names find their device, and wrong files are refused in words."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from vivace.advise import catalogue
from vivace.advise.catalogue import Gpu, disagreements, find_gpu, load_catalogue
from vivace.errors import InputError

GPUS = load_catalogue()
EVERY = pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))


@EVERY
def test_the_numbers_of_an_entry_agree(gpu: Gpu) -> None:
    assert disagreements(gpu) == []


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("A100-SXM4-80GB", {"bandwidth": 4078e9}),
        ("H100-SXM5-80GB", {"rates": {"bf16": 1979e12}}),
        ("RTX 3090", {"rates": {"fp16": 142e12}}),
        ("V100-SXM2-16GB", {"measured": {"fp16": 130e12}}),
    ],
    ids=["doubled bandwidth", "sparse rate", "rate of fp16 accumulation", "above the peak"],
)
def test_a_known_mistake_of_published_tables_is_flagged(name: str, wrong: dict[str, object]) -> None:
    gpu = dataclasses.replace(GPUS[name], disputed={}, **wrong)  # type: ignore[arg-type]
    assert len(disagreements(gpu)) == 1
    assert disagreements(gpu)[0].startswith(name)
