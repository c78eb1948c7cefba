"""Where the parts of a loaded model are, read from its row in `assay.core.architectures`.

`anatomy(model)` names what methods need: the blocks, the query, key, value and output projections of each (slices of
a fused matrix where the architecture fuses them), the MLP or the experts, the norms and the rotary frequencies. Nothing
is copied and nothing is wrapped: the parts are the model's own modules, and weights are read when they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from assay.core.architectures import ARCHITECTURES, Architecture, holds, is_causal
from assay.core.errors import NotApplicable, UnknownArchitecture

ROWS_FILE = "assay/core/architectures.py"


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map of a model, which may be a slice of a fused one.

    Attributes:
        module: the module that holds the weight.
        path: its dotted name in the model.
        rows: which output features belong to this map; None for all.
        parameter: the name of the weight in the module.
        index: which matrix, where the weight is a stack of them (fused experts).
    """

    module: nn.Module = field(repr=False)
    path: str
    rows: slice | Int[Tensor, "out"] | None = field(default=None, repr=False)
    parameter: str = "weight"
    index: int | None = None

    @property
    def transposed(self) -> bool:
        """Whether the module stores its weight as in × out."""
        return isinstance(self.module, Conv1D)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The weight of this map: a view of the module's, or a copy where `rows` are scattered."""
        weight = getattr(self.module, self.parameter)
        if self.index is not None:
            weight = weight[self.index]
        if self.transposed:
            weight = weight.T
        return weight if self.rows is None else weight[self.rows]

    @property
    def bias(self) -> Float[Tensor, "out"] | None:
        """The bias of this map."""
        bias = getattr(self.module, "bias", None)
        return bias if bias is None or self.rows is None else bias[self.rows]

    @property
    def in_features(self) -> int:
        """The width of the input."""
        return getattr(self.module, "in_features", None) or self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """The width of this map's output."""
        whole = getattr(self.module, "out_features", None)
        return whole if whole and self.rows is None else self.weight.shape[0]

    def take(self, output: Float[Tensor, "*batch whole"]) -> Float[Tensor, "*batch out"]:
        """What belongs to this map in the output of its module."""
        return output if self.rows is None else output[..., self.rows]

    def __call__(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        """Apply this map alone."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotary embedding of one attention, read from the model when it is asked for.

    Attributes:
        module: the module that keeps the frequencies.
        prefix: what its names begin with, where it keeps several sets of them.
    """

    module: nn.Module = field(repr=False)
    prefix: str = ""

    @property
    def inv_freq(self) -> Float[Tensor, "pairs"]:
        """The angle, in radians, by which one position turns each pair, with the model's scaling of it."""
        return getattr(self.module, f"{self.prefix}inv_freq")

    @property
    def attention_scaling(self) -> float:
        """What the rotated dimensions are multiplied by."""
        return getattr(self.module, f"{self.prefix}attention_scaling")

    @property
    def pairs(self) -> Int[Tensor, "pairs 2"]:
        """Which dimensions of a head turn together; those not listed stay as they are."""
        n = len(self.inv_freq)
        return torch.arange(2 * n, device=self.inv_freq.device).view(2, n).T

    def rotate(
        self, x: Float[Tensor, "*batch tokens head_dim"], positions: Int[Tensor, "*#batch tokens"]
    ) -> Float[Tensor, "*batch tokens head_dim"]:
        """Turn queries or keys to their positions."""
        angle = positions[..., None].float() * self.inv_freq.float()
        cos = (angle.cos() * self.attention_scaling).to(x.dtype)
        sin = (angle.sin() * self.attention_scaling).to(x.dtype)
        first, second = self.pairs.unbind(1)
        turned = x.clone()
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., second] * cos + x[..., first] * sin
        return turned


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention of one block.

    Attributes:
        module: the module that computes the attention weights; an attention function gets it as its first argument.
        path: its dotted name in the model.
        q: the query projection.
        k: the key projection.
        v: the value projection.
        o: the output projection.
        n_heads: the number of query heads.
        n_kv_heads: the number of key and value heads.
        head_dim: the width of a head.
        scaling: what scores are multiplied by.
        causal: whether a token sees only what stands before it.
        window: how many tokens it sees on that side, itself among them; None for all.
        softcap: c where scores pass through c·tanh(score / c).
        clip: the bound to which queries, keys and values are clamped.
        rotary: the rotary embedding, None where there is none.
        alibi: the slope of each head, by which the position of the key raises its score (after `scaling`). The model
            itself rounds slope × position to bfloat16, and Falcon's eager path adds the bias twice (transformers 5.24).
        q_norm: the norm of the queries, before the rotary embedding.
        k_norm: the norm of the keys.
        interface: whether it goes through `transformers.AttentionInterface`, so that a registered function replaces it.
    """

    module: nn.Module = field(repr=False)
    path: str
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    n_heads: int
    n_kv_heads: int
    head_dim: int
    scaling: float
    causal: bool
    window: int | None
    softcap: float | None
    clip: float | None
    rotary: Rotary | None
    alibi: Float[Tensor, "n_heads"] | None
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    interface: bool

    @property
    def kv_head(self) -> Int[Tensor, "n_heads"]:
        """The key-value head that each query head reads."""
        return torch.arange(self.n_heads) // (self.n_heads // self.n_kv_heads)

    def o_slices(self) -> Float[Tensor, "n_heads d_model head_dim"]:
        """The output projection of each head; the attention's output is the sum over heads, plus the bias."""
        return self.o.weight.unflatten(1, (self.n_heads, self.head_dim)).transpose(0, 1)

    def queries(self, x: Float[Tensor, "*batch tokens d_model"]) -> Float[Tensor, "*batch n_heads tokens head_dim"]:
        """Queries before the rotary embedding, from what enters the attention."""
        return self._heads(self.q(x), self.q_norm)

    def keys(self, x: Float[Tensor, "*batch tokens d_model"]) -> Float[Tensor, "*batch n_kv_heads tokens head_dim"]:
        """Keys before the rotary embedding, from what enters the attention."""
        return self._heads(self.k(x), self.k_norm)

    def values(self, x: Float[Tensor, "*batch tokens d_model"]) -> Float[Tensor, "*batch n_kv_heads tokens head_dim"]:
        """Values, from what enters the attention."""
        return self._heads(self.v(x), None)

    def visible(self, n_tokens: int) -> Bool[Tensor, "n_tokens n_tokens"]:
        """Whether the query in the row sees the key in the column, padding aside."""
        position = torch.arange(n_tokens)
        back = position[:, None] - position
        seen = back >= 0 if self.causal else torch.ones_like(back, dtype=torch.bool)
        return seen if self.window is None else seen & (back.abs() < self.window)

    def _heads(self, flat: Tensor, norm: nn.Module | None) -> Tensor:
        per_head = norm is not None and norm.get_parameter("weight").shape[-1] == self.head_dim
        if norm is not None and not per_head:
            flat = norm(flat)
        if self.clip is not None:
            flat = flat.clamp(-self.clip, self.clip)
        heads = flat.unflatten(-1, (-1, self.head_dim))
        return (norm(heads) if norm is not None and per_head else heads).transpose(-3, -2)


