"""The record of benchmarks/gpu.sh: made from the folder that it filled, and shown in the READMEs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import _evidence
import _gpus
import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "gpu" / "record.py"
FACTS = {
    "date": "2026-01-02",
    "device": "a GPU",
    "features": ["sm_90"],
    "fingerprint": "f",
    "cores": 16,
    "vivace": "0.1.0",
    "dry": False,
    "torch": "2.11.0",
    "driver": "580.1",
    "power_limit_watts": 700.0,
}
RATIO = {"estimate": 4.0, "low": 3.5, "high": 4.5}
BOUNDS = {"float32": {"bound": 200.0}, "bfloat16": {"bound": 800.0}, "bfloat16 fused": {"bound": 1000.0}}
STEP = {"status": "ok", "samples_per_second": 100.0, "peak_bytes": 2**30}
CASES = [
    ("correctness", "ruler tf32 on cnn", {"status": "broken"}),
    ("correctness", "ruler tf32 on cnn", {"status": "ok"}),
    ("correctness", "scene resumes", {"status": "failed", "reason": "it was stopped"}),
    ("cnn", "resnet50_256 | strict fp32", STEP),
    ("cnn", "resnet50_256 | bytes", {"status": "ok", "found": BOUNDS}),
    (
        "cnn",
        "resnet50_256 | all",
        {
            **STEP,
            "samples_per_second": 400.0,
            "ratio": RATIO,
            "plan": {"bf16_autocast": {}, "fused_batchnorm": {}},
        },
    ),
    (
        "cnn",
        "kernels at 7x7",
        {"status": "ok", "found": {"kernels": {"apply": {}}, "seconds": 1.0, "pytorch_seconds": 2.5}},
    ),
]


def filled(folder, facts=FACTS):
    lines = [{"facts": facts}, *({"part": part, "case": name, **case} for part, name, case in CASES)]
    (folder / "cases.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The record of these cases."""
    monkeypatch.syspath_prepend(str(RECORD.parent))
    import book
    import record

    filled(tmp_path)
    return record.made(*book.read(tmp_path))


def test_the_last_status_counts_and_what_failed_stays(made):
    assert (made["job"], made["date"], made["machine"]["fingerprint"]) == ("gpu", "2026-01-02", "f")
    assert made["command"] == "benchmarks/gpu.sh correctness cnn"
    assert made["versions"] == {"torch": "2.11.0", "driver": "580.1"}
    assert made["facts"] == {"power_limit_watts": 700.0}
    cases = made["parts"]["correctness"]
    assert cases["ruler tf32 on cnn"]["status"] == "ok"
    assert cases["scene resumes"] == {"status": "failed", "reason": "it was stopped"}


def test_the_table_holds_each_plan_beside_its_bound(made):
    rows = _gpus.table([made], "README.md").splitlines()
    assert "| strict fp32 | 100 | 1 | 1.0 | 50% |" in rows
    assert "| `bf16_autocast` + `fused_batchnorm` | 400 | 4.00x (3.50-4.50) | 1.0 | 40% |" in rows


def test_a_gpu_whose_resnet_was_not_reached_has_no_table(made):
    del made["parts"]["cnn"]
    assert "No GPU has been recorded yet" in _gpus.table([made], "README.md")
    assert len(list(_evidence.gpu(made, "README.md"))) == 2


def test_a_gpu_whose_bytes_were_not_counted_has_a_table_without_shares(made):
    del made["parts"]["cnn"]["resnet50_256 | bytes"]
    assert "| strict fp32 | 100 | 1 | 1.0 |  |" in _gpus.table([made], "README.md").splitlines()


def test_a_record_does_not_give_way_to_a_part_of_it(made, tmp_path, monkeypatch, capsys):
    import record

    monkeypatch.setattr(record._record, "RECORDS", tmp_path / "records")
    monkeypatch.setattr("sys.argv", ["record.py", str(tmp_path)])
    assert record.main() == 0
    path = record._record.path_of(made)
    before = path.read_text(encoding="utf-8")
    kept = [line for line in (tmp_path / "cases.jsonl").read_text().splitlines() if "7x7" not in line]
    (tmp_path / "cases.jsonl").write_text("\n".join(kept) + "\n")
    with pytest.raises(SystemExit, match="2"):
        record.main()
    assert "holds 1 cases that" in (said := capsys.readouterr().err)
    assert "'kernels at 7x7' of cnn" in said
    assert path.read_text(encoding="utf-8") == before


def test_the_answers_count_what_was_judged(made):
    found = [answer for _, answer in _evidence.gpu(made, "README.md")]
    assert found == [
        "4.00x (3.50-4.50), 400 images/s",
        "1: kept 1, refused 0",
        "1: kept 0, refused 0",
        "7x7 2.50x",
    ]


@pytest.mark.parametrize(
    ("facts", "said"), [(None, "holds no cases.jsonl"), ({**FACTS, "dry": True}, "of a dry run")]
)
def test_without_figures_there_is_no_record(tmp_path, facts, said):
    if facts:
        filled(tmp_path, facts)
    done = subprocess.run(
        [sys.executable, RECORD, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
