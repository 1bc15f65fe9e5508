import dataclasses
import math
import os
import signal
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.job import Job
from vivace.machine import Device, Machine
from vivace.mechanisms import c_code
from vivace.observing.observe import observe
from vivace.operators import LEAST_MASK as LEAST
from vivace.plan import Plan
from vivace.session.opening import attach, start
from vivace.technique import registry
from vivace.techniques.vectorized_dropout import masks
from vivace.testing import TINY_JOBS, TechniqueContract
from vivace.testing.contract import plain_profile
from vivace.verifying.draws import LogicalDraws
from vivace.verifying.masks import Kept

VectorizedDropout = registry.find("vectorized_dropout")


def draws_alike():
    try:
        return masks.draws_alike()
    except OSError:
        return False


alike = pytest.mark.skipif(
    not draws_alike(), reason="PyTorch draws other masks here, as on Intel's processors, or there is no gcc"
)
NO_GCC = not any(map(c_code.shutil.which, ("gcc", "g++")))
needs_gcc = pytest.mark.skipif(NO_GCC, reason="there is no gcc")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="acts on a CPU")


def dropping(width=512):
    """A perceptron whose dropout takes `width` numbers for each of 16 samples, on three batches."""
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 8, generator=numbers), torch.randint(4, (48,), generator=numbers))
    return Job(
        model=lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 4)),
        data=lambda: DataLoader(data, batch_size=16, shuffle=True),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    )


def dropping_maps():
    """Dropout on feature maps in channels-last order and on those of bfloat16."""

    def model():
        layers = [nn.Conv2d(3, 16, 3), nn.Dropout(0.2), nn.Flatten(), nn.Linear(16 * 36, 4)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return functional.cross_entropy(model(batch[0]), batch[1])

    images = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    batch = [images.contiguous(memory_format=torch.channels_last), torch.arange(16) % 4]
    return dataclasses.replace(dropping(), model=model, loss=loss, data=lambda: [batch] * 3)


@pytest.mark.usefixtures("one_thread")
class TestVectorizedDropout(TechniqueContract):
    technique = VectorizedDropout
    jobs: ClassVar = {**TINY_JOBS, "dropping": dropping, "dropping_maps": dropping_maps}


@pytest.fixture
def told():
    """While the test runs masks are drawn in blocks; how many numbers each has."""
    if NO_GCC:
        pytest.skip("there is no gcc")
    found = []
    end = masks.begin(found.append)
    yield found
    end()


@pytest.fixture
def allowed(monkeypatch):
    """The technique acts on any processor, whatever its torch draws."""
    if NO_GCC:
        pytest.skip("there is no gcc")
    monkeypatch.setattr(masks, "draws_alike", lambda: True)


@pytest.fixture
def in_blocks(monkeypatch):
    """A function: are masks drawn in blocks now?"""
    calls, draw = [], masks.draw
    monkeypatch.setattr(masks, "draw", lambda *arguments: calls.append(1) or draw(*arguments))

    def ask():
        calls.clear()
        torch.empty(LEAST).bernoulli_(0.5)
        return bool(calls)

    return ask


def opened(model=None, plan=None):
    model = model or nn.Linear(2, 2)
    return attach(
        Plan.from_dict(plan or {"vectorized_dropout": {}}),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch).mean(),
    )


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


# The same numbers

