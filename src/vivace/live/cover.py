"""Runs a command so that nothing it writes lands in anybody's folders. Started by its path, on its own.

Where the kernel allows it, the command sees every folder through an overlay in a mount namespace of its own:
it may write anything, and reads it back, and all of that is gone with `scratch`. Where it does not, Landlock
lets it write nowhere but into `scratch` and `results`: it fails at its first write. Where neither is to be
had, it is not run at all.

Sources: Documentation/filesystems/overlayfs.rst and userspace-api/landlock.rst of the Linux kernel.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import sys
from typing import NamedTuple, NoReturn

CANNOT_COVER = 96  # the exit code where it is not run
OVERLAY, READ_ONLY, NONE = "overlay", "read-only", "none"
HOW = "VIVACE_COVER"  # the variable that tells the command which of them it is

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
KEPT = {"nosuid": 2, "nodev": 4, "noexec": 8}  # MS_NOSUID, ...: none may be taken back
SHARED = ("proc", "sys", "dev", "run")  # at the root: not the files of a person
# Kinds of file systems that hold files, and may be written to.
FILES = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "overlay", "tmpfs", "vfat"}
FILES |= {
    "exfat",
    "ntfs3",
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "virtiofs",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
}

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
OLDEST_LANDLOCK = 3  # the first that guards truncation
PR_SET_NO_NEW_PRIVS = 38
# WRITE_FILE, REMOVE_DIR, REMOVE_FILE, MAKE_CHAR, _DIR, _REG, _SOCK, _FIFO, _BLOCK, _SYM, REFER, TRUNCATE
WRITES = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14))
OF_A_FILE = (1 << 1) | (1 << 14)

libc = ctypes.CDLL(None, use_errno=True)


class Ruleset(ctypes.Structure):
    """struct landlock_ruleset_attr"""

    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class Beneath(ctypes.Structure):
    """struct landlock_path_beneath_attr"""

    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def main() -> NoReturn:
    """``cover.py SCRATCH RESULTS HOW... -- COMMAND``: the ways to try, in this order."""
    words = sys.argv[1:]
    split = words.index("--")
    (scratch, results, *ways), command = words[:split], words[split + 1 :]
    here = os.getcwd()
    for way in ways:
        try:
            if way == OVERLAY:
                _overlay(scratch, results, here)
            else:
                _read_only(scratch, results)
        except OSError as error:
            print(f"{way}: {error}", file=sys.stderr)
            continue
        os.environ[HOW] = way
        os.execvp(command[0], command)
    sys.exit(CANNOT_COVER)


def _overlay(scratch: str, results: str, here: str) -> None:
    """Change the root to one in which each folder of files is an overlay above itself.

    A child tries it first: what fails halfway cannot be taken back.
    """
    child = os.fork()
    if not child:
        try:
            _change_root(os.path.join(scratch, "tried"), results, here)
        except OSError as error:
            print(f"overlay: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise OSError("no mount namespace with overlays")
    _change_root(os.path.join(scratch, "used"), results, here)


def _change_root(scratch: str, results: str, here: str) -> None:
    _unshare()
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    root = Root(scratch, here)
    root.rebuild("/")
    for mount in root.mounts:
        place = mount.place
        if place.split("/")[1] in SHARED or place in root.done or not os.path.exists(root.path + place):
            continue
        if mount.holds_files:
            root.cover(place)
        elif os.path.isdir(place) and not os.path.ismount(root.path + place):  # an overlay shows it empty
            _read(place, root.path + place)
    shared_memory = root.path + "/dev/shm"
    if os.path.isdir(shared_memory):
        memory = os.path.join(root.scratch, "shared-memory")
        os.makedirs(memory)
        _mount("tmpfs", memory, "tmpfs", 0)
        try:
            _overlaid("/dev/shm", shared_memory, memory)
        except OSError:  # of other owners: what lies there is not to be seen
            _mount("tmpfs", shared_memory, "tmpfs", 0)
            os.chmod(shared_memory, 0o1777)
    _mount(results, root.path + results, None, MS_BIND)
    os.chroot(root.path)
    os.chdir(here)


class Root:
    """The new root, below `scratch`, where what is written lies as well. `mounts` are those of the old one.

    A user who is not root can put overlays above folders of their own alone: the copy that an overlay makes
    of a file's folders has the same owners. Of the others those that lead to where scripts write are made
    anew, in memory; the rest is not to be written to.
    """

    def __init__(self, scratch: str, here: str) -> None:
        self.scratch = os.path.realpath(scratch)  # as mountinfo says it
        self.path = os.path.join(self.scratch, "root")
        self.user = None if _maps_all_users() else os.geteuid()
        temporary = os.environ.get("TMPDIR", "/tmp")
        home = os.path.expanduser("~")
        self.written = [os.path.realpath(place) for place in (here, home, temporary, "/var/tmp")]
        self.mounts = _mounted()
        self.done: set[str] = set()
        self._number = 0
        os.makedirs(self.path)
        _mount("tmpfs", self.path, "tmpfs", 0)
        os.chmod(self.path, stat.S_IMODE(os.stat("/").st_mode))

    def rebuild(self, below: str) -> None:
        """Cover what is in a folder, one by one."""
        for entry in sorted(os.scandir(below), key=lambda entry: entry.name):
            inside = self.path + entry.path
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), inside)
            elif entry.is_dir():
                os.mkdir(inside)
                if below == "/" and entry.name in SHARED:
                    _mount(entry.path, inside, None, MS_BIND | MS_REC)
                else:
                    self.cover(entry.path)
            elif entry.is_file():
                with open(inside, "x", encoding="ascii"):
                    _read(entry.path, inside)

    def cover(self, below: str) -> None:
        """Mount an overlay of a folder; a file, and a folder that cannot be one, is not to be written to.

        What is written lies on the disk, or in memory where the disk's folder is part of what is covered.
        """
        self.done.add(below)
        inside = self.path + below
        if not os.path.isdir(below):
            _read(below, inside)
            return
        self._number += 1
        mine = self.user is None or os.stat(below).st_uid == self.user
        for kind in ("disk", "memory") if mine else ():
            place = os.path.join(self.scratch, f"{self._number}-{kind}")
            os.makedirs(place)
            try:
                if kind == "memory":
                    _mount("tmpfs", place, "tmpfs", 0)
                _overlaid(below, inside, place)
                return
            except OSError:
                continue
        # Who may not see below a mount cannot cover it together with the folder that it is in.
        holds_mounts = mine and any(mount.place.startswith(below + "/") for mount in _mounts())
        if holds_mounts or any(place == below or place.startswith(below + "/") for place in self.written):
            _mount("tmpfs", inside, "tmpfs", 0)
            os.chmod(inside, stat.S_IMODE(os.stat(below).st_mode))
            self.rebuild(below)
        else:
            _read(below, inside)


def _overlaid(below: str, inside: str, place: str) -> None:
    upper, work = os.path.join(place, "upper"), os.path.join(place, "work")
    os.mkdir(upper)
    os.mkdir(work)
    os.chmod(upper, stat.S_IMODE(os.stat(below).st_mode))
    data = f"lowerdir={_escaped(below)},upperdir={_escaped(upper)},workdir={_escaped(work)}"
    more = ",redirect_dir=on" if _maps_all_users() else ",userxattr"
    _mount("overlay", inside, "overlay", 0, data + more)


def _maps_all_users() -> bool:
    """Not in a namespace in which other users have no name."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return int(file.read().split()[2]) > 1


