"""Rows of the evidence tables, and the READMEs' table of public scripts, from records."""

import _evidence
import _scripts
import pytest

MACHINE = {"fingerprint": "f", "device": "a processor", "cores": 2}


def record(name, ratio, plans, seconds=(60.0, 40.0)):
    low, estimate, high = ratio or (0, 0, 0)
    return {
        "job": f"script_{name}",
        "machine": MACHINE,
        "date": "2026-11-23",
        "command": f"scripts/bench scripts FOLDER {name}",
        "script": {"repository": "somebody/examples", "folder": ".", "command": ["python", "main.py"]},
        "pairs": [list(seconds)] * len(plans),
        "exit_codes": [[0, 0 if ratio else 1]] * len(plans),
        "ratio": {"estimate": estimate, "low": low, "high": high} if ratio else None,
        "outcomes": [{"plan": plan} if plan is not None else {} for plan in plans],
    }


FASTER = record("mnist", (1.2, 1.5, 1.8), [{"bf16_autocast": {}}, {"bf16_autocast": {}}, {}])
SLOWER = record("vae", (0.8, 0.9, 0.95), [{}, {}, {}])
OPEN = record("dcgan", (0.9, 1.0, 1.1), [{}, {}, {}])
BROKEN = record("gpt", None, [None, None, None])


def test_the_fastest_comes_first_and_each_side_is_counted():
    text = _scripts.table([BROKEN, FASTER, OPEN, SLOWER], "README.md")
    assert "4 public scripts, unmodified, on a processor, 2 cores, 2026-11-23: 1 faster" in text
    assert "1 slower, 1 neither, 1 broken. Whole runs in turns, 3 of each" in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == ["mnist", "dcgan", "vae", "gpt"]
    assert rows[0] == "| `mnist` (somebody/examples) | 1 min | 40 s | 1.50x (1.20-1.80) | bf16_autocast |"
    assert rows[1].endswith("| left as it is |")
    assert "**broken**" in rows[3]


@pytest.mark.parametrize(
    ("plans", "told"),
    [
        ([{"bf16_autocast": {}, "fused_optimizer": {}}, {"bf16_autocast": {}}, {}], "bf16_autocast"),
        ([{"bf16_autocast": {}}, {"host_allocator": {}}, {}], "something else each time"),
        ([{"bf16_autocast": {}}, None, {}], "left as it is"),
    ],
)
def test_what_acted_is_what_acted_in_most_runs(plans, told):
    assert _scripts.table([record("mnist", (1.2, 1.5, 1.8), plans)], "README.md").endswith(f"| {told} |\n\n")


def test_of_a_script_the_newest_record_counts():
    older = {**FASTER, "date": "2026-11-01", "ratio": {"estimate": 9.0, "low": 8.0, "high": 9.5}}
    assert "9.00x" not in _scripts.table([FASTER, older], "README.md")


def test_without_records_the_command_is_named():
    assert "`scripts/bench scripts`" in _scripts.table([], "README.md")


@pytest.mark.parametrize("file", ["README.md", "README.zh-CN.md"])
def test_rows_among_the_evidence(file):
    ((asked, found, place, _),) = _evidence.rows([{**FASTER, "benchmark": "scripts"}], file, "", 1)
    assert "`mnist`" in asked
    assert "1.50x (1.20-1.80)" in found
    assert place == "[2026-11-23](script_mnist/f/2026-11-23.json)"
    ((_, broken, _, _),) = _evidence.rows([{**BROKEN, "benchmark": "scripts"}], file, "", 1)
    assert "[0, 1]" in broken
    assert _scripts.table([FASTER], file).count("\n| `") == 1


def test_sweeps_are_told_by_trials_an_hour_over_those_of_each_engine():
    cells = {
        f"mlp, {engine}, heat {heat}": {"trials_an_hour": rate + heat, "best": rate / 1000, "seconds": 61.0}
        for engine, rate in (("vivace", 900), ("optuna", 300), ("ray", 100))
        for heat in range(3)
    }
    record = {"benchmark": "sweep", "job": "sweep_engines", "machine": MACHINE, "date": "2026-11-23"}
    slower = {"trials_an_hour": 150.0, "best": 0.5, "seconds": 61.0}
    record |= {
        "command": "scripts/bench sweep engines",
        "cells": cells | {"cnn, vivace, heat 0": slower, "cnn, optuna, heat 0": cells["mlp, optuna, heat 0"]},
    }
    optuna, ray = _evidence.rows([record], "README.md", "", None)
    assert optuna[0].startswith("Trials an hour of `vivace sweep` over plain Optuna in processes, 1-3 x 1")
    assert optuna[1].startswith("`mlp` 2.99x (2.9")
    assert optuna[1].endswith(" (0.9, 0.3); `cnn` 0.50x (0.5, 0.3)")  # one heat has no interval
    assert "Ray Tune" in ray[0]
    assert ray[1].startswith("`mlp` 8.92x (")
    assert "cnn" not in ray[1]  # not measured


