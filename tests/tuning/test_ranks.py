"""A search on several ranks: every plan makes them train one model, and what fails on one ends on all."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import time
import tomllib
from pathlib import Path

import psutil
import pytest

from vivace.errors import InputError
from vivace.ledger import Code, Ledger, Outcome, Profile, Ratio, Trial
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.reporting.answering import answer
from vivace.reporting.content import Content
from vivace.technique import Numerics
from vivace.technique.registry import find
from vivace.training.crew import GRACE_SECONDS, needed_by
from vivace.tuning.candidates import Candidate, candidates
from vivace.tuning.objective import ONE
from vivace.tuning.ranks import of_ranks, require_allowed, require_searchable
from vivace.tuning.requests import Confirm, LeaveOut, Measure, Verify
from vivace.tuning.result import Result, prefixes
from vivace.tuning.search import Search
from vivace.tuning.setting import Setting
from vivace.verifying.verdict import Verdict

SCENE = Path(__file__).parent / "scenes" / "ranks.py"
HURRIED = SCENE.with_name("hurried.py")
DDP, FSDP, FUSED, HOST = (find(name) for name in ("ddp", "fsdp", "fused_optimizer", "host_allocator"))
NEEDED = Plan([DDP()])
OFFERED = (HOST(), FUSED(), DDP(bucket_mib=1))


def played(ratio, kept=lambda plan: True, left=500.0, offered=OFFERED, peak=lambda plan: 1, memory=None):
    """A search on ranks at its end, and all that it asked for; ``ratio(plan)`` is a plan's speed."""
    candidates = tuple(Candidate(one, (1.0, 1.5)) for one in offered)
    times = {"budget_seconds": left, "left_seconds": left, "step_seconds": 0.01, "opening_seconds": 3.0}
    plans = {"base": NEEDED, "needed": NEEDED}
    setting = Setting(candidates, **times, peak_bytes=peak(NEEDED), memory=memory, **plans)
    assert Setting.from_dict(json.loads(json.dumps(setting.to_dict()))) == setting
    search, asked = Search(setting), []
    while (request := search.ask()) is not None:
        asked.append(request)
        plan = request.plan
        if isinstance(request, Verify):
            told = Verdict(
                kept(plan), "rounding", 0.0, 0.0, 3, 3, "" if kept(plan) else "the loss", seconds=9.0
            )
        elif isinstance(request, LeaveOut):
            told = Trial(plan.to_dict(), plan.id, "m", "j", "refused", reason=request.reason)
        else:
            found = Ratio(ratio(plan), 0.99 * ratio(plan), 1.01 * ratio(plan))
            more = {"pairs": ((0.01, 0.01 / found.estimate),), "peak_bytes": peak(plan), "seconds": 9.0}
            role = "confirmation" if isinstance(request, Confirm) else "candidate"
            told = Trial(plan.to_dict(), plan.id, "m", "j", "measured", ratio=found, role=role, **more)
        search.tell(told)
    return search, asked


def faster(plan):
    """Two techniques help, and a bucket of another size does not."""
    gains = {"fused_optimizer": 1.5, "host_allocator": 1.2}
    product = 1.0
    for name in plan.names:
        product *= gains.get(name, 1.0)
    return product * (0.8 if DDP(bucket_mib=1) in plan.techniques else 1.0)


def test_every_plan_that_is_tried_makes_the_ranks_train_one_model():
    search, asked = played(faster)
    measured = [request.plan for request in asked if isinstance(request, Measure)]
    assert all("ddp" in plan.names for plan in measured)
    assert NEEDED not in measured
    assert any(DDP(bucket_mib=1) in plan.techniques for plan in measured)
    assert search.conclusion.plan == Plan([DDP(), FUSED(), HOST()])
    assert search.conclusion.outcome == Outcome.FASTER


def test_weights_are_divided_first_where_they_do_not_fit_and_what_is_faster_comes_on_top():
    def peak(plan):
        return 30 if "ddp" in plan.names else 20

    search, asked = played(faster, offered=(*OFFERED, FSDP()), peak=peak, memory=25)
    assert asked[0].plan == Plan([FSDP()])
    assert search.conclusion.plan == Plan([FSDP(), FUSED(), HOST()])
    assert search.conclusion.outcome == Outcome.FASTER
    search, asked = played(lambda plan: 0.3, offered=(FSDP(),), peak=peak, memory=25)
    assert search.conclusion.plan == Plan([FSDP()])
    assert search.conclusion.outcome == Outcome.FITS
    assert played(lambda plan: 0.3, offered=(FSDP(),), peak=peak, memory=15)[0].conclusion.verdict is None


