import pytest
import torch
from torch import nn

import vivace
from vivace.mechanisms.blocks import find_blocks

PLANS = [{"checkpoint": {}}, {"compress_activations": {}}]


class Inner(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)


class Stage(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.parts = nn.Sequential(*(Inner() for _ in range(depth)))


def names(*models):
    return [block.name for block in find_blocks(models)]


def test_repeated_modules_are_blocks_in_lists_and_as_attributes():
    model = nn.Module()
    model.layers = nn.ModuleList(Inner() for _ in range(2))
    model.left, model.right, model.norm = Inner(8), Inner(8), nn.LayerNorm(4)
    assert names(model) == ["layers.0", "layers.1", "left", "right"]
    kinds = [block.kind for block in find_blocks([model])]
    assert kinds[0] == kinds[1] != kinds[2] == kinds[3]


def test_few_stages_are_cut_into_the_blocks_inside_of_them():
    model = nn.Module()
    model.stages = nn.Sequential(Stage(2), Stage(3))
    assert names(model) == [f"stages.0.parts.{i}" for i in range(2)] + [
        f"stages.1.parts.{i}" for i in range(3)
    ]


def test_stages_that_look_alike_are_cut_like_the_others():
    model = nn.Module()
    for number, depth in enumerate((3, 4, 2, 3)):
        setattr(model, f"layer{number}", nn.Sequential(*(Inner() for _ in range(depth))))
    wanted = [f"layer{n}.{i}" for n, depth in enumerate((3, 4, 2, 3)) for i in range(depth)]
    assert names(model) == wanted


def test_what_is_built_like_a_block_is_one_wherever_it_stands():
    model = nn.Module()
    model.stem = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.down = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(6))
    assert names(model) == ["stem", *(f"down.{i}" for i in range(6))]


def test_a_module_inside_of_its_own_kind_is_no_block():
    class Nested(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.body = Nested(depth - 1) if depth else nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))

    assert names(Nested(2)) == ["body.body.body.0-1", "body.body.body.2-3"]


def test_a_plain_sequential_is_cut_into_runs_unless_a_module_stands_in_it_twice():
    plain = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    assert names(plain) == ["0-2", "3-5", "6-7"]
    assert names(plain, nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == [
        "0.0-2",
        "0.3-5",
        "0.6-7",
        "1.0-0",
        "1.1-1",
    ]
    shared = nn.Linear(2, 2)
    assert names(nn.Sequential(shared, nn.ReLU(), shared)) == []
    assert names(nn.Linear(2, 2)) == []


def test_runs_compute_what_the_sequential_does():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    inputs = torch.randn(2, 3)
    wanted = model(inputs)
    plan = vivace.Plan.from_dict({"checkpoint": {}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, x: m(x).mean()) as session:
        assert torch.equal(session.step(inputs), wanted.mean())
        assert session.build.notes["recomputed_blocks"] == 3
    assert "forward" not in vars(model[0])


def test_a_block_inside_of_another_one_is_the_others():
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.more = inner, nn.Linear(4, 4)

    model = nn.Module()
    model.parts = nn.ModuleList(Inner() for _ in range(6))
    model.arounds = nn.ModuleList(map(Around, model.parts))
    assert names(model) == [f"arounds.{n}" for n in range(6)]


def step(model, plan, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = vivace.Plan.from_dict(plan)
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, x: m(x).mean()) as session:
        return session.step(batch)


class Tapped(nn.Module):
    """Reads what comes between the modules of its Sequential."""

    def __init__(self, way):
        super().__init__()
        self.way, self.net = way, nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))

    def forward(self, x):
        if self.way == "loop":
            seen = []
            for layer in self.net:
                seen.append(x)
                x = layer(x)
            return x + sum(seen)
        if self.way == "slices":
            first = self.net[:2](x)
            return self.net[2:](first) + first
        return self.net(x) + self.net[4](x)


