"""What public scripts read, made from what packages ship: in the place of MNIST scikit-learn's digits, of
photographs those of scikit-image, of texts the source of Python's standard library, and of models that a hub
gives small ones from a configuration, without having learned anything.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

REPEATED, HELD_OUT = 12, 360  # of the digits
PHOTOGRAPHS = ("astronaut", "brick", "chelsea", "coffee", "grass", "gravel", "hubble_deep_field", "rocket")
ACCURACY = '''"""Which share of the predictions is right."""
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        whole = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="",
            features=datasets.Features({"predictions": whole, "references": whole}),
        )

    def _compute(self, predictions, references):
        right = sum(int(mine == theirs) for mine, theirs in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references)}
'''


def make(kind: str, place: Path, **numbers: Any) -> None:
    """Make one of the kinds below at a place."""
    MAKERS[kind](place, **numbers)


def mnist(folder: Path, trained: int | None = None, held_out: int = HELD_OUT) -> None:
    """scikit-learn's digits, enlarged to 28 pixels, as the files that torchvision reads as MNIST."""
    from sklearn.datasets import load_digits

    folder = folder / "MNIST" / "raw"
    folder.mkdir(parents=True)
    found = load_digits()
    order = numpy.random.default_rng(0).permutation(len(found.images))
    large = numpy.kron(found.images[order], numpy.ones((3, 3)))
    pictures = numpy.pad(large * 15.9, ((0, 0), (2, 2), (2, 2))).astype(numpy.uint8)
    labels = found.target[order].astype(numpy.uint8)
    cut = len(labels) - HELD_OUT
    parts = {
        "train": numpy.arange(REPEATED * cut if trained is None else trained) % cut,
        "t10k": cut + numpy.arange(held_out) % HELD_OUT,
    }
    for name, chosen in parts.items():
        head = struct.pack(">IIII", 0x803, len(chosen), 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head + pictures[chosen].tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, len(chosen)) + labels[chosen].tobytes()
        )


def image_folder(folder: Path, trained: int, held_out: int, pixels: int) -> None:
    """Crops of photographs as JPEG files: train/PHOTOGRAPH/N.jpg and val/PHOTOGRAPH/N.jpg."""
    for part, count in (("train", trained), ("val", held_out)):
        for number, (name, crop) in enumerate(_crops(count, pixels, seed=part == "val")):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            crop.save(folder / part / name / f"{number}.jpg")


def super_resolution(folder: Path, trained: int, held_out: int, pixels: int) -> None:
    """The same, unlabelled, as BSDS300 lies: images/train and images/test."""
    for part, count in (("train", trained), ("test", held_out)):
        place = folder / "images" / part
        place.mkdir(parents=True)
        for number, (_, crop) in enumerate(_crops(count, pixels, seed=part == "test")):
            crop.save(place / f"{number}.jpg")


