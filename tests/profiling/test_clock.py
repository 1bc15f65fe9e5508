import pytest

from vivace.profiling.record.clock import PHASES, UPDATES_APART, Clock


class Scene:
    """A clock whose time passes only by hand."""

    def __init__(self):
        self.time = 0.0
        self.steps = []
        self.clock = Clock(self.steps.append, now=lambda: self.time)

    def spend(self, seconds, phase=None):
        if phase is None:
            self.time += seconds
        else:
            with self.clock.phase(phase):
                self.time += seconds

    def fetch(self, seconds=0.0, samples=8, training=True):
        self.clock.fetch(training=training)
        self.spend(seconds, "data")
        self.clock.fetched(samples)

    def backward(self, seconds):
        self.spend(seconds, "backward")
        self.clock.went_backward()
        self.clock.returned()

    def update(self, seconds, optimizer=1):
        self.spend(seconds, "update")
        self.clock.updated(optimizer)

    def seconds(self, number=0):
        step = self.steps[number]
        assert sum(step.seconds.values()) == pytest.approx(step.wall_seconds)
        return {phase: step.seconds[phase] for phase in PHASES if step.seconds[phase]}


@pytest.fixture
def scene():
    return Scene()


def test_the_loops_own_code_is_named_by_what_follows_it(scene):
    scene.fetch(1)
    scene.spend(2)  # the model and the loss
    scene.spend(4, "backward")
    scene.spend(8)  # clipping
    scene.update(16)
    scene.spend(32)  # logging
    scene.fetch()
    assert scene.seconds() == {"data": 1, "forward": 2, "backward": 4, "update": 24, "idle": 32}
    assert scene.steps[0].samples == 8


def test_code_before_placing_is_forward_where_a_backward_pass_follows(scene):
    scene.fetch()
    scene.spend(1)
    scene.spend(2, "place")
    scene.spend(4)
    scene.spend(8, "backward")
    scene.update(16)
    scene.fetch()
    assert scene.seconds() == {"place": 2, "forward": 5, "backward": 8, "update": 16}


def test_a_closure_inside_of_the_update_has_a_forward_of_its_own(scene):
    scene.fetch(1)
    with scene.clock.phase("update"):
        scene.spend(2)
        scene.spend(4, "backward")
        scene.spend(8)
    scene.clock.updated(1)
    scene.fetch()
    assert scene.seconds() == {"data": 1, "forward": 2, "backward": 4, "update": 8}


def test_gradients_cleared_inside_of_a_closure_leave_its_forward_alone(scene):
    scene.fetch(1)
    with scene.clock.phase("update"):
        scene.spend(2)  # Lightning runs the model before it clears
        scene.clock.push("update", decides=False)
        scene.spend(16)
        scene.clock.pop()
        scene.spend(4, "backward")
        scene.spend(8)
    scene.clock.updated(1)
    scene.fetch()
    assert scene.seconds() == {"data": 1, "forward": 2, "backward": 4, "update": 24}


def test_several_batches_an_update_are_one_step(scene):
    for _ in range(3):
        scene.fetch(1)
        scene.spend(2)
        scene.spend(4, "backward")
    scene.update(8)
    scene.fetch()
    assert len(scene.steps) == 1
    assert scene.steps[0].samples == 24
    assert scene.seconds() == {"data": 3, "forward": 6, "backward": 12, "update": 8}


def test_two_optimizers_on_one_batch_are_one_step(scene):
    scene.fetch(1)
    for optimizer in (1, 2):
        scene.spend(2)
        scene.spend(4, "backward")
        scene.update(8, optimizer)
    scene.fetch()
    assert len(scene.steps) == 1
    assert scene.seconds() == {"data": 1, "forward": 4, "backward": 8, "update": 16}


def test_without_a_loader_the_first_optimizer_ends_the_step(scene):
    for _ in range(2):
        for optimizer in (1, 2):
            scene.spend(2)
            scene.spend(4, "backward")
            scene.update(8, optimizer)
    assert len(scene.steps) == 2
    assert scene.seconds(1) == {"forward": 4, "backward": 8, "update": 16}


def test_validation_marks_the_step_that_it_interrupts(scene):
    scene.fetch(1)
    scene.spend(4, "backward")
    scene.update(8)
    for _ in range(3):
        scene.fetch(1, training=False)
        scene.spend(100)
    scene.fetch(1)
    scene.spend(4, "backward")
    scene.update(8)
    scene.fetch()
    assert [step.interrupted for step in scene.steps] == [False, True]


def test_restarting_forgets_what_was_our_own(scene):
    scene.fetch(1)
    scene.spend(1000)
    scene.clock.restart()
    scene.fetch(1)
    scene.spend(4, "backward")
    scene.update(8)
    scene.fetch()
    assert scene.seconds() == {"data": 1, "backward": 4, "update": 8}