@pytest.mark.parametrize("way", ["loop", "slices", "one"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_sequential_whose_modules_are_called_one_by_one_is_not_cut_into_runs(way, plan):
    with pytest.raises(vivace.Refused) as refused:
        step(Tapped(way), plan, torch.randn(3, 4))
    run = "net.3-5" if way == "one" else "net.0-2"
    assert str(refused.value) == (
        f"{next(iter(plan))}: '{run}' cannot be one block: the model calls its modules by themselves, "
        "and not their nn.Sequential"
    )


@pytest.mark.parametrize("plan", PLANS)
def test_a_hook_on_a_module_of_a_sequential_sees_that_modules_numbers(plan):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    batch, seen = torch.randn(3, 64), []
    model[4].register_forward_hook(
        lambda _, inputs, output: seen.append((inputs[0].detach(), output.detach()))
    )
    assert names(model) == ["0-2", "3-3", "4-4", "5-7"]
    step(model, plan, batch)
    model(batch)
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])


@pytest.mark.parametrize("plan", PLANS)
def test_a_hook_that_comes_later_is_refused_by_name(plan):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    of = vivace.Plan.from_dict(plan)
    with vivace.attach(of, model=model, optimizer=optimizer, loss=lambda m, x: m(x).mean()) as session:
        session.step(torch.randn(3, 64))
        model[4].register_forward_hook(lambda *_: None)
        with pytest.raises(vivace.Refused, match="'3-5' cannot be one block: the Linear in it has a hook"):
            session.step(torch.randn(3, 64))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("plan", PLANS[:1])
def test_weights_that_a_hook_makes_are_those_of_this_step(plan):
    torch.manual_seed(0)
    found = []
    original = [(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Tanh()) for _ in range(4)]
    state = nn.Sequential(*(m for pair in original for m in pair)).state_dict()
    for each in ({}, plan):
        model = nn.Sequential(
            *(m for _ in range(4) for m in (nn.utils.weight_norm(nn.Linear(8, 8)), nn.Tanh()))
        )
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        of = vivace.Plan.from_dict(each)
        with vivace.attach(of, model=model, optimizer=optimizer, loss=lambda m, x: m(x).mean()) as session:
            for _ in range(3):
                session.step(torch.ones(3, 8))
        found.append(list(model.state_dict().values()))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"checkpoint": {"blocks": ["body"]}}, "checkpoint: no block is called 'body'; there are 0-1, 2-2"),
        (
            {"checkpoint": {}, "compress_activations": {"blocks": ["2-2"]}},
            "compress_activations: 'checkpoint' already decides on the block '2-2'",
        ),
    ],
)
def test_patterns_that_match_nothing_and_blocks_claimed_twice_are_refused(plan, reason):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(vivace.Refused) as refused:
        vivace.attach(
            vivace.Plan.from_dict(plan), model=model, optimizer=optimizer, loss=lambda m, x: m(x).mean()
        )
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    "name", ["checkpoint", "compress_activations", "bf16_weights", "optimizer_in_backward"]
)
@pytest.mark.parametrize("whole", [True, False])
def test_transforms_of_torch_func_are_refused_by_name(name, whole):
    """Around the model, and inside of one of its blocks."""

    class Part(nn.Linear):
        def forward(self, x):
            jacobian = () if whole else torch.func.vmap(torch.func.jacrev(super().forward))(x)
            return super().forward(x) + sum(jacobian).mean()

    def loss(model, x):
        return torch.func.vmap(torch.func.jacrev(model))(x).square().mean() if whole else model(x).mean()

    model = nn.Sequential(*((Part if not whole else nn.Linear)(4, 4) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict({name: {}})
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=loss) as session:
        if whole or name != "bf16_weights":
            with pytest.raises(vivace.Refused, match=f"{name}: the job uses a transform of torch.func"):
                session.step(torch.ones(3, 4))
        else:
            session.step(torch.ones(3, 4))
