"""The benchmark reads every form in which published rows state task, precision, batch and unit, and never
crashes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import _published as published
import pytest

from vivace.advising.demand import load_models
from vivace.advising.formula import load_coefficients
from vivace.errors import InputError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

HEAD = "model,task,gpu,n_gpus,precision,batch_per_gpu,unit,value,source\n"


def rows_of(tmp_path, *lines):
    path = tmp_path / "rows.csv"
    path.write_text(HEAD + "".join(line + "\n" for line in lines))
    return published.read(path, load_models().get)


@pytest.mark.parametrize(
    ("line", "seconds", "setting"),
    [
        (
            "resnet50,train/pytorch-1.13.0a0/real/NGC,NVIDIA A100-SXM4-80GB,8,amp_fp16,256,img/s,20480,x",
            0.1,
            {
                "precision": "amp_fp16",
                "num_gpus": 8,
                "harness": "ngc",
                "year": 2022.8,
                "channels_last": False,
            },
        ),
        (
            "ResNet50 v1.5,train/mxnet/nhwc/NVIDIA-DLE,V100-SXM2-16GB,1,amp,"
            '"128 (TF) / 256 (AMP)",img/s/gpu,1280,x',
            0.2,
            {"batch_size": 256.0, "framework": "mxnet", "harness": "examples", "channels_last": True},
        ),
        (
            "vgg16,train fwd+bwd no-optimizer/pytorch/224px/DataParallel,TITAN Xp,2,fp64,12,ms/iter,50,x",
            0.05,
            {"precision": "fp64", "updates": False, "harness": "loop", "data_parallel": True},
        ),
        (
            "transformerxlbase,train/pytorch-2.3.0a0/real/NGC,H100-PCIe-80GB,1,tf32,32,tok/s,61440,x",
            0.1,
            {"precision": "tf32", "year": 2024.3},
        ),
        (
            'BERT 512,train/tensorflow/layout?/NVIDIA-DLE,V100-SXM-32GB,4,fp32,"10 , 4",seq/s,160,x',
            0.1,
            {"batch_size": 4.0, "framework": "tensorflow", "num_gpus": 4},
        ),
        (
            "gpt2_large,train-step fwd+bwd/pytorch-2.1/seq1024/dp4,H100-SXM5-80GB,4,fp32,"
            "global 16,ms/iter,700,x",
            0.7,
            {"batch_size": 4.0, "updates": False},
        ),
        (
            "resnet50,train/pytorch,Quadro RTX 5000,1,tf32,64,images/sec,640,x",
            0.1,
            {"precision": "fp32", "harness": "other"},
        ),
    ],
)
def test_forms_of_rows(tmp_path, line, seconds, setting):
    (row,), left_out = rows_of(tmp_path, line)
    assert left_out == {}
    assert row.seconds == pytest.approx(seconds)
    assert {key: getattr(row.setting, key) for key in setting} == setting


def test_a_batch_that_is_not_stated_is_guessed_from_memory(tmp_path):
    small, large = (
        rows_of(tmp_path, f"SSD,train/pytorch-1.9.0a0/real/NGC,{card},1,amp_fp16,,img/s,100,x")[0][0]
        for card in ("RTX A4000", "A100-SXM4-80GB")
    )
    assert small.guessed_batch
    assert small.setting.batch_size < large.setting.batch_size


def test_what_cannot_be_used_is_counted_by_reason(tmp_path):
    rows, left_out = rows_of(
        tmp_path,
        "resnet50,train/pytorch/SUSPECT-superlinear,RTX 3090,1,amp,64,img/s,1,x",
        "resnet50,train/pytorch,RTX 9999 Super Ti,1,amp,64,img/s,1,x",
        "no_such_net,train/pytorch,RTX 3090,1,amp,64,img/s,1,x",
        "resnet50,train/pytorch,RTX 3090,1,int3,64,img/s,1,x",
        "resnet50,train/pytorch,RTX 3090,1,amp,64,furlongs,1,x",
        "resnet50,train/pytorch,RTX 3090,1,amp,64,img/s,,x",
        "bert,mlperf-v4.0/pytorch/wikipedia,H100-SXM5-80GB,8,amp (in fp8: unverified),96,seq/s,7463,x",
        "resnet50,train/pytorch,Gaudi 2,1,amp,64,img/s,5000,x",
        "resnet50",
    )
    assert rows == []
    assert sum(left_out.values()) == 9
    assert {"marked suspect", "trained in fp8", "not predicted: Gaudi 2"} <= left_out.keys()


def test_awkward_tables_are_read_or_refused_in_words(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("\ufeffModel, GPU ,Precision,Unit,Value\nresnet50,h100 80gb sxm5,amp,img/s,2000\n")
    (row,), left_out = published.read(path, load_models().get)
    assert left_out == {}
    assert (row.gpu.name, row.setting.num_gpus, row.guessed_batch) == ("H100-SXM5-80GB", 1, True)
    path.write_text("")
    assert published.read(path, load_models().get) == ([], {})
    path.write_text("model,gpu,unit,value\nresnet50,H100,img/s,2000\n")
    with pytest.raises(InputError, match="lacks the column 'precision'"):
        published.read(path, load_models().get)
    with pytest.raises(InputError, match="cannot be read"):
        published.read(tmp_path / "none.csv", load_models().get)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a table"):
        published.read(path, load_models().get)


def test_the_largest_runs_of_mlperfs_first_bert_computed_their_padding_too(tmp_path):
    name = "bert-large-pretrain seq512 (unpadded/packed)"
    rows, _ = rows_of(
        tmp_path,
        *(
            f"{name},mlperf-{v}/pytorch/wikipedia,A100-SXM4-40GB,{number},amp,20,seq/s,1000,x"
            for v, number in (("v0.7", 8), ("v0.7", 256), ("v2.1", 256))
        ),
    )
    assert [row.key for row in rows] == [f"own:bert_large_{kind}" for kind in ("packed", "512", "packed")]


def test_renamed_and_full_softmax_models_have_keys():
    assert published.key_of("swin_v2_cr_tiny_384", "train/timm/384px") == "timm:swinv2_cr_tiny_384@384"
    ngc = "train/pytorch-1.13.0a0/real/NGC"
    assert published.key_of("transformerxllarge", ngc) == "own:transformerxllarge_full"
    assert published.key_of("Transformer-XL large", "train/pytorch/DLE") == "own:transformerxllarge"


@pytest.mark.slow
def test_scoring_prints_one_document_last(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        HEAD + "resnet50,train/pytorch-1.13.0a0/real/NGC,RTX A6000,1,amp_fp16,128,img/s,900,x\n"
        "no_such_net,train/pytorch,RTX 3090,1,amp,64,img/s,1,x\n"
    )
    command = [sys.executable, str(BENCHMARKS / "advise.py"), "--data", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["n"] == 1
    assert 0 <= document["median_abs_error"] < 1
    assert set(document["by_gpu"]) == {"RTX A6000"}


def test_the_documentation_shows_the_newest_record():
    import advise as benchmark

    newest = max((BENCHMARKS.parent / "records" / "advise" / "published").glob("*.json"))
    text = benchmark.DOCS.read_text(encoding="utf-8")
    assert benchmark.with_errors(text, json.loads(newest.read_text(encoding="utf-8"))) == text


def test_inference_is_read_as_a_forward_pass_on_software_no_older_than_the_card(tmp_path):
    (tmp_path / "rows.csv").write_text(
        HEAD + "resnet50,infer/timm/pytorch-2.4/nhwc/synthetic/224px,RTX 5090,1,amp_fp16,256,img/s,2560,x\n"
    )
    asked = []
    demand = load_models()["timm:gluon_resnet101_v1c@224"]
    (row,), _ = published.read(tmp_path / "rows.csv", lambda key: asked.append(key) or demand)
    assert asked == ["timm-forward:resnet50@224"]
    assert (row.setting.harness, row.setting.updates, row.setting.channels_last) == ("forward", False, True)
    assert row.setting.year == pytest.approx(2025.0)  # of the card; PyTorch 2.4 is of 2024
    assert row.seconds == pytest.approx(0.1)


def test_figures_are_gathered_from_a_checkout_with_source_and_date(tmp_path):
    import gather

    results = tmp_path / "results"
    results.mkdir()
    head = "model,infer_img_size,infer_samples_per_sec,infer_step_time,infer_batch_size,param_count\n"
    for name in ("amp-nchw-pt240-cu124-rtx4090", "amp-nchw-pt291-cu130-5090", "amp-nchw-pt113-cu117-rtx3090"):
        lines = "gluon_resnet101_v1c,224,2500.5,9.3,512,25.6\nno_such_net,224,1,1,1,1\n"
        (results / f"benchmark-infer-{name}.csv").write_text(head + lines)
    git = ("git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x")
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "x", "--date", "2026-01-06T12:00:00Z")):
        subprocess.run(
            [*git, *command], check=True, env={**os.environ, "GIT_COMMITTER_DATE": "2026-01-06T12:00:00Z"}
        )
    rows = list(gather.timm_rows(tmp_path))
    assert [row[:8] for row in rows] == [
        (
            "gluon_resnet101_v1c",
            f"infer/timm/pytorch-{v}/nchw/synthetic/224px",
            card,
            "1",
            "amp_fp16",
            "512",
            "img/s",
            "2500.5",
        )
        for v, card in (("2.4", "RTX 4090"), ("2.9", "RTX 5090"))
    ]
    assert {row[9] for row in rows} == {"2026-01-06"}
    assert all(row[8].startswith("timm@") and row[8].endswith(".csv") for row in rows)


def test_epochs_of_mlperfs_logs_become_a_figure_once(tmp_path):
    import gather

    def event(key, value, seconds):
        return f'0: :::MLLOG {{"key": "{key}", "value": {value}, "time_ms": {seconds * 1000}}}\n'

    def run(*lasting):
        log = "noise\n" + event("global_batch_size", 256, 0)
        for number, seconds in enumerate(lasting):
            log += event("epoch_start", number, 0) + event("epoch_stop", number, seconds)
        return log

    clone = tmp_path / "training_results_v5.1"
    files = {
        "A/systems/one.json": '{"accelerator_model_name": "NVIDIA Blackwell GPU (B200-SXM-180GB)", '
        '"number_of_nodes": "2", "accelerators_per_node": "8", "framework": "PyTorch"}',
        "A/results/one/retinanet/result_0.txt": run(500, 300, 280),
        "A/results/one/retinanet/result_1.txt": run(500, 260),
        "A/results/one/llama31_8b/result_0.txt": run(9, 9),
        "B/systems/two.json": '{"accelerator_model_name": "AMD Radeon", "number_of_nodes": "1", '
        '"accelerators_per_node": "6", "framework": "tinygrad"}',
        "B/results/two/retinanet/result_0.txt": run(9, 9),
    }
    for name, text in files.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    git = ("git", "-C", str(clone), "-c", "user.name=x", "-c", "user.email=x@x")
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "x")):
        subprocess.run([*git, *command], check=True)
    (row,) = gather.mlperf_rows(clone)
    assert row[2:7] == ("B200-SXM-180GB", "16", "amp_fp16", "16", "img/s")
    assert float(row[7]) == pytest.approx(gather.IMAGES / 280, abs=0.1)


def test_what_was_counted_is_kept_and_read_again(tmp_path, monkeypatch):
    import advise as benchmark

    monkeypatch.setattr(benchmark, "COUNTED", tmp_path / "counted.csv")
    calls = []
    demand = load_models()["timm:gluon_resnet101_v1c@224"]
    monkeypatch.setattr(benchmark, "count", lambda key: calls.append(key) or demand)
    for _ in range(2):
        counted = benchmark.Counted(again=False)
        assert counted("timm:nothing_of_the_table@224").flops == pytest.approx(demand.flops, rel=0.01)
        counted.keep()
    assert calls == ["timm:nothing_of_the_table@224"]
    assert load_models(tmp_path / "counted.csv").keys() == {"timm:nothing_of_the_table@224"}


def test_the_counts_of_the_figures_are_shipped_with_them():
    import advise as benchmark

    table = load_models() | load_models(benchmark.COUNTED)
    for path, least in ((benchmark.MORE_DATA[0], 1000), (benchmark.SET_ASIDE, 50)):
        rows, left_out = published.read(path, table.get)
        assert len(rows) > least
        assert left_out == {}
    with benchmark.NETWORKS.open(encoding="utf-8", newline="") as file:
        keys = [
            published.key_of(row["model"], f"train/timm/{row['pixels']}px") for row in csv.DictReader(file)
        ]
    assert sum(key in table for key in keys) > 0.98 * len(keys)  # timm has dropped a few


def test_what_is_set_aside_is_in_no_fit():
    _, rest = load_coefficients()
    assert "own:retinanet" not in rest["evidence"]["models"]


def test_the_share_in_interval_that_is_told_is_of_figures_that_did_not_make_the_interval():
    newest = max((BENCHMARKS.parent / "records" / "advise" / "published").glob("*.json"))
    splits = json.loads(newest.read_text(encoding="utf-8"))["splits"]
    _, rest = load_coefficients()
    told = {name: entry["interval_coverage"] for name, entry in rest["errors"].items()}
    assert told == {name: split["coverage_on_the_other_half"] for name, split in splits.items()}
