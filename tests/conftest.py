import pytest
import torch


@pytest.fixture
def one_thread():
    """Tiny operators on several threads wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
