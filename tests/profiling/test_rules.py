"""Each rule on a record with its fault planted, and on the same record without it."""

import copy
import dataclasses

import pytest

from vivace.machine import Device, Machine
from vivace.profiling import judge, rules, rules_memory, rules_precision, rules_ranks
from vivace.profiling.bounds import bounds, to_dict
from vivace.profiling.record.facts import dynamo_difference
from vivace.profiling.seen import Seen

COLLATE = "/x/torch/utils/data/_utils/collate.py:9 collate_tensor_fn"

MACHINE = Machine(
    devices=(Device("cpu", "a processor", 2**34, ("avx2", "avx512_bf16")),),
    num_cores=4,
    versions={},
    limits={},
)
RECORD = {
    "device": "cpu",
    "step_seconds": 0.1,
    "steps": 40,
    "seconds": {
        "data": 0.001,
        "place": 0.0,
        "forward": 0.03,
        "backward": 0.06,
        "update": 0.008,
        "communication": 0.0,
        "idle": 0.001,
    },
    "walls": [0.1] * 40,
    "loader": {"num_workers": 0, "persistent_workers": False, "batches": 10, "pin_memory": False},
    "flags": {"threads": 4, "cores": 4},
    "fetch": {"seen": [], "worker_batches": 0, "worker_seconds": 0.0},
    "precision": {"sites": {}},
    "resident": [2**30] * 40,
    "live": {"before": 5, "after": 5, "steps": 40, "held": []},
    "work": {"convolution": {"flops": 10**9, "bytes": 10**6}},
    "item_bytes": {"convolution:4": 10**9},
    "waits": [],
    "watched_steps": 5,
}
TRACE = {"step_seconds": 0.12, "busy_seconds": 0.1, "operators": {"convolution": 0.09, "memory": 0.01}}


def seen_with(**changes):
    """The healthy record, with keys replaced; a dict is merged into the one that is there."""
    record = copy.deepcopy(RECORD)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(record.get(key), dict):
            record[key].update(value)
        else:
            record[key] = value
    record["step_seconds"] = sum(record["seconds"].values())
    return Seen(record, dict(TRACE), MACHINE)


def course(peaks, **changed):
    """Rows of the course of the peak, in MiB; `changed` is of the step that first reaches the highest."""
    rows = [
        {"peak": peak * 2**20, "wall": 0.1, "elements": 100, "validates": False, "retains": False}
        for peak in peaks
    ]
    rows[peaks.index(max(peaks))].update(changed)
    return rows


RISING = [500, 800, *[1000] * 10, *[1500] * 8]


def tried(*ratios):
    return {"ratios": list(ratios), "seconds": 0.09}


