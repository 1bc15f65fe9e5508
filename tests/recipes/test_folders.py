"""Data sets below VIVACE_DATA, as small fakes in their own formats, through torchvision's readers."""

import pickle
import shutil

import numpy
import pytest
import torch
from PIL import Image

from vivace.data.damage import Damage
from vivace.errors import InputError, SampleError
from vivace.job import load
from vivace.recipes import (
    classification,
    detection,
    entities,
    keras_cnn,
    language_model,
    segmentation,
    similarity,
    text_classification,
)
from vivace.recipes.sources import folders


def picture(path, size=(40, 30), colour=(200, 30, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def cifar(data, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)  # of the true files
    draw = numpy.random.default_rng(0)
    place = data / "cifar-10-batches-py"
    place.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        pixels = draw.integers(0, 256, (20, 3072), numpy.uint8)
        rows = {"data": pixels, "labels": [number % 10 for number in range(20)]}
        (place / name).write_bytes(pickle.dumps(rows))
    (place / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))


def test_cifar10(cifar):
    parts = {split: classification.images(split, "cifar10") for split in ("training", "validation", "test")}
    sizes = {split: len(part) for split, part in parts.items()}
    assert sizes == {"training": 80, "validation": 20, "test": 20}
    image, label = parts["training"][0]
    assert image.shape == (3, 32, 32)
    assert 0 <= label < 10
    assert torch.equal(parts["test"][1][0], parts["test"][1][0])
    training, held_out = (set(parts[split].samples.indices) for split in ("training", "validation"))
    assert not training & held_out


def test_an_archive_that_is_cut_off_is_one_sentence(data):
    (data / "cifar-10-batches-py").mkdir()
    with pytest.raises(InputError, match="CIFAR-10 cannot be read as it lies below VIVACE_DATA"):
        classification.images("training", "cifar10")


def test_packed_files_of_mnist_are_one_sentence(data):
    (data / "MNIST" / "raw").mkdir(parents=True)
    (data / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").write_bytes(b"x")
    with pytest.raises(InputError, match=r"MNIST cannot be read .*: put the four files .* there, unpacked"):
        keras_cnn.images("training", "mnist")


def test_mnist(data):
    raw = data / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, number in (("train", 50), ("t10k", 12)):
        shape = numpy.array([number, 28, 28], ">i4").tobytes()
        pixels = numpy.full((number, 28, 28), 255, numpy.uint8).tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + shape + pixels)
        labels = numpy.arange(number, dtype=numpy.uint8) % 10
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + shape[:4] + labels.tobytes())
    assert [len(keras_cnn.images(s, "mnist")) for s in ("training", "validation", "test")] == [40, 10, 12]
    image, label = keras_cnn.images("test", "mnist")[3]
    assert image.shape == (1, 28, 28)
    assert (float(image.max()), int(label)) == (1.0, 3)


def test_an_imagenet_folder(data):
    for part, number in (("train", 3), ("val", 2)):
        for name in ("n01", "n02", "n03"):
            for each in range(number):
                picture(data / "imagenet" / part / name / f"{each}.jpg")
    sizes = [len(classification.images(s, "imagenet")) for s in ("training", "validation", "test")]
    assert sizes == [9, 3, 3]
    assert classification.images("training", "imagenet")[0][0].shape == (3, 128, 128)
    job = load("classification,data=imagenet,width=8")
    assert job.model()(torch.zeros(1, 3, 128, 128)).shape == (1, 3)
    assert classification.classes("imagenet") == ("n01", "n02", "n03")
    with pytest.raises(InputError, match="9 samples are there to train, and a batch has 64: put more there"):
        job.data()


def test_classes_of_an_imagenet_folder_have_the_numbers_that_train(data):
    for part, names in {"train": ("ant", "bee", "cow"), "val": ("bee", "cow")}.items():
        for name in names:
            picture(data / "imagenet" / part / name / "0.jpg")
            picture(data / "imagenet" / part / name / "1.jpg")
    held_out = classification.images("validation", "imagenet")
    assert [label for _, label in held_out] == [1, 2]
    folders.imagenet.cache_clear()
    picture(data / "imagenet" / "val" / "dog" / "0.jpg")
    with pytest.raises(InputError, match=r"val' has a folder 'dog', and '.*train' has none"):
        classification.images("validation", "imagenet")


