"""The memory budget "auto" on a GPU, and what a plan for GPUs takes beside its prediction without one."""

import json
from pathlib import Path

from vivace.memory.caching import CachingAllocator

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FREE = "from vivace.tuning.budget import free_bytes; print(free_bytes())"


def test_free_memory_is_what_cuda_says(stand_in):
    """NVML, which counts GPUs otherwise than CUDA and knows no parts of them, would say 1 GiB less here."""
    assert int(stand_in.python(FREE, gib=40)) == 40 * 2**30


def test_where_cuda_does_not_start_the_budget_says_so(stand_in, tmp_path):
    words = ("tune", "job.py:job", "--memory", "auto", "--out", tmp_path, "--json")
    done = stand_in.vivace(*words, start_error=802)
    assert done.returncode == 2
    assert "Error 802: system not yet initialized" in json.loads(done.stdout)["error"]["message"]


PEAKS = """
import json, multiprocessing, os, sys
import torch
from torch import nn
import vivace
from vivace.memory.predict import predict
from vivace.plan import Plan
from vivace.session.opening import start

def model():
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(256, 8))

job = vivace.Job(
    model=model,
    data=lambda: [(torch.ones(8192, 256), torch.zeros(8192, dtype=torch.long)) for _ in range(3)],
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
)

def peak(shown, settings):
    os.environ["CUDA_VISIBLE_DEVICES"] = shown
    plan = Plan.from_dict(settings)
    if not shown:
        return predict(job, plan, device="cuda").peak_bytes
    with start(job, plan, vivace.inspect()) as session:
        for batch in session.batches(job.data()):
            session.step(batch)
        return torch.cuda.max_memory_allocated()

def ask(*arguments):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(peak, arguments)

print(json.dumps([[ask(shown, settings) for shown in ("", "0")] for settings in json.loads(sys.argv[1])]))
"""
BATCH_BYTES = 8192 * (256 * 4 + 8)


def test_a_batch_ahead_takes_what_is_predicted_without_a_gpu(stand_in):
    plans = [{}, {"pinned_prefetch": {}}]
    plain, ahead = json.loads(stand_in.python(PEAKS, json.dumps(plans)).splitlines()[-1])
    assert [after - before for before, after in zip(plain, ahead, strict=True)] == [BATCH_BYTES] * 2


ALLOCATED = """
import json
import torch
from torch import nn

torch.cuda.memory._record_memory_history(max_entries=10**5, stacks="python")
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
side = torch.cuda.Stream()
for length in (4096, 7000, 1024, 9000, 4096):
    with torch.cuda.stream(side):
        batch = torch.zeros(length, 512).to("cuda")
    batch.record_stream(torch.cuda.current_stream())
    model(batch).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps(torch.cuda.memory._snapshot()["device_traces"][0]))
"""


def test_the_model_of_the_allocator_hands_out_what_torchs_own_does(stand_in):
    """Of each allocation: the same place in the same segment."""
    allocator, live, segments, num = CachingAllocator(), {}, [], 0
    for event in json.loads(stand_in.python(ALLOCATED).splitlines()[-1]):
        address, size = event["addr"], event["size"]
        if event["action"] == "segment_alloc":
            segments.append((allocator.reserved, size, address))
        elif event["action"] == "alloc":
            live[address] = num = num + 1
            allocator.allocate(num, size, event["stream"])
            place = allocator._used[num].address
            base, there = next((base, there) for base, room, there in segments if 0 <= place - base < room)
            assert address == there + place - base
        elif event["action"] == "free_completed":
            allocator.free(live.pop(address))
    assert allocator.reserved == sum(room for _, room, _ in segments)
    assert num > 200


PAIRS = [
    ("small_mlp", "reference"),
    ("small_gpt", "bf16"),
    ("small_gpt", "fp16"),
    ("encoder", "pieces"),  # its layers are deep copies
    ("resnet18", "channels_last"),
    ("mobilenet_v3_small", "pieces"),
    ("written_gpt", "recomputed"),  # its own attention and RMSNorm
    ("small_mlp", "ahead"),  # a batch on a stream of its own
]


def test_what_is_predicted_without_a_gpu_is_what_torchs_allocator_hands_out(stand_in):
    """More pairs: benchmarks/gpu_memory.py."""
    program = (BENCHMARKS / "_peaks.py").read_text()
    rows = json.loads(stand_in.python(program, json.dumps(PAIRS), BENCHMARKS).splitlines()[-1])
    assert len(rows) == len(PAIRS)
    for row in rows:
        assert abs(row["error_percent_peak"]) <= 3, row
        assert abs(row["error_percent_reserved"]) <= 8, row