PLANTED = {
    "waits for data": ("input", {"seconds": {"data": 0.1}}),
    "workers that hand over slowly": (
        "workers",
        {
            "seconds": {"data": 0.1},
            "loader": {"num_workers": 2},
            "fetch": {"worker_batches": 10, "worker_seconds": 0.1},
        },
    ),
    "too few workers": (
        "workers",
        {
            "seconds": {"data": 0.1},
            "loader": {"num_workers": 1},
            "fetch": {"worker_batches": 10, "worker_seconds": 2.0},
        },
    ),
    "enough workers, slow samples": (
        "input",
        {
            "seconds": {"data": 0.4},
            "loader": {"num_workers": 4},
            "fetch": {"worker_batches": 10, "worker_seconds": 20.0},
        },
    ),
    "batches copied from pageable memory": (
        "input",
        {
            "device": "cuda",
            "seconds": {"place": 0.05},
            "device_seconds": {
                "place": 0.05,
                "forward": 0.03,
                "backward": 0.06,
                "update": 0.0,
                "communication": 0.0,
            },
            "batch_bytes": 10**8,
        },
    ),
    "one thread": ("workers", {"flags": {"threads": 1}, "experiments": {"threads": tried(2.9, 3.0, 3.1)}}),
    "workers restart": (
        "workers",
        {"loader": {"num_workers": 2}, "interrupted": [{"data": 0.5, "starting": 0.5, "wall": 0.6}] * 4},
    ),
    "values in a loop": (
        "sync",
        {"waits": [{"site": "/home/me/train.py:12", "count": 1000, "seconds": 0.1, "span": 0.2}]},
    ),
    "slow code between steps": ("idle", {"seconds": {"idle": 0.1}}),
    "compiled again and again": (
        "recompiles",
        {
            "dynamo": {
                "new_graphs": 9,
                "reasons": [{"place": "m.py:3 forward", "seconds": 0.3, "reason": "size mismatch"}] * 9,
                "compilations": [{"place": "m.py:3 forward", "seconds": 0.3, "reason": "size mismatch"}] * 9,
                "breaks": [],
            }
        },
    ),
    "a compilation that failed for its limit": (
        "recompiles",
        {
            "dynamo": {
                "new_graphs": 0,
                "graphs": 8,
                "reasons": [{"place": "m.py:3 forward", "seconds": 0.3, "reason": "len(factors) == 3"}] * 8,
                "compilations": [{"place": "None:None None", "seconds": 0.01, "reason": "len(factors) == 9"}],
                "failed": [{"place": "None:None None", "failed": "Dynamo recompile limit exceeded"}],
                "breaks": [],
            }
        },
    ),
    "graph breaks": (
        "recompiles",
        {"dynamo": {"new_graphs": 0, "graphs": 3, "compilations": [], "breaks": [["item() in m.py", 4]]}},
    ),
    "compiled until it gave up": (
        "recompiles",
        {
            "dynamo": {
                "new_graphs": 0,
                "graphs": 8,
                "reasons": [{"place": "m.py:3 forward", "seconds": 0.3, "reason": "len(factors) == 3"}] * 8,
                "compilations": [],
                "breaks": [["Dynamo recompile limit exceeded", 1]],
            }
        },
    ),
    "kept graphs": ("memory", {"live": {"after": 45, "held": ["losses (train.py)"]}}),
    "growing memory": ("memory", {"resident": [2**30 + 2**22 * step for step in range(40)]}),
    "growing memory that is held": (
        "memory",
        {"resident": [2**30 + 2**22 * step for step in range(40)], "allocated": [2**29, 2**29 + 2**27]},
    ),
    "every graph is kept": (
        "memory",
        {
            "course": [{**row, "retains": True} for row in course([1000] * 20)],
            "activation_bytes": 2**28,
            "held_bytes": 2**28,
            "retained_at": "/home/me/train.py:12",
        },
    ),
    "validation peaks": ("memory", {"course": course(RISING, validates=True, wall=2.0)}),
    "the longest samples peak": ("memory", {"course": course(RISING, elements=400, wall=2.0)}),
    "a validation that came later peaks": ("memory", {"late": {"peak": 2**31, "rise": 2**30}}),
    "a validation without gradients where memory is scarce": (
        "memory",
        {"late": {"peak": 2**50, "rise": 2**49, "gradients": False}},
    ),
    "started anew": ("memory", {"allocator_retries": 3}),
    "communication": (
        "multi_gpu",
        {"seconds": {"communication": 0.1}, "ranks": {"world_size": 2, "sampler": "DistributedSampler"}},
    ),
    "the same batch twice": (
        "multi_gpu",
        {
            "ranks": {"world_size": 2, "sampler": "RandomSampler", "batch_sum": 3.5},
            "other_ranks": [{"ranks": {"batch_sum": 3.5}}],
        },
    ),
    "DataParallel": ("multi_gpu", {"asked": {"data_parallel": "train.py:3"}}),
    "autocast costs time": (
        "precision_no_gain",
        {
            "precision": {"autocast": 40, "autocast_dtypes": {"bfloat16": 40}},
            "item_bytes": {"convolution:2": 1},
            "experiments": {"autocast": tried(1.2, 1.25, 1.3)},
        },
    ),
    "autocast around nothing": (
        "precision_no_gain",
        {"precision": {"autocast": 40, "autocast_dtypes": {"bfloat16": 40}}},
    ),
    "skipped steps": ("overflow", {"precision": {"scaler_steps": 40, "skipped": 10, "scaler_updates": 40}}),
    "not a number": ("overflow", {"precision": {"loss_not_finite": 5}}),
    "underflow": (
        "overflow",
        {
            "precision": {"autocast_dtypes": {"float16": 40}, "tiny_gradients": 0.7, "autocast": 40},
            "item_bytes": {"matmul:2": 1},
        },
    ),
    "clipped while scaled": (
        "amp_misuse",
        {"precision": {"clip_scaled": 40, "sites": {"clip_scaled": "train.py:9"}}},
    ),
    "unscaled by hand": ("amp_misuse", {"precision": {"unscaled_by_hand": 40}}),
    "no scaler.update": ("amp_misuse", {"precision": {"scaler_steps": 40, "scale": 40}}),
    "optimizer.step in place of scaler.step": ("amp_misuse", {"precision": {"scale": 40}}),
    "scaled bfloat16": (
        "amp_misuse",
        {
            "precision": {
                "scaler_steps": 40,
                "scaler_updates": 40,
                "scale": 40,
                "autocast_dtypes": {"bfloat16": 40},
            }
        },
    ),
    "float16 without a scaler": ("amp_misuse", {"precision": {"autocast_dtypes": {"float16": 40}}}),
    "compile thrown away": ("no_effect", {"asked": {"compile": "train.py:5"}, "compiled_alive": False}),
    "channels-last without convolutions": (
        "no_effect",
        {"asked": {"channels_last": "train.py:5"}, "work": {"convolution": {}}},
    ),
    "anomaly detection": ("no_effect", {"experiments": {"anomaly": tried(1.4, 1.5, 1.6)}}),
    "float64": ("no_effect", {"experiments": {"double": tried(1.9, 2.0, 2.1)}}),
}


