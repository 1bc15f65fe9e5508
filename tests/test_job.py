"""Jobs: what a Job refuses, and the loader's one clear sentence for every bad reference."""

import dataclasses
import gc
import os

import pytest
import torch

import vivace
from vivace.blame import blame
from vivace.errors import JobError
from vivace.job import load, spelled

GOOD = """
import torch, vivace
job = vivace.Job(
    model=lambda: torch.nn.Linear(4, 2),
    data=lambda: [(torch.randn(8, 4), torch.randint(2, (8,)))],
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
def made():
    return job
def sized(width=4, rate=0.1, kind="sgd", plain=True):
    return vivace.Job(model=job.model, data=job.data, loss=job.loss, optimizer=job.optimizer,
                      epochs=width, metric_name=f"{rate} {kind}")
def wide(width, depth, rate=0.1):
    return job
number = 3
built = torch.nn.Linear(2, 2)
"""
PARTS = {"model": int, "data": list, "loss": max, "optimizer": str}


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "their_job.py"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize("collecting", [True, False])
def test_searches_for_garbage_are_its_files_own_affair(job_file, collecting):
    job_file.write_text(
        f"import gc\nfound = gc.isenabled()\n{'gc.disable()' if collecting else 'gc.enable()'}\n{GOOD}"
    )
    before = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        job = load(f"{job_file}:job")
        assert gc.isenabled() == (not collecting)
    finally:
        (gc.enable if before else gc.disable)()
    assert job.model.__globals__["found"] == collecting


def test_a_job_or_a_function_that_returns_one(job_file):
    assert isinstance(load(f"{job_file}:job"), vivace.Job)
    assert load(f"{job_file}:made") is load(f"{job_file}:job")
    assert load(str(job_file)) is load(f"{job_file}:job")
    assert isinstance(load("digits"), vivace.Job)


def test_a_file_that_was_edited_since_is_read_again(job_file):
    before = load(f"{job_file}:job")
    job_file.write_text(
        GOOD + "job = vivace.Job(model=job.model, data=job.data, loss=job.loss,"
        " optimizer=job.optimizer, epochs=9)\n"
    )
    assert (before.epochs, load(f"{job_file}:job").epochs) == (1, 9)


def test_two_files_whose_names_differ_in_one_sign_are_two(tmp_path):
    for name, epochs in (("run-1.py", 3), ("run_1.py", 4)):
        (tmp_path / name).write_text(GOOD + f"job = sized(width={epochs})\n")
        os.utime(tmp_path / name, (0, 0))  # as an archive leaves them
    assert [load(f"{tmp_path / name}:job").epochs for name in ("run-1.py", "run_1.py")] == [3, 4]


def test_a_decorator_may_give_arguments_that_have_no_default(job_file):
    job_file.write_text(
        f"{GOOD}import functools\n"
        "given = functools.wraps(wide)(lambda width=4: sized(int(width)))\n"
        "remembered = functools.cache(sized)\n"
    )
    assert load(f"{job_file}:given").epochs == 4
    assert load(f"{job_file}:given,width=7").epochs == 7
    assert load(f"{job_file}:remembered").epochs == 4


def test_arguments_follow_the_name_of_a_function(job_file):
    job = load(f"{job_file}:sized,width=7,rate=1e-3,kind=adam")
    assert (job.epochs, job.metric_name) == (7, "0.001 adam")
    narrow, wide = (load(f"digits,width={width},depth=1") for width in (8, 16))
    sizes = [sum(p.numel() for p in job.model().parameters()) for job in (narrow, wide)]
    assert sizes[1] > 3 * sizes[0]


