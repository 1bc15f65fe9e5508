"""The order of forms: what the first results teach, what is passed over, and what the search then misses."""

import math
import random

import pytest

from vivace.compressing.order import EXPECTED, WITHOUT_MATRIX_UNITS, Order
from vivace.ledger import Ratio
from vivace.serving.forms import BY_NAME, FORMS

# How many times as fast as eager fp32 on two cores at batch 1, of three networks: what was measured, and
# guesses for the forms that nobody has measured.
KNOWN = {
    "residual": {
        "openvino_fp32": 2.9, "onnx_fp32": 2.2, "compiled_fp32": 1.3, "aoti_fp32": 1.4, "openvino_bf16": 9.2,
        "eager_bf16": 3.3, "compiled_bf16": 4.4, "aoti_bf16": 4.6, "openvino_int8": 14.6, "onnx_int8": 6.1,
        "compiled_int8": 11.3,
    },
    "mobile": {
        "openvino_fp32": 3.2, "onnx_fp32": 3.0, "compiled_fp32": 1.5, "aoti_fp32": 1.6, "openvino_bf16": 6.3,
        "eager_bf16": 0.9, "compiled_bf16": 1.9, "aoti_bf16": 2.0, "openvino_int8": 4.5, "onnx_int8": 3.4,
        "compiled_int8": 2.8,
    },
    "tiny": {
        "openvino_fp32": 3.7, "onnx_fp32": 9.8, "compiled_fp32": 1.2, "aoti_fp32": 1.9, "openvino_bf16": 6.6,
        "eager_bf16": 0.62, "compiled_bf16": 0.9, "aoti_bf16": 1.2, "openvino_int8": 5.4, "onnx_int8": 14.0,
        "compiled_int8": 0.83,
    },
}  # fmt: skip


def sure(speed):
    return Ratio(speed, 0.99 * speed, 1.01 * speed)


def searched(world, every=False):
    """The best speed that a search finds where all speeds are known, its seconds, and what it asked for."""
    order = Order([BY_NAME[name] for name in world], every=every)
    asked = []
    while (form := order.ask()) is not None:
        asked.append(form.name)
        order.tell(form.name, sure(world[form.name]), kept=world[form.name] > 1)
    return order.best, sum(EXPECTED[name][1] for name in asked), asked


@pytest.mark.parametrize("name", KNOWN)
def test_the_best_of_likely_networks_is_found_early(name):
    world = KNOWN[name]
    best, seconds, asked = searched(world)
    assert best >= max(world.values()) / 1.03
    assert seconds < 0.3 * sum(EXPECTED[form][1] for form in world)
    assert BY_NAME[asked[0]].exact
    whole = searched(world, every=True)
    assert set(whole[2]) == set(world)


def test_over_many_worlds_little_is_missed_and_most_is_saved():
    stream = random.Random(0)
    missed, shares = 0, []
    names = [form.name for form in FORMS[1:]]
    for _ in range(60):
        of_all = stream.gauss(0, 0.45)
        shared = {
            kind: stream.gauss(0, 0.35)
            for kind in ("torch", "compiled", "onnx", "openvino", "fp32", "bf16", "int8")
        }
        world = {}
        for name in names:
            form = BY_NAME[name]
            family = {"inductor": "compiled", "aoti": "compiled"}.get(form.runtime, form.runtime)
            logarithm = math.log(EXPECTED[name][0]) + of_all + shared[family] + shared[form.numbers]
            world[name] = math.exp(logarithm + stream.gauss(0, 0.22))
        best, seconds, _ = searched(world)
        missed += best < max(world.values()) / 1.03
        shares.append(seconds / sum(EXPECTED[name][1] for name in names))
    assert missed <= 9
    assert sum(shares) / len(shares) < 0.25


def test_a_promise_is_weighed_with_the_time_that_it_takes(monkeypatch):
    order = Order(FORMS[1:])
    order.tell("onnx_fp32", sure(3.0), kept=True)
    order.tell("openvino_int8", sure(6.0), kept=True)
    assert "compiled_int8" not in order.worth_it()
    monkeypatch.setitem(EXPECTED, "compiled_int8", (EXPECTED["compiled_int8"][0], 5.0))
    assert "compiled_int8" in order.worth_it()


def test_without_matrix_units_little_is_expected_of_bfloat16():
    order = Order(FORMS[1:], matrix_units=False)
    assert order.expected("eager_bf16").estimate < 1 < Order(FORMS[1:]).expected("eager_bf16").estimate
    assert order.expected("openvino_fp32") == Order(FORMS[1:]).expected("openvino_fp32")
    assert set(WITHOUT_MATRIX_UNITS) <= set(EXPECTED)


def test_a_form_that_may_not_be_deployed_teaches_and_is_not_the_best():
    order = Order(FORMS[1:])
    before = order.expected("onnx_int8").estimate
    order.tell("openvino_int8", sure(20.0), kept=False)
    assert order.best == 0.0
    assert order.expected("onnx_int8").estimate > 1.5 * before
    assert order.worth_it() == [form.name for form in FORMS[1:] if form.name != "openvino_int8"]


def test_what_cannot_be_done_in_time_is_not_asked_for():
    order = Order(FORMS[1:])
    assert order.ask(5.0) is None
    assert order.ask(20.0).name in ("openvino_fp32", "onnx_fp32", "folded_fp32")
    before = order.left_seconds()
    order.tell("openvino_fp32", sure(3.0), kept=True, seconds=200.0)
    assert order.seconds_of("onnx_fp32") > 2 * EXPECTED["onnx_fp32"][1]
    assert order.left_seconds() > before


def test_every_form_has_an_expectation():
    assert set(EXPECTED) >= {form.name for form in FORMS[1:]}
