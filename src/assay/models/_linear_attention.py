"""Gated linear attention and the short causal convolution, as functions of tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def causal_convolution(
    x: Float[Tensor, "batch tokens channels"],
    weight: Float[Tensor, "channels taps"],
    state: Float[Tensor, "batch past channels"] | None = None,
) -> tuple[Float[Tensor, "batch tokens channels"], Float[Tensor, "batch past channels"]]:
    """Depthwise causal convolution over time, with the inputs that the next call needs.

    Args:
        x: inputs.
        weight: one row of taps a channel; the last tap meets the current token.
        state: the `taps - 1` inputs before the first token; zeros when left out.

    Returns:
        The outputs, and the last `taps - 1` inputs.
    """
    taps, tokens = weight.shape[1], x.shape[1]
    if state is None:
        state = x.new_zeros(x.shape[0], taps - 1, x.shape[2])
    window = torch.cat([state.to(x.dtype), x], dim=1)
    # A sum of shifted products keeps the (batch, tokens, channels) layout and gives the same bits however the
    # sequence is cut, which conv1d does not promise.
    out = window[:, :tokens] * weight[:, 0]
    for tap in range(1, taps):
        out = out + window[:, tap : tap + tokens] * weight[:, tap]
    return out, window[:, tokens:]


def gated_linear_attention(
    q: Float[Tensor, "batch tokens heads key_dim"],
    k: Float[Tensor, "batch tokens heads key_dim"],
    v: Float[Tensor, "batch tokens heads value_dim"],
    log_decay: Float[Tensor, "batch tokens heads key_dim"] | None = None,
    *,
    state: Float[Tensor, "batch heads key_dim value_dim"] | None = None,
    chunk: int = 16,
) -> tuple[Float[Tensor, "batch tokens heads value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """The recurrence S_t = diag(exp g_t) S_{t-1} + k_t v_tᵀ, o_t = S_tᵀ q_t, computed a chunk at a time.

    With `chunk=1` it is the recurrent form and with `chunk >= tokens` the parallel one; all agree up to rounding.
    Only decays between two tokens of one chunk, or between a token and the border of its chunk, are exponentiated, so
    every exponent is at most zero and nothing overflows at any length. A chunk takes `chunk² · key_dim` numbers a head.

    Args:
        q: queries, already scaled.
        k: keys.
        v: values.
        log_decay: logarithm of the forget gate of each key channel, at most zero; None forgets nothing.
        state: what is remembered from before the first token; zeros when left out.
        chunk: tokens in a chunk.

    Returns:
        The outputs in the dtype of `v`, and the state after the last token in at least float32.

    Source: Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv 2312.06635, section 4.
    """
    out_dtype = v.dtype
    wide = torch.promote_types(v.dtype, torch.float32)
    # Automatic mixed precision would send the products back to half precision and the state would drift.
    with torch.autocast(v.device.type, enabled=False):
        q, k, v = (x.to(wide).transpose(1, 2) for x in (q, k, v))
        decay = None if log_decay is None else log_decay.to(wide).transpose(1, 2)
        batch, heads, tokens, key_dim = q.shape
        if state is None:
            state = q.new_zeros(batch, heads, key_dim, v.shape[3])
        state = state.to(wide)
        outs = []
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            g = None if decay is None else decay[:, :, part].cumsum(2)
            out, state = _chunk(q[:, :, part], k[:, :, part], v[:, :, part], g, state)
            outs.append(out)
        return torch.cat(outs, dim=2).transpose(1, 2).to(out_dtype), state


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk, (batch, heads, tokens, channels); `g` is the log decay summed from the start of the chunk."""
    if g is None:
        return q @ state + (q @ k.mT).tril() @ v, state + k.mT @ v
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1).unsqueeze(-1)
    between = (g.unsqueeze(3) - g.unsqueeze(2)).masked_fill(future, -torch.inf).exp()
    scores = torch.einsum("bhtd,bhtsd,bhsd->bhts", q, between, k)
    out = (q * g.exp()) @ state + scores @ v
    last = g[:, :, -1:]
    return out, last.exp().mT * state + (k * (last - g).exp()).mT @ v


def log_forget_gate(logits: Float[Tensor, "*shape"], normaliser: float) -> Float[Tensor, "*shape"]:
    """log(sigmoid(logits)) / normaliser in at least float32: the log decay of gated linear attention."""
    return F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32))) / normaliser
