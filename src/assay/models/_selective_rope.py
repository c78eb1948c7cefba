"""Rotary position embedding whose angles are read from the input, and two attention layers that take it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from assay.core.errors import InputError
from assay.models._linear_attention import causal_convolution, gated_linear_attention, log_forget_gate

# A turn in two parts, the first of so few bits that whole multiples of it are exact in float32. Wrapping by 2π rounded
# to float32 would be off by the same 2e-7 at every turn, which adds up to visible angles over 1e5 tokens.
_TURN = 2 * math.pi
_TURN_HIGH = 6.28125
_TURN_LOW = _TURN - _TURN_HIGH
# Tokens summed before the running angle is wrapped: the sum of one block stays small enough for float32.
_BLOCK = 128
_FORGET_NORMALISER = 16.0
_FORGET_RANK = 16

Position = Literal["none", "rope", "selective"]


def rope_temperature(
    n_angles: int,
    *,
    base: float = 500_000.0,
    temp_max: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Float[Tensor, "angles"]:
    """The spectrum of plain RoPE: `temp_max / base^(i / n_angles)`, radians for one unit of phase.

    Args:
        n_angles: angles a head, half of its head dimension.
        base: RoPE's base; 1 gives all ones.
        temp_max: the largest temperature.
        dtype: of the result.
        device: of the result.

    Returns:
        One temperature an angle, falling.

    Raises:
        InputError: no angles, a base below 1, or a `temp_max` that is not above zero.

    Source: Selective Rotary Position Embedding, arXiv 2511.17388, section on the temperature.

    >>> rope_temperature(2, base=100.0)
    tensor([1.0000, 0.1000])
    """
    if n_angles < 1:
        raise InputError(f"n_angles={n_angles}: a head needs at least one angle")
    if not base >= 1 or not math.isfinite(base):
        raise InputError(f"base={base}: must be a finite number of at least 1")
    _check_temp_max(temp_max)
    exponent = torch.arange(n_angles, dtype=dtype, device=device) / n_angles
    return temp_max / base**exponent


def rfa_temperature(
    n_angles: int,
    *,
    theta: float = 0.9999,
    temp_max: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Float[Tensor, "angles"]:
    """The spectrum of random Fourier features: `tan(x / 2)` for x from 0 to `theta · π`, scaled to `temp_max`.

    Args:
        n_angles: angles a head, half of its head dimension; at least two.
        theta: where the grid ends, in half turns, strictly between 0 and 1; near 1 a few angles turn far faster
            than the rest.
        temp_max: the largest temperature.
        dtype: of the result.
        device: of the result.

    Returns:
        One temperature an angle, rising from 0.

    Raises:
        InputError: fewer than two angles, `theta` outside (0, 1), or a `temp_max` that is not above zero.

    Source: Selective Rotary Position Embedding, arXiv 2511.17388, section on the temperature.

    >>> rfa_temperature(3, theta=0.5)
    tensor([0.0000, 0.4142, 1.0000])
    """
    if n_angles < 2:
        raise InputError(f"n_angles={n_angles}: the rfa spectrum starts at 0 and needs at least two angles")
    if not 0 < theta < 1:
        raise InputError(f"theta={theta}: must lie strictly between 0 and 1")
    _check_temp_max(temp_max)
    # tan(x / 2) as 1 / tan of the angle that is left to a quarter turn: near the pole only that keeps its digits.
    rest = (1 - theta) * math.pi / 2
    left = torch.linspace(math.pi / 2, rest, n_angles, dtype=dtype, device=device)
    return (temp_max * math.tan(rest) / left.tan()).clamp(0.0, temp_max)


def _check_temp_max(temp_max: float) -> None:
    if not 0 < temp_max < math.inf:
        raise InputError(f"temp_max={temp_max}: must be a finite number above zero")


@dataclass(frozen=True)
class SelectiveRoPECache:
    """What `SelectiveRoPE` must remember between two pieces of a sequence.

    Attributes:
        inputs: the last projected phases that the convolution (or the first difference) still needs.
        angle: the angles after the last token, modulo a turn.
    """

    inputs: Float[Tensor, "batch past channels"]
    angle: Float[Tensor, "batch heads angles"]


class SelectiveRoPE(nn.Module):
    """Rotates queries and keys by angles that are summed up from the input.

    A projection of the normalised hidden states gives each token a phase φ_t for each angle of each head; the angle is
    θ_t = temperature · Σ_{s≤t} φ_s, and a score between tokens t and τ depends on the phases in (τ, t] only.
    With φ ≡ 1 this is plain RoPE. Rotates halves (channel i with channel i + head_dim/2), as Llama does.

    Args:
        d_model: width of the hidden states.
        n_heads: query heads.
        head_dim: channels a head, even.
        n_kv_heads: key heads; the query heads of one group share its angles. Default: `n_heads`.
        rank: width of the low-rank projection to phases; None takes a full matrix a head with weight normalisation
            (unit columns times one learned scalar a head).
        conv: taps of the depthwise causal convolution over the phases; None takes their first difference in time
            instead, so that the summed phase is the projection itself.
        act: what follows the convolution.
        temp: which temperature spectrum, see `rope_temperature` and `rfa_temperature`.
        base: base of the "rope" spectrum.
        theta: end of the "rfa" spectrum.
        temp_max: the largest temperature.
        train_temp: learn the temperatures, starting from the spectrum.
        bias: add exp(b), b learned from 0, to every phase: a constant drift, as in plain RoPE.
        gate: multiply phases by a sigmoid of the input, one a head or one an angle.
        init_scale: scale of the phases at the start: the standard deviation of the last projection (low rank) or the
            scalar of each head (full rank). Default: what `nn.Linear` does, or 1. State tracking needs turns of the
            order of π a token, which small values reach late.

    Raises:
        InputError: sizes that do not fit or options out of range.

    Source: Selective Rotary Position Embedding, arXiv 2511.17388.

    >>> import torch
    >>> rope = SelectiveRoPE(d_model=32, n_heads=4, head_dim=8)
    >>> q, k, hidden = torch.randn(2, 10, 4, 8), torch.randn(2, 10, 4, 8), torch.randn(2, 10, 32)
    >>> q_rot, k_rot, cache = rope(q, k, hidden)
    >>> q_rot.shape, cache.angle.shape
    (torch.Size([2, 10, 4, 8]), torch.Size([2, 4, 4]))
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int,
        *,
        n_kv_heads: int | None = None,
        rank: int | None = 16,
        conv: int | None = 4,
        act: Literal["silu"] | None = None,
        temp: Literal["rope", "rfa"] = "rope",
        base: float = 500_000.0,
        theta: float = 0.9999,
        temp_max: float = 1.0,
        train_temp: bool = False,
        bias: bool = False,
        gate: Literal["head", "angle"] | None = None,
        init_scale: float | None = None,
    ) -> None:
        super().__init__()
        _check_size("d_model", d_model)
        n_kv_heads = _check_heads(n_heads, n_kv_heads, head_dim)
        if d_model % n_kv_heads:
            raise InputError(
                f"d_model={d_model} does not split into {n_kv_heads} heads: choose a multiple of {n_kv_heads}"
            )
        for name, value in (("rank", rank), ("conv", conv)):
            if value is not None:
                _check_size(name, value)
        _check_choice("act", act, ("silu", None))
        _check_choice("temp", temp, ("rope", "rfa"))
        _check_choice("gate", gate, ("head", "angle", None))
        if act is not None and conv is None:
            raise InputError("act='silu' follows the convolution: set conv to its number of taps, or act to None")
        if init_scale is not None and not 0 < init_scale < math.inf:
            raise InputError(f"init_scale={init_scale}: must be a finite number above zero")

        self.d_model, self.n_heads, self.n_kv_heads, self.head_dim = d_model, n_heads, n_kv_heads, head_dim
        self.rank, self.conv, self.act, self.gate = rank, conv, act, gate
        self.temp, self.base, self.theta, self.temp_max = temp, base, theta, temp_max
        self.n_angles = head_dim // 2
        channels = n_kv_heads * self.n_angles

        if rank is None:
            self.phase_weight = nn.Parameter(torch.empty(n_kv_heads, d_model // n_kv_heads, self.n_angles))
            nn.init.normal_(self.phase_weight)
            self.phase_scale = nn.Parameter(torch.full((n_kv_heads,), init_scale or 1.0))
        else:
            self.phase_in = nn.Linear(d_model, rank, bias=False)
            self.phase_out = nn.Linear(rank, channels, bias=False)
            if init_scale is not None:
                nn.init.normal_(self.phase_out.weight, std=init_scale)
        if conv is not None:
            self.conv_weight = nn.Parameter(torch.empty(channels, conv))
            nn.init.uniform_(self.conv_weight, -(conv**-0.5), conv**-0.5)
        if gate is not None:
            self.gate_proj = nn.Linear(d_model, n_kv_heads if gate == "head" else channels)
        self.log_drift = nn.Parameter(torch.zeros(n_kv_heads, self.n_angles)) if bias else None
        spectrum = self._spectrum(torch.float32, None)
        self.learned_temperature = nn.Parameter(spectrum) if train_temp else None

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimiser should not decay."""
        return {"phase_scale"} if self.rank is None else set()

    def _spectrum(self, dtype: torch.dtype, device: torch.device | None) -> Tensor:
        if self.temp == "rope":
            return rope_temperature(self.n_angles, base=self.base, temp_max=self.temp_max, dtype=dtype, device=device)
        return rfa_temperature(self.n_angles, theta=self.theta, temp_max=self.temp_max, dtype=dtype, device=device)

    def angles(
        self,
        hidden: Float[Tensor, "batch tokens d_model"],
        *,
        mask: Bool[Tensor, "batch tokens"] | None = None,
        cache: SelectiveRoPECache | None = None,
    ) -> tuple[Float[Tensor, "batch tokens kv_heads angles"], SelectiveRoPECache]:
        """The angles of every token, in radians and up to whole turns.

        Args:
            hidden: the layer's input.
            mask: True at tokens, False at padding, which then turns nothing.
            cache: what an earlier call returned for the tokens before these.

        Returns:
            Angles in at least float32, and the cache for the tokens that follow.

        Raises:
            InputError: shapes, dtypes or a cache that do not fit.
        """
        _check_hidden(hidden, self.d_model, self.phase_weight if self.rank is None else self.phase_in)
        batch, tokens = hidden.shape[:2]
        _check_mask(mask, batch, tokens)
        channels = self.n_kv_heads * self.n_angles
        if cache is not None:
            _check_kind(cache, SelectiveRoPECache)
            past = 1 if self.conv is None else self.conv - 1
            shapes = {"inputs": (batch, past, channels), "angle": (batch, self.n_kv_heads, self.n_angles)}
            _check_shapes(cache, shapes)

        chunks = F.normalize(hidden.unflatten(-1, (self.n_kv_heads, -1)), dim=-1)
        unit = chunks.flatten(-2)
        if self.rank is None:
            weight = F.normalize(self.phase_weight, dim=1) * self.phase_scale[:, None, None]
            phase = torch.einsum("bthi,hia->btha", chunks, weight).flatten(-2)
        else:
            phase = self.phase_out(self.phase_in(unit))
        if mask is not None:
            phase = phase * mask.unsqueeze(-1)

        before = None if cache is None else cache.inputs
        if self.conv is None:
            phase, inputs = causal_convolution(phase, phase.new_tensor([[-1.0, 1.0]]).expand(channels, 2), before)
        else:
            phase, inputs = causal_convolution(phase, self.conv_weight, before)
        if self.act == "silu":
            phase = F.silu(phase)
        wide = torch.promote_types(phase.dtype, torch.float32)
        phase = phase.to(wide).unflatten(-1, (self.n_kv_heads, self.n_angles))
        if self.log_drift is not None:
            phase = phase + self.log_drift.to(wide).exp()
        if self.gate is not None:
            gate = self.gate_proj(unit).to(wide).sigmoid()
            phase = phase * gate.unflatten(-1, (self.n_kv_heads, -1))
        if mask is not None:
            phase = phase * mask[:, :, None, None]
        temperature = (
            self._spectrum(wide, hidden.device)
            if self.learned_temperature is None
            else self.learned_temperature.to(wide)
        )
        start = None if cache is None else cache.angle
        return _summed(phase * temperature, inputs, start)

    def forward(
        self,
        q: Float[Tensor, "batch tokens heads head_dim"],
        k: Float[Tensor, "batch tokens kv_heads head_dim"],
        hidden: Float[Tensor, "batch tokens d_model"],
        *,
        mask: Bool[Tensor, "batch tokens"] | None = None,
        cache: SelectiveRoPECache | None = None,
    ) -> tuple[
        Float[Tensor, "batch tokens heads head_dim"],
        Float[Tensor, "batch tokens kv_heads head_dim"],
        SelectiveRoPECache,
    ]:
        """Rotate queries and keys.

        Args:
            q: queries.
            k: keys.
            hidden: the hidden states that q and k were projected from.
            mask: True at tokens, False at padding.
            cache: what an earlier call returned for the tokens before these.

        Returns:
            The rotated queries and keys in their own dtypes, and the cache for the tokens that follow.

        Raises:
            InputError: shapes, dtypes or a cache that do not fit.
        """
        angle, cache = self.angles(hidden, mask=mask, cache=cache)
        for name, x, heads in (("q", q, self.n_heads), ("k", k, self.n_kv_heads)):
            _check_floating(name, x)
            want = (*hidden.shape[:2], heads, self.head_dim)
            if tuple(x.shape) != want:
                raise InputError(f"{name} has shape {tuple(x.shape)}: expected {want} (batch, tokens, heads, head_dim)")
        cos, sin = angle.cos(), angle.sin()
        return _rotate(q, cos, sin), _rotate(k, cos, sin), cache


class _FixedRoPE(nn.Module):
    """Plain RoPE with the calling convention of `SelectiveRoPE`; padding takes no position."""

    def __init__(self, head_dim: int, *, base: float = 500_000.0, temp_max: float = 1.0) -> None:
        super().__init__()
        self.n_angles, self.base, self.temp_max = head_dim // 2, base, temp_max
        rope_temperature(self.n_angles, base=base, temp_max=temp_max)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        hidden: Tensor,
        *,
        mask: Tensor | None = None,
        cache: SelectiveRoPECache | None = None,
    ) -> tuple[Tensor, Tensor, SelectiveRoPECache]:
        batch, tokens = q.shape[:2]
        if cache is not None:
            _check_shapes(cache, {"angle": (batch, 1, self.n_angles)})
        wide = torch.promote_types(q.dtype, torch.float32)
        step = rope_temperature(
            self.n_angles, base=self.base, temp_max=self.temp_max, dtype=wide, device=q.device
        ).expand(batch, tokens, 1, -1)
        if mask is not None:
            step = step * mask[:, :, None, None]
        start = None if cache is None else cache.angle
        angle, cache = _summed(step, q.new_empty(batch, 0, 0), start)
        cos, sin = angle.cos(), angle.sin()
        return _rotate(q, cos, sin), _rotate(k, cos, sin), cache


def _summed(steps: Tensor, inputs: Tensor, start: Tensor | None) -> tuple[Tensor, SelectiveRoPECache]:
    """Angles from steps (batch, tokens, heads, angles), with the cache that continues them."""
    angle = _running_angle(steps)
    if start is not None:
        angle = angle + start.to(angle.dtype).unsqueeze(1)
    return angle, SelectiveRoPECache(inputs, _wrapped(angle[:, -1]))


def _wrapped(angle: Tensor) -> Tensor:
    """The angle without its whole turns; gradients pass unchanged."""
    turns = (angle.detach() / _TURN).floor()
    return (angle - turns * _TURN_HIGH) - turns * _TURN_LOW


def _running_angle(steps: Tensor) -> Tensor:
    """Cumulative sum over tokens up to whole turns, in numbers that stay small however long the sequence is."""
    tokens = steps.shape[1]
    if tokens <= _BLOCK:
        return steps.cumsum(1)
    blocks = -(-tokens // _BLOCK)
    tail = [0, 0] * (steps.ndim - 2) + [0, blocks * _BLOCK - tokens]
    inner = F.pad(steps, tail).unflatten(1, (blocks, _BLOCK)).cumsum(2)
    totals = _wrapped(inner[:, :, -1])
    starts = _wrapped(_running_angle(totals) - totals)
    return (inner + starts.unsqueeze(2)).flatten(1, 2)[:, :tokens]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last axis; the heads of x are split into as many groups as the angles have heads."""
    cos, sin = cos.unsqueeze(3), sin.unsqueeze(3)
    first, second = x.to(cos.dtype).unflatten(2, (cos.shape[2], -1)).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.flatten(2, 3).to(x.dtype)


def _check_heads(n_heads: int, n_kv_heads: int | None, head_dim: int) -> int:
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    for name, value in (("n_heads", n_heads), ("n_kv_heads", n_kv_heads), ("head_dim", head_dim)):
        _check_size(name, value)
    if n_heads % n_kv_heads:
        raise InputError(f"n_heads={n_heads} is not a multiple of n_kv_heads={n_kv_heads}")
    if head_dim % 2:
        raise InputError(f"head_dim={head_dim}: rotations turn pairs of channels, so it must be even")
    return n_kv_heads


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name}={value!r}: must be a whole number of at least 1")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise InputError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def _check_floating(name: str, x: object) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        have = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{name} is {have}: pass a floating-point tensor")


