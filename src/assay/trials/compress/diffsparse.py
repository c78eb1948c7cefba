"""Does a learned table of recomputed tokens keep a diffusion transformer's samples closer than hand-made ones?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import ViTForImageClassification

from assay.compress import BlockSpec, Importance, TokenCache, allocate_sparsity, diffsparse, hand_keep
from assay.core.errors import CheckpointError, InputError, NotApplicable
from assay.core.seeds import generator
from assay.reference import PREFIX, builtin, tiny_vit
from assay.reference.tiny_dit import Block, TinyDiT, draw_noise, euler, open_model
from assay.trials import Arm, Metric, Trial
from assay.trials._trial import Budget, Measured

TARGET = 0.5
STEPS = 10
KEEP_LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
# A learning iteration runs the full sampler, the sparse one with all tokens computed, and its backward pass, which
# takes twice as long: four runs. Random search gets as many.
_RUNS = 4
_CYCLES = (2, 3, 4, 5)
_BATCH = 64

Sample = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Data:
    """What all arms of one seed share.

    Attributes:
        model: the diffusion transformer.
        features: maps images to what the digit classifier sees in them, [images, 64].
        noise: held-out noise to start from, and `label`, the class of each image.
        label: [images].
        full: the full model's samples.
        units: what each level takes from the budget, in proportion to the operations of a block.
        budget: units that every arm may spend.
    """

    model: TinyDiT
    features: Callable[[Tensor], Tensor]
    noise: Tensor
    label: Tensor
    full: Tensor
    units: tuple[int, ...]
    budget: int

    @property
    def blocks(self) -> list[BlockSpec]:
        """Where the model's branches are."""
        blocks = cast("list[Block]", list(self.model.blocks))
        return [BlockSpec(b.mlp, b.attention, attend=b.attention.attend) for b in blocks]

    @property
    def importance(self) -> Importance:
        """How all arms choose tokens."""
        return Importance(grid=(self.model.config.image_size,) * 2)


def prepare(source: str, *, seed: int, budget: Budget) -> Data:
    """Loads the model and samples from it in full.

    Args:
        source: "builtin:tiny-dit", or a directory with a model of this kind.
        seed: of the held-out noise.
        budget: "images".

    Raises:
        NotApplicable: it is another kind of model, or its images are not 8 × 8, as the digit classifier reads them.
    """
    try:
        model = open_model(builtin(source).load() if source.startswith(PREFIX) else source)
    except CheckpointError as error:
        raise NotApplicable(f"diffsparse is tried on a diffusion transformer like builtin:tiny-dit: {error}") from error
    if model.config.image_size != 8:
        raise NotApplicable(f"{source} draws {model.config.image_size} pixels a side: the digit classifier reads 8")
    classifier = ViTForImageClassification.from_pretrained(tiny_vit.load()).eval().requires_grad_(False)
    noise, label = draw_noise(budget["images"], generator(seed, "held out"), model.config)
    with torch.no_grad():
        full = _in_batches(partial(euler, model, steps=STEPS), noise, label)
    units = level_units(model)
    return Data(
        model,
        lambda images: classifier.vit(images).last_hidden_state[:, 0],
        noise,
        label,
        full,
        units,
        round((1 - TARGET) * units[-1] * STEPS * len(model.blocks)),
    )


def level_units(model: TinyDiT) -> tuple[int, ...]:
    """Operations of a block at each level, in quarters of its MLP: attention runs at the last level only."""
    config = model.config
    tokens, width = config.image_size**2, config.hidden_size
    mlp, attention = 8 * tokens * width**2, 4 * tokens * width**2 + 2 * tokens**2 * width
    return (0, 1, 2, 3, 4 + round(4 * attention / mlp))


def _in_batches(sample: Sample, noise: Tensor, label: Tensor) -> Tensor:
    return torch.cat([sample(n, c) for n, c in zip(noise.split(_BATCH), label.split(_BATCH))])


def _frechet(a: Tensor, b: Tensor) -> float:
    """|μ_a − μ_b|² + tr(Σ_a + Σ_b − 2 (Σ_a Σ_b)^½), the last trace from the singular values of the data's product."""
    a, b = a.double(), b.double()
    root = ((len(a) - 1) * (len(b) - 1)) ** 0.5
    cross = torch.linalg.svdvals((a - a.mean(0)) @ (b - b.mean(0)).T).sum() / root
    return ((a.mean(0) - b.mean(0)).square().sum() + a.var(0).sum() + b.var(0).sum() - 2 * cross).item()


@torch.no_grad()
def _measure(data: Data, sample: Sample) -> Measured:
    images = _in_batches(sample, data.noise, data.label)
    ours, full = data.features(images), data.features(data.full)
    dense = partial(euler, data.model, steps=STEPS)
    return {
        "feature distance": ((ours - full).square().sum(1).mean() / full.var(0).sum()).item(),
        "pixel error": (images - data.full).square().mean().item(),
        "Fréchet distance": _frechet(ours, full),
        "operations": _operations(data, sample) / _operations(data, dense),
    }


