import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torchvision import datasets, transforms

from vivace.blame import blame
from vivace.data.damage import Damage, path_of
from vivace.data.order import ordered
from vivace.errors import JobError, SampleError, is_lost_worker
from vivace.job import Job
from vivace.testing.jobs import TINY_JOBS
from vivace.torch_internals.loaders import end_workers_of
from vivace.training import losses
from vivace.training.training import train

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
BAD = {3, 4, 9}
TRUNCATED = OSError("image file is truncated")


class Numbers(Dataset):
    """Sample i is i with noise; those in `bad` raise what a damaged file raises."""

    def __init__(self, bad=BAD, error=TRUNCATED, size=20):
        self.bad, self.error, self.size = bad, error, size
        self.paths = [f"folder/{index}.jpg" for index in range(size)]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.bad:
            raise self.error
        return torch.tensor([float(index), float(torch.rand(()))])


class AtOnce(Numbers):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Pathless(Numbers):
    """Without a list of files."""

    def __init__(self, bad):
        super().__init__(bad)
        del self.paths


def read(damage=None, dataset=None, workers=0, batch_size=5, **options):
    dataset = Numbers() if dataset is None else dataset
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=workers)
    return list(ordered(loader, seed=5, epoch=0, damage=damage, **options))


def firsts(batches):
    return [int(number) for batch in batches if batch is not None for number in batch[:, 0]]


@pytest.mark.fault(16)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Numbers, AtOnce])
def test_a_damaged_sample_is_named_with_its_path_and_what_it_raised(workers, kind):
    with pytest.raises(SampleError) as caught:
        read(dataset=kind(), workers=workers)
    end_workers_of(caught.value)
    assert not multiprocessing.active_children()
    text = str(caught.value)
    assert text.startswith("sample ")
    index = int(text.split()[1])
    assert f"('folder/{index}.jpg') cannot be read: OSError: image file is truncated" in text
    assert "test_damage.py" in text
    assert "\n" not in text
    assert index in BAD


class Arrays(Dataset):
    """Reads a file for each sample, of which it keeps no list."""

    def __init__(self, load, files):
        self.load, self.of = load, files.__getitem__

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.load(self.of(index))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("share", [0.5, 0.0])
@pytest.mark.parametrize("kind", ["npy", "pt"])
def test_a_damaged_file_of_which_the_dataset_keeps_no_list_is_named(tmp_path, kind, share, workers):
    files = [tmp_path / f"{number}.{kind}" for number in range(4)]
    for path in files:
        numpy.save(path, numpy.ones(300)) if kind == "npy" else torch.save(torch.ones(300), path)
    load = numpy.load if kind == "npy" else torch.load
    whole = files[2].read_bytes()
    files[2].write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(SampleError) as caught:
        read(dataset=Arrays(load, files), workers=workers, batch_size=2)
    end_workers_of(caught.value)
    text = str(caught.value)
    assert text.startswith(f"sample 2 ('{files[2]}') cannot be read: ")
    assert text.count(str(files[2])) == 1
    assert "standard input" not in text
    with pytest.raises(Exception) as caught:  # whatever the reader raises
        Arrays(load, files)[2]
    assert f"(file '{files[2]}'; {__file__}, line " in blame(caught.value)
    skipped = Damage("skip", tmp_path / "damaged.jsonl")
    read(skipped, Arrays(load, files), workers, batch_size=2)
    assert [entry["path"] for entry in skipped.listed()] == [str(files[2])]


