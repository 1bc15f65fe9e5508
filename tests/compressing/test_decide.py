"""What a form's measurements say of it."""

import pytest

from vivace.compressing.bench import decide, not_faster, without_effect
from vivace.ledger import Ratio
from vivace.serving.envelope import Check
from vivace.serving.forms import BY_NAME
from vivace.serving.margin import Change

NEAR, FAR = [Check("output", 0.1)], [Check("output", 0.5), Check("output['logits']", 90.0)]
LOSES_NOTHING = Change(0.9, 0.9, -0.001, 0.001, 0.005, 4000)
LOSES = Change(0.9, 0.8, -0.12, -0.08, 0.005, 4000)
TOO_FEW = Change(0.9, 0.9, -0.03, 0.03, 0.005, 100, needed=770)
AT_THE_MARGIN = Change(0.9, 0.895, -0.02, 0.01, 0.005, 100)


def decided(form, checks=NEAR, change=LOSES_NOTHING):
    return decide(BY_NAME[form], checks, change)


def test_the_same_numbers_are_judged_by_rounding_alone():
    assert decided("onnx_fp32", change=TOO_FEW) == ("kept", "")
    status, reason = decided("onnx_fp32", checks=FAR)
    assert status == "refused"
    assert "'output['logits']' is 90.0 times as far" in reason


@pytest.mark.parametrize("form", ["openvino_bf16", "openvino_int8"])
def test_other_numbers_are_judged_by_the_metric(form):
    assert decided(form, checks=FAR) == ("kept", "")
    assert decided(form, change=LOSES)[0] == "refused"
    status, reason = decided(form, change=TOO_FEW)
    assert status == "undecided"
    assert "100 samples are not enough" in reason
    assert "about 770 are needed" in reason
    assert decided(form, change=AT_THE_MARGIN)[0] == "refused"


def test_what_is_smaller_and_not_faster_is_refused_with_its_measurement():
    told = not_faster(Ratio(0.9, 0.8, 1.05), "smaller (1 MiB instead of 4 MiB) and ")
    assert told.startswith("smaller (1 MiB instead of 4 MiB) and not faster: 0.90")


@pytest.mark.parametrize(
    ("form", "ran", "acts"),
    [
        ("openvino_bf16", {"bf16": 3, "fp32": 1}, True),
        ("openvino_int8", {"fp32": 4}, False),
        ("onnx_int8", {}, False),
        ("eager_bf16", {}, False),
        ("aoti_bf16", {}, True),  # which tells of no operator
        ("aoti_bf16", {"fp32": 1}, False),
        ("onnx_fp32", {}, True),
        ("torchao_int8_weights", {"fp32": 2}, True),
    ],
)
def test_numbers_in_which_nothing_multiplied_took_no_effect(form, ran, acts):
    reason = without_effect(BY_NAME[form], ran)
    assert (reason == "") == acts
    assert acts or reason.startswith(f"nothing that multiplies ran in {BY_NAME[form].numbers} (of your")
