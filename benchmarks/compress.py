"""The form that `vivace compress` chooses: against trying every form, and against what one writes by hand.

    scripts/bench compress [NETWORK ...] [--minutes 20]

Each network is trained, and compressed for latency at batch 1, margin 2 %, in the order that the first
results teach, which passes over what promises too little for its time (budget balanced). Then, in a search of
its own, every form is measured to its end. The form chosen by the order is timed in turn with the fastest of
all, each in a process of its own, on the same samples: it may be 3 % slower, for a quarter of the time. Last,
the fastest of all is timed in turn with each baseline: eager bfloat16, torch.compile, ONNX Runtime with
static int8, NNCF with OpenVINO, torchao's dynamic int8 compiled. What of a baseline fails is recorded with
its reason.

After so many minutes it stops, and the same command goes on: trainings, forms and finished comparisons are
kept in runs/bench-compress, for each machine and its versions. A network takes about 10 minutes on two cores.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _record
import torch

import vivace
from vivace.compressing.worker import Worker
from vivace.errors import Unsteady, VivaceError
from vivace.events import Event
from vivace.measuring.paired import Timed, compare
from vivace.processes.launch import Child, Source
from vivace.serving.calls import Calls
from vivace.serving.forms import BY_NAME
from vivace.serving.making import in_process
from vivace.serving.serve import Opened, in_torch, opened, without_telemetry

HERE = Path(__file__).resolve().parent
KEPT = HERE.parent / "runs" / "bench-compress"
OWN = HERE / "_served.py"
JOBS = {
    "resnet18": f"{OWN}:resnet18",
    "transformer": "text_classification,width=128,depth=2,epochs=1",
    "lstm": f"{OWN}:lstm",
    "mobilenet_v2": f"{OWN}:mobilenet_v2",
    "unet": f"{OWN}:unet",
}
SAME = {"ratio": {"estimate": 1.0, "low": 1.0, "high": 1.0}, "reason": "the same form"}
MARGIN = "2%"  # of the metric: what 360 samples can tell
SECONDS, TIMEOUT = 10.0, 1200.0
HAND, WORKER = "compress:Hand", "vivace.compressing.worker:Worker"


class Clock:
    """Stops the benchmark between two forms or comparisons, once its minutes are over."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def look(self) -> None:
        """Raises KeyboardInterrupt when the time is over: a search keeps what it has."""
        if time.monotonic() > self.end:
            raise KeyboardInterrupt

    def __call__(self, event: Event) -> None:
        if event.kind == "form_begin":
            self.look()


def main() -> None:
    """Measure the named networks, or all, and record each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(JOBS))
    parser.add_argument("--minutes", type=float, default=20.0, help="after which it stops")
    parser.add_argument("--no-record", action="store_true", help="print, and file nothing under records")
    arguments = parser.parse_args()
    machine, clock = vivace.inspect(), Clock(arguments.minutes)
    for name in _record.named_jobs(parser, arguments.networks, tuple(JOBS)):
        try:
            found = measured(name, clock, KEPT / machine.fingerprint / name)
        except KeyboardInterrupt:
            sys.exit(f"{name}: the time is over or it was interrupted; the same command goes on")
        show(name, found)
        if not arguments.no_record:
            opening = _record.opened(
                "compress", f"scripts/bench compress {name}", machine, f"compress_{name}"
            )
            _record.write({**opening, **found})


def show(name: str, found: dict[str, Any]) -> None:
    """What was found of a network."""
    share, beside = found["share_of_time"], found["ordered_beside_every"]
    print(f"{name}: {found['every']['chosen']} of all, {found['ordered']['chosen']} by the order,")
    print(f"  {told(beside)} times as fast, in {share:.0%} of the time")
    for baseline, result in found["baselines"].items():
        print(f"  against {baseline:16} {told(result)}", flush=True)


def told(result: dict[str, Any]) -> str:
    """A comparison in words."""
    ratio = result.get("ratio")
    if not ratio:
        return str(result["reason"])
    return f"{ratio['estimate']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def measured(name: str, clock: Clock, folder: Path) -> dict[str, Any]:
    """Train, compress and compare one network, from where an earlier run stopped in the folder."""
    reference = JOBS[name]
    if not (folder / "train" / "run.json").exists():
        vivace.train(reference, out=folder / "train", watch=0.0, restart=(folder / "train").exists())
    ordered = searched(reference, folder, "ordered", "balanced", clock)
    every = searched(reference, folder, "every", "max", clock)
    done = folder / "compared.json"
    compared = json.loads(done.read_text(encoding="utf-8")) if done.exists() else {}
    best = (WORKER, every["chosen"], "every")
    wanted = {"ordered": (best, (WORKER, ordered["chosen"], "ordered"))}
    wanted |= {baseline: ((HAND, baseline, ""), best) for baseline in BASELINES}
    for row, (first, second) in wanted.items():
        if row not in compared:
            clock.look()
            same = first[1] == second[1]
            compared[row] = SAME if same else beside(reference, folder, first, second)
            kept = {key: value for key, value in compared.items() if not value.get("again")}
            done.write_text(json.dumps(kept), encoding="utf-8")
    return {
        "every": every,
        "ordered": ordered,
        "ordered_beside_every": compared["ordered"],
        "share_of_time": ordered["seconds"] / every["seconds"],
        "baselines": {baseline: compared[baseline] for baseline in BASELINES},
    }


def searched(reference: str, folder: Path, kind: str, budget: str, clock: Clock) -> dict[str, Any]:
    """One search: what it chose, the seconds that its trials took, and every form's answer."""
    document = folder / kind / "compress.json"
    answer = json.loads(document.read_text(encoding="utf-8")) if document.exists() else {"interrupted": True}
    if answer["interrupted"]:
        found = vivace.compress(
            reference,
            run=folder / "train",
            margin=MARGIN,
            budget=budget,
            out=folder / kind,
            resume=True,
            on_event=clock,
        )
        if found.interrupted:
            raise KeyboardInterrupt
        answer = json.loads(document.read_text(encoding="utf-8"))
    tried = {
        one["name"]: {key: one[key] for key in ("status", "reason", "ratio", "p50", "p99", "seconds")}
        for one in answer["tried"]
    }
    seconds = sum(one["seconds"] for one in tried.values())
    return {"chosen": answer["chosen"], "margin": answer["margin"], "seconds": seconds, "tried": tried}