def test_stacks_are_counted_before_they_are_told_one_by_one():
    fast, slow = ({"estimate": r, "low": r - 0.1, "high": r + 0.1} for r in (2.0, 0.8))
    same = {"steps": slow, "over_by_hand": slow}
    cells = {"one x 16": {"loaded": fast, **same}, "two x 16": {"loaded": slow, **same}}
    (_, counted), (_, one), _ = _evidence.sweep({"job": "sweep_stacks", "cells": cells}, "README.md")
    assert counted == "1 of 2, 0 of 2"
    assert one == "0.80x (0.70-0.90), 2.00x (1.90-2.10); 0.80x (0.70-0.90)"


def test_pictures_are_told_with_what_feeding_alone_brings():
    def row(naive, by_hand):
        ratios = {"over_naive": naive, "over_by_hand": by_hand}
        return {key: {"estimate": r, "low": r - 0.1, "high": r + 0.1} for key, r in ratios.items()}

    rows = {"tuned": row(3.0, 2.0), "tuned, data alone": row(1.5, 1.2)}
    record = {"images": 9, "first_pass": {"rows": rows}, "later_passes": {"rows": rows}}
    _, told = next(_evidence.feed(record, "README.md"))
    assert told == (
        "3.00x (2.90-3.10), 2.00x (1.90-2.10); by what feeds data alone 1.50x (1.40-1.60), 1.20x (1.10-1.30)"
    )


def test_gains_are_told_with_what_their_intervals_were_widened_by():
    score = {"gains inside of their interval": {"count": 27, "of": 30}}
    record = {"machine": MACHINE, "spread": 0.07, "scores": {"planted": score}}
    ((asked, told),) = _evidence.verdicts(record, "README.md")
    assert "interval, widened by the 7% by" in asked
    assert asked.endswith("of scripts that were there when its rules were written")
    assert told == "27 of 30 (90.0%)"


def test_what_the_ruler_left_undecided_is_told():
    found = {"count": 3, "of": 4, "rate": 0.75}
    record = {"caught": {"planted, alone": found}, "false_alarms": found, "verify_share_of_search": None}
    record["unjudged"] = ["defect cnn_0 least a", "defect cnn_0 least b", "correct cnn_0 least c"]
    (_, undecided) = _evidence.ruler(record, "README.md")
    assert undecided[1] == "2, 1"


@pytest.mark.parametrize(
    ("command", "typed"),
    [
        ("python benchmarks/kernels.py", "scripts/bench kernels"),
        ("python benchmarks/memory_budgets.py unet", "scripts/bench memory_budgets unet"),
        ("scripts/bench totals", "scripts/bench totals --budget fast"),
        ("scripts/bench peer", "scripts/bench peer"),
    ],
)
def test_a_command_of_an_older_record_is_told_as_it_is_typed(command, typed):
    ((_, _, _, told),) = _evidence.rows(
        [{**FASTER, "benchmark": "scripts", "command": command}], "README.md", "", None
    )
    assert told == f"`{typed}`"


def test_who_has_no_ratio_and_who_is_behind_the_best_one_liner_is_named():
    def job(best):
        ratio = dict(zip(("estimate", "low", "high"), best, strict=True)) if best else None
        contestants = {"vivace": {"verdict": {"kept": True}}, "peer": {}}
        return {"vivace_against_best": ratio, "vivace_against_peer": None, "contestants": contestants}

    found = {
        "machine": MACHINE,
        "versions": {"pytorch-autotune": "2.0"},
        "note": "",
        "jobs": {"mlp": job((1.2, 1.1, 1.3)), "gpt": job((0.9, 0.8, 0.99)), "lstm": job(None)},
        "vivace_against_best": {"estimate": 1.04, "low": 1.0, "high": 1.1},
        "vivace_against_peer": None,
        "longer": {"600": {"mlp": job((1.5, 1.4, 1.6)), "lstm": job(None)}},
    }
    rows = dict(_evidence.peer(found, "README.md"))
    (mean,) = [told for asked, told in rows.items() if "geometric mean of 2 jobs" in asked]
    assert mean == "1.04x (1.00-1.10); `mlp` 1.20, `gpt` 0.90; without a figure: `lstm`"
    assert rows["Jobs on which Vivace is slower than the best one-liner beyond noise"] == "`gpt`"
    assert [told for asked, told in rows.items() if "600 s" in asked] == ["1.50x (1.40-1.60)"]


def test_a_kernel_that_does_not_compile_has_no_registers():
    built = {"sum": {"registers": 40, "spilled_bytes": 0}, "product": {"error": "no room"}}
    ((_, told),) = _evidence.kernels({"kernels": {"sm_90": built}}, "README.md")
    assert told == "40, 0"


def test_a_training_that_failed_later_is_told_beside_the_figures_from_before():
    speed = {"estimate": 1.5, "low": 1.4, "high": 1.6}
    done = {
        "equal": True,
        "speed": {"strict": speed, "defaults": speed},
        "ways": {way: {"metric": {"estimate": 0.9}} for way in ("strict", "plan")},
    }
    record = {"recipes": {"mnist": done}}
    told = next(_evidence.accuracy(record, "README.md"))[1]
    assert told == "1.50x, 1.50x; the same metric as in strict fp32 within the margin: 1 of 1"
    done["failed"] = "plan, seed 3: the training diverged"
    assert next(_evidence.accuracy(record, "README.md"))[1] == f"{told}; a training of `mnist` failed"
