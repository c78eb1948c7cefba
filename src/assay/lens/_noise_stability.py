"""How much of a function's output survives correlated noise on all of its inputs at once, and what follows from it.

The stability curve bounds the part of the output that hangs on many inputs together (Fourier or Hermite mass of high
degree); average sensitivity is the older bound for the same mass, and token influence says which inputs matter. The same
quantity is a loss term, and for ReLU layers it has a closed form.

Source: Noise Stability of Transformer Models (arXiv 2602.08287).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from scipy.special import stdtrit
from torch import Tensor, nn

from assay.core.anatomy import Anatomy
from assay.core.anatomy import anatomy as find_anatomy
from assay.core.errors import InputError, NotApplicable
from assay.core.progress import Progress, silent
from assay.core.results import Column, Result, Table
from assay.core.seeds import generator

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Kernel = Literal["gaussian", "bonami", "paper"]
Output = Literal["probs", "logits"]
Function = Callable[[Tensor], Tensor]
Sampler = Callable[[int, torch.Generator], Tensor]

_DEGREES = (5, 15, 30)


def _keep(kernel: str, rho: float) -> float:
    """The probability that a token stays, which is the correlation that the spectrum sees; for Gaussians ρ itself."""
    return (1 + rho) / 2 if kernel == "paper" else rho


def _degree(T: int) -> int:
    if isinstance(T, bool) or int(T) != T or T < 1:
        raise InputError(f"T is {T}: the degree of a tail is a whole number from 1")
    return int(T)


def _quantile(level: float, n_windows: int, n_limits: int) -> float:
    """Student's one-sided quantile for `n_limits` limits that shall hold together."""
    if not 0 < level < 1:
        raise InputError(f"level is {level}: give a confidence level between 0 and 1, such as 0.95")
    if n_windows < 2:
        raise InputError("one window gives no confidence limit: give at least two")
    return float(stdtrit(n_windows - 1, 1 - (1 - level) / n_limits))


@dataclass(frozen=True)
class StabilityCurve(Result):
    """Noise stability over a grid of correlations.

    Attributes:
        rho: the correlations asked for.
        value: Stab(ρ) = E f(X)·f(Y), in squared units of the output; with `centred`, the covariance instead.
        stderr: its standard error over windows; NaN where there is one window.
        norm2: E ‖f(X)‖² on the same windows; with `centred`, the variance.
        share: value / norm2. The ratio of two unbiased means on the same windows; its own bias is of order 1/n_windows.
        share_stderr: its standard error over windows. Smaller than stderr / norm2 where both means move together.
        n_pairs: how many pairs (X, Y) each value rests on.
        n_windows: how many independent inputs X those pairs share.
        n_passes: how many inputs the function was evaluated on.
        kernel: the kind of noise.
        centred: whether the mean output was taken off.
        of: what the output is.
    """

    rho: Float[Tensor, "rhos"]
    value: Float[Tensor, "rhos"]
    stderr: Float[Tensor, "rhos"]
    norm2: float
    share: Float[Tensor, "rhos"]
    share_stderr: Float[Tensor, "rhos"]
    n_pairs: int
    n_windows: int
    n_passes: int
    kernel: str
    centred: bool
    of: str

    def tail_bound(self, T: int, *, level: float | None = None) -> float:
        """The most that the degrees from T up can hold, as a share of `norm2`.

        Mass of degree d shrinks by ρ^d under noise, so that a loss of δ = 1 − share leaves at most δ / (1 − ρ^T) to
        the degrees from T up. This is a theorem where X is drawn from the noise's own distribution (independent tokens,
        uniform over those that are not protected, or standard normal numbers), and a rule of thumb for other X.

        Args:
            T: the lowest degree that counts, from 1.
            level: take δ at its upper confidence limit, so that the bound holds with this confidence; corrected for
                choosing the best ρ. By default δ is the estimate itself, which the choice of ρ makes a little low.

        Returns:
            The best bound over the grid, at most 1; NaN for a function that is zero.

        Raises:
            InputError: T below 1, no ρ below 1, or a level with a single window.
        """
        T = _degree(T)
        kept, delta = self._losses(level)
        return float((delta / (1 - kept**T)).min().clamp(max=1))

    def degree(self, epsilon: float, *, level: float | None = None) -> float:
        """The degree from which on the tail bound is at most `epsilon`; infinite where the grid proves none.

        Args:
            epsilon: a share of `norm2`, above 0.
            level: as for `tail_bound`.

        Raises:
            InputError: as for `tail_bound`, or an epsilon that is not above 0.
        """
        if not epsilon > 0:
            raise InputError(f"epsilon is {epsilon}: give a share above 0")
        kept, delta = self._losses(level)
        proves = delta < epsilon
        if not bool(proves.any()):
            return math.inf
        kept, delta = kept[proves], delta[proves]
        # At ρ = 0 every degree from 1 up is lost whole, and ln ρ = −∞ gives just that.
        return max(1.0, float(torch.ceil(torch.log(1 - delta / epsilon) / torch.log(kept) - 1e-9).min()))

    def _losses(self, level: float | None) -> tuple[Tensor, Tensor]:
        kept = torch.tensor([_keep(self.kernel, float(r)) for r in self.rho], dtype=torch.float64)
        usable = kept < 1
        n = int(usable.sum())
        if n == 0:
            raise InputError("every rho is 1, where nothing is lost: a bound needs a rho below 1")
        delta = 1 - self.share[usable]
        if level is not None:
            delta = delta + _quantile(level, self.n_windows, n) * self.share_stderr[usable]
        return kept[usable], delta.clamp(min=0)

    def table(self) -> Table:
        """One row a correlation."""
        columns = (
            Column("rho", about="correlation of the noise"),
            Column("stability", about="E f(X)·f(Y)"),
            Column("s.e."),
            Column("share", about="of the output's squared norm (of its variance where centred)"),
            Column("share s.e."),
        )
        parts = (self.rho, self.value, self.stderr, self.share, self.share_stderr)
        bounds = ", ".join(f"{T}: {self.tail_bound(T):.3g}" for T in _DEGREES) if bool((self.rho < 1).any()) else ""
        title = f"Noise stability ({self.kernel}) of the {self.of}, {self.n_pairs} pairs from {self.n_windows} windows"
        title += f"; share of degree at least {bounds}" if bounds else ""
        return Table(columns, tuple(zip(*(p.tolist() for p in parts), strict=True)), title)

    def figure(self) -> Figure:
        """The share that survives by correlation, with 95 % bars."""
        import plotly.graph_objects as go

        order = self.rho.argsort()
        bars = (1.96 * self.share_stderr[order]).nan_to_num(0).tolist()
        figure = go.Figure(
            go.Scatter(
                x=self.rho[order].tolist(),
                y=self.share[order].tolist(),
                error_y={"type": "data", "array": bars},
                mode="lines+markers",
                hovertemplate="ρ = %{x}: %{y:.4f}<extra></extra>",
            )
        )
        figure.update_layout(
            title=f"Noise stability of the {self.of}",
            xaxis_title=f"correlation ρ ({self.kernel} noise)",
            yaxis_title="share of the variance" if self.centred else "share of the squared norm",
        )
        return figure

    def to_dict(self) -> dict[str, Any]:
        """The fields, and the tail bounds at degrees 5, 15 and 30 where some ρ is below 1."""
        usable = bool((self.rho < 1).any())
        bounds = {str(T): self.tail_bound(T) for T in _DEGREES} if usable else {}
        return super().to_dict() | {"tail_bound": {T: b if math.isfinite(b) else None for T, b in bounds.items()}}