def test_eight_bytes_a_number_beside_float32_weights_are_complex():
    for weights, precision in (("float32", "complex64"), ("float64", "float64")):
        seen = seen_with(parameter_dtypes=[weights])
        seen.record["item_bytes"] = {"matmul:8": 10**9}
        assert judge._precision(seen) == (precision, 8)


def test_pinning_for_a_model_on_the_cpu_is_for_nothing_where_there_is_a_gpu():
    seen = seen_with(loader={"pin_memory": True})
    devices = (Device("cuda", "a GPU", 2**34, ()), *MACHINE.devices)
    machine = dataclasses.replace(MACHINE, devices=devices)
    found = rules.judge_all(dataclasses.replace(seen, machine=machine))
    assert [verdict.cause for verdict in found] == ["no_effect"]


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_cause_is_named_and_alone(name):
    cause, changes = PLANTED[name]
    verdicts = rules.judge_all(seen_with(**changes))
    assert [verdict.cause for verdict in verdicts] == [cause]
    assert verdicts[0].evidence
    assert verdicts[0].next
    assert 0 < verdicts[0].low <= verdicts[0].high


HARMLESS = {
    "nothing": {},
    "a loader that keeps up": {"seconds": {"data": 0.008}},
    "a slow validation beside workers": {
        "loader": {"num_workers": 2},
        "interrupted": [{"data": 5.0, "starting": 0.001, "wall": 5.1}] * 4,
    },
    "one value a step": {"waits": [{"site": "a.py:1", "count": 5, "seconds": 0.0001, "span": 0.0001}]},
    "autocast that pays": {
        "precision": {"autocast": 40, "autocast_dtypes": {"bfloat16": 40}},
        "item_bytes": {"convolution:2": 1},
        "experiments": {"autocast": tried(0.6, 0.62, 0.65)},
    },
    "autocast that makes no difference within the noise": {
        "precision": {"autocast": 40, "autocast_dtypes": {"bfloat16": 40}},
        "item_bytes": {"convolution:2": 1},
        "experiments": {"autocast": tried(0.8, 0.95, 1.1)},
    },
    "a scaler that skipped once": {
        "precision": {
            "scaler_steps": 400,
            "scaler_updates": 400,
            "scale": 400,
            "skipped": 1,
            "autocast_dtypes": {"float16": 400},
        }
    },
    "steps without the scaler, of gradients that were unscaled": {
        "precision": {
            "scale": 400,
            "scaler_updates": 400,
            "unscale": 400,
            "steps": 400,
            "autocast_dtypes": {"float16": 400},
        }
    },
    "a run that ended before it was seen what is compiled": {"asked": {"compile": "a.py:1"}},
    "compiled once": {
        "asked": {"compile": "a.py:1"},
        "dynamo": {"graphs": 1, "new_graphs": 0, "compilations": [], "breaks": [], "reasons": []},
    },
    "compiled for a first validation": {
        "dynamo": {
            "graphs": 2,
            "new_graphs": 1,
            "compilations": [{"place": "m.py:3 forward", "seconds": 2.0, "reason": "grad_mode"}],
            "breaks": [],
            "reasons": [{"place": "m.py:3 forward", "seconds": 2.0, "reason": "grad_mode"}],
        }
    },
    "samples in memory that are collated": {
        "seconds": {"data": 0.03},
        "fetch": {"seen": [[f"{COLLATE} | {COLLATE}", 30]]},
    },
    "memory in pieces that nobody holds": {
        "resident": [2**30 + 2**22 * step for step in range(40)],
        "allocated": [2**29, 2**29 + 2**24],
    },
    "a peak at the end that is gone again": {
        "resident": [989 * 2**20] * 7 + [1025 * 2**20] * 2 + [989 * 2**20]
    },
    "memory that levels off": {"resident": [2**30 + int(2**27 * (1 - 0.9**step)) for step in range(40)]},
    "memory that is not pinned without a GPU": {"loader": {"pin_memory": True}},
    "memory that settles": {"resident": [2**30 + 2**26 * min(step, 10) for step in range(40)]},
    "a peak that no step of another kind made": {"course": course(RISING)},
    "validation below training's peak": {"course": course([500, 800, *[1000] * 18], validates=True)},
    "a validation without gradients that peaks where memory is plenty": {
        "course": [{**row, "gradients": False} for row in course(RISING, validates=True, wall=2.0)]
    },
    "a later validation without gradients where memory is plenty": {
        "late": {"peak": 2**31, "rise": 2**30, "gradients": False}
    },
    "a later validation that needs little": {"late": {"peak": 2**31, "rise": 2**24}},
    "evaluation mode in every step": {
        "course": [{**row, "validates": True} for row in course(RISING, elements=100)]
    },
    "kept graphs that go with their loss": {
        "course": [{**row, "retains": True} for row in course([1000] * 20)],
        "live": {"before": 0, "after": 0},
        "activation_bytes": 2**28,
        "retained_at": "/home/me/train.py:12",
    },
    "graphs that some steps keep": {
        "course": [{**row, "retains": number % 2 > 0} for number, row in enumerate(course([1000] * 20))],
        "activation_bytes": 2**28,
        "retained_at": "/home/me/train.py:12",
    },
    "threads that make no difference": {
        "flags": {"threads": 2},
        "experiments": {"threads": tried(0.98, 1.0, 1.02)},
    },
    "two ranks that hide their communication": {
        "ranks": {"world_size": 2, "sampler": "DistributedSampler", "batch_sum": 1.0},
        "other_ranks": [{"ranks": {"batch_sum": 2.0}}],
    },
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_has_no_verdict(name):
    assert rules.judge_all(seen_with(**HARMLESS[name])) == []


def test_a_rare_long_step_is_worth_what_it_takes_longer():
    seen = seen_with(course=course(RISING, elements=400, wall=2.0))
    (verdict,) = rules.judge_all(seen)
    assert "longest samples need 1.46 GiB, the others 0.977 GiB" in verdict.evidence
    whole = 17 * 0.1 + 2.0
    assert verdict.high == pytest.approx(1.1 * whole / (18 * 0.1))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"loader": {"num_workers": 0}}, False),  # whose waiting is timed
        ({"kernels": 2000}, False),  # it is handing over that takes the time
        ({"silent_modules": True}, False),  # compiled code is no operator
    ],
)
def test_a_loop_that_makes_its_batches_itself_is_idle(change, found):
    own = {"loader": None, "kernels": 50, "seconds": {"forward": 0.08, "backward": 0.02}, "step_seconds": 0.1}
    seen = dataclasses.replace(
        seen_with(**{**own, **change}), trace={"step_seconds": 0.1, "busy_seconds": 0.03}
    )
    assert (rules.idle(seen) is not None) == found