def _check_hidden(hidden: Tensor, d_model: int, projection: nn.Module | Tensor) -> None:
    """Refuse hidden states that the layer's first projection, a module or its weight, cannot take."""
    _check_floating("hidden", hidden)
    if hidden.ndim != 3 or hidden.shape[2] != d_model or hidden.shape[1] < 1:
        raise InputError(
            f"hidden has shape {tuple(hidden.shape)}: expected (batch, tokens, {d_model}) with at least one token"
        )
    weight = projection if isinstance(projection, Tensor) else next(projection.parameters(), None)
    # A projection that was packed since has no such weight, and takes what it takes.
    if weight is None or not weight.is_floating_point() or weight.dtype == hidden.dtype:
        return
    if not torch.is_autocast_enabled(hidden.device.type):
        raise InputError(
            f"hidden is {hidden.dtype} and the layer's weights are {weight.dtype}: cast one of them, or run under "
            "torch.autocast"
        )


def _check_mask(mask: Tensor | None, batch: int, tokens: int) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (batch, tokens) or mask.dtype != torch.bool:
        have = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"mask is {have}: expected torch.bool of shape {(batch, tokens)}, True at tokens")


def _check_kind(cache: object, kind: type) -> None:
    if not isinstance(cache, kind):
        raise InputError(
            f"the cache is of type {type(cache).__name__}: pass the {kind.__name__} that this layer's last call returned, or "
            "None"
        )