@dataclass(frozen=True)
class Sensitivity(Result):
    """Average sensitivity: the total influence of single tokens.

    Attributes:
        value: I = Σ_i E Var_i f, in squared units of the output.
        stderr: its standard error over windows; NaN where there is one window.
        norm2: E ‖f(X)‖² on the same windows; with `centred`, the variance.
        share: value / norm2.
        share_stderr: its standard error over windows.
        n_pairs: how many resampled tokens it rests on.
        n_windows: how many independent inputs.
        n_passes: how many inputs the function was evaluated on.
        centred: whether `norm2` is the variance.
        of: what the output is.
    """

    value: float
    stderr: float
    norm2: float
    share: float
    share_stderr: float
    n_pairs: int
    n_windows: int
    n_passes: int
    centred: bool
    of: str

    def tail_bound(self, T: int, *, level: float | None = None) -> float:
        """The most that the degrees from T up can hold, as a share of `norm2`: share / T, at most 1.

        Args:
            T: the lowest degree that counts, from 1.
            level: take the upper confidence limit of the share, so that the bound holds with this confidence.

        Raises:
            InputError: T below 1, or a level with a single window.
        """
        T = _degree(T)
        share = self.share
        if level is not None:
            share += _quantile(level, self.n_windows, 1) * self.share_stderr
        return min(max(share, 0.0) / T, 1.0)

    def table(self) -> Table:
        """One row."""
        columns = (Column("average sensitivity"), Column("s.e."), Column("share"), Column("share s.e."))
        row = (self.value, self.stderr, self.share, self.share_stderr)
        return Table(columns, (row,), f"Average sensitivity of the {self.of}, {self.n_pairs} resampled tokens")

    def figure(self) -> Figure:
        """The bound on the mass of degree at least T, by T."""
        import plotly.graph_objects as go

        degrees = list(range(1, 65))
        figure = go.Figure(go.Scatter(x=degrees, y=[self.tail_bound(T) for T in degrees]))
        figure.update_layout(
            title=f"Bound from average sensitivity of the {self.of}",
            xaxis_title="degree T",
            yaxis_title="share of degree at least T",
        )
        return figure


@dataclass(frozen=True)
class TokenInfluence(Result):
    """The influence of each position.

    Attributes:
        influence: Inf_i = E ‖f(X) − f(X with token i resampled)‖², in squared units of the output; 0 where the token is
            protected in every window.
        stderr: its standard error over windows; NaN where there is one window.
        norm2: E ‖f(X)‖² on the same windows.
        n_windows: how many inputs.
        of: what the output is.
    """

    influence: Float[Tensor, "tokens"]
    stderr: Float[Tensor, "tokens"]
    norm2: float
    n_windows: int
    of: str

    @property
    def total(self) -> float:
        """Σ_i Inf_i / 2: the average sensitivity, where X is drawn from the noise's own distribution."""
        return float(self.influence.sum()) / 2

    def influential(self, fraction: float = 0.1) -> int:
        """How many positions have more than this fraction of the largest influence."""
        top = self.influence.max()
        return int((self.influence > fraction * top).sum())

    def table(self) -> Table:
        """One row a position, the most influential first."""
        columns = (Column("position", about="from 0"), Column("influence"), Column("s.e."))
        order = self.influence.argsort(descending=True, stable=True).tolist()
        rows = tuple((i, float(self.influence[i]), float(self.stderr[i])) for i in order)
        count = self.influential()
        return Table(
            columns, rows, f"Influence on the {self.of}: {count} of {len(rows)} tokens above 10 % of the largest"
        )

    def figure(self) -> Figure:
        """The influence by position."""
        import plotly.graph_objects as go

        bars = (1.96 * self.stderr).nan_to_num(0).tolist()
        figure = go.Figure(go.Bar(y=self.influence.tolist(), error_y={"type": "data", "array": bars}))
        figure.update_layout(title=f"Influence on the {self.of}", xaxis_title="position", yaxis_title="influence")
        return figure


