"""Errors cross process borders with class and fields; what torch says by a sentence alone is read once."""

from __future__ import annotations

import errno
import json
import pickle

import pytest
import torch

import vivace
from vivace import errors
from vivace.errors import (
    AnswerIsNo,
    ChildFailed,
    Code,
    FolderError,
    InputError,
    JobError,
    Refused,
    TimedOut,
    Unsteady,
    VivaceError,
    is_full_disk,
    is_lost_worker,
    ran_out_of_memory,
)
from vivace.memory.choosing import TooLittle
from vivace.processes.launch import Child, Source, own_error

OWN = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, VivaceError)]


ENTRY = """
import os, signal, torch
from vivace.errors import Code, Refused, Unsteady

class Mine(Refused):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")

class Handler:
    def __init__(self, job): pass
    def refuse(self): raise Refused("it changed nothing", code=Code.TOO_COARSE).by("channels_last")
    def hesitate(self): raise Unsteady("too unsteady", foreign_share=0.5)
    def exhaust(self): torch.empty(2**60)
    def refuse_in_an_own_class(self): raise Mine("a third", "party's")
    def break_down(self): raise KeyError("lost")
    def die(self): os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_childs_errors_arrive_with_class_and_fields(tmp_path, monkeypatch):
    (tmp_path / "tests_errors_entry.py").write_text(ENTRY)
    monkeypatch.syspath_prepend(str(tmp_path))
    job = vivace.Job(model=list, data=list, loss=lambda model, batch: 0, optimizer=lambda model: None)

    def asked(command: str, kind: type[VivaceError]) -> VivaceError:
        with pytest.raises(kind) as caught:
            child.ask(command, 600)
        assert type(caught.value) is kind
        return caught.value

    with Child("tests_errors_entry:Handler", Source(job)) as child:
        refused = asked("refuse", Refused)
        assert (str(refused), refused.technique, refused.code) == (
            "channels_last: it changed nothing",
            "channels_last",
            Code.TOO_COARSE,
        )
        assert asked("hesitate", Unsteady).foreign_share == 0.5
        assert asked("exhaust", ChildFailed).code == Code.OUT_OF_MEMORY
        assert str(asked("refuse_in_an_own_class", Refused)) == "a third party's"
        assert "KeyError: 'lost'" in str(asked("break_down", ChildFailed))
        dead = asked("die", ChildFailed)
        assert dead.code == Code.KILLED
        assert dead.lacked_memory


@pytest.mark.parametrize("cls", OWN, ids=lambda cls: cls.__name__)
def test_every_error_crosses_as_json_and_pickled_with_its_class_and_fields(cls):
    error = cls("a sentence", technique="mine", code=Code.KILLED)
    if isinstance(error, Unsteady):
        error.foreign_share = 0.25
    pickled = pickle.loads(pickle.dumps(error))
    for found in (VivaceError.from_dict(json.loads(json.dumps(error.to_dict()))), pickled):
        assert type(found) is cls
        assert str(found) == "a sentence"
        assert {name: getattr(found, name) for name in cls.fields} == {
            name: getattr(error, name) for name in cls.fields
        }
        assert isinstance(found.code, Code)


def test_errors_of_other_modules_cross_as_what_they_are_a_kind_of():
    error = TooLittle("it does not fit", smallest_bytes=5)
    assert type(VivaceError.from_dict(error.to_dict())) is AnswerIsNo
    assert pickle.loads(pickle.dumps(error)).smallest_bytes == 5  # between ranks


def test_an_unknown_kind_is_a_general_error_that_names_it():
    document = JobError("the job is at fault").to_dict() | {"kind": "Newer"}
    error = VivaceError.from_dict(document)
    assert type(error) is VivaceError
    assert str(error) == "Newer: the job is at fault"


def test_a_name_is_put_before_the_message_once():
    error = Refused("no").by("inner").by("outer")
    assert (str(error), error.technique) == ("inner: no", "inner")


def test_classes_have_their_codes():
    assert (TimedOut("x").code, Unsteady("x").code, Refused("x").code) == (
        Code.TIMED_OUT,
        Code.UNSTEADY,
        Code.NONE,
    )


def test_what_is_no_error_of_vivaces_crosses_as_a_failed_child():
    failed = own_error(ZeroDivisionError("by zero"))
    assert type(failed) is ChildFailed
    assert str(failed).startswith("ZeroDivisionError: by zero")
    assert not failed.lacked_memory
    error = JobError("the step fails")
    error.__cause__ = MemoryError()
    assert own_error(error).code == Code.OUT_OF_MEMORY


def test_a_full_disk_is_no_fault_of_what_is_tried():
    full = OSError(errno.ENOSPC, "No space left on device", "outputs.npz")
    error = JobError("the Job's data failed")
    error.__cause__ = full
    for found in (own_error(full), own_error(error)):
        assert type(VivaceError.from_dict(found.to_dict())) is FolderError
        assert "a disk is full" in str(found)
        assert "outputs.npz" in str(found)


def test_a_device_that_another_process_has_is_busy():
    busy = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for ...")
    error = JobError("the Job's model failed")
    error.__cause__ = busy
    for found in (own_error(busy), own_error(error)):
        assert (type(found), found.code) == (ChildFailed, Code.BUSY)
    told = InputError("torch cannot use the H100", code=Code.BUSY)
    assert own_error(told) is told, "who asked is told what to do"
    assert own_error(RuntimeError("the office is busy")).code == Code.NONE


def test_an_allocation_that_fails_on_the_cpu_is_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert ran_out_of_memory(caught.value)
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA"))
    assert ran_out_of_memory(MemoryError())
    assert ran_out_of_memory(RuntimeError("CUDA error: out of memory\n..."))
    assert not ran_out_of_memory(ValueError("CUDA out of memory"))
    assert not ran_out_of_memory(RuntimeError("shapes differ"))


def test_a_killed_worker_is_lost_and_one_that_raised_is_not():
    killed = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    caught = RuntimeError("Caught RuntimeError in DataLoader worker process 0.")
    for from_workers in (False, True):
        assert is_lost_worker(killed, from_workers=from_workers)
        assert is_lost_worker(ConnectionResetError(), from_workers=from_workers) is from_workers
        assert is_lost_worker(EOFError(), from_workers=from_workers) is from_workers
        assert not is_lost_worker(caught, from_workers=from_workers)


def test_a_disk_that_takes_no_more_is_full():
    assert is_full_disk(OSError(errno.ENOSPC, "No space left on device"))
    assert not is_full_disk(OSError(errno.EACCES, "Permission denied"))
    assert is_full_disk(RuntimeError("[enforce fail at inline_container.cc:595] . unexpected pos 64 vs 0"))
    assert not is_full_disk(RuntimeError("shapes differ"))
