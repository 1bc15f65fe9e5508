"""Driver, device and torch build, simulated: each mismatch is named with its next step."""

from __future__ import annotations

import dataclasses

import pytest

from vivace.inspection import gather
from vivace.inspection.diagnosis import diagnose, torch_trains_on, version_of
from vivace.inspection.facts import NOT_ASKED, Facts, TorchBuild
from vivace.inspection.nvidia import Gpu, Nvidia, visible
from vivace.machine import Device

CUDA_13 = TorchBuild("2.15.0+cu132", cuda="13.2")
CUDA_12 = TorchBuild("2.14.0+cu126", cuda="12.6")
CPU_ONLY = TorchBuild("2.15.0+cpu")
ROCM = TorchBuild("2.15.0+rocm7", hip="7.0")
XPU = TorchBuild("2.15.0+xpu", xpu="2025.2")
BUS = (("nvidia", "0000:01:00.0"),)
NO_NVML = "NVML Shared Library Not Found"
BY_THE_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
INTEL = (("intel", "0000:03:00.0"),)
AMD = Device("cuda", "AMD Instinct MI300X", 192 * 2**30, ("gfx942",))


def gpu(index=0, name="NVIDIA H100 80GB HBM3", capability="sm_90", features=(), empty_mig=False, **state):
    device = Device("cuda", name, 80 * 2**30, (capability, *features), state=state)
    return Gpu(device, f"GPU-{index}abcdef", index, empty_mig)


def with_driver(*gpus: Gpu, torch=CUDA_13, cuda=(13, 2), **more) -> Facts:
    nvidia = Nvidia(gpus or (gpu(),), driver="580.95.05", cuda=cuda)
    return Facts(torch, nvidia, BUS, "580.95.05", nodes=frozenset({"nvidiactl"}), **more)


def broken(error: str, **more) -> Facts:
    return Facts(CUDA_13, Nvidia(error=error), **more)


def amd(**more) -> Facts:
    given = {"torch": ROCM, "amd_gpus": (AMD,), "nodes": frozenset({"kfd"}), **more}
    return Facts(bus=(("amd", "0000:03:00.0"),), **given)


def beside_amd(torch) -> Facts:
    """An NVIDIA GPU, and AMD's: many of its processors have a small one. No container was given that."""
    return with_driver(torch=torch, amd_gpus=(AMD,))