def test_weights_are_divided_where_that_is_faster():
    search, _ = played(lambda plan: 1.4 if "fsdp" in plan.names else 1.0, offered=(*OFFERED, FSDP()))
    assert search.conclusion.plan == Plan([FSDP()])


def test_another_bucket_that_was_not_tried_is_listed():
    _, asked = played(faster, left=35.0)
    left_out = [request.plan for request in asked if isinstance(request, LeaveOut)]
    assert Plan([DDP(bucket_mib=1)]) in left_out


def test_a_bucket_that_helps_takes_the_place_of_the_usual_one():
    search, _ = played(lambda plan: 1.4 if DDP(bucket_mib=1) in plan.techniques else 1.0)
    assert search.conclusion.plan == Plan([DDP(bucket_mib=1)])


def test_a_guilty_technique_is_found_beside_what_the_ranks_need():
    search, asked = played(faster, kept=lambda plan: "host_allocator" not in plan.names)
    assert search.conclusion.plan == Plan([DDP(), FUSED()])
    judged = [request.plan for request in asked if isinstance(request, Verify)]
    assert NEEDED in judged
    assert all("ddp" in plan.names for plan in judged)


def test_ranks_that_train_another_model_whatever_the_plan_end_the_search():
    search, asked = played(faster, kept=lambda plan: False)
    assert search.conclusion.plan == NEEDED
    assert search.conclusion.outcome == Outcome.NONE_KEPT
    assert search.conclusion.reason == "not the same model with nothing but ddp: the loss"
    assert [request.plan for request in asked if isinstance(request, Verify)][1:] == [NEEDED]


def test_the_waterfall_begins_above_what_the_ranks_need():
    plan = Plan([HOST(), DDP(bucket_mib=1), FUSED()])
    first, second, third = prefixes(plan, NEEDED)
    assert (first, second, third) == (Plan([HOST(), DDP()]), Plan([HOST(), DDP(bucket_mib=1)]), plan)
    assert prefixes(Plan([HOST(), FUSED()]), Plan()) == [Plan([HOST()]), Plan([HOST(), FUSED()])]


@pytest.fixture
def profile():
    return Profile("cpu", 0.1, {"data": 0.2, "forward": 0.8}, {}, 9, 0.0, 60 * 2**20, 1, {"num_threads": 1})


def test_the_profile_of_ranks_knows_their_exchange(profile):
    seconds = {"data": 0.0, "compute": 0.03, "communication": 0.01}
    found = of_ranks(profile, {"ranks": 4, "step_seconds": 0.04, "seconds": seconds}, 2)
    assert found.step_seconds == 0.04
    assert found.shares == pytest.approx({"data": 0.15, "forward": 0.6, "communication": 0.25})
    machine = dataclasses.replace(Machine.from_dict(_machine()), num_cores=8)
    assert DDP.gain(found, machine)[1] == pytest.approx(4 / 3)
    assert [one.bucket_mib for one in DDP.candidates(found, machine)] == [5, 1, 100, 400]
    updating = dataclasses.replace(found, shares={"update": 0.4, "communication": 0.25})
    assert find("fsdp").gain(updating, machine)[1] == pytest.approx(1 / (1 - 0.4 * 3 / 4))
    assert find("fsdp").gain(profile, machine)[1] == 1.0
    small = dataclasses.replace(found, parameter_bytes=2**19)
    assert DDP.candidates(small, machine) == []
    threads = find("cpu_threads").candidates(found, machine)
    assert [one.num_threads for one in threads] == [4, 2]  # two of the ranks share the eight cores
    assert find("gradient_compression").gain(found, machine)[1] == pytest.approx(4 / 3)


@pytest.mark.parametrize("memory", [None, 2**30])
def test_what_acts_between_ranks_is_not_tried_in_one_process(profile, memory):
    machine = Machine.from_dict(_machine())
    (device,) = (one for one in machine.devices if one.kind == "cpu")
    for devices, hinted in (((device,), set()), ((device, device), {"ddp"})):  # which says how to use both
        alone = dataclasses.replace(machine, devices=devices)
        offered, ruled_out = candidates(profile, alone, allow=Numerics.SEMANTICS, memory=memory)
        between = {"ddp", "gradient_compression"}
        assert between & {one.technique.name for one in offered} == hinted
        assert between & {one.technique.name for one in ruled_out} == between - hinted
    ranks = dataclasses.replace(
        profile, features={**profile.features, "ranks": 2}, shares={"communication": 0.5}
    )
    offered, _ = candidates(ranks, machine, allow=Numerics.SEMANTICS, memory=memory)
    assert {one.technique.name for one in offered} >= between