def test_a_damaged_picture_of_an_imagenet_folder_is_named(data):
    for number in range(2):
        picture(data / "imagenet" / "train" / "ant" / f"{number}.jpg")
    file = data / "imagenet" / "train" / "ant" / "1.jpg"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(SampleError, match=r"sample 1 \('.*/ant/1.jpg'\) cannot be read"):
        Damage().read(classification.images("training", "imagenet"), [0, 1], 0)


def test_pascal_voc(data):
    place = data / "VOCdevkit" / "VOC2012"
    names = {"train": ["a", "b"], "val": ["c", "d"]}
    (place / "ImageSets" / "Segmentation").mkdir(parents=True)
    for part, files in names.items():
        (place / "ImageSets" / "Segmentation" / f"{part}.txt").write_text("\n".join(files) + "\n")
        for name in files:
            picture(place / "JPEGImages" / f"{name}.jpg")
            mask = Image.new("P", (40, 30))
            mask.putpalette([0, 0, 0, 128, 0, 0] + [255] * 750)
            mask.paste(1, (10, 5, 30, 25))
            mask.paste(255, (9, 4, 10, 25))
            (place / "SegmentationClass").mkdir(exist_ok=True)
            mask.save(place / "SegmentationClass" / f"{name}.png")
    image, mask = segmentation.images("validation", "voc")[0]
    assert image.shape == (3, 128, 128)
    assert set(mask.unique().tolist()) == {0, 1, 255}
    assert [len(segmentation.images(s, "voc")) for s in ("training", "validation", "test")] == [2, 1, 1]


def test_penn_fudan(data):
    place = data / "PennFudanPed"
    (place / "PedMasks").mkdir(parents=True)
    for number in range(10):
        picture(place / "PNGImages" / f"Fudan{number:05}.png", (64, 32))
        mask = Image.new("L", (64, 32))
        mask.paste(1, (8, 4, 24, 28))
        mask.paste(2, (40, 8, 48, 24))
        mask.save(place / "PedMasks" / f"Fudan{number:05}_mask.png")
    image, boxes, labels = detection.images("test", "penn_fudan")[0]
    assert image.shape == (3, 128, 128)
    assert labels.tolist() == [0, 0, *[-1] * 6]
    assert boxes[:2].tolist() == [[16.0, 16.0, 48.0, 112.0], [80.0, 32.0, 96.0, 96.0]]
    seen = {tuple(detection.images("training", "penn_fudan")[0][1][0].tolist()) for _ in range(20)}
    assert seen == {(16.0, 16.0, 48.0, 112.0), (80.0, 16.0, 112.0, 112.0)}  # as it is, and mirrored
    files = [set(folders.penn_fudan(split).samples) for split in ("training", "validation", "test")]
    assert [len(part) for part in files] == [6, 2, 2]
    assert len(set.union(*files)) == 10
    shutil.rmtree(place)
    assert detection.images("test", "penn_fudan")[0][0].equal(image)  # decoded once


def test_conll2003(data):
    place = data / "conll2003"
    place.mkdir()
    first = "-DOCSTART- -X- -X- O\n\nEU NNP B-NP I-ORG\nrejects VBZ B-VP O\nGerman JJ B-NP I-MISC\n\n"
    second = "Peter NNP B-NP I-PER\nBlackburn NNP I-NP I-PER\nSmith NNP I-NP B-PER\n"
    (place / "train.txt").write_text(first + second)
    (place / "valid.txt").write_text(first + "London NNP B-NP B-LOC\n")
    (place / "test.txt").write_text("Paris NNP B-NP I-LOC\n\n" + second)
    found = entities.split("conll2003")
    assert found["training"][0] == (["EU", "rejects", "German"], ["B-ORG", "O", "B-MISC"])
    assert found["training"][1][1] == ["B-PER", "I-PER", "B-PER"]
    assert [words for words, _ in found["validation"]] == [["London"]]  # what has trained does not validate
    assert [words for words, _ in found["test"]] == [["Paris"]]
    ((_, tags),) = entities.Sentences("validation", "conll2003").rows
    assert entities.Score("conll2003").named(tags) == ["B-LOC"]  # which no sentence that trains has