BEFORE = {  # one, two and two 32-bit words a number, and normal numbers may leave one of a pair behind
    "randint": lambda count, source: torch.randint(9, (count,), generator=source),
    "rand": lambda count, source: torch.rand(count, dtype=torch.float64, generator=source),
    "randn": lambda count, source: torch.randn(count, generator=source),
}
COUNTS = st.one_of(
    st.integers(1, 3000),
    st.builds(
        lambda block, times, more: block * times + more,
        st.sampled_from([312, 624]),
        st.integers(1, 9),
        st.integers(-2, 2),
    ),
)
PROBABILITIES = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, 0.9, 2.0**-53, 1.0 - 2.0**-53, 1e-300, 5e-324]), st.floats(0.0, 1.0)
)
FORMS = {
    "contiguous": lambda count, dtype: torch.empty(count, dtype=dtype),
    "channels_last": lambda count, dtype: torch.empty(
        (2, 3, 1 + count // 30, 5), dtype=dtype, memory_format=torch.channels_last
    ),
    "channels_last_3d": lambda count, dtype: torch.empty(
        (2, 3, 2, 1 + count // 60, 5), dtype=dtype, memory_format=torch.channels_last_3d
    ),
}


@alike
@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    before=st.lists(st.tuples(st.sampled_from(sorted(BEFORE)), st.integers(1, 700)), max_size=3),
    count=COUNTS,
    probability=PROBABILITIES,
    dtype=st.sampled_from(sorted(masks.ONES, key=str)),
    form=st.sampled_from(sorted(FORMS)),
    default=st.booleans(),
)
def test_it_draws_what_torch_draws_and_leaves_its_state(
    seed, before, count, probability, dtype, form, default
):
    with torch.random.fork_rng(devices=[]):
        source = torch.default_generator if default else torch.Generator()
        source.manual_seed(seed)
        for name, numbers in before:
            BEFORE[name](numbers, source)
        begun = source.get_state()
        expected = FORMS[form](count, dtype).bernoulli_(probability, generator=source)
        after = source.get_state()
        source.set_state(begun)
        found = FORMS[form](count, dtype)
        masks.draw(found, probability, source)
        assert torch.equal(found, expected)
        assert torch.equal(source.get_state(), after)
        following = torch.randn(3, generator=source)
        source.set_state(after)
        assert torch.equal(following, torch.randn(3, generator=source))


@alike
@pytest.mark.parametrize("seed", range(4))
def test_a_probability_that_is_a_number_drawn_is_not_above_it(seed):
    """And the next double above it is: of numbers below a half those are finer than what is drawn."""
    source = torch.Generator().manual_seed(seed)
    begun = source.get_state()
    numbers = torch.rand(100, dtype=torch.float64, generator=source)
    index = int((numbers < 0.25).nonzero()[0])
    number = float(numbers[index])
    for probability in (math.nextafter(number, 0.0), number, math.nextafter(number, 1.0)):
        source.set_state(begun)
        expected = torch.empty(100).bernoulli_(probability, generator=source)
        source.set_state(begun)
        found = torch.empty(100)
        masks.draw(found, probability, source)
        assert torch.equal(found, expected)
        assert found[index] == (probability > number)


def drawn(make, probability=0.3, source=None):
    """What `bernoulli_` makes of a tensor, and the state of the generator that it leaves."""
    source = source or torch.default_generator
    source.manual_seed(7)
    torch.randint(9, (3,), generator=source)
    more = {} if source is torch.default_generator else {"generator": source}
    mask = make()
    assert mask.bernoulli_(probability, **more) is mask
    return mask, source.get_state()


@alike
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("own", [False, True])
def test_bernoulli_itself_draws_so(form, own):
    def make():
        return FORMS[form](9_000, torch.float32)

    source = torch.Generator() if own else None
    expected, found = drawn(make, source=source), []
    end = masks.begin(found.append)
    try:
        assert same(drawn(make, source=source), expected)
    finally:
        end()
    assert found == [expected[0].numel()]


def test_who_holds_the_tensor_sees_that_it_changed(told):
    mask = torch.empty(LEAST)
    assert mask._version == 0
    mask.bernoulli_(0.5)
    assert (mask._version, told) == (1, [LEAST])


UNSUITED = {
    "gaps": lambda: torch.zeros(100, 200)[:, ::2],
    "rows with gaps": lambda: torch.zeros(100, 200)[:, :150],
    "transposed": lambda: torch.zeros(100, 200).t(),
    "another order": lambda: torch.zeros(20, 30, 40).permute(1, 0, 2),
    "int64": lambda: torch.zeros(9_000, dtype=torch.int64),
    "int32": lambda: torch.zeros(9_000, dtype=torch.int32),
    "int8": lambda: torch.zeros(9_000, dtype=torch.int8),
    "small": lambda: torch.zeros(LEAST - 1),
    "empty": lambda: torch.zeros(0),
    "one number": lambda: torch.zeros(()),
}


@pytest.mark.parametrize("name", UNSUITED)
def test_what_does_not_suit_goes_to_torch(name):
    expected, found = drawn(UNSUITED[name]), []
    end = masks.begin(found.append)
    try:
        assert same(drawn(UNSUITED[name]), expected)
    finally:
        end()
    assert found == []


@pytest.mark.parametrize("probability", [1.5, -0.1, float("nan")])
def test_a_probability_out_of_range_is_torchs_error(told, probability):
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="expects p to be in"):
        torch.empty(LEAST).bernoulli_(probability)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.empty(1).expand(LEAST).bernoulli_(0.5)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        torch.empty(LEAST, requires_grad=True).bernoulli_(0.5)
    assert told == []


