"""Optimal brain restoration: weights pruned and quantised together, each making good the other's errors.

Source: Optimal Brain Restoration for Joint Quantization and Sparsification of LLMs (arXiv 2509.11177).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from assay.compress._blockwise import swap
from assay.compress._obr_matrix import ObrResult, Rounding, Scorer, obr_matrix, parse_pattern, prune_mask, restore
from assay.compress._packed import SparseTensor, UniformTensor
from assay.compress._packed_linear import PackedLinear, stored_form
from assay.compress._rotation import block_hadamard
from assay.compress._rotation import rotate as rotate_model
from assay.compress._sequential import Sequential
from assay.compress._uniform import Curvature, UniformGrid, gptq, output_error, refine, uniform_grid
from assay.core.anatomy import anatomy
from assay.core.errors import InputError, NotApplicable
from assay.core.loss import require_causal
from assay.core.progress import Progress, silent
from assay.core.results import Column, Result, Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = [
    "Curvature",
    "ObrLayer",
    "ObrModelResult",
    "ObrResult",
    "PackedLinear",
    "SparseTensor",
    "UniformGrid",
    "UniformTensor",
    "block_hadamard",
    "gptq",
    "obr",
    "obr_matrix",
    "output_error",
    "parse_pattern",
    "prune_mask",
    "refine",
    "restore",
    "uniform_grid",
]

# Inputs that a layer must see for its Hessian to be worth more than none, as a share of the model's width.
_LEAST_ROWS = 0.25


@dataclass(frozen=True)
class ObrLayer:
    """What became of one layer.

    Attributes:
        name: in the model.
        shape: rows and columns of its weight as a map from inputs to outputs.
        error: squared error of its outputs on the calibration inputs, as a share of the outputs' own square.
        pruned_error: the same if it had been pruned and rounded to the nearest levels.
        sparsity: the share of its weights that are pruned.
        clipped: the share of its kept weights that lie on an end of the grid.
        bits_per_weight: as stored, bit map and scales included.
        note: what the reader should know; empty in the usual case.
    """

    name: str
    shape: tuple[int, int]
    error: float
    pruned_error: float
    sparsity: float
    clipped: float
    bits_per_weight: float
    note: str = ""


@dataclass(frozen=True)
class ObrModelResult(Result):
    """What pruning and quantising a model's layers cost.

    Attributes:
        layers: one entry a packed layer, in the order in which they were done.
        left: linear layers that were left, with the reason.
        bits: of a kept weight.
        rotated: whether the model was turned into other coordinates first.
        tokens: that the layers were calibrated on.
        n_other: parameters of the model that are not in packed layers: embeddings, head, norms, biases.
    """

    layers: tuple[ObrLayer, ...]
    left: dict[str, str]
    bits: int
    rotated: bool
    tokens: int
    n_other: int

    @property
    def n_weights(self) -> int:
        """Weights of all packed layers."""
        return sum(math.prod(layer.shape) for layer in self.layers)

    def _mean(self, read: Callable[[ObrLayer], float]) -> float:
        return sum(read(layer) * math.prod(layer.shape) for layer in self.layers) / self.n_weights

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over weights, of all packed layers together."""
        return self._mean(lambda layer: layer.bits_per_weight)

    @property
    def sparsity(self) -> float:
        """The share of the packed layers' weights that are pruned."""
        return self._mean(lambda layer: layer.sparsity)

    @property
    def error(self) -> float:
        """The mean over layers of their output errors."""
        return sum(layer.error for layer in self.layers) / len(self.layers)

    def table(self) -> Table:
        """One row a layer."""
        columns = (
            Column("layer"),
            Column("weights"),
            Column("output error", about="squared error on the calibration inputs, share of the output's square"),
            Column("pruned and rounded", about="the same without restoration"),
            Column("pruned", about="share of the weights"),
            Column("clipped", about="share of the kept weights on an end of the grid"),
            Column("bits per weight", "bit", "as stored"),
            Column("note"),
        )
        rows = tuple(
            (x.name, math.prod(x.shape), x.error, x.pruned_error, x.sparsity, x.clipped, x.bits_per_weight, x.note)
            for x in self.layers
        )
        title = f"{self.sparsity:.1%} pruned, {self.bits} bits: {self.bits_per_weight:.2f} bits per weight"
        return Table(columns, rows, title)

    def figure(self) -> Figure:
        """Output error of each layer, with and without restoration."""
        import plotly.graph_objects as go

        names = [layer.name for layer in self.layers]
        figure = go.Figure()
        for title, values in (
            ("pruned and rounded", [layer.pruned_error for layer in self.layers]),
            ("restored", [layer.error for layer in self.layers]),
        ):
            figure.add_scatter(x=names, y=values, mode="markers", name=title)
        figure.update_layout(yaxis_title="squared output error, share of the output", yaxis_type="log")
        return figure


