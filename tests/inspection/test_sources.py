"""Reading a system's files, NVML's answers and the loaders' devices, with faults."""

from __future__ import annotations

import json
import platform
import sys
from types import SimpleNamespace

import psutil
import pytest

from vivace.inspection import backends, facts, gather, inspect, limits, nvidia, store
from vivace.inspection.ceilings import Ceiling, Survey
from vivace.inspection.device_choice import train_on
from vivace.inspection.diagnosis import diagnose
from vivace.inspection.figures import Processor, cpu_figures, gpu_figures, this_processor
from vivace.machine import Backend, Device, Machine


def put(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


QUOTAS = {
    "version 2, in its own namespace": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
    "version 2, the parent is narrower": (
        {"proc/self/cgroup": "0::/job.slice/step\n", "sys/fs/cgroup/job.slice/cpu.max": "400000 100000",
         "sys/fs/cgroup/job.slice/step/cpu.max": "max 100000"}, 4.0),
    "version 2, the path is the host's": (
        {"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
    "version 1": (
        {"proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n",
         "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000",
         "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000"}, 3.0),
    "version 1, mounted by its short name": (
        {"proc/self/cgroup": "4:cpu,cpuacct:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
         "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 0.5),
    "version 1, unlimited": (
        {"proc/self/cgroup": "4:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
         "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
    "nonsense": ({"proc/self/cgroup": "x\n", "sys/fs/cgroup/cpu.max": "a b c"}, None),
    "nothing": ({}, None),
}  # fmt: skip


@pytest.mark.parametrize(("files", "cores"), QUOTAS.values(), ids=QUOTAS)
def test_a_container_grants_cores(tmp_path, files, cores):
    assert limits.quota_cores(put(tmp_path, files)) == cores
    assert limits.usable_cores(tmp_path) >= 1


def test_the_narrowest_memory_limit_holds(tmp_path):
    total = limits.memory_limit(tmp_path)
    put(tmp_path, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": str(2**30),
                   "sys/fs/cgroup/a/b/memory.max": "max"})  # fmt: skip
    assert limits.memory_limit(tmp_path) == 2**30 < total
    old = tmp_path / "old"
    put(old, {"proc/self/cgroup": "9:memory:/x\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**31)})
    assert limits.memory_limit(old) == 2**31
    put(old, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"})
    assert limits.memory_limit(old) == total


FREE = {
    "version 2, in its own namespace": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000000\n",
         "sys/fs/cgroup/memory.current": "400000\n"}, 600_000),
    "version 2, the parent has less left": (
        {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "3000000",
         "sys/fs/cgroup/a/memory.current": "2900000", "sys/fs/cgroup/a/b/memory.max": "1000000",
         "sys/fs/cgroup/a/b/memory.current": "400000"}, 100_000),
    "version 2, files in memory are given up": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000000",
         "sys/fs/cgroup/memory.current": "900000",
         "sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 300000\n"}, 400_000),
    "version 2, moved out of its namespace": (
        {"proc/self/cgroup": "0::/../other\n", "sys/fs/cgroup/memory.max": "1000000",
         "sys/fs/cgroup/memory.current": "0", "sys/fs/other/memory.max": "7"}, 1_000_000),
    "version 1, the parent has less left": (
        {"proc/self/cgroup": "9:memory:/x/y\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "2000000",
         "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "1800000",
         "sys/fs/cgroup/memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 50000\n",
         "sys/fs/cgroup/memory/x/y/memory.limit_in_bytes": "9223372036854771712",
         "sys/fs/cgroup/memory/x/y/memory.usage_in_bytes": "5"}, 250_000),
    "version 2 beside version 1": (
        {"proc/self/cgroup": "4:cpu:/x\n0::/x\n", "sys/fs/cgroup/unified/x/memory.max": "500000",
         "sys/fs/cgroup/unified/x/memory.current": "100000"}, 400_000),
    "more is used than allowed": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "10",
         "sys/fs/cgroup/memory.current": "20"}, 0),
}  # fmt: skip


@pytest.mark.parametrize(("files", "num_bytes"), FREE.values(), ids=FREE)
def test_each_level_of_a_container_bounds_what_is_free(tmp_path, files, num_bytes):
    assert limits.free_memory(put(tmp_path, files)) == num_bytes


def test_without_a_limit_what_the_machine_has_is_free(tmp_path):
    put(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max",
                   "sys/fs/cgroup/memory.current": "1"})  # fmt: skip
    assert 10**7 < limits.free_memory(tmp_path) <= limits.memory_limit(tmp_path)


def test_a_system_without_proc_still_tells_its_memory(tmp_path, monkeypatch):
    total = limits.memory_limit(tmp_path)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert limits.memory_limit(tmp_path) == pytest.approx(total, rel=0.05)
    assert 10**7 < limits.free_memory(tmp_path) <= total
    assert inspect().limits["memory_bytes"]


def test_no_shared_memory_and_no_working_folder_are_no_fault(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    found = limits.gather_limits(tmp_path)
    assert "shared_memory_bytes" not in found  # macOS has no /dev/shm, and its workers need none
    assert not any("/dev/shm" in finding.problem for finding in diagnose(facts.Facts(), found))
    assert "disk_free_bytes" not in found
    assert inspect().device.name


def test_a_bare_system_has_no_facts(tmp_path, monkeypatch):
    monkeypatch.setattr(facts.importlib.util, "find_spec", lambda name: None)  # no pyopencl with its driver
    monkeypatch.setattr(facts, "_packages", lambda *names: {})
    monkeypatch.setattr(facts, "ask", lambda: nvidia.Nvidia(error="NVML Shared Library Not Found"))
    found = facts.gather_facts(tmp_path)
    assert (found.bus, found.amd_gpus, found.nodes, found.libraries) == ((), (), frozenset(), frozenset())
    rows = {row.name: row for row in backends.backends(found, (Device("cpu", "a processor", 1),))}
    assert list(rows) == ["cuda", "rocm", "xpu", "mps", "directml", "opencl", "vulkan", "sycl", "cpu"]
    assert all(row.reason and not row.devices for name, row in rows.items() if name != "cpu")


def test_gpus_are_read_from_the_system(tmp_path):
    put(tmp_path, {
        "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
        "sys/bus/pci/devices/0000:01:00.1/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:01:00.1/class": "0x040300\n",
        "sys/bus/pci/devices/0000:00:02.0/vendor": "0x8086\n",
        "sys/bus/pci/devices/0000:00:02.0/class": "0x030000\n",
        "sys/bus/pci/devices/0000:00:0b.0/vendor": "0x8086\n",  # a neural processor
        "sys/bus/pci/devices/0000:00:0b.0/class": "0x120000\n",
        "sys/bus/pci/devices/0000:02:00.0/vendor": "0x1002\n",
        "sys/bus/pci/devices/0000:02:00.0/class": "0x120000\n",
        "sys/class/kfd/kfd/topology/nodes/0/properties": "simd_count 0\n",
        "sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 440\ngfx_target_version 90010\n"
                                                         "drm_render_minor 129\n",
        "sys/class/kfd/kfd/topology/nodes/1/mem_banks/0/properties": "size_in_bytes 68702699520\n",
        "sys/class/drm/renderD129/device/product_name": "AMD Instinct MI250X\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA Kernel Module for x86_64  580.95.05  Release\n",
        "opt/rocm/.info/version": "7.0.1\n",
        "etc/OpenCL/vendors/pocl.icd": "/usr/lib/libpocl.so.2\n",
        "usr/lib64/libOpenCL.so.1": "",
        "usr/share/vulkan/icd.d/lvp.json": json.dumps({"ICD": {"library_path": "/usr/lib/libvulkan_lvp.so"}}),
        "usr/share/vulkan/icd.d/torn.json": "{",
    })  # fmt: skip
    found = facts.gather_facts(tmp_path)
    assert found.bus == (("intel", "0000:00:02.0"), ("nvidia", "0000:01:00.0"), ("amd", "0000:02:00.0"))
    assert (found.on_bus("nvidia"), found.on_bus("intel")) == (1, 0)
    assert found.amd_gpus == (Device("cuda", "AMD Instinct MI250X", 68702699520, ("gfx90a",)),)
    assert (found.nvidia_module, found.rocm) == ("580.95.05", "7.0.1")
    assert found.libraries == {"libOpenCL"}
    assert found.opencl_drivers[0] == "libpocl.so.2"
    assert found.vulkan_drivers == ("libvulkan_lvp.so",)


def test_torchs_build_is_read_without_importing_it():
    import importlib.metadata

    build = facts.torch_build()
    assert build is not None
    assert build.version.startswith(importlib.metadata.version("torch").partition("+")[0])
    assert facts.TorchBuild("2.15.0+cu132", cuda="13.2").words == "torch 2.15.0 for CUDA 13.2"
    assert facts.TorchBuild("2.15.0").words == "torch 2.15.0 for the CPU alone"


class FakeNvml:
    """NVML of two GPUs with four direct NVLinks, the second GPU cut into MIG instances where asked."""

    def __init__(self, mig=0, links=4, remote_kind=0):
        self.mig, self.links, self.remote_kind = mig, links, remote_kind
        self.closed = False

    def __getattr__(self, name):
        raise RuntimeError(f"{name} is not supported")

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        self.closed = True

    def nvmlSystemGetDriverVersion(self):
        return b"580.95.05"  # as older releases do

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 13020

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H100 80GB HBM3" if handle in (0, 1) else "NVIDIA H100 MIG 1g.10gb"

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}" if handle in (0, 1) else f"MIG-{handle}"

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return (9, 0)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=80 * 2**30 if handle in (0, 1) else 10 * 2**30)

    def nvmlDeviceGetMigMode(self, handle):
        return (1, 1) if handle == 1 and self.mig else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, number):
        if number >= self.mig - 1:
            raise RuntimeError("not found")
        return 100 + number

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):
        return 16

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=f"0000:0{handle}:00.0".encode())

    def nvmlDeviceGetNvLinkState(self, handle, number):
        return int(number < self.links)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, number):
        return self.remote_kind

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, number):
        return SimpleNamespace(busId=f"0000:0{1 - handle}:00.0" if self.remote_kind == 0 else "0000:ff:00.0")

    def nvmlDeviceGetTopologyCommonAncestor(self, first, second):
        return 30


