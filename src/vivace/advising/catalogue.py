"""The catalogue of devices, read from `gpus.toml`. Imports no torch and needs no network.

Every number in the file names its source; `disagreements` compares the numbers with each other, of a person's
own entries whenever they are read.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vivace.errors import InputError, nearest
from vivace.machine import DRIVER_SHARE

GPUS_FILE = Path(__file__).resolve().with_name("gpus.toml")
FORMAT = 1

DTYPES = ("fp64", "fp64_matrix", "fp32", "fp32_matrix", "tf32", "fp16", "bf16", "fp8", "int8")
AT_MATRIX_CLOCK = ("tf32", "fp16", "bf16", "fp8", "int8")
OF_FAMILIES = ("vendor", "architecture", "per_clock", "apis", "compute_capability", "pytorch")
FORMS = ("consumer", "laptop", "workstation", "pcie", "sxm", "oam", "soc", "host")
ECC_PART = 16  # of GDDR memory one in so many bytes holds codes
# Of memory that the processor shares: of a Mac's; and of other boards', what a GB10 has free when it starts
# (MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks issue 47).
APPLE_SHARE, SHARED_SHARE = 0.75, 0.83
RATE_TOLERANCE = 0.03
BANDWIDTH_TOLERANCE = 0.03

# Words that vendors and drivers put around a name and that distinguish nothing.
NOISE = re.compile(
    r"\b(nvidia|amd|intel|apple|habana|geforce|tesla|instinct|radeon|generation|gpu|graphics|tm|r)\b"
)
DETAILS = re.compile(r"\b(oam|gen\d|hbm\d?e?|gddr\dx?)\b|(?<=sxm)\d\b")

SERIES = ("rtx", "gtx", "rx")  # which people leave out

REQUIRED = ("name", "family", "form", "release", "memory_gib", "bandwidth_gbs", "source")
OPTIONAL: dict[str, Any] = {
    "units": None,
    "base_mhz": None,
    "boost_mhz": None,
    "matrix_mhz": None,
    "bus_bits": None,
    "pin_gbps": None,
    "cache_mib": None,
    "link": "",
    "link_gbs": 0.0,
    "link_group": 2,
    "pcie": None,
    "pcie_lanes": 16,
    "power_w": None,
    "rates": {},
    "measured": {},
    "sources": {},
    "aliases": [],
    "disputed": {},
    "inline_ecc": False,
    "note": "",
}
CLOCKS = ("base_mhz", "boost_mhz", "matrix_mhz")
NUMBERS = (
    *("units", *CLOCKS, "memory_gib", "bandwidth_gbs", "bus_bits", "pin_gbps", "cache_mib"),
    *("link_gbs", "link_group", "pcie", "pcie_lanes", "power_w"),
)
PCIE_GENERATIONS = range(1, 7)
# Of devices and families: what a field is, and what a table or a list holds.
KINDS_OF_FIELDS: tuple[tuple[type, type, tuple[str, ...], str], ...] = (
    (str, object, ("name", "family", "form", "release", "source", "link", "note"), "a text in quotes"),
    (
        str,
        object,
        ("vendor", "architecture", "compute_capability", "pytorch", "elsewhere"),
        "a text in quotes",
    ),
    (dict, object, ("rates", "measured"), "a table in braces"),
    (dict, str, ("sources", "disputed"), "a table of texts in braces"),
    (list, str, ("aliases", "apis"), "a list of names"),
    (bool, object, ("inline_ecc", "limited"), "true or false"),
)
NOT_SOURCED = (
    "name",
    "family",
    "form",
    "aliases",
    "note",
    "source",
    "sources",
    "disputed",
    "link_group",
    "pcie_lanes",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device that trains, as its documents describe it. `None` where no document gives the number.

    Args:
        name: the catalogue's name.
        vendor: ``NVIDIA``, ``AMD``, ``Intel``, ``Apple`` or ``Huawei``.
        architecture: the vendor's name of the generation.
        family: devices of one family do the same work in one unit and clock cycle.
        form: one of `FORMS`; ``consumer`` is a desktop card for games.
        release: year and month, ``2020-05``.
        num_units: multiprocessors (NVIDIA), compute units (AMD), Xe cores (Intel) or GPU cores (Apple).
        base_clock: guaranteed clock in Hz.
        boost_clock: highest clock in Hz behind the vector rates.
        matrix_clock: clock in Hz behind the matrix rates; the boost clock for most.
        memory_bytes: nominal device memory; the driver keeps one to three per cent of it.
        bandwidth: of the device memory, in bytes/s.
        bus_bits: width of the memory bus in bits.
        pin_rate: data rate of one pin of that bus in bits/s.
        cache_bytes: the last cache that the whole chip shares.
        link: what connects devices with each other; empty where that is PCIe.
        link_group: cards at most that a bridge links; boards of ``sxm`` and ``oam`` link all.
        link_bandwidth: over all links of one device, both directions added, in bytes/s; 0 without links.
        pcie_generation: generation of the host's bus; `None` where host and device are one chip.
        pcie_lanes: lanes of that bus.
        power_watts: the board's power limit.
        rates: dense arithmetic rate by dtype (`DTYPES`) in FLOP/s, a multiply-add counted as two.
        derived: the dtypes of `rates` that no document quotes: units x clock x width.
        measured: rates and ``bandwidth`` measured by someone, in the same units, for comparison.
        apis: compute APIs that drive it, in lower case.
        compute_capability: the number or name by which compilers know the family.
        pytorch: which builds of PyTorch serve it.
        aliases: other names under which `find_gpu` knows it.
        sources: the document behind each field, by the field's name in the file.
        disputed: fields on which sources disagree, with the reason.
        note: what the numbers do not say.
        elsewhere: why nothing is predicted for it; empty for most.
        inline_ecc: does error correction, on as delivered, take its codes out of the memory itself?
        limited: does PyTorch serve it less than its newest builds serve others, as `pytorch` says?
    """

    name: str
    vendor: str
    architecture: str
    family: str
    form: str
    release: str
    num_units: int | None
    base_clock: float | None
    boost_clock: float | None
    matrix_clock: float | None
    memory_bytes: int
    bandwidth: float
    bus_bits: int | None
    pin_rate: float | None
    cache_bytes: int | None
    link: str
    link_bandwidth: float
    link_group: int
    pcie_generation: int | None
    pcie_lanes: int
    power_watts: float | None
    rates: dict[str, float]
    derived: tuple[str, ...]
    measured: dict[str, float]
    per_clock: dict[str, int]
    apis: tuple[str, ...]
    compute_capability: str
    pytorch: str
    aliases: tuple[str, ...]
    sources: dict[str, str]
    disputed: dict[str, str]
    note: str
    elsewhere: str = ""
    inline_ecc: bool = False
    limited: bool = False

    @property
    def shown_bytes(self) -> int:
        """The memory without what error correction takes of it."""
        return self.memory_bytes - (self.memory_bytes // ECC_PART if self.inline_ecc else 0)

    @property
    def usable_bytes(self) -> int:
        """What the driver leaves of the memory, or a processor that shares it; of a host, all."""
        if self.form == "host":
            return self.memory_bytes
        shared = APPLE_SHARE if self.vendor == "Apple" else SHARED_SHARE
        return int(self.shown_bytes * (shared if self.form == "soc" else 1 - DRIVER_SHARE))

    @property
    def trains(self) -> bool:
        """Does Vivace train on such devices?"""
        return bool({"cuda", "rocm"} & set(self.apis))

    def expected_rate(self, dtype: str) -> float | None:
        """Units x clock x width in FLOP/s, or `None` where one of the three is not known."""
        clock = self.matrix_clock if dtype in AT_MATRIX_CLOCK else self.boost_clock
        if self.num_units is None or clock is None or dtype not in self.per_clock:
            return None
        return self.num_units * clock * self.per_clock[dtype]

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain values, for JSON."""
        return dataclasses.asdict(self)


def load_catalogue(path: str | Path | None = None) -> dict[str, Gpu]:
    """The devices by name, in the file's order.

    Args:
        path: a person's own file in the format of `gpus.toml`. A device of a known name needs only the fields
            that differ, a new one all that the format requires; families and sources are added.

    Raises `InputError` naming file, device and field where the file cannot be used.
    """
    return dict((_shipped() if path is None else _catalogue(Path(path)))[0])


def find_gpu(name: str, catalogue: Mapping[str, Gpu] | None = None) -> Gpu:
    """The device of that name or alias; capitals, spaces, dashes, the vendor's name and the series (RTX 4090,
    or 4090) do not matter.

    Raises `InputError` with the nearest names where there is none.
    """
    known, names = _shipped() if catalogue is None else (catalogue, _names(catalogue.values()))
    keys = (_key(name), _loose(name), *(f"{series}{_key(name)}" for series in SERIES))
    found = next((names[key] for key in keys if key in names), None)
    if found:
        return known[found]
    reason = elsewhere(name)
    if reason:
        raise InputError(f"nothing is predicted for {name!r}: {reason}")
    close = difflib.get_close_matches(_key(name), list(names), n=8, cutoff=0.5)
    near = list(dict.fromkeys(names[key] for key in close))[:3]
    hint = (
        f"; the nearest are {', '.join(near)}"
        if near
        else f"; it holds {len(known)} devices, such as RTX 4090"
    )
    raise InputError(f"no device {name!r} in the catalogue{hint}")


def elsewhere(name: str) -> str:
    """Why nothing is predicted for a device that is known and is no GPU of PyTorch; empty for all others."""
    reasons: dict[str, str] = read_document(GPUS_FILE)["elsewhere"]
    said = name.lower().replace("inferentia", "trainium")
    return next((reason for known, reason in reasons.items() if known.lower() in said), "")


def lack_of(gpu: Gpu) -> str:
    """What Vivace or PyTorch lack of a device, in a few words; empty where nothing."""
    if not gpu.trains:
        return "Vivace does not train on it yet"
    return "PyTorch serves it only in part" if gpu.limited else ""


def unserved(gpus: Iterable[Gpu]) -> list[str]:
    """What Vivace or PyTorch lack of these devices; one sentence for all that are alike."""
    names: dict[tuple[bool, str], list[str]] = {}
    for gpu in gpus:
        if lack_of(gpu):
            names.setdefault((gpu.trains, gpu.pytorch), []).append(gpu.name)
    found = []
    for (trains, pytorch), alike in names.items():
        said = " and ".join(filter(None, (", ".join(alike[:-1]), alike[-1])))
        before = f"PyTorch for {said}" if trains else f"Vivace does not train on {said} yet; PyTorch there"
        found.append(f"{before}: {pytorch}")
    return found


def disagreements(gpu: Gpu) -> list[str]:
    """What contradicts itself in an entry, one sentence each; empty for a sound one.

    A quoted rate must be units x clock x width, the bandwidth must be bus x data rate, and nothing measured
    may exceed the peak or stay below a third of it. Fields that the file declares `disputed` are left out.
    """
    found = []
    for dtype, rate in gpu.rates.items():
        expected = gpu.expected_rate(dtype)
        if dtype not in gpu.disputed and expected and abs(rate / expected - 1) > RATE_TOLERANCE:
            found.append(
                f"{gpu.name}: {dtype} is quoted as {rate / 1e12:g} TFLOP/s, "
                f"units x clock x width gives {expected / 1e12:.4g}"
            )
    if gpu.bus_bits and gpu.pin_rate and "bandwidth_gbs" not in gpu.disputed:
        expected = gpu.bus_bits * gpu.pin_rate / 8
        if abs(gpu.bandwidth / expected - 1) > BANDWIDTH_TOLERANCE:
            found.append(
                f"{gpu.name}: bandwidth is quoted as {gpu.bandwidth / 1e9:g} GB/s, "
                f"bus x data rate gives {expected / 1e9:.4g}"
            )
    for field, value in gpu.measured.items():
        peak = gpu.bandwidth if field == "bandwidth" else gpu.rates.get(field, 0.0)
        if "measured" not in gpu.disputed and not peak / 3 <= value <= peak:
            found.append(f"{gpu.name}: measured {field} of {value:.4g}/s does not fit a peak of {peak:.4g}/s")
    return found


@functools.cache
def _shipped() -> tuple[Mapping[str, Gpu], dict[str, str]]:
    return _catalogue(None)


def _catalogue(path: Path | None) -> tuple[Mapping[str, Gpu], dict[str, str]]:
    """The shipped devices with those of `path` over them, and `_names` of them."""
    document = read_document(GPUS_FILE)
    entries = {entry["name"]: entry for entry in document["gpus"]}
    families, sources = dict(document["families"]), dict(document["sources"])
    own = {} if path is None else _own_document(path)
    families |= own.get("families", {})
    sources |= own.get("sources", {})
    for number, entry in enumerate(own.get("gpus", []), 1):
        if not isinstance(entry.get("name"), str):
            raise InputError(f"{path}: device {number} has no name")
        known = entries.get(entry["name"], {})
        entries[entry["name"]] = {**known, **entry}
        reasons = [one.get("disputed", {}) for one in (known, entry)]
        if all(isinstance(one, dict) for one in reasons):  # else it is refused below
            entries[entry["name"]]["disputed"] = {**reasons[0], **reasons[1]}
    where = path or GPUS_FILE
    gpus = {name: _gpu(entry, families, sources, where) for name, entry in entries.items()}
    for entry in own.get("gpus", []):
        wrong = disagreements(gpus[entry["name"]])
        if wrong:
            so = (
                "with a clock, units or a data rate give also the rates or bandwidth that follow from it; "
                "if it is so, disputed says why, by field: { fp32 = 'why' }, or bandwidth_gbs, or measured"
            )
            raise InputError(f"{where}: {wrong[0]}; {so}")
    return gpus, _names(gpus.values())


def _own_document(path: Path) -> dict[str, Any]:
    """A person's file, whose tables are those of a catalogue; `InputError` where they are others."""
    own = read_document(path)
    tables = {"sources": dict, "families": dict, "gpus": list}
    for name, found in own.items():
        if name != "format" and name not in tables:
            raise InputError(f"{path} has an unknown table {name!r}; known are {', '.join(tables)}")
        inner = found.values() if isinstance(found, dict) else found
        kind = str if name == "sources" else dict
        if name in tables and not (
            isinstance(found, tables[name]) and all(isinstance(one, kind) for one in inner)
        ):
            right = "write [[gpus]] with two brackets" if name == "gpus" else f"write [{name}] as gpus.toml"
            raise InputError(f"{path}: {name} is not as a catalogue has it: {right}")
    for name, family in own.get("families", {}).items():
        per_clock = family.get("per_clock", {})
        if not isinstance(per_clock, dict) or not all(type(n) is int and n > 0 for n in per_clock.values()):
            raise InputError(
                f"{path}: the family {name!r} has per_clock = {per_clock!r}; write {{ fp32 = 256 }}"
            )
    return own


