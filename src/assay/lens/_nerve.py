"""Spectra of feed-forward activations before and after the nonlinearity.

Source: "NerVE: Nonlinear Eigenspectrum Dynamics in LLM Feed-Forward Networks" (arXiv 2603.06922).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from assay.core.anatomy import Anatomy, Projection, anatomy
from assay.core.errors import InputError, NotApplicable
from assay.core.linalg import eigvalsh_batched
from assay.core.moments import Covariance
from assay.core.parallel import each_on_one_core
from assay.core.progress import Progress, silent
from assay.core.results import Column, Result, Table
from assay.core.seeds import generator
from assay.core.stats import pearson
from assay.core.trace import Batch, Reducer, attach, trace

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_MEMORY = 1 << 30


@dataclass(frozen=True)
class SpectrumMetrics(Result):
    """What a spectrum of variances says about how many directions are used.

    Attributes:
        se: spectral entropy −Σ λ̂ ln λ̂, in nats, from 0 (one direction) to ln D (all alike).
        pr: participation ratio (Σλ)²/Σλ², in directions, from 1 to D.
        eee: early enrichment (2/D)·Σ_k (C_k − k/D), C the cumulative normalised spectrum; 0 for a flat spectrum, close to
            1 for one direction.
        eigs: the eigenvalues of the covariance, largest first, in squared units of the activations.
        n_tokens: how many rows they were estimated from; None where only eigenvalues were given.
        rank_bound: the largest rank that so many rows can show, min(D, n_tokens − 1).
    """

    se: Float[Tensor, "*batch"]
    pr: Float[Tensor, "*batch"]
    eee: Float[Tensor, "*batch"]
    eigs: Float[Tensor, "*batch width"]
    n_tokens: int | None = None
    rank_bound: int | None = None

    def table(self) -> Table:
        """One row a spectrum."""
        columns = (
            Column("spectral entropy", "nats"),
            Column("participation ratio", "directions"),
            Column("early enrichment"),
        )
        parts = (self.se, self.pr, self.eee)
        return Table(columns, tuple(zip(*(p.reshape(-1).tolist() for p in parts), strict=True)))

    def figure(self) -> Figure:
        """The normalised spectra on logarithmic axes."""
        from plotly import graph_objects as go

        flat = self.eigs.reshape(-1, self.eigs.shape[-1])
        figure = go.Figure()
        for i, row in enumerate(flat / flat.sum(-1, keepdim=True)):
            figure.add_scatter(x=list(range(1, len(row) + 1)), y=row.tolist(), name=f"spectrum {i}")
        figure.update_layout(xaxis_title="rank", yaxis_title="share of variance")
        figure.update_xaxes(type="log")
        figure.update_yaxes(type="log")
        return figure


def spectrum_metrics(
    x: Float[Tensor, "tokens width"] | None = None,
    *,
    eigs: Float[Tensor, "*batch width"] | None = None,
) -> SpectrumMetrics:
    """Spectral entropy, participation ratio and early enrichment of activations or of a spectrum.

    Args:
        x: activations, one token a row; the covariance is centred and divided by tokens − 1.
        eigs: eigenvalues instead, in any order; values below zero count as zero.

    Raises:
        InputError: both or neither given, fewer than two tokens, values that are not finite, or no variance at all.

    Source: NerVE (arXiv 2603.06922), definitions of SE, PR and EEE.

    >>> m = spectrum_metrics(eigs=torch.tensor([4.0, 3.0, 2.0, 1.0]))
    >>> [round(float(v), 6) for v in (m.se, m.pr, m.eee)]
    [1.279854, 3.333333, 0.25]
    """
    if (x is None) == (eigs is None):
        raise InputError("give either activations or eigs=, not both")
    n_tokens = rank_bound = None
    if x is not None:
        if x.ndim != 2 or len(x) < 2:
            raise InputError(f"activations of shape {tuple(x.shape)}: [tokens, width] with at least 2 tokens is needed")
        if not bool(torch.isfinite(x).all()):
            raise InputError("the activations hold values that are not finite")
        n_tokens, width = x.shape
        rank_bound = min(width, n_tokens - 1)
        eigs = _eigenvalues_of_rows(x)
    assert eigs is not None
    eigs = eigs.double()
    if eigs.ndim == 0 or eigs.shape[-1] == 0:
        raise InputError("a spectrum needs at least one eigenvalue")
    if not bool(torch.isfinite(eigs).all()):
        raise InputError("the spectrum holds values that are not finite")
    eigs = eigs.clamp_min(0).sort(dim=-1, descending=True).values
    total = eigs.sum(-1, keepdim=True)
    if bool((total <= 0).any()):
        raise InputError("the spectrum has zero variance: the activations are constant")
    share = eigs / total
    width = share.shape[-1]
    ranks = torch.arange(1, width + 1, dtype=share.dtype, device=share.device)
    return SpectrumMetrics(
        se=torch.special.entr(share).sum(-1),
        pr=1 / share.square().sum(-1),
        eee=(2 / width * (share.cumsum(-1) - ranks / width).sum(-1)).clamp(0, 1),
        eigs=eigs,
        n_tokens=n_tokens,
        rank_bound=rank_bound,
    )


def js_spectra(a: Float[Tensor, "*batch width_a"], b: Float[Tensor, "*batch width_b"]) -> Float[Tensor, "*batch"]:
    """Jensen–Shannon divergence of two spectra, aligned by rank, in nats, from 0 to ln 2.

    It compares how variance is spread over ranks and says nothing about directions.

    Args:
        a: eigenvalues, in any order.
        b: eigenvalues; the shorter spectrum is filled with zeros.

    Raises:
        InputError: a spectrum without variance.

    Source: NerVE (arXiv 2603.06922), JS of sorted normalised spectra.

    >>> round(float(js_spectra(torch.tensor([1.0, 0, 0, 0]), torch.ones(4))), 6)
    0.380396
    """
    width = max(a.shape[-1], b.shape[-1])
    p, q = (_distribution(v, width) for v in (a, b))
    middle = (p + q) / 2
    entropy = torch.special.entr
    return (entropy(middle) - (entropy(p) + entropy(q)) / 2).sum(-1).clamp(0, math.log(2))


def _distribution(eigs: Tensor, width: int) -> Tensor:
    eigs = eigs.double().clamp_min(0).sort(dim=-1, descending=True).values
    total = eigs.sum(-1, keepdim=True)
    if bool((total <= 0).any()):
        raise InputError("the spectrum has zero variance: the activations are constant")
    return nn.functional.pad(eigs / total, (0, width - eigs.shape[-1]))


def _eigenvalues_of_rows(x: Float[Tensor, "tokens width"]) -> Float[Tensor, "width"]:
    """Eigenvalues of the covariance, from the smaller of covariance and Gram matrix."""
    x = x.double()
    return eigvalsh_batched(x - x.mean(0), rows=True) / (len(x) - 1)


def _narrow_first(mlp: Any) -> Projection | None:
    """The projection before the nonlinearity, where it widens and its weight is a plain matrix."""
    first = mlp.up if mlp.gate is None else mlp.gate
    weight = first.weight
    plain = weight.ndim == 2 and weight.is_floating_point() and weight.shape[1] == first.in_features
    return first if plain and weight.shape[1] < weight.shape[0] else None


def _spectrum_through(
    weight: Float[Tensor, "width hidden"], covariance: Float[Tensor, "hidden hidden"]
) -> Float[Tensor, "width"]:
    """Eigenvalues of W·C·Wᵀ, from R·C·Rᵀ with W = QR: the others are 0."""
    R = torch.linalg.qr(weight.detach().double(), mode="r").R
    # In the type of the covariance, whose rounding the check of the eigenvalues has to allow for.
    eigs = eigvalsh_batched((R @ covariance.to(R) @ R.T).to(covariance.dtype))
    return nn.functional.pad(eigs, (0, len(weight) - len(eigs)))


@dataclass(frozen=True)
class NerveResult(Result):
    """Spectra of every feed-forward layer, before (`pre`) and after (`post`) the nonlinearity.

    Attributes:
        layers: block numbers, or the names given in `layers=`.
        pre: metrics of what enters the nonlinearity; in a gated layer, of the gate's branch.
        post: metrics of what enters the down projection.
        js: divergence between the two spectra by rank, in nats, one a layer.
        n_tokens: rows per layer.
        n_seen: tokens that went through; larger than `n_tokens` where rows were sampled to bound memory.
        skipped: blocks without a dense feed-forward layer.
    """

    layers: tuple[int | str, ...]
    pre: SpectrumMetrics
    post: SpectrumMetrics
    js: Float[Tensor, "layers"]
    n_tokens: int
    n_seen: int
    skipped: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Number of hidden units."""
        return self.pre.eigs.shape[-1]

    @property
    def pr_gain(self) -> Float[Tensor, "layers"]:
        """Participation ratio after the nonlinearity over that before it."""
        return self.post.pr / self.pre.pr

    @property
    def eee_shift(self) -> Float[Tensor, "layers"]:
        """Early enrichment after minus before; below zero the nonlinearity flattens the spectrum."""
        return self.post.eee - self.pre.eee

    @property
    def rank_limited(self) -> bool:
        """Whether there were too few tokens for the spectra to have full rank."""
        return self.n_tokens - 1 < self.width

    def table(self) -> Table:
        """One row a layer."""
        columns = (
            Column("layer"),
            Column("SE before", "nats", "spectral entropy"),
            Column("SE after", "nats", "spectral entropy"),
            Column("PR before", "directions", "participation ratio"),
            Column("PR after", "directions", "participation ratio"),
            Column("PR gain", "×", "participation ratio after over before"),
            Column("EEE before", "", "early enrichment"),
            Column("EEE after", "", "early enrichment"),
            Column("JS", "nats", "divergence of the spectra by rank"),
        )
        parts = (
            self.pre.se, self.post.se, self.pre.pr, self.post.pr, self.pr_gain, self.pre.eee, self.post.eee, self.js,
        )  # fmt: skip
        rows = zip(self.layers, *(p.tolist() for p in parts), strict=True)
        return Table(columns, tuple(rows), f"{self.n_tokens:,} tokens, {self.width:,} hidden units a layer")

    def figure(self) -> Figure:
        """Participation ratio and early enrichment by layer, before and after."""
        from plotly.subplots import make_subplots

        figure = make_subplots(rows=1, cols=2, subplot_titles=("participation ratio (directions)", "early enrichment"))
        names = [str(layer) for layer in self.layers]
        for col, key in enumerate(("pr", "eee"), start=1):
            for label, metrics in (("before", self.pre), ("after", self.post)):
                figure.add_scatter(
                    x=names, y=getattr(metrics, key).tolist(), name=label, legendgroup=label, showlegend=col == 1,
                    row=1, col=col,
                )  # fmt: skip
        figure.update_xaxes(title_text="layer")
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; the spectra themselves are thinned to at most 64 ranks a layer."""
        keep = torch.unique(torch.logspace(0, math.log10(self.width), 64).round().long() - 1)

        def thin(metrics: SpectrumMetrics) -> dict[str, Any]:
            share = metrics.eigs / metrics.eigs.sum(-1, keepdim=True)
            return {
                "se": metrics.se.tolist(),
                "pr": metrics.pr.tolist(),
                "eee": metrics.eee.tolist(),
                "spectrum": share[:, keep].tolist(),
            }

        return {
            "layers": list(self.layers),
            "width": self.width,
            "n_tokens": self.n_tokens,
            "n_seen": self.n_seen,
            "rank_limited": self.rank_limited,
            "ranks": (keep + 1).tolist(),
            "pre": thin(self.pre),
            "post": thin(self.post),
            "js": self.js.tolist(),
            "pr_gain": self.pr_gain.tolist(),
            "eee_shift": self.eee_shift.tolist(),
            "skipped": list(self.skipped),
        }


class NerveReducer(Reducer):
    """Gathers in a forward pass what `nerve` needs; share it with other reducers in `assay.core.trace.trace`.

    Covariances are accumulated in float32 where they all fit into `memory`. Where they do not, a uniform sample of
    tokens is kept instead, the same tokens before and after the nonlinearity and in every layer.

    Before the nonlinearity stands W·x + b, whose covariance is W·cov(x)·Wᵀ. Where x is narrower than W·x, as it is in
    nearly every model, x is what is accumulated, at a fraction of the cost.

    Args:
        model_anatomy: where the feed-forward layers are.
        memory: bytes that may be held.
        seed: of the sample.

    Raises:
        NotApplicable: no block has a dense feed-forward layer.
    """

    sites = ("mlp.in", "mlp.pre", "mlp.post")

    def __init__(self, model_anatomy: Anatomy, *, memory: int = _MEMORY, seed: int = 0) -> None:
        dense = [b for b in model_anatomy.blocks if b.mlp is not None]
        if not dense:
            raise NotApplicable("no dense feed-forward layers found: pass layers={name: (up, down)}")
        self.layers: list[int] = [b.index for b in dense]
        self.skipped = tuple(b.index for b in model_anatomy.blocks if b.mlp is None)
        self._firsts = {b.index: f for b in dense if (f := _narrow_first(b.mlp)) is not None}
        widths = [w for b in dense for w in (b.mlp.down.in_features, self._width_before(b))]
        self._seed = seed
        self._capacity: int | None = None
        if 4 * sum(w * w for w in widths) > memory:
            self._capacity = max(2, memory // (4 * sum(widths)))
        self._covariances: dict[tuple[str, int], Covariance] = {}
        self._rows: dict[tuple[str, int], Tensor] = {}
        self._chosen = (torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long))
        self.n_seen = 0
        self._counted = -1

    def _width_before(self, block: Any) -> int:
        first = self._firsts.get(block.index)
        return block.mlp.down.in_features if first is None else first.in_features

    def update(self, site: str, layer: int, value: Any, batch: Batch) -> None:
        """Take in one layer's activations."""
        if site == ("mlp.pre" if layer in self._firsts else "mlp.in"):
            return
        rows = batch.rows(value.detach())
        if batch.index != self._counted:
            self._counted = batch.index
            before, self.n_seen = self.n_seen, self.n_seen + len(rows)
            if self._capacity is not None:
                self._choose(before, len(rows))
        key = (site, layer)
        if self._capacity is None:
            if key not in self._covariances:
                self._covariances[key] = Covariance(rows.shape[-1], device=rows.device)
            self._covariances[key].update(rows)
            return
        kept = self._rows.get(key)
        if kept is None:
            kept = self._rows[key] = rows.new_empty(self._capacity, rows.shape[-1])
        places, sources = self._chosen
        kept[places] = rows[sources]

    def _choose(self, before: int, n: int) -> None:
        """Reservoir sampling: which rows of this batch go to which places, decided once for all layers."""
        assert self._capacity is not None
        order = torch.arange(before, before + n)
        draw = (torch.rand(n, generator=generator(self._seed, "nerve", before)).double() * (order + 1)).long()
        places = torch.where(order < self._capacity, order, draw)
        inside = places < self._capacity
        # A later row overwrites an earlier one that drew the same place.
        chosen = dict(zip(places[inside].tolist(), torch.nonzero(inside).flatten().tolist(), strict=True))
        self._chosen = (
            torch.tensor(list(chosen), dtype=torch.long),
            torch.tensor(list(chosen.values()), dtype=torch.long),
        )

    def result(self) -> NerveResult:
        """The spectra and their metrics.

        Raises:
            InputError: fewer than two tokens were seen, or a layer's activations are constant.
        """
        n = self.n_seen if self._capacity is None else min(self.n_seen, self._capacity)
        if n < 2:
            raise InputError(f"{n} tokens were seen: at least 2 are needed")
        spectra = {site: self._spectra(site, n) for site in ("mlp.pre", "mlp.post")}
        for site, eigs in spectra.items():
            flat = torch.nonzero(eigs.sum(-1) <= 0).flatten().tolist()
            if flat:
                raise InputError(f"zero variance in layer {self.layers[flat[0]]} at {site}")
        pre, post = (spectrum_metrics(eigs=eigs) for eigs in spectra.values())
        bound = min(pre.eigs.shape[-1], n - 1)
        return NerveResult(
            layers=tuple(self.layers),
            pre=_counted(pre, n, bound),
            post=_counted(post, n, bound),
            js=js_spectra(pre.eigs, post.eigs),
            n_tokens=n,
            n_seen=self.n_seen,
            skipped=self.skipped,
        )

    def _spectra(self, site: str, n: int) -> Float[Tensor, "layers width"]:
        def spectrum(layer: int) -> Tensor:
            first = self._firsts.get(layer) if site == "mlp.pre" else None
            key = (site if first is None else "mlp.in", layer)
            if self._capacity is None:
                covariance = self._covariances.pop(key).covariance
                return eigvalsh_batched(covariance) if first is None else _spectrum_through(first.weight, covariance)
            rows = self._rows.pop(key)[:n]
            return _eigenvalues_of_rows(rows if first is None else rows.double() @ first.weight.detach().double().T)

        eigs = each_on_one_core(spectrum, self.layers)
        width = max(len(e) for e in eigs)
        return torch.stack([nn.functional.pad(e, (0, width - len(e))) for e in eigs])