def test_nvml_names_gpus_and_their_links():
    nvml = FakeNvml()
    found = nvidia.ask(nvml)
    assert found.error == ""
    assert [(g.device.name, g.uuid, g.device.features) for g in found.gpus] == [
        ("NVIDIA H100 80GB HBM3", f"GPU-{index}", ("sm_90",)) for index in (0, 1)
    ]
    assert (found.driver, found.cuda) == ("580.95.05", (13, 2))
    assert found.gpus[0].device.state == {"pcie_lanes_most": 16}
    assert [link.by for link in found.links] == ["NVLink x4"]
    assert nvml.closed


def test_links_go_through_a_switch_or_over_pcie():
    assert nvidia.ask(FakeNvml(links=18, remote_kind=2)).links[0].by == "NVSwitch x18"
    assert nvidia.ask(FakeNvml(links=0)).links[0].by == "the PCIe host bridge"


def test_mig_instances_are_devices_and_an_empty_gpu_is_none():
    found = nvidia.ask(FakeNvml(mig=3)).gpus
    assert [(g.uuid, g.device.memory_bytes >> 30, g.device.features) for g in found[1:]] == [
        ("MIG-100", 10, ("sm_90", "mig")), ("MIG-101", 10, ("sm_90", "mig"))]  # fmt: skip
    empty = nvidia.ask(FakeNvml(mig=1)).gpus
    assert [g.empty_mig for g in empty] == [False, True]
    assert len(nvidia.visible(empty, None)) == 1