@dataclass(frozen=True)
class _Made:
    """A layer as it is stored and used."""

    packed: SparseTensor
    dense: Tensor
    about: ObrLayer


def obr(
    model: nn.Module,
    windows: Int[Tensor, "windows tokens"],
    *,
    sparsity: float = 0.5,
    pattern: str | tuple[int, int] | None = None,
    bits: int = 4,
    group_size: int | None = None,
    scorer: Scorer = "wanda",
    rounding: Rounding = "gptq",
    alpha: float = 0.5,
    damping: float = 0.01,
    clip_search: bool = True,
    rounds: int = 0,
    rotate: bool = False,
    skip: Iterable[str] = (),
    generator: torch.Generator | None = None,
    progress: Progress = silent,
) -> tuple[nn.Module, ObrModelResult]:
    """Prune and quantise the linear layers of a language model's blocks.

    Block by block, each layer sees the inputs that the finished layers before it make. Embeddings and the language-model
    head stay as they are. The model is changed in place, after everything has been computed; an error leaves it as it
    was. Its configuration then describes the packed layers, so that `save_pretrained` writes a directory which
    `from_pretrained` reads wherever `assay` is imported.

    Args:
        model: a causal transformers model.
        windows: token ids to calibrate on; every window is a sequence of its own.
        sparsity: the share of each row that is pruned.
        pattern: "kept:of", such as "2:4", in place of `sparsity`.
        bits: of a kept weight, from 2 to 8.
        group_size: columns that share a scale; None for whole rows.
        scorer: what is pruned: see `prune_mask`.
        rounding: see `obr_matrix`.
        alpha: see `obr_matrix`.
        damping: see `Curvature.of`.
        clip_search: see `uniform_grid`.
        rounds: of coordinate descent on each layer afterwards (`refine`), which is not in the paper.
        rotate: first turn the residual stream and the values of each head by Hadamard matrices that are taken into the
            weights, which leaves the output as it is. A head tied to the embedding gets a weight of its own.
        skip: layers to leave: a whole name, the name of a part that holds them, or the last piece of a name.
        generator: for the scorer "random".
        progress: is told of every block.

    Returns:
        The model, and what each layer cost.

    Raises:
        InputError: an option or the windows are out of range, a width does not fit the pattern, or activations are not
            finite; names the layer.
        NotApplicable: the model predicts no next token, has no layer to pack, or cannot be rotated.
        UnknownArchitecture: the architecture is not described.

    Source:
        Optimal Brain Restoration for Joint Quantization and Sparsification of LLMs (arXiv 2509.11177).

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from assay.compress import obr
        >>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4)
        >>> model, result = obr(LlamaForCausalLM(config), torch.arange(400).view(4, 100) % 50)
        >>> len(result.layers), f"{result.sparsity:.0%}"
        (14, '50%')
    """
    found = anatomy(model)
    require_causal(found)
    _check(windows, bits, sparsity, pattern, rounds, alpha)

    def rule(name: str, weight: Tensor, hessian: Tensor | None) -> _Made:
        note = "" if hessian is not None else "too few tokens came here: restored without knowing the inputs"
        H = torch.eye(weight.shape[1], device=weight.device) if hessian is None else hessian
        try:
            grid = uniform_grid(
                weight, bits=bits, group_size=group_size, clip_search=clip_search, scale_dtype=torch.bfloat16
            )
            values, result = obr_matrix(
                weight,
                H,
                sparsity=sparsity,
                pattern=pattern,
                grid=grid,
                scorer=scorer,
                rounding=rounding,
                alpha=alpha,
                damping=damping,
                generator=generator,
            )
            if rounds:
                values = refine(weight, values, Curvature.of(H, damping), grid, mask=result.mask, sweeps=rounds)
        except InputError as error:
            raise InputError(f"layer {name}: {error}") from error
        if result.n_dead and not note:
            note = f"{result.n_dead} inputs were always zero"
        packed = SparseTensor.of(values, result.mask, grid)
        about = ObrLayer(
            name,
            tuple(weight.shape),  # type: ignore[arg-type]
            output_error(weight, values, H) if rounds else result.error,
            result.steps["pruned"],
            result.sparsity,
            result.clipped,
            packed.bits_per_weight,
            note,
        )
        return _Made(packed, packed.dequantize(), about)

    undo = rotate_model(found) if rotate else None
    try:
        run = Sequential(
            found,
            windows,
            rule,
            skip=tuple(skip),
            least_rows=max(1, int(_LEAST_ROWS * found.hidden_size)),
            progress=progress,
        )
        packed: dict[str, SparseTensor] = {}
        layers: list[ObrLayer] = []
        left: dict[str, str] = {}
        for outcome in run.run():
            for name, made in outcome.layers.items():
                packed[name] = made.packed
                layers.append(made.about)
            left |= outcome.left
        if not packed:
            raise NotApplicable(
                f"{type(model).__name__} has no layer to pack in its blocks ({len(left)} were left by name or shared)"
            )
        total = sum(p.numel() for p in model.parameters())
        new: dict[str, nn.Module] = {}
        for name, tensor in packed.items():
            old = model.get_submodule(name)
            new[name] = PackedLinear.of(tensor, old._parameters["bias"]).train(old.training)  # type: ignore[arg-type]
    except BaseException:
        if undo is not None:
            undo()
        raise
    described = {name: stored_form(tensor)[1] for name, tensor in packed.items()}
    found.model.config.quantization_config = {"quant_method": "assay", "format_version": 1, "layers": described}  # type: ignore[union-attr]
    result = ObrModelResult(
        layers=tuple(layers),
        left=left,
        bits=bits,
        rotated=rotate,
        tokens=windows.numel(),
        n_other=total - sum(math.prod(x.shape) for x in layers),
    )
    return swap(model, new), result


def _check(windows: Any, bits: int, sparsity: float, pattern: Any, rounds: int, alpha: float) -> None:
    """Refuse before anything is computed."""
    if (
        not isinstance(windows, Tensor)
        or windows.ndim != 2
        or windows.dtype.is_floating_point
        or windows.dtype.is_complex
    ):
        said = f"{tuple(windows.shape)} of {windows.dtype}" if isinstance(windows, Tensor) else type(windows).__name__
        raise InputError(f"windows is {said}: pass token ids [windows, tokens]")
    if not 2 <= bits <= 8:
        raise InputError(f"bits is {bits}: a uniform grid takes 2 to 8")
    if not 0 <= sparsity <= 1:
        raise InputError(f"sparsity is {sparsity}: give a share from 0 to 1")
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha is {alpha}: give a share of the columns from 0 to 1")
    if rounds < 0:
        raise InputError(f"rounds is {rounds}: give how often each weight is looked at, from 0")
    parse_pattern(pattern)
