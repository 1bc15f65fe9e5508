"""BatchNorm of many pixels in NHWC order on a CPU sums as exactly as in the other order."""

import contextlib
import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vivace.mechanisms import nhwc_norm
from vivace.observing.observe import observe
from vivace.plan import Plan
from vivace.session.opening import attach
from vivace.technique.registry import find


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    """Maps of a few pixels are computed, too."""
    monkeypatch.setattr(nhwc_norm, "FEWEST_PIXELS", 1)


@pytest.fixture
def ours():
    with nhwc_norm.exactly():
        yield


def maps(*shape, dtype=torch.float32, seed=0, far=0.0):
    numbers = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=numbers) + far
    return drawn.to(dtype).to(memory_format=torch.channels_last)


def affine(channels):
    numbers = torch.Generator().manual_seed(7)
    return torch.rand(channels, generator=numbers) + 0.5, torch.randn(channels, generator=numbers)


def stepped(x, gradient, weight, bias, momentum=0.3):
    """The result, all gradients, and the statistics after it; in the type of what is given."""
    wanted = [one.clone().requires_grad_() for one in (x, weight, bias) if one is not None]
    parameters = wanted[1:] or [None, None]
    running = [torch.zeros(x.shape[1]), torch.ones(x.shape[1])]
    if x.dtype == torch.float64:
        running = [one.double() for one in running]
    result = functional.batch_norm(wanted[0], *running, *parameters, True, momentum, 1e-3)
    gradients = torch.autograd.grad(result, wanted, gradient.to(result.dtype))
    return result, [result.detach(), *gradients, *running]


def off(mine, theirs):
    """The largest error of each, relative to the largest number."""
    pairs = zip(mine, theirs, strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]


@settings(deadline=None)  # the first compiles
@given(
    shape=some.tuples(some.integers(2, 5), some.integers(1, 40), some.integers(3, 9), some.integers(3, 9)),
    half=some.booleans(),
    has_affine=some.booleans(),
    far=some.sampled_from([0.0, 3.0]),
    seed=some.integers(0, 9),
)
def test_it_is_batch_norm(shape, half, has_affine, far, seed):
    dtype = torch.bfloat16 if half else torch.float32
    x, gradient = (maps(*shape, dtype=dtype, seed=seed + i, far=far) for i in (0, 1))
    parameters = affine(shape[1]) if has_affine else (None, None)
    exact = [None if one is None else one.double() for one in parameters]
    _, wanted = stepped(x.double(), gradient, *exact)
    with nhwc_norm.exactly():
        result, found = stepped(x, gradient, *parameters)
    if x.is_contiguous():  # which lies in both orders, and is PyTorch's
        assert type(result.grad_fn).__name__ != "_NormBackward"
        return
    assert type(result.grad_fn).__name__ == "_NormBackward"
    assert [one.dtype for one in found] == [dtype, dtype, *[torch.float32] * (len(found) - 2)]
    assert found[0].stride() == x.stride()
    assert found[1].stride() == x.stride()
    of_maps = 2.0**-7 if half else 2e-5
    assert max(off(found[:2], wanted[:2])) < of_maps
    sums = 3 if has_affine else 2  # after the weights' gradient, which the rounded mean shifts
    assert max(off(found[sums:], wanted[sums:])) < 1e-5
    assert max(off(found[2:sums], wanted[2:sums]), default=0.0) < (1e-3 if far else 1e-5)


@pytest.mark.parametrize("far", [0.0, 5.0])
def test_many_pixels_are_summed_as_exactly_as_in_the_other_order(far):
    """PyTorch's own sums are off by ten to a hundred times as much."""
    x, gradient = maps(16, 8, 128, 128, far=far), maps(16, 8, 128, 128, seed=1, far=1.0)
    weight, bias = affine(8)
    _, exact = stepped(x.double(), gradient, weight.double(), bias.double(), momentum=1.0)
    _, other = stepped(x.contiguous(), gradient.contiguous(), weight, bias, momentum=1.0)
    with nhwc_norm.exactly():
        _, found = stepped(x, gradient, weight, bias, momentum=1.0)
    for mine, theirs in zip(off(found, exact), off(other, exact), strict=True):
        assert mine < 2 * theirs + 2e-6