def two_ranks(**changes):
    """The second rank waits in its collectives for the first, which takes longer by `changes`."""
    usual = {"data": 0.0, "place": 0.0, "forward": 0.02, "backward": 0.03, "update": 0.01, "idle": 0.0}
    slow = {**usual, **changes, "communication": 0.0}
    waiting = sum(slow.values()) - sum(usual.values())
    other = {
        "step_seconds": sum(slow.values()),
        "seconds": {**usual, "communication": waiting},
        "ranks": {"rank": 1},
    }
    ranks = {"world_size": 2, "rank": 0, "sampler": "DistributedSampler"}
    return seen_with(seconds=slow, step_seconds=sum(slow.values()), ranks=ranks, other_ranks=[other])


@pytest.mark.parametrize(
    ("phase", "words"),
    [("idle", "of it in its own code"), ("data", "of it waiting for data"), ("forward", "of it in forward")],
)
def test_a_straggling_rank_is_named_with_what_it_does(phase, words):
    seen = two_ranks(**{phase: 0.05})
    (verdict,) = [verdict for verdict in rules.judge_all(seen) if verdict.cause == "multi_gpu"]
    assert "rank 0 needs" in verdict.evidence
    assert words in verdict.evidence
    assert "idle" not in [verdict.cause for verdict in rules.judge_all(seen)]
    assert verdict.high > 1.5


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("0/6: self.step == 6  # m.py:3", "change self.step outside"),
        ("0/1: tensor 'x' size mismatch at index 0. expected 4, actual 5", "dynamic=True"),
        ("0/1: ___check_obj_id(L['f'], 1)", "TORCH_LOGS=recompiles"),
    ],
)
def test_what_to_do_about_recompiling_follows_from_its_reason(reason, advice):
    row = {"place": "m.py:3 forward", "seconds": 2.0, "reason": reason, "failed": None}
    found = {"graphs": 5, "new_graphs": 4, "compilations": [row] * 4, "reasons": [row] * 4, "breaks": []}
    assert advice in rules.recompiles(seen_with(dynamo=found)).next


