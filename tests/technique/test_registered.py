"""Techniques that a stranger registers: all that Vivace's own can ask for is in the contract."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import vivace
from vivace.errors import PlanError, Refused, TechniqueWarning
from vivace.exporting.plans import in_words
from vivace.ledger import Ledger
from vivace.measuring.worker import Worker
from vivace.mechanisms.recompute import Recomputer
from vivace.memory import choosing
from vivace.memory.costs import measure
from vivace.memory.planner import KEEP, Choice, Decision
from vivace.observing.observe import observe
from vivace.plan import Plan
from vivace.processes.launch import Source
from vivace.session.opening import start
from vivace.technique import Card, Numerics, Seam, Stage, Technique, Way, registry
from vivace.technique.facts import Facts
from vivace.testing import TINY_JOBS
from vivace.training import survival
from vivace.training.ranks import Ranks, joined
from vivace.tuning.bench import Bench
from vivace.tuning.budget import smaller_plans
from vivace.tuning.candidates import stricter

ROOT = Path(vivace.__file__).parent


def card(stage=Stage.DATA, **more):
    return Card(stage=stage, numerics=Numerics.EXACT, summary="counts", source="here", **more)


def test_no_hook_of_a_technique_is_found_by_its_name_alone():
    """A hook that the core calls is an attribute of Technique, with a default, and is called as one."""
    hooks = {name for name in vars(Technique) if not name.startswith("_")}
    asked = [
        f"{path.relative_to(ROOT)}, line {call.lineno}: {call.args[1].value}"
        for path in ROOT.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("getattr", "hasattr")
        and len(call.args) > 1
        and isinstance(call.args[1], ast.Constant)
        and call.args[1].value in hooks
    ]
    assert asked == []


@pytest.mark.parametrize("name", registry.own_names())
def test_a_technique_has_no_public_attribute_beside_the_contract_and_its_settings(name):
    cls = registry.find(name)
    settings = {field.name for field in dataclasses.fields(cls)}
    public = {attribute for attribute in vars(cls) if not attribute.startswith("_")}
    assert public - settings <= set(dir(Technique)) | {"card", "name"}


@pytest.mark.parametrize("later", [False, True])
def test_a_later_pass_is_measured_where_the_first_differs(register, later):
    read = []

    @register
    @dataclasses.dataclass(frozen=True)
    class Counting(Technique):
        card = card()
        name = "counting"
        first_pass_differs = later

        def apply(self, build):
            def batches(following, loader):
                for batch in following(loader):
                    read.append(len(read))
                    yield batch

            build.wrap(Seam.BATCHES, batches)

    worker = Worker(TINY_JOBS["mlp"](), vivace.inspect().to_dict())
    worker.open({"counting": {}})
    try:
        assert len(read) == (4 if later else 0)  # batches of an epoch
    finally:
        worker.session.close()


def parallel(register, name, after=()):
    cls = type(name, (Technique,), {"card": card(Stage.PARALLEL, after=after), "name": name})
    return register(dataclasses.dataclass(frozen=True)(cls))


@pytest.fixture
def two_ranks(tmp_path, monkeypatch):
    """A process group of one that says that it is two."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(
        torch.distributed,
        "all_gather_object",
        lambda found, own: found.__setitem__(slice(None), [own] * len(found)),
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("after", [(), ("ddp",)])
def test_what_builds_on_another_technique_acts_behind_it(register, after):
    cls = parallel(register, "adaptive_compression", after)
    cls.apply = lambda self, build: build.require(build.parallel, "no gradients are exchanged")
    plan = Plan.from_dict({"ddp": {}, "adaptive_compression": {}})
    if after:
        assert plan.names == ("ddp", "adaptive_compression")
        start(TINY_JOBS["mlp"](), plan, vivace.inspect()).close()
    else:  # the alphabet
        with pytest.raises(Refused, match="no gradients are exchanged"):
            start(TINY_JOBS["mlp"](), plan, vivace.inspect())


