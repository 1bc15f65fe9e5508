"""What tests of recurrent layers over all steps share."""

import torch

from vivace.plan import Plan
from vivace.session.opening import attach


def opened(model, **beside):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.from_dict({"fused_recurrent": {}, **beside})
    return attach(plan, model=model, optimizer=optimizer, loss=lambda m, b: m(b)[0].float().square().mean())


def calls(session):
    return session.build.notes["layers_over_steps"].calls


def assert_near(found, expected, rounding):
    """Within `rounding` of each one's largest number."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        assert bool(mine.isfinite().all())
        error = (mine.detach().double() - theirs.detach().double()).abs().max()
        assert float(error) <= rounding * max(1.0, float(theirs.detach().abs().max()))