def test_compilations_of_which_the_first_are_forgotten_are_told_as_at_least_so_many():
    """torch keeps the last 64 in all; those that were there before the window are none of its own."""
    row = {"place": "m.py:3 forward", "seconds": 0.01, "reason": "size mismatch", "failed": None}
    made = [object() for _ in range(200)]

    def state(metrics, graphs):
        kept = {"metrics": metrics, "compilations": [row] * len(metrics), "most": 64}
        return {**kept, "graphs": graphs, "breaks": [], "break_places": {}}

    some = dynamo_difference(state(made[:64], 64), state(made[10:74], 74))
    assert (len(some["compilations"]), some["new_graphs"], some["cut"]) == (10, 10, 64)
    many = dynamo_difference(state(made[:64], 64), state(made[136:], 200))
    assert (len(many["compilations"]), many["new_graphs"]) == (64, 136)
    seen = [rules.recompiles(seen_with(dynamo=found, walls=[0.1] * 10)).evidence for found in (some, many)]
    assert "made 10 graphs in 40 steps after warm-up (0.1 s" in seen[0]
    assert "made 136 graphs in 40 steps after warm-up (at least 0.64 s" in seen[1]
    gave_up = {**many, "compilations": [], "breaks": [["Dynamo recompile limit exceeded", 1]]}
    assert "m.py:3 at least 64 times anew" in rules.recompiles(seen_with(dynamo=gave_up)).evidence
    few = dynamo_difference({}, state(made[:3], 3))
    assert (len(few["compilations"]), few["cut"]) == (3, None)


def test_loading_is_the_whole_step_where_a_gpu_waits_for_workers():
    slow = {"seconds": {"data": 0.05}, "device_seconds": None}
    for device, workers, whole in (("cuda", 4, True), ("cuda", 0, False), ("cpu", 4, False)):
        seen = seen_with(device=device, loader={"num_workers": workers}, **slow)
        assert seen.loading_seconds == pytest.approx(seen.step_seconds if whole else 0.05)
        assert seen.waits_for_workers is whole
    assert seen_with(device="cuda", loader={"num_workers": 4}).loading_seconds < 0.02