def _machine():
    import vivace

    return vivace.inspect().to_dict()


def test_what_ranks_cannot_be_searched_for_is_refused():
    with pytest.raises(
        InputError, match="4 ranks average their gradients, which rounds, and EXACT is allowed"
    ):
        require_searchable(4, Numerics.EXACT)
    require_searchable(2, Numerics.ROUNDING)


def test_statistics_of_a_share_need_to_be_allowed():
    require_allowed(2, Numerics.SEMANTICS, Numerics.SEMANTICS)
    with pytest.raises(InputError, match=r"promises SEMANTICS whatever the plan \(BatchNorm .*--allow sem"):
        require_allowed(2, Numerics.SEMANTICS, Numerics.ROUNDING)


def test_one_process_needs_nothing():
    assert needed_by(1) == Plan()
    assert needed_by(2) == NEEDED


def test_the_other_ranks_return_what_rank_0_found_and_its_page_says_where(tmp_path):
    trial = Trial(NEEDED.to_dict(), NEEDED.id, "m", "j", "refused", reason="it never acts")
    known = {"baselines": {"strict_fp32": 9.0}, "baseline_notes": {}, "input_pipeline": {"plan": ONE}}
    verdict = Verdict(True, "rounding", 1.0, 1.0, 3, 8, "", seconds=1.0)
    result = Result(
        Plan([DDP(), FUSED()]),
        str(tmp_path / "plan.toml"),
        Ratio(1.5, 1.4, 1.6),
        **known,
        verdict=verdict,
        break_even_steps=3,
        waterfall=[],
        trials=[trial],
        report_path=str(tmp_path / "report.html"),
        seconds=60.0,
        outcome=Outcome.FASTER,
        reference=NEEDED,
        ranks=2,
        over_one_rank=1.7,
    )
    document = json.loads(json.dumps(result.to_dict()))
    assert Result.from_dict(document).to_dict() == result.to_dict()
    facts = {"trials": (trial,), "profile": {}, "metrics": (), "training": {}}
    run = {"job": {"name": "job.py:job"}, "command": "torchrun"}
    shown = answer(Content(tmp_path, run=run, result=document, verdict=document["verdict"], **facts))
    assert shown.next == (
        f"torchrun --nproc-per-node 2 -m vivace train job.py:job --plan {tmp_path / 'plan.toml'}",
    )
    assert any(
        "2 ranks together" in note and "1.70\N{MULTIPLICATION SIGN} as fast as one" in note
        for note in shown.notes
    )


def until_then_ended(begin_torchrun, condition, folder, out, scene=SCENE):
    """The document of a search that is told to end, by SIGTERM to torchrun, once a condition holds."""
    # of so many steps that no warm-up, which a loaded machine makes long, decides
    words = ["tune", f"{scene}:job", "--budget", "500", "--steps", "2000", "--out", str(out), "--json"]
    launch = begin_torchrun(words, folder, HURRIED)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and launch.process.is_alive() and not condition():
        time.sleep(0.2)
    started = psutil.Process(launch.pid).children(recursive=True)
    os.kill(launch.pid, signal.SIGTERM)
    code, output, errors = launch.end(100)
    assert code
    assert output, errors
    _, left = psutil.wait_procs(started, timeout=20)
    assert not left
    return json.loads(output)


@pytest.fixture(scope="module")
def found(begin_torchrun, tmp_path_factory):
    """A whole search on two ranks: what it wrote to each stream, and its folder."""
    folder = tmp_path_factory.mktemp("found")
    words = ["tune", f"{SCENE}:job", "--budget", "40", "--steps", "2000", "--out", "tune", "--json"]
    code, output, errors = begin_torchrun(words, folder, HURRIED).end()
    assert code == 0, errors
    return output, errors, folder / "tune"


