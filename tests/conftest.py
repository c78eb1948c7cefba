"""Shared by all tests: where the optional real data lies, and one thread per worker."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture
def shared_data():
    """Look up a real data set by folder name; skips where the data is absent."""

    def find(name: str) -> Path:
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"the optional data set {name!r} is not on this machine")
        return path

    return find