def beside(
    reference: str, folder: Path, first: tuple[str, str, str], second: tuple[str, str, str]
) -> dict[str, Any]:
    """How many times faster the second is than the first, or why that cannot be told.

    Each is a worker, the form that it serves, and the search whose file it is.
    """
    source, run = Source(reference), str((folder / "train").absolute())
    with tempfile.TemporaryDirectory(prefix="vivace-") as scratch:
        with Child("vivace.serving.judge:Judge", source, {"run": run, "folder": scratch}) as judge:
            threads = judge.ask("record", TIMEOUT)["threads"]
        own = {"run": run, "folder": scratch, "threads": threads}
        both = [Timed(Child(worker, source, own), TIMEOUT) for worker, _, _ in (first, second)]
        try:
            for timed, (_, form, kind) in zip(both, (first, second), strict=True):
                timed.ask("open", form=form, folder=str(folder / kind / "forms"), batch=1)
                timed.warm(1.0, TIMEOUT)
            ratio = compare(both[0], both[1], seconds=SECONDS).ratio
        except VivaceError as error:
            return {"reason": str(error), "again": isinstance(error, Unsteady)}
        finally:
            for timed in both:
                timed.close()
    return {"ratio": dataclasses.asdict(ratio)}


class Hand(Worker):
    """Serves a baseline, made as its library's own introduction makes it."""

    def open(self, form: str, folder: str, batch: int) -> dict[str, Any]:
        """Make a baseline and be ready to serve it."""
        self._inputs = [self.calls.sample(batch, batch * number) for number in range(16)]
        self.form, self.batch = BY_NAME["eager_fp32"], batch
        with tempfile.TemporaryDirectory(prefix="vivace-") as scratch:
            self.serve, self.handle = BASELINES[form](self, Path(scratch))
        return {"seconds": 0.0}

    def exported(self, folder: Path) -> Path:
        """The model as a file of ONNX with an open batch."""
        path = folder / "model.onnx"
        flat, example = self.material.flat, self.material.example
        batch = ({0: torch.export.Dim.DYNAMIC},) * len(example)
        torch.onnx.export(
            flat, example, path, dynamo=True, dynamic_shapes=(batch,), external_data=False, verbose=False,
            input_names=[f"input_{place}" for place in range(len(example))],
        )  # fmt: skip
        return path

    def feeds(self) -> list[dict[str, Any]]:
        """100 samples of the training, one a call."""
        calls = Calls.load(self.folder / "calibration")
        return [{f"input_{p}": array for p, array in enumerate(calls.sample(1, row))} for row in range(100)]


def by_bfloat16(hand: Hand, _: Path) -> Opened:
    """Weights, inputs and computing in bfloat16, as PyTorch runs them."""
    return in_torch(in_process(BY_NAME["eager_bf16"], hand.material))


def by_compile(hand: Hand, _: Path) -> Opened:
    """torch.compile as it comes."""
    return in_torch(torch.compile(hand.material.flat))


def by_onnxruntime(hand: Hand, folder: Path) -> Opened:
    """Static int8 of ONNX Runtime as it comes."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    feeds = iter(hand.feeds())

    class Reader(CalibrationDataReader):
        def get_next(self) -> Any:
            return next(feeds, None)

    prepared, path = folder / "prepared.onnx", folder / "int8.onnx"
    quant_pre_process(str(hand.exported(folder)), str(prepared), skip_symbolic_shape=True)
    quantize_static(str(prepared), str(path), Reader())
    return opened("onnx", str(path), "int8", hand.threads)


def by_openvino(hand: Hand, folder: Path) -> Opened:
    """NNCF's post-training quantization in OpenVINO as it comes."""
    without_telemetry()
    import nncf
    import openvino

    model = openvino.convert_model(str(hand.exported(folder)))
    openvino.save_model(nncf.quantize(model, nncf.Dataset(hand.feeds())), str(folder / "int8.xml"))
    return opened("openvino", str(folder / "int8.xml"), "int8", hand.threads)


def by_torchao(hand: Hand, _: Path) -> Opened:
    """torchao's dynamic int8, compiled."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = copy.deepcopy(hand.material.flat)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return in_torch(torch.compile(model))


BASELINES: dict[str, Callable[[Hand, Path], Opened]] = {
    "eager_bfloat16": by_bfloat16,
    "torch_compile": by_compile,
    "onnxruntime_int8": by_onnxruntime,
    "openvino_nncf": by_openvino,
    "torchao_int8": by_torchao,
}


if __name__ == "__main__":
    main()