def test_the_order_is_the_same_whatever_else_is_in_the_plan(register):
    first, second, third = (
        parallel(register, name, after)
        for name, after in (("c", ("ddp",)), ("b", ("c",)), ("a", ("b", "ddp")))
    )
    ddp = registry.find("ddp")
    assert Plan([third(), second(), first(), ddp()]).names == ("ddp", "c", "b", "a")
    assert Plan([third(), first()]).names == ("c", "a")
    assert [cls.name for cls in registry.everything() if cls.card.stage == Stage.PARALLEL] == [
        *("ddp", "fsdp", "c", "gradient_compression", "b", "a")
    ]


def test_an_order_that_cannot_be_kept_is_refused_at_registration(register):
    with pytest.raises(PlanError, match=r"'b' acts after 'ddpp', which is unknown; did you mean 'ddp'"):
        parallel(register, "b", ("ddpp",))
    with pytest.raises(PlanError, match=r"'b' acts after 'tf32', but in the stage PARALLEL, and 'tf32' in "):
        parallel(register, "b", ("tf32",))
    with pytest.raises(PlanError, match=r"'b' would act after itself: b"):
        parallel(register, "b", ("b",))
    assert "b" not in registry.names()
    parallel(register, "b")
    parallel(register, "c", ("b",))
    with pytest.raises(PlanError, match=r"'b' would act after itself: b after c"):
        parallel(register, "b", ("c",))
    assert registry.find("b").card.after == ()


CROWDED = """
import dataclasses
import torch
import vivace
from vivace.technique import Card, Numerics, Stage

ROOM = []


@vivace.register
@dataclasses.dataclass(frozen=True)
class Shrink(vivace.Technique):
    card = Card(Stage.MEMORY, Numerics.EXACT, "makes room", "here", saves_memory="states")
    name = "shrink"

    def apply(self, build):
        ROOM.append(1)
        build.on_close(ROOM.clear)


def loss(model, batch):
    if not ROOM:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return model(batch).square().mean()


job = vivace.Job(
    model=lambda: torch.nn.Linear(4, 1),
    data=lambda: [torch.ones(2, 4)] * 4,
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
"""


@pytest.mark.slow
def test_a_strangers_technique_is_the_rescue_of_a_job_that_does_not_fit(register, tmp_path):
    """`register` here only puts things back: the job's file registers the technique, when it is loaded."""
    (tmp_path / "crowded.py").write_text(CROWDED)
    source, ledger = Source(f"{tmp_path}/crowded.py:job"), Ledger(tmp_path / "ledger.jsonl")
    bench = Bench(source, vivace.inspect(), ledger, lambda *_: None, allow=Numerics.EXACT, memory=None)
    try:
        bench.check()
        assert bench.base.names == ("shrink",)
    finally:
        bench.close()


def test_what_would_fit_and_what_eases_the_blocks_name_a_strangers_technique(register):
    cls = dataclasses.dataclass(frozen=True)(
        type("Aaa", (Technique,), {"card": card(Stage.MEMORY, saves_memory="states"), "name": "aaa"})
    )
    assert "aaa" not in [cls.name for cls in registry.savers("cpu", Numerics.EXACT)]
    register(cls)
    reliefs = choosing._reliefs("cpu", Numerics.EXACT)
    assert [[one.name for one in each] for each in reliefs] == [["aaa"], ["optimizer_in_backward"]]
    reliefs = choosing._reliefs("cpu", Numerics.ROUNDING)
    assert [[one.name for one in each] for each in reliefs] == [
        *(["aaa"], ["optimizer_in_backward"], ["channels_last"]),
        *(["channels_last", "aaa"], ["channels_last", "optimizer_in_backward"]),
        *(["bf16_autocast"], ["bf16_autocast", "channels_last"], ["micro_batches"], ["micro_batches"]),
    ]
    with start(TINY_JOBS["mlp"](), Plan(), vivace.inspect()) as session:
        assert "a plan with aaa or checkpoint" in survival._would_fit(session)