@pytest.mark.parametrize("kind", ["/mnt/imagenet", "s3://bucket/a:b", "../data.py", "a=b"])
def test_an_argument_may_be_a_path_also_in_a_folder_that_reads_like_arguments(kind, tmp_path):
    folder = tmp_path / "lr,width=3"
    folder.mkdir()
    (folder / "train.py").write_text(GOOD)
    assert load(f"{folder}/train.py:job").metric_name == "metric"
    assert load(f"{folder}/train.py").metric_name == "metric"
    job = load(f"{folder}/train.py:sized,kind={kind},width=5")
    assert (job.epochs, job.metric_name) == (5, f"0.1 {kind}")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("train.py", "./train.py:job"),
        ("a/../train.py:job,width=3,depth=2", "train.py,depth=2,width=3"),
        ("lr,a=1/train.py:job", "lr,a=1//train.py"),
        ("digits,width=64,depth=2", "digits,depth=2,width=64"),
    ],
)
def test_all_spellings_of_a_reference_are_one(one, other):
    assert spelled(one) == spelled(other) == spelled(spelled(one))
    assert spelled(one) != spelled(f"{other},root=/x/y.py:job")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("{file}:jbo", "has no name 'jbo'; did you mean 'job'"),
        ("{file}:number", "'number' in '{file}' is of type int; it must be a vivace.Job"),
        ("{file}:built", "'built' in '{file}' is of type Linear; it must be a vivace.Job"),
        ("/nowhere/at_all.py:job", "there is no file '/nowhere/at_all.py'"),
        (f"{300 * 'a'}.py:job", "there is no file 'aaa"),
        (f"{300 * 'a'}.py", "there is no file 'aaa"),
        (300 * "a", "there is no recipe 'aaa"),
        ("no.such.module:job", "No module named 'no'"),
        ("{file}:sized,widths=3", "'sized' has no argument 'widths'; did you mean 'width'"),
        ("{file}:sized,width=wide", "width of 'sized' must be a whole number, such as 4, not 'wide'"),
        ("{file}:sized,rate=fast", "rate of 'sized' must be a number, such as 0.1, not 'fast'"),
        ("{file}:sized,plain=yes", "'plain' of 'sized' is yes or no"),
        ("{file}:sized,width=3,width=4", "'{file}:sized' is given width twice: 3 and 4"),
        ("{file}:made,width=3", "'made' has no argument 'width', which takes none"),
        ("{file}:job,width=3", "'job' in '{file}' is no function: it takes no width"),
        ("digits,with=3", "'digits' has no argument 'with'; did you mean 'width'?"),
        ("digits,root=/mnt/x", "'digits' has no argument 'root'"),
        ("digitz", "there is no recipe 'digitz'; did you mean 'digits'"),
        ("{file}:wide,width=3", "'wide' has no default for depth: give it one, or write a value behind"),
        (
            "my_package.models",
            "there is no recipe 'my_package.models'; for a module write my_package.models:job",
        ),
    ],
)
def test_bad_references(reference, message, job_file):
    with pytest.raises(JobError) as caught:
        load(reference.format(file=job_file))
    assert message.format(file=job_file) in str(caught.value)


def test_of_a_wrong_name_all_functions_that_say_they_return_a_job_are_told(tmp_path):
    path = tmp_path / "jobs.py"
    path.write_text(
        "import vivace\nfrom vivace import Job\n"
        "def small(width: int = 4) -> vivace.Job: return made(width)\n"
        "def large() -> 'Job': return made(9)\n"
        "def made(width) -> Job: return Job(model=None, data=None, loss=None, optimizer=None)\n"
        "def other() -> int: return 1\n"
    )
    with pytest.raises(JobError, match=r"has no name 'xyzzy'; it has small, large$"):
        load(f"{path}:xyzzy")


@pytest.mark.parametrize("reference", ["{file}", "{file}:job", "{file}:train"])
@pytest.mark.parametrize(
    "local", ["", "def go():\n    job = train = 1\n", "class Cell:\n    job = train = 1\n"]
)
def test_a_script_without_a_job_is_read_and_not_run(reference, local, tmp_path):
    path, ran = tmp_path / "script.py", tmp_path / "ran"
    path.write_text(f"import pathlib\nmodel = 1\n{local}pathlib.Path({str(ran)!r}).touch()\n")
    with pytest.raises(JobError, match=f"vivace run -- python {path} tries to make it faster as it is"):
        load(reference.format(file=path))
    assert not ran.exists()


def test_a_name_that_a_file_binds_unseen_is_found(tmp_path):
    path = tmp_path / "unseen.py"
    path.write_text("import vivace.recipes.digits as digits\nglobals()['mine'] = digits.job\n")
    assert isinstance(load(f"{path}:mine"), vivace.Job)


