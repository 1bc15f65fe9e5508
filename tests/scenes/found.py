"""What `run`, `compress`, `export` and `sweep` found, as their pages and endings are given it; the long
ones hold the longest that each may.
"""

import dataclasses

from vivace.compressing.result import Beside, Compressed, Tried
from vivace.exporting.result import Exported
from vivace.ledger import Ratio
from vivace.serving.forms import BESIDE, FORMS
from vivace.sweeping.record import Finalist, TrialRecord, ranked, spread_of
from vivace.sweeping.result import Swept

RATIO = {"estimate": 1.5, "low": 1.3, "high": 1.7}
VERDICT = {"kept": True, "reason": "", "score": 1.2, "limit": 5.0, "seconds": 0.2}
FASTER = {
    "outcome": "faster",
    "reason": "",
    "steps": 400,
    "seconds": 90.0,
    "own_seconds": 2.0,
    "problems": [],
    "plan": {"bf16_autocast": {}},
    "tried": [
        {"plan": {"bf16_autocast": {}}, "answer": "faster", "step": 60, "wall": RATIO, "verdict": VERDICT},
        {
            "plan": {"fused_optimizer": {}},
            "answer": "not_kept",
            "verdict": {**VERDICT, "kept": False, "reason": "the update of <head> is 9 of 5 off"},
        },
        {"plan": {"channels_last": {}}, "answer": "0.70x as fast on a copy of a step"},
    ],
    "ratio": RATIO,
    "saved_seconds": 25.0,
    "plan_steps": 300,
    "watched": 2,
    "limit": 5.0,
    "worst": 1.2,
    "next": "vivace run --plan runs/run/plan.toml -- python a.py",
    "in_your_code": "vivace export --plan runs/run/plan.toml",
}
RECORDS = [
    {"record": "adopted", "plan": {"bf16_autocast": {}}, "step": 60, "pairs": [[0.2, 0.13, 0.2, 0.13]] * 4},
    {"record": "watched", "step": 260, **VERDICT},
]
SENTENCE = "the update of encoder.layers.0.self_attention.output_projection is 9 of 5 envelopes off"
LONG_RUN = {
    **FASTER,
    "problems": [SENTENCE],
    "only_the_rest": "its model has hooks, which would run in a copy as well",
    "tried": [
        *FASTER["tried"],
        *({"plan": {f"a_technique_of_many_words_{i}": {}}, "answer": SENTENCE} for i in range(12)),
    ],
    "page": "runs/run/run.html",
}
LONG_COMMAND = "python examples/a_long_name_of_a_script.py --epochs 30 --data some/folder/with/pictures"
SUBJECT = {
    "metric_name": "accuracy",
    "metric": 0.9,
    "samples": 1070,
    "threads": 2,
    "model": "VisionTransformerWithALongName",
    "num_parameters": 86_567_656,
}
CHANGE = {
    "value": 0.89,
    "reference": 0.9,
    "low": -0.0213,
    "high": 0.0041,
    "margin": 0.05,
    "needed": None,
    "samples": 1070,
    "method": "paired bootstrap",
}
CHECK = {"output": "output['logits_of_the_classes']", "envelopes": 0.31, "largest": 1.2e-5, "limit": 8.0}
CHECK |= {"problem": "", "kept": True}


STAYED = tuple(
    {
        "name": f"encoder.layers.{layer}.self_attention (scaled_dot_product_attention)",
        "numbers": "fp32",
        "why": "left out of int8 by NNCF" if layer else "OpenVINO does not tell why",
    }
    for layer in range(12)
)


BESIDE_IT = (
    *(
        Beside(form.name, form.does, batch, "", Ratio(1.42, 1.3, 1.55), 0.0123, 0.0452, 81234.5, 1234)
        for batch in (1, 32)
        for form in (FORMS[0], *BESIDE, FORMS[2])
    ),
    Beside(FORMS[0].name, FORMS[0].does, 4096, f"a batch of 4096 cannot be made, as {SENTENCE}"),
)