def test_a_strangers_way_to_run_a_block_is_chosen_among(register):
    @register
    @dataclasses.dataclass(frozen=True)
    class Forget(Technique):
        card = card(Stage.MEMORY, saves_memory="activations", by_block=True)
        name = "forget"
        blocks: tuple[str, ...] = ("*",)

        @classmethod
        def ways(cls, build, block):
            recomputer = Recomputer(build.device, cls.name)
            return {"mine": Way(recomputer.around, recomputer.released)}

        @classmethod
        def deciding(cls, chosen):
            return cls(blocks=chosen("mine"))

    nn = torch.nn
    alike = [nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(), nn.Linear(64, 8)) for _ in range(3)]
    model = nn.Sequential(*alike, nn.Linear(8, 4))
    job = dataclasses.replace(TINY_JOBS["mlp"](), model=lambda: model)
    with start(job, Plan(), vivace.inspect()) as session:
        parts = measure(session, next(iter(job.data())), Numerics.EXACT)
    names = [part.name for part in parts]
    mine, theirs = Choice("forget", "mine"), Choice("checkpoint", "cheap")
    for options in (part.options for part in parts if part.name):
        assert {mine, theirs} <= {option.name for option in options}
    blocks = [name for name in names if name]
    picked = dict.fromkeys(blocks, mine) | {blocks[0]: theirs}
    plan = choosing.plan_of(Decision(tuple(picked.get(n, KEEP) for n in names), 0, 0.0), names, Plan())
    assert plan.to_dict() == {
        "checkpoint": {"blocks": (blocks[0],), "cheap": (blocks[0],)},
        "forget": {"blocks": tuple(blocks[1:])},
    }
    every = tuple(mine if name else KEEP for name in names)
    assert choosing.plan_of(Decision(every, 0, 0.0), names, Plan()).to_dict() == {"forget": {}}


def test_what_takes_less_room_or_stands_beside_the_result_may_be_a_strangers(register):
    for name, said in (("lean", {"lowers_peak": True}), ("plain_speed", {"baseline": "as_others_do"})):
        cls = type(name, (Technique,), {"card": card(Stage.MODEL, **said), "name": name})
        register(dataclasses.dataclass(frozen=True)(cls))
    assert ["lean"] in [[t.name for t in each] for each in choosing._reliefs("cpu", Numerics.EXACT)]
    assert [cls.name for cls in registry.baselines("cuda")] == ["plain_speed", "tf32"]
    assert [cls.card.baseline for cls in registry.baselines("cpu")] == ["as_others_do"]


def test_a_run_that_is_out_of_memory_goes_on_with_a_strangers_pieces(register, monkeypatch):
    @register
    @dataclasses.dataclass(frozen=True)
    class Slices(Technique):
        card = card(Stage.MEMORY, cuts_batches=True)
        name = "slices"
        count: int = 3

        def apply(self, build):
            pass

        @property
        def pieces(self):
            return self.count

        @classmethod
        def in_pieces(cls, num):
            return cls(count=num)

    def out_of_memory(batch):
        raise torch.OutOfMemoryError("no room")

    batch = next(iter(TINY_JOBS["mlp"]().data()))
    for plan, wanted in ((Plan([Slices()]), {"slices": {"count": 6}}), (Plan(), {"slices": {"count": 2}})):
        with start(TINY_JOBS["mlp"](), plan, vivace.inspect()) as session:
            monkeypatch.setattr(session, "step", out_of_memory)
            run = survival.Survival(session, Ranks())
            run.savers.append("checkpoint")  # which comes first, and was not enough
            with pytest.raises(survival.Smaller) as smaller:
                run.step(batch)
        assert smaller.value.plan.to_dict() == wanted