def test_ag_news(data):
    (data / "ag_news").mkdir()
    rows = [f'"{number % 4 + 1}","title {number}","text of number {number}"' for number in range(2000)]
    (data / "ag_news" / "train.csv").write_text("\n".join([*rows, rows[0]]))
    (data / "ag_news" / "test.csv").write_text("\n".join(rows[:3]))
    found = text_classification.split("ag_news")
    sizes = {part: len(texts) for part, texts in found.items()}
    assert sizes == {"training": 1748, "validation": 249, "test": 3}  # of 1,997 that are not tested
    assert found["test"][1] == ("title 1 text of number 1", 1)
    text_classification.split.cache_clear()
    rows = [f'"{number % 4 + 1}","title {number}","text"' for number in range(20_000)]
    (data / "ag_news" / "train.csv").write_text("\n".join(rows))
    assert len(text_classification.split("ag_news")["training"]) == 20_000 - text_classification.HELD_OUT
    assert load("text_classification,data=ag_news,width=32").model()(torch.ones(2, 16).long()).shape == (2, 4)


def test_ag_news_with_the_columns_names_and_texts_of_nothing(data):
    (data / "ag_news").mkdir()
    rows = '\ufeffClass Index,Title,Description\n3,Oil,rises\n\n2,Cup,won\n1," ",""\n'
    (data / "ag_news" / "train.csv").write_text(rows, encoding="utf-8")
    assert text_classification.ag_news("train") == [("Oil rises", 2), ("Cup won", 1)]
    (data / "ag_news" / "train.csv").write_text("1,World,news\n5,a,b\n")
    with pytest.raises(InputError, match=r"line 2 of '.*train.csv' is not a class from 1 to 4, a title"):
        text_classification.ag_news("train")


def test_a_text_of_ag_news_under_two_classes_is_left_out(data):
    (data / "ag_news").mkdir()
    (data / "ag_news" / "train.csv").write_text("3,Oil,rises\n2,Cup,won\n1,Oil,rises\n2,Cup,won\n")
    assert text_classification.ag_news("train") == [("Cup won", 1)]


def test_a_field_of_ag_news_without_an_end_is_named_by_its_line(data):
    (data / "ag_news").mkdir()
    (data / "ag_news" / "train.csv").write_text(f'2,Cup,won\n3,Oil,"{"rises " * 25_000}\n')
    with pytest.raises(InputError, match=r"^line 2 of '.*train.csv' cannot be read: field larger than"):
        text_classification.ag_news("train")


@pytest.mark.parametrize(
    ("file", "line", "read"),
    [
        ("ag_news/train.csv", "3,Oil,rises", lambda: text_classification.ag_news("train")),
        ("conll2003/train.txt", "EU I-ORG", lambda: entities.conll("train")),
        ("stsbenchmark/sts-train.csv", "a\tb\tc\td\t1\tone\ttwo", lambda: similarity.stsb("train")),
    ],
)
def test_a_line_that_is_not_utf_8_is_named(file, line, read, data):
    (data / file).parent.mkdir()
    (data / file).write_bytes(f"{line}\nM\u00fcnchen\n".encode("latin-1"))
    with pytest.raises(InputError, match=f"^line 2 of '{data / file}' is not UTF-8"):
        read()


@pytest.mark.parametrize(
    ("reference", "found", "batch"),
    [
        ("text_classification,data=ag_news", 9, 64),
        ("entities,data=conll2003", 10, 64),
        ("similarity,data=stsb", 10, 128),
    ],
)
def test_fewer_texts_than_a_batch_are_told(reference, found, batch, data):
    for folder, file, line in (
        ("ag_news", "{}.csv", "3,Oil,{}{}\n"),
        ("conll2003", "{}.txt", "EU{}{} I-ORG\n\n"),
        ("stsbenchmark", "sts-{}.csv", "a\tb\tc\td\t1\tone {}\ttwo {}\n"),
    ):
        (data / folder).mkdir()
        for part in ("train", "valid", "dev", "test"):
            rows = [line.format(part, number) for number in range(10)]
            (data / folder / file.format(part)).write_text("".join(rows))
    with pytest.raises(InputError, match=f"^{found} samples are there to train, and a batch has {batch}:"):
        load(reference).data()


def test_conll2003_with_blanks_in_empty_lines(data):
    (data / "conll2003").mkdir()
    (data / "conll2003" / "train.txt").write_bytes(b"EU NNP B-NP I-ORG\r\n \r\nPeter NNP B-NP I-PER\r\n\t\n")
    assert entities.conll("train") == [(["EU"], ["B-ORG"]), (["Peter"], ["B-PER"])]
    for line in ("rejects", "EU NNP B-NP S-ORG"):  # no tag, or one of another scheme
        (data / "conll2003" / "train.txt").write_text(f"EU NNP B-NP I-ORG\n{line}\n")
        with pytest.raises(InputError, match=f"train.txt' has the line '{line}', and not a word and, last"):
            entities.conll("train")


