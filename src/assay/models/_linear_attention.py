"""Gated linear attention and the short causal convolution, as functions of tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

# Below this many tokens, decays between all pairs are formed outright.
_LEAF = 4


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
        out = torch.addcmul(out, window[:, tap : tap + tokens], weight[:, tap])
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
    every exponent is at most zero and nothing overflows at any length.

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
    out = (q * g.exp()) @ state + _decayed_scores(q, k, g) @ v
    last = g[:, :, -1:]
    return out, last.exp().mT * state + (k * (last - g).exp()).mT @ v


def _decayed_scores(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Causal scores Σ_d q_td k_sd exp(g_td - g_sd) of one chunk.

    Splitting exp(g_t - g_s) into exp(g_t) exp(-g_s) would overflow, so queries of the second half meet keys of the
    first half through the decay at the border between them, and each half does the same within itself.
    """
    tokens = q.shape[2]
    if tokens <= _LEAF:
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1).unsqueeze(-1)
        between = (g.unsqueeze(3) - g.unsqueeze(2)).masked_fill(future, -torch.inf).exp()
        return (q.unsqueeze(3) * between * k.unsqueeze(2)).sum(-1)
    half = tokens // 2
    q0, q1 = q[:, :, :half], q[:, :, half:]
    k0, k1 = k[:, :, :half], k[:, :, half:]
    g0, g1 = g[:, :, :half], g[:, :, half:]
    border = g0[:, :, -1:]
    across = (q1 * (g1 - border).exp()) @ (k0 * (border - g0).exp()).mT
    first = F.pad(_decayed_scores(q0, k0, g0), (0, tokens - half))
    second = torch.cat([across, _decayed_scores(q1, k1, g1)], dim=-1)
    return torch.cat([first, second], dim=2)


def log_forget_gate(logits: Float[Tensor, "*shape"], normaliser: float) -> Float[Tensor, "*shape"]:
    """log(sigmoid(logits)) / normaliser in at least float32: the log decay of gated linear attention."""
    return F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32))) / normaliser