def masks(folder: Path, count: int, pixels: int) -> None:
    """Crops, and of each a mask of what is brighter than its mean: imgs/N.jpg and masks/N.png."""
    from PIL import Image

    for part in ("imgs", "masks"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for number, (_, crop) in enumerate(_crops(count, pixels, seed=False)):
        grey = numpy.asarray(crop.convert("L"))
        crop.save(folder / "imgs" / f"{number}.jpg")
        Image.fromarray((grey > grey.mean()).astype(numpy.uint8)).save(folder / "masks" / f"{number}.png")


def text(file: Path, words: int) -> None:
    """So many words of the files of Python's standard library, in lines as they stand there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(library_text(words), encoding="utf-8")


def labelled_lines(folder: Path, trained: int, held_out: int) -> None:
    """train.csv and validation.csv: is it a comment or code? Columns sentence, label."""
    lines = [line.strip() for line in library_text(200_000).splitlines() if len(line.split()) > 3]
    rows = [(line.lstrip("# "), int(line.startswith("#"))) for line in lines]
    told = [row for row in rows if row[1]]
    rows = [row for pair in zip(told, (row for row in rows if not row[1]), strict=False) for row in pair]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[:trained]), ("validation", rows[trained : trained + held_out])):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("sentence", "label"), *part])


def sentence_pairs(folder: Path, trained: int, held_out: int) -> None:
    """Does the second line follow the first? As `load_dataset` reads GLUE's MRPC from a folder."""
    lines = [line.strip() for line in library_text(200_000).splitlines() if len(line.split()) > 3]
    (folder / "mrpc").mkdir(parents=True)
    random = numpy.random.default_rng(0)
    rows = []
    for index, line in enumerate(lines[: trained + held_out]):
        label = int(random.integers(2))
        other = lines[index + 1] if label else lines[int(random.integers(len(lines)))]
        rows.append({"sentence1": line, "sentence2": other, "label": label, "idx": index})
    for name, part in (("train", rows[:trained]), ("validation", rows[trained:])):
        written = "".join(json.dumps(row) + "\n" for row in part)
        (folder / "mrpc" / f"{name}.jsonl").write_text(written, encoding="utf-8")
    files = "".join(f"  - split: {name}\n    path: mrpc/{name}.jsonl\n" for name in ("train", "validation"))
    head = f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(head, encoding="utf-8")


def documents(folder: Path, trained: int, held_out: int, words: int) -> None:
    """train.jsonl and test.jsonl with so many texts of so many words: one column, text."""
    found = library_text((trained + held_out) * words).split(" ")
    texts = [" ".join(found[start : start + words]) for start in range(0, len(found), words)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", texts[:trained]), ("test", texts[trained : trained + held_out])):
        written = "".join(json.dumps({"text": each}) + "\n" for each in part)
        (folder / f"{name}.jsonl").write_text(written, encoding="utf-8")


def accuracy(file: Path) -> None:
    """A metric as the package `evaluate` loads it from a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(ACCURACY, encoding="utf-8")


def language_model(folder: Path, architecture: str, **numbers: Any) -> None:
    """A model of transformers from a configuration with such `numbers`, and a tokenizer that fits it."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    size = numbers.setdefault("vocab_size", 4000)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    words.decoder = tokenizers.decoders.ByteLevel()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=special)
    words.train_from_iterator(library_text(50_000).splitlines(), trainer)
    names = dict(
        zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True)
    )
    kind = {"tokenizer_object": words, "model_max_length": 128, "eos_token": "[SEP]", **names}
    transformers.PreTrainedTokenizerFast(**kind).save_pretrained(folder)
    config = transformers.AutoConfig.for_model(numbers.pop("model_type"), **numbers)
    config.architectures = [architecture]
    getattr(transformers, architecture)(config).save_pretrained(folder)


def image_model(folder: Path, architecture: str, image_size: int, **numbers: Any) -> None:
    """A model of transformers for images of so many pixels, and what resizes and normalises them."""
    import torch
    import transformers

    torch.manual_seed(0)
    size = {"height": image_size, "width": image_size}
    transformers.ViTImageProcessor(size=size).save_pretrained(folder)
    config = transformers.AutoConfig.for_model(numbers.pop("model_type"), image_size=image_size, **numbers)
    config.architectures = [architecture]
    getattr(transformers, architecture)(config).save_pretrained(folder)


def _crops(count: int, pixels: int, *, seed: bool) -> Iterator[tuple[str, Any]]:
    """Squares at random places of the photographs in turn, with their names."""
    from PIL import Image
    from skimage import data

    random = numpy.random.default_rng(int(seed))
    for number in range(count):
        name = PHOTOGRAPHS[number % len(PHOTOGRAPHS)]
        picture = Image.fromarray(getattr(data, name)()).convert("RGB")
        side = min(*picture.size, 2 * pixels)
        left, top = (int(random.integers(length - side + 1)) for length in picture.size)
        yield name, picture.crop((left, top, left + side, top + side)).resize((pixels, pixels))


@functools.cache
def library_text(words: int) -> str:
    """So many words of Python's standard library."""
    lines, count = [], 0
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            lines.append(line)
            count += len(line.split())
            if count >= words:
                return "\n".join(lines) + "\n"
    raise RuntimeError(f"the standard library has only {count} words, not {words}")


MAKERS = {
    maker.__name__: maker
    for maker in (
        mnist,
        image_folder,
        super_resolution,
        masks,
        text,
        labelled_lines,
        sentence_pairs,
        documents,
        accuracy,
        language_model,
        image_model,
    )
}
