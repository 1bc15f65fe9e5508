"""Random streams go on where they were, with the second of two normal numbers that NumPy keeps."""

import numpy
import pytest

from vivace.tensors.randomness import SeededStreams, Streams, capture, from_plain, restore, to_plain
from vivace.torch_internals import numbers


def normals(count):
    return [float(numpy.random.normal()) for _ in range(count)]


@pytest.fixture(params=[True, False], ids=["without the bits", "with all of the state"])
def either_way(request, monkeypatch):
    monkeypatch.setattr(numbers, "_can_leave_out_bits", request.param)


@pytest.mark.parametrize("kind", [Streams, SeededStreams])
@pytest.mark.parametrize("drawn", [0, 1, 2, 3])
@pytest.mark.usefixtures("either_way")
def test_the_main_stream_goes_on_after_others(kind, drawn):
    numpy.random.seed(3)
    wanted = normals(drawn + 3)
    numpy.random.seed(3)
    found = normals(drawn)
    with kind(1):
        normals(3)
    assert found + normals(3) == wanted


@pytest.mark.parametrize("drawn", [1, 2])
@pytest.mark.usefixtures("either_way")
def test_own_streams_go_on_where_they_were_left(drawn):
    own = Streams(7)
    with own:
        wanted = normals(drawn + 2)
    own, numpy_before = Streams(7), numpy.random.get_state()[1].tolist()
    found = []
    for count in (drawn, 2):
        with own:
            found += normals(count)
        normals(1)
    assert found == wanted
    assert numpy.random.get_state()[1].tolist() == numpy_before


def test_seeded_streams_begin_anew_each_time():
    own = SeededStreams(7)
    with own:
        first = normals(3)
    with own:
        assert normals(3) == first


def test_a_captured_state_holds_the_second_normal_number():
    numpy.random.seed(3)
    normals(1)
    state = to_plain(capture())
    wanted = normals(3)
    restore(from_plain(state))
    assert normals(3) == wanted
