"""Checkpoints that survive kills, full disks and damage: hashed, renamed into place, read where hashes hold.

A checkpoint is a folder ``step_N`` with ``model.pt`` (the person's own `state_dict` keys, usable alone),
``state.pt`` (optimizer, scheduler, techniques, random streams) and ``MANIFEST.json``, which is written last
and holds the size and sha256 of both and the facts under which a resumed run is bit-exact.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import re
import resource
import shutil
import time
import uuid
import weakref
from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from vivace import words
from vivace.errors import CheckpointError, FolderError, is_full_disk, ran_out_of_memory
from vivace.files import open_own, read_own
from vivace.plan import Plan
from vivace.tensors.trees import map_tensors, tensors
from vivace.torch_internals.tensors import dense_parts, storage_id
from vivace.training.folder import CHECKPOINT, FORMER, LEDGER, SEED, is_checkpoint, sync_folder

FORMAT = 1
MANIFEST = "MANIFEST.json"
FILES = ("model.pt", "state.pt")
_KEEP = 2
_UNSAFE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_SLACK_BYTES = 1 << 20  # pickles, the zip's directory, the manifest


@dataclasses.dataclass
class Position:
    """How far a run is: optimizer steps, epochs, batches of the current epoch, bytes of its log, and values.

    `missing` are steps for which ended epochs gave no batch, though the data's length promised one. `loss`
    is the last one that was read; `metric` belongs to the weights after `metric_step` steps. `seconds` are
    those of all processes that have trained it until here.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    log_bytes: int = 0
    loss: float | None = None
    metric: float | None = None
    metric_step: int = -1
    missing: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint that holds: its place, manifest and contents, and which newer ones do not hold."""

    path: Path
    manifest: dict[str, Any]
    model: Any
    state: dict[str, Any]
    skipped: tuple[str, ...]

    @property
    def position(self) -> Position:
        """Epoch, batch and step from which training continues."""
        return Position(**self.manifest["position"])


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        folder: an existing folder that holds nothing else.
        facts: JSON types that every manifest repeats (versions, plan, job, seed).
        ledger: a file outside of the folder that lists what was saved.

    Raises CheckpointError where the environment makes `torch.load` run code.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], ledger: Path | None = None) -> None:
        if os.environ.get(_UNSAFE, "0").lower() not in ("0", "", "false", "n", "no"):
            raise CheckpointError(f"{_UNSAFE} is set, so that a crafted checkpoint could run code: unset it")
        self.folder = folder
        self.facts = facts
        self._required = dict(facts)  # what every manifest must hold; what comes to `facts` later, need not
        self.ledger = ledger
        self._damaged = set[Path]()  # which `newest` passed over
        self._opened: int | None = None  # the folder itself, whatever its name may be by now

    def save(self, position: Position, model: nn.Module, state: dict[str, Any]) -> Path:
        """Write a checkpoint, verify it, then remove all but the one before it.

        Raises FolderError where the disk is full or another folder has taken the place of the run's,
        CheckpointError where the contents cannot be stored; the checkpoints that were there before stay as
        they are.
        """
        needed = _num_bytes(model) + _num_bytes(state) + _SLACK_BYTES
        target = self.folder / f"step_{position.step}"
        temporary = self._beside(target)
        try:
            self._require_same_folder(position.step)
            self._require_space(needed)
            self._write(temporary, position, dict(zip(FILES, (model, state), strict=True)))
            for name in FILES:
                _require_readable(temporary / name)
            if target.exists():
                os.rename(target, self._beside(target, FORMER))
            os.rename(temporary, target)
            sync_folder(self.folder)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._explain(error, needed, position.step) from error
        read_manifest(target)
        self._damaged.discard(target)
        self._note(position)
        self._prune(target)
        return target

    def _note(self, position: Position) -> None:
        """Write down, outside of the checkpoints, that there was one."""
        if self.ledger is None:
            return
        line = json.dumps({"step": position.step, "epoch": position.epoch + 1, "batch": position.batch})
        with contextlib.suppress(OSError, FolderError):  # the checkpoint itself is whole
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            with os.fdopen(open_own(self.ledger, flags), "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def _require_none_lost(self) -> None:
        """Raises CheckpointError where there were checkpoints, and none is left."""
        lines = read_own(self.ledger).splitlines() if self.ledger is not None else []
        if lines:
            raise CheckpointError(
                f"the checkpoints in '{self.folder}' are gone ({LEDGER} lists {len(lines)}, the last of "
                f"{_step_of(lines[-1])}): put them back, or train from zero again (--restart, restart=True)"
            )

    def clear(self) -> None:
        """Remove what the run had trained, all of it: what stays would be gone on with."""
        self._hold_folder()
        for item in filter(is_checkpoint, self.folder.iterdir()):
            shutil.rmtree(item, ignore_errors=True)
            if not item.is_dir():
                with contextlib.suppress(OSError):
                    item.unlink()
        if left := next(filter(is_checkpoint, self.folder.iterdir()), None):
            raise FolderError(
                f"'{left}' cannot be removed, so the run cannot begin anew: remove it, or choose a new name"
            )
        if self.ledger is not None:
            self.ledger.unlink(missing_ok=True)

    def newest(self) -> Found | None:
        """The newest checkpoint whose manifest and hashes hold; None where there is none at all.

        Raises CheckpointError with every reason where there are some and none can be trusted.
        """
        skipped: list[str] = []
        self._hold_folder()
        for path in _listed(self.folder):
            try:
                manifest = read_manifest(path)
                self._require_form(manifest)
                model, state = (_load(path / name) for name in FILES)
                _require_state(state)
            except CheckpointError as error:
                skipped.append(f"{path.name}: {error}")
                self._damaged.add(path)
                continue
            return Found(path, manifest, model, state, tuple(skipped))
        if skipped:
            raise CheckpointError(
                f"no checkpoint in '{self.folder}' can be trusted ({'; '.join(skipped)}): put back an intact "
                "copy, or train from zero again (--restart, restart=True)"
            )
        self._require_none_lost()
        return None

    def _require_form(self, manifest: dict[str, Any]) -> None:
        """Raises CheckpointError where a manifest lacks something, or holds it in another form."""
        position, like = manifest["position"], dataclasses.asdict(Position())
        counts = ("step", "epoch", "batch", "log_bytes", "missing")
        if (
            not isinstance(position, dict)
            or position.keys() != like.keys()
            or any(type(position[key]) is not int or position[key] < 0 for key in counts)
            or type(position["metric_step"]) is not int
            or not all(isinstance(position[key], (int, float, type(None))) for key in ("loss", "metric"))
            or type(position["seconds"]) not in (int, float)
            or not 0 <= position["seconds"] < math.inf
        ):
            raise CheckpointError(f"{MANIFEST} holds no position that can be read")
        for key, value in self._required.items():
            if not isinstance(value, type(manifest.get(key))):
                raise CheckpointError(f"{MANIFEST} holds no '{key}' that can be read")
        course = manifest.get("course", {})
        if not all(isinstance(text, str) for pair in course.items() for text in pair):
            raise CheckpointError(f"{MANIFEST} holds no 'course' that can be read")
        if not all(isinstance(line, str) and ": " in line for line in manifest.get("job", ())):
            raise CheckpointError(f"{MANIFEST} holds no 'job' that can be read")

    def _beside(self, target: Path, kind: str = "tmp") -> Path:
        return self.folder / f"{target.name}.{kind}.{uuid.uuid4().hex[:8]}"

    def _write(self, folder: Path, position: Position, contents: dict[str, Any]) -> None:
        folder.mkdir()
        files = {}
        for name, content in contents.items():
            with (folder / name).open("wb") as file:
                save = save_model if name == FILES[0] else torch.save
                save(content, hashing := _Hashing(file))  # type: ignore[arg-type]
                _flush(file)
            files[name] = {"sha256": hashing.digest.hexdigest(), "bytes": hashing.num_bytes}
            _pause_for_fault("slow_write")
        manifest = {
            "format": FORMAT,
            "files": files,
            "position": dataclasses.asdict(position),
            **self.facts,
        }
        manifest["digest"] = _digest(manifest)
        with (folder / MANIFEST).open("wb") as file:
            file.write(json.dumps(manifest, indent=1).encode())
            _flush(file)
        sync_folder(folder)
        _pause_for_fault("before_rename")

    def _hold_folder(self) -> int:
        """A descriptor of the folder as it was found first, open for as long as this lives."""
        if self._opened is None:
            self._opened = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._opened)
        return self._opened

    def _require_same_folder(self, step: int) -> None:
        if not os.path.samestat(os.fstat(self._hold_folder()), os.stat(self.folder)):
            raise FolderError(
                f"the folder '{self.folder}' is another one than when the run began, so the checkpoint of "
                f"step {step} is not written: somebody has renamed the run's while it trained; put it back"
            )

    def _require_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise FolderError(_full(self.folder, needed, free))

    def _explain(self, error: Exception, needed: int, step: int) -> Exception:
        if isinstance(error, FolderError):
            return error
        if not self.folder.is_dir():
            return FolderError(
                f"the folder '{self.folder}' is gone, so the checkpoint of step {step} cannot be written: "
                "somebody has removed or renamed it while the run was training"
            )
        if is_full_disk(error):
            return FolderError(_full(self.folder, needed, shutil.disk_usage(self.folder).free))
        if isinstance(error, OSError):
            return FolderError(f"the checkpoint of step {step} cannot be written to '{self.folder}': {error}")
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        return CheckpointError(f"the state at step {step} cannot be stored: {kind}{error}")

    def _prune(self, newest: Path) -> None:
        """Remove all but `newest` and the one before: old, torn, damaged ones, and those of later steps."""
        listed = [path for path in _listed(self.folder) if path not in self._damaged]
        kept = listed[listed.index(newest) :][:_KEEP]
        for path in self.folder.iterdir():
            if is_checkpoint(path) and path not in kept:
                shutil.rmtree(path, ignore_errors=True)


def save_model(state: Any, file: IO[bytes]) -> None:
    """Write weights that any machine reads by `torch.load` alone, also one without a GPU.

    `torch.save` brings one storage after the other to main memory. What is no plain tensor says by itself
    where it is, and is brought there before.
    """
    token = _AS_ON_HOST.set(True)
    try:
        torch.save(map_tensors(state, lambda tensor: tensor if _is_plain(tensor) else tensor.cpu()), file)
    finally:
        _AS_ON_HOST.reset(token)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


_AS_ON_HOST: ContextVar[bool] = ContextVar("as_on_host", default=False)


def _place(storage: Any) -> str | None:
    """Where `torch.save` says that a storage was; None where torch's own say so."""
    return "cpu" if _AS_ON_HOST.get() and storage.device.type != "meta" else None


