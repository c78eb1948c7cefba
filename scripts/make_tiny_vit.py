"""Train the built-in checkpoint `tiny_vit`: a small vision transformer with parts whose role is known.

One thread and fixed seeds: the same machine and the same package versions write the same bytes.

    python scripts/make_tiny_vit.py --out src/assay/reference/data/tiny_vit
"""

from __future__ import annotations

import argparse
import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from assay.reference.tiny_vit import GROUND_TRUTH, images, labels

CONFIG = ViTConfig(
    image_size=8,
    patch_size=2,
    num_channels=1,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=128,
    initializer_range=0.05,
    id2label={i: str(i) for i in range(10)},
    label2id={str(i): i for i in range(10)},
)
HEAD_DIM = CONFIG.hidden_size // CONFIG.num_attention_heads
BATCH = 64


@torch.no_grad()
def plant(model: ViTForImageClassification) -> dict[str, Tensor]:
    """Set the planted parts to zero, and return for each parameter that holds one where training may change it."""
    layer, head = GROUND_TRUTH["zero_value_head"]
    rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    attention = f"vit.layers.{layer}.attention"
    layer, channel = GROUND_TRUTH["dead_channel"]
    mlp = f"vit.layers.{layer}.mlp"
    free = {}
    for name, where in (
        (f"{attention}.v_proj.weight", (rows,)),
        (f"{attention}.v_proj.bias", (rows,)),
        (f"{mlp}.fc1.weight", (channel,)),
        (f"{mlp}.fc1.bias", (channel,)),
        (f"{mlp}.fc2.weight", (slice(None), channel)),
    ):
        parameter = model.get_parameter(name)
        parameter[where] = 0.0
        free[name] = torch.ones_like(parameter)
        free[name][where] = 0.0
    return free


def shifted(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the images moved by up to one pixel either way, the edge filled with no ink."""
    padded = F.pad(pixels, (1, 1, 1, 1), value=-1.0)
    down, right = torch.randint(3, (2, len(pixels), 1, 1), generator=generator)
    stay = torch.rand(len(pixels), 1, 1, generator=generator) < 0.5
    down, right = down.masked_fill(stay, 1), right.masked_fill(stay, 1)
    row, column = torch.arange(8).view(8, 1), torch.arange(8)
    return padded[torch.arange(len(pixels)).view(-1, 1, 1), 0, down + row, right + column].unsqueeze(1)


def train(model: ViTForImageClassification, free: dict[str, Tensor], epochs: int, seed: int) -> None:
    """AdamW with a cosine schedule on randomly shifted training digits."""
    generator = torch.Generator().manual_seed(seed)
    for name, mask in free.items():
        model.get_parameter(name).register_hook(lambda grad, mask=mask: grad * mask)
    pixels, target = images("train"), labels("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    steps = epochs * (len(pixels) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    for epoch in range(epochs):
        order = torch.randperm(len(pixels), generator=generator)
        for chosen in order[: len(pixels) // BATCH * BATCH].split(BATCH):
            logits = model(shifted(pixels[chosen], generator)).logits
            loss = F.cross_entropy(logits, target[chosen], label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        if epoch % 10 == 0 or epoch + 1 == epochs:
            print(f"epoch {epoch:3d}  loss {loss.item():.3f}", flush=True)


def main() -> None:
    """Train, report the held-out accuracy, save, print the SHA-256 of the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)
    model = ViTForImageClassification(CONFIG)
    train(model, plant(model), options.epochs, options.seed)

    model.eval()
    with torch.no_grad():
        right = model(images("test")).logits.argmax(-1) == labels("test")
    print(f"held-out accuracy {right.float().mean():.4f} ({right.sum()} of {len(right)})")
    model.save_pretrained(options.out)
    print("sha256", hashlib.sha256((options.out / "model.safetensors").read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
