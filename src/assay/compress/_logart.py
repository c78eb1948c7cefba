"""LogART: weights on logarithmic grids of two bases, with grid and rounding fitted to what a layer or block puts out.

Source: LogART: Pushing the Limit of Efficient Logarithmic Post-Training Quantization (openreview:V85HbymBLW).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from assay.compress._blockwise import linear_layers, matrix, swap
from assay.compress._loggrid import (
    Base,
    LogGrid,
    LogTensor,
    as_groups,
    check_bits,
    check_weight,
    chunks,
    search_log_grid,
)
from assay.compress._packed_linear import PackedLinear
from assay.core.errors import InputError, NotApplicable
from assay.core.results import Column, Result, Table, jsonable

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = [
    "LogConv2d",
    "LogGrid",
    "LogRounding",
    "LogTensor",
    "LogartLayer",
    "LogartResult",
    "learn_block_rounding",
    "learn_rounding",
    "logart",
    "logart_weight",
    "search_log_grid",
]

Granularity = Literal["tensor", "layer", "block"]

# The stretched sigmoid reaches 0 and 1: σ(R) = clip(1.2·sigmoid(R) − 0.1, 0, 1).
_LOW, _WIDTH = -0.1, 1.2
# Where it does. R is held within, so that a weight that has arrived can leave again.
_FULL = math.log(11.0)
_WARM_UP = 0.2
_BETA = (20.0, 2.0)
# What the reconstruction weighs beside the penalty, once it is divided by what rounding to nearest costs a weight. In
# these terms the published λ = 1 on raw outputs of unit scale is about this; it then holds for outputs of any scale.
_RECONSTRUCTION = 1e-3
# Rows are independent given the Gram matrix: few enough at a time stay in cache for all iterations.
_CACHED = 1 << 17


# ---- learned rounding --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LogRounding:
    """Codes that were learned, and what learning changed.

    Attributes:
        codes: one a weight, `[out, in]`.
        before: the squared error of the outputs with every weight rounded to nearest, over their energy.
        after: the same with the learned codes.
        flipped: the fraction of weights that are no longer rounded to nearest.
        undecided: the fraction of weights whose soft value was still more than a tenth of a step from both levels.
        gap: the error with the codes as they are, less the error with the soft values, over the energy of the outputs.
    """

    codes: UInt8[Tensor, "out in"]
    before: float
    after: float
    flipped: float
    undecided: float
    gap: float


class _Between:
    """The two levels next to each weight, and the way from the smaller to the larger magnitude.

    Between two levels of one sign the exponent moves evenly; between zero and the lowest level the value does.
    """

    def __init__(self, w: Float[Tensor, "rows in"], levels: Float[Tensor, "rows codes"]) -> None:
        at = torch.searchsorted(levels, w.contiguous())
        above, below = at.clamp(max=levels.shape[1] - 1), (at - 1).clamp(min=0)
        positive = w > 0
        self.lower_code = torch.where(positive, below, above).to(torch.uint8)
        self.upper_code = torch.where(positive, above, below).to(torch.uint8)
        lower, upper = levels.gather(1, self.lower_code.long()), levels.gather(1, self.upper_code.long())
        # A weight beyond the ends, or a zero, has nothing to choose.
        fixed = (lower == upper) | (w == 0)
        self.lower, self.upper = torch.where(w == 0, 0.0, lower), torch.where(fixed, lower, upper)
        from_zero = (self.lower == 0) & ~fixed
        ratio = torch.where(fixed | from_zero, 1.0, self.upper / torch.where(lower == 0, 1.0, lower))
        self.log_ratio = ratio.log()
        share = torch.where(
            from_zero,
            w / torch.where(self.upper == 0, 1.0, self.upper),
            (w / torch.where(self.lower == 0, w, self.lower)).log()
            / torch.where(fixed | from_zero, 1.0, self.log_ratio),
        )
        self.share = torch.where(fixed, 0.0, share).clamp(0, 1)
        self.height = torch.where(from_zero, self.upper, 0.0)

    def start(self) -> Tensor:
        """R with σ(R) = how far the weight itself lies along the way."""
        return torch.logit((self.share - _LOW) / _WIDTH)

    def soft(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """The values at σ, and their slopes."""
        value = (self.log_ratio * sigma).exp() * self.lower
        slope = value * self.log_ratio + self.height
        return value + self.height * sigma, slope

    def hard(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """The values and codes that R decides for."""
        up = r >= 0
        return torch.where(up, self.upper, self.lower), torch.where(up, self.upper_code, self.lower_code)


def _schedule(step: int, iters: int, lr: float) -> tuple[float, float | None]:
    """The learning rate, and the exponent of the penalty; None while it is off."""
    rate = lr * (0.3 + 0.7 * 0.5 * (1 + math.cos(math.pi * step / iters)))
    start = _WARM_UP * iters
    beta = None if step < start else _BETA[0] + (_BETA[1] - _BETA[0]) * (step - start) / (iters - start)
    return rate, beta


def _rate(iters: int, lr: float | None) -> float:
    if not isinstance(iters, int) or isinstance(iters, bool) or iters < 0:
        raise InputError(f"iters is {iters!r}: give a whole number, 0 to round to nearest")
    if lr is not None and not lr > 0:
        raise InputError(f"lr is {lr!r}: give a positive number, or None")
    return min(0.05 * 500 / max(1, iters), 0.2) if lr is None else lr


def learn_rounding(
    weight: Float[Tensor, "out in"],
    grid: LogGrid,
    gram: Float[Tensor, "*groups in in"],
    *,
    iters: int = 500,
    lr: float | None = None,
    penalty: float = 1.0,
) -> LogRounding:
    """Chooses for every weight the level above or below it, so that the layer's outputs change least.

    ‖X(ŵ − w)ᵀ‖² = (ŵ − w) H (ŵ − w)ᵀ with H = XᵀX, so the inputs themselves are not needed. Each weight moves on the
    logarithmic scale between its two levels, by σ(R) = clip(1.2·sigmoid(R) − 0.1, 0, 1), while a penalty
    1 − |2σ − 1|^β drives it to one of them (β from 20 to 2, after a fifth of the steps). Rows do not depend on each
    other. A row whose learned codes are worse than rounding to nearest keeps the latter.

    Args:
        weight: the matrix.
        grid: its grid.
        gram: XᵀX of the layer's inputs, of any scale, or one a group of rows.
        iters: steps of Adam.
        lr: its first learning rate, which falls to 0.3 of it; None for 0.05, and more where `iters` is below 500.
        penalty: λ. The reconstruction is divided by the error of rounding to nearest, so λ needs no tuning to the
            scale of the outputs.

    Returns:
        The codes, and what was gained.

    Raises:
        InputError: shapes do not agree or an option is out of range.

    Source:
        LogART (openreview:V85HbymBLW), learnable logarithmic rounding; the penalty and σ are those of "Up or Down?
        Adaptive Rounding for Post-Training Quantization", arXiv 2004.10568, Eqs. 23–24.

    Example:
        >>> import torch
        >>> from assay.compress import learn_rounding, search_log_grid
        >>> generator = torch.Generator().manual_seed(0)
        >>> w, x = torch.randn(8, 32, generator=generator), torch.randn(64, 32, generator=generator)
        >>> grid = search_log_grid(w, x.T @ x)
        >>> learned = learn_rounding(w, grid, x.T @ x)
        >>> learned.after < 0.8 * learned.before
        True
    """
    rate = _rate(iters, lr)
    check_weight(weight)
    n_rows, n_in = weight.shape
    groups = as_groups(gram.to(weight.device), n_rows, n_in).float()
    work = weight.detach().float()
    start = grid.quantize(work)[1]
    codes = torch.empty_like(start)
    by_group, codes_by_group = work.view(len(groups), -1, n_in), codes.view(len(groups), -1, n_in)
    per_group = n_rows // len(groups)
    totals = torch.zeros(5, dtype=torch.float64, device=weight.device)
    step = max(1, _CACHED // n_in)
    for g, r in chunks(len(groups), per_group, n_in):
        size = min(r.stop, per_group) - r.start
        for first in range(r.start, r.start + size, step):
            rows = slice(first, min(first + step, r.start + size))
            part = by_group[g, rows]
            own = _rows_of_grid(grid, g, rows, per_group)
            learned, sums = _descend(part, groups[g], own, iters, rate, penalty)
            codes_by_group[g, rows] = learned
            totals += sums
    before, after, soft, energy, undecided = totals.tolist()
    energy = energy or 1.0
    return LogRounding(
        codes,
        before / energy,
        after / energy,
        float((codes != start).float().mean()),
        undecided / work.numel(),
        (after - soft) / energy,
    )


def _rows_of_grid(grid: LogGrid, groups: slice, rows: slice, per_group: int) -> LogGrid:
    if per_group == len(grid.top):
        return grid[rows]
    index = torch.arange(len(grid.top), device=grid.top.device).view(-1, per_group)[groups, rows].reshape(-1)
    return grid[index]


def _descend(
    w: Float[Tensor, "groups rows in"],
    gram: Float[Tensor, "groups in in"],
    grid: LogGrid,
    iters: int,
    lr: float,
    penalty: float,
) -> tuple[Tensor, Tensor]:
    """Learned codes, and the sums: error before, after, with soft values, energy, undecided weights."""
    flat = w.reshape(-1, w.shape[-1])

    def errors(values: Tensor) -> Tensor:
        gap = (values - flat).view_as(w)
        return (gap @ gram).mul_(gap).sum(-1).view(-1, 1)

    rounded, start = grid.quantize(flat)
    before = errors(rounded)
    energy = errors(torch.zeros_like(flat))
    between = _Between(flat, grid.levels)
    r = between.start()
    # Rows that rounding leaves exact have nothing to gain, and are not divided by.
    balance = 2 * _RECONSTRUCTION * flat.shape[1] / torch.where(before > 1e-12 * energy, before, math.inf)
    # The optimiser of torch, run on a gradient in closed form: one product with H a step, and no graph.
    optimiser = torch.optim.Adam([r], lr=lr, fused=True)
    sigma = between.share
    for step in range(iters):
        optimiser.param_groups[0]["lr"], beta = _schedule(step, iters, lr)
        logistic = torch.sigmoid(r)
        sigma = logistic * _WIDTH + _LOW
        value, slope = between.soft(sigma)
        gradient = (value.sub_(flat).view_as(w) @ gram).view_as(flat).mul_(slope).mul_(balance)
        if beta is not None:
            side = (2 * sigma).sub_(1)
            # sign(x)·|x|^(β − 1), without a power.
            power = side.square().log_().mul_(beta / 2 - 1).exp_().mul_(side)
            gradient.sub_(power, alpha=2 * penalty * beta)
        r.grad = gradient.mul_(torch.addcmul(logistic, logistic, logistic, value=-1))
        optimiser.step()
        r.clamp_(-_FULL, _FULL)
    if iters:
        sigma = (torch.sigmoid(r) * _WIDTH + _LOW).clamp_(0, 1)
    soft = errors(between.soft(sigma)[0])
    values, codes = between.hard(r)
    after = errors(values)
    better = after < before if iters else torch.zeros_like(before, dtype=torch.bool)
    codes = torch.where(better, codes, start)
    undecided = ((sigma > 0.1) & (sigma < 0.9)).sum()
    sums = [before.sum(), torch.where(better, after, before).sum(), soft.sum(), energy.sum(), undecided]
    return codes.view(w.shape), torch.stack([s.double() for s in sums])


def learn_block_rounding(
    block: nn.Module,
    inputs: Float[Tensor, "n ..."],
    targets: Float[Tensor, "n ..."],
    grids: Mapping[str, LogGrid],
    *,
    iters: int = 500,
    lr: float | None = None,
    penalty: float = 1.0,
    batch_size: int = 8,
    kwargs: Mapping[str, Any] | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, UInt8[Tensor, "out in"]]:
    """Learns the rounding of all layers of a block together, from what the block puts out.

    Args:
        block: any module; it is not changed. Its first output is compared.
        inputs: its first argument, samples along the first dimension.
        targets: what it should put out for them, usually its outputs before rounding.
        grids: the grid of each layer to round, by the layer's name in the block: linear layers, `Conv2d`, and the
            `Conv1D` of transformers.
        iters: steps of Adam.
        lr: see `learn_rounding`.
        penalty: see `learn_rounding`.
        batch_size: samples a step.
        kwargs: what else the block is called with; a tensor with an entry for each sample goes along with them.
        generator: draws the batches.

    Returns:
        Codes of each layer, `[out, in]` with all that follows the first dimension of a convolution in `in`. If they
        are worse over all inputs than rounding to nearest, the codes of the latter.

    Raises:
        InputError: a name is no layer, its grid does not fit, or inputs and targets do not go together.

    Source:
        LogART (openreview:V85HbymBLW), block-wise reconstruction.

    Example:
        >>> import torch
        >>> from assay.compress import learn_block_rounding, search_log_grid
        >>> generator = torch.Generator().manual_seed(0)
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> x = torch.randn(64, 8, generator=generator)
        >>> grids = {name: search_log_grid(block.get_submodule(name).weight) for name in ("0", "2")}
        >>> codes = learn_block_rounding(block, x, block(x).detach(), grids, iters=20, generator=generator)
        >>> codes["2"].shape
        torch.Size([4, 16])
    """
    rate = _rate(iters, lr)
    if len(inputs) != len(targets) or not len(inputs):
        raise InputError(f"{len(inputs)} inputs and {len(targets)} targets: give as many of each, and at least one")
    layers: dict[str, tuple[nn.Module, _Between, Tensor]] = {}
    nearest: dict[str, Tensor] = {}
    for name, grid in grids.items():
        try:
            layer = block.get_submodule(name)
        except AttributeError:
            raise InputError(f"grids name {name!r}: the block has no such layer") from None
        w = _rows(layer)
        work = w.float()
        values, nearest[name] = grid.quantize(work)
        layers[name] = (layer, _Between(work, grid.levels), values)
    by_sample = {k: v for k, v in (kwargs or {}).items() if isinstance(v, Tensor) and v.shape[:1] == inputs.shape[:1]}

    def run(weights: Mapping[str, Tensor], at: Tensor | slice) -> Tensor:
        named = {f"{name}.weight": _stored(layers[name][0], value) for name, value in weights.items()}
        extra = {**(kwargs or {}), **{k: v[at] for k, v in by_sample.items()}}
        out = torch.func.functional_call(block, named, (inputs[at],), extra)
        return out[0] if isinstance(out, tuple) else out

    @torch.no_grad()
    def error(weights: Mapping[str, Tensor]) -> float:
        total = 0.0
        for start in range(0, len(inputs), batch_size):
            span = slice(start, start + batch_size)
            gap = run(weights, span).float() - targets[span].float()
            total += gap.double().square().sum().item()
        return total

    before = error({name: values for name, (_, _, values) in layers.items()})
    n_weights = sum(between.lower.numel() for _, between, _ in layers.values())
    if not before or not iters:
        return nearest
    balance = _RECONSTRUCTION * n_weights / (before / len(inputs))
    state = {name: between.start().requires_grad_() for name, (_, between, _) in layers.items()}
    optimiser = torch.optim.Adam(list(state.values()), lr=rate)
    device = generator.device if generator is not None else "cpu"
    for step in range(iters):
        optimiser.param_groups[0]["lr"], beta = _schedule(step, iters, rate)
        at = torch.randint(len(inputs), (min(batch_size, len(inputs)),), generator=generator, device=device)
        at = at.to(inputs.device)
        sigmas = {name: (torch.sigmoid(r) * _WIDTH + _LOW).clamp(0, 1) for name, r in state.items()}
        weights = {name: layers[name][1].soft(sigma)[0] for name, sigma in sigmas.items()}
        gap = run(weights, at).float() - targets[at].float()
        loss = balance * gap.square().sum() / len(at)
        if beta is not None:
            # The slope of |x|^(β − 1) at 0 is no trouble: β stays above 2.
            loss = loss + penalty * sum((1 - (2 * s - 1).abs().pow(beta)).sum() for s in sigmas.values())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            for r in state.values():
                r.clamp_(-_FULL, _FULL)
    learned = {name: layers[name][1].hard(r.detach()) for name, r in state.items()}
    if error({name: values for name, (values, _) in learned.items()}) >= before:
        return nearest
    return {name: codes for name, (_, codes) in learned.items()}


# ---- layers ------------------------------------------------------------------------------------------------------


def _rows(layer: nn.Module) -> Float[Tensor, "out in"]:
    """The weight with one row an output channel."""
    weight = layer._parameters.get("weight")
    if not isinstance(layer, nn.Conv2d | nn.Linear) and type(layer).__name__ != "Conv1D":
        raise InputError(f"a {type(layer).__name__} is no layer with a weight matrix: name linear layers or Conv2d")
    assert weight is not None
    return weight.detach().flatten(1) if isinstance(layer, nn.Conv2d) else matrix(layer)


def _stored(layer: nn.Module, rows: Tensor) -> Tensor:
    """The inverse of `_rows`, in the weight's type."""
    weight = layer.get_parameter("weight")
    rows = rows.to(weight.dtype)
    if isinstance(layer, nn.Conv2d | nn.Linear):
        return rows.view(weight.shape)
    return rows.T