def _check_shapes(cache: object, shapes: Mapping[str, tuple[int, ...] | None]) -> None:
    """Refuse a cache of another layer or batch; None is for what this layer does not keep."""
    for name, want in shapes.items():
        kept = getattr(cache, name)
        have = None if kept is None else tuple(kept.shape)
        if have != want:
            raise InputError(
                f"the cache holds {name} of shape {have} and this call needs {want}: use one from this layer and batch"
            )


def _rope_cache(
    cache: GatedLinearAttentionCache | SoftmaxAttentionCache | None, rope: nn.Module | None
) -> SelectiveRoPECache | None:
    """What the position embedding left in a layer's cache."""
    if cache is None:
        return None
    if (cache.rope is None) != (rope is None):
        raise InputError("the cache holds another kind of positions than this layer: use one from this layer")
    return cache.rope


def _position_module(
    pos: Position,
    options: Mapping[str, Any] | None,
    *,
    d_model: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
) -> nn.Module | None:
    _check_choice("pos", pos, ("none", "rope", "selective"))
    options = dict(options or {})
    if pos == "selective":
        return SelectiveRoPE(d_model, n_heads, head_dim, n_kv_heads=n_kv_heads, **options)
    unused = set(options) - ({"base", "temp_max"} if pos == "rope" else set())
    if unused:
        raise InputError(f"pos_options has {', '.join(sorted(unused))}, which pos={pos!r} does not take")
    if pos == "rope":
        return _FixedRoPE(head_dim, **options)
    return None