def test_the_lines_that_break_a_graph_are_named():
    found = {"graphs": 3, "new_graphs": 0, "compilations": [], "breaks": [["item()\n  Explanation: long", 4]]}
    verdict = rules.recompiles(seen_with(dynamo={**found, "break_places": {"/me/m.py:15": 4}}))
    assert "4 times (m.py:15): item()" in verdict.evidence
    assert "long" not in verdict.evidence


def test_removing_a_wait_is_worth_its_share():
    (verdict,) = rules.judge_all(seen_with(seconds={"data": 0.099}, data_cpu_seconds=0.0))
    assert verdict.low <= 2.0 <= verdict.high


def test_nothing_is_promised_to_measure_what_workers_bring_to_a_stream():
    slow = {"seconds": {"data": 0.1}, "fetch": {"worker_batches": 10, "worker_seconds": 0.1}}
    for stream, promised in ((False, True), (True, False)):
        (verdict,) = rules.judge_all(seen_with(**slow, loader={"num_workers": 2, "stream": stream}))
        assert verdict.cause == "workers"
        assert ("vivace tune" in verdict.next) is promised


def test_workers_bring_less_where_fetching_needs_the_cores_that_training_uses():
    idle = rules.data_wait(seen_with(seconds={"data": 0.099}, data_cpu_seconds=0.0))
    busy = rules.data_wait(seen_with(seconds={"data": 0.099}, data_cpu_seconds=0.099))
    assert busy.low < idle.low


def test_a_second_kind_of_work_is_named_beside_the_first():
    decoding = "/me/data.py:3 __getitem__ | /x/site-packages/PIL/ImageFile.py:425 load"
    resizing = "/me/data.py:4 __getitem__ | /x/site-packages/PIL/Image.py:2440 resize"
    seen = seen_with(seconds={"data": 0.1}, fetch={"seen": [[decoding, 60], [resizing, 40]]})
    evidence = rules.data_wait(seen).evidence
    assert "decoding (60 % of it; most in data.py:3, __getitem__) and augmenting (40 %; data.py:4" in evidence


@pytest.mark.parametrize(
    ("site", "kind"),
    [
        ("/me/data.py:3 __getitem__ | /x/site-packages/PIL/Image.py:900 load", "decoding"),
        ("/me/data.py:3 __getitem__ | /x/site-packages/torchvision/transforms/v2.py:9 rotate", "augmenting"),
        ("/me/data.py:3 load | /me/data.py:3 load", "reading"),
        ("/me/data.py:3 __getitem__ | /x/site-packages/numpy/lib/_format_impl.py:847 read_array", "reading"),
        ("/me/data.py:3 __getitem__ | /x/site-packages/PIL/Image.py:2440 resize", "augmenting"),
        (
            "/me/read/filters.py:3 thread | /me/read/data.py:3 thread",
            "code of the dataset or of its collate_fn",
        ),
        ("/me/train.py:3 collate | /me/train.py:3 tokenize", "code of the dataset or of its collate_fn"),
        (f"{COLLATE} | {COLLATE}", "collating samples into batches"),
        ("/me/data.py:3 __getitem__ | /me/data.py:3 __getitem__", "code of the dataset or of its collate_fn"),
    ],
)
def test_what_fetching_does_is_named(site, kind):
    seen = seen_with(seconds={"data": 0.1}, fetch={"seen": [[site, 30]]})
    assert kind in rules.data_wait(seen).evidence


@pytest.mark.parametrize(
    ("counted", "blamed"),
    [
        ({"narrow_phases": ["backward", "forward"]}, True),
        ({"narrow_phases": ["forward"]}, False),
        ({"narrow_phases": []}, False),
        ({"narrow_phases": [], "silent_modules": True}, True),  # compiled: what it multiplies is not seen
    ],
)
def test_float16_without_a_scaler_is_blamed_where_gradients_may_be_lost(counted, blamed):
    precision = {"autocast_dtypes": {"float16": 40}, "steps": 40}
    verdict = rules_precision.amp_misuse(seen_with(precision=precision, **counted))
    assert (verdict is not None) == blamed


