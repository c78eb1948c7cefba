"""Do spectra before the nonlinearity follow the validation loss, and more closely than simpler measures do?

A model of the subject's architecture is trained from scratch, less than once through a novel, and stopped on the way. A model too large for that is
taken instead through the straight line from fresh weights to its own. At each stop an arm gives one number that needs no
labels; what counts is its correlation with the validation loss over the stops.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from assay.core.anatomy import Anatomy, anatomy
from assay.core.errors import NotApplicable
from assay.core.linalg import eigvalsh_batched
from assay.core.loss import language_loss, require_causal
from assay.core.moments import Covariance
from assay.core.seeds import generator
from assay.core.stats import pearson
from assay.core.text import token_windows
from assay.core.trace import Batch, Reducer, trace
from assay.lens import NerveReducer, NerveResult, spectrum_metrics
from assay.reference import checkpoint
from assay.reference._text import training_text
from assay.trials import Arm, Metric, Trial

_TRAINABLE = 5_000_000


@dataclass
class Data:
    """One seed's stops: weights, losses, and the tokens that the arms look at."""

    model: nn.Module
    anatomy: Anatomy
    stops: list[Callable[[], None]]
    losses: list[float]
    probe: Tensor

    def visit(self) -> Iterator[nn.Module]:
        """The model at each stop."""
        for go in self.stops:
            go()
            yield self.model


def prepare(source: str | Path, *, seed: int, budget: Any) -> Data:
    """Train, or mix fresh with trained weights, and note the loss at each stop."""
    opened = checkpoint(source)
    trained = opened.load(torch.float32)
    require_causal(anatomy(trained))
    context = budget["context"]
    windows = token_windows(opened.tokenizer(), [training_text()], tokens=budget["text"], context=context).input_ids
    order = torch.randperm(len(windows), generator=generator(seed, "nerve", "windows"))
    held, probe, train = windows[order].split(
        [budget["held"], budget["probe"], len(windows) - budget["held"] - budget["probe"]]
    )
    torch.manual_seed(seed)
    fresh = type(trained)(trained.config)
    model = copy.deepcopy(fresh)
    small = sum(p.numel() for p in trained.parameters()) <= _TRAINABLE
    make = _train if small else _mix
    stops = make(model, fresh, trained, train, seed, budget)
    data = Data(model.eval(), anatomy(model), stops, [], probe)
    data.losses = [language_loss(m, held.split(16), anatomy_=data.anatomy).loss.mean for m in data.visit()]
    return data


def _train(
    model: nn.Module, fresh: nn.Module, trained: nn.Module, windows: Tensor, seed: int, budget: Any
) -> list[Callable[[], None]]:
    """Stops of a training run, evenly spaced in the logarithm of the step."""
    steps = budget["steps"]
    at = sorted({round(math.exp(v)) for v in torch.linspace(0, math.log(steps), budget["stops"]).tolist()})
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps, pct_start=0.05)
    draw = generator(seed, "nerve", "batches")
    kept = []
    model.train()
    for step in range(1, steps + 1):
        rows = windows[torch.randint(len(windows), (budget["batch"],), generator=draw)]
        loss = model(input_ids=rows, labels=rows).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step in at:
            kept.append({k: v.clone() for k, v in model.state_dict().items()})
    return [lambda state=state: model.load_state_dict(state) for state in kept]  # type: ignore[misc]


def _mix(
    model: nn.Module, fresh: nn.Module, trained: nn.Module, windows: Tensor, seed: int, budget: Any
) -> list[Callable[[], None]]:
    """Stops on the straight line from fresh to trained weights."""

    def go(share: float) -> None:
        with torch.no_grad():
            for p, a, b in zip(model.parameters(), fresh.parameters(), trained.parameters(), strict=True):
                p.copy_(torch.lerp(a, b, share))

    shares = torch.linspace(0, 1, budget["stops"]).tolist()
    return [lambda share=share: go(share) for share in shares]  # type: ignore[misc]


