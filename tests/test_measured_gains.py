"""What the documentation says was measured of each technique: what the records say, and nothing else."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from vivace.pages.answer import in_letters
from vivace.technique import registry

DOCS = Path(__file__).resolve().parents[1] / "docs"
PLAN = {"bf16_autocast": {}, "channels_last": {}}


@pytest.fixture
def gains(tmp_path, monkeypatch):
    """``gains(name, record, ...)``: what is said of a technique where there are only these records; without
    any, the module with those that there are.
    """
    specification = importlib.util.spec_from_file_location("measured_gains", DOCS / "measured_gains.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(__import__("sys").modules, "measured_gains", module)
    specification.loader.exec_module(module)

    def say(name, *records):
        if not records:
            return module.table(name)
        for number, record in enumerate(records):
            folder = tmp_path / "records" / record["job"] / f"machine{number}"
            folder.mkdir(parents=True)
            whole = {"date": "2026-01-02", "machine": {"device": "a CPU"}, "command": "run it", **record}
            (folder / "2026-01-02.json").write_text(json.dumps(whole))
        monkeypatch.setattr(module, "ROOT", tmp_path)
        return module.table(name)

    return say


def ratio(value):
    return {"estimate": value, "low": 0.9 * value, "high": 1.1 * value}


def trial(plan, value, role="candidate"):
    return {"techniques": plan, "status": "measured", "ratio": ratio(value), "role": role}


def rows(text):
    """The cells, ratios in plain letters."""
    text = in_letters(text)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[4:] if line]


@pytest.mark.parametrize("name", registry.own_names())
def test_every_technique_has_its_records_or_says_that_there_are_none(gains, name):
    text = gains(name)
    if text.startswith("Not measured"):
        assert not re.search(r"\d", text)
        return
    assert rows(text)
    for *_, record in rows(text):
        assert (DOCS.parent / record.strip("`")).is_file()
        assert name in (DOCS.parent / record.strip("`")).read_text()


def test_alone_and_beside_the_same_plan_without_it(gains):
    trials = [
        trial({"channels_last": {}}, 1.5),
        trial({"bf16_autocast": {}}, 2.0),
        trial(PLAN, 3.0),
        trial(PLAN, 9.0, "confirmation"),  # of other processes: not beside the first
        {"techniques": {"bf16_autocast": {}}, "status": "refused", "ratio": None},
    ]
    (row,) = rows(gains("bf16_autocast", {"job": "small", "trials": trials}))
    assert row[:4] == [
        "`small`",
        "2.00x (1.80-2.20)",
        "1.50x (1.35-1.65) -> 3.00x (2.70-3.30)",
        "a CPU, 2026-01-02",
    ]
    assert row[4] == "`records/small/machine0/2026-01-02.json`"


def test_plans_of_two_searches_are_not_beside_each_other(gains):
    jobs = {"one": {"trials": [trial({"channels_last": {}}, 1.5)]}, "two": {"trials": [trial(PLAN, 3.0)]}}
    assert "Not measured" in gains("bf16_autocast", {"job": "peer", "jobs": jobs})


def test_whole_scripts_and_memory_are_said_as_such(gains):
    outcomes = [{"plan": {"fused_optimizer": {}}}] * 2
    script = {"job": "script_a", "outcomes": outcomes, "ratio": ratio(1.2)}
    mixed = {"job": "script_b", "outcomes": [*outcomes, {"plan": {}}], "ratio": ratio(1.3)}
    slower = {"estimate": 5.0, "low": 3.0, "high": 7.0}
    memory = {"plan": {"fused_optimizer": {}}, "percent_measured": 74.6, "slowdown_percent": slower}
    peak = {"job": "memory_a", "kept_bytes": 9, "rows": [memory, {"reason": "no plan fits"}]}
    found = rows(gains("fused_optimizer", script, mixed, peak))
    assert [row[1] for row in found] == [
        "1.20x (1.08-1.32), whole runs under `vivace run`",
        "75 % of the memory, steps 5.0 % longer (3.0 to 7.0)",
    ]
