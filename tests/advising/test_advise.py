from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import vivace
from vivace.advising import answer, answering
from vivace.advising.catalogue import find_gpu, load_catalogue, unserved
from vivace.advising.predict import Predictor
from vivace.advising.question import amount, seconds_of
from vivace.advising.reverse import largest_model, trainable, trained_in
from vivace.advising.source import open_subject
from vivace.advising.tables import bought, choices, draw, draw_card, sentences
from vivace.advising.way import in_words
from vivace.errors import FolderError, InputError, JobError
from vivace.job import load
from vivace.memory.imagine import imagine
from vivace.pages.answer import ending
from vivace.pages.answer import lines as answer_lines

CARDS = ("RTX 4090", "A100-SXM4-80GB", "H100-SXM5-80GB")
HALF = {"parameter_bytes": 50_000_000}  # of the 25 million weights of `profile`
NOT_COUNTED = "in {}, the job's own; the plan's bf16_autocast is for weights in fp32 and not counted"
TINY_JOB = """
import torch, vivace
from torch import nn
job = vivace.Job(
    model=lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)
    ),
    data=lambda: [(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long))] * 5,
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]){extra},
    optimizer=lambda model: torch.optim.Adam(model.parameters()),
    epochs=3,
)
"""


def test_a_card_without_evidence_is_the_best_value_only_where_there_is_no_other(profile):
    alone = vivace.advise(profile(), gpus=("MI300X",)).picks["best value"]
    assert (alone.prediction.gpu.name, alone.risk) == ("MI300X", "no evidence")
    beside = vivace.advise(profile(), gpus=("MI300X", "A100-SXM4-80GB")).picks["best value"]
    assert beside.prediction.gpu.name == "A100-SXM4-80GB"
    assert beside.usd > alone.usd  # by price alone it would lose


def test_a_choice_of_several_cards_is_told_with_its_batch(profile):
    advice = vivace.advise(profile(), gpus=("A100-SXM4-80GB",), most=8)
    numbers = [offer.prediction.num_gpus for offer, _ in choices(advice)]
    told = ["x batch" in row for _, row in answering.answer(advice).parts]
    assert told == [number > 1 for number in numbers]
    assert any(told)
    assert not all(told)


def test_a_better_card_that_is_not_picked_is_told_with_the_reason(profile):
    left_out = "no published figure of the architecture of MI300X is known: not picked"
    beside = vivace.advise(profile(), gpus=("MI300X", "A100-SXM4-80GB"), most=1)
    assert [name for name, _ in answering.answer(beside).parts] == [
        "A100-SXM4-80GB (best value, fastest known)",
        "MI300X",
    ]
    assert answering.answer(beside).notes[0] == left_out
    unbeaten = vivace.advise(profile(), gpus=("T4", "A100-SXM4-80GB"), most=1)
    assert any(name.endswith("fastest)") for name, _ in answering.answer(unbeaten).parts)
    for advice in (unbeaten, vivace.advise(profile(), gpus=("MI300X",), most=1)):
        assert not any("not picked" in note for note in answering.answer(advice).notes)


def test_a_release_that_lies_ahead_empties_no_comparison(profile, tmp_path):
    own = tmp_path / "gpus.toml"
    own.write_text('format = 1\n[[gpus]]\nname = "RTX 4090"\nrelease = "2099-01"\n')
    plain, ahead = (vivace.advise(profile(), catalogue=path) for path in (None, own))
    assert len(ahead.offers) == len(plain.offers)


def test_a_well_known_model_is_counted_with_the_attention_of_today():
    by_name, published = open_subject("gpt2_large"), open_subject("own:gpt2_large")
    card = find_gpu("H100")
    new, old = (Predictor(subject, "amp").one(card) for subject in (by_name, published))
    assert new.seconds < 0.7 * old.seconds
    assert new.needed_bytes < 0.7 * old.needed_bytes
    told = "attention is counted in single operators"
    for subject, said in ((by_name, False), (published, True), (open_subject("resnet50"), False)):
        notes = answering.answer(vivace.advise(subject, gpus=["H100"])).notes
        assert any(told in note for note in notes) is said
    assert [entry.model for entry in trainable(find_gpu("RTX 4090")) if entry.model == "gpt2_large"]


def test_advice_ranks_picks_and_scales(profile):
    advice = vivace.advise(profile(), gpus=CARDS, precision="amp")
    assert {offer.prediction.gpu.name for offer in advice.offers} == {find_gpu(name).name for name in CARDS}
    assert set(advice.picks) == {"fastest", "best value"}
    assert advice.picks["best value"].usd == pytest.approx(
        min(o.usd for o in advice.allowed if o.usd), rel=0.02
    )
    assert advice.picks["fastest"].hours <= advice.picks["best value"].hours
    front = [(offer.usd, offer.hours) for offer in advice.pareto]
    assert front == sorted(front)
    assert sorted(front, key=lambda pair: -pair[1]) == front
    for offer in advice.offers:
        assert offer.low_hours < offer.hours < offer.high_hours
    for entry in advice.scaling:
        speedups = [point["speedup"] for point in entry["points"]]
        assert speedups == sorted(speedups)
        assert all(point["efficiency"] <= 1.001 for point in entry["points"])
    assert json.loads(json.dumps(advice.to_dict()))["errors"]


@pytest.mark.parametrize(
    ("precision", "gpus", "told"), [("fp32", "H200", 1), ("fp32", "V100-SXM2-16GB", 0), ("tf32", "H200", 0)]
)
def test_that_strict_fp32_was_published_of_old_cards_alone_is_said(precision, gpus, told, profile):
    advice = vivace.advise(profile(), gpus=[gpus], precision=precision)
    assert sum("strict fp32" in note for note in advice.notes) == told
    assert sum("strict fp32" in note for note in answering.answer(advice).notes) == told


