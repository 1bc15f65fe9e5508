import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vivace.memory.caching import MIB, CachingAllocator, simulate


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # less than 1 MiB is left, which is not split off
        (14 * MIB + 1, 14 * MIB + 512, 16 * MIB),
    ],
)
def test_one_size(num_bytes, allocated, reserved):
    allocator = CachingAllocator()
    allocator.allocate(0, num_bytes)
    assert sum(block.size for block in allocator._used.values()) == allocated
    assert simulate([(0, num_bytes)]) == allocator.reserved == reserved


def test_freed_neighbours_join_and_serve_a_larger_size():
    moves = [(key, 5 * MIB) for key in range(4)] + [(1, -1), (2, -1), (4, 10 * MIB - 512)]
    assert simulate(moves) == 20 * MIB
    # Two halves that are not neighbours leave a hole each: fragmentation.
    moves = [(key, 5 * MIB) for key in range(4)] + [(0, -1), (2, -1), (4, 9 * MIB)]
    assert simulate(moves) == 40 * MIB


def test_the_smallest_block_that_fits_is_taken():
    allocator = CachingAllocator()
    for key, size in enumerate((30, 12, 20)):
        allocator.allocate(key, size * MIB)
    for key in (0, 1, 2):
        allocator.free(key)
    allocator.allocate(3, 11 * MIB + MIB // 2)
    allocator.allocate(4, 20 * MIB)
    allocator.allocate(5, 30 * MIB)
    assert allocator.reserved == 62 * MIB


def test_of_equal_blocks_that_of_the_oldest_segment_is_taken_whatever_the_process_did_before():
    allocator = CachingAllocator()
    for key in range(3):
        allocator.allocate(key, 30 * MIB)
    for key in (2, 0, 1):
        allocator.free(key)
    allocator.allocate(3, 29 * MIB + 1)  # the whole first segment: less than 1 MiB is not split off
    allocator.allocate(4, 20 * MIB)  # the second
    for key, expected in ((3, 0), (4, 30 * MIB)):
        assert allocator._used[key].address == expected


def test_a_stream_gets_no_memory_of_another_one():
    moves = [(0, 15 * MIB), (0, -1), (1, 15 * MIB)]
    assert simulate(moves) == 16 * MIB
    assert simulate(moves, {1}) == 32 * MIB


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40 * MIB), st.booleans()), max_size=60))
@settings(max_examples=100, deadline=None)
def test_what_is_handed_out_is_reserved_and_comes_back_whole(steps):
    allocator, live = CachingAllocator(), {}
    for key, size, free in steps:
        if free or key in live:
            allocator.free(key)
            live.pop(key, None)
        else:
            allocator.allocate(key, size)
            live[key] = size
        assert allocator._used.keys() == live.keys()
        assert all(block.size >= live[key] for key, block in allocator._used.items())
        assert sum(block.size for block in allocator._used.values()) <= allocator.reserved
    for key in live:
        allocator.free(key)
    assert not allocator._used
    before = allocator.reserved
    whole = [block for pool in allocator._free.values() for _, _, block in pool]
    assert sum(block.size for block in whole) == before
    assert all(block.before is None and block.after is None for block in whole)
