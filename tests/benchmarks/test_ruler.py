"""The examination goes on where it was stopped; its record says how many are left, its row whose defects."""

import importlib
import json

import _evidence
import pytest

from vivace.technique import registry


@pytest.fixture(scope="module")
def ruler():
    """The benchmark; the defects that it registers are known only while these tests run."""
    before = dict(registry._registered)
    yield importlib.import_module("ruler")
    registry._registered.clear()
    registry._registered.update(before)


@pytest.fixture
def examined(ruler, monkeypatch, tmp_path):
    """``(pieces, answer) -> records``: that many pieces, of which each judges 600 items."""

    def examine(pieces, answer=lambda item: "broken" if item["kind"] == "defect" else "kept"):
        judged, records = [], []

        def judge_group(job, effort, group, deadline):
            for item in group:
                if len(judged) >= 600 * (len(records) + 1):
                    return
                judged.append(ruler.name_of(item))
                promise = "exact" if "host_allocator" in item["plan"] else "rounding"
                found = {"promise": promise, "reason": "", "score": 0.5, "shares": {"scale": 0.5}}
                yield {**item, "name": judged[-1], "answer": answer(item), "num_verdicts": 0, **found}

        monkeypatch.setattr(ruler, "judge_group", judge_group)
        monkeypatch.setattr(ruler, "KEPT", tmp_path)
        monkeypatch.setattr("os.fsync", lambda _: None)  # thousands of lines
        monkeypatch.setattr(ruler._record, "write", records.append)
        monkeypatch.setattr("sys.argv", ["ruler"])
        for _ in range(pieces):
            ruler.main()
            with ruler.kept().path.open("a") as file:
                file.write('{"record": "judgement", "na')  # a kill tore it
        assert len(judged) == len(set(judged))
        return records

    return examine


def test_pieces_judge_each_item_once_and_the_record_says_how_many_are_left(ruler, examined, tmp_path):
    count = len(list(ruler.items(small=False)))
    records = examined(-(-count // 600))
    assert [record["left"] for record in records] == [*range(count - 600, 0, -600), 0]
    assert len(ruler.kept().read("judgement")) == count
    assert [file.name for file in tmp_path.iterdir()] == [f"{ruler.vivace.inspect().fingerprint}.jsonl"]
    assert all(found["rate"] == 1.0 for found in records[-1]["caught"].values())
    assert records[-1]["false_alarms"]["count"] == 0
    json.dumps(records[-1], allow_nan=False)


def test_how_far_correct_plans_get_is_of_those_that_round(examined):
    (record,) = examined(1)
    healthy = record["healthy"]["scale"]
    correct = [d for d in record["judged"] if d["name"].startswith("correct")]
    exact = [d for d in correct if "host_allocator" in d["name"]]
    assert healthy == {"largest": 0.5, "of 95 %": 0.5, "plans": len(correct) - len(exact)}


def test_a_false_alarm_and_a_miss_are_named_and_the_row_says_whose_defects(examined):
    (record,) = examined(1, lambda item: "broken" if item["plan"] == {"bf16_weights": {}} else "kept")
    assert record["alarms"]
    assert all("bf16_weights" in line for line in record["alarms"])
    assert len(record["missed"]) == sum(d["name"].startswith("defect") for d in record["judged"])
    asked, found = next(_evidence.ruler(record, "README.md"))
    assert "we planted ourselves in small jobs of our own" in asked
    assert found.startswith(f"0 of {record['caught']['planted, alone']['of']}; {len(record['alarms'])} of ")
    assert found.endswith(f"{record['left']} judgements are left")
    _, done = next(_evidence.ruler({**record, "left": 0}, "README.md"))
    assert "left" not in done
