"""What differs, whether the second is slower beyond noise, and where that cannot be said."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vivace
from vivace.comparing.compared import answer
from vivace.errors import FolderError, InputError
from vivace.measuring.statistics import speed_ratio_between
from vivace.pages.answer import MOST_LINES

RECORDS = Path(__file__).resolve().parents[2] / "records"
MACHINE = {
    "devices": [{"kind": "cpu", "name": "a processor", "memory_bytes": 2**34}],
    "num_cores": 2,
    "versions": {"python": "3.11.7", "torch": "2.15.0"},
}


@pytest.fixture
def trained(tmp_path):
    """``trained(name, speed)``: the folder of a training of so many samples a second, with 5 % of noise."""

    def write(name, speed, *, lines=30, machine=MACHINE, **facts):
        folder, noise = tmp_path / name, random.Random(name)
        folder.mkdir()
        metrics = [
            {"step": 10 * i + 1, "loss": 1.0, "samples_per_second": speed * noise.gauss(1, 0.05)}
            for i in range(lines)
        ]
        metrics[0]["samples_per_second"] = 1.0  # it compiled in its first step
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
        run = {"job": "train.py:job", "steps": 300, "stepping_seconds": 300 * 64 / speed, "metric": 0.97}
        run |= {"metric_name": "accuracy", "loss": 0.1, "seconds": 20.0, "samples_per_second": speed}
        run |= {"plan": {}, "machine": machine}
        (folder / "run.json").write_text(json.dumps(run | facts))
        return folder

    return write


@pytest.fixture
def profiled(tmp_path):
    """``profiled(name, seconds)``: the profile.json of steps of so many seconds."""

    def write(name, seconds, **facts):
        noise = random.Random(name)
        each = [seconds * noise.gauss(1, 0.03) for _ in range(40)]
        document = {"target": "python train.py", "shares": {"data": 0.1}, "step_seconds": seconds}
        document |= {"samples_per_second": 64 / seconds, "each_step_seconds": each}
        document |= {"memory": {"peak_bytes": 3 * 2**20}, "machine": {"device": "a processor", "cores": 2}}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(document | facts))
        return path

    return write


@pytest.fixture
def ran(tmp_path):
    """``ran(name, ...)``: the folder of a script under vivace run, left alone after 50 of its steps."""

    def write(name, **facts):
        folder = tmp_path / name
        folder.mkdir()
        document = {"outcome": "left_alone", "steps": 50, "seconds": 100.0, "step_seconds": 0.01}
        document |= {"own_seconds": 0.1, "plan": {}, "tried": []}
        (folder / "run.json").write_text(json.dumps(document | facts))
        return folder

    return write


def vivace_compare(*arguments):
    """The command, in a process of its own: exit code, standard output, standard error."""
    command = [sys.executable, "-m", "vivace", "compare", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def rows(found):
    return {row.name: (row.before, row.after, row.change) for row in found.differences}


def test_the_page_is_named_as_the_person_would_write_it(profiled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, _, said = vivace_compare(profiled("a", 0.1), profiled("b", 0.1), "--out", "pages")
    assert "Page: pages/compare.html" in said


@pytest.mark.parametrize(("speed", "slower"), [(1000, False), (990, False), (1200, False), (800, True)])
def test_slower_is_what_lies_beyond_the_margin_and_the_noise(trained, speed, slower):
    found = vivace.compare(trained("a", 1000.0), trained("b", float(speed)), max_regression="5%")
    assert found.has_interval
    assert (found.slower, found.exit_code) == (slower, int(slower))
    assert found.ratio.low < speed / 1000 < found.ratio.high


def test_nothing_is_judged_where_no_margin_was_given(trained):
    found = vivace.compare(trained("a", 1000.0), trained("b", 500.0))
    assert (found.slower, found.exit_code) == (None, 0)


def test_the_warm_up_is_no_part_of_a_step(trained):
    found = vivace.compare(trained("a", 1000.0, lines=6), trained("b", 1000.0, lines=6))
    assert found.ratio.high < 1.2


def test_the_warm_up_is_no_part_of_a_step_where_blocks_are_few(trained):
    """Of three looks at the loss two are left: too few for an interval, and the whole run is slow."""
    compiled = trained("a", 1000.0, lines=3, samples_per_second=300.0)
    found = vivace.compare(compiled, trained("b", 1000.0, lines=3))
    assert not found.has_interval
    assert found.ratio.estimate == pytest.approx(1.0, rel=0.2)
    assert found.before.step_seconds == pytest.approx(found.before.sample_seconds * 64 * 0.3)


def test_a_run_with_its_warm_up_is_not_set_against_one_without(trained):
    short, other, long = trained("a", 1000.0, lines=1), trained("b", 900.0, lines=1), trained("c", 1000.0)
    found = vivace.compare(short, long, max_regression="5%")
    assert "too short to tell its steps from its warm-up" in found.not_comparable
    assert (found.slower, found.exit_code) == (None, 1)
    both = vivace.compare(short, other)
    assert both.ratio.estimate == pytest.approx(0.9)
    assert any("hold the warm-up of both" in note for note in both.notes)


def test_what_differs_is_told(trained):
    newer = MACHINE | {"versions": MACHINE["versions"] | {"torch": "2.16.0"}}
    plan = {"channels_last": {}, "compile": {"regional": True}}
    before = trained("a", 1000.0, plan={"compile": {}, "bf16_autocast": {}})
    found = vivace.compare(before, trained("b", 1000.0, machine=newer, plan=plan, metric=0.95))
    told = rows(found)
    assert told["torch"] == ("2.15.0", "2.16.0", "")
    assert told["plan"][2] == "-bf16_autocast +channels_last ~compile"
    assert told["accuracy"][:2] == ("0.97", "0.95")
    assert told["machine"] == ("a processor, 2 cores",) * 2 + ("",)
    assert found.before.step_seconds == pytest.approx(0.064, rel=0.03)
    assert found.before.step_seconds == pytest.approx(64 * found.before.sample_seconds)
    assert "python" not in told
    assert not found.not_comparable


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            {"devices": [{"name": "a faster processor"}], "num_cores": 2},
            "other machine (device: a processor, ",
        ),
        ({"devices": [{"name": "a processor"}], "num_cores": 64}, "other machine (cores: 2, then 64)"),
    ],
)
def test_another_machine_is_not_comparable(trained, other, reason):
    found = vivace.compare(trained("a", 1000.0), trained("b", 10.0, machine=other), max_regression="5%")
    assert found.not_comparable.startswith(reason)
    assert (found.ratio, found.slower, found.exit_code) == (None, None, 1)


def test_another_kind_is_not_comparable(trained, profiled):
    found = vivace.compare(trained("a", 1000.0), profiled("b", 0.064))
    assert found.not_comparable == "a training and a profile are measured in different ways"


def test_profiles_are_compared_by_their_steps(profiled):
    found = vivace.compare(profiled("a", 0.100), profiled("b", 0.120), max_regression=0.05)
    assert found.slower is True
    assert found.ratio.low < 0.1 / 0.12 < found.ratio.high
    assert rows(found)["peak memory"] == ("3.00 MiB", "3.00 MiB", "+0 %")


def test_of_unequal_batches_the_times_of_a_sample_are_told(profiled):
    """A step on half the batch that takes 30 % less is slower, and no step takes longer."""
    before = profiled("a", 0.100)
    halved = profiled("b", 0.070, samples_per_second=32 / 0.070)
    told = answer(vivace.compare(before, halved, max_regression="5%"))
    assert re.match(r"A sample takes \d+ % longer", told.sentence)
    assert any("64" in note and "32" in note and "samples" in note for note in told.notes)
    told = answer(vivace.compare(before, profiled("c", 0.120), max_regression="5%"))
    assert told.sentence.startswith("A step takes")
    assert not any("samples" in note for note in told.notes)


def test_older_profiles_are_compared_as_they_stand(profiled):
    found = vivace.compare(
        profiled("a", 0.100, each_step_seconds=[]),
        profiled("b", 0.104, each_step_seconds=[]),
        max_regression="5%",
    )
    assert (found.slower, found.has_interval) == (False, False)
    assert any("not its noise" in note for note in found.notes)


def test_folders_of_a_profile_and_pages_of_one_are_found(profiled, tmp_path):
    folder = tmp_path / "profile"
    folder.mkdir()
    profiled("a", 0.1).rename(folder / "profile.json")
    (folder / "profile.html").touch()
    for named in (folder, folder / "profile.html"):
        assert vivace.compare(named, profiled("b", 0.1)).before.step_seconds == 0.1


def test_a_script_that_was_left_alone_is_not_slower_than_one_that_was_led(ran):
    """Its steps are looked at for a moment, and its seconds are those of the whole run."""
    plan = {"compile": {}}
    led = ran("led", steps=10_000, plan=plan, ratio={"estimate": 1.5, "low": 1.4, "high": 1.6})
    found = vivace.compare(led, ran("left"), max_regression="5%")
    assert (found.slower, found.has_interval) == (False, False)
    assert found.ratio.estimate == 1.0
    assert not any("warm-up" in note for note in found.notes)
    assert rows(found)["beside the script as it is"][0].startswith("1.50")
    assert "beside strict fp32" not in rows(found)


def test_of_an_older_run_of_a_script_the_time_of_a_step_is_not_known(ran):
    found = vivace.compare(ran("older", step_seconds=None), ran("newer"), max_regression="5%")
    assert found.not_comparable.endswith("time of a step: an older Vivace wrote it, or no step was seen")
    assert (found.slower, found.exit_code) == (None, 1)


def test_a_plan_with_other_settings_is_told_where_the_answer_stands(trained):
    before = trained("a", 1000.0, plan={"compile": {}})
    found = vivace.compare(before, trained("b", 1000.0, plan={"compile": {"mode": "x"}}))
    assert rows(found)["plan"] == ("compile", "compile (mode=x)", "~compile")
    assert dict(answer(found).parts)["plan"].endswith("compile (mode=x) (~compile)")


def test_searches_are_compared_by_the_plan_that_they_kept(tmp_path):
    def searched(name, seconds, plan):
        trial = {"techniques": plan, "plan_id": "p", "machine": "m", "job": "j", "status": "measured"}
        trial |= {"ratio": {"estimate": 2.0, "low": 1.9, "high": 2.1}, "role": "confirmation"}
        trial |= {"pairs": [[0.2, seconds * (1 + i / 12)] for i in range(6)], "peak_bytes": 2**20}
        folder = tmp_path / name
        folder.mkdir()
        job = {"name": "train.py:job", "batch_size": 64}
        result = {"plan": plan, "speedup": trial["ratio"]}
        records = [{"record": "run", "machine": MACHINE, "job": job}, {"record": "trial", **trial}]
        records += [{"record": "result", **result}]
        (folder / "ledger.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return folder

    before, after = searched("a", 0.1, {"compile": {}}), searched("b", 0.11, {"compile": {}})
    found = vivace.compare(before, after, max_regression="5%")
    assert rows(found)["beside strict fp32"][0].startswith("2.00")
    assert found.slower is False  # 10 % longer, within what a few blocks can say
    assert found.ratio.estimate == pytest.approx(0.1 / 0.11, rel=0.06)
    assert rows(found)["time of a step"][2] == "+10 %"
    none = searched("c", 0.1, {}), searched("d", 0.11, {})
    assert "beside strict fp32" not in rows(vivace.compare(*none))


def test_records_of_benchmarks_are_compared_by_their_interval():
    gpt, mlp = (max(RECORDS.glob(f"{name}/*/*.json")) for name in ("gpt", "mlp"))
    same = vivace.compare(gpt, gpt, max_regression="5%")
    assert (same.slower, same.ratio.estimate) == (False, 1.0)
    assert same.ratio.low < 1.0 < same.ratio.high
    assert vivace.compare(mlp, gpt, max_regression="5%").slower is True
    assert vivace.compare(mlp, gpt).notes == ("They ran different things: mlp, then gpt",)


def test_one_job_in_two_spellings_is_one(trained):
    first, second = trained("a", 1000.0, job="train.py"), trained("b", 1000.0, job="./train.py:job")
    assert not vivace.compare(first, second).notes
    whole = trained("whole", 1000.0, job="/home/ann/train.py:job")
    assert not vivace.compare(first, whole).notes
    elsewhere = trained("elsewhere", 1000.0, job="/home/ann/retrain.py:job")
    assert vivace.compare(first, elsewhere).notes
    other = trained("c", 1000.0, job="train.py:job,width=8")
    assert vivace.compare(first, other).notes == (
        "They ran different things: train.py, then train.py:job,width=8",
    )


def test_different_metrics_are_not_set_against_each_other(trained, tmp_path):
    def run(name, **facts):
        folder = trained(name, 1000.0, **facts)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [line | {"metric": 0.1, "seconds": line["step"]} for line in lines]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    first, same = run("a"), run("b", metric=0.9)
    other = run("c", metric=-0.5, metric_name="score")
    assert rows(vivace.compare(first, same))["accuracy"][2]
    assert rows(vivace.compare(first, other))["accuracy / score"][2] == ""
    for after, drawn in ((same, 2), (other, 0)):
        page = vivace.compare(first, after, out=tmp_path / f"page of {after.name}").page_path
        assert Path(page).read_text(encoding="utf-8").count('class="line') == drawn


def test_what_is_no_side_is_refused(tmp_path, trained):
    side = trained("a", 1000.0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("no json")
    (tmp_path / "deep.json").write_text(100_000 * "[")
    (tmp_path / "other.json").write_text('{"benchmark": "ruler"}')
    for name, told in (
        ("nothing", "there is no"),
        (300 * "a", "cannot be read: File name too long"),
        ("empty", "holds no run and no profile"),
        ("text.json", "is no JSON document"),
        ("deep.json", "is no JSON document"),
        ("other.json", "holds no speed of a plan"),
    ):
        with pytest.raises(FolderError, match=told):
            vivace.compare(side, tmp_path / name)
    for share in ("5", "-1%", "100%", 5.0, float("nan")):
        with pytest.raises(InputError, match="such as 5%"):
            vivace.compare(side, side, max_regression=share)


def test_the_command_answers_in_twelve_lines_with_an_exit_code(trained):
    before, after = trained("a", 1000.0), trained("b", 700.0)
    code, _, said = vivace_compare(before, after, "--max-regression", "5%")
    assert code == 1
    lines = said.strip().splitlines()
    assert re.fullmatch(r"A step takes 4\d % longer\.", lines[0])
    assert any("Allowed are 5.0 %; the second is 0." in line for line in lines)
    assert len(lines) <= MOST_LINES
    code, output, said = vivace_compare(after, before, "--max-regression", "5%", "--json", "--quiet")
    assert (code, said) == (0, "")
    assert json.loads(output)["slower"] is False
    code, _, said = vivace_compare(before, after, "--details")
    assert code == 0
    assert re.search(r"accuracy +0.97 +0.97", said)


def test_a_page_is_written_and_its_names_are_escaped(trained, tmp_path):
    before, after = trained("a", 1000.0, job="<script>alert(1)</script>"), trained("b", 1000.0)
    code, *_ = vivace_compare(before, after, "--out", tmp_path / "compared", "--quiet")
    page = (tmp_path / "compared" / "compare.html").read_text()
    assert code == 0
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert "http" not in page
    assert json.loads((tmp_path / "compared" / "compare.json").read_text())["comparable"]
    assert vivace_compare(before, after, "--out", before, "--quiet")[0] == 2


@pytest.mark.parametrize("name", ["compare.html", "compare.json"])
def test_a_persons_own_file_in_the_output_folder_stays(trained, tmp_path, name):
    before, out = trained("a", 1000.0), tmp_path / "out"
    for _ in range(2):  # again into its own folder
        vivace.compare(before, before, out=out)
    (out / name).write_text("theirs")
    with pytest.raises(FolderError, match=f"{name}' is not what vivace compare wrote"):
        vivace.compare(before, before, out=out)
    assert (out / name).read_text() == "theirs"


def test_metrics_of_both_trainings_stand_on_one_axis_of_minutes(trained, tmp_path):
    folders = [trained("a", 1000.0), trained("b", 2000.0)]
    for folder, times in zip(folders, ((60, 120, 180), (30, 60, 90)), strict=True):
        with (folder / "metrics.jsonl").open("a") as file:
            for number, seconds in enumerate(times, 1):
                line = {"step": 1000 * number, "metric": 0.3 * number, "seconds": seconds}
                file.write(json.dumps(line) + "\n")
    found = vivace.compare(*folders, out=tmp_path / "compared")
    assert found.after.course == ((0.5, 0.3), (1.0, 0.6), (1.5, pytest.approx(0.9)))
    page = (tmp_path / "compared" / "compare.html").read_text()
    assert 'class="line reference"' in page
    assert 'class="line plan"' in page
    assert "The metric as it rose" in page
    vivace.compare(trained("c", 1000.0), folders[0], out=tmp_path / "other")
    assert "The metric as it rose" not in (tmp_path / "other" / "compare.html").read_text()


def test_the_interval_of_two_runs_holds_the_truth_as_often_as_it_says():
    noise, held = random.Random(0), 0
    for _ in range(400):
        before = [noise.lognormvariate(0.0, 0.1) for _ in range(7)]
        after = [1.25 * noise.lognormvariate(0.0, 0.1) for _ in range(9)]
        ratio = speed_ratio_between(before, after)
        held += ratio.low <= 0.8 <= ratio.high
    assert held >= 0.92 * 400
    assert speed_ratio_between([1.0] * 4, [2.0] * 4) == speed_ratio_between([1.0, 1.0] * 9, [2.0] * 5)


@pytest.mark.parametrize(
    "document",
    [
        {"step_seconds": 1.0, "shares": {}, "machine": {"devices": [None]}},
        {"step_seconds": 1.0, "shares": {}, "each_step_seconds": 5},
        {"step_seconds": 1.0, "shares": {}, "memory": [1]},
        {"baselines": {"strict_fp32": 5.0}, "speedup": {"estimate": 1, "low": 0, "high": 2}},
    ],
)
def test_a_file_of_another_version_is_one_sentence(document, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    with pytest.raises(FolderError, match="json' is not written as this version of Vivace reads it"):
        vivace.compare(path, path)


def test_times_that_cannot_be_are_no_times(tmp_path):
    sides = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, seconds in zip(sides, (1.0, -1.0), strict=True):
        path.write_text(
            json.dumps({"step_seconds": seconds, "shares": {}, "each_step_seconds": [seconds] * 9})
        )
    found = vivace.compare(*sides, max_regression="5%")
    assert (found.slower, found.exit_code) == (None, 1)
    assert "after.json' holds no time of a step" in found.not_comparable
