"""The best model of a wanted size: settings tried on all layers alike, then shared out among them by what each loses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_array
from torch import Tensor, nn

from assay.compress._blockwise import matrix
from assay.compress._sequential import Activations, Sequential, put
from assay.compressor._folder import exchangeable
from assay.compressor._run import (
    Compression,
    Job,
    Tried,
    check_disk,
    common_width,
    layer_shape,
    needed_bytes,
    open_job,
    require_exchange,
    run_job,
)
from assay.compressor._setting import Outcome, Setting
from assay.core.errors import InputError
from assay.core.loss import Drift
from assay.core.output import check_new
from assay.core.progress import Progress, silent

# What is tried. Of these, only settings within reach of the wanted size take part.
_CANDIDATES = (
    *(Setting("gptq", bits) for bits in (2, 3, 4, 5, 6, 8)),
    Setting("gptq", 3, 32),
    Setting("obr", 4),
    Setting("bof4"),
    Setting("logart", 3),
)
_REACH = 1.1
# Windows that candidates are compared on, and that sensitivities come from.
_COMPARED = 8


def fit_checkpoint(
    source: str | Path,
    out: str | Path,
    bits_per_weight: float,
    *,
    text: Path | None = None,
    held: Path | None = None,
    samples: int = 64,
    context: int | None = None,
    skip: Sequence[str] = ("lm_head",),
    base: Path | None = None,
    allow_pickle: bool = False,
    progress: Progress = silent,
) -> Compression:
    """Search methods and settings for a size, and write the best model that fits.

    The inputs' second moments are gathered once, in the model as it is. Each candidate is applied to every layer with
    them; what a layer's error costs is estimated from the gradients of the loss at its outputs; and a mixture that
    fits the size is chosen so that the estimated costs add up to least. Candidates and mixture are compared by their KL
    to the original on calibration windows, never on the held-out text. The best of them that fits is then made block by
    block, as without a search.

    Args:
        source: as in `compress_checkpoint`, like all that follow but:
        bits_per_weight: the most that the packed layers may take, scales and all.

    Raises:
        InputError: nothing gets that small, or as in `compress_checkpoint`.

    Source:
        The estimate is the diagonal Fisher approximation of Optimal Brain Surgeon, at the level of layer outputs.
    """
    start = time.perf_counter()
    if not 0 < bits_per_weight < float("inf"):
        raise InputError(f"--fit is {bits_per_weight}: give bits a weight, such as 3.5")
    out = Path(out)
    check_new(out)
    job = open_job(
        source,
        text=text,
        held=held,
        samples=samples,
        context=context,
        skip=skip,
        base=base,
        allow_pickle=allow_pickle,
        progress=progress,
    )
    candidates = _within_reach(job, bits_per_weight)
    if any(exchangeable(job.model, job.layers, dict.fromkeys(job.layers, c)) for c in candidates):
        require_exchange()
    check_disk(job, max(needed_bytes(job, dict.fromkeys(job.layers, c)) for c in candidates), out)
    compared = job.calibration[:_COMPARED]
    moments = _Moments(job)
    pressure = _pressure(job, compared)
    drift, on_held = Drift(job.model, compared, anatomy_=job.anatomy), Drift(job.model, job.held, anatomy_=job.anatomy)

    tried: list[Tried] = []
    costs: dict[Setting, dict[str, float]] = {}
    sizes: dict[Setting, dict[str, float]] = {}
    jobs: list[dict[str, Setting]] = [dict.fromkeys(job.layers, c) for c in candidates]
    for done, settings in enumerate([*jobs, None]):
        progress(done, len(jobs) + 1, "candidates")
        if settings is None:
            settings = _share_out(job, candidates, costs, sizes, bits_per_weight)
            jobs.append(settings)
        kinds = sorted({s.name for s in settings.values()})
        with _replaced(job, settings, moments) as made:
            if len(kinds) == 1:
                setting = next(iter(settings.values()))
                costs[setting] = {n: _cost(o, pressure.get(n)) for n, o in made.items()}
                sizes[setting] = {n: o.bits for n, o in made.items()}
            total = sum(o.bits * o.weights for o in made.values()) / sum(o.weights for o in made.values())
            moved = drift.measure()
            tried.append(
                Tried(
                    name=kinds[0] if len(kinds) == 1 else f"mixture of {len(kinds)}",
                    uniform=len(kinds) == 1,
                    bits_per_weight=total,
                    kl_calibration=moved.kl.mean,
                    perplexity=on_held.measure().perplexity,
                    fits=total <= bits_per_weight + 1e-9,
                )
            )
    fitting = [i for i, t in enumerate(tried) if t.fits]
    if not fitting:
        least = min(t.bits_per_weight for t in tried)
        raise InputError(f"--fit is {bits_per_weight}: the smallest that came out has {least:.2f} bits a weight")
    best = min(fitting, key=lambda i: tried[i].kl_calibration)
    return run_job(job, out, jobs[best], start, tried=tuple(tried))


def _within_reach(job: Job, wanted: float) -> list[Setting]:
    shapes = [layer_shape(layer) for layer in job.layers.values()]
    weights = [a * b for a, b in shapes]

    def size(setting: Setting) -> float:
        return float(np.average([setting.bits_per_weight(*s) for s in shapes], weights=weights))

    usable = []
    for candidate in _CANDIDATES:
        try:
            for name, layer in job.layers.items():
                alike = dict.fromkeys(job.layers, candidate)
                common = common_width(job) if exchangeable(job.model, job.layers, alike) else None
                candidate.check_width(name, layer_shape(layer)[1], common)
        except InputError:
            continue
        usable.append(candidate)
    least = min(map(size, usable), default=float("inf"))
    if least > wanted:
        raise InputError(
            f"--fit is {wanted}: the smallest that can be made of this model has {least:.2f} bits a weight"
        )
    near = [c for c in usable if abs(size(c) - wanted) <= _REACH]
    # At least one that fits, however far below.
    fitting = [c for c in usable if size(c) <= wanted]
    largest = max(fitting, key=size)
    return near if largest in near else [largest, *near]


class _Moments:
    """Second moments of every layer's inputs, gathered once."""

    def __init__(self, job: Job) -> None:
        self._kept = Activations()
        self._place: dict[str, int] = {}
        last: Tensor | None = None

        def keep(name: str, weight: Tensor, hessian: Tensor | None) -> Any:
            nonlocal last
            if hessian is not None:
                # Layers with the same input come one after the other, and are given the same tensor.
                index = max(self._place.values(), default=-1) + (hessian is not last)
                if hessian is not last:
                    self._kept[index] = hessian
                self._place[name], last = index, hessian
            return _Unchanged(weight)

        for _ in Sequential(
            job.anatomy, job.calibration, keep, skip=(*job.skip, *job.left), progress=job.progress
        ).run():
            pass

    def __getitem__(self, name: str) -> Tensor | None:
        return self._kept[self._place[name]] if name in self._place else None


