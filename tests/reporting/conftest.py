"""A realistic tune run and train run, generated: the records that a GPU session would have written."""

import json
import math
import random
from pathlib import Path

import pytest

GIB = 2**30
MACHINE = {
    "devices": [
        {"kind": "cuda", "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * GIB, "features": ["sm_90"]},
        {
            "kind": "cpu",
            "name": "Intel Xeon Platinum 8480C",
            "memory_bytes": 128 * GIB,
            "features": ["amx_bf16"],
        },
    ],
    "num_cores": 16,
    "versions": {"python": "3.11.7", "torch": "2.15.0", "triton": "3.9.0", "numpy": "2.4.6"},
    "limits": {
        "cores_usable": 16,
        "shared_memory_bytes": 64 * GIB,
        "open_files": 20000,
        "driver": "570.86.10",
    },
    "ceilings": {},
    "missing": ["no C++ compiler (g++ or clang): torch.compile cannot build CPU kernels"],
    "fingerprint": "f1292f64b328",
}
JOB = {
    "name": "examples/imagenet.py:job",
    "signature": "8d1e0f1c",
    "batch_size": 256,
    "model": "ResNet",
    "num_parameters": 25_557_032,
    "optimizer": "SGD",
    "sources": {"python": "3.11", "source of imagenet.py": "3dccf237"},
}
COMPILE = {"compile": {"mode": "max-autotune-no-cudagraphs", "dynamic": False}}
PLAN = {"channels_last": {}, "bf16_autocast": {}, **COMPILE, "fused_optimizer": {}}
DOES = {
    "channels_last": "feature maps in NHWC memory order",
    "bf16_autocast": "matrix products and convolutions in bfloat16 by autocast",
    "compile": "the model compiled to fused kernels by torch.compile",
    "fused_optimizer": "the optimizer's own fused implementation",
}
STRICT = 1184.0


def trial(techniques, estimate=None, *, role="candidate", predicted=None, peak=24.6, warmup=3.1, **fields):
    document = {
        "record": "trial",
        "techniques": techniques,
        "plan_id": "p",
        "machine": "m",
        "job": "j",
        "role": role,
        "status": "measured" if estimate else "refused",
        "predicted": predicted,
        "promise": "rounding",
    }
    if estimate:
        reference = 256 / STRICT
        document |= {
            "ratio": {"estimate": estimate, "low": estimate * 0.97, "high": estimate * 1.03},
            "pairs": [[reference, reference / estimate]] * 6,
            "samples_per_second": STRICT * estimate,
            "peak_bytes": int(peak * GIB),
            "warmup_seconds": warmup,
            "seconds": 40.0,
        }
    return document | fields


def trials():
    baseline = {"promise": "exact"}
    return [
        trial({}, 1.0, role="baseline_strict_fp32", **baseline),
        trial({}, 1.21, role="baseline_default", **baseline),
        trial({}, 1.62, role="baseline_tf32", **baseline),
        trial({"bf16_autocast": {}}, 1.71, predicted=[1.2, 2.4], peak=13.9, warmup=3.4),
        trial({"channels_last": {}}, 1.12, predicted=[0.8, 1.45]),
        trial(COMPILE, 1.18, predicted=[1.0, 1.5], peak=21.3, warmup=58.2),
        trial({"cuda_graphs": {}}, 1.01, predicted=[1.04, 1.2], peak=26.0, warmup=6.2),
        trial({"fused_optimizer": {}}, 1.04, predicted=[1.0, 1.08]),
        trial({"offload_activations": {}}, 0.72, predicted=[0.6, 0.95], peak=9.4),
        trial({"tf32": {}}, 1.49, predicted=[1.1, 1.45], warmup=3.3),
        trial({"channels_last": {}, "bf16_autocast": {}}, 2.02, predicted=[1.3, 2.6], peak=13.7, warmup=3.9),
        trial(PLAN, 2.36, predicted=[1.5, 3.0], peak=11.4, warmup=63.0),
        trial(
            {"fp8_linear": {}}, reason="the model's only linear layer has 1000 outputs, not a multiple of 16"
        ),
        trial({"fused_norm": {}}, reason="the model has no layer norm"),
        trial(
            {"compile": {"mode": "max-autotune"}},
            status="failed",
            reason="child process ran out of GPU memory",
        ),
        trial(
            PLAN,
            2.31,
            role="confirmation",
            peak=11.4,
            warmup=63.0,
            evidence={
                "bf16_autocast": "53 convolutions ran in bfloat16",
                "channels_last": "53 convolutions in channels-last order",
                "compile": "1 graph, 0 breaks",
                "fused_optimizer": "one fused kernel for 161 parameters",
            },
        ),
    ]


def curves(num=120):
    noise = random.Random(7)
    reference = [6.9 * math.exp(-i / 45) + 1.1 + 0.06 * noise.gauss(0, 1) for i in range(num)]
    width = [0.004 + 0.0004 * i for i in range(num)]
    return {
        "steps": list(range(1, num + 1)),
        "reference": reference,
        "plan": [r + w * noise.uniform(-0.7, 0.7) for r, w in zip(reference, width, strict=True)],
        "low": [r - w for r, w in zip(reference, width, strict=True)],
        "high": [r + w for r, w in zip(reference, width, strict=True)],
    }


def verdict(kept=True):
    names = ("loss curve", "scale, from step 21", "residual, from step 21", "decay, from step 21")
    names += ("buffer 1.running_mean, from step 21", "evaluation, from step 40")
    values = (0.0031, 0.00082, 0.041, 2.1e-5, 0.0012, 0.0067)
    scores = (0.7, 4.3 if kept else 9.8, 1.4, 0.8, 3.0, 2.2)
    return {
        "kept": kept,
        "promise": "rounding",
        "loss_envelopes": 0.71,
        "displacement_envelopes": 1.4,
        "steps": 120,
        "seeds": 8,
        "reason": "" if kept else "update scale is 9.8 envelopes from strict fp32",
        "seconds": 96.0,
        "checks": [
            {"name": n, "value": v, "envelope": v / s, "score": s, "limit": 8.0, "kept": s <= 8}
            for n, v, s in zip(names, values, scores, strict=True)
        ],
        "num_checks": 157,
        "curves": curves(),
    }


def result(**changes):
    gains = [("strict fp32", 1.0), ("channels_last", 1.12), ("bf16_autocast", 2.02), ("compile", 2.26)]
    gains += [("fused_optimizer", 2.31)]
    return {
        "plan": PLAN,
        "does": DOES,
        "plan_path": "runs/tune/plan.toml",
        "speedup": {"estimate": 2.31, "low": 2.24, "high": 2.38},
        "baselines": {"strict_fp32": STRICT, "default": 1432.6, "tf32": 1918.1},
        "baseline_notes": {},
        "promise": "rounding",
        "verdict": {key: value for key, value in verdict().items() if key != "curves"},
        "break_even_steps": 514,
        "input_pipeline": {"plan": {"estimate": 1.07, "low": 1.05, "high": 1.09}},
        "waterfall": [
            {"step": n, "ratio": {"estimate": r, "low": r - 0.07 * (r > 1), "high": r + 0.07 * (r > 1)}}
            for n, r in gains
        ],
        "report_path": "runs/tune/report.html",
        "seconds": 812.0,
        "interrupted": False,
    } | changes


def records():
    return [
        {
            "record": "run",
            "command": "vivace tune examples/imagenet.py:job --budget balanced --memory 20GiB",
            "date": "2026-03-14 09:41",
            "version": "0.1.0",
            "machine": MACHINE,
            "job": JOB,
            "budget_seconds": 900,
            "allow": "rounding",
            "memory_bytes": 20 * GIB,
        },
        {
            "record": "profile",
            "device": "cuda",
            "step_seconds": 256 / STRICT,
            "shares": {"data": 0.034, "forward": 0.31, "backward": 0.62, "update": 0.036},
            "operator_shares": {"convolution": 0.71, "norm": 0.14, "elementwise": 0.15},
            "num_operators": 812,
            "page_faults": 0.0,
            "parameter_bytes": 102_228_128,
            "peak_bytes": int(24.6 * GIB),
            "features": {"batch_norm": True},
        },
        *trials(),
        {"record": "verdict", **verdict()},
        {"record": "result", **result()},
    ]


def write_tune(folder, documents):
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    (folder / "ledger.jsonl").write_text(lines, encoding="utf-8")
    return folder


def write_train(folder, steps=900):
    folder.mkdir(parents=True, exist_ok=True)
    noise = random.Random(3)
    lines = []
    for step in range(10, steps + 1, 10):
        line = {
            "step": step,
            "epoch": step // 300,
            "loss": 2.3 * math.exp(-step / 200) + 0.05 + 0.01 * noise.random(),
        }
        line["samples_per_second"] = 2700 + 40 * noise.random()
        if step % 300 == 0:
            line["metric"] = 0.9 + step / 12000
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    facts = {"run_path": "runs/train", "steps": steps, "epochs": 3, "metric": 0.975, "loss": 0.0712}
    facts |= {"seconds": 252.0, "samples_per_second": 2718.0, "resumed_from_step": 300}
    (folder / "run.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
    return folder


@pytest.fixture
def ledger():
    """The records of a whole tune run, to change before writing."""
    return records()


@pytest.fixture
def tune_folder(tmp_path):
    """Write records into a run's folder."""

    def write(documents) -> Path:
        return write_tune(tmp_path / "tune", documents)

    return write


@pytest.fixture
def train_folder(tmp_path):
    return write_train(tmp_path / "train")