def test_ranks_are_averaged_by_whatever_says_so(register, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    cls = parallel(register, "gossip")
    with (
        pytest.raises(PlanError, match=r"add \[techniques.ddp\] or \[techniques.fsdp\] to the plan"),
        joined(Plan([cls()])),
    ):
        pass
    cls.card = dataclasses.replace(cls.card, averages_ranks=True)
    with pytest.raises(PlanError, match=r"\[techniques.fsdp\] or \[techniques.gossip\]"), joined(Plan()):
        pass
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **_: None)
    with joined(Plan([cls()])) as ranks:
        assert (ranks.rank, ranks.world_size) == (1, 2)


def test_a_session_forgets_what_its_techniques_recorded(register):
    """A technique that replays a recorded step: the rehearsal dictates another loss, and it must follow."""

    @register
    @dataclasses.dataclass(frozen=True)
    class Replaying(Technique):
        card = card(Stage.CAPTURE, captures=True)
        name = "replaying"

        def apply(self, build):
            recorded = []

            def step(following, batch):
                if not recorded:
                    recorded.append(following(batch))
                return recorded[0]

            build.wrap(Seam.STEP, step)
            build.on_forget(recorded.clear)

    job = TINY_JOBS["mlp"]()
    batches = list(job.data())
    with start(job, Plan([Replaying()]), vivace.inspect()) as session:
        first = session.step(batches[0])
        assert session.step(batches[1]) is first
        session.forget()
        assert session.step(batches[1]) is not first


def test_notes_are_a_techniques_own_and_facts_are_for_all(register):
    """Nobody mistakes a stranger's note for a fact of the step, whatever its name."""
    words = [field.name for field in dataclasses.fields(Facts)]

    @register
    @dataclasses.dataclass(frozen=True)
    class Noting(Technique):
        card = card(Stage.PROCESS)
        name = "aaa_noting"

        def apply(self, build):
            build.notes.update(dict.fromkeys(words, "mine"))

    job = TINY_JOBS["mlp"]()
    plan = Plan.from_dict({"aaa_noting": {}, "optimizer_in_backward": {}, "micro_batches": {}})
    batches = list(job.data())
    with start(job, plan, vivace.inspect()) as session:
        session.step(batches[0])
        seen = observe(session, batches)
    assert {seen.notes[word] for word in words} == {"mine"}
    assert seen.facts.pop("updates_in_backward") >= 4  # weights
    assert seen.facts == {"batches_per_step": 1, "pieces": 2}


class Fails(Technique):
    """Every hook of it raises."""

    name = "fails"
    card = card(Stage.MEMORY, saves_memory="activations")

    @classmethod
    def rescues(cls):
        raise KeyError("setting")

    def apply(self, build):
        raise KeyError("layer")

    refined = stricter = plain = lambda self: self.nothing


@pytest.mark.filterwarnings("ignore::vivace.errors.TechniqueWarning")
def test_a_technique_whose_hooks_raise_costs_no_other_its_place(register):
    others = list(smaller_plans("cpu", Numerics.ROUNDING))
    register(Fails)
    with pytest.warns(TechniqueWarning, match="'fails' cannot say what saves memory: KeyError: 'setting'"):
        assert list(smaller_plans("cpu", Numerics.ROUNDING)) == others
    broken = Plan([Fails(), registry.find("fused_optimizer")()])
    with pytest.warns(TechniqueWarning, match="'fails' cannot say what would be stricter: AttributeError"):
        assert stricter(broken, set()) is None
    with pytest.warns(TechniqueWarning, match="'fails' cannot say itself in plain PyTorch"):
        assert "fails" in in_words(broken)


def test_a_technique_that_raises_as_it_acts_is_refused_by_name(register):
    register(Fails)
    model = torch.nn.Linear(2, 1)
    given = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": lambda model, batch: model(batch).mean(),
    }
    with pytest.raises(Refused, match=r"^fails: it fails on this job: KeyError: 'layer'"):
        vivace.attach(Plan([Fails()]), model=model, **given)
    vivace.attach(Plan(), model=model, **given).close()
