"""The memory budget "auto" on a GPU."""

import json

FREE = "from vivace.tuning.budget import free_bytes; print(free_bytes())"


def test_free_memory_is_what_cuda_says(stand_in):
    """NVML, which counts GPUs otherwise than CUDA and knows no parts of them, would say 1 GiB less here."""
    assert int(stand_in.python(FREE, gib=40)) == 40 * 2**30


def test_where_cuda_does_not_start_the_budget_says_so(stand_in, tmp_path):
    words = ("tune", "job.py:job", "--memory", "auto", "--out", tmp_path, "--json")
    done = stand_in.vivace(*words, start_error=802)
    assert done.returncode == 2
    assert "Error 802: system not yet initialized" in json.loads(done.stdout)["error"]["message"]
