import errno
import hashlib
import json
import os
import resource
import shutil
from types import SimpleNamespace

import pytest
import torch

from vivace.errors import CheckpointError, FolderError
from vivace.training.checkpoints import Checkpoints, Position, _digest
from vivace.training.resuming import load_into


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path, {"plan_id": "x"})


def save(checkpoints, step, value=None):
    model = {"weight": torch.full((64,), float(step if value is None else value))}
    return checkpoints.save(Position(step=step, epoch=1, batch=2), model, state_at(step))


def state_at(step):
    return {"optimizer": {"step": step}, "scheduler": None, "techniques": None, "streams": []}


def craft(path, name=None, content=None, **changes):
    """Change a checkpoint's manifest and one of its files so that all hashes hold."""
    manifest = json.loads((path / "MANIFEST.json").read_text())
    del manifest["digest"]
    if name is not None:
        torch.save(content, path / name)
        data = (path / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    manifest = {key: value for key, value in {**manifest, **changes}.items() if value is not None}
    (path / "MANIFEST.json").write_text(json.dumps({**manifest, "digest": _digest(manifest)}))


def test_no_checkpoint_goes_into_a_folder_that_has_taken_the_place_of_the_runs(tmp_path):
    """The person renames the folder of a run that still trains, and begins another one under its name."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    first = Checkpoints(folder, {})
    save(first, 1)
    folder.rename(tmp_path / "kept")
    folder.mkdir()
    second = Checkpoints(folder, {})
    save(second, 7)
    with pytest.raises(FolderError, match=r"checkpoints' is another one than when the run began.*step 8"):
        save(first, 8)
    assert second.newest().position.step == 7
    folder.rename(tmp_path / "other")
    (tmp_path / "kept").rename(folder)
    assert save(first, 8).is_dir()


def test_what_goes_in_comes_out(checkpoints):
    assert checkpoints.newest() is None
    save(checkpoints, 3)
    found = checkpoints.newest()
    assert found.position == Position(step=3, epoch=1, batch=2)
    assert found.manifest["plan_id"] == "x"
    assert found.model["weight"][0] == 3
    assert found.state == state_at(3)
    assert torch.load(found.path / "model.pt", weights_only=True).keys() == {"weight"}


def test_what_lacks_memory_only_to_be_read_back_is_kept(checkpoints, monkeypatch):
    def lacking(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lacking)
        save(checkpoints, 1)
    assert checkpoints.newest().position.step == 1


def test_two_are_kept(checkpoints, tmp_path):
    (tmp_path / "step_1.tmp.dead").mkdir()
    for step in (1, 2, 10):
        save(checkpoints, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_2"]


def test_an_end_between_a_step_that_is_saved_again_and_its_place_loses_nothing(
    checkpoints, tmp_path, monkeypatch
):
    save(checkpoints, 1)
    save(checkpoints, 2)
    rename = os.rename

    def ends(source, target):
        if target == tmp_path / "step_2":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", ends)
        with pytest.raises(KeyboardInterrupt):
            save(checkpoints, 2, value=5)
    found = checkpoints.newest()
    assert (found.position.step, float(found.model["weight"][0])) == (2, 2.0)
    save(checkpoints, 2, value=6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]
    assert float(checkpoints.newest().model["weight"][0]) == 6.0


def test_a_step_is_saved_again_in_place_of_the_old(checkpoints, tmp_path):
    for value in (1, 2):
        save(checkpoints, 5, value)
    assert checkpoints.newest().model["weight"][0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step_5"]


def test_what_the_disk_holds_otherwise_than_it_was_written_costs_none_of_the_others(
    checkpoints, tmp_path, monkeypatch
):
    for step in (1, 2):
        save(checkpoints, step)
    rename = os.rename

    def spoils(source, target):
        rename(source, target)
        flip(target / "model.pt")

    monkeypatch.setattr(os, "rename", spoils)
    with pytest.raises(CheckpointError, match=r"sha256 of model\.pt differs"):
        save(checkpoints, 3)
    assert {"step_1", "step_2"} <= {path.name for path in tmp_path.iterdir()}
    assert checkpoints.newest().position.step == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ESTALE])
def test_a_disk_that_fails_while_it_is_written_to_is_named(checkpoints, tmp_path, monkeypatch, number):
    save(checkpoints, 1)

    def fails(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    where = rf"checkpoint of step 2 cannot be written to .*{os.strerror(number)}"
    with pytest.raises(FolderError, match=where):
        save(checkpoints, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert checkpoints.newest().position.step == 1


def test_a_list_of_checkpoints_that_is_a_link_is_left_alone(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "saved.jsonl").symlink_to(tmp_path / "mine")
    checkpoints = Checkpoints(tmp_path / "checkpoints", {}, tmp_path / "saved.jsonl")
    save(checkpoints, 1)
    assert checkpoints.newest().position.step == 1
    assert (tmp_path / "mine").read_text() == "mine"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def make_a_file(path):
    shutil.rmtree(path)
    path.write_text("stray")


def empty(path):
    shutil.rmtree(path)
    path.mkdir()


def edit_manifest(path):
    text = (path / "MANIFEST.json").read_text()
    (path / "MANIFEST.json").write_text(text.replace('"step": 2', '"step": 9'))


DAMAGE = {
    "the sha256 of model.pt differs": lambda path: flip(path / "model.pt"),
    "the sha256 of state.pt differs": lambda path: flip(path / "state.pt"),
    "state.pt has 10 bytes instead of": lambda path: os.truncate(path / "state.pt", 10),
    "model.pt cannot be read": lambda path: (path / "model.pt").unlink(),
    "MANIFEST.json is missing": lambda path: (path / "MANIFEST.json").unlink(),
    "MANIFEST.json is damaged": edit_manifest,
    "MANIFEST.json is": empty,
    "a file, not a checkpoint's folder": make_a_file,
}


@pytest.mark.fault(30, 31)
@pytest.mark.parametrize("reason", DAMAGE)
def test_damage_is_named_and_the_one_before_is_used(checkpoints, reason, bad_input):
    bad_input()
    save(checkpoints, 1)
    DAMAGE[reason](save(checkpoints, 2))
    found = checkpoints.newest()
    assert found.position.step == 1
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith(f"step_2: {reason}")


@pytest.mark.fault(31)
def test_half_a_manifest_is_damage(checkpoints, bad_input):
    bad_input()
    save(checkpoints, 1)
    path = save(checkpoints, 2) / "MANIFEST.json"
    for text in ("", "[]", "3", path.read_text()[:50], "\udcff"):
        path.write_bytes(text.encode(errors="surrogateescape"))
        assert checkpoints.newest().skipped == ("step_2: MANIFEST.json is damaged",)


@pytest.mark.fault(31)
def test_a_stray_file_is_ignored(checkpoints, tmp_path, bad_input):
    bad_input()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step_x").mkdir()
    assert checkpoints.newest() is None


@pytest.mark.fault(32)
def test_all_bad_lists_every_reason(checkpoints):
    for step in (1, 2):
        (save(checkpoints, step) / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_2: .*missing; step_1: .*missing\).*restart=True"):
        checkpoints.newest()


def test_a_damaged_later_one_makes_room(checkpoints, tmp_path):
    save(checkpoints, 1)
    flip(save(checkpoints, 9) / "model.pt")
    save(checkpoints, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]


@pytest.mark.fault(30)
def test_a_damaged_one_is_not_kept_in_the_place_of_a_good_one(checkpoints, tmp_path):
    save(checkpoints, 1)
    flip(save(checkpoints, 3) / "model.pt")
    assert checkpoints.newest().position.step == 1
    save(checkpoints, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_4"]
    save(checkpoints, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_4", "step_5"]


def test_a_damaged_one_that_is_saved_again_counts(checkpoints, tmp_path):
    save(checkpoints, 1)
    flip(save(checkpoints, 3) / "model.pt")
    assert checkpoints.newest().position.step == 1
    for step in (3, 4):
        save(checkpoints, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3", "step_4"]


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.fault(33)
@pytest.mark.parametrize("name", ["model.pt", "state.pt"])
def test_a_crafted_checkpoint_runs_no_code(checkpoints, tmp_path_factory, name, bad_input):
    bad_input()
    marker = tmp_path_factory.mktemp("marker") / "ran"
    save(checkpoints, 1)
    craft(save(checkpoints, 2), name, {"weight": Evil(marker)})
    found = checkpoints.newest()
    assert found.position.step == 1
    assert f"{name} holds more than numbers, texts and tensors" in found.skipped[0]
    assert not marker.exists()


GOOD = {"step": 2, "epoch": 1, "batch": 2, "log_bytes": 0, "loss": None, "metric": None, "metric_step": -1}


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    "changes",
    [
        {"format": None},
        {"files": None},
        {"files": [1]},
        {"position": None},
        {"position": [2]},
        {"position": {**GOOD, "step": "2"}},
        {"position": {**GOOD, "batch": -1}},
        {"position": {**GOOD, "loss": "low"}},
        {"position": {**GOOD, "more": 1}},
        {"plan_id": None},
        {"plan_id": 3},
        {"job": ["no colon"]},
        {"job": [3]},
        {"name": "state.pt", "content": [1]},
        {"name": "state.pt", "content": {"optimizer": {}}},
        {
            "name": "state.pt",
            "content": {**dict.fromkeys(("optimizer", "scheduler", "techniques", "streams"))},
        },
    ],
)
def test_what_is_intact_and_of_another_form_is_skipped(tmp_path, changes, bad_input):
    bad_input()
    checkpoints = Checkpoints(tmp_path, {"plan_id": "x", "job": ["data: list"]})
    save(checkpoints, 1)
    craft(save(checkpoints, 2), **changes)
    found = checkpoints.newest()
    assert found.position.step == 1
    assert len(found.skipped) == 1


def test_a_checkpoint_of_a_later_vivace_is_skipped_and_says_so(checkpoints):
    save(checkpoints, 1)
    craft(save(checkpoints, 2), format=2)
    assert checkpoints.newest().skipped == ("step_2: format 2; this Vivace reads format 1",)


def test_a_checkpoint_need_not_hold_what_came_to_the_facts_after_it(checkpoints):
    save(checkpoints, 1)
    checkpoints.facts |= {"tuned": {"speedup": 1.5}}
    assert checkpoints.newest().position.step == 1
    save(checkpoints, 2)
    assert checkpoints.newest().manifest["tuned"] == {"speedup": 1.5}


def test_a_manifest_nested_without_end_is_damage(checkpoints):
    save(checkpoints, 1)
    (save(checkpoints, 2) / "MANIFEST.json").write_text("[" * 100_000)
    assert checkpoints.newest().skipped == ("step_2: MANIFEST.json is damaged",)


def test_a_folder_that_somebody_removed_is_said(tmp_path):
    checkpoints = Checkpoints(tmp_path / "gone", {})
    with pytest.raises(FolderError, match=r"gone' is gone, so the checkpoint of step 2 cannot be written"):
        save(checkpoints, 2)


@pytest.mark.fault(33)
def test_unsafe_loading_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(CheckpointError, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set"):
        Checkpoints(tmp_path, {})


@pytest.mark.parametrize("thing", [SimpleNamespace(a=1), lambda: 0])
def test_a_state_that_cannot_be_stored_is_said(checkpoints, thing):
    with pytest.raises(CheckpointError, match=r"cannot be stored|more than numbers"):
        checkpoints.save(Position(step=1), {}, {"optimizer": thing})


class TestFullDisk:
    @pytest.mark.fault(28)
    def test_it_is_seen_beforehand(self, checkpoints, tmp_path, monkeypatch):
        save(checkpoints, 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(FolderError, match=r"needs 1\.\d* MiB and 0\.977 KiB are free; earlier"):
            save(checkpoints, 2)
        assert [path.name for path in tmp_path.iterdir()] == ["step_1"]

    def test_weights_that_are_tied_need_their_room_once(self, checkpoints, monkeypatch):
        weight = torch.zeros(2**20)
        model = {"embedding": weight, "head": weight, "first_row": weight.view(1024, 1024)[0]}
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=6 * 2**20))
        path = checkpoints.save(Position(step=1), model, state_at(1))
        assert sum(file.stat().st_size for file in path.iterdir()) < 6 * 2**20

    def test_a_part_of_a_large_tensor_needs_the_room_of_all_of_it(self, checkpoints, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4 * 2**20))
        with pytest.raises(FolderError, match=r"needs 5\.0\d* MiB"):
            checkpoints.save(Position(step=1), {"row": torch.zeros(1024, 1024)[0]}, state_at(1))

    @pytest.mark.fault(28)
    def test_it_is_seen_while_writing(self, checkpoints, tmp_path):
        save(checkpoints, 1)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
        try:
            with pytest.raises(FolderError, match="a file may have at most 1024 bytes"):
                save(checkpoints, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
        assert checkpoints.newest().position.step == 1


def test_a_state_that_was_saved_in_another_memory_order_is_none_for_a_fused_optimizer():
    """As after a run under `channels_last` that goes on under the reference."""
    weights = []
    for order in (torch.contiguous_format, torch.channels_last):
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4, 3, 2, 2, generator=generator))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
        weight.grad = torch.randn(4, 3, 2, 2, generator=generator)
        optimizer.step()
        state = optimizer.state_dict()
        momentum = state["state"][0]["momentum_buffer"].clone(memory_format=order)
        load_into(optimizer, {**state, "state": {0: {"momentum_buffer": momentum}}}, "the optimizer")
        optimizer.step()
        weights.append(weight.detach())
    assert torch.equal(*weights)