torch.serialization.register_package(-1, _place, lambda storage, place: None)  # before torch's own


def kept_plan(folder: Path) -> Plan | None:
    """The plan under which the newest checkpoint of `folder` whose hashes hold goes on; None where none says
    one. Raises PlanError where the plan cannot be read.
    """
    text = whole_manifest(folder).get("plan")
    return Plan.loads(text) if isinstance(text, str) else None


def whole_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the newest checkpoint in `folder` whose hashes hold; empty where there is none."""
    for path in _listed(folder) if folder.is_dir() else ():
        with contextlib.suppress(CheckpointError):
            return read_manifest(path)
    return {}


def kept_tuned(folder: Path) -> dict[str, Any]:
    """What `tune` had found of the run's plan when it began (see `vivace.training.tuned`), as the newest
    checkpoint of `folder` holds it; empty where none does.
    """
    kept = _newest_manifest(folder).get("tuned")
    return kept if isinstance(kept, dict) else {}


def kept_seed(folder: Path) -> int:
    """The seed of the run in `folder`, also of one that was killed before its first checkpoint; 0 where there
    is none.
    """
    kept = _newest_manifest(folder / "checkpoints").get("seed")
    text = read_own(folder / SEED)
    return kept if isinstance(kept, int) else int(text) if text.strip().isdigit() else 0


def _newest_manifest(folder: Path) -> dict[str, Any]:
    """Of the newest checkpoint that has one, whether or not its hashes hold; empty where there is none."""
    for path in _listed(folder) if folder.is_dir() else ():
        with contextlib.suppress(CheckpointError):
            return _manifest(path)
    return {}


def _listed(folder: Path) -> list[Path]:
    """Everything named like a checkpoint, the newest first.

    A former one counts where the process ended before another could take its place.
    """
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := CHECKPOINT.fullmatch(path.name))]
    steps = {path.name for _, path in found}
    return [
        path
        for step, path in sorted(found, reverse=True)
        if path.name == f"step_{step}" or f"step_{step}" not in steps
    ]


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are as written. Raises CheckpointError with the reason."""
    manifest = _manifest(path)
    for name in FILES:
        written = manifest["files"][name]
        _verify(path / name, written["bytes"], written["sha256"])
    return manifest


