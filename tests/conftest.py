"""What every test stands on: no network, and the same random numbers whichever tests run."""

from __future__ import annotations

import os

import pytest
import torch

# transformers reads these when it is imported, which is after this file.
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # HF_HUB_OFFLINE=0 pytest -m hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Random weights and inputs of a test do not depend on the tests before it."""
    torch.manual_seed(0)
