"""A plan in plain PyTorch and in trainers' words: what is written runs, and does what the plan says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vivace
from vivace.exporting.plans import TARGETS, in_words
from vivace.technique import registry

PLAN = """format = 1
[techniques.bf16_autocast]
[techniques.channels_last]
[techniques.fused_optimizer]
[techniques.host_allocator]
[techniques.loader_workers]
num_workers = 0
"""


def plan(text=PLAN):
    return vivace.Plan.loads(text)


def written(text, to="torch"):
    """The names that the Python defines."""
    names = {}
    exec(compile(in_words(plan(text), to), "<plan>", "exec"), names)
    return names


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4)
    )


def trained(names):
    """A step as the Python says; returns the loss and the dtypes in which convolutions ran."""
    network = names.get("prepare", lambda m: m)(model())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, **names.get("OPTIMIZER", {}))
    seen = []
    network[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    batch = torch.randn(4, 3, 8, 8), torch.arange(4)

    def loss_of(network, batch):
        return torch.nn.functional.cross_entropy(network(batch[0]).float(), batch[1])

    before = [p.detach().clone() for p in network.parameters()]
    loss = names["step"](network, optimizer, loss_of, batch)
    assert any(not torch.equal(b, p) for b, p in zip(before, network.parameters(), strict=True))
    assert all(p.grad is None for p in network.parameters())
    return loss, seen, network, optimizer


def test_plain_pytorch_does_what_the_plan_says():
    names = written(PLAN)
    loss, seen, network, optimizer = trained(names)
    assert loss.isfinite()
    assert seen == [torch.bfloat16]
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert optimizer.defaults["fused"]
    data = torch.utils.data.DataLoader([1, 2], **names["LOADER"])
    assert data.num_workers == 0
    assert "export MALLOC_MMAP_MAX_=0" in in_words(plan())


def test_float16_scales_the_loss():
    loss, seen, *_ = trained(written("format = 1\n[techniques.fp16_autocast]\n"))
    assert seen == [torch.float16]
    assert loss.isfinite()


@pytest.mark.parametrize("to", TARGETS)
def test_the_settings_of_the_loss_scale_are_told(to):
    text = "format = 1\n[techniques.fp16_autocast]\ninitial_scale = 1024.0\ngrowth_interval = 50\n"
    told = in_words(plan(text), to)
    assert "init_scale=1024.0, growth_interval=50" in told
    assert ("begins at 65536" in told) == (to != "torch")
    assert "init_scale" not in in_words(plan("format = 1\n[techniques.fp16_autocast]\n"), to)
    if to == "torch":
        assert written(text)["scaler"].get_scale() == 1024.0


@pytest.mark.parametrize("to", TARGETS)
def test_without_tf32_it_says_that_convolutions_use_it_all_the_same(to):
    *_, last = in_words(plan(), to).splitlines()
    assert "TF32" in last
    assert last.endswith("torch.backends.cudnn.allow_tf32 = False")
    assert "allow_tf32 = False" not in in_words(plan("format = 1\n[techniques.tf32]\n"), to)


def test_what_channels_last_does_not_take_is_told():
    text = "format = 1\n[techniques.channels_last]\n"
    with pytest.raises(RuntimeError, match="rank 4"):
        written(text)["prepare"](torch.nn.Conv3d(1, 1, 1))
    assert "# channels_last: a parameter of five dimensions has no such order" in in_words(plan(text))


def test_recomputing_is_told_and_not_called_on_a_model_that_may_not_have_it():
    text = "format = 1\n[techniques.checkpoint]\n"
    names = written(text)
    names.get("prepare", lambda m: m)(model())
    assert "# checkpoint: Hugging Face's models have gradient_checkpointing_enable()" in in_words(plan(text))
    assert "gradient_checkpointing_enable" not in in_words(plan(text), "transformers")
    assert written(text, "transformers")["TRAINER"] == {"gradient_checkpointing": True}


def test_where_tf32_is_allowed_the_older_switches_can_be_read():
    lines = (
        in_words(plan("format = 1\n[techniques.tf32]\n")),
        "assert torch.get_float32_matmul_precision() == 'high'",
        "for owner in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn):",
        "    assert owner.fp32_precision == 'tf32'",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=300)


def test_a_plan_that_only_rearranges_the_model_leaves_the_loop_alone():
    names = written("format = 1\n[techniques.channels_last]\n")
    assert "step" not in names
    assert "OPTIMIZER" not in names


def test_compile_keeps_its_mode():
    text = in_words(plan('format = 1\n[techniques.compile]\nmode = "max-autotune-no-cudagraphs"\n'))
    assert "torch.compile(model, mode='max-autotune-no-cudagraphs')" in text


def test_names_that_compiling_changes_are_told():
    text = "format = 1\n[techniques.compile]\n"
    names = written(text)["prepare"](model()).state_dict()
    for to in ("torch", "lightning", "accelerate"):
        lines = in_words(plan(text), to).splitlines()
        (told,) = [line for line in lines if line.startswith("# compile: ")]
        assert all(name.startswith(told.split()[-1]) for name in names)


def test_what_has_no_equivalent_says_so():
    for to in TARGETS:
        text = in_words(plan("format = 1\n[techniques.bf16_weights]\n"), to)
        assert "bf16_weights needs Vivace" in text
        compile(text, to, "exec")


def test_transformers_takes_the_words(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    names = written(PLAN, "transformers")
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **names["TRAINER"])
    assert arguments.bf16
    assert arguments.dataloader_num_workers == 0


def test_lightning_takes_the_words():
    lightning = pytest.importorskip("lightning.pytorch")
    names = written(PLAN, "lightning")
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, **names["TRAINER"]
    )
    assert trainer.precision == "bf16-mixed"


def test_accelerate_takes_the_words():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, **written(PLAN, "accelerate")["TRAINER"])
    assert accelerator.mixed_precision == "bf16"


@pytest.mark.parametrize("name", [cls.name for cls in registry.everything()])
def test_every_technique_is_told_or_needs_vivace(name):
    text = in_words(plan(f"format = 1\n[techniques.{name}]\n"))
    compile(text, name, "exec")
    assert name in text


def test_another_target_is_an_error_with_the_right_ones():
    with pytest.raises(vivace.InputError, match="torch, transformers, lightning, accelerate, not 'keras'"):
        in_words(plan(), "keras")


def test_the_command_prints_python_alone(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    words = [sys.executable, "-m", "vivace", "export", "--plan", str(tmp_path)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    assert shown.stdout == in_words(plan())
    told = subprocess.run([*words, "--json"], capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(told.stdout) == {"to": "torch", "python": shown.stdout}
    wrong = subprocess.run([*words, "--to", "keras"], capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 2
    assert "not 'keras'" in wrong.stderr
    assert not wrong.stdout
    ignored = subprocess.run([*words, "--out", "there"], capture_output=True, text=True, timeout=300)
    assert ignored.returncode == 2
    assert "leave --out out" in ignored.stderr


def test_the_command_prints_a_plan_whose_technique_is_of_a_job_file(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text("format = 1\n[techniques.planted_narrow]\n")
    job = Path(__file__).parents[1] / "sweeping" / "planned.py"
    words = [sys.executable, "-m", "vivace", "export", "--plan", str(file), "--job", f"{job}:job"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    assert "planted_narrow needs Vivace" in shown.stdout