def compressed():
    """A compression with forms of every status."""
    tried, reference = [], 0.0123
    statuses = ("kept", "refused", "slower", "undecided", "unmeasured", "untried", "failed", "missing")
    for place, form in enumerate(FORMS):
        status = "kept" if place < 3 else statuses[place % len(statuses)]
        timed = status in ("kept", "refused", "slower", "undecided")
        speed = (1.0, 3.1, 4.6)[place] if place < 3 else 1.4
        tried.append(
            Tried(
                form.name,
                form.does,
                form.runtime,
                form.numbers,
                status,
                "" if status == "kept" else f"{status}, as {SENTENCE}",
                ratio=Ratio(speed, 0.9 * speed, 1.1 * speed) if timed else None,
                p50=reference / speed if timed else None,
                p99=1.4 * reference / speed if timed else None,
                bytes=346_000_000 // (place + 1),
                peak_bytes=700_000_000,
                change=CHANGE | {"needed": 410 if status == "undecided" else None} if place else None,
                checks=(CHECK,),
                effect={"fp32": 12, "int8": 4},
                stayed=STAYED if form.numbers == "int8" else (),
            )
        )
    return Compressed(
        "examples/train_a_vision_transformer.py:job",
        "latency",
        1,
        0.005,
        tried[2].name,
        tuple(tried),
        SUBJECT,
        {},
        ("the samples of the validation are 1,070, so that a loss of less than 0.3 % is not seen",),
        372.0,
        "2026-11-23T10:11:12+00:00",
        page_path="runs/compress/compress.html",
        budget_seconds=400.0,
        go_on="vivace compress examples/train_a_vision_transformer.py:job --run runs/train --resume",
        beside=BESIDE_IT,
    )


def exported(kept=True):
    """A model that was exported, with many layers; or a file that is not the model."""
    layers = [CHECK | {"output": f"encoder.layers.{i}.self_attention.output_projection"} for i in range(40)]
    digest = "0123456789abcdef" * 4
    return Exported(
        "examples/train_a_vision_transformer.py:job",
        "openvino",
        "openvino_int8",
        "int8",
        "runs/export/model.xml",
        {"model.xml": digest, "model.bin": digest, "weights.safetensors": digest},
        kept,
        "" if kept else SENTENCE,
        1070,
        (1, 2, 3, 8, 10, 32),
        (CHECK | {"kept": kept, "problem": "" if kept else SENTENCE},),
        {"checks": layers, "of": 52, "reason": ""},
        CHANGE,
        ({"name": "input_0", "in_forward": "images", "dtype": "float32", "shape": [None, 3, 224, 224]},),
        {
            "step": 5005,
            "plan": {"channels_last": {}, "bf16_autocast": {}},
            "metric": 0.9,
            "metric_name": "accuracy",
            "sha256": digest,
            "numbers": "fp32",
        },
        {"p50": 0.0041, "p99": 0.0062, "peak_bytes": 700_000_000, "batch": 8},
        {"versions": {"python": "3.11.2", "torch": "2.15.0"}, "devices": [{"name": "a processor"}]},
        {"openvino": "2026.4.0", "torch": "2.15.0"},
        "2026-11-23T10:11:12+00:00",
        page_path="runs/export/model_card.html",
        metric=0.9,
    )


def swept():
    """A sweep with every section of its page, and long names."""
    parameters = {"learning_rate": 0.00799, "width": 128, "optimizer": "adamw_with_a_long_name"}
    costs = {"seconds": 0.002, "parameters": 1234567}
    states = ["complete", "complete", "pruned", "failed"]
    trials = [
        TrialRecord(
            number,
            parameters | {"width": 2**number},
            state,
            None if state == "failed" else 0.9 + number / 100,
            {1: 0.9},
            3.0,
            costs,
            plan_left="",
            fused=16,
            sameness="exact: bit-identical",
            reason="ValueError: seven is not allowed (train.py, line 41)" if state == "failed" else "",
            code="",
            kind="",
        )
        for number, state in enumerate(states)
    ]
    spreads = [spread_of({1: best, 2: best + 0.01}) for best in (0.93, 0.92)]
    share = {"estimate": 0.7, "low": 0.5, "high": 0.82}
    decision = {"shape": parameters, "fused": False, "reason": "it was not measured faster", "rows": 15}
    decision |= {"ratio": share, "sameness": "rounding: worst 0.6 of 16 allowed (loss)"}
    settings = {field.name: "" for field in dataclasses.fields(Swept)} | {
        "job": "runs/sweep/best.py:job",
        "objectives": ("metric", "parameters"),
        "finalists": tuple(ranked([Finalist(0, parameters, 0.93, spread) for spread in spreads])),
        "metric_name": "accuracy",
        "best": parameters,
        "metric": 0.93,
        "trials": tuple(trials),
        "importances": dict.fromkeys(parameters, share),
        "front": (0, 1),
        "fusing": (decision | {"baseline": "SGD with a loop over tensors, torch's default on a CPU"},),
        "pruned_seconds_saved": 412.0,
        "seconds": 700.0,
        "workers": 2,
        "threads": 1,
        "notices": ("2 trials at a time on 1 thread each: 1.84x; memory has room for 31",),
    }
    return Swept(**settings)