@pytest.mark.fault(17)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Numbers, AtOnce])
def test_the_order_of_the_others_is_unchanged(tmp_path, workers, kind):
    whole = firsts(read(dataset=kind(bad=())))
    skip, replace = (Damage(policy, tmp_path / policy) for policy in ("skip", "replace"))
    assert firsts(read(skip, kind(), workers)) == [number for number in whole if number not in BAD]
    replaced = firsts(read(replace, kind(), workers))
    assert len(replaced) == len(whole)
    for position, (number, other) in enumerate(zip(whole, replaced, strict=True)):
        if number in BAD:
            assert other in set(whole[position // 5 * 5 : position // 5 * 5 + 5]) - BAD
        else:
            assert other == number
    for damage in (skip, replace):
        assert {(e["index"], e["path"], e["times"]) for e in damage.listed()} == {
            (index, f"folder/{index}.jpg", 1) for index in BAD
        }


def test_a_batch_of_which_nothing_is_left():
    batches = read(Damage("skip"), Numbers(bad=set(range(20)) - {7}))
    assert [batch is None for batch in batches].count(True) == 3
    assert firsts(batches) == [7]
    with pytest.raises(SampleError, match="nothing could replace them"):
        read(Damage("replace"), Numbers(bad=range(20)))


@pytest.mark.parametrize("error", [AttributeError("x"), KeyError("x"), TypeError("x"), NameError("x")])
def test_a_mistake_in_the_code_is_never_taken_for_damage(error):
    with pytest.raises(type(error)):
        read(Damage("skip"), Numbers(error=error))


def test_ranks_cannot_skip():
    with pytest.raises(JobError, match="unequal batches: choose 'replace'"):
        read(Damage("skip"), batch_size=4, rank=0, world_size=2)
    assert len(firsts(read(Damage("replace"), Numbers({3}), batch_size=4, rank=0, world_size=2))) == 10


def test_too_much_damage_is_an_error(tmp_path):
    damage = Damage("skip", tmp_path / "list")
    read(damage)
    damage.require_few(17)
    read(damage, Numbers(bad=range(20)))
    with pytest.raises(JobError, match="23 of 40 samples could not be read, more than damaged='skip' may"):
        damage.require_few(17)
    damage = Damage("skip", tmp_path / "pathless")
    read(damage, Pathless(bad=range(20)))
    with pytest.raises(JobError, match=r"the first was \d+: OSError: "):
        damage.require_few(0)
    Damage("skip", tmp_path / "list").require_few(5)  # what an earlier part of the run met is not counted


def test_paths_are_found_where_datasets_keep_them():
    assert path_of(Subset(Numbers(), [5, 6]), 1) == "folder/6.jpg"
    assert path_of([1, 2], 0) == ""
    assert path_of(Wrapping(Subset(Numbers(), [5, 6])), 1) == "folder/6.jpg"
    joined = ConcatDataset([Subset(Numbers(), [5, 6]), [1, 2], Numbers()])
    found = [path_of(joined, index) for index in (0, 1, 2, 4, 6, 99, "a key")]
    assert found == ["folder/5.jpg", "folder/6.jpg", "", "folder/0.jpg", "folder/2.jpg", "", ""]
    assert path_of(Subset(joined, [4, 0]), 0) == "folder/0.jpg"
    for kind in (numpy.int64, torch.tensor):
        assert [path_of(joined, kind(index)) for index in (0, 1, 2, 4, 6, 99)] == found[:-1]


def name_of(index):
    return f"sample {index}"


class Keyed(Numbers):
    """Samples by their names."""

    def __getitem__(self, key):
        return super().__getitem__(int(key.split()[1]))


@pytest.mark.parametrize("kind", [int, numpy.int64, name_of])
def test_a_samples_number_is_one_whoever_holds_it(kind, tmp_path):
    damage, dataset = Damage("skip", tmp_path / "list"), Keyed() if kind is name_of else Numbers()
    for _ in range(2):
        assert len(damage.read(dataset, [kind(index) for index in range(4)], 0)) == 3
    entry = damage.listed()[0]
    named = name_of(3) if kind is name_of else 3
    assert (entry["index"], entry["times"]) == (named, 2)
    where = "" if kind is name_of else " ('folder/3.jpg')"  # a name has no place in the list of files
    assert damage.sentence().startswith(f"1 damaged sample was skipped: {named}{where}: OSError: ")
    with pytest.raises(SampleError, match=f"sample {named!r} "):
        Damage().read(dataset, [kind(3)], 0, many=False)


class Wrapping(Dataset):
    """Keeps what reads the samples under a name that others give to a list of files."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index] + 1


class Reading:
    """The same for a store of files, which is no Dataset of torch."""

    def __getitem__(self, index):
        return Numbers()[index]

    def __len__(self):
        return 20


@pytest.mark.parametrize("samples", [Numbers(), Reading()])
def test_looking_for_a_damaged_samples_file_does_not_read_the_sample_again(samples):
    with pytest.raises(SampleError, match=r"sample 3.* cannot be read: OSError: image file is truncated"):
        Damage().read(Wrapping(samples), [3], 0)
    assert Damage("skip").read(Wrapping(samples), [2, 3], 0)[0][0] == 3


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures" / "a").mkdir(parents=True)
    for number in range(12):
        Image.new("RGB", (40, 40), (number * 20, 90, 30)).save(
            tmp_path / "pictures" / "a" / f"{number:02}.jpg"
        )
    return tmp_path / "pictures"


def job_on(folder, damaged="raise", workers=0, checksums=None):
    transform = transforms.Compose([transforms.RandomCrop(32), transforms.ToTensor()])
    return Job(
        model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 2)),
        data=lambda: DataLoader(datasets.ImageFolder(folder, transform), batch_size=4, num_workers=workers),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        epochs=2,
        damaged=damaged,
        checksums=checksums,
    )


class TestTraining:
    def damage_three(self, folder):
        files = sorted((folder / "a").iterdir())
        whole = files[1].read_bytes()
        files[1].write_bytes(whole[: len(whole) // 2])
        files[5].write_bytes(b"")
        files[6].write_text("not a picture")
        return {str(files[number]) for number in (1, 5, 6)}

    @pytest.mark.fault(17, 19)
    @pytest.mark.parametrize("policy", ["skip", "replace"])
    def test_truncated_empty_and_foreign_files_are_listed(self, folder, tmp_path, policy):
        paths = self.damage_three(folder)
        events = []
        run = train(job_on(folder, policy), out=tmp_path / "run", on_event=events.append)
        assert {entry["path"] for entry in run.damaged} == paths
        assert {entry["index"] for entry in run.damaged} == {1, 5, 6}
        assert all(entry["times"] == 2 for entry in run.damaged)
        assert run.steps == 6
        assert run.notices[-1].startswith(
            f"3 damaged samples were {policy.removesuffix('e').removesuffix('p')}"
        )
        assert json.loads((tmp_path / "run" / "run.json").read_text())["damaged"] == list(run.damaged)
        assert any(event.kind == "notice" for event in events)

    def flip_a_bit(self, folder):
        file = min((folder / "a").iterdir())
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        return file

    @pytest.mark.fault(18)
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_flipped_bit_is_found_where_the_job_names_checksums(self, folder, tmp_path, workers, bad_input):
        sums = tmp_path / "SHA256SUMS"
        command = "find pictures -type f | xargs sha256sum"
        sums.write_bytes(subprocess.run(["sh", "-c", command], cwd=tmp_path, stdout=subprocess.PIPE).stdout)
        whole = train(job_on(folder, "skip", workers, sums), out=tmp_path / "whole")
        assert (whole.damaged, whole.steps) == ((), 6)
        file = self.flip_a_bit(folder)
        bad_input()
        run = train(job_on(folder, "skip", workers, sums), out=tmp_path / "run")
        assert [(entry["path"], entry["times"]) for entry in run.damaged] == [(str(file), 2)]
        with pytest.raises(SampleError, match=r"00.jpg'\) cannot be read: OSError: it has changed: its sha"):
            train(job_on(folder, workers=workers, checksums=sums), out=tmp_path / "refused")

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("no sums\n", "line 1 of the Job's checksums '.*' is 'no sums', and not as sha256sum writes it"),
            (None, "cannot be read: .*No such file"),
        ],
    )
    def test_checksums_that_are_none_are_refused(self, folder, tmp_path, text, sentence):
        if text is not None:
            (tmp_path / "sums").write_text(text)
        with pytest.raises(JobError, match=sentence):
            train(job_on(folder, checksums=tmp_path / "sums"), out=tmp_path / "run")

    def test_checksums_of_data_without_files_are_refused(self, tmp_path):
        (tmp_path / "sums").write_text("")
        job = dataclasses.replace(TINY_JOBS["mlp"](), checksums=tmp_path / "sums")
        with pytest.raises(JobError, match="does not: leave checksums out"):
            train(job, out=tmp_path / "run")

    @pytest.mark.fault(18)
    def test_a_flipped_bit_decodes_without_a_word_as_the_documentation_says(self, folder, tmp_path):
        self.flip_a_bit(folder)
        assert train(job_on(folder, "skip"), out=tmp_path / "run").damaged == ()
        page = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
        assert "A bit that flipped inside a JPEG decodes without" in page

    @pytest.mark.fault(17)
    def test_by_default_the_run_ends_and_says_which(self, folder, tmp_path):
        self.damage_three(folder)
        with pytest.raises(
            SampleError, match=r"sample 1 \('.*01.jpg'\) cannot be read: OSError: .*damaged='skip'"
        ) as caught:
            train(job_on(folder, workers=2), out=tmp_path / "run")
        assert caught.traceback
        assert not multiprocessing.active_children(), "workers wait for their end"

    @pytest.mark.fault(20)
    def test_a_folder_that_vanishes_is_no_damage_here_and_there(self, folder, tmp_path):
        for file in (folder / "a").iterdir():
            file.write_bytes(b"")
        with pytest.raises(JobError, match=r"no batch in epoch|could not be read"):
            train(job_on(folder, "skip"), out=tmp_path / "run")

    def test_an_unknown_policy_is_refused(self, folder):
        with pytest.raises(JobError, match="must be 'raise', 'skip' or 'replace', not 'ignore'"):
            job_on(folder, "ignore")


class Mortal(Dataset):
    """Kills the worker that reads sample 6, as often as `lives` has files."""

    def __init__(self, lives):
        self.lives = lives

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == 6:
            for life in self.lives.iterdir():
                life.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((3,), float(index)) + torch.rand(3), index % 2


class Asleep(Mortal):
    def __getitem__(self, index):
        time.sleep(2.5)


class Raising(Mortal):
    def __getitem__(self, index):
        raise ValueError(f"no label for {index}\nand more")


def mortal_job(kind, lives, **loader):
    return Job(
        model=lambda: torch.nn.Linear(3, 2),
        data=lambda: DataLoader(kind(lives), batch_size=2, num_workers=1, **loader),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        epochs=2,
    )


@pytest.fixture
def lives(tmp_path):
    (tmp_path / "lives").mkdir()

    def make(count):
        for number in range(count):
            (tmp_path / "lives" / str(number)).touch()
        return tmp_path / "lives"

    return make


@pytest.mark.filterwarnings("ignore:This process")
class TestWorkers:
    @pytest.fixture(autouse=True)
    def looks_often(self, monkeypatch):
        """For dead workers, and not every five seconds."""
        monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))

    @pytest.mark.fault(15)
    @pytest.mark.parametrize("persistent", [False, True])
    def test_a_killed_worker_is_replaced_and_nothing_changes(self, lives, tmp_path, persistent):
        weights = []
        for deaths in (0, 2):
            job = mortal_job(Mortal, lives(deaths), persistent_workers=persistent)
            run = train(job, out=tmp_path / str(deaths))
            assert len([n for n in run.notices if "was killed before" in n]) == deaths
            assert run.steps == 16
            weights.append(torch.load(tmp_path / str(deaths) / "model.pt", weights_only=True)["weight"])
        assert torch.equal(*weights)

    @pytest.mark.fault(15)
    @pytest.mark.parametrize("deaths", [1, 3])
    def test_where_one_of_the_validation_data_is_killed_the_evaluation_begins_anew(
        self, lives, tmp_path, deaths
    ):
        def metric(model, batches):
            return float(sum(len(batch[0]) for batch in batches))

        dying = mortal_job(Mortal, lives(deaths)).data
        job = dataclasses.replace(TINY_JOBS["mlp"](), metric=metric, validation=dying)
        if deaths == 3:
            with pytest.raises(JobError, match="a worker of the metric's loader was killed 3 times in a row"):
                train(job, out=tmp_path / "run")
            return
        run = train(job, out=tmp_path / "run")
        assert run.metric == 16
        assert "a worker of the metric's loader was killed" in run.notices[-1]

    def test_one_that_is_killed_each_time_ends_the_run(self, lives, tmp_path):
        with pytest.raises(
            JobError, match=r"the data failed at batch \d of epoch 1: workers .* killed again"
        ):
            train(mortal_job(Mortal, lives(9)), out=tmp_path / "run")

    @pytest.mark.parametrize("killed_in", [None, 9])
    def test_those_that_live_on_live_on_over_epochs_and_evaluations(self, tmp_path, killed_in):
        """Also of a class of one's own; and where one of the validation data dies between two evaluations."""
        read, measured = [], []

        def loss(model, batch):
            read.append(int(batch[0]))
            if len(read) == killed_in:
                os.kill(measured[-1], signal.SIGKILL)
                os.waitid(os.P_PID, measured[-1], os.WEXITED | os.WNOWAIT)
            return model(torch.ones(2, 3)).square().mean()

        job = Job(
            model=lambda: torch.nn.Linear(3, 1),
            data=lambda: Loader(Pids(), batch_size=2, num_workers=1, persistent_workers=True),
            loss=loss,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            metric=lambda model, batches: float(len([measured.append(int(batch[0])) for batch in batches])),
            validation=lambda: DataLoader(Pids(), batch_size=4, num_workers=1, persistent_workers=True),
            epochs=3,
        )
        run = train(job, out=tmp_path / "run")
        assert (run.steps, run.metric) == (24, 4.0)
        assert len({*read}) == len({*measured}) == (1 if killed_in is None else 2)
        assert len(run.notices) == (0 if killed_in is None else 1)

    def test_a_worker_that_hangs_is_named(self, lives, tmp_path):
        with pytest.raises(JobError, match=r"the data failed at batch 0 of epoch 1: .*timed out after 1 sec"):
            train(mortal_job(Asleep, lives(0), timeout=1), out=tmp_path / "run")

    @pytest.mark.fault(16)
    def test_a_worker_that_raises_is_quoted(self, lives, tmp_path):
        with pytest.raises(
            SampleError, match=r"sample \d+ cannot be read: ValueError: no label for \d+ \(.*py"
        ):
            train(mortal_job(Raising, lives(0)), out=tmp_path / "run")

    def test_what_a_worker_of_any_loader_raised_is_quoted(self, lives):
        with pytest.raises(ValueError, match="Caught") as caught:
            next(iter(DataLoader(Raising(lives(0)), num_workers=1)))
        assert blame(caught.value).startswith("ValueError: no label for 0 (")
        assert "test_damage.py" in blame(caught.value)

    def test_a_death_in_the_middle_of_a_step_waits_for_its_end(self, lives):
        with losses.WorkerWatch() as watch:
            batches = iter(DataLoader(Mortal(lives(0)), num_workers=1))
            next(batches)
            watch.check()
            worker = batches._workers[0].pid
            os.kill(worker, signal.SIGKILL)
            os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)  # the signal arrives, and nothing raises
            with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
                watch.check()
        assert is_lost_worker(caught.value, from_workers=False)
        assert signal.getsignal(signal.SIGCHLD).__module__.startswith("torch")


class Pids(Dataset):
    """Which process reads."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return os.getpid()


class Loader(DataLoader):
    pass


class Torn(IterableDataset):
    """A stream that `error` ends in its fourth sample, as often as `lives` say."""

    def __init__(self, error, lives=9):
        self.error, self.lives = error, lives

    def __iter__(self):
        for number in range(8):
            if number == 3 and self.lives:
                self.lives -= 1
                raise self.error
            yield torch.full((3,), float(number))


def torn_job(data):
    return Job(
        model=lambda: torch.nn.Linear(3, 1),
        data=data,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


@pytest.mark.parametrize("around", [lambda data: DataLoader(data, batch_size=2), iter])
@pytest.mark.parametrize("error", [EOFError("the archive ended"), ConnectionResetError("the store is gone")])
def test_a_stream_that_breaks_off_is_told_by_its_own_words(tmp_path, around, error):
    with pytest.raises(
        JobError, match=r"batch \d of epoch 1: \w+: the (archive|store) .*test_damage"
    ) as caught:
        train(torn_job(lambda: around(Torn(error))), out=tmp_path / "run")
    assert "worker" not in str(caught.value)


def test_a_stream_whose_connection_breaks_is_read_again(tmp_path):
    weights = []
    for lives in (0, 2):
        torn = Torn(ConnectionResetError("the store is gone"), lives)
        run = train(torn_job(lambda torn=torn: DataLoader(torn, batch_size=2)), out=tmp_path / str(lives))
        assert len([text for text in run.notices if "are read again from there: Connection" in text]) == lives
        assert run.steps == 4
        weights.append(torch.load(tmp_path / str(lives) / "model.pt", weights_only=True)["weight"])
    assert torch.equal(*weights)


LITTLE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import vivace
job = vivace.Job(
    model=lambda: torch.nn.Linear(50_000, 2),
    data=lambda: DataLoader(TensorDataset(torch.zeros(16, 50_000)), batch_size=8, num_workers=1, timeout=20),
    loss=lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
"""


@pytest.mark.fault(40)
def test_too_little_shared_memory_is_told_with_what_to_do(tmp_path):
    (tmp_path / "little.py").write_text(LITTLE)
    train_it = f"{sys.executable} -m vivace train little.py:job --quiet"
    mounted = "mount -t tmpfs -o size=512k tmpfs /dev/shm && "
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*inside, mounted + "true"], check=False).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(
        [*inside, mounted + train_it], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the data failed at batch 0 of epoch 1" in done.stderr
    assert "/dev/shm has " in done.stderr
    assert "--shm-size=8g" in done.stderr


def test_a_killed_run_leaves_no_workers_and_no_shared_memory(launch, until, tmp_path):
    before = set(Path("/dev/shm").iterdir())
    child = launch("workers", {"out": str(tmp_path / "run")}, environment={"VIVACE_FAULT": "slow_write"})
    until(lambda: len(children_of(child.process.pid)) >= 2)
    workers = children_of(child.process.pid)
    child.process.kill()
    child.wait()
    until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    new = set(Path("/dev/shm").iterdir()) - before  # some may be of another test's processes
    until(lambda: not any(path.exists() for path in new))


def children_of(process):
    try:
        return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def test_a_line_that_a_full_disk_or_a_lost_machine_tore_hides_no_other(tmp_path):
    path = tmp_path / "damaged.jsonl"
    whole = json.dumps({"index": 3, "path": "a.png", "error": "OSError"})
    path.write_text(f'{whole}\n{whole}\n{{"index": 4, "pa\n\0\0\0\n[]\n')
    (found,) = Damage("skip", path).listed()
    assert (found["index"], found["times"]) == (3, 2)