CASES = {
    "torch for the CPU": (with_driver(torch=CPU_ONLY), "torch 2.15.0 for the CPU alone", "torch for CUDA 13"),
    "torch for ROCm": (with_driver(torch=ROCM), "torch 2.15.0 for ROCm 7.0", "torch for CUDA 13"),
    "driver too old": (
        with_driver(cuda=(12, 2)),
        "serves CUDA up to 12.2, and torch 2.15.0 for CUDA 13.2",
        "driver to 580.65 or newer, or install a build of torch for CUDA 12",
    ),
    "card too old": (
        with_driver(gpu(capability="sm_61", name="GTX 1080")),
        "no code for GTX 1080 (sm_61)",
        "CUDA 12.6",
    ),
    "card too new": (
        with_driver(gpu(capability="sm_120", name="RTX 5090"), torch=CUDA_12),
        "no code for RTX 5090",
        "newer CUDA",
    ),
    "only the second card too old": (
        with_driver(gpu(), gpu(1, capability="sm_61", name="GTX 1080"), hiding=BY_THE_BUS),
        "no code for GTX 1080 (sm_61)",
        "name the other GPUs in CUDA_VISIBLE_DEVICES",
    ),
    "module and library differ": (
        broken("Driver/library version mismatch", bus=BUS, nvidia_module="575.1"),
        "575.1 and its libraries differ",
        "restart the machine",
    ),
    "container without the card": (
        broken(NO_NVML, bus=BUS, nvidia_module="580.1"),
        "container was not given it",
        "--gpus all",
    ),
    "no driver": (
        broken(NO_NVML, bus=BUS),
        "its driver is not loaded",
        "modprobe nvidia",
    ),
    "no permission": (
        broken(
            "Insufficient Permissions",
            bus=BUS,
            nvidia_module="580.1",
            nodes=frozenset({"nvidiactl"}),
            closed_nodes=frozenset({"nvidiactl"}),
        ),
        "may not open /dev/nvidiactl",
        "group",
    ),
    "container without the library that names GPUs": (
        broken(NO_NVML, nodes=frozenset({"nvidiactl"})),
        "(NVML), which names the GPUs, is not here",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    "driver does not answer": (
        broken("Unknown Error", bus=BUS, nvidia_module="580.1", nodes=frozenset({"nvidiactl"})),
        "580.1 does not answer: Unknown Error",
        "nvidia-smi",
    ),
    "WSL without a driver": (
        broken(NO_NVML, nodes=frozenset({"dxg"})),
        "Windows offers a GPU",
        "if it is NVIDIA's, install its driver on Windows, then restart with: wsl --shutdown",
    ),
    "all hidden": (with_driver(hiding={"CUDA_VISIBLE_DEVICES": ""}), "hides all 1 GPUs", "unset it"),
    "one that is not here": (
        with_driver(hiding={"CUDA_VISIBLE_DEVICES": "0,3"}),
        "CUDA shows 1",
        "from 0 to 0",
    ),
    "MIG without an instance": (
        with_driver(gpu(features=("mig",), empty_mig=True)),
        "it has no instance",
        "nvidia-smi mig -i 0 -cgi",
    ),
    "several MIG instances": (
        with_driver(gpu(features=("mig",)), gpu(features=("mig",))),
        "one MIG instance",
        "CUDA_VISIBLE_DEVICES=MIG-",
    ),
    "half the lanes": (with_driver(gpu(pcie_lanes=8, pcie_lanes_most=16)), "8 of its 16 PCIe lanes", "slot"),
    "power limit": (
        with_driver(gpu(power_limit_watts=350.0, power_default_watts=700.0)),
        "350 of its 700 W",
        "-pl 700",
    ),
    "compute mode": (with_driver(gpu(compute_mode="exclusive process")), "exclusive process", "-c 0"),
    "two kinds of cards": (
        with_driver(gpu(), gpu(1, "NVIDIA L4", "sm_89")),
        "GPUs of 2 kinds",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
    ),
    "AMD with CUDA torch": (
        amd(torch=CUDA_13),
        "an AMD GPU is here, and torch 2.15.0 for CUDA 13.2",
        "for ROCm",
    ),
    "AMD beside NVIDIA, for neither": (
        beside_amd(CPU_ONLY),
        "an NVIDIA GPU is here, and torch 2.15.0 for the CPU alone",
        "torch for CUDA 13",
    ),
    "AMD beside NVIDIA, for AMD": (
        dataclasses.replace(beside_amd(ROCM), nodes=frozenset({"kfd", "nvidiactl"})),
        "ROCm: untested",
        "vivace verify",
    ),
    "AMD not listed": (amd(amd_gpus=()), "does not list it", "amdgpu"),
    "AMD container": (amd(nodes=frozenset()), "was not given it", "--device /dev/kfd"),
    "AMD permission": (amd(closed_nodes=frozenset({"kfd"})), "may not open /dev/kfd", "render,video"),
    "AMD hidden": (amd(hiding={"HIP_VISIBLE_DEVICES": "-1"}), "hides all AMD GPUs", "unset"),
    "AMD with ROCm torch": (amd(), "ROCm: untested", "vivace verify"),
    "Intel with CUDA torch": (Facts(CUDA_13, bus=INTEL), "does not train on Intel GPUs yet", "processor"),
    "Intel with XPU torch": (Facts(XPU, bus=INTEL), "does not train on Intel GPUs yet", "processor"),
    "Intel without torch": (Facts(None, bus=INTEL), "does not train on Intel GPUs yet", "processor"),
    "Intel's own graphics with XPU torch": (
        Facts(XPU, bus=(("intel", "0000:00:02.0"),)),
        "does not train on Intel GPUs yet",
        "processor",
    ),
    "Apple": (
        Facts(CPU_ONLY, system="Darwin", processor="arm64"),
        "does not train on Apple GPUs yet",
        "processor",
    ),
    "torchvision for another toolkit": (
        Facts(CPU_ONLY, packages={"torchvision": "0.30.0+cu132"}),
        "different toolkits",
        "same index",
    ),
}


@pytest.mark.parametrize(("facts", "problem", "step"), CASES.values(), ids=CASES)
def test_a_mismatch_is_named_with_its_next_step(facts, problem, step):
    found = diagnose(facts)
    assert len(found) == 1, found
    assert problem in found[0].problem
    assert step in found[0].next


@pytest.mark.parametrize(
    "facts",
    [
        Facts(CUDA_13, Nvidia(error=NO_NVML)),
        Facts(None, Nvidia(error=NO_NVML)),
        Facts(CUDA_13, bus=(("intel", "0000:00:02.0"),)),
        Facts(CUDA_13, bus=(("amd", "0000:00:08.0"),)),
        with_driver(),
        with_driver(cuda=(13, 0)),
        with_driver(torch=CUDA_12),
        with_driver(cuda=None),
        with_driver(gpu(features=("mig",)), hiding={"CUDA_VISIBLE_DEVICES": "GPU-0"}),
        with_driver(
            gpu(power_limit_watts=700.0, power_default_watts=700.0, pcie_lanes=16, pcie_lanes_most=16)
        ),
        with_driver(torch=None),
        amd(torch=None),
        beside_amd(CUDA_13),
        Facts(CUDA_13, packages={"torchvision": "0.30.0+cu132"}),
        Facts(CUDA_13, packages={"torchvision": "0.30.0"}),
    ],
)
def test_a_machine_in_order_has_no_finding(facts):
    assert diagnose(facts, {"shared_memory_bytes": 2**33, "open_files": 65536}) == ()


BROKEN = [name for name, (facts, *_) in CASES.items() if facts.nvidia.error and facts.nvidia != NOT_ASKED]


@pytest.mark.parametrize("case", BROKEN)
def test_a_gpu_that_the_driver_does_not_name_is_missed_aloud(monkeypatch, case):
    """Each verb tells what keeps a job from the GPU, unless it was hidden on purpose."""
    facts, problem, _ = CASES[case]
    monkeypatch.setattr(gather, "gather_facts", lambda: facts)
    told = gather.inspect().passed_over
    card = "GPU of Windows" if facts.nodes == {"dxg"} else "NVIDIA GPU"  # which may be AMD's or Intel's
    assert told.startswith(f"training on the processor, not on the {card}: ")
    assert problem in told
    hidden = dataclasses.replace(facts, hiding={"CUDA_VISIBLE_DEVICES": ""})
    monkeypatch.setattr(gather, "gather_facts", lambda: hidden)
    assert gather.inspect().passed_over == ""


def test_what_slows_a_card_in_instances_is_said_once():
    limited = gpu(features=("mig",), power_limit_watts=350.0, power_default_watts=700.0)
    found = diagnose(with_driver(*[limited] * 7))
    assert [finding.problem for finding in found if "700 W" in finding.problem] == [
        "GPU 0 is limited to 350 of its 700 W"
    ]


def test_narrow_limits_are_findings():
    found = diagnose(Facts(), {"shared_memory_bytes": 64 * 2**20, "open_files": 256})
    assert ["64.0 MiB" in found[0].problem, "--shm-size" in found[0].next] == [True, True]
    assert "256 files" in found[1].problem


def test_torch_trains_where_build_driver_and_card_agree():
    def trains(facts, vendor="nvidia"):
        device = AMD if vendor == "amd" else facts.nvidia.gpus[0].device
        return torch_trains_on(facts, device, vendor)

    assert trains(with_driver())
    assert trains(with_driver(torch=None))
    assert not trains(with_driver(torch=CPU_ONLY))
    assert not trains(with_driver(cuda=(12, 9)))
    assert not trains(with_driver(gpu(capability="sm_61")))
    assert trains(amd(), "amd")
    assert not trains(amd(torch=CUDA_13), "amd")
    assert not trains(amd(closed_nodes=frozenset({"kfd"})), "amd")


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        (None, [0, 1, 2]), ("", []), ("-1", []), ("2,0", [2, 0]), ("1,7,0", [1]), ("GPU-2abc", [2]),
        ("nonsense", []), ("GPU-9", []), (" 1 , 2 ", [1, 2]), ("0,-1,2", [0]),
    ],
)  # fmt: skip
def test_visible_gpus_are_those_that_cuda_shows(choice, shown):
    gpus = tuple(gpu(index) for index in range(3))
    assert [found.index for found in visible(gpus, choice)] == shown