def _counted(metrics: SpectrumMetrics, n: int, bound: int) -> SpectrumMetrics:
    return SpectrumMetrics(metrics.se, metrics.pr, metrics.eee, metrics.eigs, n, bound)


def nerve(
    model: nn.Module,
    batches: Iterable[Tensor | Mapping[str, Any]],
    *,
    layers: Mapping[str, Sequence[str]] | None = None,
    memory: int = _MEMORY,
    seed: int = 0,
    progress: Progress = silent,
) -> NerveResult:
    """How many directions every feed-forward layer uses, before and after its nonlinearity.

    Args:
        model: a transformers model, or any module with `layers`.
        batches: token ids `[batch, tokens]`, or mappings of the model's keyword arguments; padding, on the right, is
            left out. With `layers`, whatever the module takes.
        layers: for a module that assay does not know: `{name: (up, down)}` or `{name: (gate, up, down)}` with the dotted
            names of linear layers.
        memory: bytes that the accumulators may take; beyond it a sample of tokens stands for all.
        seed: of that sample.
        progress: called after every batch.

    Returns:
        Metrics and spectra by layer. Warns where there are fewer tokens than hidden units, which biases both entropy
        and participation ratio downwards.

    Raises:
        NotApplicable: the model has no dense feed-forward layers.
        InputError: fewer than two tokens, a constant layer, or a name in `layers` that the model does not have.

    Source: NerVE (arXiv 2603.06922), hook points and metrics of its section on eigenspectra.

    >>> block = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    >>> result = nerve(block, [x], layers={"mlp": ("0", "2")})
    >>> bool(result.post.pr > result.pre.pr)
    True
    """
    if layers is None:
        found = anatomy(model)
        reducer = NerveReducer(found, memory=memory, seed=seed)
        trace(model, batches, [reducer], anatomy=found, progress=progress)
        return _warned(reducer.result())
    named = _named_layers(model, layers)
    reducer = NerveReducer(named, memory=memory, seed=seed)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), attach(model, [reducer], anatomy=named):
            for done, batch in enumerate(batches, start=1):
                _ = model(**batch) if isinstance(batch, Mapping) else model(batch)
                progress(done, None, "forward passes")
    finally:
        model.train(training)
    result = reducer.result()
    names = tuple(layers)
    return _warned(
        NerveResult(names, result.pre, result.post, result.js, result.n_tokens, result.n_seen, result.skipped)
    )


