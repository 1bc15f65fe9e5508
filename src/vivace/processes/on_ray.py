"""A Ray cluster that a person has: the connection to it, and what its nodes have."""

from __future__ import annotations

import math
import re
import socket
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vivace.errors import FolderError, InputError

MOST_LOSSES = 3  # times that a process may lose its place on the cluster, before it is given up
REACHED_SECONDS = 10.0  # for the connection; Ray's own wait is a minute and ends the process


class Connection:
    """A connection to a Ray cluster; one that this process has already is used, and stays.

    `nodes` are the resources, by Ray's names, of those that have a CPU.

    Args:
        address: ``auto``, or ``HOST:PORT`` of the cluster's head.

    Raises InputError where there is no cluster.
    """

    def __init__(self, address: str) -> None:
        self._own = not ray.is_initialized()
        if self._own:
            _connect(address)
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        self._names = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        self.nodes = [node["Resources"] for node in nodes]

    def require_able(self, folder: Path) -> None:
        """Raises InputError where a node has not this Vivace, FolderError where one does not see a folder
        that is there.
        """
        if not self.nodes:
            raise InputError("no node of the cluster has a CPU")
        for node, name in self._names.items():
            try:
                seen = ray.get(on_node(node, _sees).remote(str(folder.resolve())))
            except ray.exceptions.RayError as error:
                raise InputError(
                    f"the node {name} of the cluster cannot run Vivace: {lines_of(error)[-1]}"
                ) from None
            if not seen:
                raise FolderError(
                    f"the node {name} of the cluster does not see '{folder}': --out must lie on a disk that "
                    "all nodes share, under the same name"
                )

    def close(self) -> None:
        """Leave the cluster, where this process has joined it by itself."""
        if self._own:
            ray.shutdown()


def shares_of(nodes: list[dict[str, float]], workers: int | None) -> tuple[tuple[int, int], dict[str, float]]:
    """How many trials run at once, with how many threads each; and what Ray keeps free for each.

    Args:
        nodes: the resources of each node, by Ray's names.
        workers: trials at a time; None: one a GPU, or a core.
    """
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    able = [node for node in nodes if not gpus or node.get("GPU", 0) >= 1]
    cores = int(sum(node["CPU"] for node in able))
    workers = workers or gpus or cores
    least = min(node["CPU"] // max(1, node.get("GPU", 0)) for node in able)  # so that a node's places fit
    threads = int(max(1, min(least, cores // workers)))
    resources = {"cpu": min(threads, cores / workers)}
    return (workers, threads), resources | ({"gpu": 1 / math.ceil(workers / gpus)} if gpus else {})


def _connect(address: str) -> None:
    if not re.fullmatch(r"auto|[^/]+:\d+", address):
        raise InputError(
            f"a Ray cluster's address is auto, on one of its nodes, or its head's HOST:PORT, not '{address}'"
        )
    host, _, port = address.rpartition(":")
    try:
        if port != "auto":  # for Ray itself waits for a minute
            socket.create_connection((host, int(port)), REACHED_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"there is no Ray cluster at '{address}' ({lines_of(error)[0]}): start one with "
            "'ray start --head', or give --address HOST:PORT of its head"
        ) from None


def on_node(node: str, function: Any) -> Any:
    """A remote function that runs on the node with this id, and takes none of its processors."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=there, max_retries=0)(function)


def _sees(folder: str) -> bool:
    return Path(folder).is_dir()


def lines_of(error: Exception) -> list[str]:
    """The lines of an error's message; at least its kind."""
    return str(error).strip().splitlines() or [type(error).__name__]