class _Alphabet:
    """The tokens of a vocabulary: which may be resampled, and draws of those that may come instead."""

    def __init__(self, vocab: int | None, protect: Collection[int]) -> None:
        if vocab is None:
            raise InputError("token kernel needs vocab: give the number of tokens, such as vocab=len(tokenizer)")
        if vocab < 1:
            raise InputError(f"vocab is {vocab}: give the number of tokens")
        self.vocab = vocab
        self._protected = torch.zeros(vocab, dtype=torch.bool)
        inside = [int(t) for t in protect if 0 <= int(t) < vocab]
        self._protected[inside] = True
        self._allowed = torch.arange(vocab)[~self._protected]
        if len(self._allowed) == 0:
            raise InputError(f"protect names all {vocab} tokens: there is none left to sample")

    def check(self, x: Tensor) -> None:
        """Refuse what are no token ids of this vocabulary."""
        if x.is_floating_point() or x.dtype == torch.bool:
            raise InputError(f"token inputs are {x.dtype}: give whole token ids, and map them to numbers inside f")
        if x.numel() and not 0 <= int(x.min()) <= int(x.max()) < self.vocab:
            raise InputError(f"inputs hold ids from {int(x.min())} to {int(x.max())}, outside vocab={self.vocab}")

    def free(self, x: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Which positions may be resampled."""
        return ~self._protected.to(x.device)[x.long()]

    def at(self, u: Float[Tensor, "*shape"], like: Tensor) -> Int[Tensor, "*shape"]:
        """Tokens for uniform numbers from 0 to 1: each that is not protected is as likely as the others."""
        return self._allowed[(u * len(self._allowed)).long()].to(like)


Noise = Callable[[float], Tensor]


def _token_noise(x: Tensor, alphabet: _Alphabet, kernel: str, rng: torch.Generator) -> Noise:
    """Y as a function of ρ; the same draws serve every ρ, so that a token stays at all correlations above its own."""
    # Both numbers of a token stand side by side, so that how a run is cut into batches does not change them.
    level, index = torch.rand(*x.shape, 2, generator=rng, dtype=torch.float64).unbind(-1)
    level, new, free = level.to(x.device), alphabet.at(index, x), alphabet.free(x)
    return lambda rho: torch.where(free & (level >= _keep(kernel, rho)), new, x)


def _gaussian_noise(x: Tensor, rng: torch.Generator, mean: Any = 0.0, std: Any = 1.0, free: Any = None) -> Noise:
    """Y as a function of ρ, in standard units of mean and std."""
    z = torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x.device) * std

    def at(rho: float) -> Tensor:
        y = mean + rho * (x.double() - mean) + math.sqrt(1 - rho * rho) * z
        return (y if free is None else torch.where(free[..., None], y, x.double())).to(x.dtype)

    return at


@dataclass(frozen=True)
class _Target:
    """A function of inputs, or a model behind one.

    Attributes:
        call: from inputs, and which positions are not protected, to outputs.
        of: what the output is.
        parts: the model's anatomy, None for a plain function.
    """

    call: Callable[[Tensor, Tensor | None], Tensor]
    of: str
    parts: Anatomy | None = None

    def __call__(self, x: Tensor, free: Tensor | None, size: int) -> Float[Tensor, "batch outputs"]:
        """The output vectors of a batch, evaluated `size` inputs at a time."""
        frees = [None] * len(x) if free is None else free.split(size)
        found = [self._one(part, mask) for part, mask in zip(x.split(size), frees)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _one(self, x: Tensor, free: Tensor | None) -> Tensor:
        out = self.call(x, free)
        if not isinstance(out, Tensor) or out.ndim == 0 or len(out) != len(x):
            shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise InputError(f"f gave {shape} for {len(x)} inputs: it must give a tensor with one row an input")
        out = out.reshape(len(x), -1)
        if not bool(torch.isfinite(out).all()):
            raise InputError("f gave values that are not finite: they have no stability")
        return out if out.is_floating_point() else out.double()


def _target(f: Function | nn.Module, output: str, position: int | None) -> _Target:
    if output not in ("probs", "logits"):
        raise InputError(f"output is {output!r}: choose probs or logits")
    if not isinstance(f, nn.Module) or not hasattr(getattr(f, "config", None), "model_type"):
        if not callable(f):
            raise InputError(f"f is a {type(f).__name__}: give a function from inputs to outputs, or a model")
        return _Target(lambda x, free: f(x), "output")
    parts = find_anatomy(f)
    if parts.architecture.input != "text":
        raise NotApplicable(f"{type(f).__name__} does not read tokens: pass a function of what it reads instead")
    squash: Function = (lambda logits: logits.float().softmax(-1)) if output == "probs" else (lambda logits: logits)
    kind = "probabilities" if output == "probs" else "logits"
    cache = {"use_cache": False} if hasattr(parts.backbone.config, "use_cache") else {}

    def given(x: Tensor) -> dict[str, Any]:
        return cache | {"inputs_embeds" if x.is_floating_point() else "input_ids": x}

    if type(f).__name__.endswith("ForSequenceClassification"):
        return _Target(lambda x, free: squash(f(**given(x)).logits), f"class {kind}", parts)
    at = -1 if position is None and parts.causal else position
    head: Function = (lambda h: h) if parts.lm_head is None else (lambda h: squash(parts.logits(h)))
    what = "hidden state" if parts.lm_head is None else f"{'next-token' if parts.causal else 'token'} {kind}"

    def call(x: Tensor, free: Tensor | None) -> Tensor:
        hidden = parts.backbone(**given(x))[0]
        if at is not None:
            return head(hidden[:, at])
        # One sequence at a time, since logits of all positions of a batch are large.
        rows = [h if free is None else h[m] for h, m in zip(hidden, hidden if free is None else free)]
        return torch.stack([head(r).mean(0) for r in rows])

    where = "mean over positions" if at is None else "last position" if at == -1 else f"position {at}"
    return _Target(call, f"{what} ({where})", parts)


@contextmanager
def _evaluating(f: Any) -> Iterator[None]:
    """No gradients, and evaluation mode for a module."""
    training = {m: m.training for m in f.modules()} if isinstance(f, nn.Module) else {}
    if training:
        f.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


@dataclass(frozen=True)
class _Plan:
    """Which windows are used, how often, and in which groups."""

    windows: Tensor
    counts: Tensor
    groups: list[Tensor]


def _plan(inputs: Tensor | Sampler, n_pairs: int, batch_size: int, seed: int, target: _Target) -> _Plan:
    if n_pairs < 1:
        raise InputError(f"n_pairs is {n_pairs}: at least 1 is needed")
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}: at least 1 is needed")
    windows = inputs if isinstance(inputs, Tensor) else inputs(n_pairs, generator(seed, "inputs"))
    if not isinstance(windows, Tensor) or windows.ndim < 2 or len(windows) == 0:
        shape = tuple(windows.shape) if isinstance(windows, Tensor) else type(windows).__name__
        raise InputError(f"inputs are {shape}: give one input a row, [n, tokens] or [n, features]")
    if target.parts is not None:
        windows = windows.to(next(target.parts.model.parameters()).device)
    n = len(windows)
    order = torch.randperm(n, generator=generator(seed, "windows")).to(windows.device)
    used = order[: min(n, n_pairs)]
    counts = torch.full((len(used),), n_pairs // len(used))
    counts[: n_pairs % len(used)] += 1
    # Groups of at least two, since the mean is taken off within a group.
    n_groups = max(1, min(math.ceil(len(used) / batch_size), len(used) // 2))
    return _Plan(windows[used], counts, list(torch.arange(len(used)).tensor_split(n_groups)))


def _moments(per_window: Float[Tensor, "windows ..."]) -> tuple[Tensor, Tensor]:
    """Mean and its standard error over windows."""
    n = len(per_window)
    if n < 2:
        return per_window.mean(0), torch.full_like(per_window[0], math.nan)
    return per_window.mean(0), per_window.std(0) / math.sqrt(n)


def _ratio(top: Float[Tensor, "windows ..."], bottom: Float[Tensor, "windows"]) -> tuple[Tensor, Tensor]:
    """Ratio of means over windows and its linearised standard error."""
    below = bottom.mean()
    share = top.mean(0) / below
    residual = top - share * bottom.reshape(-1, *[1] * (top.ndim - 1))
    return share, _moments(residual)[1] / below


def _squares(a: Tensor, centre: bool) -> tuple[Tensor, Tensor]:
    """Outputs in float64 with their group's mean taken off where asked, and their squared norms."""
    a = a.double()
    if not centre:
        return a, a.square().sum(-1)
    a = a - a.mean(0)
    return a, a.square().sum(-1) * len(a) / (len(a) - 1)


def _check_centre(centre: bool, plan: _Plan) -> None:
    if centre and len(plan.windows) < 2:
        raise InputError("centre needs at least two windows, to know the mean output")


def noise_stability(
    f: Function | nn.Module,
    inputs: Tensor | Sampler,
    rho: float | Sequence[float] = (0.0, 0.25, 0.5, 0.75, 0.9),
    *,
    kernel: Kernel = "gaussian",
    vocab: int | None = None,
    n_pairs: int = 4096,
    protect: Collection[int] = (),
    output: Output = "probs",
    position: int | None = None,
    centre: bool = False,
    seed: int = 0,
    batch_size: int = 64,
    progress: Progress = silent,
) -> StabilityCurve:
    """Noise stability E f(X)·f(Y) of a function or a model, for X and a noisy copy Y with correlation ρ.

    The same X serves every ρ, and so do the draws of the noise. Pairs that share a window X count as dependent: the
    estimate is the mean over windows of each window's mean, and standard errors are over windows.

    Args:
        f: a function from `[batch, …]` to `[batch, outputs]`; outputs count as one vector. Or a model of transformers:
            then the output is the distribution over the next token at the last position (a causal language model), the
            token distribution averaged over positions that are not protected (a masked one), the distribution over
            classes (a sequence classifier), or the last hidden state at the same place (a model without a head).
        inputs: `[n, tokens]` ids in full windows without padding, `[n, …]` real numbers, or a function
            `sampler(n, generator)` that draws `n` of them, which then count as independent.
        rho: one correlation or several, from 0 to 1. At 1 Y is X and costs nothing.
        kernel: "bonami" keeps each token with probability ρ and else draws a new one uniformly; "paper" keeps it with
            probability (1 + ρ) / 2, which is "bonami" at that correlation; "gaussian" is Y = ρX + √(1 − ρ²)Z on real
            inputs, which should be standard normal. With a model and token ids, "gaussian" acts on the token
            embeddings, in units of their mean and spread per channel over the windows' unprotected tokens.
        vocab: how many tokens there are, for the token kernels; a model's own number where it is left out.
        n_pairs: pairs for each ρ. Windows are reused where there are fewer, and left out where there are more.
        protect: token ids (beginning of sequence, padding, masks) that are neither resampled nor drawn. Ids outside the
            vocabulary have no effect.
        output: of a model, "probs" or raw "logits".
        position: of a model, which position's output counts; for a masked model, that of a mask which `inputs` hold and
            `protect` names. By default as described under `f`.
        centre: take the mean output off, as influences do by themselves: covariance and variance in place of products.
        seed: of the choice of windows and of the noise.
        batch_size: inputs in one evaluation of `f`. With real inputs other batches see other noise.
        progress: called with the number of evaluated inputs.

    Raises:
        InputError: a ρ outside [0, 1], a token kernel without `vocab`, ids outside it, or outputs that are not finite.
        NotApplicable: a model that reads images.
        UnknownArchitecture: a model of transformers that has no anatomy; pass a function that calls it.

    Source: Noise Stability of Transformer Models (arXiv 2602.08287), definition of noise stability.

    >>> parity = lambda bits: (1 - 2 * bits[:, :3]).prod(1, keepdim=True).double()
    >>> bits = lambda n, rng: torch.randint(2, (n, 8), generator=rng)
    >>> curve = noise_stability(parity, bits, (0.5, 1.0), kernel="bonami", vocab=2, n_pairs=20_000, batch_size=20_000)
    >>> [round(v, 1) for v in curve.share.tolist()], curve.n_passes
    ([0.1, 1.0], 40000)
    """
    rhos = [float(r) for r in (rho if hasattr(rho, "__iter__") else [rho])]
    if not rhos:
        raise InputError("rho is empty: give at least one correlation")
    for r in rhos:
        if not 0 <= r <= 1:
            raise InputError(f"rho must be in [0,1], and {r} is not")
    if kernel not in ("gaussian", "bonami", "paper"):
        raise InputError(f"kernel is {kernel!r}: choose gaussian, bonami or paper")
    target = _target(f, output, position)
    plan = _plan(inputs, n_pairs, batch_size, seed, target)
    _check_centre(centre, plan)
    x, n = plan.windows, len(plan.windows)
    free: Tensor | None = None
    mean: Any = 0.0
    std: Any = 1.0
    alphabet: _Alphabet | None = None
    if kernel != "gaussian" or (target.parts is not None and not x.is_floating_point()):
        alphabet = _alphabet(target, vocab, protect)
        alphabet.check(x)
        free = alphabet.free(x)
    elif not x.is_floating_point():
        raise InputError(f"inputs are {x.dtype}: the gaussian kernel needs real numbers; bonami and paper take tokens")
    noisy = [i for i, r in enumerate(rhos) if _keep(kernel, r) < 1]
    rng = generator(seed, "noise")
    product = torch.zeros(n, len(rhos), dtype=torch.float64)
    norm = torch.zeros(n, dtype=torch.float64)
    total, done = n + n_pairs * len(noisy), 0
    with _evaluating(f):
        if kernel == "gaussian" and target.parts is not None and alphabet is not None:
            assert free is not None
            mean, std = _channel_moments(target.parts, x, free, batch_size)
        for group in plan.groups:
            ids, mask = x[group.to(x.device)], None if free is None else free[group.to(x.device)]
            base = ids
            if kernel == "gaussian" and alphabet is not None:
                assert target.parts is not None
                base = target.parts.embedding(ids)
            a, norms = _squares(target(base, mask, batch_size), centre)
            norm[group] = norms.cpu()
            done += len(group)
            rows = torch.repeat_interleave(torch.arange(len(group)), plan.counts[group])
            sums = a.new_zeros(len(noisy), *a.shape) if centre else None
            products = a.new_zeros(len(noisy), len(group))
            for part in rows.split(batch_size):
                at = part.to(x.device)
                chosen, kept = base[at], None if mask is None else mask[at]
                if kernel == "gaussian":
                    noise = _gaussian_noise(chosen, rng, mean, std, kept)
                else:
                    assert alphabet is not None
                    noise = _token_noise(chosen, alphabet, kernel, rng)
                for j, i in enumerate(noisy):
                    b = target(noise(rhos[i]), kept, batch_size).double()
                    where = at.to(b.device)
                    if sums is None:
                        products[j].index_add_(0, where, (a[where] * b).sum(-1))
                    else:
                        sums[j].index_add_(0, where, b)
                    done += len(part)
                    progress(done, total, "forward passes")
            times = plan.counts[group].to(products.device)
            if sums is not None:
                b_mean = sums / times[:, None]
                products = (a * (b_mean - b_mean.mean(1, keepdim=True))).sum(-1) * times * len(group) / (len(group) - 1)
            product[group] = norm[group, None]
            product[group[:, None], torch.tensor(noisy, dtype=torch.long)] = (products / times).T.cpu()
    value, stderr = _moments(product)
    share, share_stderr = _ratio(product, norm)
    # Sums over columns and over a vector may round differently; where nothing was noisy they are the same number.
    still = [i for i in range(len(rhos)) if i not in noisy]
    value[still] = norm.mean()
    share[still] = value[still] / norm.mean()
    return StabilityCurve(
        rho=torch.tensor(rhos, dtype=torch.float64),
        value=value,
        stderr=stderr,
        norm2=float(norm.mean()),
        share=share,
        share_stderr=share_stderr,
        n_pairs=n_pairs,
        n_windows=n,
        n_passes=total,
        kernel=kernel,
        centred=centre,
        of=target.of,
    )


def _alphabet(target: _Target, vocab: int | None, protect: Collection[int]) -> _Alphabet:
    return _Alphabet(target.parts.vocab_size if vocab is None and target.parts is not None else vocab, protect)


def _channel_moments(parts: Anatomy, x: Tensor, free: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Mean and spread of each embedding channel over the tokens that are not protected."""
    if not bool(free.any()):
        raise InputError("protect covers every token of the inputs: there is nothing to add noise to")
    n, total, squares = int(free.sum()), torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for ids, mask in zip(x.split(size), free.split(size), strict=True):
        rows = parts.embedding(ids)[mask].double()
        total, squares = total.to(rows) + rows.sum(0), squares.to(rows) + rows.square().sum(0)
    mean = total / n
    return mean, (squares / n - mean.square()).clamp(min=0).sqrt()


def average_sensitivity(
    f: Function | nn.Module,
    inputs: Int[Tensor, "n tokens"] | Sampler,
    vocab: int | None = None,
    *,
    n_pairs: int = 4096,
    protect: Collection[int] = (),
    output: Output = "probs",
    position: int | None = None,
    centre: bool = False,
    seed: int = 0,
    batch_size: int = 64,
    progress: Progress = silent,
) -> Sensitivity:
    """The total influence of single tokens, Σ_i E Var_i f, from pairs that differ in one resampled token.

    It is ½·Σ_i E ‖f(X) − f(X with token i resampled)‖²; where X is not drawn from the noise's own distribution, this
    stands in for the variance over token i. Positions are spread evenly over all pairs, so that none is missed by chance;
    the standard error takes no credit for that.

    Args:
        f, inputs, vocab, protect, output, position, seed, batch_size, progress: as for `noise_stability`.
        n_pairs: how many tokens are resampled.
        centre: give the share of the variance, not of the squared norm. The value is the same.

    Raises:
        InputError, NotApplicable, UnknownArchitecture: as for `noise_stability`.

    Source: Noise Stability of Transformer Models (arXiv 2602.08287), average sensitivity as the baseline; the bound
    I(f)/T is Markov's inequality on the spectrum.

    >>> parity = lambda bits: (1 - 2 * bits[:, :3]).prod(1, keepdim=True).double()
    >>> bits = lambda n, rng: torch.randint(2, (n, 8), generator=rng)
    >>> round(average_sensitivity(parity, bits, 2, n_pairs=20_000, batch_size=20_000).value)
    3
    """
    target = _target(f, output, position)
    plan = _plan(inputs, n_pairs, batch_size, seed, target)
    _check_centre(centre, plan)
    alphabet = _alphabet(target, vocab, protect)
    alphabet.check(plan.windows)
    free = alphabet.free(plan.windows)
    n_free = free.sum(1)
    rng = generator(seed, "noise")
    order = torch.randperm(n_pairs, generator=generator(seed, "positions"))
    spread = (order + torch.rand(n_pairs, generator=rng, dtype=torch.float64)) / n_pairs
    # The positions that are free, first, in their order.
    places = free.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    first = plan.counts.cumsum(0) - plan.counts

    def pairs(group: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.repeat_interleave(group, plan.counts[group])
        within = torch.arange(len(rows)) - torch.repeat_interleave(first[group] - first[group[0]], plan.counts[group])
        rank = (spread[first[rows] + within] * n_free.cpu()[rows]).long()
        return rows, places.cpu()[rows, rank]

    n = len(plan.windows)
    change, norm = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    done = 0
    with _evaluating(f):
        for group in plan.groups:
            rows, at = pairs(group)
            norms, changes = _changes(target, plan.windows, free, group, rows, at, alphabet, rng, batch_size, centre)
            norm[group] = norms
            change.index_add_(0, rows, changes)
            done += len(group) + len(rows)
            progress(done, n + n_pairs, "forward passes")
    change *= n_free.cpu() / (2 * plan.counts)
    value, stderr = _moments(change)
    share, share_stderr = _ratio(change, norm)
    return Sensitivity(
        value=float(value),
        stderr=float(stderr),
        norm2=float(norm.mean()),
        share=float(share),
        share_stderr=float(share_stderr),
        n_pairs=n_pairs,
        n_windows=n,
        n_passes=n + n_pairs,
        centred=centre,
        of=target.of,
    )


def token_influence(
    f: Function | nn.Module,
    inputs: Int[Tensor, "n tokens"] | Sampler,
    vocab: int | None = None,
    *,
    n_windows: int = 64,
    protect: Collection[int] = (),
    output: Output = "probs",
    position: int | None = None,
    seed: int = 0,
    batch_size: int = 64,
    progress: Progress = silent,
) -> TokenInfluence:
    """How much each position matters: every token of every window is resampled once.

    Args:
        f, inputs, vocab, protect, output, position, seed, batch_size, progress: as for `noise_stability`.
        n_windows: how many windows; each costs one evaluation a token.

    Raises:
        InputError, NotApplicable, UnknownArchitecture: as for `noise_stability`.

    Source: Noise Stability of Transformer Models (arXiv 2602.08287), geometric influence; the count above a tenth of the
    largest is its check for juntas.

    >>> parity = lambda bits: (1 - 2 * bits[:, :3]).prod(1, keepdim=True).double()
    >>> bits = lambda n, rng: torch.randint(2, (n, 8), generator=rng)
    >>> found = token_influence(parity, bits, 2, n_windows=2000, batch_size=2000)
    >>> found.influence.round().tolist(), found.influential()
    ([2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0], 3)
    """
    target = _target(f, output, position)
    plan = _plan(
        inputs, min(n_windows, len(inputs)) if isinstance(inputs, Tensor) else n_windows, batch_size, seed, target
    )
    alphabet = _alphabet(target, vocab, protect)
    alphabet.check(plan.windows)
    free = alphabet.free(plan.windows)
    rng = generator(seed, "noise")
    n, tokens = plan.windows.shape
    change, norm = torch.zeros(n, tokens, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    total, done = n + int(free.sum()), 0
    with _evaluating(f):
        for group in plan.groups:
            local, at = free[group.to(free.device)].cpu().nonzero(as_tuple=True)
            rows = group[local]
            norm[group], change[rows, at] = _changes(
                target, plan.windows, free, group, rows, at, alphabet, rng, batch_size, False
            )
            done += len(group) + len(rows)
            progress(done, total, "forward passes")
    influence, stderr = _moments(change)
    return TokenInfluence(influence, stderr, float(norm.mean()), n, target.of)


def _changes(
    target: _Target,
    x: Tensor,
    free: Tensor,
    group: Tensor,
    rows: Int[Tensor, "pairs"],
    at: Int[Tensor, "pairs"],
    alphabet: _Alphabet,
    rng: torch.Generator,
    size: int,
    centre: bool,
) -> tuple[Float[Tensor, "group"], Float[Tensor, "pairs"]]:
    """Squared norms of the outputs of one group of windows, and squared changes when single tokens are resampled."""
    chosen = group.to(x.device)
    out = target(x[chosen], free[chosen], size)
    norms = _squares(out, centre)[1].cpu()
    changes = torch.zeros(len(rows), dtype=torch.float64)
    for part in torch.arange(len(rows)).split(size):
        row = rows[part].to(x.device)
        y = x[row].clone()
        new = torch.rand(len(part), generator=rng, dtype=torch.float64)
        y[torch.arange(len(part), device=x.device), at[part].to(x.device)] = alphabet.at(new, x)
        b = target(y, free[row], size).double()
        changes[part] = (out[(rows[part] - group[0]).to(out.device)].double() - b).square().sum(-1).cpu()
    return norms, changes


class NoiseStabilityRegularizer(nn.Module):
    """A loss term that rewards outputs which stay in place when tokens are resampled: add it to the loss.

    It is γ·R with R = −mean Σ_c M(X)_c·M(Y)_c, M the output at the predicted position, Y a noisy copy of the batch X.
    One more forward pass a step; gradients flow through both. With γ = 0 nothing is computed and no noise is drawn.

    With "probs", R lies between −1 and 0. With "logits" it has no lower bound, so that training can diverge: keep γ small.
    R is smallest for outputs that are stable and certain; it rewards certainty too.

    Args:
        gamma: γ, from 0. The source reports 0.75 for modular addition and 0.05 for noisy sparse parity.
        rho: the correlation, from 0 to 1; the source reports 0.25 and 0.05.
        vocab: how many tokens there are; not needed for "gaussian".
        kernel: as for `noise_stability`.
        output: "probs" or "logits".
        protect: token ids that are neither resampled nor drawn.
        position: which position's output counts where the model gives one a token.
        reward: whether stability is rewarded (S = 1 in the source) or punished (S = 0).
        seed: of the noise. The state of its generator is part of `state_dict`.

    Raises:
        InputError: γ below 0, ρ outside [0, 1], or a token kernel without `vocab`.

    Source: Noise Stability of Transformer Models (arXiv 2602.08287), noise stability regularisation.

    >>> model = nn.Sequential(nn.Embedding(5, 7), nn.Flatten(), nn.Linear(14, 5))
    >>> term = NoiseStabilityRegularizer(0.5, 0.25, vocab=5)
    >>> ids = torch.tensor([[0, 1], [2, 3]])
    >>> bool(-0.5 <= term(model, ids) < 0)
    True
    """

    def __init__(
        self,
        gamma: float,
        rho: float,
        vocab: int | None = None,
        *,
        kernel: Kernel = "paper",
        output: Output = "probs",
        protect: Collection[int] = (),
        position: int = -1,
        reward: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not (gamma >= 0 and math.isfinite(gamma)):
            raise InputError(f"gamma is {gamma}: give a weight from 0")
        if not 0 <= rho <= 1:
            raise InputError(f"rho must be in [0,1], and {rho} is not")
        if kernel not in ("gaussian", "bonami", "paper"):
            raise InputError(f"kernel is {kernel!r}: choose gaussian, bonami or paper")
        if output not in ("probs", "logits"):
            raise InputError(f"output is {output!r}: choose probs or logits")
        self.gamma, self.rho, self.kernel, self.output = gamma, rho, kernel, output
        self.position, self.reward = position, reward
        self._alphabet = None if kernel == "gaussian" else _Alphabet(vocab, protect)
        self._generator = generator(seed, "noise")

    def forward(self, model: nn.Module, inputs: Tensor, outputs: Any = None) -> Float[Tensor, ""]:
        """γ·R for one batch.

        Args:
            model: what is trained; called with the noisy inputs alone. It gives logits `[batch, classes]` or
                `[batch, tokens, classes]`, or an output of transformers with `.logits`.
            inputs: token ids `[batch, tokens]`, or real inputs for "gaussian".
            outputs: what `model(inputs)` gave, to save that pass.

        Raises:
            InputError: inputs that do not fit the kernel.
        """
        if self.gamma == 0:
            return torch.zeros((), device=inputs.device)
        if self._alphabet is None:
            if not inputs.is_floating_point():
                raise InputError(f"inputs are {inputs.dtype}: the gaussian kernel needs real numbers")
            noise = _gaussian_noise(inputs, self._generator)
        else:
            self._alphabet.check(inputs)
            noise = _token_noise(inputs, self._alphabet, self.kernel, self._generator)
        first = self._vectors(model(inputs) if outputs is None else outputs)
        second = self._vectors(model(noise(self.rho)))
        together = (first * second).sum(-1).mean()
        return self.gamma * (-together if self.reward else together)

    def _vectors(self, outputs: Any) -> Float[Tensor, "batch classes"]:
        logits = getattr(outputs, "logits", outputs)
        if logits.ndim == 3:
            logits = logits[:, self.position]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits.softmax(-1) if self.output == "probs" else logits

    def get_extra_state(self) -> Tensor:
        """The state of the noise, so that a resumed run sees the noise that it would have seen."""
        return self._generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Take the noise up where it was left."""
        self._generator.set_state(state.cpu())

    def extra_repr(self) -> str:
        """The settings."""
        return f"gamma={self.gamma}, rho={self.rho}, kernel={self.kernel!r}, output={self.output!r}"


def relu_kernel(rho: float | Float[Tensor, "*shape"], *, normalised: bool = False) -> Float[Tensor, "*shape"]:
    """E ReLU(X)·ReLU(Y) for standard normal X and Y with correlation ρ.

    κ(ρ) = (√(1 − ρ²) + ρ·(π − arccos ρ)) / 2π, a raw second moment: from 0 at −1 to ½ at 1. Applied again and again as
    it stands it treats every layer's output as if its second moment were 1, and ends at 0.2172336; with `normalised` the
    values are cosines, and end at 1.

    Args:
        rho: correlations from −1 to 1; a number counts as float64.
        normalised: divide by E ReLU(X)² = ½.

    Raises:
        InputError: a correlation outside [−1, 1].

    Source: Noise Stability of Transformer Models (arXiv 2602.08287), the ReLU layer; the integral is that of Kernel
    Methods for Deep Learning (Cho and Saul, 2009), order 1.

    >>> [round(float(relu_kernel(r)), 6) for r in (0.0, 0.5, 1.0)]
    [0.159155, 0.304499, 0.5]
    """
    r = rho if isinstance(rho, Tensor) else torch.tensor(rho, dtype=torch.float64)
    if not bool((r.detach().abs() <= 1).all()):
        raise InputError("rho must be in [-1,1]: it is a correlation")
    root = ((1 - r) * (1 + r)).clamp(min=0).sqrt()
    kappa = (root + r * (math.pi - torch.arccos(r))) / (2 * math.pi)
    return 2 * kappa if normalised else kappa


@dataclass(frozen=True, eq=False)
class HardAttention:
    """Attention in the limit of many dimensions, where each token attends to one other: argmax_j xᵢᵀ·W·xⱼ.

    With W = I or W = U·Uᵀ every token then attends to itself; with a Gaussian W, to any.

    Attributes:
        query_key: W.
        value: the value map, out × in as in `nn.Linear`.
        n_tokens: how many tokens there are.
        n_samples: sequences drawn to find how often a token's choice survives the noise.
        seed: of those draws.
    """

    query_key: Float[Tensor, "d d"]
    value: Float[Tensor, "out d"]
    n_tokens: int
    n_samples: int = 512
    seed: int = 0

    def kept(self, rho: float, covariance: Float[Tensor, "d d"] | None = None) -> float:
        """s(ρ): the probability that a token still attends to the same one, by Monte Carlo.

        Args:
            rho: the correlation of each coordinate of X and Y.
            covariance: of a token's coordinates; identity where left out.
        """
        w = self.query_key.double()
        root = torch.eye(len(w), dtype=torch.float64, device=w.device)
        if covariance is not None:
            values, vectors = torch.linalg.eigh(covariance.double())
            root = vectors * values.clamp(min=0).sqrt() @ vectors.T
        rng = generator(self.seed, "attention")
        same = 0
        for _ in range(0, self.n_samples, 64):
            x, z = torch.randn(2, 64, self.n_tokens, len(w), generator=rng, dtype=torch.float64).to(w.device) @ root
            y = rho * x + math.sqrt(1 - rho * rho) * z
            same += int(((x @ w @ x.mT).argmax(-1) == (y @ w @ y.mT).argmax(-1)).sum())
        return same / (math.ceil(self.n_samples / 64) * 64 * self.n_tokens)


Layer = nn.Linear | nn.ReLU | nn.Sequential | HardAttention | Float[Tensor, "out in"]


def propagate_interval(
    layers: Sequence[Layer], rho: float | tuple[float, float], *, normalised: bool = False
) -> list[tuple[Float[Tensor, "units"], Float[Tensor, "units"]]]:
    """Follow the covariance of a correlated Gaussian pair through layers, for a correlation or an interval of them.

    The inputs X and Y have standard normal coordinates with correlation ρ. All second moments E u_i(X)·u_j(Y) are carried
    along: W·M·Wᵀ through a linear map, κ through a ReLU, s(ρ)·V·M·Vᵀ through attention. The first ReLU after linear maps
    is exact; later ones take their input to be Gaussian with mean zero. That is right in the mean over random weights, and
    one network of width 512 may still be a fifth away from it. Every unit's moment rises with ρ on [0, 1], so that the
    ends of an interval give the ends of the result.

    Args:
        layers: weights `[out, in]`, `nn.Linear` without bias, `nn.ReLU`, `nn.Sequential` of these, and `HardAttention`,
            which must stand before the first ReLU.
        rho: the correlation, or the lowest and the highest.
        normalised: give E u_i(X)·u_i(Y) / E u_i(X)², a cosine, in place of the raw moment. Raw moments halve with every
            ReLU that no weights make up for.

    Returns:
        The lowest and the highest value of each unit, after each layer, float64.

    Raises:
        InputError: a ρ outside [0, 1], a layer of another kind, a bias, widths that do not fit, or attention after a ReLU.

    Source: Noise Stability of Transformer Models (arXiv 2602.08287), propagation of stability intervals through layers.

    >>> weight = 2 ** 0.5 * torch.eye(2)  # makes up for the ReLU's half
    >>> low, high = propagate_interval([weight, nn.ReLU()] * 2, (0.0, 0.5))[-1]
    >>> round(float(low[0]), 4), round(float(high[0]), 4)
    (0.4937, 0.6839)
    """
    low, high = (float(r) for r in (rho if isinstance(rho, tuple) else (rho, rho)))
    if not 0 <= low <= high <= 1:
        raise InputError(f"rho must be in [0,1], lowest first, and ({low}, {high}) is not")
    flat = list(_flat(layers))
    widths = [_weight(layer).shape[1] for layer in flat if not isinstance(layer, nn.ReLU)]
    width = widths[0] if widths else 1
    device = next((_weight(layer).device for layer in flat if not isinstance(layer, nn.ReLU)), None)
    eye = torch.eye(width, dtype=torch.float64, device=device)
    # The last of the three is the pair (X, X), which gives the variances.
    moments = torch.stack([low * eye, high * eye, eye])
    centred = True
    found = []
    for layer in flat:
        if isinstance(layer, nn.ReLU):
            scale = moments[2].diagonal().clamp(min=0).sqrt()
            scale = scale[:, None] * scale
            cosine = torch.where(scale > 0, moments / scale, 0.0).clamp(-1, 1)
            moments, centred = scale * relu_kernel(cosine), False
        else:
            weight = _weight(layer).detach().double()
            if weight.shape[1] != moments.shape[1]:
                raise InputError(f"a layer takes {weight.shape[1]} inputs after one of {moments.shape[1]} outputs")
            if isinstance(layer, HardAttention):
                if not centred:
                    raise InputError("attention stands after a ReLU, where tokens have a mean: put it before")
                total = moments[2].diagonal().sum()
                now = [float(m.diagonal().sum() / total) for m in moments[:2]]
                kept = [layer.kept(min(max(r, 0.0), 1.0), moments[2]) for r in now]
                moments = moments * moments.new_tensor([*kept, 1.0])[:, None, None]
            moments = weight @ moments @ weight.T
        ends = moments.diagonal(dim1=1, dim2=2)
        if normalised:
            ends = torch.where(ends[2] > 0, ends / ends[2], 0.0)
        found.append((ends[0], ends[1]))
    return found


def _flat(layers: Sequence[Layer] | nn.Sequential) -> Iterator[Any]:
    for layer in layers:
        if isinstance(layer, nn.Sequential):
            yield from _flat(layer)
            continue
        if isinstance(layer, nn.Linear) and layer.bias is not None and bool((layer.bias != 0).any()):
            raise InputError("a linear layer has a bias, which the closed form does not cover: leave it out")
        matrix = isinstance(layer, Tensor) and layer.ndim == 2
        if not matrix and not isinstance(layer, nn.Linear | nn.ReLU | HardAttention):
            kind = f"a tensor of shape {tuple(layer.shape)}" if isinstance(layer, Tensor) else type(layer).__name__
            raise InputError(f"{kind} is no layer that propagates: give weights, Linear, ReLU or HardAttention")
        yield layer


def _weight(layer: Any) -> Tensor:
    if isinstance(layer, HardAttention):
        return layer.value
    return layer.weight if isinstance(layer, nn.Linear) else layer