def _operations(data: Data, sample: Sample) -> int:
    # The counter sees attention only where it is made of matrix products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        sample(data.noise[:1], data.label[:1])
    return counter.get_total_flops()


def _sparse(data: Data, keep: Tensor) -> Sample:
    def sample(noise: Tensor, label: Tensor) -> Tensor:
        with TokenCache(data.model, data.blocks, keep, data.importance):
            return euler(data.model, noise, label, STEPS)

    return sample


def _learned(data: Data, *, seed: int, budget: Budget) -> Measured:
    def loss(sparse: Tensor, full: Tensor) -> Tensor:
        return nn.functional.mse_loss(data.features(sparse), data.features(full))

    found = diffsparse(
        data.model,
        partial(euler, steps=STEPS),
        data.blocks,
        lambda g: draw_noise(budget["batch"], g, data.model.config),
        steps=STEPS,
        target=TARGET,
        keep_levels=KEEP_LEVELS,
        units=data.units,
        iterations=budget["iterations"],
        delta=budget["delta"],
        loss=loss,
        importance=data.importance,
        seed=seed,
    )
    return _measure(data, _sparse(data, found.keep))


@torch.no_grad()
def _best(data: Data, tables: list[Tensor], images: int, seed: int) -> Tensor:
    """The table with the least feature distance on noise that is not the held-out one."""
    noise, label = draw_noise(images, generator(seed, "choice"), data.model.config)
    full = data.features(euler(data.model, noise, label, STEPS))
    found = [(data.features(_sparse(data, keep)(noise, label)) - full).square().mean() for keep in tables]
    return tables[int(torch.stack(found).argmin())]


def _cycles(data: Data, *, seed: int, budget: Budget) -> Measured:
    tables = []
    for cycle in _CYCLES:
        try:
            tables.append(_hand(data, cycle))
        except InputError:  # the budget does not pay for so many full steps
            continue
    return _measure(data, _sparse(data, _best(data, tables, budget["images"], seed)))


def _hand(data: Data, cycle: int | None) -> Tensor:
    return hand_keep(STEPS, len(data.model.blocks), data.budget, keep_levels=KEEP_LEVELS, units=data.units, cycle=cycle)


def _uniform(data: Data, *, seed: int, budget: Budget) -> Measured:
    return _measure(data, _sparse(data, _hand(data, None)))


def _random(data: Data, *, seed: int, budget: Budget) -> Measured:
    blocks = len(data.model.blocks)
    stream = generator(seed, "random search")
    tables = []
    for _ in range(_RUNS * budget["iterations"] // 2):
        cost = torch.randn((STEPS - 1) * blocks, len(KEEP_LEVELS), generator=stream)
        levels = allocate_sparsity(cost, data.units, data.budget - blocks * data.units[-1])
        tables.append(torch.cat([torch.ones(1, blocks), torch.tensor(KEEP_LEVELS)[levels].view(-1, blocks)]))
    return _measure(data, _sparse(data, _best(data, tables, 2 * budget["batch"], seed)))


def _fewer_steps(data: Data, *, seed: int, budget: Budget) -> Measured:
    return _measure(data, partial(euler, data.model, steps=round((1 - TARGET) * STEPS)))


TRIAL = Trial(
    slug="diffsparse",
    question="Does a learned table of recomputed tokens keep samples closer to the full model's than hand-made tables?",
    subject="checkpoint",
    builtin="builtin:tiny-dit",
    prepare=prepare,
    arms=(
        Arm("diffsparse", _learned, "table learned in two stages"),
        Arm("toca cycle", _cycles, "every n-th step in full, the rest spread evenly; n tuned"),
        Arm("uniform", _uniform, "the first step in full, the rest spread evenly"),
        Arm("random search", _random, "the best of random tables, in as many sampler runs as the learning"),
        Arm("fewer steps", _fewer_steps, "the full model with half of the steps"),
    ),
    metrics=(
        Metric("feature distance", "lower", "", "squared, to the full model's sample, over the samples' variance"),
        Metric("pixel error", "lower", "", "mean squared difference from the full model's sample, ink from -1 to 1"),
        Metric("Fréchet distance", "lower", "", "of the classifier's features, to the full model's samples"),
        Metric("operations", None, "", "counted while sampling, over those of the full model"),
    ),
    budgets={
        "tiny": {"seeds": 1, "images": 80, "batch": 2, "iterations": 2, "delta": 2.0},
        "quick": {"seeds": 1, "images": 128, "batch": 8, "iterations": 20, "delta": 2.0},
        "full": {"seeds": 5, "images": 256, "batch": 8, "iterations": 40, "delta": 2.0},
    },
)