def test_a_text_that_is_shorter_than_a_window_is_one_sentence(data):
    (data / "wikitext-2-raw").mkdir()
    (data / "wikitext-2-raw" / "wiki.valid.raw").write_bytes(b"short")
    with pytest.raises(InputError, match="validation text of wikitext2 has 5 bytes, fewer than 129"):
        language_model.held_out("validation", "wikitext2")


def test_wikitext2(data):
    (data / "wikitext-2-raw").mkdir()
    for part in ("train", "valid", "test"):
        (data / "wikitext-2-raw" / f"wiki.{part}.raw").write_bytes(f"{part} ".encode() * 300)
    tokens, following = language_model.Windows("wikitext2")[0]
    assert tokens.shape == (language_model.LENGTH,)
    assert torch.equal(tokens[1:], following[:-1])
    assert bytes(next(iter(language_model.unseen("wikitext2")))[0][0][:5].tolist()) == b"test "


@pytest.fixture
def stsb(data):
    """Three files, of which a pair that is tested trains too, the other way round."""
    (data / "stsbenchmark").mkdir()
    similarity.stsb.cache_clear()
    similarity.vocabulary.cache_clear()
    halves = ["a man plays the flute", "two dogs sleep near houses"]

    def line(number):
        first, second = halves[number % 2], halves[number % 4 // 2]
        rating = "4.75" if first == second else "0.2"
        return "\t".join(
            ["news", "headlines", "2016", str(number), rating, first, f"{second} of number {number}"]
        )

    def write(part, numbers, *more):
        rows = list(map(line, numbers))
        (data / "stsbenchmark" / f"sts-{part}.csv").write_text("\n".join([*rows, *more, ""]))

    again = line(900).split("\t")
    write("test", range(900, 930))
    write("dev", range(600, 640))
    write("train", range(300), "\t".join([*again[:5], again[6], again[5], "a licence"]))
    yield data / "stsbenchmark"
    similarity.stsb.cache_clear()
    similarity.vocabulary.cache_clear()


def test_stsb_trains_on_the_ratings_of_pairs_that_are_not_tested(stsb):
    job = load("similarity,data=stsb,width=32,epochs=20")
    assert {part: len(similarity.stsb(part)) for part in ("train", "dev", "test")} == {
        "train": 300,
        "dev": 40,
        "test": 30,
    }
    first, second, ratings = next(iter(job.data()))
    assert len(first) == len(second) == len(ratings) == similarity.BATCH
    assert 0 <= ratings.min() <= ratings.max() <= similarity.MOST_ALIKE
    torch.manual_seed(0)
    model = job.model()
    built = job.optimizer(model)
    losses = []
    for _ in range(12):
        for batch in job.data():
            losses.append(value := job.loss(model, batch))
            value.backward()
            built.step()
            built.zero_grad()
    assert losses[-1] < losses[0] / 2
    assert -1 <= job.metric(model.eval(), job.validation()) <= 1
    assert len(next(iter(similarity.unseen("stsb")))[2]) == 30
    for drawn in job.pictures(model, job.validation()).values():
        assert len(drawn)


def test_a_line_of_stsb_without_a_rating_is_named(stsb):
    with (stsb / "sts-dev.csv").open("a") as file:
        file.write("genre\tfile\tyear\t1\t5.5\tone\tother\n")
    with pytest.raises(InputError, match=r"line 41 of '.*sts-dev.csv' has no rating from 0 to 5 with two"):
        similarity.stsb("dev")


@pytest.mark.parametrize(
    "reference",
    [
        "similarity,data=stsb",
        "classification,data=cifar10",
        "segmentation,data=voc",
        "detection,data=penn_fudan",
        "text_classification,data=ag_news",
        "entities,data=conll2003",
        "language_model,data=wikitext2",
        "keras_cnn,data=mnist",
    ],
)
def test_a_set_that_is_not_there_is_one_sentence(reference, data):
    with pytest.raises(InputError, match=rf"is not here \('{data}' has no .*\): "):
        load(reference).data()
    with pytest.raises(InputError, match=r"data must be .*, not 'nothing'"):
        load(reference.partition("=")[0] + "=nothing")