class _Unchanged:
    def __init__(self, dense: Tensor) -> None:
        self.dense = dense


class _Made:
    """A layer's outcome without its weights."""

    def __init__(self, outcome: Outcome, error: Float[Tensor, "out"] | None) -> None:
        self.bits = outcome.packed.bits_per_weight
        self.weights = outcome.packed.shape.numel()
        self.row_error = error


@contextmanager
def _replaced(job: Job, settings: Mapping[str, Setting], moments: _Moments) -> Iterator[dict[str, _Made]]:
    """The model with its layers as the settings make them, for as long as it lasts."""
    before: dict[str, Tensor] = {}
    made: dict[str, _Made] = {}
    try:
        for name, layer in job.layers.items():
            weight, hessian = matrix(layer).float(), moments[name]
            outcome = settings[name].apply(weight, hessian)
            delta = outcome.dense - weight
            made[name] = _Made(outcome, None if hessian is None else ((delta @ hessian) * delta).sum(1))
            before[name] = layer.get_parameter("weight").data.clone()
            put(layer, outcome.dense)
        yield made
    finally:
        for name, weight in before.items():
            job.layers[name].get_parameter("weight").data.copy_(weight)


def _pressure(job: Job, windows: Tensor) -> dict[str, Float[Tensor, "out"]]:
    """The mean squared gradient of a window's loss at every output of every layer, a token."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    handles = []

    def watch(name: str) -> Any:
        def see(_module: nn.Module, _args: Any, output: Tensor) -> None:
            def add(gradient: Tensor) -> None:
                rows = gradient.flatten(0, -2).float()
                sums[name] = sums.get(name, 0) + rows.square().sum(0)  # type: ignore[operator]
                counts[name] = counts.get(name, 0) + len(rows)

            output.register_hook(add)

        return see

    embedding = job.model.get_input_embeddings()
    wanted = {p: p.requires_grad for p in job.model.parameters()}
    try:
        for parameter in job.model.parameters():
            parameter.requires_grad_(False)
        for name, layer in job.layers.items():
            handles.append(layer.register_forward_hook(watch(name)))
        with torch.enable_grad():
            for row in windows:
                inputs = embedding(row[None]).detach().requires_grad_()
                logits = job.model(inputs_embeds=inputs, use_cache=False).logits[0, :-1].float()
                # Labels drawn from the model make this the Fisher information, not a fit to this text.
                labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=torch.Generator().manual_seed(0))
                nn.functional.cross_entropy(logits, labels[:, 0], reduction="sum").backward()
    finally:
        for handle in handles:
            handle.remove()
        for parameter, needs in wanted.items():
            parameter.requires_grad_(needs)
    return {name: total / counts[name] for name, total in sums.items()}


def _cost(made: _Made, pressure: Float[Tensor, "out"] | None) -> float:
    """Estimated increase of the loss, nats a token: half the squared error of each output by its squared gradient."""
    if made.row_error is None or pressure is None:
        return 0.0
    return 0.5 * float((pressure * made.row_error).sum())


def _share_out(
    job: Job,
    candidates: Sequence[Setting],
    costs: Mapping[Setting, Mapping[str, float]],
    sizes: Mapping[Setting, Mapping[str, float]],
    wanted: float,
) -> dict[str, Setting]:
    """One setting a layer with the least total cost within the size: a knapsack with a choice of one in each group."""
    names = list(job.layers)
    weights = np.array([np.prod(layer_shape(job.layers[n])) for n in names], dtype=float)
    cost = np.array([[costs[c][n] for c in candidates] for n in names])
    size = np.array([[sizes[c][n] for c in candidates] for n in names]) * weights[:, None] / weights.sum()
    n_layers, n_choices = cost.shape
    rows = np.repeat(np.arange(n_layers), n_choices)
    one_each = coo_array((np.ones(cost.size), (rows, np.arange(cost.size))), shape=(n_layers, cost.size))
    answer = milp(
        cost.ravel() / max(cost.max(), 1e-30),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(size.reshape(1, -1), -np.inf, wanted)],
        integrality=np.ones(cost.size),
        bounds=(0, 1),
        options={"mip_rel_gap": 1e-4, "time_limit": 20},
    )
    if answer.x is None:
        raise InputError(f"--fit is {wanted}: no choice of settings gets that small")
    choice = answer.x.reshape(cost.shape).argmax(1)
    return {n: candidates[c] for n, c in zip(names, choice, strict=True)}