@pytest.mark.usefixtures("ours")
def test_running_statistics_that_hardly_move_are_rounded_as_pytorch_rounds_them():
    """MnasNet's momentum is 3e-4: one rounding more or less is the largest part of what a step changes."""
    x, moved = maps(8, 256, 32, 32), []
    for laid in (x.contiguous(), x):
        mean, variance = torch.zeros(256), torch.ones(256)
        functional.batch_norm(laid, mean, variance, None, None, True, 3e-4, 1e-5)
        moved.append((mean, variance))
    assert int((moved[0][1] != moved[1][1]).sum()) <= 4
    assert torch.allclose(moved[0][0], moved[1][0], atol=1e-9)


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("channels", [40, 72])
def test_bits_do_not_depend_on_threads(channels):
    x, gradient = maps(8, channels, 48, 48), maps(8, channels, 48, 48, seed=1)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(stepped(x, gradient, *affine(channels))[1])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.usefixtures("ours")
def test_what_is_not_for_it_is_pytorchs():
    x, (weight, bias) = maps(2, 4, 5, 5), affine(4)

    def name(x, weight=weight, bias=bias, training=True, moved=(None, None)):
        x = x.requires_grad_() if x.is_leaf else x
        result = functional.batch_norm(x, *moved, weight, bias, training)
        return type(result.grad_fn).__name__

    assert name(x) == "_NormBackward"
    assert name(x, weight=nn.Parameter(weight), bias=nn.Parameter(bias)) == "_NormBackward"
    statistics = (torch.zeros(4), torch.ones(4))
    assert name(x, training=False, moved=statistics) == "NativeBatchNormBackward0"
    assert name(x.detach().contiguous()) == "NativeBatchNormBackward0"
    assert name(x.detach().double(), weight.double(), bias.double()) == "NativeBatchNormBackward0"
    assert name(torch.randn(6, 4)) == "NativeBatchNormBackward0"
    with torch.no_grad():
        same = functional.batch_norm(x, None, None, weight, bias, True)
    torch.testing.assert_close(same, functional.batch_norm(x.contiguous(), None, None, weight, bias, True))


@pytest.mark.usefixtures("ours")
def test_too_few_pixels_are_pytorchs(monkeypatch):
    monkeypatch.setattr(nhwc_norm, "FEWEST_PIXELS", 51)
    x = maps(2, 4, 5, 5).requires_grad_()
    assert type(functional.batch_norm(x, None, None, training=True).grad_fn).__name__ != "_NormBackward"


@pytest.mark.usefixtures("ours")
def test_numbers_that_are_not_finite_stay_in_their_channel():
    x = maps(2, 4, 5, 5)
    x[0, 1, 0, 0] = float("nan")
    result = functional.batch_norm(x, None, None, training=True)
    assert result[:, 1].isnan().all()
    assert result[:, [0, 2, 3]].isfinite().all()


@pytest.mark.usefixtures("ours")
def test_a_channel_of_one_number_has_no_variance():
    x = torch.full((4, 3, 8, 8), 7.25).to(memory_format=torch.channels_last)
    running = [torch.zeros(3), torch.ones(3)]
    result = functional.batch_norm(x, *running, training=True, momentum=1.0)
    assert not result.any()
    assert running[0].tolist() == [7.25] * 3
    assert running[1].tolist() == [0.0] * 3


@pytest.mark.usefixtures("ours")
def test_gradients_are_differentiated_in_turn():
    x, (weight, bias) = maps(2, 3, 4, 4).requires_grad_(), affine(3)

    def penalty(x):
        (first,) = torch.autograd.grad(
            functional.batch_norm(x, None, None, weight, bias, True).square().sum(), x, create_graph=True
        )
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(
        penalty(x), penalty(x.detach().contiguous().requires_grad_()), rtol=1e-3, atol=1e-3
    )


@pytest.mark.slow
@pytest.mark.usefixtures("ours")
def test_what_is_compiled_has_kernels_of_its_own():
    x, (weight, bias) = maps(2, 4, 5, 5), affine(4)

    def norm(x):
        return functional.batch_norm(x, None, None, weight, bias, True)

    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    try:
        found = compiled(x.clone().requires_grad_())
    finally:
        torch.compiler.reset()
    assert type(found.grad_fn).__name__ != "_NormBackward"
    torch.testing.assert_close(found, norm(x))


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_known_to_pytorchs_tools(dtype):
    x = maps(2, 4, 5, 5, dtype=dtype)
    for weight, bias in (affine(4), (None, None)):
        for running in ((torch.zeros(4), torch.ones(4)), (None, None)):
            arguments = (x, weight, bias, *running, 0.1, 1e-5)
            torch.library.opcheck(torch.ops.vivace.batch_norm_nhwc.default, arguments)
        _, mean, rstd = torch.ops.vivace.batch_norm_nhwc(*arguments)
        for gradient in (maps(2, 4, 5, 5, seed=1), maps(2, 4, 5, 5, seed=1).contiguous()):
            for for_input in (True, False):
                back = (gradient, x, weight, mean, rstd, for_input)
                torch.library.opcheck(torch.ops.vivace.batch_norm_nhwc_backward.default, back)