@dataclass(frozen=True, eq=False)
class Mlp:
    """A dense MLP or one expert.

    Attributes:
        gate: the projection that goes through the activation; None where the MLP is not gated.
        up: the projection into the MLP, which goes through the activation where there is no gate.
        down: the projection out of the MLP.
        act: the activation.
        act_name: its name in transformers, or that of its class.
    """

    gate: Projection | None
    up: Projection
    down: Projection
    act: Callable[[Tensor], Tensor] = field(repr=False)
    act_name: str

    @property
    def gated(self) -> bool:
        """Whether the MLP is gated."""
        return self.gate is not None

    def hidden(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_mlp"]:
        """What enters the down projection."""
        return self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x)

    def __call__(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The MLP's output."""
        return self.down(self.hidden(x))


@dataclass(frozen=True, eq=False)
class Moe:
    """A mixture of experts.

    Attributes:
        router: the module that chooses experts.
        experts: the module with the experts' fused weights.
        path: the dotted name of `experts` in the model.
        n_experts: the number of experts.
        top_k: how many a token passes.
        act: the activation.
        act_name: its name.
        shared: the expert that every token passes besides.
        shared_gate: the projection to one number, whose sigmoid weighs the shared expert.
    """

    router: nn.Module = field(repr=False)
    experts: nn.Module = field(repr=False)
    path: str
    n_experts: int
    top_k: int
    act: Callable[[Tensor], Tensor] = field(repr=False)
    act_name: str
    shared: Mlp | None
    shared_gate: Projection | None

    def expert(self, index: int) -> Mlp:
        """One expert, whose weights are views into the fused ones and whose projections have no module to hook."""
        width = self.experts.get_parameter("down_proj").shape[2]

        def part(parameter: str, rows: slice | None) -> Projection:
            return Projection(self.experts, self.path, rows, parameter, range(self.n_experts)[index])

        gate, up = part("gate_up_proj", slice(0, width)), part("gate_up_proj", slice(width, 2 * width))
        return Mlp(gate, up, part("down_proj", None), self.act, self.act_name)

    def route(
        self, x: Float[Tensor, "tokens d_model"]
    ) -> tuple[Float[Tensor, "tokens top_k"], Int[Tensor, "tokens top_k"]]:
        """The weight and the index of the experts that each token passes."""
        _, weights, chosen = self.router(x)
        return weights, chosen


@dataclass(frozen=True, eq=False)
class Block:
    """One block: attention, then a dense MLP or a mixture of experts.

    Attributes:
        index: its place in the model, from 0.
        path: its dotted name in the model.
        module: the module.
        attention: its attention.
        mlp: its dense MLP; None where it has experts instead.
        moe: its experts; None where it has a dense MLP.
        pre_attention: the norm before attention, None where there is none, as are all below.
        post_attention: the norm after attention.
        pre_mlp: the norm before the MLP; it is `pre_attention` where the architecture shares one.
        post_mlp: the norm after the MLP.
        attention_scale: the layer scale of the attention branch.
        mlp_scale: the layer scale of the MLP branch.
        norm_sum: whether the norms after act on the sum with the residual stream, not on the branch alone.
        parallel: whether attention and MLP read the same input.
    """

    index: int
    path: str
    module: nn.Module = field(repr=False)
    attention: Attention
    mlp: Mlp | None
    moe: Moe | None
    pre_attention: nn.Module | None = field(repr=False)
    post_attention: nn.Module | None = field(repr=False)
    pre_mlp: nn.Module | None = field(repr=False)
    post_mlp: nn.Module | None = field(repr=False)
    attention_scale: nn.Module | None = field(repr=False)
    mlp_scale: nn.Module | None = field(repr=False)
    norm_sum: bool
    parallel: bool

    def assemble(
        self,
        x: Float[Tensor, "*batch tokens d_model"],
        attend: Callable[[Tensor], Tensor],
        feed: Callable[[Tensor], Tensor],
    ) -> Float[Tensor, "*batch tokens d_model"]:
        """The block's output, with functions in place of its attention and its MLP; dropout is left out.

        Args:
            x: what enters the block.
            attend: from what enters the attention to the output of its output projection.
            feed: from what enters the MLP or the experts to their output.
        """

        def chain(value: Tensor, *modules: Callable[[Tensor], Tensor] | None) -> Tensor:
            for module in modules:
                value = module(value) if module is not None else value
            return value

        def join(stream: Tensor, branch: Tensor, norm: nn.Module | None) -> Tensor:
            return chain(stream + branch, norm) if self.norm_sum else stream + chain(branch, norm)

        after = join(x, chain(x, self.pre_attention, attend, self.attention_scale), self.post_attention)
        fed = chain(x if self.parallel else after, self.pre_mlp, feed, self.mlp_scale)
        return join(after, fed, self.post_mlp)

    def projections(self) -> Iterator[tuple[str, Projection]]:
        """Each linear module of the block once, whole, with its path. Fused experts are in `moe`."""
        attention, mlp = self.attention, self.mlp or (self.moe and self.moe.shared)
        parts: list[Projection | None] = [attention.q, attention.k, attention.v, attention.o]
        parts += [mlp.gate, mlp.up, mlp.down] if mlp else []
        parts += [self.moe.shared_gate] if self.moe else []
        whole = {part.path: part.module for part in parts if part is not None}
        yield from ((path, Projection(module, path)) for path, module in whole.items())


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts of a model.

    Attributes:
        model: the model itself.
        config: its configuration; of a model with images, that of its language model.
        architecture: the row that it was read with.
        blocks: its blocks in order.
        backbone: the model without its head; its output's `last_hidden_state` is what the head reads.
        backbone_path: the dotted name of `backbone`, "" where it is the model.
        embedding: the token embedding, or the patch embedding of an image model.
        embedding_path: its dotted name.
        final_norm: the norm after the last block.
        lm_head: what maps last hidden states to vocabulary logits; None where the model has no such head.
        final_softcap: c where logits pass through c·tanh(logit / c).
        causal: whether a token sees only what stands before it.
    """

    model: nn.Module = field(repr=False)
    config: Any = field(repr=False)
    architecture: Architecture = field(repr=False)
    blocks: tuple[Block, ...] = field(repr=False)
    backbone: nn.Module = field(repr=False)
    backbone_path: str
    embedding: nn.Module = field(repr=False)
    embedding_path: str
    final_norm: nn.Module | None = field(repr=False)
    lm_head: nn.Module | None = field(repr=False)
    final_softcap: float | None
    causal: bool

    @property
    def n_layers(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int | None:
        """The size of the vocabulary; None for an image model."""
        return getattr(self.config, "vocab_size", None) if self.architecture.input == "text" else None

    @property
    def tied(self) -> bool:
        """Whether the head uses the embedding's own weight."""
        embedding = getattr(self.embedding, "weight", None)
        return self.lm_head is not None and any(p is embedding for p in self.lm_head.parameters())

    def logits(self, hidden: Float[Tensor, "*batch hidden_size"]) -> Float[Tensor, "*batch vocab_size"]:
        """Vocabulary logits of last hidden states (after the final norm), with the model's soft cap.

        Raises:
            NotApplicable: the model has no language-model head.
        """
        if self.lm_head is None:
            raise NotApplicable(
                f"{type(self.model).__name__} has no language-model head: load it by a class that has one"
            )
        logits = self.lm_head(hidden)
        return logits if self.final_softcap is None else torch.tanh(logits / self.final_softcap) * self.final_softcap

    def projections(self) -> Iterator[tuple[str, Projection]]:
        """Each linear module of the blocks once, whole, with its path. Fused experts are in `Block.moe`."""
        for block in self.blocks:
            yield from block.projections()


def anatomy(model: nn.Module) -> Anatomy:
    """Find the parts of a model.

    Args:
        model: a model of transformers, bare or with a head.

    Returns:
        The parts, which are the model's own modules.

    Raises:
        UnknownArchitecture: no row describes the model, or its row does not fit it; names what to add or correct.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=12, n_layer=2, n_head=3))
    >>> parts = anatomy(model)
    >>> parts.n_layers, parts.tied, parts.blocks[1].attention.k.path
    (2, True, 'transformer.h.1.attn.c_attn')
    >>> parts.blocks[1].attention.k.weight.shape, parts.blocks[1].mlp.act_name
    (torch.Size([12, 12]), 'gelu_new')
    """
    return _Reader(model).anatomy()


def alibi_slopes(n_heads: int) -> Float[Tensor, "n_heads"]:
    """The slopes of linear position biases.

    Args:
        n_heads: the number of heads. Beyond a power of two, the rest take every other slope of twice as many.

    Source: Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation (arXiv 2108.12409),
    section 3 and its code's rule for other numbers of heads.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """

    def geometric(n: int) -> Tensor:
        return 2.0 ** (-8.0 / n * torch.arange(1, n + 1, dtype=torch.float64))

    whole = 2 ** int(math.log2(n_heads))
    return torch.cat([geometric(whole), geometric(2 * whole)[::2][: n_heads - whole]]).float()


def _stacked(n_heads: int, n_kv: int, head_dim: int) -> Sequence[slice | Tensor]:
    q, kv = n_heads * head_dim, n_kv * head_dim
    return slice(0, q), slice(q, q + kv), slice(q + kv, q + 2 * kv)


def _grouped(n_heads: int, n_kv: int, head_dim: int) -> Sequence[slice | Tensor]:
    rows = torch.arange((n_heads + 2 * n_kv) * head_dim).view(n_kv, -1, head_dim)
    return rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()


def _join(*parts: str) -> str:
    return ".".join(p for p in parts if p)


def _act_name(act: Any) -> str:
    names = (name for name, cls in ACT2CLS.items() if cls is type(act))
    return next(names, getattr(act, "__name__", type(act).__name__))


class _Reader:
    """Reads one model with its row."""

    def __init__(self, model: nn.Module) -> None:
        whole: Any = getattr(model, "config", None)
        name = getattr(whole, "model_type", None)
        if not isinstance(name, str) or name not in ARCHITECTURES:
            said = f"has the model_type {name!r}" if name else "has no config with a model_type"
            entry = f"{name!r}" if name else "of its own"
            raise UnknownArchitecture(
                f"{type(model).__name__} {said}, which is not described: add an entry {entry} to {ROWS_FILE} "
                f"(described are {', '.join(ARCHITECTURES)})"
            )
        self.model, self.name, self.row = model, name, ARCHITECTURES[name]
        self.config = whole.get_text_config()
        self.flags = self.config.to_dict()
        blocks = [_join(home, self.row.blocks) for home in self.row.backbone]
        self.blocks_path, self.blocks = self.need("", "|".join(blocks))
        self.home = self.blocks_path.removesuffix(self.row.blocks).rstrip(".")

    def find(self, base: str, paths: str) -> tuple[str, Any] | None:
        """The first of the alternatives that exists below `base`, with its path; None where it may be absent."""
        for path in paths.split("|"):
            if not path:
                return None
            whole = _join(base, path)
            try:
                part = attrgetter(whole)(self.model)
            except AttributeError:
                continue
            if part is not None:
                return whole, part
        raise UnknownArchitecture(
            f"{type(self.model).__name__} has no {_join(base, paths)!r}, which the entry {self.name!r} of {ROWS_FILE} "
            "names: correct the entry for this version of transformers, or pass the model that a wrapper (PEFT) holds"
        )

    def need(self, base: str, paths: str) -> tuple[str, Any]:
        """A part that must exist."""
        found = self.find(base, paths)
        if found is None:
            raise UnknownArchitecture(f"the entry {self.name!r} of {ROWS_FILE} lacks a path that every model needs")
        return found

    def part(self, base: str, paths: str) -> Any:
        """A part without its path, None where it may be absent."""
        found = self.find(base, paths)
        return found and found[1]

    def projection(self, base: str, paths: str, rows: slice | Tensor | None = None) -> Projection:
        """A projection that must exist."""
        path, module = self.need(base, paths)
        return Projection(module, path, rows)

    def optional(self, base: str, paths: str) -> Projection | None:
        """A projection, None where it may be absent."""
        return self.projection(base, paths) if self.find(base, paths) else None

    def anatomy(self) -> Anatomy:
        row = self.row
        embedding_path, embedding = self.need(self.home, row.embedding)
        return Anatomy(
            model=self.model,
            config=self.config,
            architecture=row,
            blocks=tuple(self.block(i) for i in range(len(self.blocks))),
            backbone=self.model.get_submodule(self.home),
            backbone_path=self.home,
            embedding=embedding,
            embedding_path=embedding_path,
            final_norm=self.part(self.home, row.final_norm),
            lm_head=self.part("", row.head),
            final_softcap=getattr(self.config, row.final_softcap, None) if row.final_softcap else None,
            causal=is_causal(row, self.flags),
        )

    def block(self, index: int) -> Block:
        """One block."""
        row, base = self.row, f"{self.blocks_path}.{index}"
        moe = self.moe(base) if row.experts and self.find(base, row.experts) else None
        return Block(
            index=index,
            path=base,
            module=self.blocks[index],
            attention=self.attention(index, base),
            mlp=None if moe else self.mlp(base, row.gate, row.up, row.down, row.act),
            moe=moe,
            pre_attention=self.part(base, row.pre_attention),
            post_attention=self.part(base, row.post_attention),
            pre_mlp=self.part(base, row.pre_mlp),
            post_mlp=self.part(base, row.post_mlp),
            attention_scale=self.part(base, row.attention_scale),
            mlp_scale=self.part(base, row.mlp_scale),
            norm_sum=row.norm_sum,
            parallel=holds(row.parallel, self.flags),
        )

    def attention(self, index: int, base: str) -> Attention:
        """The attention of one block; the numbers of heads and their width are read from the weights."""
        row, n_heads = self.row, self.config.num_attention_heads
        path, module = self.need(base, row.attention)
        o = self.projection(base, row.o)
        head_dim = o.in_features // n_heads
        if row.qkv:
            n_kv = (self.projection(base, row.qkv).out_features // head_dim - n_heads) // 2
            split = _stacked if row.qkv_layout == "stacked" else _grouped
            q, k, v = (self.projection(base, row.qkv, rows) for rows in split(n_heads, n_kv, head_dim))
        else:
            q, k, v = (self.projection(base, paths) for paths in (row.q, row.k, row.v))
            n_kv = k.out_features // head_dim
        kinds = getattr(self.config, "layer_types", None)
        # A window in a configuration without kinds of blocks holds for all of them.
        kind = kinds[index] if kinds else "sliding_attention"
        window = getattr(self.config, row.window, None) if row.window and kind == "sliding_attention" else None
        alibi = holds(row.alibi, self.flags)
        return Attention(
            module=module,
            path=path,
            q=q,
            k=k,
            v=v,
            o=o,
            n_heads=n_heads,
            n_kv_heads=n_kv,
            head_dim=head_dim,
            scaling=getattr(module, row.scaling),
            causal=is_causal(row, self.flags),
            window=window,
            softcap=getattr(module, row.softcap) if row.softcap else None,
            clip=getattr(self.config, row.clip) if row.clip else None,
            rotary=None if alibi else self.rotary(kind),
            alibi=alibi_slopes(n_heads) * getattr(module, row.scaling) if alibi else None,
            q_norm=self.part(base, row.q_norm),
            k_norm=self.part(base, row.k_norm),
            interface=row.interface,
        )

    def rotary(self, kind: str) -> Rotary | None:
        """The rotary embedding of the blocks of one kind, some models keeping one set of frequencies per kind."""
        module = self.part(self.home, self.row.rotary)
        return module and Rotary(module, f"{kind}_" if hasattr(module, f"{kind}_inv_freq") else "")

    def mlp(self, base: str, gate: str, up: str, down: str, act: str) -> Mlp:
        """The MLP with the given parts."""
        function = self.need(base, act)[1]
        gate_part: Projection | None
        if self.row.gate_up:
            width = self.projection(base, self.row.gate_up).out_features // 2
            halves = slice(0, width), slice(width, 2 * width)
            gate_part, up_part = (self.projection(base, self.row.gate_up, rows) for rows in halves)
        else:
            gate_part, up_part = self.optional(base, gate), self.projection(base, up)
        return Mlp(gate_part, up_part, self.projection(base, down), function, _act_name(function))

    def moe(self, base: str) -> Moe:
        """The mixture of experts of one block."""
        row = self.row
        router, (path, experts) = self.need(base, row.router)[1], self.need(base, row.experts)
        inside = (name.rpartition(".")[2] for name in (row.gate, row.up, row.down, row.act))
        return Moe(
            router=router,
            experts=experts,
            path=path,
            n_experts=experts.down_proj.shape[0],
            top_k=router.top_k,
            act=experts.act_fn,
            act_name=_act_name(experts.act_fn),
            shared=self.mlp(_join(base, row.shared), *inside) if row.shared else None,
            shared_gate=self.optional(base, row.shared_gate),
        )
