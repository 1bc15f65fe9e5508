"""C code is compiled once for a machine, whole, and what keeps it from that is told."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vivace.mechanisms import c_code

CODE = "int answer(int number) { return number + OFFSET; }\n"
needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None and shutil.which("g++") is None, reason="there is no gcc"
)


@pytest.fixture(autouse=True)
def _cache_of_the_test(monkeypatch, tmp_path):
    """Nothing is compiled yet, and the person's cache folder stays as it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    c_code.compiled.cache_clear()
    yield
    c_code.compiled.cache_clear()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "code.c"
    path.write_text(CODE.replace("OFFSET", "1"))
    return path


@pytest.fixture
def commands(monkeypatch):
    """The commands that are run."""
    found, output = [], c_code._output
    monkeypatch.setattr(c_code, "_output", lambda *command: found.append(command) or output(*command))
    return found


def anew(source):
    """As another process would: this one has forgotten what it loaded."""
    c_code.compiled.cache_clear()
    return c_code.compiled(source)


def files(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache" / "vivace" / "compiled").iterdir())


@needs_gcc
def test_code_is_compiled_once_and_taken_from_the_cache_after_that(source, commands, tmp_path):
    assert c_code.compiled(source).answer(41) == 42
    assert c_code.compiled(source).answer(1) == 2
    assert len(commands) == 2  # what the compiler defines, and the code
    (name,) = files(tmp_path)
    assert name.startswith("code-")
    assert name.endswith(".so")
    made = (tmp_path / "cache" / "vivace" / "compiled" / name).stat()
    assert anew(source).answer(41) == 42
    assert len([command for command in commands if "-o" in command]) == 1
    assert files(tmp_path) == [name]
    again = (tmp_path / "cache" / "vivace" / "compiled" / name).stat()
    assert (again.st_ino, again.st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


@needs_gcc
def test_other_code_is_another_file(source, tmp_path):
    c_code.compiled(source)
    source.write_text(CODE.replace("OFFSET", "2"))
    assert anew(source).answer(40) == 42
    assert len(files(tmp_path)) == 2


@needs_gcc
def test_other_flags_or_another_compiler_are_another_file(source, tmp_path, monkeypatch):
    source.write_text(CODE.replace("OFFSET", "GIVEN"))
    compiled, output = [], c_code._output
    version = "#define __VERSION__ 1"

    def told(*command):
        if "-dM" in command:
            return version
        compiled.append(command)
        return output(*command)

    monkeypatch.setattr(c_code, "_output", told)
    for value in (1, 2, 1):
        monkeypatch.setattr(c_code, "FLAGS", (*c_code.FLAGS[:7], f"-DGIVEN={value}"))
        assert anew(source).answer(40) == 40 + value
    assert (len(files(tmp_path)), len(compiled)) == (2, 2)
    version = "#define __VERSION__ 2"
    assert anew(source).answer(40) == 41
    assert (len(files(tmp_path)), len(compiled)) == (3, 3)


@needs_gcc
def test_processes_that_compile_at_once_leave_one_whole_file(source, tmp_path):
    """Each waits until all are ready to compile."""
    code = """
import pathlib, sys, time
from vivace.mechanisms import c_code
source, mine, others = map(pathlib.Path, sys.argv[1:])
output = c_code._output

def wait(*command):
    done = output(*command)
    if "-o" in command:
        mine.touch()
        end = time.monotonic() + 60
        while not others.exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert others.exists()
    return done

c_code._output = wait
print(c_code.compiled(source).answer(41))
"""
    marks = [tmp_path / "first", tmp_path / "second"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(source), *map(str, order)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for order in (marks, marks[::-1])
    ]
    answers = [process.communicate(timeout=120) for process in processes]
    assert [out.strip() for out, _ in answers] == ["42", "42"], answers
    assert len(files(tmp_path)) == 1
    assert c_code.compiled(source).answer(1) == 2


@needs_gcc
def test_what_is_being_compiled_does_not_stand_under_its_name(source, tmp_path, monkeypatch):
    output = c_code._output

    def interrupted(*command):
        done = output(*command)
        if "-o" in command:
            assert not [name for name in files(tmp_path) if name.endswith(".so")]
            raise KeyboardInterrupt
        return done

    with monkeypatch.context() as patch:
        patch.setattr(c_code, "_output", interrupted)
        with pytest.raises(KeyboardInterrupt):
            c_code.compiled(source)
    assert files(tmp_path) == []
    assert c_code.compiled(source).answer(41) == 42


def test_without_a_compiler(source, monkeypatch):
    monkeypatch.setattr(c_code.shutil, "which", lambda _: None)
    with pytest.raises(OSError, match=r"^gcc is needed, and neither gcc nor g\+\+ is here$"):
        c_code.compiled(source)


@needs_gcc
def test_code_that_cannot_be_compiled_is_no_file_and_the_reason_is_told(source, tmp_path):
    source.write_text("int answer(int number) { return nowhere; }\n")
    with pytest.raises(OSError, match=r"(?s)(gcc|g\+\+) ends with 1: .*code\.c.*nowhere"):
        c_code.compiled(source)
    assert files(tmp_path) == []
    source.write_text(CODE.replace("OFFSET", "1"))
    assert c_code.compiled(source).answer(41) == 42  # a failure is not kept


def test_a_compiler_that_does_not_know_this_processor(source, tmp_path, monkeypatch):
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho 'bad value native for -march' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match=r"gcc ends with 3: bad value native for -march$"):
        c_code.compiled(source)


@needs_gcc
def test_a_cache_folder_that_cannot_be_written(source, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match="file/vivace"):
        c_code.compiled(source)
    if os.geteuid():  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o555)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "closed"))
        with pytest.raises(PermissionError, match="closed/vivace"):
            c_code.compiled(source)


@needs_gcc
def test_code_that_others_could_have_written_is_not_run(source, tmp_path, monkeypatch):
    assert anew(source).answer(41) == 42
    folder = tmp_path / "cache" / "vivace" / "compiled"
    folder.chmod(0o777)
    with pytest.raises(OSError, match=r"^others may write to '.*compiled': set XDG_CACHE_HOME"):
        anew(source)
    folder.chmod(0o1777)  # where nobody can replace what is another's
    assert anew(source).answer(41) == 42
    real, another = Path.stat, SimpleNamespace(st_uid=os.getuid() + 1, st_mode=0o40700)
    monkeypatch.setattr(
        Path, "stat", lambda self, **how: another if self == folder.parent else real(self, **how)
    )
    with pytest.raises(OSError, match=r"^others may write to '.*vivace'"):
        anew(source)


@needs_gcc
def test_a_torn_file_is_compiled_anew(source, tmp_path):
    anew(source)
    (made,) = (tmp_path / "cache" / "vivace" / "compiled").glob("code-*.so")
    made.unlink()  # what is loaded stays as it is
    made.write_bytes(b"\x7fELF")
    assert anew(source).answer(41) == 42
