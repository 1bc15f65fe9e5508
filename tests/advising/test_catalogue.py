"""The catalogue: its numbers agree, names find their device, and wrong files are refused in words."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from vivace.advising.catalogue import (
    DTYPES,
    GPUS_FILE,
    RATE_TOLERANCE,
    Gpu,
    disagreements,
    find_gpu,
    load_catalogue,
)
from vivace.errors import InputError

GPUS = load_catalogue()
FILE = tomllib.loads(GPUS_FILE.read_text(encoding="utf-8"))
TABLES = {table["name"]: table for table in FILE["gpus"]}
TITLES = set(FILE["sources"].values())
SECOND = tomllib.loads(Path(__file__).with_name("second_sources.toml").read_text(encoding="utf-8"))["lists"]


def quoted(gpu: Gpu, field: str) -> float:
    scales: dict[str, Any] = {
        "bandwidth_gbs": gpu.bandwidth / 1e9,
        "memory_gib": gpu.memory_bytes / 2**30,
        "cache_mib": (gpu.cache_bytes or 0) / 2**20,
        "units": gpu.num_units,
    }
    return scales[field] if field in scales else gpu.rates[field] / 1e12


def test_the_numbers_of_every_entry_agree() -> None:
    assert [found for gpu in GPUS.values() for found in disagreements(gpu)] == []


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("A100-SXM4-80GB", {"bandwidth": 4078e9, "measured": {}}),
        ("H100-SXM5-80GB", {"rates": {"bf16": 1979e12}, "measured": {}}),
        ("RTX 3090", {"rates": {"fp16": 142e12}}),
        ("V100-SXM2-16GB", {"measured": {"fp16": 130e12}}),
        ("MI300X", {"measured": {"bandwidth": 0.2e12}}),
    ],
    ids=[
        "doubled bandwidth",
        "sparse rate",
        "rate of fp16 accumulation",
        "above the peak",
        "far below the peak",
    ],
)
def test_a_known_mistake_of_published_tables_is_flagged(name: str, wrong: dict[str, Any]) -> None:
    found = disagreements(dataclasses.replace(GPUS[name], **wrong))
    assert len(found) == 1
    assert found[0].startswith(name)


@pytest.mark.parametrize("source", SECOND, ids=[source["title"].partition(",")[0] for source in SECOND])
def test_other_lists_agree_or_are_known_to_be_wrong(source: dict[str, Any]) -> None:
    for name, values in source["values"].items():
        for field, value in values.items():
            own = quoted(find_gpu(name), field)
            assert own == pytest.approx(value, rel=RATE_TOLERANCE), f"{name}: {field}"
    for name, values in source.get("wrong", {}).items():
        for field, (value, reason) in values.items():
            assert quoted(find_gpu(name), field) != pytest.approx(value, rel=RATE_TOLERANCE), (
                f"{name}: {field}"
            )
            assert reason


def test_every_number_names_its_source() -> None:
    for gpu in GPUS.values():
        numbers = {key for key, value in TABLES[gpu.name].items() if isinstance(value, int | float)}
        missing = (numbers | {"release"}) - {"pcie_lanes", "link_group"} - set(gpu.sources)
        assert not missing, gpu.name
        assert set(gpu.sources.values()) <= TITLES


def test_every_device_has_a_rate_and_says_what_drives_it() -> None:
    for gpu in GPUS.values():
        assert gpu.rates, gpu.name
        assert set(gpu.rates) <= set(DTYPES)
        assert gpu.apis
        assert gpu.pytorch


def test_the_catalogue_covers_what_people_rent_and_buy() -> None:
    assert len(GPUS) >= 45
    assert {gpu.vendor for gpu in GPUS.values()} == {"NVIDIA", "AMD", "Intel", "Apple", "Huawei"}
    for name in ("V100", "T4", "L4", "L40S", "A10G", "RTX 5090", "RTX PRO 6000", "H100 NVL", "GB200", "B300"):
        assert find_gpu(name).vendor == "NVIDIA"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H100 80GB HBM2e", "H100-PCIe-80GB"),
        ("NVIDIA B300 SXM6 AC", "B300-SXM-270GB"),
        ("NVIDIA GH200 120GB", "GH200-96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("nvidia geforce rtx 3090", "RTX 3090"),
        ("RTX_3090 24 GB", "RTX 3090"),
        ("Tesla T4", "T4"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 2080 with Max-Q Design", "RTX 2080 Max-Q"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Intel(R) Arc(TM) B580 Graphics", "Arc B580"),
        ("Intel(R) Data Center GPU Max 1100", "Max 1100"),
        ("Apple M2 Ultra", "M2 Ultra"),
        ("NVIDIA H20", "H20-SXM-96GB"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX 4060 Laptop"),
        ("GeForce RTX 5070 Ti Mobile", "RTX 5070 Ti Laptop"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti 16GB"),
        ("NVIDIA RTX PRO 4500 Blackwell", "RTX PRO 4500 Blackwell"),
        ("NVIDIA GB10", "GB10"),
        ("DGX Spark", "GB10"),
        ("Apple M4 Pro", "M4 Pro"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D"),
        ("NVIDIA A800-SXM4-80GB", "A800-SXM4-80GB"),
        ("Huawei Ascend 910B", "Ascend 910B"),
        ("Tesla P40", "P40"),
    ],
)
def test_a_name_as_drivers_and_clouds_write_it_finds_the_device(said: str, name: str) -> None:
    assert find_gpu(said).name == name


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no device 'RTX 4091' .* RTX 4090"):
        find_gpu("RTX 4091")
    with pytest.raises(InputError, match=r"no device 'toaster' .* holds \d+ devices"):
        find_gpu("toaster")


def test_units_are_those_of_the_docstring() -> None:
    gpu = GPUS["A100-SXM4-40GB"]
    assert gpu.memory_bytes == 40 * 2**30
    assert (gpu.bandwidth, gpu.link_bandwidth) == (1555e9, 600e9)
    assert (gpu.boost_clock, gpu.rates["bf16"], gpu.cache_bytes) == (1410e6, 312e12, 40 * 2**20)
    assert json.dumps(gpu.to_dict())


def test_a_rate_that_nobody_quotes_is_computed_and_marked() -> None:
    gpu = GPUS["RTX 3060"]
    assert set(gpu.derived) == set(gpu.rates)
    assert gpu.rates["fp32"] == 28 * 1777e6 * 256
    assert "fp16" not in GPUS["TITAN Xp"].rates


def test_an_own_file_changes_one_field_and_adds_a_device(tmp_path: Path) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text(
        'format = 1\n[sources]\nmine = "my own measurement"\n'
        '[[gpus]]\nname = "RTX 3090"\npower_w = 280\nsources = { power_w = "mine" }\n'
        '[[gpus]]\nname = "RTX 3090 D"\nfamily = "ampere-geforce"\nform = "consumer"\nrelease = "2027-01"\n'
        'memory_gib = 24\nbandwidth_gbs = 900\nrates = { fp32 = 30 }\nsource = "mine"\n'
    )
    own = load_catalogue(path)
    assert own["RTX 3090"].power_watts == 280
    assert own["RTX 3090"].bandwidth == GPUS["RTX 3090"].bandwidth
    assert find_gpu("rtx3090d", own).num_units is None
    assert "RTX 3090 D" not in load_catalogue()
    path.write_text(path.read_text().replace("280", "200"))
    assert load_catalogue(path)["RTX 3090"].power_watts == 200


OWN_FAMILY = (
    'format = 1\n[families.ada]\nvendor = "NVIDIA"\narchitecture = "Ada"\nper_clock = {{ fp32 = 256 }}\n'
    'apis = {}\ncompute_capability = {}\npytorch = "all"'
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format = 2", "format 2; this Vivace reads format = 1"),
        ("format = [", "is not TOML"),
        ('format = 1\n[[gpus]]\nfamily = "ada"', "device 1 has no name"),
        ('format = 1\n[[gpus]]\nname = "X"', "X lacks family"),
        (
            'format = 1\n[[gpus]]\nname = "RTX 3090"\npower = 1',
            "unknown field 'power'; did you mean 'power_w'?",
        ),
        ('format = 1\n[[gpus]]\nname = "RTX 3090"\npower_w = "hot"', "RTX 3090 has power_w = 'hot'"),
        ('format = 1\n[[gpus]]\nname = "RTX 3090"\nrelease = "soon"', "RTX 3090 has release = 'soon'"),
        (
            'format = 1\n[[gpus]]\nname = "RTX 3090"\nfamily = "adda"',
            "unknown family 'adda'; did you mean 'ada'?",
        ),
        ('format = 1\n[[gpus]]\nname = "RTX 3090"\nform = "card"', "has the form 'card'"),
        ('format = 1\n[[gpus]]\nname = "RTX 3090"\nsource = "rumour"', "cites 'rumour'"),
        ('format = 1\n[[gpus]]\nname = "RTX 3090"\nrates = { fp12 = 1 }', "a rate for 'fp12'"),
        ('format = 1\n[[gpus]]\nname = "RTX 3090"\naliases = ["A40"]', "'A40' names two devices"),
        ('format = 1\n[[gpus]]\nname = "RTX 3090"\nrates = 3', "rates = 3; a table"),
        (
            'format = 1\n[[gpus]]\nname = "X"\nfamily = "ada"\nform = "pcie"\nrelease = "2026-10"\n'
            'memory_gib = 24\nbandwidth_gbs = 900\nsource = "adda"\n[sources]\nadda = "a"',
            "X has no rate: give rates",
        ),
        ('format = 1\n[[cards]]\nname = "RTX 3090"', "unknown table 'cards'; known are sources"),
        ("format = 1\ngpus = [1]", "write [[gpus]] with two brackets"),
        ("format = 1\nsources = [1]", "write [sources] as gpus.toml"),
        ("format = 1\n[families.x]\nper_clock = 3", "the family 'x' has per_clock = 3"),
        ('format = 1\n[[gpus]]\nname = "RTX 3090"\nmeasured = { fp32 = "fast" }', "has fp32 = 'fast'"),
        ('format = 1\n[[gpus]]\nname = "RTX 3090"\naliases = [1]', "aliases = [1]; a list of names"),
        ('format = 1\n[[gpus]]\nname = "RTX 3090"\nnote = 3', "note = 3; a text in quotes"),
        ('format = 1\n[[gpus]]\nname = "RTX 3090"\nsources = { power_w = ["a"] }', "; a table of texts"),
        (OWN_FAMILY.format('"cuda"', '"9.0"'), "the family 'ada' has apis = 'cuda'; a list of names"),
        (OWN_FAMILY.format("[5]", '"9.0"'), "the family 'ada' has apis = [5]; a list of names"),
        (OWN_FAMILY.format('["cuda"]', "9.0"), "the family 'ada' has compute_capability = 9.0; a text"),
        ('format = 1\n[[gpus]]\nname = "RTX 3090"\npcie = 7', "pcie = 7; a generation from 1 to 6"),
        ('format = 1\n[[gpus]]\nname = "RTX 3090"\nrelease = "2026-13"', "release = '2026-13'"),
        (
            'format = 1\n[[gpus]]\nname = "RTX 3090"\nboost_mhz = 4000',
            "RTX 3090: fp32 is quoted as 35.6 TFLOP/s, units x clock x width gives 83.97; with a clock",
        ),
        ('format = 1\n[[gpus]]\nname = "RTX 3090"\nmeasured = { bandwidth = 100 }', "does not fit a peak"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_words(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        load_catalogue(path)
    assert message in str(refused.value)


def test_an_own_entry_that_contradicts_itself_stands_where_it_says_why(tmp_path: Path) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text(
        'format = 1\n[[gpus]]\nname = "RTX 3090"\nbandwidth_gbs = 1200\nmeasured = { bandwidth = 100 }\n'
        'disputed = { bandwidth_gbs = "overclocked", measured = "while another job ran" }'
    )
    assert load_catalogue(path)["RTX 3090"].bandwidth == 1200e9


def test_what_is_disputed_of_a_shipped_entry_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text(
        'format = 1\n[[gpus]]\nname = "B200-SXM-180GB"\nmeasured = { fp16 = 600 }\n'
        'disputed = { measured = "throttled" }'
    )
    assert set(load_catalogue(path)["B200-SXM-180GB"].disputed) == {"bandwidth_gbs", "measured"}


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gpus\.toml cannot be read"):
        load_catalogue(tmp_path / "gpus.toml")


@pytest.mark.parametrize(
    ("name", "shown"),  # total capacity as torch said it, in GiB
    [
        ("L40S", 44.53),
        ("T4", 14.75),
        ("RTX A4000", 15.61),
        ("A30", 23.53),
        ("A100-40GB", 39.50),
        ("RTX 4090", 23.68),
    ],
)
def test_no_more_memory_is_usable_than_torch_shows(name: str, shown: float) -> None:
    usable = find_gpu(name).usable_bytes / 2**30
    assert 0.96 * shown < usable <= shown


def test_of_memory_that_a_processor_shares_a_part_is_usable() -> None:
    mac, spark, board = (find_gpu(name) for name in ("M2 Ultra", "DGX Spark 128GB", "Jetson AGX Orin"))
    assert mac.usable_bytes == 0.75 * mac.memory_bytes
    assert 100 < spark.usable_bytes / 2**30 < 102.2  # of 121.69 GiB, what is free when it starts
    assert board.usable_bytes < 0.85 * board.memory_bytes


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("4090", "RTX 4090"),
        ("1080Ti", "GTX 1080 Ti"),
        ("7900 XTX", "RX 7900 XTX"),
        ("6000 Ada", "RTX 6000 Ada"),
    ],
)
def test_a_name_without_its_series_finds_the_device(said: str, name: str) -> None:
    assert find_gpu(said).name == name
