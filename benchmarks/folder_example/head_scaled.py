# expect: different
"""A technique that claims to be exact, and lets the last layer learn by a tenth less."""

import dataclasses

from _table import job

import vivace

__all__ = ["HeadScaled", "job"]


@vivace.register
@dataclasses.dataclass(frozen=True)
class HeadScaled(vivace.Technique):
    """Scales the gradient of the last layer."""

    name = "head_scaled"
    card = vivace.Card(vivace.Stage.CAPTURE, vivace.Numerics.EXACT, "scales the head's gradient", "planted")

    def apply(self, build):
        """Wrap what is done when the gradients are whole."""

        def finish(following):
            following()
            list(build.model.parameters())[-1].grad.mul_(0.9)

        build.wrap(vivace.Seam.FINISH, finish)

    def confirm(self, seen, reference):
        """It was planted."""
        return "it was planted"
