"""Shared by all tests: where the optional real data lies, one thread per worker, reproducible property tests."""

from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# The same examples on every run, so that a red test is a change of ours; `--hypothesis-profile=explore` draws new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("fixed")

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
