"""A small diffusion transformer that draws scikit-learn's handwritten digits, class by class.

4 blocks with adaptive layer norms (adaLN), 4 heads, width 64, one token a pixel, 64 tokens; trained from scratch by
`scripts/make_tiny_dit.py` with flow matching on three of every four of the 1,797 digits. It predicts the velocity from
noise (time 0) to an image (time 1).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from assay.core.errors import CheckpointError, InputError

KIND = "checkpoint"
ABOUT = "a diffusion transformer that draws digits (320,385 parameters, 64 tokens)"
MODEL_TYPE = "tiny_dit"

#: SHA-256 of the shipped `model.safetensors`.
WEIGHTS_SHA256 = "b178c9f0bf05ce158d8b97754d082a8b4afd29d167ca8620958ca9bd6886d0bd"

# Far above what can be sampled from on a CPU, far below what a hostile file could ask for.
_MOST = 1 << 14


@dataclass(frozen=True)
class DiTConfig:
    """The sizes of a `TinyDiT`.

    Attributes:
        image_size: pixels on a side; each is a token.
        hidden_size: width of a token.
        num_hidden_layers: blocks.
        num_attention_heads: heads of a block.
        num_labels: classes; one more embedding stands for "no class".
    """

    image_size: int = 8
    hidden_size: int = 64
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_labels: int = 10


class Attention(nn.Module):
    """Self-attention of all tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        """What the tokens take from each other."""
        mixed = F.scaled_dot_product_attention(*self._project(x))
        return self.out(mixed.transpose(1, 2).flatten(2))

    def attend(
        self, x: Float[Tensor, "batch tokens width"]
    ) -> tuple[Float[Tensor, "batch tokens width"], Float[Tensor, "batch tokens"]]:
        """The same, and the attention that each token receives from all, averaged over the heads."""
        q, k, v = self._project(x)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), weights.mean(1).sum(1)


class Block(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the time and the class."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 6 * width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(
        self, x: Float[Tensor, "batch tokens width"], condition: Float[Tensor, "batch width"]
    ) -> Float[Tensor, "batch tokens width"]:
        """The tokens after the block."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        x = x + gate_a * self.attention(_norm(x) * (1 + scale_a) + shift_a)
        return x + gate_m * self.mlp(_norm(x) * (1 + scale_m) + shift_m)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


class TinyDiT(nn.Module):
    """A diffusion transformer with one token a pixel.

    Args:
        config: its sizes.
    """

    def __init__(self, config: DiTConfig = DiTConfig()) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.patch = nn.Linear(1, width)
        self.position = nn.Parameter(torch.randn(config.image_size**2, width) * 0.1)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(config.num_labels + 1, width)
        self.blocks = nn.ModuleList(Block(width, config.num_attention_heads) for _ in range(config.num_hidden_layers))
        self.modulation = nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, 1)
        # A block, and the whole, starts as the identity (adaLN-Zero).
        modulations = [m for name, m in self.named_modules() if name.endswith("modulation")]
        for parameter in (p for layer in (*modulations, self.head) for p in layer.parameters()):
            nn.init.zeros_(parameter)

    def forward(
        self, x: Float[Tensor, "batch 1 side side"], t: Float[Tensor, "batch"], label: Int[Tensor, "batch"]
    ) -> Float[Tensor, "batch 1 side side"]:
        """The velocity at `x`.

        Args:
            x: images between noise and ink.
            t: time of each, from 0 (noise) to 1 (image).
            label: class of each; `num_labels` for none.
        """
        tokens = self.patch(x.flatten(1).unsqueeze(-1)) + self.position
        condition = F.silu(self.time(_sinusoid(t, self.config.hidden_size)) + self.label(label))
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = self.modulation(condition).unsqueeze(1).chunk(2, -1)
        return self.head(_norm(tokens) * (1 + scale) + shift).view_as(x)


def _sinusoid(t: Tensor, width: int) -> Tensor:
    frequencies = torch.exp(torch.linspace(0, 6, width // 2, dtype=t.dtype, device=t.device))
    angles = t[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1)


def load() -> Path:
    """The directory with the model's configuration and weights.

    Example:
        >>> sorted(p.name for p in load().iterdir())
        ['config.json', 'model.safetensors']
    """
    return Path(__file__).parent / "data" / MODEL_TYPE


def open_model(path: str | Path | None = None) -> TinyDiT:
    """A trained `TinyDiT` in float32, in evaluation mode and without gradients.

    Args:
        path: a directory as `save_model` writes it; None for the built-in one.

    Raises:
        CheckpointError: there is no such model, or its parts disagree.

    Example:
        >>> len(open_model().blocks)
        4
    """
    path = load() if path is None else Path(path)
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        state = load_file(path / "model.safetensors")
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{path} holds no readable config.json and model.safetensors: {error}") from error
    if not isinstance(config, dict) or config.get("model_type") != MODEL_TYPE:
        raise CheckpointError(f'{path}: config.json does not say "model_type": "{MODEL_TYPE}": give such a model')
    sizes: dict[str, Any] = {f.name: config.get(f.name) for f in fields(DiTConfig)}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
            raise CheckpointError(f"{path}: {name} is {value!r} in config.json: put the model's own size there")
    if sizes["num_hidden_layers"] > len(state) or sizes["hidden_size"] % (2 * sizes["num_attention_heads"]):
        raise CheckpointError(f"{path}: the sizes in config.json are none of a model with {len(state)} tensors")
    with torch.device("meta"):
        model = TinyDiT(DiTConfig(**sizes))
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path}: config.json and the tensors disagree: {' '.join(str(error).split())[:200]}"
        ) from error
    return model.float().eval().requires_grad_(False)


def describe(config: DiTConfig) -> dict[str, object]:
    """The content of `config.json` for a model of these sizes."""
    return {"model_type": MODEL_TYPE, "architectures": ["TinyDiT"], **asdict(config)}


def draw_noise(
    n: int,
    generator: torch.Generator,
    config: DiTConfig = DiTConfig(),
) -> tuple[Float[Tensor, "n 1 side side"], Int[Tensor, "n"]]:
    """What a sampler starts from: normal noise and a random class for each image."""
    noise = torch.randn(n, 1, config.image_size, config.image_size, generator=generator)
    return noise, torch.randint(config.num_labels, (n,), generator=generator)


def euler(
    model: nn.Module, noise: Float[Tensor, "batch 1 side side"], label: Int[Tensor, "batch"], steps: int = 10
) -> Float[Tensor, "batch 1 side side"]:
    """Draws images: as many equal Euler steps from noise to image, each with one call of the model.

    Args:
        model: called as `model(x, t, label)`.
        noise: where to start.
        label: class of each image.
        steps: number of calls.

    Returns:
        Ink from about -1 (none) to about 1 (full).

    Raises:
        InputError: there is no step to take.

    Example:
        >>> noise, label = draw_noise(2, torch.Generator().manual_seed(0))
        >>> euler(open_model(), noise, label).shape
        torch.Size([2, 1, 8, 8])
    """
    if steps < 1:
        raise InputError(f"steps is {steps}: give at least 1")
    x = noise
    for i in range(steps):
        x = x + model(x, torch.full((len(x),), i / steps, dtype=x.dtype, device=x.device), label) / steps
    return x
