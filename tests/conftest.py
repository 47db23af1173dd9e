"""One thread in every test: numbers are compared, and two workers share two cores."""
from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    """Torch keeps the thread count a process started with; set it again for tests that changed it."""
    import torch

    torch.set_num_threads(1)
    yield