@pytest.mark.parametrize("where", ["if job is not None:", "with open(__file__):", "try:", "while True:"])
def test_a_function_that_a_file_defines_inside_of_another_statement_is_found(where, job_file):
    end = {"try:": "finally:\n    pass\n", "while True:": "    break\n"}.get(where, "")
    job_file.write_text(f"{GOOD}\n{where}\n    def inner():\n        return job\n{end}")
    assert isinstance(load(f"{job_file}:inner"), vivace.Job)


def test_a_name_that_a_function_binds_for_its_file_is_found(job_file):
    job_file.write_text(f"{GOOD}\ndef bind():\n    global bound\n    bound = job\nbind()\n")
    assert isinstance(load(f"{job_file}:bound"), vivace.Job)


@pytest.mark.parametrize(
    "written",
    [
        GOOD.encode("utf-8-sig"),
        f"# coding: latin-1\n# \N{LATIN SMALL LETTER E WITH ACUTE}{GOOD}".encode("latin-1"),
    ],
)
def test_a_file_is_read_in_the_coding_that_python_reads_it_in(written, job_file):
    job_file.write_bytes(written)
    assert isinstance(load(str(job_file)), vivace.Job)


def test_a_syntax_error_shows_their_line(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import torch\nx = (1 +\n")
    with pytest.raises(JobError, match=r"broken\.py, line 2: .*x = \(1 \+"):
        load(f"{path}:job")


def test_an_exception_at_import_shows_their_line(tmp_path):
    path = tmp_path / "raises.py"
    path.write_text("import torch\nvalue = 1 // 0\njob = None\n")
    with pytest.raises(JobError, match=r"ZeroDivisionError: .*raises\.py, line 2: value = 1 // 0"):
        load(f"{path}:job")
    path.write_text(GOOD)
    assert load(f"{path}:job"), "a file that was mended must load"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": None}, "needs either loss"),
        ({"step": max}, "needs either loss"),
        ({"optimizer": None}, "needs optimizer"),
        ({"data": [1, 2]}, "data must be a function that builds it, not a list"),
        ({"model": torch.nn.Linear(2, 2)}, "model must be a function that builds it, not a Linear"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1, not 0"),
        ({"scheduler_every": "batch"}, "scheduler_every must be 'epoch' or 'step', not 'batch'"),
        ({"loss": None, "step": max, "on_gradients": max}, "leave on_gradients out"),
    ],
)
def test_what_a_job_refuses(change, message):
    with pytest.raises(JobError) as caught:
        vivace.Job(**{**PARTS, **change})
    assert message in str(caught.value)


def test_a_metric_is_called_as_its_function_is():
    def top_one(model, batches):
        return 1.0

    def evaluate(model, batches):
        return 1.0

    assert vivace.Job(**PARTS, metric=top_one).metric_name == "top one"
    assert vivace.Job(**PARTS, metric=top_one, metric_name="accuracy").metric_name == "accuracy"
    assert vivace.Job(**PARTS, metric=evaluate).metric_name == "metric"


def test_a_job_says_what_data_its_metric_is_of():
    job = vivace.Job(**PARTS, metric=lambda model, batches: 1.0)
    assert vivace.Job(**PARTS).metric_data is None
    assert job.metric_name == "metric"
    with pytest.raises(JobError, match="metric_name must be a word, such as 'accuracy', not ''"):
        dataclasses.replace(job, metric_name="")
    assert job.metric_data == "training"
    assert dataclasses.replace(job, validation=job.data).metric_data == "validation"


@pytest.mark.parametrize(
    "verb", [vivace.train, vivace.tune, vivace.profile, lambda job: vivace.verify(job, {})]
)
def test_a_verb_that_is_handed_something_else_says_what_it_takes(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        JobError, match=r"such as 'train\.py:job', not a function: call it, if it returns one"
    ):
        verb(lambda: None)
    with pytest.raises(JobError, match=r"give a vivace\.Job, .* not a Linear$"):
        verb(torch.nn.Linear(2, 2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no such key\nmore of it", "no such key"),
        (
            "\nFound the following:\n\n- a static shape of 4\n- another",
            "Found the following: - a static shape of 4",
        ),
        (
            "Constraints violated!\n  - a constant (4)\n\nUser stack:",
            "Constraints violated! - a constant (4)",
        ),
        ("Found:", "Found:"),
        ("", ""),
    ],
)
def test_what_an_error_announces_is_told_with_it(text, told):
    assert blame(ValueError(text)) == f"ValueError: {told}".removesuffix(": ")
