"""The kinds of data that people have, as they have them: trained, stopped, resumed, with damaged samples."""

import csv
import io
import pickle
import random
from pathlib import Path

import datasets as hugging_face
import numpy
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch
import torchvision
import webdataset
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchvision import transforms

import vivace
from vivace.data import iterable
from vivace.errors import JobError
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.tensors.trees import batch_size, tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on one core
    pytest.mark.filterwarnings("ignore:'.*' is deprecated:UserWarning"),  # dill asks torch for all its names
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # webdataset leaves the rest to gc
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
IMAGES, ROWS, BATCH = 24, 64, 4
TRANSFORM = transforms.Compose([transforms.RandomCrop(16), transforms.ToTensor()])


def jpeg(number):
    numbers = numpy.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=numpy.uint8)
    file = io.BytesIO()
    Image.fromarray(numbers).resize((24, 24)).save(file, "jpeg")
    return file.getvalue()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Every kind of data on the disk."""
    root = tmp_path_factory.mktemp("data")
    files, labels = [jpeg(number) for number in range(IMAGES)], [number % 3 for number in range(IMAGES)]
    for number, file in enumerate(files):
        folder = root / "folder" / f"class{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}.jpg").write_bytes(file)
    with (root / "labels.csv").open("w") as table:
        rows = [{"file": f"class{n % 3}/{n:02}.jpg", "label": n % 3} for n in range(IMAGES)]
        writer = csv.DictWriter(table, ["file", "label"])
        writer.writeheader()
        writer.writerows(rows)
    pictures = pyarrow.table({"image": files, "label": labels})
    pyarrow.parquet.write_table(pictures, root / "pictures.parquet")
    numbers = numpy.random.default_rng(0)
    columns = {f"x{n}": numbers.normal(size=ROWS).astype("float32") for n in range(4)}
    table = pyarrow.table({**columns, "y": numbers.integers(0, 3, ROWS)})
    pyarrow.parquet.write_table(table, root / "table.parquet", row_group_size=16)
    features = hugging_face.Features({"image": hugging_face.Image(), "label": hugging_face.Value("int64")})
    rows = {"image": [{"bytes": file, "path": None} for file in files], "label": labels}
    hugging_face.disable_progress_bars()
    hugging_face.Dataset.from_dict(rows, features=features).save_to_disk(root / "hugging_face")
    with webdataset.ShardWriter(f"{root}/part-%02d.tar", maxcount=8, verbose=0) as shards:
        for number, file in enumerate(files):
            shards.write({"__key__": f"{number:02}", "jpg": file, "cls": number % 3})
    numpy.save(root / "x.npy", numbers.integers(0, 256, (IMAGES, 3, 16, 16), dtype=numpy.uint8))
    (root / "cifar-10-batches-py").mkdir()
    names = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
    for name in names:
        batch = {"data": numbers.integers(0, 256, (5, 3072), dtype=numpy.uint8), "labels": [0, 1, 2, 0, 1]}
        (root / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(batch))
    (root / "cifar-10-batches-py" / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abc")}))
    return root


def opened(file):
    return TRANSFORM(Image.open(file).convert("RGB"))


class Table(Dataset):
    """A CSV of file names; those in `bad` are cut."""

    def __init__(self, root, bad=()):
        self.root, self.bad, self.table = root / "folder", bad, pandas.read_csv(root / "labels.csv")
        self.files = [str(self.root / name) for name in self.table["file"]]

    def __len__(self):
        return len(self.table)

    def __getitem__(self, index):
        data = Path(self.files[index]).read_bytes()
        return opened(io.BytesIO(data[:300] if index in self.bad else data)), int(self.table["label"][index])


class ParquetPictures(Dataset):
    def __init__(self, root, bad=()):
        self.table, self.bad = pyarrow.parquet.read_table(root / "pictures.parquet"), bad

    def __len__(self):
        return len(self.table)

    def __getitem__(self, index):
        data = b"" if index in self.bad else self.table["image"][index].as_py()
        return opened(io.BytesIO(data)), self.table["label"][index].as_py()


class ParquetRows(IterableDataset):
    """Row groups one after another, shared between workers."""

    def __init__(self, root):
        self.path = root / "table.parquet"

    def __iter__(self):
        info, file = get_worker_info(), pyarrow.parquet.ParquetFile(self.path)
        first, stride = (info.id, info.num_workers) if info is not None else (0, 1)
        for group in range(first, file.num_row_groups, stride):
            rows = file.read_row_group(group).to_pandas()
            yield from zip(rows[["x0", "x1", "x2", "x3"]].to_numpy().copy(), rows["y"], strict=True)


class Mapped(Dataset):
    def __init__(self, root):
        self.pictures = numpy.load(root / "x.npy", mmap_mode="r")

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return torch.from_numpy(self.pictures[index] / numpy.float32(255)), index % 3


def cifar(root):
    kind = torchvision.datasets.CIFAR10
    kind = type("CIFAR10", (kind,), {"_check_integrity": lambda self: True, "_load_meta": lambda self: None})
    return kind(root, transform=TRANSFORM)


def hugging_face_pictures(root):
    def read(rows):
        return {"image": [TRANSFORM(i.convert("RGB")) for i in rows["image"]], "label": rows["label"]}

    return hugging_face.load_from_disk(root / "hugging_face").with_transform(read)


def hugging_face_table(root):
    path = str(root / "table.parquet")
    return hugging_face.Dataset.from_parquet(path, cache_dir=str(root / "cache")).with_format("torch")


def hugging_face_stream(root, seed=3):
    stream = hugging_face.load_from_disk(root / "hugging_face").to_iterable_dataset(num_shards=2)
    if seed != "as it is":
        stream = stream.shuffle(seed=seed, buffer_size=8)
    return stream.map(lambda row: {"image": TRANSFORM(row["image"].convert("RGB")), "label": row["label"]})


def tars(root, seed=3):
    shards = sorted(map(str, root.glob("*.tar")))
    found = webdataset.WebDataset(shards, shardshuffle=2, seed=3).shuffle(8, seed=seed).decode("pil")
    return found.to_tuple("jpg", "cls").map_tuple(TRANSFORM, int)


def web_loader(root):
    return webdataset.WebLoader(tars(root).batched(BATCH), batch_size=None)


def loaded(dataset, **more):
    shuffle = {} if isinstance(dataset, IterableDataset) else {"shuffle": True}
    return DataLoader(dataset, batch_size=BATCH, **shuffle, **more)


INDEXED = {
    "image folder": lambda root: torchvision.datasets.ImageFolder(root / "folder", TRANSFORM),
    "csv": Table,
    "parquet pictures": ParquetPictures,
    "hugging face": hugging_face_pictures,
    "hugging face table": hugging_face_table,
    "memory map": Mapped,
    "cifar": cifar,
}
STREAMS = {
    "parquet rows": ParquetRows,
    "hugging face stream": hugging_face_stream,
    "hugging face in order": lambda root: hugging_face_stream(root, "as it is"),
    "tars": tars,
}
LOADERS = {
    **{name: lambda root, kind=kind: loaded(kind(root)) for name, kind in (INDEXED | STREAMS).items()},
    "tars in two workers": lambda root: loaded(tars(root), num_workers=2),
    "web loader": web_loader,
    "stateful loader": lambda root: StatefulDataLoader(Table(root), batch_size=BATCH, shuffle=True),
    "stateful stream": lambda root: StatefulDataLoader(ParquetRows(root), batch_size=BATCH, num_workers=1),
}


class AnyNet(nn.Module):
    """Takes batches of any kind here: tuples and dictionaries, of pictures and of columns."""

    def __init__(self):
        super().__init__()
        self.pictures, self.columns = nn.Linear(3 * 16 * 16, 3), nn.Linear(4, 3)

    def forward(self, batch):
        if isinstance(batch, dict) and "x0" in batch:
            return self.columns(torch.stack([batch[f"x{n}"] for n in range(4)], 1))
        inputs = batch["image"] if isinstance(batch, dict) else batch[0]
        return self.columns(inputs) if inputs.shape[1:] == (4,) else self.pictures(inputs.flatten(1))


def loss(model, batch):
    labels = batch.get("label", batch.get("y")) if isinstance(batch, dict) else batch[1]
    return nn.functional.cross_entropy(model(batch), labels)


def job(data, **more):
    return vivace.Job(
        model=AnyNet,
        data=data,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        epochs=2,
        **more,
    )


def weights(path):
    return torch.cat([w.flatten() for w in torch.load(path / "model.pt", weights_only=True).values()])


@pytest.mark.parametrize("name", LOADERS)
def test_a_stopped_run_goes_on_bit_for_bit(name, root, tmp_path, one_thread, monkeypatch):
    monkeypatch.setattr(iterable, "STATE_SECONDS", 0.0)
    monkeypatch.setattr(iterable, "STATE_COSTS", 0.0)  # else it depends on their cost which state is the last
    made = job(lambda: LOADERS[name](root))
    whole = vivace.train(made, out=tmp_path / "whole", checkpoint_every_steps=2)
    stop = whole.steps // 2 + 3
    vivace.train(made, out=tmp_path / "parts", max_steps=stop)
    random.random()
    parts = vivace.train(made, out=tmp_path / "parts", resume=True)
    assert parts.resumed_from_step == stop
    assert torch.equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    assert whole.notices == ()
    keeps = name in INDEXED or name in ("stateful loader", "stateful stream", "hugging face in order")
    assert any("was read again" in notice for notice in parts.notices) is not keeps


@pytest.mark.parametrize("kind", [hugging_face_stream, tars])
def test_an_order_that_no_seed_fixes_is_told(kind, root, tmp_path):
    made = job(lambda: loaded(kind(root, seed=None)))
    run = vivace.train(made, out=tmp_path / "run", max_steps=9, checkpoint_every_steps=4)
    assert len([notice for notice in run.notices if "come otherwise each time" in notice]) == 1
    run = vivace.train(made, out=tmp_path / "run", resume=True)
    assert any(notice.startswith("resumed, not bit-exact: up to batch 3") for notice in run.notices)


def damaged_folder(root, out):
    for number in range(IMAGES):
        file = out / f"class{number % 3}" / f"{number:02}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(jpeg(number)[: 300 if number == 4 else None])
    return torchvision.datasets.ImageFolder(out, TRANSFORM)


def damaged_rows(root, out):
    rows = [{"bytes": jpeg(n)[: 300 if n == 4 else None], "path": None} for n in range(IMAGES)]
    features = hugging_face.Features({"image": hugging_face.Image(), "label": hugging_face.Value("int64")})
    table = hugging_face.Dataset.from_dict({"image": rows, "label": [0] * IMAGES}, features=features)
    table.save_to_disk(out / "hugging_face")
    return hugging_face_pictures(out)


def damaged_table(root, out):
    return Table(root, {4})


def damaged_parquet(root, out):
    return ParquetPictures(root, {4})


@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.parametrize("kind", [damaged_folder, damaged_rows, damaged_table, damaged_parquet])
def test_a_damaged_sample_is_listed(kind, policy, root, tmp_path):
    data = kind(root, tmp_path / "data")
    run = vivace.train(job(lambda: loaded(data), damaged=policy), out=tmp_path / "run")
    (entry,) = run.damaged
    assert entry["times"] == 2
    folder = getattr(data, "imgs", None)
    assert entry["index"] == (4 if folder is None else [path[-6:] for path, _ in folder].index("04.jpg"))
    assert entry["path"].endswith("04.jpg" if folder or hasattr(data, "files") else "")


@pytest.mark.parametrize("name", STREAMS)
def test_streams_refuse_the_policy(name, root, tmp_path):
    with pytest.raises(JobError, match="damaged='skip' needs a DataLoader over data with an index"):
        vivace.train(job(lambda: LOADERS[name](root), damaged="skip"), out=tmp_path / "run")


# What a technique says of each kind of data; empty where it acts.
NO_JPEG = "decodes no JPEG with Pillow", "no JPEG file was decoded through Pillow"
NO_COMPOSE = "has no torchvision Compose as its transform"
A_STREAM = "not a torch DataLoader"
SAID = {
    ("decoded_cache", "hugging face table"): NO_JPEG,
    ("decoded_cache", "memory map"): NO_JPEG,
    ("decoded_cache", "cifar"): NO_JPEG,
    ("decoded_cache", "parquet rows"): NO_JPEG,
    ("decoded_cache", "stateful stream"): NO_JPEG,
    **{("uint8_transfer", name): (NO_COMPOSE,) for name in (*INDEXED, "stateful loader")},
    **{
        (technique, name): (A_STREAM,)
        for technique in ("uint8_transfer", "loader_workers")
        for name in LOADERS
        if name not in INDEXED and name != "stateful loader"
    },
}
del SAID["uint8_transfer", "image folder"], SAID["uint8_transfer", "cifar"]


@pytest.mark.parametrize("technique", ["decoded_cache", "uint8_transfer", "loader_workers"])
@pytest.mark.parametrize("name", LOADERS)
def test_a_technique_acts_on_it_or_says_why_not(name, technique, root):
    from vivace.inspection import inspect
    from vivace.session.opening import endless_batches, start

    settings = {"num_workers": 1} if technique == "loader_workers" else {}
    made = job(lambda: LOADERS[name](root))
    said, seen = "", 0
    try:
        with start(made, Plan.from_dict({technique: settings}), inspect()) as session:
            batches = endless_batches(session, made, made.data())
            for _ in range(2 * IMAGES // BATCH):
                batch = next(batches)
                seen += batch_size(batch)
                assert all(tensor.numel() for tensor in tensors(batch))
            session.step(batch)
            (used,) = session.plan.techniques
            used.confirm(Observation({}, {}, 0, 0.0, notes=session.build.notes), Observation({}, {}, 0, 0.0))
    except vivace.Refused as refused:
        said = str(refused)
    finally:
        batches = None
    expected = SAID.get((technique, name), ("",))
    assert any(text in said for text in expected), said
    assert bool(said) == bool(expected[0]), said
