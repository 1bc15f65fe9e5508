"""The guides' tables: made from the catalogue, and every one that a page includes exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from vivace.advising.catalogue import find_gpu

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.glob("how-to-choose-*.md"))


@pytest.fixture(scope="module")
def guide() -> ModuleType:
    specification = importlib.util.spec_from_file_location("gpu_guide", DOCS / "gpu_guide.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_pages_and_tables_match(guide: ModuleType) -> None:
    included = {
        name for page in PAGES for name in re.findall(r"\{include\} generated/(\S+)", page.read_text("utf-8"))
    }
    assert len(PAGES) == 2
    of_this_guide = included - {"frameworks.inc", "apis.inc"}  # which frameworks_guide.py writes
    assert of_this_guide == {name for name in guide.TABLES if name.endswith(".inc")}


def test_every_table_has_as_many_cells_in_each_row(guide: ModuleType) -> None:
    for name, make in guide.TABLES.items():
        blocks = re.findall(r"(?:^\|.*\n)+", make(), flags=re.MULTILINE)
        assert blocks, name
        for block in blocks:
            rows = block.splitlines()
            assert len(rows) > 3, name
            assert len({row.count("|") for row in rows}) == 1, name


def test_a_ratio_is_that_of_the_catalogue_and_of_the_measurements(guide: ModuleType) -> None:
    row = next(
        line for line in guide.ratios_table().splitlines() if "A100-SXM4-80GB to H100-SXM5-80GB" in line
    )
    _, _, rate, bandwidth, gain, _, _ = (cell.strip() for cell in row.split("|"))
    old, new = find_gpu("A100"), find_gpu("H100")
    assert float(rate) == pytest.approx(new.rates["fp16"] / old.rates["fp16"], abs=0.01)
    assert float(bandwidth) == pytest.approx(new.bandwidth / old.bandwidth, abs=0.01)
    assert float(gain) == pytest.approx(30841.38 / 17918.8, abs=0.01)


def test_every_measured_row_is_of_a_known_card_and_names_its_source(guide: ModuleType) -> None:
    rows = [row for n in (1, 2, 4, 8) for row in guide.measured("BERT base", num_gpus=n)]
    for row in rows + guide.measured(guide.LANGUAGE):
        assert find_gpu(row["gpu"])
        assert "@" in row["source"]
        assert float(row["value"]) > 0