def _nerve(data: Data, *, seed: int, budget: Any) -> dict[str, float]:
    results = []
    for model in data.visit():
        reducer = NerveReducer(data.anatomy, seed=seed)
        trace(model, data.probe.split(16), [reducer], anatomy=data.anatomy)
        results.append(reducer.result())
    last: NerveResult = results[-1]
    return _score(data, [float(r.pre.se.mean()) for r in results]) | {
        "PR gain": float(last.pr_gain.log().mean().exp()),
        "EEE shift": float(last.eee_shift.mean()),
        "JS": float(last.js.mean()),
        "layers spread": float((last.pr_gain > 1).double().mean()),
    }


class _Final(Reducer):
    """Covariance of the last block's output, and the variance of what enters the nonlinearities."""

    sites = ("resid", "mlp.pre")

    def __init__(self, found: Anatomy) -> None:
        self.covariance = Covariance(found.hidden_size)
        self.last = found.n_layers - 1
        self.variances: list[Tensor] = []

    def update(self, site: str, layer: int, value: Tensor, batch: Batch) -> None:
        if site == "mlp.pre":
            self.variances.append(batch.rows(value).var(0).sum())
        elif layer == self.last:
            self.covariance.update(batch.rows(value))


def _watch(data: Data) -> Iterator[_Final]:
    for model in data.visit():
        reducer = _Final(data.anatomy)
        trace(model, data.probe.split(16), [reducer], anatomy=data.anatomy)
        yield reducer


def _rankme(data: Data, *, seed: int, budget: Any) -> dict[str, float]:
    # RankMe takes the entropy of normalised singular values, which are the roots of the covariance's eigenvalues.
    spectra = [eigvalsh_batched(r.covariance.covariance).sqrt() for r in _watch(data)]
    return _score(data, [float(spectrum_metrics(eigs=s).se) for s in spectra])


def _variance(data: Data, *, seed: int, budget: Any) -> dict[str, float]:
    return _score(data, [float(torch.stack(r.variances).log().mean()) for r in _watch(data)])


def _weights(data: Data, *, seed: int, budget: Any) -> dict[str, float]:
    values = []
    for _ in data.visit():
        entropies = []
        for block in data.anatomy.blocks:
            if block.mlp is None:
                raise NotApplicable("a block has no dense feed-forward layer")
            first = block.mlp.up if block.mlp.gate is None else block.mlp.gate
            eigs = eigvalsh_batched(first.weight.detach(), rows=True)
            entropies.append(float(spectrum_metrics(eigs=eigs).se))
        values.append(sum(entropies) / len(entropies))
    return _score(data, values)


def _score(data: Data, values: list[float]) -> dict[str, float]:
    nothing = dict.fromkeys(("PR gain", "EEE shift", "JS", "layers spread"), math.nan)
    return {"|r| with loss": abs(pearson(values, data.losses).mean)} | nothing


TRIAL = Trial(
    slug="nerve",
    question="Does spectral entropy before the nonlinearity follow the validation loss more closely than simpler measures?",
    subject="checkpoint",
    builtin="builtin:tiny-lm",
    prepare=prepare,
    arms=(
        Arm("nerve", _nerve, "spectral entropy of what enters the nonlinearity, mean over layers"),
        Arm("rankme", _rankme, "RankMe: entropy of the singular values of the last hidden states"),
        Arm("activation variance", _variance, "log of the variance of what enters the nonlinearity"),
        Arm("weight spectrum", _weights, "spectral entropy of the first feed-forward weight"),
    ),
    metrics=(
        Metric("|r| with loss", "higher", "", "absolute Pearson correlation with the validation loss over the stops"),
        Metric("PR gain", None, "×", "participation ratio after over before the nonlinearity at the last stop"),
        Metric("EEE shift", None, "", "early enrichment after minus before at the last stop"),
        Metric("JS", None, "nats", "divergence of the two spectra at the last stop"),
        Metric("layers spread", None, "share", "layers whose participation ratio rises at the nonlinearity"),
    ),
    budgets={
        "quick": {
            "seeds": 3,
            "steps": 60,
            "stops": 8,
            "batch": 8,
            "context": 64,
            "text": 40_000,
            "held": 32,
            "probe": 24,
        },
        "full": {
            "seeds": 5,
            "steps": 250,
            "stops": 14,
            "batch": 8,
            "context": 64,
            "text": 150_000,
            "held": 64,
            "probe": 48,
        },
    },
)
