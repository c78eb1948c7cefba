"""Streaming activation capture: named sites, reducers that keep what they need, one forward pass for all of them.

Sites (each seen once a layer and batch, unless it says otherwise):

| site | value |
|---|---|
| `embed` | input of the first block, `[batch, tokens, hidden]` |
| `resid` | output of the block |
| `attn.pattern` | `PatternSlice`, several a layer: attention weights of some heads and query rows |
| `attn` | `AttentionView`: queries, keys, values and head outputs after the rotary embedding |
| `attn.out` | output of the attention's output projection |
| `mlp.in` | input of the first projection, `[batch, tokens, hidden]` |
| `mlp.pre` | input of the nonlinearity, `[batch, tokens, width]` (the gate's branch in a gated layer) |
| `mlp.post` | input of the down projection |
| `mlp.out` | output of the down projection |
| `logits` | `LogitsSlice`, several a batch, layer −1; only under `trace` |

Attention patterns are made, shown and dropped slice by slice inside the layer, so no more than one slice exists at a
time and the memory of a run does not grow with the number of tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from assay.core.errors import InputError, NotApplicable
from assay.core.progress import Progress, silent

if TYPE_CHECKING:
    from assay.core.anatomy import Anatomy, Block

SITES = (
    "embed", "resid", "attn.pattern", "attn", "attn.out", "mlp.in", "mlp.pre", "mlp.post", "mlp.out", "logits",
)  # fmt: skip

_IMPLEMENTATION = "assay_trace"
# One slice of the pattern should stay in a core's cache while the reducers look at it.
_SLICE_BYTES = 2 << 20
# Fewer query rows than this make poor matrix products, so long contexts may exceed the slice.
_MIN_ROWS = 16
_LOGITS_BYTES = 32 << 20


@dataclass(frozen=True)
class Batch:
    """What the model was given.

    Attributes:
        inputs: the model's keyword arguments.
        valid: which tokens are no padding; None when every one counts.
        index: the number of the batch in this run, from 0.
    """

    inputs: Mapping[str, Any]
    valid: Bool[Tensor, "batch tokens"] | None
    index: int

    @property
    def input_ids(self) -> Int[Tensor, "batch tokens"]:
        """The tokens.

        Raises:
            NotApplicable: the model was not given any (an image model, say).
        """
        ids = self.inputs.get("input_ids")
        if ids is None:
            raise NotApplicable("this measure needs token ids, and the model was given none")
        return ids

    def rows(self, x: Tensor) -> Tensor:
        """Flatten `[batch, tokens, features]` to `[rows, features]` and leave out the padding."""
        return x.reshape(-1, x.shape[-1]) if self.valid is None else x[self.valid]


@dataclass(frozen=True)
class PatternSlice:
    """Attention weights of some heads and some query rows.

    Attributes:
        weights: after the softmax; rows sum to one. Keys beyond `keys` are masked for all of these rows.
        heads: which query heads.
        rows: which query positions.
    """

    weights: Float[Tensor, "batch heads rows keys"]
    heads: slice
    rows: slice

    @cached_property
    def entropy(self) -> Float[Tensor, "batch heads rows"]:
        """Entropy of each row in nats; masked keys count nothing."""
        # Several times as fast as torch.special.entr, and equal: the clamp only keeps 0·log 0 at 0.
        logs = self.weights.clamp_min(torch.finfo(self.weights.dtype).tiny).log_()
        return -torch.linalg.vecdot(self.weights, logs)


@dataclass(frozen=True)
class AttentionView:
    """One layer's attention after the rotary embedding, before the output projection.

    Attributes:
        q, k, v: queries and keys as they are multiplied, values; keys and values have one head a group.
        out: each head's weighted sum of values.
        scaling: the factor on the logits.
        softcap: logits are `softcap·tanh(·/softcap)` where given.
        mask: True (or 0) where a query may look; None when `causal` says all.
        causal: queries look at no later key.
        block: the layer's anatomy.
    """

    q: Float[Tensor, "batch heads tokens head_dim"]
    k: Float[Tensor, "batch kv_heads tokens head_dim"]
    v: Float[Tensor, "batch kv_heads tokens v_dim"]
    out: Float[Tensor, "batch heads tokens v_dim"]
    scaling: float
    softcap: float | None
    mask: Tensor | None
    causal: bool
    block: Block


@dataclass(frozen=True)
class LogitsSlice:
    """Logits of some positions, float32.

    Attributes:
        values: the logits.
        rows: which positions of the sequences.
    """

    values: Float[Tensor, "batch rows vocab"]
    rows: slice


class Reducer:
    """Sees values at the sites that it names and keeps what it needs.

    A subclass sets `sites` and gives `update`. What `update` returns, if anything, takes the place of what it saw;
    at the site `attn` that is the heads' outputs.
    """

    sites: Sequence[str] = ()
    layers: Collection[int] | None = None

    def update(self, site: str, layer: int, value: Any, batch: Batch) -> Tensor | None:
        """Take in one value.

        Args:
            site: where it comes from.
            layer: the block's number from 0; −1 for `embed` and `logits`.
            value: as the table of sites says. It may be overwritten by the model afterwards: copy what you keep.
            batch: what the model was given.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Called once when the run is over."""


@dataclass
class _Tracer:
    anatomy: Anatomy
    reducers: Sequence[Reducer]
    n_batches: int = 0
    batch: Batch | None = None
    layer_of: weakref.WeakKeyDictionary[nn.Module, Block] = field(default_factory=weakref.WeakKeyDictionary)
    current: Block | None = None

    def listeners(self, site: str, layer: int) -> list[Reducer]:
        return [r for r in self.reducers if site in r.sites and (r.layers is None or layer in r.layers)]

    def emit(self, site: str, layer: int, value: Any) -> Tensor | None:
        replaced = None
        for reducer in self.listeners(site, layer):
            assert self.batch is not None
            new = reducer.update(site, layer, value, self.batch)
            if new is not None:
                replaced = new
                value = replace(value, out=new) if isinstance(value, AttentionView) else new
        return replaced

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = dict(kwargs)
        if args:
            inputs.setdefault("input_ids" if not args[0].is_floating_point() else "inputs", args[0])
        mask = inputs.get("attention_mask")
        valid = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
        if valid is not None and bool(valid.all()):
            valid = None
        self.batch = Batch(inputs=inputs, valid=valid, index=self.n_batches)
        self.n_batches += 1


_TRACERS: weakref.WeakKeyDictionary[nn.Module, _Tracer] = weakref.WeakKeyDictionary()


def _attend(
    tracer: _Tracer,
    block: Block,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    causal: bool,
) -> Tensor:
    """Attention in slices of heads and query rows, showing each slice of the pattern; returns the heads' outputs."""
    batch, n_heads, tokens, _ = q.shape
    n_kv, n_keys = k.shape[1], k.shape[2]
    group = n_heads // n_kv
    causal = causal and mask is None and tokens > 1
    out = q.new_empty(batch, n_heads, tokens, v.shape[-1])
    looks = bool(tracer.listeners("attn.pattern", block.index))
    rows_per = min(tokens, max(_MIN_ROWS, _SLICE_BYTES // (4 * batch * group * n_keys)))
    groups_per = max(1, min(n_kv, _SLICE_BYTES // (4 * batch * group * n_keys * rows_per)))
    floor = torch.finfo(torch.float32).min
    for g0 in range(0, n_kv, groups_per):
        g1 = min(n_kv, g0 + groups_per)
        heads = slice(g0 * group, g1 * group)
        for r0 in range(0, tokens, rows_per):
            r1 = min(tokens, r0 + rows_per)
            end = r1 if causal else n_keys
            # The query heads of a group are stacked along the rows, so that keys and values are never repeated.
            part = q[:, heads, r0:r1].reshape(batch, g1 - g0, group * (r1 - r0), -1)
            logits = (part @ k[:, g0:g1, :end].mT).float().mul_(scaling)
            if softcap is not None:
                logits = logits.div_(softcap).tanh_().mul_(softcap)
            logits = logits.view(batch, heads.stop - heads.start, r1 - r0, end)
            if causal:
                future = torch.ones(r1 - r0, r1 - r0, dtype=torch.bool, device=q.device).triu_(1)
                logits[..., r0:r1].masked_fill_(future, floor)
            elif mask is not None:
                local = mask[:, heads if mask.shape[1] > 1 else slice(None), r0:r1, :end]
                if local.dtype == torch.bool:
                    logits.masked_fill_(~local, floor)
                else:
                    logits.add_(local)
            weights = torch.softmax(logits, dim=-1)
            del logits
            summed = weights.to(v.dtype).view(batch, g1 - g0, group * (r1 - r0), end) @ v[:, g0:g1, :end]
            out[:, heads, r0:r1] = summed.view(batch, heads.stop - heads.start, r1 - r0, -1)
            if looks:
                tracer.emit("attn.pattern", block.index, PatternSlice(weights, heads, slice(r0, r1)))
    view = AttentionView(q, k, v, out, scaling, softcap, mask, causal, block)
    replaced = tracer.emit("attn", block.index, view) if tracer.listeners("attn", block.index) else None
    return out if replaced is None else replaced


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' attention layers call while a tracer is attached."""
    if kwargs.get("s_aux") is not None:
        raise NotApplicable("attention sinks that are parameters cannot be traced")
    tracer = _TRACERS[module]
    block = tracer.layer_of[module]
    out = _attend(
        tracer,
        block,
        query,
        key,
        value,
        attention_mask,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap,
        bool(getattr(module, "is_causal", False) if is_causal is None else is_causal),
    )
    return out.transpose(1, 2).contiguous(), None


class _ScaledDotProduct(TorchFunctionMode):
    """Stands in for torch's attention in models that call it directly and not through transformers' interface."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        block = self.tracer.current
        if func is not nn.functional.scaled_dot_product_attention or block is None:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        given = dict(zip(names, args, strict=False)) | kwargs
        q = given["query"]
        scale = given.get("scale")
        return _attend(
            self.tracer,
            block,
            q,
            given["key"],
            given["value"],
            given.get("attn_mask"),
            q.shape[-1] ** -0.5 if scale is None else scale,
            None,
            bool(given.get("is_causal", False)),
        )


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_IMPLEMENTATION, _interface)
    AttentionMaskInterface.register(_IMPLEMENTATION, sdpa_mask)


@contextmanager
def attach(model: nn.Module, reducers: Sequence[Reducer], *, anatomy: Anatomy | None = None) -> Iterator[_Tracer]:
    """Let reducers watch every forward pass of the model inside the `with` block.

    The model is left as it was found, also after an error. Training mode and gradients are the caller's.

    Args:
        model: a transformers model that `assay.core.anatomy` knows.
        reducers: they share each pass.
        anatomy: the model's anatomy, where the caller has it already.

    Raises:
        InputError: a reducer names an unknown site, or `logits`, which only `trace` serves.
        UnknownArchitecture: the model has no anatomy.
    """
    for reducer in reducers:
        unknown = [s for s in reducer.sites if s not in SITES]
        if unknown:
            raise InputError(f"no site is called {unknown[0]!r}: there are {', '.join(SITES)}")
    if anatomy is None:
        from assay.core.anatomy import anatomy as find

        anatomy = find(model)
    tracer = _Tracer(anatomy, reducers)
    with ExitStack() as stack:

        def hook(handle: torch.utils.hooks.RemovableHandle) -> None:
            stack.callback(handle.remove)

        def start(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tracer.begin(args, kwargs)

        hook(anatomy.backbone.register_forward_pre_hook(start, with_kwargs=True))
        blocks = list(anatomy.blocks)
        if blocks and tracer.listeners("embed", -1):
            hook(blocks[0].module.register_forward_pre_hook(_on_input(tracer, "embed", -1), with_kwargs=True))
        for block in blocks:
            _hook_block(tracer, block, hook)
        watched = [
            b
            for b in blocks
            if b.attention is not None
            and (tracer.listeners("attn", b.index) or tracer.listeners("attn.pattern", b.index))
        ]
        if watched:
            _take_over_attention(tracer, watched, stack, hook)
        try:
            yield tracer
        finally:
            for reducer in reducers:
                reducer.finish()


def _on_input(tracer: _Tracer, site: str, layer: int) -> Callable[..., Any]:
    def see(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = args[0] if args else kwargs["hidden_states"]
        new = tracer.emit(site, layer, value)
        if new is None:
            return None
        return ((new, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": new})

    return see


def _on_output(
    tracer: _Tracer, site: str, layer: int, take: Callable[[Tensor], Tensor] | None = None
) -> Callable[..., Any]:
    def see(_module: nn.Module, _args: Any, output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        new = tracer.emit(site, layer, value if take is None else take(value))
        if new is None:
            return None
        if take is not None:
            raise InputError(f"a reducer replaced {site}, which can only be read")
        return (new, *output[1:]) if isinstance(output, tuple) else new

    return see


def _hook_block(tracer: _Tracer, block: Block, hook: Callable[[torch.utils.hooks.RemovableHandle], None]) -> None:
    layer = block.index
    if tracer.listeners("resid", layer):
        hook(block.module.register_forward_hook(_on_output(tracer, "resid", layer)))
    if block.attention is not None and tracer.listeners("attn.out", layer):
        hook(block.attention.o.module.register_forward_hook(_on_output(tracer, "attn.out", layer)))
    if block.mlp is None:
        return
    first = block.mlp.up if block.mlp.gate is None else block.mlp.gate
    if tracer.listeners("mlp.in", layer):
        hook(first.module.register_forward_pre_hook(_on_input(tracer, "mlp.in", layer), with_kwargs=True))
    if tracer.listeners("mlp.pre", layer):
        hook(first.module.register_forward_hook(_on_output(tracer, "mlp.pre", layer, first.take)))
    if tracer.listeners("mlp.post", layer):
        hook(block.mlp.down.module.register_forward_pre_hook(_on_input(tracer, "mlp.post", layer), with_kwargs=True))
    if tracer.listeners("mlp.out", layer):
        hook(block.mlp.down.module.register_forward_hook(_on_output(tracer, "mlp.out", layer)))


def _take_over_attention(
    tracer: _Tracer,
    blocks: Sequence[Block],
    stack: ExitStack,
    hook: Callable[[torch.utils.hooks.RemovableHandle], None],
) -> None:
    """Route the attention of every block through `_attend` until the stack unwinds."""
    _register()
    through_interface = [b for b in tracer.anatomy.blocks if b.attention is not None and b.attention.interface]
    if len(through_interface) == len(tracer.anatomy.blocks):
        configs = {id(b.attention.module.config): b.attention.module.config for b in through_interface}
        for module_config in [*configs.values(), tracer.anatomy.backbone.config]:
            before = module_config._attn_implementation
            stack.callback(setattr, module_config, "_attn_implementation", before)
            module_config._attn_implementation = _IMPLEMENTATION
        for block in through_interface:
            module = block.attention.module
            if module in _TRACERS:
                raise InputError("the model is being traced already: leave the outer `with` block first")
            _TRACERS[module] = tracer
            tracer.layer_of[module] = block
            stack.callback(_TRACERS.pop, module, None)
        return
    for block in blocks:

        def enter(_module: nn.Module, _args: Any, block: Block = block) -> None:
            tracer.current = block

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            tracer.current = None

        hook(block.attention.module.register_forward_pre_hook(enter))
        hook(block.attention.module.register_forward_hook(leave))
    config = tracer.anatomy.backbone.config
    stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
    config._attn_implementation = "sdpa"
    stack.enter_context(_ScaledDotProduct(tracer))


def trace(
    model: nn.Module,
    batches: Iterable[Tensor | Mapping[str, Any]],
    reducers: Sequence[Reducer],
    *,
    anatomy: Anatomy | None = None,
    total: int | None = None,
    progress: Progress = silent,
) -> int:
    """Run the model over the batches once, without gradients and in evaluation mode, for all reducers together.

    The language-model head runs only when a reducer asks for `logits`, and then a slice of positions at a time.

    Args:
        model: a transformers model that `assay.core.anatomy` knows.
        batches: token ids `[batch, tokens]`, or mappings of the model's keyword arguments. Padding goes to the right.
        reducers: they share the pass.
        anatomy: the model's anatomy, where the caller has it already.
        total: how many batches there are, for the progress only.
        progress: called after every batch.

    Returns:
        The number of batches.

    Raises:
        InputError: no batches, or padding on the left.
    """
    if anatomy is None:
        from assay.core.anatomy import anatomy as find

        anatomy = find(model)
    backbone = anatomy.backbone
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    done = 0
    try:
        with torch.no_grad(), attach(model, reducers, anatomy=anatomy) as tracer:
            for raw in batches:
                inputs: dict[str, Any] = dict(raw) if isinstance(raw, Mapping) else {"input_ids": raw}
                inputs.pop("labels", None)
                inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
                mask = inputs.get("attention_mask")
                ids = inputs.get("input_ids")
                if isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.ndim == 2 and mask.shape != ids.shape:
                    raise InputError(f"attention_mask is {tuple(mask.shape)} and input_ids is {tuple(ids.shape)}")
                if isinstance(mask, Tensor) and mask.ndim == 2 and not bool((mask[:, 0] != 0).all()):
                    raise InputError("the batch is padded on the left: pad on the right")
                if "input_ids" in inputs and _has_cache(backbone):
                    inputs["use_cache"] = False
                hidden = backbone(**inputs)[0]
                if tracer.listeners("logits", -1):
                    _emit_logits(tracer, hidden)
                done += 1
                progress(done, total, "forward passes")
    finally:
        model.train(training)
    if done == 0:
        raise InputError("there are no batches to run the model on")
    return done


def _has_cache(backbone: nn.Module) -> bool:
    return getattr(backbone.config, "is_decoder", False) or hasattr(backbone.config, "use_cache")


def _emit_logits(tracer: _Tracer, hidden: Float[Tensor, "batch tokens hidden"]) -> None:
    batch, tokens, _ = hidden.shape
    vocab = tracer.anatomy.vocab_size
    rows_per = max(1, _LOGITS_BYTES // (4 * batch * vocab))
    for r0 in range(0, tokens, rows_per):
        r1 = min(tokens, r0 + rows_per)
        values = tracer.anatomy.logits(hidden[:, r0:r1]).float()
        tracer.emit("logits", -1, LogitsSlice(values, slice(r0, r1)))