@pytest.mark.parametrize(
    ("hiding", "shown"),
    [
        ({}, "abc"),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, "ca"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "b"),
        ({"ROCR_VISIBLE_DEVICES": "1, 2", "HIP_VISIBLE_DEVICES": "1"}, "c"),
        ({"HIP_VISIBLE_DEVICES": "0,7,1"}, "a"),
        ({"HIP_VISIBLE_DEVICES": "-1"}, ""),
        ({"ROCR_VISIBLE_DEVICES": "GPU-8bda3c6f"}, "abc"),  # which one that is, its driver alone knows
    ],
)
def test_visible_amd_gpus_are_those_that_rocm_shows(hiding, shown):
    """https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html"""
    found = Facts(amd_gpus=tuple(Device("cuda", name, 2**34) for name in "abc"), hiding=hiding)
    assert "".join(device.name for device in found.amd_shown) == shown


def test_versions_are_read_leniently():
    assert [version_of(text) for text in ("13.2", "12", "", "v12.6.1")] == [(13, 2), (12, 0), (0, 0), (12, 6)]


def test_a_finding_survives_the_document():
    from vivace.machine import Machine

    machine = Machine(
        (dataclasses.replace(AMD, state={"pcie_lanes": 16}),),
        4,
        {},
        {},
        findings=diagnose(CASES["no driver"][0]),
    )
    assert Machine.from_dict(machine.to_dict()) == machine