def test_a_folder_with_a_space_in_its_name_is_a_part_of_the_place(tmp_path):
    file = tmp_path / "My Drive" / "train.py"
    file.parent.mkdir()
    file.write_text("def __getitem__(self, index):\n    return np.load(self.names[index])\n")
    place = f"{file}:2 __getitem__"
    seen = seen_with(seconds={"data": 0.1}, fetch={"seen": [[f"{place} | {place}", 30]]})
    assert "reading (100 % of it; most in train.py:2, __getitem__)" in rules.data_wait(seen).evidence
    row = {"place": f"{file}:1 forward", "seconds": 0.3, "reason": "size mismatch"}
    compiled = {"new_graphs": 9, "reasons": [row] * 9, "compilations": [row] * 9, "breaks": []}
    assert "last train.py:1: size" in rules.recompiles(seen_with(dynamo=compiled)).evidence
    failed = {"graphs": 0, "failed": [{**row, "failed": "no such operator"}]}
    assert "gave up on train.py:1: no such" in rules.recompiles(seen_with(dynamo=failed)).evidence


def test_waiting_for_a_busy_gpu_is_no_fault():
    changes = {"waits": [{"site": "a.py:1", "count": 5, "seconds": 0.4, "span": 0.4}], "device": "cuda"}
    seen = seen_with(**changes)
    assert rules.sync(dataclasses.replace(seen, trace={**TRACE, "busy_seconds": 0.119})) is None
    half_idle = dataclasses.replace(seen, trace={**TRACE, "busy_seconds": 0.06})
    assert rules.sync(half_idle).cause == "sync"


def test_wrong_numbers_come_before_slow_ones():
    seen = seen_with(seconds={"data": 0.3}, precision={"loss_not_finite": 3})
    assert [verdict.cause for verdict in rules.judge_all(seen)] == ["overflow", "input"]


def test_every_rule_is_asked():
    own = {
        rules.data_wait,
        rules.placing,
        rules.threads,
        rules.restarts,
        rules.sync,
        rules.idle,
        rules.recompiles,
    }
    own |= {rules_memory.memory, rules_ranks.multi_gpu, rules_precision.overflow, rules_precision.amp_misuse}
    assert set(rules.rules()) == own | {rules_precision.no_gain, rules_precision.no_effect}


def test_exposed_collectives_are_taken_from_the_backward_pass():
    seen = seen_with()
    traced = dataclasses.replace(seen, trace={**TRACE, "step_seconds": 0.1, "communication_seconds": 0.03})
    assert traced.shares["communication"] == pytest.approx(0.3)
    assert traced.shares["backward"] == pytest.approx(0.3)
    assert sum(traced.shares.values()) == pytest.approx(1)


def test_autocast_that_reaches_nothing_is_worth_what_the_copy_gained():
    changes = {"precision": {"autocast": 40}, "experiments": {"autocast_reached": tried(1.9, 2.0, 2.1)}}
    (verdict,) = rules.judge_all(seen_with(**changes))
    model = 0.9  # forward and backward, of the step
    assert verdict.low < 1 / (1 - model + model / 2.0) < verdict.high


def test_ranks_that_read_the_same_batch_count_once():
    ranks = {"ranks": {"world_size": 2, "batch_sum": 3.5}, "samples": 32}
    same = seen_with(**ranks, other_ranks=[{"ranks": {"batch_sum": 3.5}}])
    apart = seen_with(**ranks, other_ranks=[{"ranks": {"batch_sum": 4.5}}])
    assert apart.samples_per_second == 2 * same.samples_per_second == pytest.approx(2 * 32 / 0.1)


def test_on_a_gpu_the_synchronised_steps_say_what_the_device_does():
    device = {
        "data": 0.0,
        "place": 0.01,
        "forward": 0.02,
        "backward": 0.04,
        "update": 0.01,
        "communication": 0.0,
    }
    host = {"data": 0.06, "place": 0.0, "forward": 0.01, "backward": 0.01, "update": 0.0, "idle": 0.02}
    seen = seen_with(seconds=host, device="cuda", device_seconds={**device, "idle": 0.0})
    shares = {phase: share for phase, share in seen.shares.items() if share}
    expected = {"data": 0.15, "place": 0.1, "forward": 0.2, "backward": 0.4, "update": 0.1, "idle": 0.05}
    assert shares == pytest.approx(expected)