def _manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError("a file, not a checkpoint's folder")
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        digest = manifest.pop("digest")
        found = manifest["format"]
        named = all({"bytes", "sha256"} <= manifest["files"][name].keys() for name in FILES)
        intact = named and digest == _digest(manifest) and "position" in manifest
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"{MANIFEST} is damaged")
    if found != FORMAT:
        raise CheckpointError(f"format {found}; this Vivace reads format {FORMAT}")
    return manifest


def _step_of(line: bytes) -> str:
    try:
        return f"step {json.loads(line)['step']:d}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "an unknown step"


def _require_state(state: object) -> None:
    parts = ("optimizer", "scheduler", "techniques", "streams")
    if not isinstance(state, dict) or not all(part in state for part in parts):
        raise CheckpointError(f"{FILES[1]} lacks one of {', '.join(parts)}")
    if not isinstance(state["streams"], list):
        raise CheckpointError(f"{FILES[1]} holds no random streams that can be read")


def _verify(file: Path, num_bytes: object, sha256: object) -> None:
    try:
        size = file.stat().st_size
        if size != num_bytes:
            raise CheckpointError(f"{file.name} has {size} bytes instead of {num_bytes}")
        with file.open("rb") as stream:
            actual = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file.name} cannot be read ({error.strerror})") from None
    if actual != sha256:
        raise CheckpointError(f"the sha256 of {file.name} differs from the manifest's")