@pytest.mark.parametrize("device", ["cpu", "cuda", "TITAN of nobody", None])
def test_a_step_measured_on_no_known_card_scales_nothing(profile, device):
    plain = vivace.advise(profile(device=device), gpus=CARDS)
    measured = vivace.advise(profile(device=device, step_seconds=2.9), gpus=CARDS)
    assert [offer.hours for offer in measured.offers] == [offer.hours for offer in plain.offers]
    (note,) = [note for note in measured.notes if "measured step" in note]
    assert "nothing is scaled" in note
    assert note in answering.answer(measured).notes
    assert str(device or "no named GPU") in note


def test_a_step_measured_on_a_known_card_scales_all(profile):
    unfed = {"host_seconds_per_sample": None}
    plain = vivace.advise(profile(**unfed), gpus=CARDS, most=1, precision="profiled")
    (there,) = [o for o in plain.offers if o.prediction.gpu.name == find_gpu(CARDS[1]).name]
    path = profile(device="NVIDIA A100-SXM4-80GB", step_seconds=2 * there.prediction.seconds, **unfed)
    measured = vivace.advise(path, gpus=CARDS, most=1, precision="profiled")
    found = {offer.name: offer.prediction.seconds for offer in measured.offers}
    assert found == pytest.approx({o.name: 2 * o.prediction.seconds for o in plain.offers})
    assert any("scaled by 2.00" in note and "A100-SXM4-80GB" in note for note in measured.notes)


def test_what_the_measured_step_waited_for_is_said_and_does_not_scale(profile):
    device = "NVIDIA A100-SXM4-80GB"
    for share, told in (
        (0.5, "50 % of the measured step waited"),
        (0.95, "nothing is scaled by the profile's"),
    ):
        path = profile(device=device, step_seconds=1.0, waiting_seconds_per_sample=share / 32)
        advice = vivace.advise(path, gpus=CARDS, most=1)
        assert any(told in note for note in advice.notes), advice.notes
        assert min(o.prediction.seconds for o in advice.offers) > share


@pytest.mark.parametrize(("told", "size"), [("float64", 8), ("bfloat16", 2)])
def test_bytes_of_a_profile_are_those_of_its_own_precision(profile, told, size):
    """The same job, profiled in another precision: it asks for the same of a card in any one."""
    plain = open_subject(profile())
    work = json.loads(Path(plain.name).read_text())["work"]
    operators = {
        name: {**totals, "bytes": totals["bytes"] * size / 4} for name, totals in work["operators"].items()
    }
    more = {"optimizer_bytes": 2e8} if size == 8 else {}
    kept = {"activation_bytes": 3e9 * size / 4, "operators": operators}
    other = open_subject(profile(precision=told, **kept, **more))
    card = find_gpu("A100-SXM4-80GB")
    for precision in ("fp64", "fp32", "amp"):
        one, same = (Predictor(subject, precision).one(card) for subject in (plain, other))
        assert same.seconds == pytest.approx(one.seconds)
        assert same.needed_bytes == pytest.approx(one.needed_bytes)
    assert Predictor(other).precision == ("fp64" if size == 8 else "amp")


