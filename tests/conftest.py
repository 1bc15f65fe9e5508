import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from vivace.technique import registry
from vivace.tensors import settings

gc.disable()  # while tests are imported, which stay
# A background job may ignore signals, and so would all that the tests start and signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

SCENES = Path(__file__).parent / "scenes"
PRELOADED = (
    "torch._dynamo",  # what building an optimizer imports
    "tensorboard.summary.writer.record_writer",
    "tensorboard.compat.proto.event_pb2",
    "vivace.training.training",
    "vivace.live.training",
    "vivace.tuning.tuner",
    "vivace.command.cli",
)

# What the longest files take on two cores, about: a hint for their order.
SECONDS = {
    "live/test_run": 280,
    "tuning/test_ranks": 190,
    "verifying/test_defects": 150,
    "verifying/test_edits": 145,
    "training/test_survival": 145,
    "advising/test_advise": 140,
    "training/test_on_ray": 140,  # where Ray is installed
    "profiling/test_verb": 125,
    "sweeping/test_cluster": 110,
    "cuda_stand_in/test_gpu_minutes": 105,
    "exporting/test_verb": 100,
    "test_strangers": 100,
    "compressing/test_verb": 95,
    "compressing/test_further": 95,
    "tuning/test_tune": 90,
    "cuda_stand_in/test_live": 90,
    "watching/test_sentinel": 85,
    "advising/test_counted_jobs": 80,
    "profiling/test_recorder": 75,
    "exporting/test_layers": 75,
    "watching/test_share": 70,
    "verifying/test_ranks": 70,
    "testing/test_contract": 70,
    "sweeping/test_sweep": 65,
    "verifying/test_masks_and_noise": 65,
    "command/test_cli": 65,
    "live/test_search": 60,
    "cuda_stand_in/test_verbs": 55,
    "profiling/test_together": 50,
    "verifying/test_verify": 50,
    "tuning/test_bench": 50,
    "techniques/test_depthwise_gradients": 45,
    "benchmarks/test_kernels": 45,
    "reporting/test_browser": 45,
    "cuda_stand_in/test_compiled": 40,
    "verifying/test_python_state": 40,
    "cuda_stand_in/test_kernels": 40,
    "data/test_datasets": 40,
    "techniques/test_bf16_weights": 40,
    "test_frameworks": 40,
    "live/test_loop": 40,
    "techniques/test_fused_recurrent_packed": 40,
    "live/test_cost": 40,
    "techniques/test_compile": 40,
    "data/test_hanging": 40,
    "techniques/test_fused_batchnorm": 35,
    "verifying/test_stored": 35,
    "training/test_damage": 35,
    "training/test_training": 35,
    "training/test_kept": 35,
    "techniques/test_loader_workers": 35,
    "memory/test_predict": 35,
    "cuda_stand_in/test_exclusive": 30,
    "techniques/test_winograd": 30,
    "verifying/test_life": 30,
    "verifying/test_bias": 30,
    "techniques/test_fused_recurrent": 30,
    "kernels/test_batch_norm": 30,
    "techniques/test_batched_attention": 30,
    "training/test_fsdp": 30,
    "comparing/test_recipe": 25,
    "memory/test_choosing": 25,
    "verifying/test_acting": 25,
    "profiling/test_guard": 25,
    "cuda_stand_in/test_memory": 25,
    "training/test_faults": 25,
    "reporting/test_page": 25,
    "verifying/test_evaluation": 25,
}


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=6, help="SIGKILLs at random times, in all")


def pytest_configure():
    """The third process takes what the first two leave of two cores, as they wait for what they started.

    All keep what they measure and compile in a folder of the tests: nothing comes from what was done on this
    machine before, and nothing stays.
    """
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw2":
        os.nice(5)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        cache, owner = tempfile.mkdtemp(prefix="vivace-tests-"), os.getpid()
        os.environ["XDG_CACHE_HOME"] = cache
        atexit.register(lambda: os.getpid() == owner and shutil.rmtree(cache, ignore_errors=True))


def pytest_collection_modifyitems(items):
    """The longest files come first: what one process is still at, the others wait for."""
    here = Path(__file__).parent
    elsewhere = pytest.mark.skip(reason="needs a GPU: cuda_stand_in/test_marked.py runs it")
    for item in items if not torch.cuda.is_available() else ():
        if item.get_closest_marker("gpu"):
            item.add_marker(elsewhere)
    items.sort(key=lambda item: -SECONDS.get(item.path.relative_to(here).with_suffix("").as_posix(), 0))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is there before the first test stays: searches for garbage need not look through it."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # what is never taken apart some libraries call leaked


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


@pytest.fixture(scope="session")
def start_scene(fork_server):
    """``(file, **globals) -> process``: a file in a process of the fork server."""

    def start(file, **named):
        options = {"init_globals": named, "run_name": "scene"}
        child = fork_server.Process(target=runpy.run_path, args=(str(file),), kwargs=options)
        child.start()
        return child

    return start


@pytest.fixture(scope="session")
def places():
    """``(num) -> [environment]``: what torchrun tells each rank of a launch."""

    def of_ranks(num=2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"WORLD_SIZE": str(num), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num)]

    return of_ranks


@pytest.fixture(scope="session")
def on_two_ranks(start_scene):
    """``(text, folder) -> [found]``: what a scene leaves in `found` on each of two ranks."""

    def run(text, folder):
        (folder / "scene.py").write_text(text)
        each = [{"RANK": rank, "FOLDER": str(folder)} for rank in range(2)]
        ranks = [start_scene(SCENES / "two_ranks.py", **named) for named in each]
        for process in ranks:
            process.join(200)
        assert [process.exitcode for process in ranks] == [0, 0]
        return [torch.load(folder / f"{rank}.pt") for rank in range(2)]

    return run