@pytest.mark.slow
def test_a_launch_finds_a_plan_that_a_launch_trains(found, forked_torchrun, tmp_path):
    output, errors, out = found
    (document,) = [json.loads(line) for line in output.splitlines()]
    assert {"ddp", "planted_quick"} <= set(document["plan"])
    assert not {"planted_death", "planted_lie"} & set(document["plan"])
    assert document["speedup"]["low"] > 1.0
    assert (document["ranks"], document["outcome"]) == (2, "faster")
    assert (document["verdict"]["kept"], document["verdict"]["promise"]) == (True, "rounding")
    tried = [trial for trial in document["trials"] if trial["status"] != "refused"]
    assert all("ddp" in trial["techniques"] for trial in tried)
    broken = [one["plan"] for one in Ledger(out / "ledger.jsonl").read("verdict") if not one["kept"]]
    assert broken
    assert all("planted_lie" in plan for plan in broken)
    assert errors.count("-m vivace train") == 1
    words = ["train", f"{SCENE}:job", "--plan", str(out / "plan.toml"), "--out", "run", "--json"]
    code, output, errors = forked_torchrun(words)
    assert code == 0, errors
    assert {json.loads(line)["steps"] for line in output.splitlines()} == {16}


@pytest.mark.slow
def test_a_launch_divides_the_weights_where_they_do_not_fit_otherwise(forked_torchrun, tmp_path):
    """Adam's 18 MiB of the model, its states and gradients are 14 on each of two ranks that divide them."""
    words = ["--budget", "20", "--memory", "16MiB", "--out", "tune", "--json"]
    words = ["tune", f"{SCENE.with_name('divided.py')}:job", *words]
    code, output, errors = forked_torchrun(words, program=HURRIED)
    assert code == 0, errors
    (document,) = [json.loads(line) for line in output.splitlines()]
    assert "fsdp" in document["plan"]
    assert document["outcome"] in ("fits", "faster")
    assert (document["verdict"]["kept"], document["memory_bytes"]) == (True, 16 * 2**20)
    measured = [trial["techniques"] for trial in document["trials"] if trial["status"] == "measured"]
    assert measured[0] == {"fsdp": {}}
    assert "within 16.0 MiB" in errors
    setting = Ledger(tmp_path / "tune" / "ledger.jsonl").read("search")[0]
    assert setting["peak_bytes"] > 16 * 2**20


@pytest.mark.slow
def test_a_process_that_dies_on_one_rank_ends_its_trial_on_all(found):
    tried = Ledger(found[2] / "ledger.jsonl").trials()
    deaths = [trial for trial in tried if "planted_death" in trial.techniques]
    assert any("on rank 1: the process died from SIGABRT" in trial.reason for trial in deaths)
    assert {trial.status for trial in deaths} <= {"failed", "refused"}


@pytest.mark.slow
@pytest.mark.fault(13, 22, 37)
def test_a_rank_that_fails_inside_a_trial_is_named_with_its_cause_and_the_search_goes_on(
    begin_torchrun, tmp_path
):
    """Rank 1 runs out of memory in one trial, hangs in another and is stopped in a third."""
    out, faults = tmp_path / "tune", ("crowd", "hang", "stop")
    ledger = Ledger(out / "ledger.jsonl")

    def tried():
        """The first trial with each of the faults, without another one."""
        found = [(trial, set(trial.techniques) - {"ddp", "planted_quick"}) for trial in ledger.trials()]
        return [next((t for t, own in found if own == {f"planted_{name}"}), None) for name in faults]

    scene = SCENE.with_name("faulty.py")
    document = until_then_ended(begin_torchrun, lambda: all(tried()), tmp_path, out, scene)
    crowd, hang, stop = tried()
    assert (crowd.code, hang.code, stop.code) == (Code.OUT_OF_MEMORY, Code.TIMED_OUT, Code.TIMED_OUT)
    assert "on rank 1: out of memory: OutOfMemoryError: CUDA out of memory" in crowd.reason
    assert re.match(r"no answer to 'warm' within \d+ s: rank 1 \(process \d+ on ", hang.reason)
    assert re.search(r"and stands still at faulty.py:\d+ in fail; rank 0 waits for it$", hang.reason)
    assert re.match(r"no answer to 'warm' within \d+ s: rank 1 \(process \d+ on ", stop.reason)
    assert stop.reason.endswith("it is stopped (SIGSTOP); rank 0 waits for it")
    assert max(trial.seconds for trial in (crowd, hang, stop)) < 10.0 + GRACE_SECONDS
    assert {"ddp", "planted_quick"} <= set(document["plan"])
    assert not {f"planted_{name}" for name in faults} & set(document["plan"])