@pytest.mark.parametrize(("told", "precision"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_weights_of_two_bytes_are_predicted_as_such(profile, told, precision):
    half = {"precision": told, "parameter_bytes": 50_100_000}  # norms stay in fp32
    for options in ({}, {"precision": "profiled"}):
        advice = vivace.advise(profile(**half), gpus=["A100-SXM4-80GB"], most=1, **options)
        assert advice.offers[0].prediction.precision == precision
    assert vivace.advise(profile(**half), gpus=["A100"]).how == f"predicted in {precision}, the job's own"
    assert open_subject(profile(**half, optimizer_bytes=None)).optimizer_bytes == 4 * 25_000_000
    assert open_subject(profile(**half, batches_at_once=4)).samples_a_step == 4 * 32


def test_a_card_without_bf16_is_no_choice_for_weights_in_bf16(profile):
    half = {"precision": "bfloat16", "parameter_bytes": 50_000_000}
    advice = vivace.advise(profile(**half), gpus=["V100-SXM2-16GB", "T4"])
    assert advice.refusals["V100-SXM2-16GB"].told == "has no bf16"
    assert answering.answer(advice).sentence == (
        "None of these cards computes in bf16, in which the job's weights are; "
        "--precision amp predicts mixed precision"
    )
    other = vivace.advise(profile(**half), gpus=["T4"], precision="amp_bf16")
    assert answering.answer(other).sentence.endswith("in the precision that was asked for")


def test_mixed_precision_is_images_channels_last_however_it_is_asked_for():
    def step(**options):
        (offer,) = vivace.advise("resnet50", gpus=["A100-SXM4-80GB"], target="1M", most=1, **options).offers
        return offer.prediction.seconds

    usual = step()
    assert step(precision="amp") == step(precision="amp_bf16") == usual
    assert step(precision="amp", channels_last=False) > 1.05 * usual
    told = vivace.advise("resnet50", gpus=["A100"], target="1M", precision="amp").how
    assert told == "predicted in amp, as asked for; images channels last"


def test_an_epoch_of_a_profile_of_several_ranks_is_that_of_all(profile):
    alone, of_four = (open_subject(profile(batches_at_once=ranks)) for ranks in (1, 4))
    for length in ({"epochs": 3, "steps": None}, {"epochs": None, "steps": 50}):
        one, four = (amount(subject, **length, target=None).samples for subject in (alone, of_four))
        assert four == 4 * one
    assert of_four.batch_size == alone.batch_size


def test_a_state_of_the_optimizer_of_no_bytes_is_none(profile):
    assert open_subject(profile(optimizer_bytes=0)).optimizer_bytes == 0
    assert open_subject(profile(optimizer_bytes=None)).optimizer_bytes == 8 * 25_000_000


def test_a_card_without_evidence_is_not_taken_for_a_better_one():
    """Rates and bandwidths of these cards are in the order of the names, and half of that at the ends."""
    pairs = (("Arc A770", "RTX 4090"), ("RX 7900 XTX", "A100-SXM4-40GB"), ("RTX 3090", "RTX 5090"))
    advice = vivace.advise(
        "resnet50",
        gpus=[n for pair in pairs for n in pair],
        target="1M",
        precision="amp",
        channels_last=True,
        most=1,
    )
    hours = {offer.prediction.gpu.name: offer.hours for offer in advice.offers}
    for slow, fast in pairs:
        assert hours[find_gpu(slow).name] > hours[find_gpu(fast).name], (slow, fast)


def test_amounts_of_training(profile):
    subject = open_subject(profile())
    assert amount(subject, None, None, None).samples == 10 * 100 * 32
    assert amount(subject, None, 50, None).samples == 50 * 32
    assert amount(subject, None, None, "1.5M").samples == 1.5e6
    assert seconds_of("3d") == 3 * 86400
    with pytest.raises(InputError, match="--deadline must be a time such as 12h or 3d, not '2'"):
        seconds_of("2")
    with pytest.raises(InputError, match="--epochs 1e\\+308 is too much"):
        amount(subject, 1e308, None, None)
    endless = open_subject(profile(steps_per_epoch=None))
    with pytest.raises(InputError, match="give --steps"):
        amount(endless, 3, None, None)


def test_cards_may_be_named_as_on_the_command_line(profile):
    listed, told = (vivace.advise(profile(), gpus=g) for g in (["RTX 4090", "H200"], "RTX 4090, H200"))
    assert listed.picks == told.picks


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gpus": ["RTX 4099"]}, "RTX 409"),
        ({"gpus": [""]}, "names no card"),
        ({"budget_usd": -3}, "more than 0 dollars, not -3"),
        ({"budget_usd": float("nan")}, "not nan"),
        ({"deadline": "soon"}, "a time such as 12h or 3d, not 'soon'"),
        ({"deadline": "0h"}, "not '0h'"),
        ({"deadline": "12"}, "not '12'"),
        ({"deadline": 12}, "not 12"),
        ({"budget_usd": "20"}, "--budget-usd must be a number, not '20'"),
        ({"epochs": "90"}, "--epochs must be a number, not '90'"),
        ({"steps": 0}, "--steps must be more than 0"),
        ({"steps": 10, "epochs": 1}, "give one"),
        ({"target": "many"}, "a number of samples"),
        ({"most": 0}, "at least 1"),
        ({"precision": "fp3"}, "no precision"),
        ({"probability": 80}, "between 0 and 1, such as 0.8, not 80"),
        ({"launch_us": -1}, "--launch-us must be a number of at least 0"),
        ({"gpus": ["TPU v5e"]}, "torch_xla"),
        ({"gpus": ["HL-225"]}, "Gaudi's software"),
        ({"prices": "/nowhere/prices.toml"}, "cannot be read"),
    ],
)
def test_bad_input_is_one_sentence(profile, options, sentence):
    with pytest.raises(InputError) as caught:
        vivace.advise(profile(), **options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": 7}, "format 7"),
        ({"operators": {}}, "lacks 'operators'"),
        ({"precision": "fp12"}, "'fp12'"),
        ({"batch_size": -4}, "a batch of -4 samples"),
        ({"batch_size": "many"}, "is not as vivace profile writes it"),
        ({"operators": {"matmul": {}}}, "is not as vivace profile writes it"),
        ({"operators": 7}, "is not as vivace profile writes it"),
        ({"host_seconds_per_sample": "slow"}, "has host_seconds_per_sample = 'slow'; a number of at least 0"),
        ({"epochs": -3}, "has epochs = -3; a number above 0 would be right"),
        ({"epochs": "ninety"}, "has epochs = 'ninety'"),
        ({"steps_per_epoch": 0}, "has steps_per_epoch = 0"),
        ({"step_seconds": float("nan")}, "has step_seconds = nan"),
        ({"waiting_seconds_per_sample": -1.0}, "has waiting_seconds_per_sample = -1.0"),
        ({"activation_bytes": float("inf")}, "has activation_bytes = inf"),
        ({"device": 3}, "has device = 3; a name would be right"),
        ({"operators": {"matmul": {"flops": -1, "bytes": 1e9, "count": 1}}}, "which is no amount"),
        ({"operators": {"matmul": {"flops": 0, "bytes": 0, "count": 0}}}, "holds no operations"),
    ],
)
def test_a_profile_of_another_format_is_refused(profile, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        open_subject(profile(**changes))


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    path = tmp_path / "other.json"
    for text, sentence in (
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no work"),
        ("{}", "no work"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=sentence):
            open_subject(str(path))
    with pytest.raises(InputError, match="cannot be read"):
        open_subject(str(tmp_path / "none.json"))


def test_a_budget_that_cannot_be_met_is_a_no(profile):
    advice = vivace.advise(profile(), gpus=CARDS, budget_usd=1e-6)
    assert (advice.exit_code, advice.picks) == (1, {})
    assert vivace.advise(profile(), gpus=CARDS).exit_code == 0


def test_old_prices_are_reported_with_their_date(profile, tmp_path):
    own = tmp_path / "prices.toml"
    own.write_text(
        'format = 1\n[[rent]]\nprovider = "mine"\ndate = 2024-01-02\nsource = "a bill"\n'
        "[rent.usd_per_hour]\n'RTX 4090' = 0.5\n"
    )
    advice = vivace.advise(profile(), gpus=CARDS, prices=own)
    assert any("RTX 4090 of 2024-01-02" in text for text in advice.warnings)
    alone = answering.answer(vivace.advise(profile(), gpus=["RTX 4090"], prices=own))
    assert any("RTX 4090 of 2024-01-02" in text for text in alone.notes)


@pytest.mark.parametrize(("width", "intervals"), [(80, 1), (140, 2)])
def test_no_word_of_the_table_is_torn(profile, width, intervals):
    file = io.StringIO()
    draw(vivace.advise(profile(), gpus=(*CARDS, "RTX PRO 6000", "MI355X")), Console(file=file, width=width))
    table = file.getvalue().partition("Several")[0]
    assert {"limited", "value)", "H100-SXM5-80GB", "evidence"} <= set(table.split())
    assert max(line.count("\N{EN DASH}") for line in table.splitlines()) == intervals


def test_the_page_is_one_file_and_escapes(profile, tmp_path):
    subject = open_subject(profile())
    named = vivace.advise(
        type(subject)(**{**vars(subject), "name": "<script>alert(1)</script>"}),
        gpus=CARDS,
        out=tmp_path / "advice",
    )
    text = (tmp_path / "advice" / "advise.html").read_text()
    assert named.page_path == str(tmp_path / "advice" / "advise.html")
    assert "<script" not in text
    assert "http" not in text
    assert "<svg" in text
    assert "RTX 4090" in text
    assert json.loads((tmp_path / "advice" / "advise.json").read_text())["page_path"] == named.page_path


@pytest.mark.parametrize("name", ["advise.html", "advise.json"])
def test_a_persons_own_file_in_the_output_folder_stays(profile, tmp_path, name):
    for _ in range(2):  # again into its own folder
        vivace.advise(profile(), gpus=CARDS, out=tmp_path / "out")
    (tmp_path / "out" / name).write_text("theirs")
    with pytest.raises(FolderError, match=f"{name}' is not what vivace advise wrote"):
        vivace.advise(profile(), gpus=CARDS, out=tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == "theirs"


def test_the_reverse_says_what_a_card_can_train():
    small, large = (trainable(find_gpu(name)) for name in ("RTX 3080", "H100-SXM5-80GB"))
    assert sum(e.prediction is not None for e in small) < sum(e.prediction is not None for e in large)
    by_name = {entry.model: entry for entry in large}
    assert (
        by_name["resnet18"].prediction.samples_per_second > by_name["resnet50"].prediction.samples_per_second
    )
    resnet = dataclasses.replace(
        open_subject("resnet50"), batch_size=by_name["resnet50"].prediction.batch_size
    )
    usual = Predictor(resnet, "amp", channels_last=True).one(find_gpu("H100-SXM5-80GB"))
    assert by_name["resnet50"].prediction.seconds == usual.seconds
    assert 4e9 < largest_model(find_gpu("H100-SXM5-80GB")) < 5e9
    whole, double = (largest_model(find_gpu("H100-SXM5-80GB"), name) for name in ("fp32", "fp64"))
    assert whole == pytest.approx(2 * double)
    assert whole == pytest.approx(18 / 16 * largest_model(find_gpu("H100-SXM5-80GB"), "amp_fp16"))


@pytest.mark.parametrize(
    ("card", "asked", "found"),
    [
        ("H100", "auto", "mixed precision with bf16"),
        ("V100", "amp", "mixed precision with fp16"),
        ("GTX 1080 Ti", "auto", "fp32"),
        ("V100", "tf32", "fp32"),
        ("H100", "tf32", "tf32"),
    ],
)
def test_what_a_card_can_train_is_said_in_what_it_computes_in(card, asked, found):
    assert in_words(trained_in(find_gpu(card), asked)) == found


@pytest.mark.parametrize(
    ("card", "asked", "told"),
    [("V100", "amp_bf16", "has no bf16"), ("M1", "fp64", "has no fp64"), ("H100", "profiled", "has none")],
)
def test_what_a_card_cannot_compute_in_is_refused(card, asked, told):
    with pytest.raises(InputError, match=told):
        trained_in(find_gpu(card), asked)


@pytest.mark.parametrize(
    ("extra", "counted"), [("", "fake"), (" * (1 if batch[1].sum().item() == 0 else 2)", "real")]
)
def test_a_job_is_counted_in_a_child_process_on_fake_tensors_or_real_ones(tmp_path, extra, counted):
    """That a child turns to real ones is tested with a job that needs that (test_counted_jobs.py)."""
    path, reference = tmp_path / "mine.py", f"{tmp_path / 'mine.py'}:job"
    path.write_text(TINY_JOB.replace("{extra}", extra))
    if counted == "real":
        work, reference = imagine(load(reference), reference, real=True), str(tmp_path / "counted.json")
        Path(reference).write_text(json.dumps({"work": work}))
    subject = open_subject(reference)
    assert (subject.counted, subject.batch_size, subject.steps_per_epoch, subject.epochs) == (
        counted,
        4,
        5,
        3,
    )
    convolution = 2 * 36 * 8 * 27
    assert subject.demand.flops == pytest.approx(2 * convolution + 3 * 2 * 8 * 36 * 2, rel=0.01)
    assert subject.optimizer_bytes == pytest.approx(8 * subject.demand.num_parameters, rel=0.05)
    assert subject.frozen_bytes == 2 * 8 * 4 + 8  # the norm's statistics, and its count


def test_frozen_weights_take_memory(profile):
    plain, frozen = (
        vivace.advise(profile(frozen_bytes=size), gpus=["RTX 4090"], precision="fp32").offers[0].prediction
        for size in (0, 15_000_000_000)
    )
    assert frozen.needed_bytes == pytest.approx(plain.needed_bytes + 15e9)
    plain, frozen = (
        vivace.advise(profile(frozen_bytes=size), gpus=["RTX 4090"]).offers[0].prediction
        for size in (0.0, 10e9)
    )
    assert frozen.precision == "amp_bf16"  # which keeps copies of two bytes
    assert frozen.needed_bytes == pytest.approx(plain.needed_bytes + 15e9)
    told = vivace.advise(profile(frozen_bytes=45e9), gpus=["RTX 4090", "H100"])
    assert told.refusals["RTX 4090"].told.startswith("does not fit")
    assert told.refusals["H100-SXM5-80GB"] is None


def test_a_job_that_fails_is_told_in_its_own_words(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TINY_JOB.replace("{extra}", " + nothing_such"))
    with pytest.raises(JobError, match="nothing_such"):
        open_subject(f"{path}:job")


def test_the_command_works_without_torch(profile, tmp_path):
    blocked = tmp_path / "sitecustomize.py"
    blocked.write_text(
        "import sys\nclass Blocker:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch': raise ImportError('torch is blocked')\n"
        "sys.meta_path.insert(0, Blocker())\n"
    )
    import os

    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "vivace", "advise", profile(), "--gpus", "RTX 4090,H100", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {offer["gpu"] for offer in document["offers"]} == {"RTX 4090", find_gpu("H100").name}
    assert "(best value)" in done.stderr
    assert len(done.stderr.splitlines()) <= 12


def test_numbers_of_cards_on_which_a_job_does_not_fit_are_no_points_of_its_scaling():
    """A copy of all gradients more is what several cards need; one card alone does with small pieces."""
    advice = vivace.advise("own:gpt3_27", target="1M", precision="amp", gpus=["H100-SXM5-80GB"])
    assert {offer.prediction.num_gpus for offer in advice.offers if not offer.prediction.fits} == {2, 4, 8}
    assert [point["num_gpus"] for point in advice.scaling[0]["points"]] == [1]


def test_a_deadline_is_kept_with_a_probability_and_not_by_the_estimate(profile):
    hours = {o.name: o for o in vivace.advise(profile(), gpus=CARDS, most=1).offers}
    slow = hours["RTX 4090"]
    deadline = f"{1.02 * slow.hours}h"
    sure, even = (
        vivace.advise(profile(), gpus=["RTX 4090"], most=1, deadline=deadline, probability=p)
        for p in (0.8, 0.5)
    )
    assert (sure.exit_code, even.exit_code) == (1, 0)
    assert sure.refusals["RTX 4090"].told.startswith("too slow: 5")
    assert slow.chance(slow.hours) == pytest.approx(0.5)
    assert slow.chance(slow.high_hours) == pytest.approx(0.9)
    assert slow.chance(slow.low_hours) == pytest.approx(0.1)


def test_where_no_card_keeps_what_was_asked_the_nearest_ones_are_named():
    def title(**asked):
        advice = vivace.advise("resnet50", target="90M", gpus=["RTX 3090", "H100-SXM5-80GB"], **asked)
        assert advice.exit_code == 1
        return answering.answer(advice).sentence

    late, dear, both = title(deadline="1m"), title(budget_usd=0.01), title(deadline="1m", budget_usd=0.01)
    assert late.startswith("No card keeps the deadline with 80 % certainty; the fastest, 8 x H100-SXM5-80GB")
    middle = "the budget at the middle price with 80 % certainty"
    assert dear.startswith(f"No card keeps {middle}; the cheapest, RTX 3090, takes")
    assert both.startswith(f"No card keeps the deadline and {middle}")
    assert "the fastest, 8 x H100-SXM5-80GB" in both
    assert "the cheapest, RTX 3090" in both
    slow = dataclasses.replace(open_subject("resnet50"), host_seconds_per_sample=0.01)
    fed = vivace.advise(slow, target="90M", gpus=["RTX 3090"], deadline="1m")
    assert answering.answer(fed).sentence.endswith("limited by the input pipeline")
    huge = vivace.advise("own:gpt3_27", target="1M", gpus=["T4"])
    assert answering.answer(huge).sentence == "The job fits on none of these cards"


def test_one_card_is_enough_where_one_card_is_the_answer():
    short = vivace.advise("resnet50", target="10k", gpus=["H100-SXM5-80GB"])
    hurried = vivace.advise("resnet50", target="1M", gpus=["H100-SXM5-80GB"], deadline="2m")
    assert any("one card is enough" in hint for hint in short.hints)
    assert hurried.picks["best value"].prediction.num_gpus > 1
    assert not any("enough" in hint for hint in hurried.hints)


def test_a_training_of_days_is_not_short_because_this_machine_is_as_fast(profile, monkeypatch):
    monkeypatch.setattr("vivace.advising.ranking._is_here", lambda card, known: True)
    advice = vivace.advise(profile(device="NVIDIA GeForce RTX 4090"), gpus=["RTX 4090"], target="10b")
    assert advice.picks["best value"].hours > 24
    assert not any("short" in hint for hint in advice.hints)
    assert "this machine takes less than twice as long as the best value" in advice.hints


@pytest.mark.parametrize("mark", ["here", "profiled"])
def test_an_own_card_is_not_refused_and_priced_as_a_rented_one(profile, monkeypatch, mark):
    """One of the same name stands among the offers."""
    monkeypatch.setattr("vivace.advising.ranking._is_here", lambda card, known: mark == "here")
    path = profile(device="NVIDIA GeForce RTX 4090")
    advice = vivace.advise(path, gpus=["RTX 4090"], target="10b", budget_usd=0.01, most=1)
    assert advice.refusals["RTX 4090"].told.startswith("too dear")
    assert advice.offers[0].usd > 0
    own, other = sorted((advice.here, advice.profiled_on), key=lambda offer: offer is None)
    assert (own.usd, other, choices(advice)[0]) == (None, None, (own, mark))  # nothing is picked
    told = dict(answering.answer(advice).parts)
    assert "too dear" in told["RTX 4090"]
    assert "$" not in told[f"RTX 4090 ({mark})"]
    assert "too dear" not in told[f"RTX 4090 ({mark})"]
    start = "Here (RTX 4090): " if mark == "here" else "Profiled on RTX 4090: "
    assert sum(line.startswith(start) for line in sentences(advice)) == 1


@pytest.mark.parametrize(("device", "own"), [("NVIDIA H200 NVL", True), ("a laptop's processor", False)])
def test_a_card_that_is_elsewhere_is_not_called_this_machine(profile, monkeypatch, device, own):
    machine = SimpleNamespace(device=SimpleNamespace(name=device))
    monkeypatch.setattr("vivace.inspection.gather.inspect", lambda: machine)
    path = profile(device="NVIDIA H200 NVL")
    advice = vivace.advise(path, gpus=["H100-SXM5-80GB"], target="10b", most=1)
    document = advice.to_dict()
    here, there = ("here", "profiled_on") if own else ("profiled_on", "here")
    assert (document[here]["gpu"], document[there]) == ("H200-NVL-141GB", None)
    assert any("this machine" in hint for hint in advice.hints) is own


@pytest.mark.parametrize(
    ("card", "told"),
    [
        (
            "V100-SXM2-16GB",
            "PyTorch for V100-SXM2-16GB: only its builds for CUDA 12.6, up to PyTorch 2.14",
        ),
        ("Arc A770", "Vivace does not train on Arc A770 yet; PyTorch there: xpu"),
        ("M2 Ultra", "Vivace does not train on M2 Ultra yet; PyTorch there: mps (in the macOS build)"),
        (
            "RX 6700 XT",
            "Vivace does not train on RX 6700 XT yet; PyTorch there: no build (people run the rocm build on "
            "it as on an RX 6800, through HSA_OVERRIDE_GFX_VERSION, unsupported)",
        ),
    ],
)
def test_what_pytorch_or_vivace_lack_of_a_card_is_said(profile, card, told):
    advice = vivace.advise(profile(), gpus=[card, "A100"], most=1)
    assert told in advice.notes
    rows = {name.partition(" (")[0]: row for name, row in answering.answer(advice).parts}
    short = "PyTorch serves it only in part" if card.startswith("V") else "Vivace does not train on it yet"
    assert rows[card].endswith(f"; {short}")
    assert "PyTorch" not in rows["A100-SXM4-80GB"]
    found = answering.answer_of_card(find_gpu(card), [], 1e9, "amp")
    assert told in found.notes
    assert not any("PyTorch" in note for note in vivace.advise(profile()).notes)


def test_what_cards_lack_takes_no_row_of_the_first_screen(monkeypatch):
    monkeypatch.setattr("vivace.advising.prices.STALE_DAYS", 10**6)  # old prices take one
    cards = ["V100", "RTX 3090", "RTX 4090", "A100", "H100", "T4", "P100", "MI50"]
    advice = vivace.advise("resnet50", gpus=cards, target="10000")
    lines = answer_lines(answering.answer(advice), 80)
    assert sum(line.startswith("  ") for line in lines) >= 8
    assert any("RTX 4090" in line for line in lines)
    assert "This training is short: one card is enough." in lines


def test_cards_that_are_alike_in_what_they_lack_share_a_sentence():
    cards = load_catalogue()
    names = ("V100-SXM2-16GB", "H100-SXM5-80GB", "V100-SXM2-32GB", "P100-PCIe-16GB")
    (told,) = unserved([cards[name] for name in names])
    assert told.startswith("PyTorch for V100-SXM2-16GB, V100-SXM2-32GB and P100-PCIe-16GB: only its builds")


def test_the_profiled_card_stands_right_after_the_picks(profile):
    """The last rows are cut first."""
    advice = vivace.advise(profile(device="NVIDIA GeForce RTX 4090"), target="10b")
    rows = choices(advice)
    assert len(rows) == 8
    assert [marks for _, marks in rows].index("profiled") == len({o.name for o in advice.picks.values()})


def test_a_job_whose_loading_nobody_measured_is_told_what_it_must_give():
    counted = dataclasses.replace(open_subject("resnet50"), counted="fake")
    hints = [vivace.advise(s, target="90M", gpus=["H100"]).hints for s in (counted, "resnet50")]
    assert [any("loading was not measured" in hint for hint in each) for each in hints] == [True, False]


def test_what_nobody_rents_alone_is_no_offer_of_one(profile, tmp_path):
    own = tmp_path / "prices.toml"
    own.write_text(
        'format = 1\n[[rent]]\nprovider = "mine"\ndate = 2026-11-02\nsource = "a bill"\nsizes = [8]\n'
        "[rent.usd_per_hour]\n'H100-SXM5-80GB' = 2.0\n'RTX 4090' = 0.5\n"
    )
    advice = vivace.advise(profile(), gpus=CARDS, prices=own)
    prices = {offer.name: offer.usd for offer in advice.offers}
    assert prices["H100-SXM5-80GB"] is prices["4 x H100-SXM5-80GB"] is None
    assert prices["8 x H100-SXM5-80GB"] > 0
    assert advice.refusals["H100-SXM5-80GB"].told == "is rented only by 8"
    assert "8 x H100-SXM5-80GB" in [offer.name for offer in advice.asked]


def test_a_machine_of_three_cards_is_an_offer_of_three(profile, tmp_path):
    own = tmp_path / "prices.toml"
    own.write_text(
        'format = 1\n[[rent]]\nprovider = "mine"\ndate = 2026-11-02\nsource = "a bill"\nsizes = [3, 16]\n'
        "usd_per_hour = { 'H100-SXM5-80GB' = 2.0 }\n"
    )
    advice = vivace.advise(profile(), gpus=["H100"], prices=own)
    assert [offer.name for offer in advice.allowed] == ["3 x H100-SXM5-80GB"]
    assert advice.refusals["H100-SXM5-80GB"].told == "is rented only by 3 or 16"


def test_no_more_cards_are_told_of_than_a_machine_of_such_cards_holds(profile):
    advice = vivace.advise(profile(), gpus=["RTX 4090"])
    assert [point["num_gpus"] for point in advice.scaling[0]["points"]] == [1, 2, 4]
    assert vivace.advise(profile(), gpus=["M2 Ultra"]).scaling == ()


def test_what_renting_costs_is_the_same_beside_a_price_to_buy_as_in_the_offer(profile, tmp_path):
    own = tmp_path / "prices.toml"
    rent = '[[rent]]\nprovider = "mine"\ndate = 2026-11-02\nsource = "a bill"\n'
    own.write_text(
        f"format = 1\n{rent}sizes = [1]\nusd_per_hour = {{ H100 = 2 }}\n"
        f"{rent}sizes = [8]\nusd_per_hour = {{ H100 = 9 }}\n"
        f"{rent.replace('rent', 'buy')}usd = {{ H100 = 20000 }}\n"
    )
    advice = vivace.advise(profile(), gpus=["H100"], prices=own)
    alone = next(offer for offer in advice.offers if offer.prediction.num_gpus == 1)
    assert advice.buying[0]["rent_usd_per_hour"] == pytest.approx(alone.usd / alone.hours) == 2


def test_cards_that_people_ask_about_are_always_there_with_a_reason():
    advice = vivace.advise("own:gpt3_27", target="1M")
    assert {o.prediction.gpu.name for o in advice.asked} >= {"RTX 3090", "RTX 4090", "H100-SXM5-80GB"}
    assert advice.refusals["RTX 3090"].told.startswith("does not fit: needs")


def test_what_is_no_gpu_of_pytorch_is_told_and_not_predicted():
    advice = vivace.advise("resnet50", gpus=["H20", "TPU v5e", "Gaudi 3"], target="1M")
    assert {offer.prediction.gpu.name for offer in advice.offers} == {"H20-SXM-96GB"}
    assert any("torch_xla" in hint for hint in advice.hints)
    assert any("Gaudi 3: Gaudi's software compiles whole graphs" in hint for hint in advice.hints)
    assert not any("Gaudi" in o.name for o in vivace.advise("resnet50", target="1M").offers)


@pytest.mark.parametrize(
    ("tables", "precision"),
    [
        ("[techniques.fp16_autocast]", "amp_fp16"),
        ("[techniques.bf16_autocast]", "amp_bf16"),
        ("[techniques.tf32]", "tf32"),
        ("[techniques.fused_optimizer]", "fp32"),
    ],
)
def test_a_plan_says_in_what_precision(profile, tmp_path, tables, precision):
    path = tmp_path / "plan.toml"
    path.write_text(f"format = 1\n{tables}\n")
    advice = vivace.advise(profile(), gpus=["A100-SXM4-80GB"], plan=path)
    assert {offer.prediction.precision for offer in advice.offers} == {precision}
    with pytest.raises(InputError, match="give no --precision"):
        vivace.advise(profile(), plan=path, precision="amp")


@pytest.mark.parametrize(
    ("told", "more", "technique", "found", "how"),
    [
        ("float64", {}, "fused_optimizer", "fp64", "in fp64, the job's own, which the plan leaves"),
        ("float64", {}, "bf16_autocast", "fp64", NOT_COUNTED.format("fp64")),
        # an autocast of the job's own
        ("bfloat16", {}, "fused_optimizer", "amp_bf16", "in mixed precision, the job's own, which the plan"),
        ("bfloat16", {}, "bf16_autocast", "amp_bf16", "as the plan says, in mixed precision with bf16"),
        ("bfloat16", HALF, "fused_optimizer", "bf16", "in bf16, the job's own, which the plan leaves"),
        ("bfloat16", HALF, "bf16_autocast", "bf16", NOT_COUNTED.format("bf16")),
        # without the technique, a plan forbids it
        ("tf32", {}, "fused_optimizer", "fp32", "in strict fp32, since the plan names no other precision"),
        ("float32", {}, "tf32", "tf32", "as the plan says, in tf32"),
        ("float32", {}, "winograd", "fp32", "in strict fp32, since the plan names no other precision"),
        ("float32", {}, "fp8_linear", "fp32", "in strict fp32, since the plan names no other precision"),
    ],
)
def test_a_plan_leaves_the_precision_that_it_does_not_name(
    profile, tmp_path, told, more, technique, found, how
):
    path = tmp_path / "plan.toml"
    path.write_text(f"format = 1\n[techniques.{technique}]\n")
    advice = vivace.advise(profile(precision=told, **more), gpus=["A100-SXM4-80GB"], plan=path)
    assert {offer.prediction.precision for offer in advice.offers} == {found}
    assert advice.how.startswith(f"predicted {how}")
    assert advice.how.endswith("; what else the plan brings comes on top")


def test_a_budget_of_next_to_nothing_is_kept_by_none(profile):
    advice = vivace.advise(profile(), gpus=["RTX 4090"], budget_usd=5e-324)
    assert (advice.exit_code, advice.refusals["RTX 4090"].told) == (1, "too dear: 0 % sure of the budget")


def test_a_card_with_few_units_of_fp64_is_a_slow_choice_for_it(profile):
    advice = vivace.advise(profile(), gpus=["Arc B580"], precision="fp64")
    (offer,) = [offer for offer in advice.offers if offer.prediction.num_gpus == 1]
    assert offer.prediction.gpu.rates["fp64"] == pytest.approx(0.9e12, rel=0.1)
    mixed = vivace.advise(profile(), gpus=["Arc B580"], most=1).offers[0]
    assert offer.prediction.seconds > mixed.prediction.seconds


@pytest.mark.parametrize(("precision", "card"), [("amp_bf16", "V100-SXM2-16GB"), ("fp64", "Arc A770")])
def test_a_card_without_the_precision_that_was_asked_for_is_no_choice(profile, precision, card):
    advice = vivace.advise(profile(), gpus=[card, "A100-SXM4-80GB"], precision=precision)
    assert advice.refusals[card].told == f"has no {precision.removeprefix('amp_')}"
    assert {offer.prediction.gpu.name for offer in advice.allowed} == {"A100-SXM4-80GB"}
    alone = vivace.advise(profile(), gpus=[card], precision=precision)
    assert alone.exit_code == 1
    assert answering.answer(alone).sentence.startswith("None of these cards computes in the precision")


def test_a_job_of_small_kernels_is_told_that_one_card_is_enough():
    advice = vivace.advise(
        dataclasses.replace(open_subject("torchvision:squeezenet1_1@224"), batch_size=1),
        steps=1000,
        gpus=CARDS,
    )
    assert any("one card is enough" in hint for hint in advice.hints)
    assert advice.picks["best value"].prediction.num_gpus == 1
    assert all(entry["pays_up_to"] == 1 for entry in advice.scaling if entry["launch_bound"])


def test_a_host_whose_launches_take_no_time_is_not_the_usual_one():
    small = dataclasses.replace(open_subject("resnet50"), batch_size=1)
    seconds = [
        vivace.advise(small, steps=10, gpus=["H100"], most=1, launch_us=took).offers[0].prediction.seconds
        for took in (0, 1, None)
    ]
    assert seconds == sorted(seconds)
    assert seconds[0] < 0.5 * seconds[-1]


def test_buying_is_told_with_dates_or_that_no_source_is_known():
    advice = vivace.advise("resnet50", target="10M", gpus=["RTX 4090", "H100-SXM5-80GB"], electricity=0.5)
    by_name = {entry["gpu"]: entry for entry in advice.buying}
    own = by_name["RTX 4090"]
    assert own["break_even_hours"] == pytest.approx(
        own["buy_usd"] / (own["rent_usd_per_hour"] - own["electricity_usd_per_hour"])
    )
    assert own["electricity_usd_per_hour"] == pytest.approx(0.225)
    assert "no source of used prices" in bought(own)
    assert "no price to buy it is known" in bought(by_name["H100-SXM5-80GB"])


def test_a_used_price_stands_with_its_date_and_when_it_pays(tmp_path):
    own = tmp_path / "prices.toml"
    seen = 'provider = "mine"\ndate = 2026-11-02\nsource = "offers"\n'
    own.write_text(
        f"format = 1\n[[rent]]\n{seen}usd_per_hour = {{ 'RTX 4090' = 0.525 }}\n"
        f"[[used]]\n{seen}usd = {{ 'RTX 4090' = 900 }}\n"
    )
    advice = vivace.advise("resnet50", target="10M", gpus=["RTX 4090"], electricity=0.5, prices=own)
    (entry,) = advice.buying
    assert entry["used_break_even_hours"] == pytest.approx(900 / (0.525 - 0.225))
    assert "(2026-11-02, pays after 3,000 hours)" in bought(entry)


def test_what_a_card_can_train_is_told_in_whole_words_at_80_columns():
    file, card = io.StringIO(), find_gpu("H20")
    draw_card(card, trainable(card), largest_model(card), Console(file=file, width=80))
    text = file.getvalue()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert {"swin_base_patch4_window7_224", "bandwidth", "arithmetic"} <= set(text.split())
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_the_first_screen_is_a_sentence_and_at_most_eight_rows_at_80_columns():
    found = answering.answer(vivace.advise("own:gpt3_27", target="10k", deadline="30h"))
    file = io.StringIO()
    ending(found, Console(file=file, width=80))
    lines = file.getvalue().splitlines()
    assert found.figure.startswith("1 x ")
    assert " the price for " in found.sentence
    assert len(found.parts) <= 8
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 80
    assert any("does not fit: needs" in line for line in lines)


@pytest.mark.parametrize("name", ["H20", "GTX 1080"])
def test_the_first_screen_of_a_card_has_twelve_lines(name):
    card, file = find_gpu(name), io.StringIO()
    found = answering.answer_of_card(card, trainable(card), largest_model(card), "amp")
    ending(found, Console(file=file, width=80))
    lines = file.getvalue().splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 80
    assert card.name in found.sentence
    fit = sum(entry.prediction is not None for entry in trainable(card))
    assert found.figure.startswith(f"{fit} of 17 ")
    assert lines[-1].startswith("Next: vivace advise JOB --epochs 90 --gpus ")


def test_what_says_nothing_of_a_card_is_refused_beside_it():
    options = {"precision": "auto", "catalogue": None, "probability": 0.8, "most": 8, "electricity": 0.25}
    with pytest.raises(InputError, match="--budget-usd says nothing"):
        answer(None, "RTX 3080", {**options, "budget_usd": 9.0}, None)


def test_a_model_that_is_misspelt_is_told_where_torch_is_missing(monkeypatch):
    def missing():
        raise InputError("torch is not installed")

    monkeypatch.setattr("vivace.inspection.gather.require_torch", missing)
    with pytest.raises(InputError, match="torch is not installed; did you mean 'resnet50'"):
        open_subject("rsnet50")


def test_a_time_on_this_machines_processor_is_called_a_guess(profile, monkeypatch):
    processor = dataclasses.replace(find_gpu("M2"), name="a processor", form="host")
    monkeypatch.setattr("vivace.advising.ranking._this_machine", lambda known: (processor, None, []))
    advice = vivace.advise(profile(), gpus=["H100"])
    assert advice.here.name == "a processor"
    assert any("the time on a processor: it is a rough guess" in note for note in advice.notes)
