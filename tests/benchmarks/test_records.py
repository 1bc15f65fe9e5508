"""The generated tables follow the records, no figure in a README stands without one, and no path leaks."""

import itertools
import json
import re
from pathlib import Path

import _gpus
import _picture
import pytest
import table

from vivace.technique import registry
from vivace.verifying.judgement import LIMIT

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "records").glob("*/*/*.json"))
READMES = ("README.md", "README.zh-CN.md")
FIGURE = re.compile(r"(\d+\.\d+)\s?(?:[x\u00d7]|times|倍)")
ABSOLUTE_PATH = re.compile(r"(?<![\w./:-])/[\w.+-]+/[\w.+/-]+")


def texts(thing):
    if isinstance(thing, dict):
        thing = [*thing, *thing.values()]
    if isinstance(thing, list):
        return [text for item in thing for text in texts(item)]
    return [thing] if isinstance(thing, str) else []


def headlines(records):
    """The ratios that a README's text may name: of the newest record of each job and machine the speedup of
    `cpu`'s plan; over the best one-liner the mean, the lowest and the highest; with depthwise gradients the
    ends; of a GPU each plan's, and each kind of kernel's ends; what was predicted of it over what was
    measured; the fastest script of a machine.
    """
    newest = {(one["machine"]["fingerprint"], one["job"]): one for one in reversed(records)}
    found, scripts = [], {}
    for (machine, _), record in newest.items():
        kind = record["benchmark"]
        if kind == "cpu":
            found.append(record["speedup"]["estimate"])
        elif kind == "peer":
            each = [job["vivace_against_best"] for job in record["jobs"].values()]
            each = [ratio["estimate"] for ratio in each if ratio]
            found += [record["vivace_against_best"]["estimate"], min(each), max(each)]
        elif kind == "own_kernels":
            for technique in {"depthwise_gradients", "winograd"} & set(record):
                each = [one["ratio"]["estimate"] for one in record[technique].values()]
                found += [min(each), max(each)]
        elif kind == "gpu":
            found += [case["ratio"]["estimate"] for _, case in _gpus.steps(record)]
            ends = [(min(each.values()), max(each.values())) for _, each in _gpus.kernels(record)]
            found += itertools.chain.from_iterable(ends)
        elif kind == "foretold":
            rows = record["rows"]
            found += [
                row["foretold_samples_per_second"]["estimate"] / row["samples_per_second"] for row in rows
            ]
        elif kind == "scripts" and record["ratio"]:
            scripts[machine] = max(scripts.get(machine, 0.0), record["ratio"]["estimate"])
    return [*found, *scripts.values()]


def unfounded(text, values):
    """The figures outside the generated table that round to none of `values`."""
    prose = table.MARKERS.sub("", text)
    figures = FIGURE.findall(prose)
    return [f for f in figures if f not in {f"{v:.{len(f.partition('.')[2])}f}" for v in values}]


@pytest.fixture(scope="module")
def measured():
    return headlines(table.read(ROOT / "records"))


def test_the_generated_files_are_up_to_date():
    files = table.wanted(table.read(ROOT / "records"))
    stale = [path.name for path, text in files.items() if table._present(path) != text]
    assert stale == [], "run scripts/bench table"


@pytest.mark.parametrize("name", READMES)
def test_every_figure_in_a_readme_stands_in_a_record(name, measured):
    assert unfounded((ROOT / name).read_text(encoding="utf-8"), measured) == []


@pytest.mark.parametrize("invented", ["1.37x", "1.37 times", "1.37 倍", "1.50x"])
def test_an_invented_figure_is_found_in_all_that_was_measured(invented, measured):
    assert unfounded(f"it trains {invented} as fast", measured) == [invented[:4]]


def test_a_figure_without_a_record_is_found():
    generated = "<!-- figures -->\n9.99x\n<!-- /figures -->"
    assert unfounded(f"2.82x, 7.5 倍, 1.9x {generated}", [2.824, 1.8501]) == ["7.5"]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: "/".join(path.parts[-3:]))
