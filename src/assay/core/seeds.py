"""Independent random streams named by what they are for: no global seed, the same in every process."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

Name = str | int


def _hashed(seed: int, names: tuple[Name, ...]) -> int:
    # repr keeps 1 and "1" apart, and the tuple keeps ("ab", "c") and ("a", "bc") apart.
    text = repr((int(seed), *(n if isinstance(n, str) else int(n) for n in names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def generator(seed: int, *names: Name, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator for one purpose.

    Args:
        seed: the user's seed.
        names: what the stream is for, such as `("reservoir", layer)`; other names give an unrelated stream.
        device: where its draws are made.

    >>> import torch
    >>> a, b = (torch.rand(3, generator=generator(0, "noise")) for _ in range(2))
    >>> torch.equal(a, b)
    True
    """
    import torch

    # manual_seed takes at most 2^63 - 1 on every backend.
    return torch.Generator(device=device).manual_seed(_hashed(seed, names) >> 1)


def rng(seed: int, *names: Name) -> np.random.Generator:
    """A NumPy generator for one purpose; see `generator`.

    >>> rng(0, "split").integers(100) == rng(0, "split").integers(100)
    np.True_
    """
    return np.random.default_rng(_hashed(seed, names))


def spawn(seed: int, n: int) -> list[int]:
    """`n` seeds for independent children, each below 2^31 so that every library takes it.

    The first seeds do not depend on `n`.

    >>> spawn(0, 2) == spawn(0, 5)[:2]
    True
    """
    return [_hashed(seed, ("spawn", i)) >> 33 for i in range(n)]