@pytest.fixture
def stopped_once(begin_torchrun, tmp_path):
    """``(condition, program) -> (id, exit code, document)`` of a search on two ranks, of which the second
    is stopped once a condition holds of its process, whose id that is. Rank 0 must end by itself.
    """

    def start(condition, program=HURRIED):
        words = ["tune", f"{SCENE}:silent", "--budget", "500", "--out", str(tmp_path / "tune"), "--json"]
        launch = begin_torchrun(words, tmp_path, program)
        files = [tmp_path / f"process_{rank}" for rank in range(2)]

        def ranks():
            known = all(file.exists() and file.read_text().endswith("\n") for file in files)
            return [psutil.Process(int(file.read_text())) for file in files] if known else []

        try:
            deadline = time.monotonic() + 300
            while not ranks() or not condition(ranks()[1]):
                assert launch.process.is_alive(), launch.end()
                assert time.monotonic() < deadline, "the search did not get so far"
                time.sleep(0.2)
            first, second = ranks()
            second.suspend()
            psutil.wait_procs([first], timeout=200)
            second.kill()  # else torchrun waits for it
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(launch.pid).children(recursive=True):
                    process.kill()
        code, output, _ = launch.end(100)
        return second.pid, code, json.loads(output)

    return start


@pytest.mark.slow
@pytest.mark.fault(13)
def test_a_rank_that_falls_silent_before_its_child_begins_ends_the_search_long_before_the_trials_time(
    stopped_once,
):
    """A trial has half of the time that is left, 250 s; a rank is given up after 8."""
    second, code, document = stopped_once(
        lambda process: process.status() == psutil.STATUS_STOPPED, program=SCENE.with_name("deaf.py")
    )
    assert code == 1
    text = document["error"]["message"]
    assert re.match(rf"rank 1 \(process {second} on \S+\) has given no answer for \d+ s: it is stopped", text)
    assert int(re.search(r"for (\d+) s", text)[1]) < 100


@pytest.mark.slow
@pytest.mark.fault(13)
def test_a_rank_that_falls_silent_ends_the_search_with_the_best_so_far(stopped_once, tmp_path):
    """Its own process is stopped, from outside, beside a child that works on."""
    out = tmp_path / "tune"
    ledger = Ledger(out / "ledger.jsonl")
    second, code, document = stopped_once(lambda _: measured(ledger))
    assert code == 1
    text = document["error"]["message"]
    assert text.startswith(f"rank 1 (process {second} on ")
    assert re.search(r"has given no answer for \d+ s: it is stopped \(SIGSTOP\): the search ended", text)
    assert text.endswith(f"the best so far stands in '{out / 'plan.toml'}'")
    kept = tomllib.loads((out / "plan.toml").read_text())["techniques"]
    if kept == {"ddp": {}}:  # on a loaded machine the first may show nothing
        assert all(trial.ratio.low <= 1.0 for trial in measured(ledger))
    else:
        assert kept in [trial.techniques for trial in measured(ledger)]


def measured(ledger):
    """The candidates that have been timed."""
    return [trial for trial in ledger.trials() if trial.ratio and trial.role == "candidate"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("longer", "rank 0 has 8 batches and rank 1 has 9: give every rank the same data"),
        ("normed", "on 2 ranks this job promises SEMANTICS whatever the plan"),
    ],
)
def test_what_ranks_cannot_train_is_one_sentence(command_on_ranks, name, sentence):
    codes, errors = command_on_ranks("tune", f"{SCENE}:{name}", "--budget", "30", "--out", "tune")
    assert codes[0] == 2
    (said,) = [line for line in errors.splitlines() if line.startswith("vivace: ")]
    assert sentence in said


@pytest.mark.slow
def test_a_later_launch_builds_on_the_first_and_keeps_its_best_when_told_to_end(
    begin_torchrun, found, tmp_path
):
    out = tmp_path / "tune"
    shutil.copytree(found[2], out)
    ledger = Ledger(out / "ledger.jsonl")
    earlier = len(measured(ledger))

    def faster():  # on a loaded machine the first may show nothing
        return [trial.techniques for trial in measured(ledger)[earlier:] if trial.ratio.low > 1.0]

    document = until_then_ended(begin_torchrun, faster, tmp_path, out)
    assert document.get("interrupted"), document
    assert document["plan"] in faster()
    assert "ddp" in document["plan"]
    assert tomllib.loads((out / "plan.toml").read_text())["techniques"] == document["plan"]
