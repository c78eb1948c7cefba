"""A key-value cache that keeps 16 bits while there is room, and halves the width of its codes as it fills."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from assay.compress._packing import pack, packed_width, unpack
from assay.core.errors import AssayError, InputError, NotApplicable

#: The widths that a cache can have, each half of the one before.
WIDTHS = (16, 8, 4, 2, 1)
# 16-bit codes are kept in int16, which every operation and every device knows.
_OFFSET = 1 << 15
# Codes handled at a time while a region is shrunk or decoded, so that wide temporaries stay small.
_CHUNK = 1 << 20
# A group has a scale and a zero point in float32: the exact steps from width to width need more than 16 bits.
_CONSTANTS = 8


class CacheFull(AssayError, MemoryError):
    """A layer of the cache is at its smallest width and has no room for the tokens that come."""


# ---- the quantiser -----------------------------------------------------------------------------------------------


def quantize_kv(x: Float[Tensor, "*rows n"], bits: int, group: int = 128) -> Float[Tensor, "*rows n"]:
    """Keys or values as they are after rounding to `bits` bits in groups, for simulations.

    A group has 2^bits even levels from its least to its greatest value.

    Args:
        x: keys or values; groups run along the last axis. Transpose to group along another.
        bits: 1 to 16.
        group: entries that share a scale and a zero point; the whole axis where it is shorter.

    Returns:
        The rounded values, in the type of `x`.

    Raises:
        InputError: `x` is not floating or not finite; `bits` or `group` is out of range; the groups do not fill the
            axis.

    Source:
        "PM-KVQ: Progressive Mixed-precision KV Cache Quantization for Long-CoT LLMs", arXiv 2505.18610.

    Example:
        >>> import torch
        >>> from assay.compress import quantize_kv
        >>> quantize_kv(torch.tensor([0.0, 0.2, 0.7, 3.0]), bits=2)
        tensor([0., 0., 1., 3.])
    """
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        raise InputError(f"x is {getattr(x, 'dtype', type(x).__name__)}: pass floating-point keys or values")
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 16:
        raise InputError(f"bits is {bits!r}: use a whole number from 1 to 16")
    if not bool(torch.isfinite(x).all()):
        raise InputError("x has non-finite entries: repair them first")
    if x.numel() == 0:
        return x.clone()
    return decode(*encode(x, bits, fit_group(x.shape[-1], group))).to(x.dtype)


def fit_group(width: int, group: int) -> int:
    """The size of the groups along an axis of `width` entries.

    Raises:
        InputError: it is less than 1, or groups of it do not fill the axis.
    """
    if not isinstance(group, int) or isinstance(group, bool) or group < 1:
        raise InputError(f"group is {group!r}: use a whole number from 1")
    group = min(group, width)
    if width % group:
        fits = max(g for g in range(1, group + 1) if width % g == 0)
        raise InputError(f"group is {group} and the axis has {width} entries: use a divisor, say {fits}")
    return group


def encode(
    x: Float[Tensor, "*rows n"], bits: int, group: int
) -> tuple[Int[Tensor, "*rows n"], Float[Tensor, "*rows groups"], Float[Tensor, "*rows groups"]]:
    """Codes from 0 to 2^bits − 1, scales and zero points; in float64 where `x` is, else in float32."""
    wide = x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    parts = wide.unflatten(-1, (-1, group))
    zero, top = parts.aminmax(dim=-1)
    # Any scale serves a group without range, whose codes are all 0. A floor such as 1e-5 would instead coarsen every
    # group whose range at 16 bits is below 0.66, and the exact step to half the width would be lost.
    scale = ((top - zero) / (2**bits - 1)).clamp_min(torch.finfo(wide.dtype).tiny)
    codes = ((parts - zero[..., None]) / scale[..., None]).round_().clamp_(0, 2**bits - 1)
    return codes.flatten(-2).to(torch.int32), scale, zero


def decode(
    codes: Integer[Tensor, "*rows n"], scale: Float[Tensor, "*rows groups"], zero: Float[Tensor, "*rows groups"]
) -> Float[Tensor, "*rows n"]:
    """The values that codes stand for."""
    parts = codes.unflatten(-1, (scale.shape[-1], -1)).to(scale.dtype)
    return parts.mul_(scale[..., None]).add_(zero[..., None]).flatten(-2)


def shrink_codes(codes: Integer[Tensor, "*shape"], bits: int) -> Int[Tensor, "*shape"]:
    """Codes of `bits` bits from codes of twice as many, in integers alone: the "equivalent right shift".

    The new code is the old one divided by 2^bits + 1 and rounded to the nearest. With the scale multiplied by
    2^bits + 1 and the same zero point it stands on the grid of a quantiser of `bits` bits, and at the level to which
    that quantiser would have rounded the original value: the borders of the two coincide.

    Args:
        codes: from 0 to 4^bits − 1, of any integer type.
        bits: the new width: 1, 2, 4 or 8.

    Returns:
        The new codes, in int32.

    Raises:
        InputError: there is no such width, or the codes are not integers.

    Source:
        arXiv 2505.18610, the equivalent right shift; (4^b − 2^b + 1)(2^b + 1) = 8^b + 1.

    Example:
        >>> import torch
        >>> from assay.compress import shrink_codes
        >>> shrink_codes(torch.arange(16), bits=2).tolist()
        [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3]
    """
    if bits not in (1, 2, 4, 8):
        raise InputError(f"bits is {bits!r}: codes shrink to 8, 4, 2 or 1 bits")
    if codes.dtype.is_floating_point or codes.dtype.is_complex or codes.dtype == torch.bool:
        raise InputError(f"codes are {codes.dtype}: pass integers")
    # The product reaches 2^32 for 8 bits and 2^16 for 4.
    wide = codes.to(torch.int64 if bits == 8 else torch.int32, copy=True)
    shifted = wide.add_(2 ** (bits - 1)).mul_(4**bits - 2**bits + 1).bitwise_right_shift_(3 * bits)
    return shifted.to(torch.int32)


# ---- storage -----------------------------------------------------------------------------------------------------


class Region:
    """Consecutive tokens of one layer at one width, keys and values stacked.

    Attributes:
        bits: the width of the codes.
        head_dim: values a head.
        codes: int16 (less 2^15) at 16 bits, else packed bytes, [2, batch, heads, tokens, …].
        scale: float32, [2, batch, heads, tokens, groups].
        zero: the same.
    """

    def __init__(self, bits: int, head_dim: int, codes: Tensor, scale: Tensor, zero: Tensor) -> None:
        self.bits, self.head_dim, self.codes, self.scale, self.zero = bits, head_dim, codes, scale, zero

    @classmethod
    def of(cls, x: Float[Tensor, "2 batch heads tokens head_dim"], group: int) -> Region:
        """New keys and values at 16 bits."""
        codes, scale, zero = encode(x.float(), 16, group)
        return cls(16, x.shape[-1], (codes - _OFFSET).to(torch.int16), scale, zero)

    def __len__(self) -> int:
        return self.codes.shape[3]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What is stored."""
        return self.codes, self.scale, self.zero

    def map(self, change: Callable[[Tensor], Tensor]) -> Region:
        """The region with each tensor changed."""
        return Region(self.bits, self.head_dim, *(change(t) for t in self.tensors))

    def tokens(self, start: int, stop: int) -> Region:
        """Some of the tokens, in memory of their own, so that the rest can be freed."""
        return self.map(lambda t: t[:, :, :, start:stop].clone())

    def joined(self, other: Region) -> Region:
        """These tokens and then those of `other`, which has the same width."""
        if not len(self):
            return other
        both = (torch.cat(pair, dim=3) for pair in zip(self.tensors, other.tensors, strict=True))
        return Region(self.bits, self.head_dim, *both)

    def _pieces(self) -> list[slice]:
        """Slices of tokens that hold about `_CHUNK` codes."""
        a_token = math.prod(self.codes.shape[:3]) * self.head_dim
        step = max(1, _CHUNK // max(1, a_token))
        return [slice(start, min(start + step, len(self))) for start in range(0, len(self), step)]

    def _integers(self, piece: slice) -> Tensor:
        codes = self.codes[:, :, :, piece]
        return codes.to(torch.int32) + _OFFSET if self.bits == 16 else unpack(codes, self.bits, self.head_dim)

    def halved(self, halve: Callable[[Tensor, int], tuple[Tensor, float]]) -> Region:
        """The same tokens at half the width."""
        bits = self.bits // 2
        width = packed_width(self.head_dim, bits)
        codes = self.codes.new_empty(*self.codes.shape[:-1], width, dtype=torch.uint8)
        factor = 1.0
        for piece in self._pieces():
            new, factor = halve(self._integers(piece), bits)
            codes[:, :, :, piece] = pack(new, bits)
        return Region(bits, self.head_dim, codes, self.scale * factor, self.zero)

    def write(self, out: Float[Tensor, "2 batch heads tokens head_dim"]) -> None:
        """Decode into a tensor of the same shape."""
        for piece in self._pieces():
            out[:, :, :, piece] = decode(self._integers(piece), self.scale[:, :, :, piece], self.zero[:, :, :, piece])


def layer_bytes(
    config: Any,
    tokens: int,
    bits: int,
    *,
    sink: int = 1,
    window: int = 128,
    group: int = 128,
    count_scales: bool = True,
) -> int:
    """Bytes that one layer of the cache takes for one sequence: its budget, if it is to hold `tokens` at `bits`.

    The first `sink` tokens and as many as the window can hold are counted at 16 bits.

    Args:
        config: the configuration of the model.
        tokens: the length of the sequence.
        bits: the width of the other tokens: 16, 8, 4, 2 or 1.
        sink: as in `ProgressiveKVCache`.
        window: as in `ProgressiveKVCache`.
        group: as in `ProgressiveKVCache`.
        count_scales: count the float32 scale and zero point of each group too; the paper counts codes alone.

    Raises:
        InputError: an option is out of range.

    Example:
        >>> from transformers import LlamaConfig
        >>> from assay.compress import layer_bytes
        >>> config = LlamaConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=2)
        >>> layer_bytes(config, 4096, 2), layer_bytes(config, 4096, 2, count_scales=False)
        (451008, 319936)
    """
    heads, head_dim = _shape(config)
    size = _Size(heads, head_dim, fit_group(head_dim, group), count_scales)
    if bits not in WIDTHS:
        raise InputError(f"bits is {bits!r}: a cache has 16, 8, 4, 2 or 1 bits")
    wide = min(tokens, sink + window)
    return size(wide, tokens - wide, bits)


def _shape(config: Any) -> tuple[int, int]:
    """Key-value heads of a layer, and their width."""
    config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, head_dim


class _Size:
    """Bytes of a layer, for one sequence."""

    def __init__(self, heads: int, head_dim: int, group: int, count_scales: bool) -> None:
        self.rows, self.head_dim = 2 * heads, head_dim
        self.constants = self.rows * (head_dim // group) * _CONSTANTS if count_scales else 0

    def a_token(self, bits: int) -> int:
        return self.rows * (2 * self.head_dim if bits == 16 else packed_width(self.head_dim, bits)) + self.constants

    def __call__(self, wide: int, narrow: int, bits: int) -> int:
        return wide * self.a_token(16) + narrow * self.a_token(bits)


# ---- the cache ---------------------------------------------------------------------------------------------------


class ProgressiveLayer(DynamicLayer):
    """One layer: the first tokens and the latest at 16 bits, those between at a width that falls as they become more.

    Args:
        index: its place in the model, for messages.
        size: bytes of such a layer.
        heads: key-value heads.
        group: entries that share a scale.
        budget: bytes for one sequence.
        sink: first tokens that stay at 16 bits.
        window: how many tokens gather at 16 bits before they join the others.
        start_bits: the width to begin with.
        min_bits: the last width.
    """

    is_croppable = False

    def __init__(
        self,
        index: int,
        size: _Size,
        heads: int,
        group: int,
        budget: float,
        sink: int,
        window: int,
        start_bits: int,
        min_bits: int,
    ) -> None:
        super().__init__()
        self.index, self.size, self.heads, self.group, self.budget = index, size, heads, group, budget
        self.n_sink, self.n_window, self.start_bits, self.min_bits = sink, window, start_bits, min_bits
        self._clear()

    def _clear(self) -> None:
        self.bits = self.start_bits
        self.sink: Region | None = None
        self.middle: Region | None = None
        self.window: Region | None = None

    @property
    def regions(self) -> list[Region]:
        """What is stored, in the order of the tokens."""
        return [r for r in (self.sink, self.middle, self.window) if r is not None and len(r)]

    @staticmethod
    def halve(codes: Int[Tensor, "*shape"], bits: int) -> tuple[Int[Tensor, "*shape"], float]:
        """Codes of half the width, and by how much the scale grows."""
        return shrink_codes(codes, bits), 2.0**bits + 1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take over type and device."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def plan(self, new: int) -> tuple[int, int, int]:
        """What becomes of `new` tokens: how many join the sink, how many leave the window, and the width after.

        Raises:
            CacheFull: they do not fit at the smallest width.
        """
        sink, middle, window = (0 if r is None else len(r) for r in (self.sink, self.middle, self.window))
        to_sink = min(self.n_sink - sink, new)
        window += new - to_sink
        leave = window - window % self.n_window
        wide, narrow = sink + to_sink + window - leave, middle + leave
        for bits in WIDTHS[WIDTHS.index(self.bits) : WIDTHS.index(self.min_bits) + 1]:
            needed = self.size(wide, narrow, bits)
            if needed <= self.budget:
                return to_sink, leave, bits
        raise CacheFull(
            f"layer {self.index} of the cache needs {needed:,} bytes for {wide + narrow:,} tokens at {self.min_bits} "
            f"bits and has a budget of {self.budget:,.0f}: give it more, or fewer tokens"
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Float[Tensor, "batch heads tokens head_dim"], Float[Tensor, "batch heads tokens head_dim"]]:
        """Store new keys and values; returns all of them: the past as it decodes, the new ones as they came.

        Raises:
            CacheFull: there is no room; the layer is as it was.
            InputError: the shape is not that of the configuration, or the batch is not that of the tokens before.
        """
        expected = (self.heads, self.size.head_dim)
        for name, x in (("keys", key_states), ("values", value_states)):
            if (x.shape[1], x.shape[3]) != expected:
                raise InputError(
                    f"{name} of layer {self.index} have {x.shape[1]} heads of width {x.shape[3]}: the configuration "
                    f"that the cache was made for says {expected[0]} of width {expected[1]}"
                )
        past = self.regions
        if past and past[0].codes.shape[1] != key_states.shape[0]:
            raise InputError(
                f"the batch has {key_states.shape[0]} rows and the cache holds {past[0].codes.shape[1]}: call reset()"
            )
        to_sink, leave, bits = self.plan(key_states.shape[2])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if past:
            keys, values = self._all(past, key_states, value_states)
        else:
            keys, values = key_states, value_states
        self._store(torch.stack([key_states.detach(), value_states.detach()]), to_sink, leave, bits)
        return keys, values

    def _all(self, past: list[Region], key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, new, width = key_states.shape
        length = sum(map(len, past))
        out = key_states.new_empty(2, batch, heads, length + new, width)
        start = 0
        for region in past:
            region.write(out[:, :, :, start : start + len(region)])
            start += len(region)
        out[0, :, :, length:], out[1, :, :, length:] = key_states, value_states
        return out[0], out[1]

    def _store(self, x: Tensor, to_sink: int, leave: int, bits: int) -> None:
        new = Region.of(x, self.group)
        if to_sink:
            head = new.tokens(0, to_sink)
            self.sink = head if self.sink is None else self.sink.joined(head)
            new = new.tokens(to_sink, len(new))
        self.window = new if self.window is None else self.window.joined(new)
        if leave:
            middle = self.window.tokens(0, leave)
            self.window = self.window.tokens(leave, len(self.window))
            middle = self._narrowed(middle, self.bits)
            self.middle = middle if self.middle is None else self.middle.joined(middle)
        if self.middle is not None:
            self.middle = self._narrowed(self.middle, bits)
        self.bits = bits

    def _narrowed(self, region: Region, bits: int) -> Region:
        while region.bits > bits:
            region = region.halved(self.halve)
        return region

    def get_seq_length(self) -> int:
        """How many tokens are stored."""
        return sum(map(len, self.regions))

    @property
    def capacity(self) -> float:
        """How many tokens can be stored, at the smallest width; infinite without a budget."""
        if math.isinf(self.budget):
            return math.inf
        wide, narrow = self.size.a_token(16), self.n_window * self.size.a_token(self.min_bits)
        # The first number of full windows in the middle with which the window cannot fill up again.
        room = self.budget - (self.n_sink + self.n_window - 1) * wide
        full = max(0, math.floor(room / narrow) + 1)
        left = math.floor((self.budget - full * narrow) / wide) - self.n_sink
        return self.n_sink + full * self.n_window + max(left, -1)

    def reset(self) -> None:
        """Forget every token and begin at the first width again."""
        self._clear()
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens. Those that stay keep the width that they have shrunk to."""
        if tokens_to_remove > 0:
            raise InputError(f"crop is given {tokens_to_remove}: pass how many tokens to remove, as a negative number")
        left = -tokens_to_remove
        for name in ("window", "middle", "sink"):
            region: Region | None = getattr(self, name)
            if region is not None and left:
                taken = min(left, len(region))
                setattr(self, name, region.tokens(0, len(region) - taken))
                left -= taken

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in ("sink", "middle", "window"):
            region: Region | None = getattr(self, name)
            if region is not None:
                setattr(self, name, region.map(change))

    def reorder_cache(self, beam_idx: Int[Tensor, "batch"]) -> None:
        """Follow the beams."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Int[Tensor, "rows"]) -> None:
        """Keep some rows of the batch."""
        self._each(lambda t: t.index_select(1, indices.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        self._each(lambda t: t.repeat_interleave(repeats, dim=1))

    def offload(self) -> None:
        """Move what is stored to the CPU."""
        self._each(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move what is stored back to the device of the layer."""
        if self.is_initialized:
            self._each(lambda t: t.to(self.device, non_blocking=True))


class ProgressiveKVCache(Cache):
    """A cache for `generate` that holds keys and values at 16 bits while they fit a budget, and at fewer when not.

    The first tokens and the latest stay at 16 bits. Whenever the window has filled, its tokens join those between at
    the layer's present width; where the layer then takes more than its budget, the width of all between is halved,
    in integers and as exactly as if they had been rounded to it at once. What a token sees of the past is therefore
    coarse only when the past is long.

    Everything is stored: codes without gaps, a float32 scale and zero point a group. A layer is decoded when its
    attention asks for it, so one layer at a time stands in full in memory; time is not saved, memory is.

    A left-padded batch has its padding in the sink. Tokens that were shrunk do not widen again when others are removed
    (`crop`), so assisted decoding, which must roll back without a trace, is refused by transformers.

    Args:
        config: the model's configuration.
        budgets: bytes for one sequence, layer by layer (see `layer_bytes`); `math.inf` for no limit.
        sink: first tokens that stay at 16 bits.
        window: how many tokens gather at 16 bits before they join the others.
        start_bits: the width to begin with, of all layers or layer by layer: 16, 8, 4, 2 or 1.
        min_bits: the smallest width.
        group: entries of a head that share a scale, of one token; the head where it is narrower.
        count_scales: count scales and zero points in the budget too; the paper counts codes alone.

    Raises:
        InputError: an option is out of range, there are not as many budgets as layers, or a budget does not hold the
            sink and the window, which never shrink.
        NotApplicable: layers are not all of full attention, or the keys are not of one shape.

    Source:
        "PM-KVQ: Progressive Mixed-precision KV Cache Quantization for Long-CoT LLMs", arXiv 2505.18610.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from assay.compress import ProgressiveKVCache, layer_bytes
        >>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2)
        >>> budget = layer_bytes(config, 60, 4, window=8)
        >>> cache = ProgressiveKVCache(config, [budget, budget], window=8)
        >>> prompt = torch.arange(40)[None]
        >>> out = LlamaForCausalLM(config).generate(prompt, past_key_values=cache, max_length=60, min_length=60)
        >>> out.shape[1], cache.bits, cache.nbytes <= 2 * budget
        (60, (4, 4), True)
    """

    def __init__(
        self,
        config: Any,
        budgets: Sequence[float],
        *,
        sink: int = 1,
        window: int = 128,
        start_bits: int | Sequence[int] = 16,
        min_bits: int = 2,
        group: int = 128,
        count_scales: bool = True,
    ) -> None:
        text = config.get_text_config(decoder=True)
        _check_kinds(text)
        n_layers = text.num_hidden_layers
        heads, head_dim = _shape(config)
        group = fit_group(head_dim, group)
        for name, value, least in (("sink", sink, 0), ("window", window, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} is {value!r}: use a whole number from {least}")
        starts = [start_bits] * n_layers if isinstance(start_bits, int) else list(start_bits)
        for name, numbers in (("budgets", list(budgets)), ("start_bits", starts)):
            if len(numbers) != n_layers:
                raise InputError(
                    f"{name} has {len(numbers)} entries and the model has {n_layers} layers: give one each"
                )
        if min_bits not in WIDTHS or not all(b in WIDTHS and b >= min_bits for b in starts):
            raise InputError(
                f"start_bits is {start_bits!r} and min_bits {min_bits!r}: use 16, 8, 4, 2 or 1, the start not below"
            )
        size = _Size(heads, head_dim, group, count_scales)
        least_bytes = size(sink + window, 0, 16)
        layers = []
        for index, (budget, start) in enumerate(zip(budgets, starts, strict=True)):
            if not budget >= least_bytes:
                raise InputError(
                    f"the budget of layer {index} is {budget:,} bytes, and the {sink + window} tokens that stay at "
                    f"16 bits take {least_bytes:,}: give it more, or use a smaller window"
                )
            layers.append(self._layer(index, size, heads, group, budget, sink, window, start, min_bits))
        super().__init__(layers=list(layers))

    _layer: type[ProgressiveLayer] = ProgressiveLayer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of one layer; returns all of them.

        Raises:
            CacheFull: some layer has no room for them. That is found out at the first layer, before anything changes.
        """
        if layer_idx == 0:
            for layer in self.layers:
                layer.plan(key_states.shape[2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def bits(self) -> tuple[int, ...]:
        """The present width of each layer."""
        return tuple(layer.bits for layer in self.layers)

    @property
    def capacity(self) -> float:
        """How many tokens of a sequence fit, at the smallest width."""
        return min(layer.capacity for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes that are held, constants included, of all sequences."""
        return sum(t.untyped_storage().nbytes() for layer in self.layers for r in layer.regions for t in r.tensors)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes alone, as the paper counts."""
        return sum(r.codes.untyped_storage().nbytes() for layer in self.layers for r in layer.regions)


def _check_kinds(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds and getattr(config, "sliding_window", None):
        kinds = {"sliding_attention"}
    other = sorted(kinds - {"full_attention"})
    if other:
        raise NotApplicable(
            f"the model has layers of {other[0]}, which forget by themselves: only full attention shrinks"
        )