def _unshare() -> None:
    user, group = os.geteuid(), os.getegid()
    if user == 0 and libc.unshare(CLONE_NEWNS) == 0:
        return
    _call(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


class Mount(NamedTuple):
    """Where which kind of file system is mounted, and how."""

    place: str
    kind: str
    options: tuple[str, ...]

    @property
    def holds_files(self) -> bool:
        """May an overlay lie above it?"""
        return self.kind.partition(".")[0] in FILES


def _mounted() -> list[Mount]:
    """What is mounted, parents first, but the root; the last of several at one place."""
    return [mount for _, mount in sorted({mount.place: mount for mount in _mounts()}.items())][1:]


def _mounts() -> list[Mount]:
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            words = before.split()
            place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words[4])
            found.append(Mount(place, after.split()[0], tuple(words[5].split(","))))
    return found


def _read(below: str, inside: str) -> None:
    """Show a folder or a file, and whatever is mounted below it, not to be written to."""
    _mount(below, inside, None, MS_BIND | MS_REC)
    here = [mount for mount in _mounts() if mount.place == inside or mount.place.startswith(inside + "/")]
    if not here:
        raise OSError(f"{inside} is not among the mounts")
    for mount in here:
        kept = sum(flag for name, flag in KEPT.items() if name in mount.options)
        _mount("none", mount.place, None, MS_BIND | MS_REMOUNT | MS_RDONLY | kept)


def _escaped(path: str) -> str:
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = (os.fsencode(source), os.fsencode(target), kind.encode() if kind else None)
    _call(libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(data) if data else None), f"mount {target}")


def _read_only(scratch: str, results: str) -> None:
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < OLDEST_LANDLOCK:
        raise OSError(f"Landlock is of version {version}, and {OLDEST_LANDLOCK} is needed")
    rules = Ruleset(WRITES)
    handle = libc.syscall(LANDLOCK_CREATE, ctypes.byref(rules), ctypes.c_size_t(ctypes.sizeof(rules)), 0)
    _call(-1 if handle < 0 else 0, "landlock")
    for place in (scratch, results, "/dev", "/proc"):
        folder = os.open(place, os.O_PATH | os.O_CLOEXEC)
        rule = Beneath(WRITES if os.path.isdir(place) else OF_A_FILE, folder)
        _call(libc.syscall(LANDLOCK_ADD, handle, 1, ctypes.byref(rule), 0), f"landlock {place}")
        os.close(folder)
    _call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    _call(libc.syscall(LANDLOCK_RESTRICT, handle, 0), "landlock")
    os.close(handle)
    temporary = os.path.join(scratch, "temporary")
    os.makedirs(temporary, exist_ok=True)
    os.environ["TMPDIR"] = temporary


def _call(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
