"""Random streams that outlive the rank to which they belong."""

import random
from types import SimpleNamespace

import numpy
import torch

from vivace.tensors.randomness import capture, from_plain, restore
from vivace.training.streams import StreamBoard


def drawn():
    return random.random(), float(numpy.random.rand()), float(torch.rand(1))


def test_another_rank_reads_the_streams_of_the_last_step_and_of_the_one_to_come():
    class Ranks:
        watch, rank = object(), 0

        def gather(self, own):
            if own is not None:
                self.place = own
                other._others[0] = mapped(own)
            return [own, own]

    def mapped(place):
        from vivace.training import streams

        return streams._opened(f"/proc/{place[1]}/fd/{place[2]}")

    other = StreamBoard(SimpleNamespace(watch=None))
    board = StreamBoard(Ranks())
    assert other.read(0, 1) is None
    for step in (1, 2, 3):
        board.write(step, capture())
        wanted = drawn()
    assert other.read(0, 1) is None  # two notes are kept
    assert other.read(0, 2) is not None
    restore(from_plain(other.read(0, 3)))
    assert drawn() == wanted
    board.foresee(capture())
    assert other.read(0, 4) is not None
    drawn()
    board.write(4, capture())  # the update drew, so nothing is foreseen any more
    board.foresee(capture())
    assert other.read(0, 5) is None
    assert other.read(1, 4) is None
