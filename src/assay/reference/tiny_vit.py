"""A small vision transformer for scikit-learn's handwritten digits, with parts whose role is known.

`ViTForImageClassification` with 4 layers of 4 heads, width 64 and 136,138 parameters, trained from scratch by
`scripts/make_tiny_vit.py` on three of every four of the 1,797 digits (8 by 8 pixels, patches of 2 by 2); it names
98.4 % of the fourth ones rightly. Layers, heads and channels are counted from 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from assay.core.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

KIND = "checkpoint"
ABOUT = "a digit classifier (ViT, 136,138 parameters) with a planted dead head and a planted dead channel"

#: What was planted before training and held there:
#:
#: - `zero_value_head` (layer, head): its value rows and biases are zero, so it adds nothing, wherever it attends.
#: - `dead_channel` (layer, channel): a feed-forward channel whose incoming and outgoing weights are zero.
GROUND_TRUTH: dict[str, tuple[int, int]] = {
    "zero_value_head": (2, 1),
    "dead_channel": (1, 77),
}

#: SHA-256 of the shipped `model.safetensors`.
WEIGHTS_SHA256 = "e9234736b77cf22e5ecaeffa27074f9d1515b20845d17b8639b976cb31a193c6"


def load() -> Path:
    """The checkpoint's Hugging Face directory.

    Example:
        >>> sorted(p.name for p in load().iterdir())
        ['config.json', 'model.safetensors']
    """
    return Path(__file__).parent / "data" / "tiny_vit"


def _split(split: str) -> slice | list[int]:
    if split == "test":
        return slice(3, None, 4)
    if split == "train":
        return [i for i in range(1797) if i % 4 != 3]
    raise InputError(f"no split of the digits is called {split!r}: there are 'train' and 'test'")


def images(split: Literal["train", "test"] = "test") -> Float[Tensor, "images 1 8 8"]:
    """The digits as the model takes them, its `pixel_values`.

    Args:
        split: "test" for the 449 digits that it was not trained on, "train" for the 1,348 others.

    Returns:
        Ink from -1 (none) to 1 (full).

    Raises:
        InputError: there is no split of that name.

    Example:
        >>> images().shape
        torch.Size([449, 1, 8, 8])
    """
    import torch
    from sklearn.datasets import load_digits

    pixels = torch.from_numpy(load_digits().images[_split(split)]).float()
    return (pixels / 8 - 1).unsqueeze(1)


def labels(split: Literal["train", "test"] = "test") -> Int[Tensor, "images"]:
    """The digit, 0 to 9, that each of `images(split)` shows.

    Raises:
        InputError: there is no split of that name.
    """
    import torch
    from sklearn.datasets import load_digits

    return torch.from_numpy(load_digits().target[_split(split)]).long()