def read_document(path: Path) -> dict[str, Any]:
    """The parsed file, its format checked; `InputError` where it cannot be read."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from error
    if document.get("format") != FORMAT:
        raise InputError(f"{path} has format {document.get('format')!r}; this Vivace reads format = {FORMAT}")
    return document


def _check(entry: dict[str, Any], families: dict[str, Any], path: Path) -> None:
    """Refuse a table whose fields are unknown, absent or not what they should be."""
    name = entry["name"]
    for key in entry:
        if key not in REQUIRED and key not in OPTIONAL:
            raise InputError(
                f"{path}: {name} has an unknown field {key!r}{nearest(key, [*REQUIRED, *OPTIONAL])}"
            )
    absent = [key for key in REQUIRED if key not in entry]
    if absent:
        raise InputError(f"{path}: {name} lacks {', '.join(absent)}")
    _require_kinds(name, entry, path)
    if entry["family"] not in families:
        raise InputError(
            f"{path}: {name} is of an unknown family {entry['family']!r}{nearest(entry['family'], families)}"
        )
    lacking = [key for key in OF_FAMILIES if key not in families[entry["family"]]]
    if lacking:
        raise InputError(f"{path}: the family {entry['family']!r} lacks {', '.join(lacking)}")
    _require_kinds(f"the family {entry['family']!r}", families[entry["family"]], path)
    if entry["form"] not in FORMS:
        raise InputError(f"{path}: {name} has the form {entry['form']!r}; known are {', '.join(FORMS)}")
    numbers = [(key, entry[key]) for key in NUMBERS if key in entry]
    numbers += [*entry.get("rates", {}).items(), *entry.get("measured", {}).items()]
    for key, value in numbers:
        if type(value) not in (int, float) or not 0 < value < 1e6:
            raise InputError(f"{path}: {name} has {key} = {value!r}; a number above 0 would be right")
    if entry.get("pcie", 1) not in PCIE_GENERATIONS:
        raise InputError(
            f"{path}: {name} has pcie = {entry['pcie']!r}; a generation from 1 to 6 would be right"
        )
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", entry["release"]):
        raise InputError(f"{path}: {name} has release = {entry['release']!r}; write a month, as in '2020-05'")


def _require_kinds(whose: str, table: dict[str, Any], path: Path) -> None:
    """Raises InputError where a field of a device or a family is of another kind than it should be."""
    for kind, inner, keys, right in KINDS_OF_FIELDS:
        for key in keys:
            found = table.get(key, kind())
            held = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
            if not isinstance(found, kind) or not all(isinstance(one, inner) for one in held):
                raise InputError(f"{path}: {whose} has {key} = {found!r}; {right} would be right")


def _gpu(entry: dict[str, Any], families: dict[str, Any], sources: dict[str, str], path: Path) -> Gpu:
    """One table of the file as a `Gpu`."""
    _check(entry, families, path)
    name = entry["name"]
    family = families[entry["family"]]
    field = {**OPTIONAL, **entry}
    scaled = {key: None if field[key] is None else field[key] * 1e6 for key in CLOCKS}
    gpu = Gpu(
        name=name,
        vendor=family["vendor"],
        architecture=family["architecture"],
        family=field["family"],
        form=field["form"],
        release=field["release"],
        num_units=field["units"],
        base_clock=scaled["base_mhz"],
        boost_clock=scaled["boost_mhz"],
        matrix_clock=scaled["matrix_mhz"] or scaled["boost_mhz"],
        memory_bytes=round(field["memory_gib"] * 2**30),
        bandwidth=field["bandwidth_gbs"] * 1e9,
        bus_bits=field["bus_bits"],
        pin_rate=None if field["pin_gbps"] is None else field["pin_gbps"] * 1e9,
        cache_bytes=None if field["cache_mib"] is None else round(field["cache_mib"] * 2**20),
        link=field["link"],
        link_bandwidth=field["link_gbs"] * 1e9,
        link_group=field["link_group"],
        pcie_generation=field["pcie"],
        pcie_lanes=field["pcie_lanes"],
        power_watts=field["power_w"],
        rates={dtype: rate * 1e12 for dtype, rate in field["rates"].items()},
        derived=(),
        measured={
            key: value * (1e9 if key == "bandwidth" else 1e12) for key, value in field["measured"].items()
        },
        per_clock=family["per_clock"],
        apis=tuple(family["apis"]),
        compute_capability=family["compute_capability"],
        pytorch=family["pytorch"],
        aliases=tuple(field["aliases"]),
        sources=_sources(entry, sources, path),
        disputed=field["disputed"],
        note="; ".join(filter(None, [field["note"], family.get("note", "")])),
        elsewhere=family.get("elsewhere", ""),
        inline_ecc=field["inline_ecc"],
        limited=family.get("limited", False),
    )
    return _with_derived_rates(gpu, path)


def _with_derived_rates(gpu: Gpu, path: Path) -> Gpu:
    """The device with the rates that its family has and no document quotes, in the order of `DTYPES`."""
    unknown = set(gpu.rates) - set(DTYPES)
    if unknown:
        raise InputError(f"{path}: {gpu.name} has a rate for {min(unknown)!r}; known are {', '.join(DTYPES)}")
    expected = {dtype: gpu.expected_rate(dtype) for dtype in DTYPES if dtype not in gpu.rates}
    if not gpu.rates and not any(expected.values()):
        raise InputError(
            f"{path}: {gpu.name} has no rate: give rates = {{ fp32 = 20.0 }}, or units and boost_mhz"
        )
    derived = {dtype: rate for dtype, rate in expected.items() if rate is not None}
    rates = {
        dtype: (gpu.rates | derived)[dtype] for dtype in DTYPES if dtype in gpu.rates or dtype in derived
    }
    return dataclasses.replace(gpu, rates=rates, derived=tuple(derived))


def _sources(entry: dict[str, Any], sources: dict[str, str], path: Path) -> dict[str, str]:
    """The document behind every field of an entry."""
    own = entry.get("sources", {})
    cited = {field: own.get(field, entry["source"]) for field in entry if field not in NOT_SOURCED}
    for field, key in {**cited, **own}.items():
        if key not in sources:
            raise InputError(f"{path}: {entry['name']} cites {key!r} for {field}{nearest(key, sources)}")
        if field not in entry:
            raise InputError(f"{path}: {entry['name']} cites a source for {field!r}, which it does not give")
    return {field: sources[key] for field, key in cited.items()}


def _key(name: str) -> str:
    """What of a name distinguishes: letters and digits, without the vendor's words."""
    words = re.sub(r"\(r\)|\(tm\)|[®™]", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", NOISE.sub(" ", words)) or re.sub(r"[^a-z0-9]", "", name.lower())


def _loose(name: str) -> str:
    """The words of a name in order of the alphabet, without bus generation and kind of memory."""
    return " ".join(sorted(re.findall("[a-z0-9]+", DETAILS.sub(" ", NOISE.sub(" ", name.lower())))))


def _names(gpus: Iterable[Gpu]) -> dict[str, str]:
    """Every name by which a device is known, in `_key`'s spelling, to its name; also with its memory size.

    The words of a name may stand in any order where that still names one device.
    """
    loose: dict[str, set[str]] = {}
    plain: dict[str, str] = {}
    sized: dict[str, str] = {}
    for gpu in gpus:
        for name in (gpu.name, *gpu.aliases):
            other = plain.setdefault(_key(name), gpu.name)
            if other != gpu.name:
                raise InputError(f"{name!r} names two devices of the catalogue, {other} and {gpu.name}")
            sized.setdefault(f"{_key(name)}{gpu.memory_bytes / 2**30:g}gb", gpu.name)
            loose.setdefault(_loose(name), set()).add(gpu.name)
    return {key: min(found) for key, found in loose.items() if len(found) == 1} | sized | plain