def _warned(result: NerveResult) -> NerveResult:
    if result.rank_limited:
        warnings.warn(
            f"only {result.n_tokens} tokens for {result.width} hidden units: the spectrum has rank at most "
            f"{result.n_tokens - 1}, and entropy and participation ratio are biased downwards",
            stacklevel=3,
        )
    return result


def _named_layers(model: nn.Module, layers: Mapping[str, Sequence[str]]) -> Any:
    """The little of an anatomy that the reducer and the hooks look at."""
    blocks = []
    for index, (name, paths) in enumerate(layers.items()):
        if len(paths) not in (2, 3):
            raise InputError(f"layers[{name!r}] has {len(paths)} names: give (up, down) or (gate, up, down)")
        parts = []
        for path in paths:
            try:
                parts.append(Projection(model.get_submodule(path), path))
            except AttributeError as error:
                raise InputError(f"layers[{name!r}] names {path!r}, which the model does not have") from error
        mlp = SimpleNamespace(gate=parts[0] if len(parts) == 3 else None, up=parts[-2], down=parts[-1])
        blocks.append(SimpleNamespace(index=index, module=model, attention=None, mlp=mlp))
    return SimpleNamespace(backbone=model, blocks=tuple(blocks))


class NerveMonitor:
    """Watches the spectra while a model trains.

    On the steps that it watches, the forward pass inside the `with` block is measured; other steps cost nothing.

    Args:
        model: as in `nerve`.
        every: watch step 1 and every step that this divides.
        layers: as in `nerve`.
        memory: as in `nerve`.

    >>> model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
    >>> monitor = NerveMonitor(model, every=2, layers={"mlp": ("0", "2")})
    >>> for i in range(1, 5):
    ...     with monitor.step(i):
    ...         loss = model(torch.randn(64, 4)).square().mean()
    ...         loss.backward()
    >>> [step for step, _ in monitor.history]
    [1, 2, 4]
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 1000,
        *,
        layers: Mapping[str, Sequence[str]] | None = None,
        memory: int = _MEMORY,
    ) -> None:
        if every < 1:
            raise InputError(f"every is {every}: it must be at least 1")
        self.model = model
        self.every = every
        self.memory = memory
        self.history: list[tuple[int, NerveResult]] = []
        self._anatomy: Any = anatomy(model) if layers is None else _named_layers(model, layers)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surround the forward pass of one training step, numbered from 1."""
        if number != 1 and number % self.every:
            yield
            return
        reducer = NerveReducer(self._anatomy, memory=self.memory, seed=number)
        with attach(self.model, [reducer], anatomy=self._anatomy):
            yield
        self.history.append((number, reducer.result()))

    def table(self) -> Table:
        """One row for each watched step: the means over layers."""
        columns = (
            Column("step"),
            Column("SE before", "nats"), Column("SE after", "nats"),
            Column("PR before", "directions"), Column("PR after", "directions"),
            Column("EEE before"), Column("EEE after"), Column("JS", "nats"),
        )  # fmt: skip
        rows = tuple(
            (step, *(float(m.mean()) for m in (
                r.pre.se, r.post.se, r.pre.pr, r.post.pr, r.pre.eee, r.post.eee, r.js,
            )))
            for step, r in self.history
        )  # fmt: skip
        return Table(columns, rows)

    def correlation(self, losses: Mapping[int, float]) -> Table:
        """Pearson correlation of each metric, averaged over layers, with a loss at the watched steps.

        Args:
            losses: the loss by step number; at least 4 watched steps are needed.

        Raises:
            InputError: fewer than 4 steps have both.
        """
        table = self.table()
        rows = [row for row in table.rows if row[0] in losses]
        if len(rows) < 4:
            raise InputError(f"{len(rows)} watched steps have a loss: at least 4 are needed")
        y = [losses[row[0]] for row in rows]
        out = []
        for i, column in enumerate(table.columns[1:], start=1):
            r = pearson([row[i] for row in rows], y)
            out.append((column.name, r.mean, r.low, r.high))
        return Table((Column("metric"), Column("r"), Column("low"), Column("high")), tuple(out))

    def callback(self) -> Any:
        """The same as a callback for `transformers.Trainer`."""
        from transformers import TrainerCallback

        monitor = self

        class _Callback(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                self.context = monitor.step(state.global_step + 1)
                self.context.__enter__()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                self.context.__exit__(None, None, None)

        return _Callback()
