"""What this process may use: cores, memory, shared memory, open files and disk. Nothing raises."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil

from vivace import words

LITTLE_SHARED_MEMORY = 2**29  # bytes in /dev/shm; a container has 64 MB unless it is told otherwise


def own_cores() -> set[int]:
    """The numbers of the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: the smaller of its affinity and its container's quota, at least 1."""
    cores = len(own_cores())
    quota = quota_cores(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the smaller of the machine's and its container's."""
    limits = [limit for _, limit in _memory_limits(root)]
    return min([_memory_of_machine()[0], *limits])


def free_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may still take: of the machine's, and of each group that holds it.

    What a group has used includes files that the kernel keeps in memory and gives up when it is needed.
    """
    found = [_memory_of_machine()[1]]
    for folder, limit in _memory_limits(root):
        used = _first_number(folder, ("memory.current", "memory.usage_in_bytes"))
        lines = [line.split() for line in read(folder / "memory.stat").splitlines()]
        counts = {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}
        files = counts.get(
            "total_inactive_file", counts.get("inactive_file", 0)
        )  # version 1: of groups below
        if used is not None:
            found.append(limit - used + min(used, files))
    return max(0, min(found))


def peak_memory() -> int:
    """Bytes of memory that this process held at most so far, as the system counts them."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _memory_of_machine() -> tuple[int, int]:
    """Bytes of memory that the machine has, and that are available on it."""
    try:
        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)
    except OSError:  # psutil reads /proc, which some sandboxes do not have; the C library asks the kernel
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")


def _memory_limits(root: Path) -> list[tuple[Path, int]]:
    """The control groups that limit this process's memory, innermost first, each with its limit in bytes."""
    limits = [
        (folder, _first_number(folder, ("memory.max", "memory.limit_in_bytes")))
        for folder in control_groups(root, "memory")
    ]
    return [(folder, limit) for folder, limit in limits if limit]


def _first_number(folder: Path, names: tuple[str, ...]) -> int | None:
    """The whole number in the first of these files that holds one; no limit reads "max"."""
    texts = (read(folder / name).strip() for name in names)
    return next((int(text) for text in texts if text.isdigit()), None)


def quota_cores(root: Path = Path("/")) -> float | None:
    """Cores that the control groups grant, the smallest of all levels; `None` without a quota."""
    found = []
    for folder in control_groups(root, "cpu"):
        words = read(folder / "cpu.max").split()  # version 2: quota and period in microseconds
        if not words:
            words = [read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def control_groups(root: Path, controller: str) -> list[Path]:
    """The folders, innermost first, whose limits on `controller` hold for this process; versions 1 and 2.

    A container often shows its own group as the mount's root while naming the path outside: then only the
    root exists.
    """
    folders: list[Path] = []
    for line in read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        names = controllers.split(",")
        if not controllers:  # beside version 1, version 2 has a mount of its own
            unified = root / "sys/fs/cgroup/unified"
            mount = unified if unified.is_dir() else root / "sys/fs/cgroup"
        elif controller in names:
            mounts = (root / "sys/fs/cgroup" / name for name in (controllers, controller))
            mount = next((m for m in mounts if m.is_dir()), root / "sys/fs/cgroup" / controller)
        else:
            continue
        inner = mount.joinpath(*(part for part in path.split("/") if part not in ("", "..")))
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def gather_limits(root: Path = Path("/")) -> dict[str, Any]:
    """The limits as the Machine keeps them; a figure that cannot be read is left out."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found: dict[str, Any] = {
        "cores_seen": os.cpu_count() or 1,
        "cores_usable": usable_cores(root),
        "memory_bytes": memory_limit(root),
        "shared_memory_bytes": shared_memory(root),
        "open_files": None if soft == resource.RLIM_INFINITY else soft,
        "cores_quota": quota_cores(root),
        "disk_free_bytes": _free(Path.cwd()) if _folder_exists() else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def shared_memory(root: Path = Path("/")) -> int | None:
    """Bytes that are free in /dev/shm; None where there is none, as on macOS."""
    return _free(root / "dev/shm")


def little_shared_memory(free: int) -> tuple[str, str]:
    """What is too little about so many bytes in /dev/shm, and what to do."""
    return (
        f"/dev/shm has {words.size(free)} free, and a DataLoader's workers hand batches over in it",
        "start the container with --shm-size=8g (or --ipc=host), or use num_workers=0",
    )


def read(path: Path) -> str:
    """A small file's text; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free if folder.is_dir() else None
    except OSError:
        return None


def _folder_exists() -> bool:
    try:
        return bool(os.getcwd())
    except OSError:  # it was deleted
        return False