class LogConv2d(nn.Conv2d):
    """A frozen 2-d convolution whose weight stays in packed logarithmic codes and is decoded as it is used.

    It counts as an `nn.Conv2d`; only the bias is a parameter (frozen). Reading `weight` decodes a copy. It computes
    in the type of its input; its buffers are integers, which `.to(dtype)` leaves alone, and its `state_dict` loads
    into a layer of the same shape, bits and options.

    Args:
        weight: the packed weight, [out_channels, in_channels / groups, height, width].
        like: the convolution whose stride, padding, dilation, groups and bias it takes.

    Raises:
        InputError: the weight does not have the shape of that of `like`.

    Example:
        >>> import torch
        >>> from assay.compress import LogConv2d, logart
        >>> conv = torch.nn.Conv2d(3, 8, 3)
        >>> packed, _ = logart(conv.weight)
        >>> LogConv2d(packed, conv)(torch.ones(1, 3, 5, 5)).shape
        torch.Size([1, 8, 3, 3])
    """

    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(self, weight: LogTensor, like: nn.Conv2d) -> None:
        nn.Module.__init__(self)
        if weight.shape != like.weight.shape:
            raise InputError(
                f"packed weight has shape {tuple(weight.shape)}: the convolution's is {tuple(like.weight.shape)}"
            )
        for name in (*nn.Conv2d.__constants__, "_reversed_padding_repeated_twice"):
            setattr(self, name, getattr(like, name))
        self._settings, self._packed_shape, self._names = weight.settings(), weight.shape, tuple(weight.tensors())
        for name, tensor in weight.tensors().items():
            self.register_buffer(name, tensor)
        self.bias = None if like.bias is None else nn.Parameter(like.bias.detach(), requires_grad=False)

    @property
    def packed(self) -> LogTensor:
        """The weight in its packed form; shares the layer's memory."""
        tensors = {name: self.get_buffer(name) for name in self._names}
        return LogTensor.from_stored(tensors, self._settings, self._packed_shape)

    @property
    def weight(self) -> Float[Tensor, "out in height width"]:  # type: ignore[override]
        """The weight, decoded afresh at each reading, float32."""
        return self.packed.dequantize()

    def forward(self, input: Float[Tensor, "*batch channels height width"]) -> Tensor:
        """The convolution's output, in the type of `input` (under autocast, in autocast's type)."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return self._conv_forward(input, self.packed.dequantize(input.dtype), bias)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{super().extra_repr()}, bits_per_weight={self.packed.bits_per_weight:.3f}"


# ---- rewriting ---------------------------------------------------------------------------------------------------


def logart_weight(
    weight: Float[Tensor, "out in"],
    hessian: Float[Tensor, "in in"] | None = None,
    bits: int = 4,
    iters: int = 60,
) -> LogTensor:
    """Packs one matrix: the grid of each row searched, and the rounding learned where there is data.

    Args:
        weight: the matrix.
        hessian: XᵀX of the layer's inputs, of any scale; None for the least error of the weights themselves.
        bits: of a code, 2 to 6.
        iters: steps of learning, 500 in the paper; 0 for rounding to nearest. Needs `hessian`.

    Returns:
        The packed weight.

    Raises:
        InputError: weight, Gram matrix or an option are not as described.

    Source:
        LogART (openreview:V85HbymBLW).

    Example:
        >>> import torch
        >>> from assay.compress import logart_weight
        >>> w = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        >>> logart_weight(w, torch.eye(64), bits=3).dequantize().unique().numel() <= 8 * 8
        True
    """
    return logart(weight, gram=hessian, bits=bits, iters=iters)[0]


@dataclass(frozen=True)
class LogartLayer:
    """What rounding cost one tensor.

    Attributes:
        name: the layer's name in the model; "weight" for a bare tensor.
        shape: the weight's shape.
        relative_error: Σ (ŵ − w)² / Σ w², no unit.
        output_error: the squared error of the layer's outputs over their energy; None where no input was seen.
        nearest_error: the same if every weight took its nearest level on the same grid.
        flipped: the fraction of weights that did not.
        bits_per_weight: stored bits over weights, grids included.
        n_inputs: rows of calibration data that the layer saw.
    """

    name: str
    shape: tuple[int, ...]
    relative_error: float
    output_error: float | None
    nearest_error: float | None
    flipped: float
    bits_per_weight: float
    n_inputs: int

    @property
    def n_weights(self) -> int:
        """How many weights the tensor has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class LogartResult(Result):
    """What logarithmic codes cost, layer by layer.

    Attributes:
        layers: one entry a packed tensor.
        left: the layers that were left as they were, with the reason.
        bits: of a code.
        granularity: what the search and the rounding looked at: "tensor", "layer" or "block".
        kept_parameters: parameters of the model that are not packed.
    """

    layers: tuple[LogartLayer, ...]
    left: dict[str, str]
    bits: int
    granularity: Granularity
    kept_parameters: int

    @property
    def n_weights(self) -> int:
        """Packed weights, in all layers."""
        return sum(layer.n_weights for layer in self.layers)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over all packed weights."""
        return sum(layer.bits_per_weight * layer.n_weights for layer in self.layers) / self.n_weights

    @property
    def output_error(self) -> float | None:
        """The mean over layers of the squared error of their outputs over their energy."""
        known = [layer.output_error for layer in self.layers if layer.output_error is not None]
        return sum(known) / len(known) if known else None

    def table(self) -> Table:
        """One row a layer."""
        columns = (
            Column("layer"),
            Column("weights", about="how many"),
            Column("weight error", about="sum of squared errors of the weights over their sum of squares"),
            Column("output error", about="squared error of the outputs over their energy"),
            Column("to nearest", about="output error with every weight at its nearest level"),
            Column("flipped", about="fraction of weights not at their nearest level"),
            Column("bits per weight", "bit", "grids included"),
        )
        rows = tuple(
            (
                layer.name,
                layer.n_weights,
                layer.relative_error,
                layer.output_error,
                layer.nearest_error,
                layer.flipped,
                layer.bits_per_weight,
            )
            for layer in self.layers
        )
        return Table(columns, rows, f"LogART, {self.bits} bits, {self.granularity}-wise")

    def figure(self) -> Figure:
        """Output error of each layer (weight error without data), learned against nearest."""
        import plotly.graph_objects as go

        names = [layer.name for layer in self.layers]
        with_data = self.output_error is not None
        figure = go.Figure()
        if with_data:
            nearest = [layer.nearest_error for layer in self.layers]
            figure.add_bar(x=nearest, y=names, orientation="h", name="to nearest")
        values = [layer.output_error if with_data else layer.relative_error for layer in self.layers]
        figure.add_bar(x=values, y=names, orientation="h", name="as packed")
        what = "outputs" if with_data else "weights"
        figure.update_layout(
            title=f"Error in {self.bits_per_weight:.2f} bits per weight",
            xaxis_title=f"relative squared error of the {what}",
            yaxis={"autorange": "reversed"},
            height=max(300, 140 + 26 * len(names)),
        )
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: the fields and the totals."""
        totals = ("n_weights", "bits_per_weight", "output_error")
        return super().to_dict() | {"total": {name: jsonable(getattr(self, name)) for name in totals}}


