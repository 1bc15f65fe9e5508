"""After any sequence of steps, deaths, damage and changes of ranks: the weights of an unbroken run."""

import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from vivace.errors import CheckpointError
from vivace.training.training import train

STEADY = Path(__file__).parent / "scenes" / "steady.py"
SETTINGS = settings(
    max_examples=12,
    stateful_step_count=8,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class Run(RuleBasedStateMachine):
    """A run in one folder; what it must hold is read from an unbroken one's weights after each step."""

    def __init__(self, scene, weights, folder, launch_ranks):
        super().__init__()
        self.scene, self.weights, self.folder, self.launch_ranks = scene, weights, folder, launch_ranks
        shutil.rmtree(self.folder, ignore_errors=True)
        self.damaged, self.on_several = set(), False

    def expected(self):
        """The step from which it must go on: 0 where nothing was saved, None where that is refused."""
        found = {
            (int(path.name.removeprefix("step_")), path.stat().st_mtime_ns)
            for path in self.folder.glob("checkpoints/step_*")
        }
        left = found - self.damaged
        return max(left)[0] if left else None if found else 0

    def begin(self, num, dies_in=None, **options):
        """Train `num` more steps in this process, from where it must go on; where that is refused, anew."""
        steps, at = self.scene.Steps, self.expected()
        steps.taken, steps.dies_in = 0, dies_in
        more = {"out": self.folder, "resume": True, "checkpoint_every_steps": 2, **options}
        if at is None:
            with pytest.raises(CheckpointError):
                train(self.scene.job, **more)
            more |= {"resume": False, "restart": True}
            self.damaged, self.on_several, at = set(), False, 0
        end = min(at + num, self.scene.STEPS)
        return end, train(self.scene.job, max_steps=end, **more)

    def check(self, step):
        """The weights are those after so many steps, to the bit; to rounding once several ranks trained."""
        found = torch.load(self.folder / "model.pt", weights_only=True)
        for name, wanted in self.weights[step].items():
            if self.on_several:
                assert torch.allclose(found[name], wanted, rtol=1e-4, atol=1e-6), name
            else:
                assert torch.equal(found[name], wanted), name

    @rule(num=st.integers(1, 4))
    def train_on(self, num):
        at = self.expected()
        end, run = self.begin(num)
        assert run.steps == end
        assert (run.resumed_from_step or 0) == (at or 0)
        self.check(end)

    @precondition(lambda self: self.expected() not in (None, self.scene.STEPS))
    @rule(num=st.integers(1, 4))
    def die(self, num):
        with pytest.raises(self.scene.Killed):
            self.begin(num + 1, dies_in=min(num, self.scene.STEPS - self.expected()))

    @precondition(lambda self: self.expected())
    @rule(name=st.sampled_from(("model.pt", "state.pt", "MANIFEST.json")), place=st.floats(0, 0.99))
    def damage_the_newest(self, name, place):
        step = self.expected()
        checkpoint = self.folder / "checkpoints" / f"step_{step}"
        path = checkpoint / name
        content = bytearray(path.read_bytes())
        content[int(place * len(content))] ^= 0xFF
        path.write_bytes(content)
        self.damaged.add((step, checkpoint.stat().st_mtime_ns))

    @precondition(lambda self: self.expected() not in (None, self.scene.STEPS))
    @rule(num=st.integers(1, 3))
    def train_on_two_ranks(self, num):
        at = self.expected()
        end = min(at + num, self.scene.STEPS)
        ranks = self.launch_ranks(
            "job", {"out": str(self.folder), "resume": True, "max_steps": end}, file=STEADY
        )
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].answer
        assert (ranks[0].answer["resumed_from_step"] or 0) == at
        self.on_several = True
        self.check(end)


@pytest.mark.slow
@pytest.mark.fault(1, 4, 30, 32, 34)
@pytest.mark.usefixtures("one_thread")
def test_any_sequence_ends_in_the_weights_of_an_unbroken_run(launch_ranks, tmp_path):
    scene = SimpleNamespace(**runpy.run_path(str(STEADY)))
    weights = []
    for step in range(scene.STEPS + 1):
        if step:
            train(scene.job, out=tmp_path / "whole", restart=step > 1, max_steps=step)
        weights.append(torch.load(tmp_path / "whole" / "model.pt", weights_only=True) if step else {})
    given = scene, weights, tmp_path / "run", launch_ranks
    run_state_machine_as_test(lambda: Run(*given), settings=SETTINGS)
