"""Train the built-in checkpoint `tiny_dit`: a small diffusion transformer that draws digits.

One thread and fixed seeds: the same machine and the same package versions write the same bytes.

    python scripts/make_tiny_dit.py --out src/assay/reference/data/tiny_dit
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from assay.reference.tiny_dit import DiTConfig, TinyDiT, describe
from assay.reference.tiny_vit import images, labels

BATCH = 64
RATE = 2e-3
DROPPED_LABELS = 0.1
AVERAGE = 0.995


def flow_loss(model: TinyDiT, image: Tensor, label: Tensor, generator: torch.Generator) -> Tensor:
    """Squared error of the velocity at a random time between noise and image; some classes are left unsaid."""
    noise = torch.randn(image.shape, generator=generator)
    t = torch.rand(len(image), generator=generator)
    unsaid = torch.rand(len(image), generator=generator) < DROPPED_LABELS
    label = label.masked_fill(unsaid, model.config.num_labels)
    mixed = torch.lerp(noise, image, t.view(-1, 1, 1, 1))
    return (model(mixed, t, label) - (image - noise)).square().mean()


def train(config: DiTConfig, steps: int, seed: int) -> TinyDiT:
    """AdamW with a cosine schedule; returns the running average of the weights."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = TinyDiT(config)
    average = copy.deepcopy(model).requires_grad_(False)
    pixels, target = images("train"), labels("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    start, running = time.perf_counter(), 0.0
    for step in range(steps):
        chosen = torch.randint(len(pixels), (BATCH,), generator=generator)
        loss = flow_loss(model, pixels[chosen], target[chosen], generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        keep = min(AVERAGE, (step + 1) / (step + 10))
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - keep)
        running += loss.item()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:5d}  loss {running / 100:.4f}  {time.perf_counter() - start:.0f} s", flush=True)
            running = 0.0
    return average


def main() -> None:
    """Train, save, print the size and the SHA-256 of the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = train(DiTConfig(), options.steps, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, options.out / "model.safetensors", metadata={"format": "pt"})
    (options.out / "config.json").write_text(json.dumps(describe(model.config), indent=2) + "\n", encoding="utf-8")
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    print("sha256", hashlib.sha256((options.out / "model.safetensors").read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
