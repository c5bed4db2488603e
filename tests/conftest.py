"""What every test stands on: no network, and the same random numbers whichever tests run.

Little is imported here: the process that hands tests out to others waits for this file, and runs
none of them.
"""

from __future__ import annotations

import gc
import os

import pytest

# transformers reads these when it is imported, which is after this file.
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # HF_HUB_OFFLINE=0 pytest -m hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

gc.disable()  # what is imported and collected stays: looking through it again and again is slow


def pytest_collection_finish() -> None:
    """All that there is now outlives every test; most of what comes goes without being sought."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 5)
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Random weights and inputs of a test do not depend on the tests before it."""
    import torch

    torch.default_generator.manual_seed(0)  # torch.manual_seed also notes who called, for GPUs
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Toys are too small to share out; more threads only wait for each other."""
    import torch

    torch.set_num_threads(1)