class NvmlError(Exception):
    """As NVML's own, which have their numbers."""

    def __init__(self, value, text):
        super().__init__(text)
        self.value = value


@pytest.mark.parametrize("broken", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"])
@pytest.mark.parametrize(
    ("error", "problems"),
    [
        (NvmlError(15, "GPU is lost"), ["GPU 0 does not answer its driver: GPU is lost"]),
        (NvmlError(4, "Insufficient Permissions"), []),  # it is another job's
    ],
)
def test_one_gpu_that_does_not_answer_takes_no_other_with_it(broken, error, problems):
    nvml = FakeNvml()
    works = getattr(nvml, broken)

    def fails_for_the_first(index):
        if index == 0:
            raise error
        return works(index)

    setattr(nvml, broken, fails_for_the_first)
    found = nvidia.ask(nvml)
    assert ([gpu.index for gpu in found.gpus], found.error, found.links) == ([1], "", ())
    assert [gpu.index for gpu in nvidia.visible(found.gpus, "0")] == [1]  # CUDA does not count it
    build = facts.TorchBuild("2.15.0", cuda="13.2")
    assert [finding.problem for finding in diagnose(facts.Facts(build, found))] == problems


class TwoKinds(FakeNvml):
    """The slower one lies first on the bus."""

    def nvmlDeviceGetName(self, handle):
        return ("NVIDIA L4", "NVIDIA H100 80GB HBM3")[handle]


@pytest.mark.parametrize(
    ("order", "told", "found"),
    [
        (None, ("GPU-1", "GPU-0"), [1, 0]),
        ("FASTEST_FIRST", ("GPU-1",), [1, 0]),
        ("PCI_BUS_ID", ("GPU-1", "GPU-0"), [0, 1]),
        (None, (), [0, 1]),  # CUDA did not answer
    ],
)
def test_gpus_of_several_kinds_stand_as_cuda_counts_them(monkeypatch, order, told, found):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if order is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    monkeypatch.setattr(nvidia, "_told_by_cuda", lambda: told)
    gpus = nvidia.ask(TwoKinds()).gpus
    assert [gpu.index for gpu in gpus] == found
    assert [gpu.index for gpu in nvidia.visible(gpus, "1,0")] == found[::-1]
    environment = {}
    train_on("cuda:1", environment, facts.Facts(nvidia=nvidia.Nvidia(gpus)))
    assert environment == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.fault(40)
@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_a_broken_nvml_is_a_reason(broken):
    def fail(*_):
        raise RuntimeError("Driver/library version mismatch")

    nvml = FakeNvml()
    setattr(nvml, broken, fail)
    found = nvidia.ask(nvml)
    assert found.gpus == ()
    assert "Driver/library version mismatch" in found.error


@pytest.mark.fault(40)
def test_no_driver_and_no_compiler_are_reasons(monkeypatch):
    monkeypatch.setattr(facts, "ask", lambda: nvidia.Nvidia(error="NVML Shared Library Not Found"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    machine = inspect()
    assert "no C++ compiler (no-such-compiler): torch.compile cannot build CPU kernels" in machine.missing
    assert "no NVIDIA GPU: NVML Shared Library Not Found" in machine.missing
    assert machine.device.name


def test_a_machine_with_gpus_is_gathered(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(facts, "ask", lambda: nvidia.ask(FakeNvml()))
    monkeypatch.setattr(facts, "torch_build", lambda: facts.TorchBuild("2.15.0", cuda="13.2"))
    machine = gather.inspect()
    assert [device.kind for device in machine.devices] == ["cuda", "cuda", "cpu"]
    assert machine.versions["driver"] == "580.95.05"
    assert machine.links[0].by == "NVLink x4"
    assert Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine
    monkeypatch.setattr(facts, "torch_build", lambda: facts.TorchBuild("2.15.0"))
    machine = gather.inspect()
    assert [device.kind for device in machine.devices] == ["cpu", "cuda", "cuda"]
    assert "for the CPU alone" in machine.findings[0].problem


def test_a_newer_torch_that_cannot_be_imported_is_a_reason(monkeypatch):
    def fail():
        raise OSError("libcudart.so.99: cannot open shared object file")

    monkeypatch.setattr(facts, "torch_build", lambda: facts.TorchBuild("9.0.0"))
    monkeypatch.setattr(gather.torch_internals, "missing", fail)
    told = "torch 9.0.0 cannot be imported: OSError: libcudart.so.99: cannot open shared object file"
    assert told in inspect().missing


@pytest.mark.parametrize(("shown", "links"), [("1", []), ("1,0", [(0, 1)]), (None, [(0, 1)])])
def test_links_are_those_of_gpus_that_are_shown(monkeypatch, shown, links):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setattr(facts, "ask", lambda: nvidia.ask(FakeNvml()))
    assert [(link.first, link.second) for link in inspect().links] == links


def test_what_was_measured_of_a_gpu_is_found_whichever_of_its_kind_are_shown(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(facts, "ask", lambda: nvidia.ask(FakeNvml()))
    monkeypatch.setattr(facts, "torch_build", lambda: facts.TorchBuild("2.15.0", cuda="13.2"))
    both = inspect()
    store.save(both.measured_as, "cuda", Survey({"copy_device": Ceiling(4.3e12, 0.01, 9, "2026-11-26")}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    one = inspect()
    assert one.fingerprint != both.fingerprint
    assert one.ceilings == {"copy_device": 4.3e12}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert inspect().ceilings == {}


ANSWER = 'print(\'{"devices": ["a card"], "reason": ""}\')'
PROBES = {
    "answers": (ANSWER, ("a card",), ""),
    "writes what is no text": (
        f"import os\nfor number in (1, 2): os.write(number, b'gro\\xdfe\\n')\n{ANSWER}", ("a card",), ""),
    "crashes": ("import os; os.kill(os.getpid(), 11)", (), "a driver crashed (Segmentation fault): libx.so"),
    "is torn": ("print('{')", (), "a driver crashed (exit code 0): libx.so"),
    "hangs": ("import time; time.sleep(30)", (), "did not answer within"),
}  # fmt: skip


@pytest.mark.parametrize(("code", "devices", "reason"), PROBES.values(), ids=PROBES)
def test_a_loader_is_asked_in_a_child(tmp_path, monkeypatch, code, devices, reason):
    script = tmp_path / "probe.py"
    script.write_text(code)
    monkeypatch.setattr(backends, "PROBE", script)
    machine = Machine((), 1, {}, {}, backends=(Backend("opencl", version="libx.so"), Backend("cuda")))
    found, other = backends.look_closer(machine, 1.0 if "sleep" in code else 10.0).backends
    assert found.devices == devices
    assert reason in found.reason
    assert other == Backend("cuda")


@pytest.mark.parametrize("name", ["opencl", "vulkan", "sycl"])
def test_the_probe_itself_never_fails(name):
    import subprocess

    done = subprocess.run(
        [sys.executable, "-P", str(backends.PROBE), name], capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout)
    assert answer["devices"] or answer["reason"]


def test_opencl_finds_the_processor():
    pytest.importorskip("pyopencl")
    machine = backends.look_closer(inspect())
    row = next(row for row in machine.backends if row.name == "opencl")
    assert row.devices, row.reason


def test_vendors_figures_stand_beside_ceilings():
    card = Device("cuda", "a card", 1, ("sm_90",), state={"pcie_generation": 5, "pcie_lanes_most": 16})
    entry = SimpleNamespace(rates={"fp32": 67e12, "bf16": 989e12, "fp8": 1979e12}, bandwidth=3.35e12)
    found = gpu_figures(card, entry)
    assert found["matmul_bf16"] == found["convolution_bf16_nhwc"] == 989e12
    assert found["copy_device"] == 3.35e12
    assert found["host_to_device_pinned"] == pytest.approx(63e9, rel=0.01)
    assert "matmul_tf32" not in found
    assert gpu_figures(Device("cuda", "a part", 1, ("sm_90", "mig")), entry) == {}
    assert gpu_figures(Device("cuda", "unknown", 1), None) == {}


def test_a_processors_peak_is_told_only_where_its_units_and_clock_are_known():
    intel = Processor("GenuineIntel", 6, ("avx2", "avx512f", "amx_bf16"), 8, 3e9)
    assert cpu_figures(intel)["matmul_bf16"] == 8 * 3e9 * 1024
    assert cpu_figures(intel)["convolution_fp32_nhwc"] == 8 * 3e9 * 64
    assert cpu_figures(Processor("AuthenticAMD", 25, ("avx2",), 4, 4e9))["matmul_fp32"] == 4 * 4e9 * 32
    for unknown in (
        Processor("GenuineIntel", 6, intel.features, 8, 0.0),
        Processor("GenuineIntel", 6, ("avx2", "avx512f"), 8, 3e9),
        Processor("AuthenticAMD", 23, ("avx2",), 4, 4e9),
        Processor("", 0, ("asimd",), 4, 3e9),
    ):
        assert cpu_figures(unknown) == {}


def test_threads_of_one_core_count_once(tmp_path, monkeypatch):
    folder = "sys/devices/system/cpu"
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    put(tmp_path, {
        "proc/cpuinfo": "vendor_id\t: AuthenticAMD\ncpu family\t: 25\n",
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3700000\n",
        **{f"{folder}/cpu{n}/topology/core_cpus_list": f"{n % 2},{n % 2 + 2}\n" for n in range(4)},
    })  # fmt: skip
    found = this_processor(Device("cpu", "x", 1, ("avx2",)), 4, tmp_path)
    assert found == Processor("AuthenticAMD", 25, ("avx2",), 2, 3.7e9)
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: {1, 3})  # both threads of one
    assert this_processor(Device("cpu", "x", 1), 2, tmp_path).num_cores == 1
    put(tmp_path, {"sys/devices/cpu_atom/type": "10\n"})  # two kinds of cores
    assert this_processor(Device("cpu", "x", 1), 2, tmp_path).clock == 0.0
    assert this_processor(Device("cpu", "x", 1), 4, tmp_path / "none") == Processor("", 0, (), 4, 0.0)


ARM = "processor : 0\nFeatures : fp asimd bf16 sve\nCPU implementer : 0x41\nCPU part : {}\nCPU revision : 1\n"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("model name\t: AMD EPYC 9654\nflags\t: avx2\n", "AMD EPYC 9654"),
        (ARM.format("0xd4f"), "Neoverse V2 (implementer 0x41, part 0xd4f)"),
        (ARM.format("0xabc"), f"{platform.machine()} (implementer 0x41, part 0xabc)"),
        ("", platform.processor() or platform.machine()),
    ],
)
def test_processors_have_names_of_their_own(cpuinfo, name):
    """Those of one name share measured ceilings."""
    assert gather._cpu_name(cpuinfo) == name


def test_files_without_a_limit_have_none(monkeypatch):
    unlimited = (limits.resource.RLIM_INFINITY, limits.resource.RLIM_INFINITY)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: unlimited)
    assert "open_files" not in limits.gather_limits()