@overload
def logart(
    model_or_weight: Tensor,
    calib: Iterable[Any] | None = ...,
    *,
    gram: Tensor | None = ...,
    bits: int = ...,
    granularity: Granularity = ...,
    iters: int = ...,
    lr: float | None = ...,
    base: Base = ...,
    asymmetric: bool = ...,
    scale_search: bool = ...,
    hardware_terms: int | None = ...,
    strict: bool = ...,
    skip: Iterable[str] = ...,
    blocks: Iterable[str] | None = ...,
    generator: torch.Generator | None = ...,
) -> tuple[LogTensor, LogartResult]: ...
@overload
def logart(
    model_or_weight: nn.Module,
    calib: Iterable[Any] | None = ...,
    *,
    gram: Tensor | None = ...,
    bits: int = ...,
    granularity: Granularity = ...,
    iters: int = ...,
    lr: float | None = ...,
    base: Base = ...,
    asymmetric: bool = ...,
    scale_search: bool = ...,
    hardware_terms: int | None = ...,
    strict: bool = ...,
    skip: Iterable[str] = ...,
    blocks: Iterable[str] | None = ...,
    generator: torch.Generator | None = ...,
) -> tuple[nn.Module, LogartResult]: ...
def logart(
    model_or_weight: Float[Tensor, "out ..."] | nn.Module,
    calib: Iterable[Any] | None = None,
    *,
    gram: Float[Tensor, "*groups in in"] | None = None,
    bits: int = 4,
    granularity: Granularity = "layer",
    iters: int = 500,
    lr: float | None = None,
    base: Base = "dynamic",
    asymmetric: bool = True,
    scale_search: bool = True,
    hardware_terms: int | None = None,
    strict: bool = True,
    skip: Iterable[str] = ("lm_head",),
    blocks: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[LogTensor | nn.Module, LogartResult]:
    """Stores weights as signed powers of 2 and √2 times a scale, with grid and rounding chosen for their outputs.

    In a module every `nn.Linear` and `Conv1D` of transformers becomes a frozen `PackedLinear`, every `nn.Conv2d` a
    `LogConv2d`, with one grid an output channel. Embeddings, norms, layers named in `skip` and weights that two modules
    share are left. Everything is computed before the first layer is swapped: an error leaves the model as it was.

    Args:
        model_or_weight: a model, changed in place, or a tensor [out, …], left alone.
        calib: batches for the model: a tensor is its first argument, a mapping its keyword arguments, a tuple or
            list its arguments. Gone through once, and with "block" once a block and once more.
        gram: for a tensor, XᵀX of its inputs, `[in, in]`, or one a group of output channels.
        bits: of a code, 2 to 6.
        granularity: "layer" searches and learns by the outputs of each layer, "block" learns by those of blocks
            (the grids are searched by layer), "tensor" looks at the weights alone and takes the nearest levels.
            Without data it is "tensor".
        iters: steps of learning; 0 for nearest levels.
        lr: see `learn_rounding`.
        base: "dynamic", "log2" or "sqrt2".
        asymmetric: see `search_log_grid`.
        scale_search: see `search_log_grid`.
        hardware_terms: see `LogGrid`.
        strict: see `LogGrid`.
        skip: layers to leave: a whole name, the name of a part that holds them, or the last piece of a name.
        blocks: for "block", the names of the blocks; by default the members of the longest `ModuleList`, else the
            whole model.
        generator: draws the batches of "block".

    Returns:
        The module or a `LogTensor`, and what it cost.

    Raises:
        NotApplicable: the model has no layer to pack.
        InputError: weights, data or an option are not as described.

    Source:
        LogART: Pushing the Limit of Efficient Logarithmic Post-Training Quantization (openreview:V85HbymBLW).

    Example:
        >>> import torch
        >>> from assay.compress import logart
        >>> generator = torch.Generator().manual_seed(0)
        >>> w, x = torch.randn(16, 512, generator=generator), torch.randn(100, 512, generator=generator)
        >>> packed, cost = logart(w, gram=x.T @ x, bits=4, iters=100)
        >>> print(f"{cost.bits_per_weight:.2f} bits", cost.layers[0].output_error < cost.layers[0].nearest_error)
        4.08 bits True
    """
    if granularity not in ("tensor", "layer", "block"):
        raise InputError(f'granularity is {granularity!r}: use "tensor", "layer" or "block"')
    check_bits(bits)
    _rate(iters, lr)
    options: dict[str, Any] = {
        "bits": bits,
        "base": base,
        "asymmetric": asymmetric,
        "scale_search": scale_search,
        "hardware_terms": hardware_terms,
        "strict": strict,
    }
    if isinstance(model_or_weight, Tensor):
        check_weight(model_or_weight)
        if calib is not None or granularity == "block":
            raise InputError("a bare weight takes gram, not calib or blocks: pass the model for those")
        used = None if granularity == "tensor" else gram
        rows = model_or_weight.detach().flatten(1)
        packed, cost = _pack("weight", rows, model_or_weight.shape, used, 0, iters, lr, options)
        return packed, LogartResult((cost,), {}, bits, "tensor" if used is None else "layer", 0)
    if not isinstance(model_or_weight, nn.Module):
        raise InputError(f"logart was given a {type(model_or_weight).__name__}: pass a tensor or a torch module")
    if gram is not None:
        raise InputError("gram is for a bare weight: a model takes calib")
    model = model_or_weight
    taken, left = _layers(model, skip)
    if not taken:
        raise NotApplicable(f"{type(model).__name__} has no layer to pack ({len(left)} were left by name or shared)")
    if granularity == "tensor" or calib is None:
        granularity, batches = "tensor", []
    else:
        batches = list(calib)
        if not batches:
            raise InputError("calib has no batch: give some, or none at all to look at the weights alone")
    grams = _grams(model, taken, batches) if batches else {}
    packs: dict[str, LogTensor] = {}
    costs: list[LogartLayer] = []
    for name, layer in taken.items():
        own, n = grams.get(name, (None, 0))
        steps = 0 if granularity == "block" else iters
        try:
            packs[name], cost = _pack(name, _rows(layer), _shape(layer), own, n, steps, lr, options)
        except InputError as error:
            raise InputError(f"layer {name or type(layer).__name__}: {error}") from None
        costs.append(cost)
    if granularity == "block" and iters:
        codes = _learn_blocks(model, taken, packs, batches, blocks, iters, lr, generator)
        for k, (name, layer) in enumerate(taken.items()):
            if name in codes:
                old = packs[name]
                packs[name] = LogTensor.of(codes[name], old.grid, old.shape, old.dtype)
                own, n = grams.get(name, (None, 0))
                costs[k] = _cost(name, _rows(layer), packs[name], own, n)
    new = {name: _packed_layer(layer, packs[name]).train(layer.training) for name, layer in taken.items()}
    total = sum(p.numel() for p in model.parameters())
    result = LogartResult(tuple(costs), left, bits, granularity, total - sum(c.n_weights for c in costs))
    return swap(model, new), result


def _layers(model: nn.Module, skip: Iterable[str]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Linear layers and convolutions that can be packed, in the model's order, and those left with the reason."""
    skip = tuple(skip)
    linear, left = linear_layers(model, skip)
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    taken: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name in linear:
            taken[name] = module
        elif type(module) is nn.Conv2d:
            if any(f".{name}.".endswith(f".{s}.") or name.startswith(f"{s}.") for s in skip):
                left[name] = "skipped by name"
            elif owners[id(module.weight)] > 1:
                left[name] = "weight shared with another module"
            else:
                taken[name] = module
    return taken, left


def _shape(layer: nn.Module) -> torch.Size:
    return layer.get_parameter("weight").shape if isinstance(layer, nn.Conv2d) else matrix(layer).shape


def _packed_layer(layer: nn.Module, packed: LogTensor) -> nn.Module:
    if isinstance(layer, nn.Conv2d):
        return LogConv2d(packed, layer)
    return PackedLinear.of(packed, layer._parameters["bias"])  # type: ignore[arg-type]


def _pack(
    name: str,
    rows: Float[Tensor, "out in"],
    shape: torch.Size,
    gram: Tensor | None,
    n_inputs: int,
    iters: int,
    lr: float | None,
    options: dict[str, Any],
) -> tuple[LogTensor, LogartLayer]:
    grid = search_log_grid(rows, gram, **options)
    if gram is not None and iters:
        codes = learn_rounding(rows, grid, gram, iters=iters, lr=lr).codes
    else:
        codes = grid.quantize(rows)[1]
    packed = LogTensor.of(codes, grid, shape, rows.dtype)
    return packed, _cost(name, rows, packed, gram, n_inputs)


def _cost(name: str, rows: Float[Tensor, "out in"], packed: LogTensor, gram: Tensor | None, n: int) -> LogartLayer:
    nearest, nearest_codes = packed.grid.quantize(rows.float())
    codes = packed.integer_codes()
    w = rows.double()
    error = packed.grid.dequantize(codes).double() - w
    energy = w.square().sum().item()
    output_error = nearest_error = None
    if gram is not None:
        groups = as_groups(gram, *rows.shape).double()

        def quadratic(x: Tensor) -> float:
            grouped = x.view(len(groups), -1, x.shape[1])
            return ((grouped @ groups) * grouped).sum().item()

        scale = quadratic(w) or 1.0
        output_error, nearest_error = quadratic(error) / scale, quadratic(nearest.double() - w) / scale
    return LogartLayer(
        name=name or "weight",
        shape=tuple(packed.shape),
        relative_error=error.square().sum().item() / energy if energy else 0.0,
        output_error=output_error,
        nearest_error=nearest_error,
        flipped=float((codes != nearest_codes).float().mean()),
        bits_per_weight=packed.bits_per_weight,
        n_inputs=n,
    )


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@torch.no_grad()
def _grams(model: nn.Module, layers: Mapping[str, nn.Module], batches: list[Any]) -> dict[str, tuple[Tensor, int]]:
    """XᵀX of the inputs of every layer that is reached and active, and how many rows it saw."""
    sums: dict[str, tuple[Tensor, int]] = {}

    def see(name: str, layer: nn.Module, x: Tensor) -> None:
        rows = _unfolded(layer, x.detach())
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        total, n = sums.get(name, (0, 0))
        sums[name] = (total + rows.transpose(1, 2) @ rows, n + rows.shape[1])

    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name, layer=layer: see(name, layer, args[0]))
        for name, layer in layers.items()
    ]
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            _call(model, batch)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return {name: (total, n) for name, (total, n) in sums.items() if bool((total.diagonal(dim1=1, dim2=2) > 0).any())}


