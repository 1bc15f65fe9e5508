"""The memory budget "auto" on a GPU."""

FREE = "from vivace.tune.budget import free_bytes; print(free_bytes())"


def test_free_memory_is_what_cuda_says(stand_in):
    """NVML, which counts GPUs otherwise than CUDA and knows no parts of them, would say 1 GiB less here."""
    assert int(stand_in.python(FREE, gib=40)) == 40 * 2**30
