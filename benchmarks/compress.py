"""The form that `vivace compress` chooses: against trying every form, and against what one writes by hand.

    scripts/bench compress [JOB ...]

Each job is trained, and compressed for latency at batch 1 twice: once every form is measured to its end
(budget max), once in the order that the first results teach, passing over what they make unlikely (budget
balanced). The two chosen forms are timed in turn, each in a process of its own, on the same samples: the
second may be 3 % slower, for a quarter of the time. Then the form chosen of all is timed in turn with each
baseline: torch.compile, ONNX Runtime with static int8, NNCF with OpenVINO, torchao's dynamic int8 compiled.
What of a baseline fails is recorded with its reason. A run that was interrupted goes on where it stopped:
trainings, forms and finished comparisons are kept in runs/bench-compress.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _record
import torch

import vivace
from vivace.compressing.worker import Worker
from vivace.errors import VivaceError
from vivace.measuring.paired import Timed, compare
from vivace.processes.launch import Child, Source
from vivace.serving.calls import Calls
from vivace.serving.forms import BY_NAME
from vivace.serving.serve import Opened, in_torch, opened

HERE = Path(__file__).resolve().parent
KEPT = HERE.parent / "runs" / "bench-compress"
JOBS = {"digits": "digits", "photographs": "photographs", "small_cnn": f"{HERE / 'jobs.py'}:small_cnn"}
USUAL = ("digits", "small_cnn")  # about 20 minutes on two cores
SEARCHES = {"every": "max", "ordered": "balanced"}
SAME = {"ratio": {"estimate": 1.0, "low": 1.0, "high": 1.0}, "reason": "the same form"}
SECONDS, TIMEOUT = 10.0, 1200.0
HAND, WORKER = "compress:Hand", "vivace.compressing.worker:Worker"


def main() -> None:
    """Measure the named jobs, or the usual ones, and record each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--no-record", action="store_true", help="print, and file nothing under records")
    arguments = parser.parse_args()
    machine = vivace.inspect()
    for name in _record.named_jobs(parser, arguments.jobs or list(USUAL), tuple(JOBS)):
        found = measured(name)
        share, beside = found["share_of_time"], found["ordered_beside_every"]
        print(
            f"{name}: {found['every']['chosen']} of all, {found['ordered']['chosen']} by the order,",
            flush=True,
        )
        print(f"  {told(beside)} times as fast, in {share:.0%} of the time", flush=True)
        for baseline, result in found["baselines"].items():
            print(f"  against {baseline:16} {told(result)}", flush=True)
        if not arguments.no_record:
            opening = _record.opened(
                "compress", f"scripts/bench compress {name}", machine, f"compress_{name}"
            )
            _record.write({**opening, **found})


def told(result: dict[str, Any]) -> str:
    """A comparison in words."""
    ratio = result.get("ratio")
    if not ratio:
        return str(result["reason"])
    return f"{ratio['estimate']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def measured(name: str) -> dict[str, Any]:
    """Train, compress twice and compare one job, from where an earlier run stopped."""
    folder, reference = KEPT / name, JOBS[name]
    if not (folder / "train" / "run.json").exists():
        vivace.train(reference, out=folder / "train", watch=0.0, restart=(folder / "train").exists())
    every, ordered = (searched(reference, folder, kind) for kind in SEARCHES)
    done = folder / "compared.json"
    compared = json.loads(done.read_text(encoding="utf-8")) if done.exists() else {}
    wanted = {"ordered": (WORKER, ordered["chosen"], "ordered")}
    wanted |= {baseline: (HAND, baseline, "") for baseline in BASELINES}
    for row, (worker, form, kind) in wanted.items():
        if row not in compared:
            best = (WORKER, every["chosen"], "every")
            first, second = (best, (worker, form, kind)) if row == "ordered" else ((worker, form, kind), best)
            same = first[1:2] == second[1:2]
            compared[row] = SAME if same else beside(reference, folder, first, second)
            done.write_text(json.dumps(compared), encoding="utf-8")
    return {
        "every": every,
        "ordered": ordered,
        "ordered_beside_every": compared["ordered"],
        "share_of_time": ordered["seconds"] / every["seconds"],
        "baselines": {baseline: compared[baseline] for baseline in BASELINES},
    }


def searched(reference: str, folder: Path, kind: str) -> dict[str, Any]:
    """One search: what it chose, the seconds that its trials took, and every form's answer."""
    document = folder / kind / "compress.json"
    answer = json.loads(document.read_text(encoding="utf-8")) if document.exists() else {"go_on": kind}
    if answer["go_on"]:
        found = vivace.compress(
            reference, run=folder / "train", out=folder / kind, budget=SEARCHES[kind], resume=True
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
            return {"reason": str(error)}
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
    from vivace.serving.files import without_telemetry

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
    "torch_compile": by_compile,
    "onnxruntime_int8": by_onnxruntime,
    "openvino_nncf": by_openvino,
    "torchao_int8": by_torchao,
}


if __name__ == "__main__":
    main()