def _load(file: Path, *, mmap: bool = False) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"{file.name} cannot be read back ({error})") from None
    except Exception as error:  # unpickling raises almost anything
        reason = re.sub(r"\x1b\[\d*m", "", str(error)).strip().split("\n")[0]
        raise CheckpointError(f"{file.name} holds more than numbers, texts and tensors: {reason}") from None


def _require_readable(file: Path) -> None:
    """Raises CheckpointError where a file cannot be read back. Its numbers are not read, whose hash was
    taken when they were written, but on disks that map no files, and where there is memory for that.
    """
    try:
        _load(file, mmap=True)
    except CheckpointError:
        try:
            _load(file)
        except CheckpointError as error:
            if error.__context__ is None or not ran_out_of_memory(error.__context__):
                raise


def unstorable(state: object, where: str = "it") -> str:
    """What of a state no checkpoint could hold and give back, in words; empty where it could be held."""
    file = io.BytesIO()
    try:
        nothing = torch.empty(0)
        torch.save(map_tensors(state, lambda tensor: nothing), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # pickling raises almost anything
        listed: Iterable[Any] = enumerate(state) if isinstance(state, list) else ()
        items = state.items() if isinstance(state, dict) else listed
        parts = (unstorable(part, f"'{key}'") for key, part in items)
        return next(filter(None, parts), f"{where} is a {type(state).__name__}")
    return ""


class _Hashing:
    """A file that counts and hashes what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.num_bytes += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _full(folder: Path, needed: int, free: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    cap = "" if limit == resource.RLIM_INFINITY else f", and a file may have at most {limit} bytes"
    kept = "earlier checkpoints are intact, so " if any(folder.glob("step_*")) else ""
    return (
        f"the disk of '{folder}' is full: a checkpoint needs {words.size(needed)} and {words.size(free)} are "
        f"free{cap}; {kept}make room and go on with --resume (resume=True)"
    )


def _num_bytes(content: object) -> int:
    """The bytes of a file's tensors: memory that several share, such as tied weights, is written once, and
    whole.
    """
    found: dict[int, int] = {}
    for tensor in tensors(content):
        for part in dense_parts(tensor):
            storage = part.untyped_storage()
            found[storage_id(storage)] = storage.nbytes()
    return sum(found.values())


def _pause_for_fault(where: str) -> None:
    """Stand still where a test wants to kill the process (environment variable VIVACE_FAULT)."""
    if os.environ.get("VIVACE_FAULT") == where:
        time.sleep(60)
