from __future__ import annotations

import pytest
import torch

import vivace

SCENE = """
import torch
import vivace


def train(plan, rank, ranks):
    torch.manual_seed(rank)  # ranks must start from rank 0's weights, whatever they were
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
    keys = list(model.state_dict())
    norms, losses = [], []
    session = vivace.attach(
        vivace.Plan.from_dict(plan),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss=lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]),
        on_gradients=lambda m: norms.append(float(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5))),
    )
    generator = torch.Generator().manual_seed(7)
    with session:
        for _ in range(4):
            x, y = torch.randn(8, 6, generator=generator), torch.randint(5, (8,), generator=generator)
            share = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
            losses.append(float(session.step((x[share], y[share]))))
    assert list(model.state_dict()) == keys
    assert all(p.grad is None for p in model.parameters())
    return {"weights": model.state_dict(), "losses": losses, "norms": norms}


def set_free(inside=False):
    def loss(model, batch):
        if inside and batch.sum() > 8:
            model[0].requires_grad_(True)
        return model(batch).mean()

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    session = vivace.attach(
        vivace.Plan.from_dict({"ddp": {}}),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
    )
    with session:
        session.step(torch.ones(2, 4))
        model[0].requires_grad_(not inside)
        try:
            session.step(torch.ones(2, 4) * (RANK + 2))
        except vivace.Refused as refused:
            return str(refused)


found = {
    "set free": [set_free(), set_free(inside=True)],
    "plain": train({"ddp": {}}, RANK, 2),
    "pieces": train({"ddp": {}, "micro_batches": {"num": 2}}, RANK, 2),
    "bf16": train({"ddp": {}, "bf16_weights": {}}, RANK, 2),
    "single": train({}, 0, 1),
}
"""


def test_two_ranks_train_as_one_process_with_the_global_batch(on_two_ranks, tmp_path):
    first, second = on_two_ranks(SCENE, tmp_path)
    single = first["single"]
    told = "ddp: other weights are trained now than when the session was opened"
    assert all(text.startswith(told) for text in first["set free"])
    for name, tolerance in (("plain", 1e-5), ("pieces", 1e-5), ("bf16", 0.02)):
        assert first[name]["losses"] == second[name]["losses"]
        assert first[name]["losses"] == pytest.approx(single["losses"], rel=tolerance)
        assert first[name]["norms"] == pytest.approx(single["norms"], rel=tolerance)
        for key, value in single["weights"].items():
            assert torch.equal(first[name]["weights"][key], second[name]["weights"][key])
            assert torch.allclose(first[name]["weights"][key], value, rtol=tolerance, atol=tolerance / 10)


def test_one_process_is_refused(tiny):
    with pytest.raises(vivace.Refused, match="torchrun --nproc-per-node N"):
        tiny("mlp").open({"ddp": {}})


def test_a_group_of_one_is_refused_and_batch_norm_raises_the_promise(tiny, tmp_path, monkeypatch):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        with pytest.raises(vivace.Refused, match="torchrun"):
            tiny("cnn").open({"ddp": {}})
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
        alike = lambda found, own: found.__setitem__(slice(None), [own] * len(found))  # noqa: E731
        monkeypatch.setattr(torch.distributed, "all_gather_object", alike)
        session = tiny("cnn").open({"ddp": {}})
        assert session.promise is vivace.Numerics.SEMANTICS
        session.close()
    finally:
        torch.distributed.destroy_process_group()