def test_a_record_lies_where_it_says_and_holds_no_path(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    place = (record["job"], record["machine"]["fingerprint"], f"{record['date']}.json")
    assert path.parts[-3:] == place
    assert [text for text in texts(record) if ABSOLUTE_PATH.search(text)] == []


def test_the_tables_and_the_ruler_have_one_limit():
    assert table.LIMIT == LIMIT


@pytest.mark.parametrize("name", READMES)
def test_techniques_that_ran_nowhere_are_named(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    nowhere = [n for n in registry.own_names() if not registry.find(n).card.measured_on]
    assert [n for n in nowhere if f"`{n}`" not in text] == []


@pytest.mark.parametrize(
    ("plan", "equal", "said"),
    [
        ({"bf16_weights": {}}, True, "30 s, 2.00x / 1.50x<"),
        ({"bf16_weights": {}}, False, "30 s, 2.00x / 1.50x; the same accuracy not shown<"),
        ({}, True, "30 s, no plan helped<"),
    ],
)
def test_the_picture_says_what_a_plan_brought(plan, equal, said):
    ways = {"strict": {"seconds": 60.0}, "defaults": {"seconds": 45.0}, "plan": {"seconds": 30.0}}
    speed = {"strict": {"estimate": 2.0}, "defaults": {"estimate": 1.5}}
    done = {"plan": plan, "equal": equal, "seeds": 3, "ways": ways, "speed": speed}
    recipes = {"segmentation": done, "detection": {"reason": "it ended"}}
    machine = {"device": "a CPU", "cores": 2}
    drawn = _picture.picture([{"recipes": recipes, "date": "2026-01-02", "machine": machine}], "README.md")
    assert said in drawn
    assert "detection" not in drawn
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="16"', drawn)]
    assert widths[-3:] == pytest.approx([2 * widths[-1], 1.5 * widths[-1], widths[-1]], rel=1e-2)


def test_there_is_no_picture_of_nothing():
    assert _picture.picture([], "README.md") == ""


def test_a_reference_and_an_exact_plan_have_words():
    words = table.WORDS["README.md"]
    record = {"plan": {}, "kept": None, "promise": "exact"}
    assert table.verdict(record, words) == "the job as it is"
    record = {"plan": {"host_allocator": {}}, "kept": True, "promise": "exact"}
    record |= {"loss_envelopes": 0.0, "displacement_envelopes": 0.0}
    assert table.verdict(record, words) == "bit-identical"
    assert table.figure({"plan": {}, "trials": []}, words) == "no plan kept"
    record |= {"kept": False, "promise": "rounding", "loss_envelopes": 7.25}
    assert table.verdict(record, words) == "no: 7.2 of 8"
    record = {"plan": {"compile": {"regional": True}, "tf32": {}}}
    assert table.plan(record) == "compile (regional=True) + tf32"


def test_the_share_of_the_limit_and_where_a_step_goes_are_said_where_they_are_known():
    operators = [
        {"operator": "convolution", "seconds": 0.181, "bound_seconds": 0.063},
        {"operator": "index", "seconds": 0.02, "bound_seconds": None},
        {"operator": "loss", "seconds": 0.001, "bound_seconds": 0.0},
        {"operator": "copy", "seconds": 0.1, "bound_seconds": 0.2},  # counted so until December 2026
    ]
    limit = {"share": 0.633, "step_seconds": 0.4, "bound_seconds": 0.253, "operators": operators}
    record = {"job": "resnet", "date": "2026-01-02", "limit": limit}
    assert table.reached(record) == "38%"
    (line,) = [line for line in "\n".join(table.split([record, {}])).splitlines() if "resnet" in line]
    assert line == "| `resnet` | 2026-01-02 | 400 of 153 | convolution 181 of 63, index 20, copy 100 of 100 |"
    for unknown in ({}, {"limit": {"share": None, "missing": ["the machine was busy"]}}):
        assert table.reached(unknown) == "-"
        assert table.split([unknown]) == []


@pytest.mark.parametrize("name", READMES)
def test_a_table_in_which_no_limit_is_known_has_no_column_for_it(name):
    machine = {"fingerprint": "f", "device": "a CPU", "features": ["avx2", "amx_bf16"], "cores": 2}
    record = {"job": "mlp", "date": "2026-01-02", "machine": machine, "versions": {"torch": "2.15"}}
    record |= {"baselines": {"strict_fp32": 10.0}, "plan": {}, "trials": [], "kept": None}
    words, found = table.WORDS[name], table.table([record], name)
    assert "avx2, amx_bf16" in found
    assert words["columns"][table.LIMITED] not in found
    assert words["limited"] not in found
    limit = {"share": 0.383, "step_seconds": 1.0, "bound_seconds": 0.383, "operators": []}
    found = table.table([{**record, "limit": limit}], name)
    assert words["columns"][table.LIMITED] in found
    assert words["limited"] in found
    assert "| 38% |" in found