BOUNDS = {
    "launch": {"experiments": {"double_batch": tried(0.9, 0.95, 0.97)}},
    "small_batch": {"experiments": {"double_batch": tried(0.62, 0.65, 0.7)}},
    "optimizer": {"seconds": {"update": 0.08}, "experiments": {"fused": tried(2.9, 3.0, 3.1)}},
    "paging": {"page_faults": 60_000.0},
    "swapping": {"disk_faults": 40.0},
}


@pytest.mark.parametrize("name", BOUNDS)
def test_what_bounds_a_step_is_named_and_alone(name):
    (bound,) = bounds(seen_with(**BOUNDS[name]), 300)
    document = to_dict(bound)
    assert document["name"] == name
    assert 1 <= document["gain"]["low"] <= document["gain"]["high"]
    assert document["evidence"]
    assert document["next"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"experiments": {"double_batch": tried(0.5, 0.52, 0.55)}},
        {"page_faults": 500.0, "disk_faults": 0.2},
    ],
)
def test_work_that_fills_the_step_has_no_bound_of_these(changes):
    assert bounds(seen_with(**changes), 300) == []


def test_twice_the_batch_for_nothing_is_worth_twice_the_model_s_part():
    (bound,) = bounds(seen_with(experiments={"double_batch": tried(1.0, 1.0, 1.0)}), 300)
    assert bound.low < 2 / 1.01 < bound.high  # data takes twice as long, the rest as long as before


def test_a_fused_update_is_worth_its_share():
    (bound,) = bounds(seen_with(**BOUNDS["optimizer"]), 300)
    share = 0.08 / (0.08 + 0.092)
    assert bound.low < 1 / (1 - share + share / 3) < bound.high


def test_workers_that_start_anew_are_told_with_what_is_known_of_a_pass():
    row = {"data": 0.5, "starting": 0.5, "wall": 0.6}
    for batches, told in ((10, "every 10 batches"), (None, "for each pass over the data")):
        seen = seen_with(loader={"num_workers": 1, "batches": batches}, interrupted=[row] * 4)
        assert f"1 worker started anew {told}, which takes 499 ms" in rules.restarts(seen).evidence


def test_more_workers_than_there_are_is_what_is_advised():
    slow = {"data": 0.1, "forward": 0.07, "backward": 0.1}
    fetch = {"worker_batches": 10, "worker_seconds": 3.5}
    verdict = rules.data_wait(seen_with(seconds=slow, loader={"num_workers": 2}, fetch=fetch))
    assert verdict.next == "num_workers=3"


@pytest.mark.parametrize(("count", "told"), [(2, "2 times in 5 steps"), (100, "20 times a step")])
def test_how_often_values_are_asked_for_is_never_zero(count, told):
    row = {"site": "/home/me/train.py:12", "count": count, "seconds": 0.1, "span": 0.2}
    assert rules.sync(seen_with(waits=[row])).evidence.startswith(f"{told} train.py:12 asks")


def test_one_of_a_kind_is_told_as_one():
    one = {"flags": {"threads": 1}, "experiments": {"threads": tried(2.9, 3.0, 3.1)}}
    assert "torch uses 1 thread on 4 cores;" in rules.threads(seen_with(**one)).evidence
    handed = {"seconds": {"data": 0.1}, "fetch": {"worker_batches": 10, "worker_seconds": 0.1}}
    verdict = rules.data_wait(seen_with(**handed, loader={"num_workers": 1}))
    assert "waits for 1 loader worker, although" in verdict.evidence
    assert verdict.next.startswith("num_workers=0;")


def test_paging_takes_no_smaller_share_at_most_than_at_least():
    (bound,) = bounds(seen_with(page_faults=10_000_000.0), 300)
    assert "takes 50 % to 50 % of the step" in bound.evidence


@pytest.mark.parametrize(
    ("job", "command"),
    [
        ("job", "vivace.tune(job)"),
        ("my jobs/train.py:job", "vivace tune 'my jobs/train.py:job'"),
        (None, "vivace run -- python train.py"),
    ],
)
def test_the_next_command_can_be_typed(job, command):
    assert dataclasses.replace(seen_with(), job=job, command="python train.py").faster == command