class Launch:
    """A forked process that has begun, its id, and the files of what it writes."""

    def __init__(self, process, written):
        self.process, self.pid, self.written = process, process.pid, written

    def end(self, seconds=400):
        """Wait for it: ``(exit code, output, errors)``."""
        self.process.join(seconds)
        return self.process.exitcode, *(path.read_text() for path in self.written)


@pytest.fixture
def begin_command(start_scene, tmp_path):
    """``(arguments...) -> Launch``: the command line in a process that is forked, and imports nothing."""

    def begin(*arguments, name="", **environment):
        written = [tmp_path / f"output{name}", tmp_path / f"errors{name}"]
        scene = {"arguments": list(arguments), "folder": str(tmp_path), "environment": environment}
        scene["written"] = list(map(str, written))
        begun.append(start_scene(SCENES / "command.py", SCENE=scene))
        return Launch(begun[-1], written)

    begun = []
    yield begin
    for process in begun:
        process.kill()  # its children die with it
        process.join()


@pytest.fixture
def command_on_ranks(begin_command, places):
    """``(arguments...) -> (exit codes, standard error)`` of a command on two ranks, without torchrun."""

    def run(*arguments):
        launches = [begin_command(*arguments, name=f"_{place['RANK']}", **place) for place in places()]
        codes, _, errors = zip(*(launch.end(200) for launch in launches), strict=True)
        return list(codes), "".join(errors)

    return run


@pytest.fixture(scope="module")
def begin_torchrun(start_scene):
    """``(words, folder, program=..., **environment) -> Launch``: torchrun with `vivace` on two ranks.

    Launcher, ranks and their zygotes are forked, so that none of them imports anything.
    """
    begun = []

    def begin(words, folder, program=SCENES / "rank.py", **environment):
        written = [folder / "output", folder / "errors"]
        scene = {"words": words, "folder": str(folder), "written": list(map(str, written))}
        scene["environment"] = {"OMP_NUM_THREADS": "1", **environment}
        scene["program"] = str(program)
        begun.append(start_scene(SCENES / "torchrun.py", SCENE=scene))
        return Launch(begun[-1], written)

    yield begin
    for process in begun:
        if process.exitcode is None:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
        process.join()


@pytest.fixture
def forked_torchrun(begin_torchrun, tmp_path):
    """``(words, **environment) -> (exit code, output, errors)`` of such a launch in the test's folder."""
    return lambda words, **environment: begin_torchrun(words, tmp_path, **environment).end()


@pytest.fixture(scope="module")
def hurried():
    """What is planted is far faster, and the time of a search is not its subject: see scenes/hurried.py."""
    with pytest.MonkeyPatch.context() as patch:
        runpy.run_path(str(SCENES / "hurried.py"))["hurry"](patch.setattr)
        yield


@pytest.fixture(scope="module", autouse=True)
def _what_stays():
    """What earlier files imported stays, too."""
    if len(gc.get_objects()) > 100_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _threads_as_before():
    """Files of jobs that a module of tests loads may set the number of threads for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _settings_as_before():
    """Sessions that end with their process, as a ruler's and a served model's do, tests leave open here."""
    yield
    for first, *_ in settings._held.values():
        first.write(first.before)
    settings._held.clear()


@pytest.fixture(scope="session", autouse=True)
def _no_pace():
    """What tests compile, many at a time, says nothing of how fast this machine compiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vivace.measuring.pace.cache_folder", lambda: Path(os.devnull))
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A function from the name of a job in scenes/served.py to its reference and the folder of its run."""
    from vivace.training.training import train

    folder, done = tmp_path_factory.mktemp("runs"), {}

    def run(name):
        if name not in done:
            reference = f"{SCENES / 'served.py'}:{name}"
            train(reference, out=folder / name)
            done[name] = (reference, folder / name)
        return done[name]

    return run


@pytest.fixture(scope="session")
def ray_cluster():
    """A head and a second node with a processor each, as a person starts them, but for their addresses."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'vivace[ray]')")
    home = tempfile.mkdtemp(prefix="ray")  # a short name: the paths of sockets are limited
    sources = Path(__file__).parents[1] / "src"
    environment = os.environ | {"HOME": home, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
    host = "127.0.0.2"  # not .1, for which Ray takes an address that others reach
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    start += ["--disable-usage-stats", "--object-store-memory=80000000", f"--temp-dir={home}/ray"]
    start += ["--min-worker-port=0", "--max-worker-port=0"]
    head = ["--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false"]
    further = ["--node-ip-address=127.0.0.3", f"--address={host}:{port}"]
    nodes, log = [], Path(home, "log")
    try:
        with log.open("wb") as output:
            for number, which in enumerate((head, further), 1):
                nodes.append(
                    subprocess.Popen([*start, *which], env=environment, stdout=output, stderr=output)
                )
                deadline = time.monotonic() + 90
                while log.read_text().count("--block") < number:
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.05)
        yield SimpleNamespace(address=f"{host}:{port}", environment=environment, nodes=nodes)
    finally:
        family = [p for node in nodes for p in psutil.Process(node.pid).children(recursive=True)]
        for process in [*nodes, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for node in nodes:
            node.wait(20)
        psutil.wait_procs(family, timeout=20)
        shutil.rmtree(home, ignore_errors=True)


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