def test_by_hand_what_follows_the_backward_pass_is_the_update(scene):
    scene.clock.by_hand = True
    for _ in range(2):
        scene.fetch(1)
        scene.spend(2)
        scene.backward(4)
        scene.spend(8)
    scene.fetch()
    assert len(scene.steps) == 2
    assert scene.seconds() == {"data": 1, "forward": 2, "backward": 4, "update": 8}


def test_by_hand_without_a_loader_the_backward_pass_ends_the_step(scene):
    scene.clock.by_hand = True
    for _ in range(2):
        scene.spend(2)
        scene.backward(4)
        scene.spend(8)
        scene.clock.cleared()
    assert [step.backwards for step in scene.steps] == [1, 1]
    assert scene.seconds(1) == {"forward": 2, "backward": 4, "update": 8}


def test_an_optimizer_that_steps_after_all_ends_what_was_by_hand(scene):
    scene.clock.by_hand = True
    scene.fetch()
    scene.backward(4)
    scene.update(8)
    assert not scene.clock.by_hand
    scene.fetch()
    assert scene.seconds() == {"backward": 4, "update": 8}


def test_evaluation_after_an_update_belongs_to_the_next_step(scene):
    for _ in range(3):
        scene.fetch(1)
        scene.spend(4, "backward")
        scene.update(8)
        if len(scene.steps) == 1:
            scene.clock.evaluates()
    scene.fetch()
    assert [step.validates for step in scene.steps] == [False, False, True]


def test_what_watching_takes_is_no_part_of_the_next_step():
    scene = Scene()

    def watch(step):
        scene.steps.append(step)
        scene.time += 1000

    scene.clock.on_step = watch
    for _ in range(2):
        scene.fetch(1)
        scene.spend(4, "backward")
        scene.update(8)
        scene.spend(2)
    scene.fetch()
    assert scene.seconds(1) == {"data": 1, "backward": 4, "update": 8, "idle": 2}


def test_a_step_that_ran_as_one_is_forward(scene):
    scene.fetch(1.0)
    scene.spend(0.5, "place")
    scene.spend(3.0)
    scene.clock.replayed(1)
    scene.fetch()
    assert scene.seconds() == {"data": 1.0, "place": 0.5, "forward": 3.0}


def update_without_a_fetch(scene):
    scene.spend(2)
    scene.backward(4)
    scene.update(8)


def test_a_loop_that_fetched_one_batch_before_it_ends_its_steps_by_itself(scene):
    scene.fetch(1)
    for _ in range(UPDATES_APART + 5):
        update_without_a_fetch(scene)
    assert [step.updates for step in scene.steps] == [UPDATES_APART, *[1] * 5]
    assert scene.seconds(2) == {"forward": 2, "backward": 4, "update": 8}


def test_weights_updated_by_hand_on_one_batch_are_steps_too(scene):
    scene.clock.by_hand = True
    scene.fetch(1)
    for _ in range(UPDATES_APART + 5):
        scene.spend(2)
        scene.backward(4)
        scene.clock.cleared()
    assert [step.backwards for step in scene.steps][1:] == [1] * 5


@pytest.mark.parametrize("gradients", [False, True])
def test_a_loader_that_serves_validation_alone_does_not_feed_the_loop(scene, gradients):
    for _ in range(3):
        for _ in range(2 * UPDATES_APART):
            update_without_a_fetch(scene)
        for _ in range(4):
            scene.fetch(100, training=gradients)
    updates = [step.updates for step in scene.steps]
    assert updates == [1] * 6 * UPDATES_APART
    assert sum(step.fetches > 0 for step in scene.steps) == 2


def test_a_loader_that_feeds_the_loop_later_is_seen(scene):
    for _ in range(2 * UPDATES_APART):
        update_without_a_fetch(scene)
    for _ in range(4):
        scene.fetch(1)
        update_without_a_fetch(scene)
    scene.fetch()
    assert scene.seconds(-1) == {"data": 1, "forward": 2, "backward": 4, "update": 8}
    assert scene.clock.loop_fetches


def test_updates_of_several_passes_over_one_batch_are_one_step(scene):
    for _ in range(3):
        scene.fetch(1)
        for _ in range(5):
            update_without_a_fetch(scene)
    scene.fetch()
    assert [step.updates for step in scene.steps] == [5, 5, 5]


def test_without_a_backward_pass_what_precedes_the_update_is_forward(scene):
    for _ in range(2):
        scene.spend(2)  # the model, the loss and gradients that nothing shows
        scene.update(8)
    assert scene.seconds(1) == {"forward": 2, "update": 8}


def test_two_loaders_in_step_are_two_sources(scene):
    for loader in (1, 2, 1):
        scene.clock.fetch()
        scene.clock.fetched(8, source=loader)
    update_without_a_fetch(scene)
    scene.fetch()
    assert (scene.steps[0].fetches, len(scene.steps[0].sources)) == (3, 2)