def test_threads_that_draw_at_once_get_numbers_of_their_own(told):
    torch.manual_seed(3)
    expected = [torch.empty(20_000).bernoulli_(0.5) for _ in range(24)]
    after = torch.get_rng_state()
    torch.manual_seed(3)
    found, begun = [], threading.Barrier(4)

    def draw():
        begun.wait()
        found.extend([torch.empty(20_000).bernoulli_(0.5) for _ in range(6)])

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), after)
    left = [mask for mask in found if not any(torch.equal(mask, one) for one in expected)]
    assert not left
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_process_forked_while_a_thread_draws_can_draw(told):
    with masks._drawing:
        child = os.fork()
        if not child:
            signal.alarm(60)  # else it would wait for ever
            torch.empty(LEAST).bernoulli_(0.5)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_handler_that_draws_while_its_thread_does_gets_numbers_of_its_own(told, monkeypatch):
    torch.manual_seed(3)
    expected = [torch.empty(LEAST).bernoulli_(0.5) for _ in range(2)]
    after, found = torch.get_rng_state(), []
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not that of the tests
        signal.alarm(60)  # else it would wait for ever
        signal.signal(signal.SIGUSR1, lambda *_: found.append(torch.empty(LEAST).bernoulli_(0.5)))
        bytes_of, calls = masks._bytes_of, []

        def interrupted(state):
            calls.append(state)
            if len(calls) == 1:
                signal.raise_signal(signal.SIGUSR1)
            return bytes_of(state)

        monkeypatch.setattr(masks, "_bytes_of", interrupted)
        torch.manual_seed(3)
        found.append(torch.empty(LEAST).bernoulli_(0.5))
        os._exit(0 if same(found, expected) and torch.equal(torch.get_rng_state(), after) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def attention(x):
    return functional.scaled_dot_product_attention(x, x.flip(-1), x, dropout_p=0.2)


def recurrent(x):
    layers = nn.LSTM(8, 40, num_layers=2, dropout=0.3)
    for parameter in layers.parameters():
        nn.init.constant_(parameter, 0.1)
    return layers(x[0].float())[0]


CALLS = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "module": lambda x: nn.Dropout(0.1)(x),
    "in place": lambda x: functional.dropout(x.clone(), 0.5, inplace=True),
    "nothing left": lambda x: functional.dropout(x, 1.0),  # without a mask
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "dropout2d": lambda x: functional.dropout2d(x, 0.3),  # of few numbers
    "attention": attention,
    "bernoulli": lambda x: x * torch.bernoulli(torch.zeros_like(x), 0.4),
    "vmap": lambda x: torch.vmap(lambda row: functional.dropout(row, 0.3), randomness="different")(x),
    "lstm": recurrent,
}


def called(function, x):
    """Values, gradient and state of the generator."""
    torch.manual_seed(11)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    values = function(x)
    (gradient,) = torch.autograd.grad(values.square().sum(), x)
    return values, gradient, torch.get_rng_state()


@alike
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("form", ["float32", "bfloat16", "channels_last"])
def test_functions_modules_and_attention_give_the_same_bits(call, form):
    x = torch.randn(4, 32, 16, 8, generator=torch.Generator().manual_seed(0))
    x = x.bfloat16() if form == "bfloat16" else x
    x = x.to(memory_format=torch.channels_last) if form == "channels_last" else x
    expected = called(CALLS[call], x)
    with opened() as session:
        assert same(called(CALLS[call], x), expected)
        assert bool(session.build.notes["largest_mask"]) == (call not in ("dropout2d", "nothing left"))


# For how long


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("order", [1, -1])
def test_torch_draws_itself_again_once_all_sessions_have_ended(order, in_blocks):
    assert not in_blocks()
    first, second = (opened(), opened())[::order]
    assert in_blocks()
    first.close()
    assert in_blocks()
    second.close()
    assert not in_blocks()
    with opened():
        assert in_blocks()
    assert not in_blocks()


@pytest.mark.usefixtures("allowed")
def test_after_a_session_that_fails_in_opening_torch_draws_itself(in_blocks):
    with pytest.raises(Refused) as refused:
        opened(plan={"vectorized_dropout": {}, "conv_gemm": {}})
    assert refused.value.technique == "conv_gemm"
    assert not in_blocks()
    with opened():
        with pytest.raises(Refused):
            opened(plan={"vectorized_dropout": {}, "conv_gemm": {}})
        assert in_blocks()


