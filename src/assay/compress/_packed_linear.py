"""A linear layer over a packed matrix of any kind, and its place in transformers' loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from assay.compress._blockwise import DecodingLinear, QTensor
from assay.compress._loggrid import LogTensor
from assay.compress._packed import SparseTensor, UniformTensor
from assay.core.errors import CheckpointError, InputError

# Sixteen-bit floats are kept as integers of the same bits: no loader and no `.to(dtype)` then rounds them.
_AS_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


class Packed(Protocol):
    """A matrix that is stored in less than it decodes to."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def bits_per_weight(self) -> float: ...
    def rows(self, first: int, last: int) -> Tensor: ...
    def dequantize(self) -> Tensor: ...
    def tensors(self) -> dict[str, Tensor]: ...
    def settings(self) -> dict[str, Any]: ...
    @classmethod
    def from_stored(cls, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], shape: torch.Size) -> Self: ...


KINDS: dict[str, type[Packed]] = {
    "uniform": UniformTensor,
    "sparse": SparseTensor,
    "blockwise": QTensor,
    "logarithmic": LogTensor,
}


def kind_of(packed: Packed) -> str:
    """The name under which a packed matrix is stored."""
    return next(name for name, kind in KINDS.items() if type(packed) is kind)


def stored_form(packed: Packed) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A packed matrix as integers, and the description, plain JSON, from which `PackedLinear` is made again."""
    tensors, types = {}, {}
    for name, tensor in packed.tensors().items():
        types[name] = str(tensor.dtype).removeprefix("torch.")
        tensors[name] = tensor.contiguous().view(_AS_INTEGERS.get(tensor.dtype, tensor.dtype))
    description = {
        "kind": kind_of(packed),
        "shape": list(packed.shape),
        "settings": packed.settings(),
        "tensors": {name: [types[name], *t.shape] for name, t in tensors.items()},
    }
    return tensors, description


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no type of numbers")
    return found


class PackedLinear(DecodingLinear):
    """A frozen linear layer whose weight stays packed and is decoded, some rows at a time, as it is used.

    It counts as an `nn.Linear`. Reading `weight` decodes a copy in float32, and an adapter cannot be merged into it. It
    computes in the type of its input (float32 where there are few rows); gradients flow to the input. Its buffers are
    integers, which `.to(dtype)` leaves alone.

    Args:
        tensors: the integers of `stored_form`.
        description: the rest of it.
        bias: the bias, `[out]`, or None.

    Raises:
        CheckpointError: the description is not one.

    Example:
        >>> import torch
        >>> from assay.compress import PackedLinear, UniformTensor, uniform_grid
        >>> w = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        >>> grid = uniform_grid(w, group_size=32, scale_dtype=torch.bfloat16)
        >>> PackedLinear.of(UniformTensor.of(w, grid))(torch.ones(2, 64)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], description: Mapping[str, Any], bias: Float[Tensor, " out"] | None = None
    ) -> None:
        nn.Module.__init__(self)
        try:
            self.out_features, self.in_features = map(int, description["shape"])
            self._kind = KINDS[description["kind"]]
            self._settings = {k: int(v) for k, v in description["settings"].items()}
            self._types = {name: _dtype(kind) for name, (kind, *_) in description["tensors"].items()}
            self._kind.from_stored(tensors, self._settings, torch.Size((self.out_features, self.in_features)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the description of a packed layer is damaged: {error!r}") from error
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def of(cls, packed: Packed, bias: Float[Tensor, " out"] | None = None) -> PackedLinear:
        """A layer over a packed matrix, `[out, in]`.

        Raises:
            InputError: the bias does not fit.
        """
        if bias is not None and bias.shape != (packed.shape[0],):
            raise InputError(f"bias has shape {tuple(bias.shape)}: the weight needs ({packed.shape[0]},)")
        return cls(*stored_form(packed), bias)

    @classmethod
    def empty(cls, description: Mapping[str, Any], bias: Tensor | None) -> PackedLinear:
        """A layer on the meta device that waits for its tensors."""
        try:
            tensors = {}
            for name, (kind, *shape) in description["tensors"].items():
                dtype = _dtype(kind)
                tensors[name] = torch.empty(shape, dtype=_AS_INTEGERS.get(dtype, dtype), device="meta")
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"the description of a packed layer is damaged: {error!r}") from error
        return cls(tensors, description, bias)

    @property
    def packed(self) -> Any:
        """The weight in its packed form; shares the layer's memory."""
        tensors = {name: self._buffers[name].view(kind) for name, kind in self._types.items()}  # type: ignore[union-attr]
        return self._kind.from_stored(tensors, self._settings, torch.Size((self.out_features, self.in_features)))

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{super().extra_repr()}, kind={self._kind.__name__}"
