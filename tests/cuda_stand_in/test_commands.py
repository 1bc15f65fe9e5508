"""What a person types on a GPU that computes: a plan is verified and profiled, a killed run goes on."""

import json
from pathlib import Path

import pytest

JOB = f"{Path(__file__).with_name('job.py')}:job"
PLAN = """format = 1

[techniques.bf16_autocast]

[techniques.fused_optimizer]

[techniques.cuda_graph_step]

[techniques.pinned_prefetch]
"""
TYPED = """
import contextlib, io, json, sys
from vivace.command.cli import main

for words in json.loads(sys.argv[1]):
    sys.argv, printed, code = ["vivace", *words], io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(printed):
            main()
    except SystemExit as end:
        code = end.code or 0
    print(json.dumps([code, printed.getvalue()]))
"""


@pytest.fixture(scope="module")
def typed(stand_in, tmp_path_factory):
    """Exit code and printed document of each command, typed one after the other."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "plan.toml").write_text(PLAN)
    commands = {
        "verify": ["verify", JOB, "--plan", folder / "plan.toml"],
        "profile": ["profile", JOB, "--plan", folder / "plan.toml", "--out", folder / "profile"],
    }
    words = json.dumps([[str(word) for word in (*each, "--json")] for each in commands.values()])
    lines = stand_in.python(TYPED, words, computes=True).splitlines()
    found = {name: json.loads(line) for name, line in zip(commands, lines, strict=True)}
    return {name: (code, json.loads(printed)) for name, (code, printed) in found.items()}


def test_verify_keeps_a_right_plan(typed):
    code, found = typed["verify"]
    assert (code, found["kept"], found["promise"]) == (0, True, "rounding")


def test_a_profile_of_a_captured_step_ends(typed):
    """Its optimizer is not called again: the recorder once waited for it for minutes."""
    code, found = typed["profile"]
    assert code == 0
    assert any("a CUDA graph replays them as one" in reason for reason in found["missing"])
    assert found["shares"]["forward"] > 0
    assert Path(found["page_path"]).is_file()


KILLED = """
import json, os, sys
from pathlib import Path
import torch, vivace

job, plan, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
def train(out, **settings):
    child = os.fork()
    if child == 0:
        vivace.train(job, plan, out=folder / out, checkpoint_every_steps=5, **settings)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def dies(event):
    if event.kind == "checkpoint" and event.payload["step"] == 10:
        os.kill(os.getpid(), 9)
print(train("whole"), train("killed", on_event=dies), train("killed", resume=True))
models = [torch.load(folder / out / "model.pt", map_location="cpu") for out in ("whole", "killed")]
print(all(torch.equal(models[0][name], models[1][name]) for name in models[0]))
print(json.loads((folder / "killed" / "run.json").read_text())["resumed_from_step"])
"""


def test_a_killed_training_goes_on_bit_for_bit(stand_in, tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    printed = stand_in.python(KILLED, JOB, tmp_path / "plan.toml", tmp_path, computes=True)
    assert printed.splitlines()[-3:] == ["0 -9 0", "True", "10"]