def test_torchs_function_comes_back_with_the_last_that_ends():
    own = torch.batch_norm
    with nhwc_norm.exactly():
        with nhwc_norm.exactly():
            assert torch.batch_norm is nhwc_norm.batch_norm
        assert torch.batch_norm is nhwc_norm.batch_norm
    assert torch.batch_norm is own


def test_somebody_elses_function_stays_and_calls_what_it_found():
    own, x = torch.batch_norm, maps(2, 4, 5, 5)
    try:
        with nhwc_norm.exactly():
            found = torch.batch_norm
            torch.batch_norm = other = lambda *arguments: found(*arguments)
        assert torch.batch_norm is other
        with nhwc_norm.exactly():
            functional.batch_norm(x, None, None, training=True)
        assert torch.batch_norm is other
    finally:
        torch.batch_norm = own
    result = nhwc_norm.batch_norm(x.requires_grad_(), None, None, None, None, True, 0.1, 1e-5, False)
    assert type(result.grad_fn).__name__ == "NativeBatchNormBackward0"  # nobody wants it now


def test_several_threads_may_begin_and_end():
    own = torch.batch_norm

    def turn():
        for _ in range(200):
            with nhwc_norm.exactly():
                pass

    threads = [threading.Thread(target=turn) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert torch.batch_norm is own


def kept_of(x, moves, has_affine):
    """What a call saves for its backward pass, the versions of its statistics, and its result."""
    running = (torch.full((4,), 2.0), torch.full((4,), 3.0)) if moves else (None, None)
    weight, bias = (one.requires_grad_() for one in affine(4)) if has_affine else (None, None)
    kept = []

    def keep(tensor):
        kept.append(tensor.clone())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = functional.batch_norm(x, *running, weight, bias, True, momentum=0.0)
    return kept, [one._version for one in running if one is not None], result


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("has_affine", [True, False])
def test_it_saves_what_torch_saves_in_the_same_order(moves, has_affine):
    """What is recomputed without it fills the places of what was saved with it."""
    x, gradient = maps(2, 4, 5, 5).requires_grad_(), maps(2, 4, 5, 5, seed=1)
    theirs, versions, _ = kept_of(x, moves, has_affine)
    with nhwc_norm.exactly():
        mine, own_versions, result = kept_of(x, moves, has_affine)
    assert type(result.grad_fn).__name__ == "_NormBackward"
    assert own_versions == versions
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.autograd.grad(result, x, gradient)[0].isfinite().all()


@pytest.mark.parametrize("again_exactly", [True, False])
def test_what_a_checkpoint_runs_again_may_be_either(again_exactly):
    x, net, none = maps(4, 3, 8, 8), nn.BatchNorm2d(3), contextlib.nullcontext

    def gradients(first, again):
        leaf = x.clone().requires_grad_()
        with first:
            result = checkpoint(net, leaf, use_reentrant=False)
        net.zero_grad()
        with again:
            (result * x.square()).sum().backward()
        return [leaf.grad, net.weight.grad, net.bias.grad]

    wanted = gradients(none(), none())
    found = gradients(nhwc_norm.exactly(), nhwc_norm.exactly() if again_exactly else none())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("ours")
def test_one_norm_sees_maps_of_two_sizes_and_modes(monkeypatch):
    monkeypatch.setattr(nhwc_norm, "FEWEST_PIXELS", 100)
    norm, found = nn.BatchNorm2d(3), []
    for x in (maps(2, 3, 5, 5), maps(2, 3, 9, 9), maps(2, 3, 9, 9).contiguous()):
        found.append(norm(x.requires_grad_()).square().mean())
    norm.eval()
    found.append(norm(maps(2, 3, 9, 9).requires_grad_()).mean())
    sum(found).backward()
    assert norm.weight.grad.isfinite().all()


@pytest.mark.usefixtures("ours")
def test_wrong_sizes_are_torchs_errors():
    x = maps(2, 64, 4, 4)
    with pytest.raises(RuntimeError, match="weight should contain 64 elements not 8"):
        functional.batch_norm(x, None, None, *affine(8), True)
    with pytest.raises(RuntimeError, match="running_mean should contain 64 elements not 8"):
        functional.batch_norm(x, torch.zeros(8), torch.ones(8), training=True)
    with pytest.raises((ValueError, RuntimeError)):
        functional.batch_norm(x, torch.zeros(64), None, training=True)


@pytest.mark.filterwarnings("ignore")  # of what is deprecated, and of what a trace keeps
@pytest.mark.usefixtures("ours")
def test_traces_and_frozen_inputs():
    net = nn.BatchNorm2d(3)
    traced = torch.jit.trace(net, maps(2, 3, 5, 5), check_trace=False)
    assert "batch_norm" in str(traced.inlined_graph)
    assert "PythonOp" not in str(traced.inlined_graph)
    net(maps(2, 3, 5, 5)).square().sum().backward()  # of whose input no gradient is wanted
    assert net.weight.grad is not None


@pytest.mark.usefixtures("ours")
def test_a_border_unlike_the_rest_costs_no_digits():
    x, gradient, (weight, bias) = maps(16, 4, 64, 64), maps(16, 4, 64, 64, seed=1), affine(4)
    x[:, :, :, ::64] += 20.0
    _, found = stepped(x, gradient, weight, bias, momentum=1.0)
    _, exact = stepped(x.double(), gradient, weight.double(), bias.double(), momentum=1.0)
    assert max(off(found[4:], exact[4:])) < 3e-7


class Normed(nn.BatchNorm2d):
    """As libraries have them: with a forward of its own, which calls the function."""

    def forward(self, x):
        x = functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
        )
        return functional.relu(x)


