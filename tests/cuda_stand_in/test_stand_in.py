"""The stand-in itself: what torch's own CUDA code does on it."""


def test_torch_allocates_differentiates_and_captures(stand_in):
    printed = stand_in.python(
        """
import torch
x = torch.ones(64, 64, device="cuda", requires_grad=True)
(x @ x).relu().sum().backward()
torch.cuda.synchronize()
print(torch.cuda.get_device_name(0), torch.cuda.device_count(), x.grad.shape == x.shape)
print(torch.arange(3.0).cuda().cpu().tolist(), torch.cuda.memory_allocated() > 0)
graph, total = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
with torch.cuda.graph(graph):
    total.add_(1)
graph.replay()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        total.sum().item()
except RuntimeError as error:
    print("refused:", str(error.__context__ or error).splitlines()[0])
""",
        gpus=2,
    )
    assert printed.splitlines() == [
        "NVIDIA H100 80GB HBM3 2 True",
        "[0.0, 1.0, 2.0] True",
        "refused: CUDA error: operation not permitted when stream is capturing",
    ]
