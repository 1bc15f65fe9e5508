"""The list of loops that people use, and the data that stands in for theirs."""

import pickle
import struct
import tomllib

import _loop_data
import numpy
import pytest
import real_loops
import verdicts

LOOPS = tomllib.loads((real_loops.HERE / "real_loops.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", LOOPS)
def test_each_loop_says_where_it_lies_and_what_is_right(name):
    loop = LOOPS[name]
    assert loop["expected"]
    assert set(loop["expected"]) <= set(verdicts.CAUSES.values())
    assert loop.get("data", "digits") in _loop_data.KINDS
    ours = loop["repository"].startswith("own")
    assert (real_loops.place_of(loop, None) is not None) == ours


def test_a_repository_is_found_in_the_folder_given(tmp_path):
    script = tmp_path / LOOPS["mnist"]["folder"] / "main.py"
    script.parent.mkdir(parents=True)
    assert real_loops.place_of(LOOPS["mnist"], tmp_path) is None
    script.touch()
    assert real_loops.place_of(LOOPS["mnist"], tmp_path) == script.parent


def test_the_data_are_in_the_formats_that_loops_read(tmp_path, monkeypatch):
    monkeypatch.setattr(_loop_data, "NUM_DIGITS", {"train": 20, "t10k": 10})
    folder = tmp_path / "mnist"
    for make in _loop_data.KINDS.values():
        make(folder)
    images = (tmp_path / "data/MNIST/raw/train-images-idx3-ubyte").read_bytes()
    assert struct.unpack(">IIII", images[:16]) == (2051, 20, 28, 28)
    assert len(images) == 16 + 20 * 28 * 28
    lines = (folder / "data/wikitext-2/valid.txt").read_text().splitlines()
    assert sum(len(line.split()) for line in lines) == _loop_data.NUM_WORDS["valid"]
    place = folder / "data/shakespeare_char"
    about = pickle.loads((place / "meta.pkl").read_bytes())
    numbers = numpy.fromfile(place / "val.bin", numpy.uint16)
    assert len(numbers) == _loop_data.NUM_CHARACTERS // 10
    assert numbers.max() < about["vocab_size"] == len(about["itos"])


def test_data_that_lie_there_stay(tmp_path):
    mine = tmp_path / "data" / "wikitext-2" / "train.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    _loop_data.words(tmp_path)
    assert [file.name for file in mine.parent.iterdir()] == ["train.txt"]