def _head_dim(d_model: int, n_heads: int, head_dim: int | None) -> int:
    _check_size("d_model", d_model)
    _check_size("n_heads", n_heads)
    if head_dim is not None:
        return head_dim
    if d_model % n_heads:
        raise InputError(f"d_model={d_model} does not split into {n_heads} heads: pass head_dim")
    return d_model // n_heads


@dataclass(frozen=True)
class GatedLinearAttentionCache:
    """What `GatedLinearAttention` must remember between two pieces of a sequence.

    Attributes:
        state: the recurrent state.
        inputs: the last projected q, k and v that the short convolution still needs; None without one.
        rope: the cache of the position embedding; None without one.
    """

    state: Float[Tensor, "batch heads key_dim value_dim"]
    inputs: Float[Tensor, "batch past channels"] | None
    rope: SelectiveRoPECache | None


class GatedLinearAttention(nn.Module):
    """Gated linear attention in plain PyTorch, without positions, with RoPE or with Selective RoPE.

    Each head keeps a matrix S_t = diag(α_t) S_{t-1} + k_t v_tᵀ and reads S_tᵀ q_t, where α_t is a sigmoid of the
    input to the power 1/16; q and k are rotated before. Time and memory grow linearly with tokens. The output of a head
    goes through RMSNorm and a SiLU gate.

    Args:
        d_model: width of the hidden states, a multiple of `n_heads`.
        n_heads: heads.
        head_dim: key channels a head, even. Default: `d_model // n_heads`, which is also the number of value channels.
        pos: position embedding.
        pos_options: options of `SelectiveRoPE` for "selective"; `base` and `temp_max` for "rope".
        short_conv: taps of the causal convolution (then SiLU) on q, k and v; None leaves it out.
        decay: False forgets nothing (α ≡ 1).
        qk_norm: scale q and k to unit length.
        chunk: tokens handled at once; 1 is the recurrent form, and any value gives the same up to rounding.

    Raises:
        InputError: sizes or options that do not fit.

    Source: Selective Rotary Position Embedding, arXiv 2511.17388; Gated Linear Attention Transformers with
    Hardware-Efficient Training, arXiv 2312.06635.

    >>> import torch
    >>> layer = GatedLinearAttention(d_model=32, n_heads=4, pos="selective", pos_options={"bias": True})
    >>> hidden = torch.randn(2, 10, 32)
    >>> out, _ = layer(hidden)
    >>> first, cache = layer(hidden[:, :9])
    >>> last, cache = layer(hidden[:, 9:], cache=cache)
    >>> torch.allclose(torch.cat([first, last], 1), out, atol=1e-5)
    True
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        head_dim: int | None = None,
        pos: Position = "selective",
        pos_options: Mapping[str, Any] | None = None,
        short_conv: int | None = None,
        decay: bool = True,
        qk_norm: bool = False,
        chunk: int = 16,
    ) -> None:
        super().__init__()
        head_dim = _head_dim(d_model, n_heads, head_dim)
        _check_heads(n_heads, None, head_dim)
        if d_model % n_heads:
            raise InputError(f"d_model={d_model} does not split into {n_heads} heads of values")
        _check_size("chunk", chunk)
        if short_conv is not None:
            _check_size("short_conv", short_conv)
        self.d_model, self.n_heads, self.head_dim = d_model, n_heads, head_dim
        self.qk_norm, self.chunk = qk_norm, chunk
        key_width = n_heads * head_dim
        self._widths = (key_width, key_width, d_model)
        self.qkv = nn.Linear(d_model, sum(self._widths), bias=False)
        if short_conv is None:
            self.conv_weight = None
        else:
            self.conv_weight = nn.Parameter(torch.empty(sum(self._widths), short_conv))
            nn.init.uniform_(self.conv_weight, -(short_conv**-0.5), short_conv**-0.5)
        self.decay_proj = (
            nn.Sequential(nn.Linear(d_model, _FORGET_RANK, bias=False), nn.Linear(_FORGET_RANK, key_width))
            if decay
            else None
        )
        self.rope = _position_module(
            pos, pos_options, d_model=d_model, n_heads=n_heads, n_kv_heads=n_heads, head_dim=head_dim
        )
        self.norm = nn.RMSNorm(d_model // n_heads, eps=1e-5)
        self.gate_proj = nn.Linear(d_model, d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens d_model"],
        *,
        mask: Bool[Tensor, "batch tokens"] | None = None,
        cache: GatedLinearAttentionCache | None = None,
    ) -> tuple[Float[Tensor, "batch tokens d_model"], GatedLinearAttentionCache]:
        """Mix tokens causally.

        Args:
            hidden: the layer's input.
            mask: True at tokens, False at padding, which leaves no trace in the state and gives zeros. Pad on the left
                when tokens are to follow.
            cache: what an earlier call returned for the tokens before these.

        Returns:
            The layer's output, and the cache for the tokens that follow.

        Raises:
            InputError: shapes, dtypes or a cache that do not fit.
        """
        _check_hidden(hidden, self.d_model, self.qkv)
        batch, tokens = hidden.shape[:2]
        _check_mask(mask, batch, tokens)
        if cache is not None:
            _check_kind(cache, GatedLinearAttentionCache)
            past = None if self.conv_weight is None else self.conv_weight.shape[1] - 1
            shapes = {
                "state": (batch, self.n_heads, self.head_dim, self.d_model // self.n_heads),
                "inputs": None if past is None else (batch, past, sum(self._widths)),
            }
            _check_shapes(cache, shapes)
        rope = _rope_cache(cache, self.rope)
        keep = None if mask is None else mask.unsqueeze(-1)
        if keep is not None:
            hidden = hidden * keep
        mixed, inputs = self.qkv(hidden), None
        if self.conv_weight is not None:
            mixed, inputs = causal_convolution(mixed, self.conv_weight, None if cache is None else cache.inputs)
            mixed = F.silu(mixed)
        if keep is not None:
            # The convolution reaches from the last tokens into padding on the right.
            mixed = mixed * keep
        q, k, v = (x.unflatten(-1, (self.n_heads, -1)) for x in mixed.split(self._widths, dim=-1))
        if self.rope is not None:
            q, k, rope = self.rope(q, k, hidden, mask=mask, cache=rope)
        if self.qk_norm:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        log_decay = None
        if self.decay_proj is not None:
            log_decay = log_forget_gate(self.decay_proj(hidden), _FORGET_NORMALISER)
            if keep is not None:
                log_decay = log_decay * keep
            log_decay = log_decay.unflatten(-1, (self.n_heads, -1))
        out, state = gated_linear_attention(
            q * self.head_dim**-0.5,
            k,
            v,
            log_decay,
            state=None if cache is None else cache.state,
            chunk=self.chunk,
        )
        out = self.norm(out).flatten(-2) * F.silu(self.gate_proj(hidden))
        return self.out_proj(out), GatedLinearAttentionCache(state, inputs, rope)


@dataclass(frozen=True)
class SoftmaxAttentionCache:
    """What `SoftmaxAttention` must remember between two pieces of a sequence.

    Attributes:
        k: the rotated keys so far.
        v: the values so far.
        keep: which of them are tokens and not padding.
        rope: the cache of the position embedding; None without one.
    """

    k: Float[Tensor, "batch past kv_heads head_dim"]
    v: Float[Tensor, "batch past kv_heads head_dim"]
    keep: Bool[Tensor, "batch past"]
    rope: SelectiveRoPECache | None


class SoftmaxAttention(nn.Module):
    """Causal softmax attention without positions, with RoPE or with Selective RoPE.

    Args:
        d_model: width of the hidden states.
        n_heads: query heads.
        head_dim: channels a head, even. Default: `d_model // n_heads`.
        n_kv_heads: key and value heads (grouped-query attention). Default: `n_heads`.
        pos: position embedding.
        pos_options: options of `SelectiveRoPE` for "selective"; `base` and `temp_max` for "rope".

    Raises:
        InputError: sizes or options that do not fit.

    Source: Selective Rotary Position Embedding, arXiv 2511.17388.

    >>> import torch
    >>> layer = SoftmaxAttention(d_model=32, n_heads=4, n_kv_heads=2, pos="selective")
    >>> layer(torch.randn(2, 10, 32))[0].shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        head_dim: int | None = None,
        n_kv_heads: int | None = None,
        pos: Position = "selective",
        pos_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        head_dim = _head_dim(d_model, n_heads, head_dim)
        n_kv_heads = _check_heads(n_heads, n_kv_heads, head_dim)
        self.d_model, self.n_heads, self.n_kv_heads, self.head_dim = d_model, n_heads, n_kv_heads, head_dim
        self._widths = (n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim)
        self.qkv = nn.Linear(d_model, sum(self._widths), bias=False)
        self.rope = _position_module(
            pos, pos_options, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim
        )
        self.out_proj = nn.Linear(n_heads * head_dim, d_model, bias=False)

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens d_model"],
        *,
        mask: Bool[Tensor, "batch tokens"] | None = None,
        cache: SoftmaxAttentionCache | None = None,
    ) -> tuple[Float[Tensor, "batch tokens d_model"], SoftmaxAttentionCache]:
        """Mix tokens causally.

        Args:
            hidden: the layer's input.
            mask: True at tokens, False at padding, which nothing attends to and which gives zeros. Pad on the left when
                tokens are to follow.
            cache: what an earlier call returned for the tokens before these.

        Returns:
            The layer's output, and the cache for the tokens that follow.

        Raises:
            InputError: shapes, dtypes or a cache that do not fit.
        """
        _check_hidden(hidden, self.d_model, self.qkv)
        batch, tokens = hidden.shape[:2]
        _check_mask(mask, batch, tokens)
        if cache is not None:
            _check_kind(cache, SoftmaxAttentionCache)
            kept = (batch, cache.k.shape[1], self.n_kv_heads, self.head_dim)
            _check_shapes(cache, {"k": kept, "v": kept, "keep": kept[:2]})
        rope = _rope_cache(cache, self.rope)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self.qkv(hidden).split(self._widths, dim=-1))
        if self.rope is not None:
            q, k, rope = self.rope(q, k, hidden, mask=mask, cache=rope)
        keep = torch.ones(batch, tokens, dtype=torch.bool, device=hidden.device) if mask is None else mask
        if cache is not None:
            k, v = torch.cat([cache.k, k], 1), torch.cat([cache.v, v], 1)
            keep = torch.cat([cache.keep, keep], 1)
        if mask is None and cache is None:
            allowed, causal = None, True
        else:
            past = k.shape[1] - tokens
            position = torch.arange(k.shape[1], device=hidden.device)
            now = position[past:, None]
            # Padding may attend to itself, or the softmax over its empty row would give NaN.
            allowed = ((position <= now) & keep[:, None, :]) | (position == now)
            allowed, causal = allowed.unsqueeze(1), False
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=allowed,
            is_causal=causal,
            enable_gqa=self.n_kv_heads != self.n_heads,
        )
        out = out.transpose(1, 2).flatten(-2)
        if mask is not None:
            out = out * mask.unsqueeze(-1)
        return self.out_proj(out), SoftmaxAttentionCache(k, v, keep, rope)
