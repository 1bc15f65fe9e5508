"""torch's own allocator takes the technique's settings, and gets back those that it had."""

import pytest

OPENED = """
import warnings
import torch, vivace
warnings.simplefilter("error")
def settings():
    found = torch.cuda.memory._snapshot()["allocator_settings"]
    return found["expandable_segments"], found["max_split_size"] // 2**20
model = torch.nn.Linear(4, 4).cuda()
plan = vivace.Plan.from_dict({"allocator": {"max_split_size_mib": 64}})
optimizer = torch.optim.SGD(model.parameters())
print(settings())
with vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, batch: m(batch).sum()) as session:
    print(settings())
    for _ in range(3):
        session.step(torch.randn(512, 4))
    print(session.build.notes["growing_segments"] > 0)
print(settings())
"""


@pytest.mark.parametrize("growing", [False, True])
def test_the_persons_settings_come_back(stand_in, monkeypatch, growing):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"max_split_size_mb:32,expandable_segments:{growing}")
    own = f"({growing}, 32)"
    assert stand_in.python(OPENED).splitlines() == [own, "(True, 64)", "True", own]
