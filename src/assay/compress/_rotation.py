"""A model turned into other coordinates, in which no input of a layer stands out, with the same output.

Source: QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs (arXiv 2404.00456), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from scipy.linalg import hadamard
from torch import Tensor, nn

from assay.core.anatomy import Anatomy, Projection
from assay.core.errors import NotApplicable


def block_hadamard(n: int) -> Float[Tensor, "n n"]:
    """An orthogonal matrix of ±1/√b and zeros: Hadamard matrices along the diagonal, as large as divide the width.

    Args:
        n: the width; b is the largest power of two that divides it.

    >>> block_hadamard(2)
    tensor([[ 0.7071,  0.7071],
            [ 0.7071, -0.7071]], dtype=torch.float64)
    """
    b = n & -n
    one = torch.from_numpy(hadamard(b).astype("float64")) / b**0.5
    return torch.block_diag(*[one] * (n // b))


@torch.no_grad()
def rotate(found: Anatomy) -> Callable[[], None]:
    """Turn the residual stream, and the values of each head, by Hadamard matrices that are taken into the weights.

    The scales of the RMS norms are taken into the layers that read from them. A head that shares its weight with the
    embedding gets its own.

    Args:
        found: the model's anatomy; the model is changed in place.

    Returns:
        A function that puts everything back.

    Raises:
        NotApplicable: the model's parts do not commute with a rotation; says which.
    """
    _check(found)
    Q = block_hadamard(found.hidden_size)
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    tied = found.tied
    config = found.model.config

    def write(module: nn.Module, name: str, value: Tensor) -> None:
        old = module.get_parameter(name)
        before.append((module, name, old))
        setattr(module, name, nn.Parameter(value.to(old), requires_grad=old.requires_grad))

    def undo() -> None:
        for module, name, old in reversed(before):
            setattr(module, name, old)
        if tied:
            config.tie_word_embeddings = True

    def reads(parts: Iterable[Projection | None], norm: Any) -> None:
        """Layers that read the stream through a norm."""
        scale = norm.weight.double()
        for module in _modules(parts):
            write(module, "weight", (module.weight.double() * scale) @ Q.to(scale.device))

    def writes(part: Projection) -> None:
        """A layer that adds to the stream."""
        module: Any = part.module
        turn = Q.to(module.weight.device)
        write(module, "weight", turn.T @ module.weight.double())
        if module.bias is not None:
            write(module, "bias", module.bias.double() @ turn)

    try:
        embedding: Any = found.embedding
        head: Any = found.lm_head
        final: Any = found.final_norm
        write(head, "weight", (head.weight.double() * final.weight.double()) @ Q.to(head.weight.device))
        write(embedding, "weight", embedding.weight.double() @ Q.to(embedding.weight.device))
        config.tie_word_embeddings = False
        norms = {id(final): final}
        for block in found.blocks:
            attention, mlp = block.attention, block.mlp
            assert mlp is not None
            _turn_heads(attention, write)
            reads((attention.q, attention.k, attention.v), block.pre_attention)
            reads((mlp.gate, mlp.up), block.pre_mlp)
            writes(attention.o)
            writes(mlp.down)
            norms |= {id(n): n for n in (block.pre_attention, block.pre_mlp)}
        for norm in norms.values():
            write(norm, "weight", torch.ones_like(norm.weight))
    except BaseException:
        undo()
        raise
    return undo


def _turn_heads(attention: Any, write: Callable[[nn.Module, str, Tensor], None]) -> None:
    """Values of each head, and back in the output projection."""
    value, out = attention.v, attention.o
    H = block_hadamard(attention.head_dim).to(value.module.weight.device)
    rows = slice(None) if value.rows is None else value.rows
    for name in ("weight", "bias"):
        old = getattr(value.module, name)
        if old is not None:
            new = old.double()
            heads = new[rows].unflatten(0, (attention.n_kv_heads, attention.head_dim))
            turned = torch.einsum("hd...,de->he...", heads, H)
            new = new.clone()
            new[rows] = turned.flatten(0, 1)
            write(value.module, name, new)
    columns = out.module.weight.double().unflatten(1, (attention.n_heads, attention.head_dim))
    write(out.module, "weight", (columns @ H).flatten(1))


def _modules(parts: Iterable[Projection | None]) -> list[Any]:
    """The modules of projections, each once: fused ones hold several."""
    return list({p.path: p.module for p in parts if p is not None}.values())


def _check(found: Anatomy) -> None:
    kind = type(found.model).__name__

    def refuse(why: str) -> NotApplicable:
        return NotApplicable(f"{kind} cannot be rotated: {why}; leave rotate off")

    if found.hidden_size % 2:
        raise refuse(f"its width {found.hidden_size} is odd")
    if found.lm_head is None or type(found.lm_head) is not nn.Linear:
        raise refuse("it has no plain language-model head")
    if not isinstance(found.embedding, nn.Embedding):
        raise refuse("its embedding is no table")
    norms = [found.final_norm]
    for block in found.blocks:
        if block.mlp is None:
            raise refuse("it has a mixture of experts")
        if block.norm_sum or any((block.post_attention, block.post_mlp, block.attention_scale, block.mlp_scale)):
            raise refuse("a norm or a scale stands between its layers and the residual stream")
        attention = block.attention
        if attention.clip is not None:
            raise refuse("its values are clamped")
        parts = (attention.q, attention.k, attention.v, attention.o, block.mlp.gate, block.mlp.up, block.mlp.down)
        if any(type(m) is not nn.Linear for m in _modules(parts)):
            raise refuse("its layers are not plain linear layers")
        norms += [block.pre_attention, block.pre_mlp]
    for norm in norms:
        if norm is None or not _is_rms(norm):
            raise refuse("its norms are not RMS norms with a scale")


@torch.no_grad()
def _is_rms(norm: Any) -> bool:
    """Whether a norm is scale · x / rms(x), by trying it."""
    weight = getattr(norm, "weight", None)
    if weight is None or getattr(norm, "bias", None) is not None:
        return False
    x = torch.linspace(-1, 3, len(weight), device=weight.device)
    expected = x / x.square().mean().sqrt() * weight.float()
    return torch.allclose(norm(x.to(weight)[None])[0].float(), expected, rtol=2e-2, atol=1e-3)