@pytest.mark.usefixtures("allowed")
def test_a_kernel_that_cannot_be_exchanged_leaves_nothing_behind(monkeypatch, in_blocks):
    def exchanged(*_):
        raise Refused("no kernel of PyTorch's own can be exchanged")

    with monkeypatch.context() as patch:
        patch.setattr(masks._ours, "is_there", False)
        patch.setattr(masks, "exchange", exchanged)
        with pytest.raises(Refused, match=r"^vectorized_dropout: no kernel of PyTorch's own"):
            opened()
    with opened():
        assert in_blocks()
    assert not in_blocks()


@pytest.mark.usefixtures("allowed")
def test_a_session_counts_no_mask_of_an_earlier_one():
    with opened() as first:
        torch.empty(3 * LEAST).bernoulli_(0.5)
        with opened() as second:
            assert second.build.notes["largest_mask"] == 0
            torch.empty(LEAST).bernoulli_(0.5)
        torch.empty(2 * LEAST).bernoulli_(0.5)
    assert first.build.notes["largest_mask"] == 3 * LEAST
    assert second.build.notes["largest_mask"] == LEAST


# When it acts, and what it says


def watched(make, steps=None):
    job = make()
    with start(job, Plan([VectorizedDropout()]), inspect()) as session:
        seen = observe(session, list(session.batches(job.data()))[:steps])
        return VectorizedDropout().confirm(seen, seen), seen.notes


@on_cpu
@pytest.mark.usefixtures("allowed")
def test_it_confirms_by_the_masks_that_it_drew():
    sentence, notes = watched(dropping)
    assert sentence == "masks of up to 8,192 numbers drawn in blocks"
    assert repr(watched(dropping, steps=1)[1]) == repr(notes)  # by which equal trials are known


@on_cpu
@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("make", [TINY_JOBS["mlp"], lambda: dropping(width=255)])
def test_without_dropout_or_with_small_masks_it_changed_nothing(make):
    with pytest.raises(Refused, match=r"changed nothing: no mask of 4,096 numbers or more was drawn"):
        watched(make)
    assert watched(lambda: dropping(width=256))[0].startswith("masks of up to 4,096 ")


@pytest.fixture
def new_machine(monkeypatch, tmp_path):
    """Nothing is compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for known in (c_code.compiled, masks.draws_alike):
        known.cache_clear()
    yield tmp_path
    for known in (c_code.compiled, masks.draws_alike):
        known.cache_clear()


def test_without_a_compiler_it_is_refused(new_machine, monkeypatch, in_blocks):
    monkeypatch.setattr(c_code.shutil, "which", lambda _: None)
    sentence = r"^vectorized_dropout: its C code could not be compiled: gcc is needed, and neither gcc nor"
    with pytest.raises(Refused, match=sentence):
        opened()
    assert not in_blocks()


def test_a_compiler_that_fails_is_told(new_machine, monkeypatch, in_blocks):
    compiler = new_machine / "g++"
    compiler.write_text("#!/bin/sh\necho 'unknown option: -x' >&2\nexit 4\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(new_machine))
    with pytest.raises(Refused, match=r"could not be compiled: .*g\+\+ ends with 4: unknown option: -x"):
        opened()
    assert not in_blocks()


@needs_gcc
def test_a_cache_folder_that_cannot_be_written_is_told(new_machine, monkeypatch, in_blocks):
    (new_machine / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(new_machine / "file"))
    with pytest.raises(Refused, match=r"could not be compiled: .*Not a directory.*file/vivace"):
        opened()
    assert not in_blocks()


def test_where_torch_draws_otherwise_it_is_refused(monkeypatch, in_blocks):
    monkeypatch.setattr(masks, "draws_alike", lambda: False)
    with pytest.raises(
        Refused, match=r"^vectorized_dropout: PyTorch draws other masks than its own generator's here"
    ):
        opened()
    assert not in_blocks()


@needs_gcc
def test_it_draws_alike_wherever_torch_draws_masks_as_it_draws_numbers():
    """So a fault of its own does not pass for a processor of Intel's."""
    source = torch.Generator().manual_seed(2)
    numbers = torch.rand(99, dtype=torch.float64, generator=source)
    mask = torch.empty(99).bernoulli_(0.3, generator=source.manual_seed(2))
    assert draws_alike() == torch.equal(mask, (numbers < 0.3).float())