def model(norm):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.Conv2d(8, 8, 3, padding=1), norm(8)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def opened(net, own_step=False):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    def step(batch):
        optimizer.zero_grad()
        found = loss(net, batch)
        found.backward()
        optimizer.step()
        return found

    how = (
        {"step": step, "models": [net]} if own_step else {"model": net, "optimizer": optimizer, "loss": loss}
    )
    return attach(Plan([find("channels_last")()]), **how)


@pytest.mark.parametrize("own_step", [False, True])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, Normed])
def test_channels_last_sums_exactly_while_it_acts(norm, own_step, monkeypatch):
    own, net = torch.batch_norm, model(norm)
    calls = []
    monkeypatch.setattr(nhwc_norm, "_run", _counting(nhwc_norm._run, calls))
    batch = torch.randn(4, 3, 6, 6), torch.zeros(4, dtype=torch.int64)
    with opened(net, own_step) as session:
        session.step(batch)
        between = torch.batch_norm
    assert calls == ["forward", "forward", "backward", "backward"]
    assert between is own  # who scripts or traces a model finds torch's function
    assert torch.batch_norm is own


def _counting(run, calls):
    def counted(name, *given):
        calls.append(name)
        run(name, *given)

    return counted


def confirmed(session):
    """What channels_last says that it did in a step."""
    seen = observe(session, [(torch.randn(4, 3, 6, 6), torch.zeros(4, dtype=torch.int64))])
    return find("channels_last")().confirm(seen, seen)


def test_it_is_told_how_batchnorms_were_summed(monkeypatch):
    with opened(model(nn.BatchNorm2d)) as session:
        assert confirmed(session) == "2 convolutions in channels-last order; 2 BatchNorms summed by C code"
        monkeypatch.setattr(nhwc_norm, "FEWEST_PIXELS", 10**6)
        assert confirmed(session) == "2 convolutions in channels-last order"


def test_without_a_compiler_channels_last_says_how_it_sums(monkeypatch):
    def lacking(source):
        raise OSError("gcc is needed")

    monkeypatch.setattr(nhwc_norm, "compiled", lacking)
    with opened(model(nn.BatchNorm2d)) as session:
        told = "BatchNorms are summed by PyTorch, inexactly over many pixels: gcc is needed"
        assert confirmed(session) == f"2 convolutions in channels-last order; {told}"


@pytest.mark.parametrize("vectors", ["-march=native", "-march=native -mno-avx512bw", "-mno-avx"])
def test_the_kernels_read_and_write_their_own_memory_alone(vectors, tmp_path):
    """With sanitizers, in a program of its own."""
    made, program = tmp_path / "edges", Path(__file__).with_name("nhwc_norm_edges.c")
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Wno-psabi"]
    flags = ["-O1", "-g", *vectors.split(), "-fopenmp", f"-I{nhwc_norm.SOURCE.parent}", *checks]
    command = ["gcc", *flags, str(program), "-o", str(made), "-lm"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr or "unrecognized" in built.stderr:
        pytest.skip("this compiler has no sanitizers, or other vectors")
    assert (built.returncode, built.stderr) == (0, "")
    surroundings = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # which needs rights that not all have
    done = subprocess.run([str(made)], env=surroundings, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