def _unfolded(layer: nn.Module, x: Tensor) -> Float[Tensor, "groups n in"]:
    """The rows that the weight of a layer is multiplied with, for each group of a convolution."""
    if not isinstance(layer, nn.Conv2d):
        return x.reshape(1, -1, x.shape[-1])
    images = x if x.ndim == 4 else x[None]
    if layer.padding != "valid":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        images = nn.functional.pad(images, layer._reversed_padding_repeated_twice, mode=mode)
    patches = nn.functional.unfold(images, layer.kernel_size, layer.dilation, 0, layer.stride)
    return patches.unflatten(1, (layer.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)


def _learn_blocks(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    packs: Mapping[str, LogTensor],
    batches: list[Any],
    blocks: Iterable[str] | None,
    iters: int,
    lr: float | None,
    generator: torch.Generator | None,
) -> dict[str, Tensor]:
    """Codes of the layers inside blocks, one block after another, by the inputs that each gets in the given model."""
    codes: dict[str, Tensor] = {}
    for name in _block_names(model, blocks):
        block = model.get_submodule(name)
        prefix = f"{name}." if name else ""
        grids = {n.removeprefix(prefix): packs[n].grid for n in layers if n.startswith(prefix) and n not in codes}
        if not grids:
            continue
        inputs, targets, kwargs = _seen(model, block, batches)
        learned = learn_block_rounding(
            block, inputs, targets, grids, iters=iters, lr=lr, kwargs=kwargs, generator=generator
        )
        codes |= {prefix + n: c for n, c in learned.items()}
    return codes


def _block_names(model: nn.Module, blocks: Iterable[str] | None) -> list[str]:
    if blocks is not None:
        names = list(blocks)
        known = {name for name, _ in model.named_modules()}
        for name in names:
            if name not in known:
                raise InputError(f"blocks name {name!r}: the model has no such part")
        return names
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    if not lists:
        return [""]
    longest = max(lists, key=lambda name: len(lists[name]))
    return [f"{longest}.{k}" for k in range(len(lists[longest]))]


@torch.no_grad()
def _seen(model: nn.Module, block: nn.Module, batches: list[Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """What a block is given and puts out, batches joined, and its other arguments (joined where by sample)."""
    inputs: list[Tensor] = []
    targets: list[Tensor] = []
    others: list[dict[str, Any]] = []

    def see(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        inputs.append(args[0].detach())
        targets.append((out[0] if isinstance(out, tuple) else out).detach())
        # A cache of keys and values would grow with every step.
        others.append({k: v for k, v in named.items() if k != "use_cache" and not hasattr(v, "get_seq_length")})

    was_training = model.training
    model.eval()
    handle = block.register_forward_hook(see, with_kwargs=True)
    try:
        for batch in batches:
            _call(model, batch)
    finally:
        handle.remove()
        model.train(was_training)
    if not inputs:
        raise InputError(f"a block of type {type(block).__name__} was not reached: calib must run through all blocks")
    if len({x.shape[1:] for x in inputs}) > 1:
        raise InputError("calib has batches of different lengths: blocks are learned from samples of one shape")
    kwargs: dict[str, Any] = {}
    for name, last in others[-1].items():
        values = [named.get(name) for named in others]
        by_sample = all(isinstance(v, Tensor) and len(v) == len(x) for v, x in zip(values, inputs, strict=True))
        kwargs[name] = torch.cat(values) if by_sample else last  # type: ignore[arg-type]
    return torch.cat(inputs), torch.cat(targets), kwargs
