import multiprocessing
import runpy
import signal
import socket
from collections import Counter
from pathlib import Path

import pytest
import torch

from vivace.technique import registry

# A background job may ignore signals, and so would all that the tests start and signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

PRELOADED = (
    "torch._dynamo",  # what building an optimizer imports
    "tensorboard.summary.writer.record_writer",
    "tensorboard.compat.proto.event_pb2",
    "vivace.training.training",
    "vivace.watching",
    "vivace.tune",
    "vivace.command.cli",
)


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=6, help="SIGKILLs at random times, in all")


def pytest_collection_modifyitems(items):
    """Files with the most slow tests come first: what one process is still at, the others wait for."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow") is not None)
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture
def bad_input(record_property):
    """Call it for each bad input that a test hands over; their number is a figure of the test."""
    given = []
    yield lambda: given.append(None)
    record_property("bad_inputs", len(given))


@pytest.fixture(scope="session")
def fork_server():
    """Child processes that cost no import: a server has torch and Vivace loaded, and has run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


@pytest.fixture
def command_on_ranks(fork_server, tmp_path):
    """``(arguments...) -> (exit codes, standard error)`` of a command on two ranks, without torchrun."""

    def run(*arguments):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        errors, children = [tmp_path / f"errors_{rank}" for rank in range(2)], []
        for rank in range(2):
            place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            place |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            scene = {"arguments": list(arguments), "folder": str(tmp_path), "environment": place}
            scene |= {"output": str(tmp_path / f"output_{rank}"), "errors": str(errors[rank])}
            options = {"init_globals": {"SCENE": scene}, "run_name": "scene"}
            path = (str(Path(__file__).parent / "scenes" / "command.py"),)
            children.append(fork_server.Process(target=runpy.run_path, args=path, kwargs=options))
            children[-1].start()
        for child in children:
            child.join(200)
            if child.exitcode is None:
                child.kill()
                child.join()
        return [child.exitcode for child in children], "".join(path.read_text() for path in errors)

    return run


@pytest.fixture(scope="module", autouse=True)
def _threads_as_before():
    """Files of jobs that a module of tests loads may set the number of threads for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A function from the name of a job in scenes/served.py to its reference and the folder of its run."""
    from vivace.training.training import train

    folder, done = tmp_path_factory.mktemp("runs"), {}

    def run(name):
        if name not in done:
            reference = f"{Path(__file__).parent / 'scenes' / 'served.py'}:{name}"
            train(reference, out=folder / name)
            done[name] = (reference, folder / name)
        return done[name]

    return run


@pytest.fixture
def register():
    """`vivace.register`; what is registered is forgotten after the test."""
    before = dict(registry._registered)
    yield registry.register
    registry._registered.clear()
    registry._registered.update(before)


@pytest.fixture
def one_thread():
    """Tiny operators on several threads wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