@pytest.mark.parametrize("kind", ["torch", "numbers", "state"])
def test_it_knows_whether_torch_draws_alike(kind, monkeypatch):
    def draw(mask, probability, generator):
        source = generator if kind != "state" else generator.clone_state()
        mask.bernoulli_(probability if kind != "numbers" else probability / 2, generator=source)

    monkeypatch.setattr(masks, "draw", draw)
    assert masks.draws_alike.__wrapped__() == (kind == "torch")


def test_it_is_proposed_where_masks_are_drawn_but_on_no_processor_of_intels():
    def proposed(name, **features):
        profile = plain_profile()
        profile = dataclasses.replace(profile, features=profile.features | features)
        return VectorizedDropout.candidates(profile, Machine((Device("cpu", name, 2**34),), 2, {}, {}))

    assert proposed("AMD EPYC 9B14") == [VectorizedDropout()]
    assert proposed("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz") == []
    assert proposed("AMD EPYC 9B14", mask_numbers=0) == []
    assert proposed("AMD EPYC 9B14", mask_numbers=LEAST - 1) == []
    old = dataclasses.replace(plain_profile(), features={})
    assert VectorizedDropout.candidates(old, inspect()) == []


def test_more_masks_may_gain_more():
    def most(**features):
        return VectorizedDropout.gain(dataclasses.replace(plain_profile(), features=features), inspect())[1]

    assert most() == most(mask_numbers=0) == 1
    assert most(mask_numbers=500_000) == pytest.approx(1 / 0.7)  # 3 of 10 ms
    assert most(mask_numbers=10**9) == pytest.approx(5)


# With what looks on


@alike
@on_cpu
def test_a_resumed_training_draws_as_one_that_was_not_stopped(tmp_path):
    plan = Plan([VectorizedDropout()])
    job = dataclasses.replace(dropping(), epochs=3)

    def weights(name):
        return torch.load(Path(tmp_path, name, "model.pt"), weights_only=True).values()

    vivace.train(job, out=tmp_path / "plain")
    vivace.train(job, plan, out=tmp_path / "whole", watch=0)
    assert vivace.train(job, plan, out=tmp_path / "parts", watch=0, max_steps=4).steps == 4
    run = vivace.train(job, plan, out=tmp_path / "parts", watch=0, resume=True)
    assert (run.resumed_from_step, run.steps) == (4, 9)
    assert same(weights("whole"), weights("plain"))
    assert same(weights("parts"), weights("plain"))


def test_the_verifier_keeps_its_masks(told):
    with Kept() as kept:
        values = functional.dropout(torch.ones(2, 3, 40, 50), 0.3)
        functional.dropout(torch.ones(40, 50), 0.3)
    assert told == [12_000]
    (first, _), places = kept.pieces[0], kept.counted.places
    assert (first.kind, places, kept.hidden) == ("masks", (12_000, 2_000), "")
    assert torch.equal(first.numbers != 0, values != 0)


@pytest.mark.parametrize("form", ["channels_last", "bfloat16"])
def test_the_verifier_has_it_draw_in_logical_order(told, form):
    def mask(x):
        torch.manual_seed(5)
        with LogicalDraws() as draws:
            return functional.dropout(x, 0.3) != 0, draws.rearranged

    plain = torch.ones(2, 3, 40, 50)
    other = plain.bfloat16() if form == "bfloat16" else plain.to(memory_format=torch.channels_last)
    (expected, as_it_is), (found, rearranged) = mask(plain), mask(other)
    assert told == [12_000] * 2
    assert torch.equal(found, expected)
    assert (as_it_is, rearranged) == (False, True)


@alike
@on_cpu
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("beside", [{}, {"bf16_autocast": {}}])
def test_a_training_is_watched_with_its_masks(beside, tmp_path, monkeypatch):
    calls, draw = [], masks.draw
    monkeypatch.setattr(masks, "draw", lambda *arguments: calls.append(1) or draw(*arguments))
    plan = Plan.from_dict({"vectorized_dropout": {}, **beside})
    job = dataclasses.replace(dropping(), epochs=4)
    run = vivace.train(job, plan, out=tmp_path / "run", watch=1e6)
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert run.watched["steps"] >= 8, run.watched["sentence"]
    assert len(calls) > 12  # those of the repetitions, too
