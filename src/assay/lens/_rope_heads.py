"""Positional and symbolic scores of attention heads with rotary position embedding, by exchanging blocks of keys."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from assay.core.anatomy import anatomy
from assay.core.errors import InputError, NotApplicable
from assay.core.progress import Progress, silent
from assay.core.results import Column, Result, Table
from assay.core.trace import AttentionView, Batch, Reducer, trace

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Weighting = Literal["moved", "proportional", "uniform"]
Label = Literal["positional", "symbolic", "mixed", "diffuse"]

# A head takes a side when its centred scores differ by this much. Cosines of positive numbers are never low for broad
# attention, so the scores without centring call a head "both" that follows content over many tokens.
MARGIN = 0.3
# Below this moved mass, exchanging blocks tells nothing about the head.
DIFFUSE_MOVED = 0.005

# Block means that differ from the uniform row by less than this share of it count as uniform.
_CENTRED_FLOOR = 1e-3
# Bounds the logits of every key at every block that are held at once.
_CHUNK_ELEMENTS = 1 << 23
_NO_ROTARY = "the model has no rotary position embedding"


class _Scores(NamedTuple):
    """Scores of heads; every tensor but the last three is `[*heads]`, those are `[*heads, pairs]`."""

    pos: Tensor
    sym: Tensor
    pos_c: Tensor
    sym_c: Tensor
    moved: Tensor
    entropy: Tensor
    distance: Tensor
    pair_pos: Tensor
    pair_sym: Tensor
    pair_moved: Tensor


@dataclass(frozen=True)
class BlockSwapScores(Result):
    """What exchanging blocks of keys does to one query's attention.

    Attributes:
        pos: `[*heads]`, in [0, 1]: how far each position keeps its attention when other keys move there.
        sym: `[*heads]`, in [0, 1]: how far the attention follows the keys to where they move.
        pos_c: `[*heads]`, in [−1, 1]: `pos` with the uniform row subtracted, 0 for uniform attention.
        sym_c: `[*heads]`, in [−1, 1]: `sym` with the uniform row subtracted.
        moved: `[*heads]`, in [0, 1]: moved mass, the share of the attention that would change block if the head were
            symbolic, averaged like the scores. Near 0 they say nothing.
        entropy: `[*heads]`, nats, of the attention before any exchange.
        distance: `[*heads]`, positions, mean distance from the query to where it attends.
        pairs: `[pairs, 2]`, the two blocks of each exchange, numbered from the front.
        pair_pos: `[*heads, pairs]`, `pos` of each exchange.
        pair_sym: `[*heads, pairs]`, `sym` of each exchange.
        pair_moved: `[*heads, pairs]`, moved mass of each exchange, the difference of the two blocks' attention.
        block_size: keys in a block.
        n_fixed: keys at the front that no exchange moves.
    """

    pos: Float[Tensor, "*heads"]
    sym: Float[Tensor, "*heads"]
    pos_c: Float[Tensor, "*heads"]
    sym_c: Float[Tensor, "*heads"]
    moved: Float[Tensor, "*heads"]
    entropy: Float[Tensor, "*heads"]
    distance: Float[Tensor, "*heads"]
    pairs: Int[Tensor, "pairs 2"]
    pair_pos: Float[Tensor, "*heads pairs"]
    pair_sym: Float[Tensor, "*heads pairs"]
    pair_moved: Float[Tensor, "*heads pairs"]
    block_size: int
    n_fixed: int

    def table(self) -> Table:
        """One row a head."""
        columns = tuple(_COLUMNS[name] for name in ("pos", "sym", "pos_c", "sym_c", "moved", "entropy", "distance"))
        values = torch.stack([getattr(self, c.name).flatten() for c in columns], dim=-1).tolist()
        rows = tuple((i, *row) for i, row in enumerate(values))
        return Table((_COLUMNS["head"], *columns), rows, title="Exchanging blocks of keys")

    def figure(self) -> Figure:
        """The plane of the two scores, one point a head."""
        import plotly.graph_objects as go

        pos, sym, moved = (x.flatten().cpu() for x in (self.pos, self.sym, self.moved))
        hover = [f"head {i}<br>moved mass {m:.3f}" for i, m in enumerate(moved.tolist())]
        marker = {"color": moved.tolist(), "colorbar": {"title": "moved mass"}, "colorscale": "Viridis"}
        figure = go.Figure(go.Scatter(x=pos.tolist(), y=sym.tolist(), mode="markers", marker=marker, hovertext=hover))
        figure.update_xaxes(title="positional score", range=[-0.02, 1.02])
        figure.update_yaxes(title="symbolic score", range=[-0.02, 1.02])
        return figure


_COLUMNS = {
    c.name: c
    for c in (
        Column("layer", about="number of the block, from 0"),
        Column("head", about="number of the query head, from 0"),
        Column("pos", about="positional score: attention stays where it was when keys move"),
        Column("pos_se", about="standard error of pos over prompts"),
        Column("sym", about="symbolic score: attention follows the keys that move"),
        Column("sym_se", about="standard error of sym over prompts"),
        Column("pos_c", about="pos with the uniform row subtracted"),
        Column("sym_c", about="sym with the uniform row subtracted"),
        Column("moved", about="share of the attention that exchanges would move; near 0 the scores say nothing"),
        Column("entropy", "nats", "of the attention"),
        Column("distance", "tokens", "mean distance from the query to where it attends"),
        Column("label", about="positional, symbolic, mixed or diffuse"),
    )
}


@dataclass(frozen=True)
class RopeHeadsResult(Result):
    """Scores of every head of a model, averaged over prompts.

    Heads that a layer does not have hold NaN, in models whose layers differ.

    Attributes:
        layers: the numbers of the layers seen, from 0; the rows of everything below.
        pos: positional score, in [0, 1].
        sym: symbolic score, in [0, 1].
        pos_se: standard error of `pos` over prompts; NaN with one prompt.
        sym_se: standard error of `sym` over prompts.
        pos_c: `pos` with the uniform row subtracted, in [−1, 1]; 0 for uniform attention.
        sym_c: `sym` with the uniform row subtracted.
        moved: moved mass, the share of the attention that would change block if the head were symbolic, in [0, 1].
        entropy: of the attention, nats.
        distance: mean distance from the query to where it attends, tokens.
        label: "diffuse" where the moved mass is under 0.005, so that the scores say nothing; else "positional" or
            "symbolic" where the centred scores differ by 0.3 or more; else "mixed". The thresholds are choices made
            here.
        theta: rotary frequencies of each layer, radians a position. A last entry 0 stands for all dimensions that
            the layer does not rotate, where there are any. NaN where a layer has fewer.
        usage: share of each frequency in ‖q_f‖·‖k_f‖ summed over frequencies; None unless asked for.
        freq_pos: positional score of each frequency alone; None unless asked for.
        freq_sym: symbolic score of each frequency alone; None unless asked for.
        n_prompts: prompts that were averaged.
    """

    layers: tuple[int, ...]
    pos: Float[Tensor, "layers heads"]
    sym: Float[Tensor, "layers heads"]
    pos_se: Float[Tensor, "layers heads"]
    sym_se: Float[Tensor, "layers heads"]
    pos_c: Float[Tensor, "layers heads"]
    sym_c: Float[Tensor, "layers heads"]
    moved: Float[Tensor, "layers heads"]
    entropy: Float[Tensor, "layers heads"]
    distance: Float[Tensor, "layers heads"]
    label: tuple[tuple[Label, ...], ...]
    theta: Float[Tensor, "layers freqs"]
    usage: Float[Tensor, "layers heads freqs"] | None
    freq_pos: Float[Tensor, "layers heads freqs"] | None
    freq_sym: Float[Tensor, "layers heads freqs"] | None
    n_prompts: int

    def table(self) -> Table:
        """One row a head."""
        names = ("pos", "pos_se", "sym", "sym_se", "pos_c", "sym_c", "moved", "entropy", "distance")
        values = torch.stack([getattr(self, name) for name in names], dim=-1).tolist()
        rows = tuple(
            (layer, head, *values[i][head], label)
            for i, layer in enumerate(self.layers)
            for head, label in enumerate(self.label[i])
        )
        columns = tuple(_COLUMNS[name] for name in ("layer", "head", *names, "label"))
        return Table(columns, rows, title=f"Attention heads, mean over {self.n_prompts} prompts")

    def figure(self) -> Figure:
        """The plane of the two scores and the map of layers and heads; with frequencies, their mean profile."""
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots

        profiles = self._profiles()
        titles = ["each head", "positional − symbolic, centred", "by frequency, mean over heads by usage"]
        n_panels = 3 if profiles else 2
        figure = make_subplots(rows=1, cols=n_panels, subplot_titles=titles[:n_panels])
        for i, layer in enumerate(self.layers):
            n_heads = len(self.label[i])
            hover = [
                f"layer {layer}, head {h}<br>{self.label[i][h]}<br>moved mass {float(self.moved[i, h]):.3f}"
                for h in range(n_heads)
            ]
            figure.add_trace(
                go.Scatter(
                    x=self.pos[i, :n_heads].tolist(),
                    y=self.sym[i, :n_heads].tolist(),
                    mode="markers",
                    name=f"layer {layer}",
                    showlegend=False,
                    hovertext=hover,
                    hoverinfo="text+x+y",
                    marker={
                        "color": [layer] * n_heads,
                        "coloraxis": "coloraxis",
                        "symbol": [_SYMBOLS[label] for label in self.label[i]],
                    },
                ),
                row=1,
                col=1,
            )
        difference = self.pos_c - self.sym_c
        heat = go.Heatmap(
            z=difference.tolist(),
            y=[str(layer) for layer in self.layers],
            zmin=-1,
            zmax=1,
            colorscale="RdBu",
            coloraxis=None,
            showscale=False,
            hovertemplate="layer %{y}, head %{x}: %{z:.3f}<extra></extra>",
        )
        figure.add_trace(heat, row=1, col=2)
        figure.update_xaxes(title="positional score", range=[-0.02, 1.02], row=1, col=1)
        figure.update_yaxes(title="symbolic score", range=[-0.02, 1.02], row=1, col=1)
        figure.update_xaxes(title="head", row=1, col=2)
        figure.update_yaxes(title="layer", type="category", row=1, col=2)
        if profiles:
            x = [f"{theta:.3g}" for theta in self.theta[0].tolist()]
            for name, curve in profiles.items():
                figure.add_trace(go.Scatter(x=x, y=curve, name=name, mode="lines+markers"), row=1, col=3)
            figure.update_xaxes(title="radians a position", type="category", row=1, col=3)
            figure.update_yaxes(range=[-0.02, 1.02], row=1, col=3)
        figure.update_layout(coloraxis={"colorbar": {"title": "layer", "x": -0.12}, "colorscale": "Viridis"})
        return figure

    def _profiles(self) -> dict[str, list[float]]:
        """Scores of each frequency over the heads of all layers, weighted by how much a head uses the frequency."""
        if self.usage is None or self.freq_pos is None or self.freq_sym is None:
            return {}
        total = self.usage.nansum((0, 1))
        return {
            "positional score": ((self.freq_pos * self.usage).nansum((0, 1)) / total).tolist(),
            "symbolic score": ((self.freq_sym * self.usage).nansum((0, 1)) / total).tolist(),
            "usage": self.usage.nanmean((0, 1)).tolist(),
        }


_SYMBOLS: dict[Label, str] = {
    "positional": "square",
    "symbolic": "circle",
    "mixed": "diamond",
    "diffuse": "x-thin-open",
}


def _label(pos_c: float, sym_c: float, moved: float) -> Label:
    if moved < DIFFUSE_MOVED:
        return "diffuse"
    if abs(pos_c - sym_c) < MARGIN:
        return "mixed"
    return "positional" if pos_c > sym_c else "symbolic"


def _unrotate(
    x: Float[Tensor, "*batch #n d"],
    positions: Float[Tensor, "*batch n"],
    theta: Float[Tensor, "freqs"],
    pairs: Int[Tensor, "freqs 2"],
    rest: Int[Tensor, "unrotated"],
) -> Float[Tensor, "*batch n d"]:
    """Rotate by −position·θ; the first members of the pairs come first, then the second ones, then the others.

    Logits do not mind the order, and frequencies are then easy to take apart.
    """
    # As transformers does it, so that its own rounding of the angle of a far position is undone exactly.
    angle = positions.to(theta.dtype)[..., None] * theta
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., pairs[:, 0]], x[..., pairs[:, 1]]
    rotated = [first * cos + second * sin, second * cos - first * sin]
    if len(rest):
        rotated.append(x[..., rest].expand(*rotated[0].shape[:-1], -1))
    return torch.cat(rotated, dim=-1)


def _logits(
    queries: Float[Tensor, "*batch kv group n d"],
    keys: Float[Tensor, "*batch kv n d"],
    n_blocks: int,
    block_size: int,
    scaling: float,
    softcap: float | None,
) -> tuple[Float[Tensor, "*batch kv group fixed"], Float[Tensor, "*batch kv group at of offset"]]:
    """Logits of the keys that stay, and of the keys of every block `of` at the positions of every block `at`.

    `queries[…, p, :]` is the query as position p sees it, so that a logit is a product of a key without its rotation
    and the query at the position where that key stands.
    """
    n_fixed = keys.shape[-2] - n_blocks * block_size
    *batch, n_kv, group, _, d = queries.shape
    fixed = (queries[..., :n_fixed, :] * keys[..., None, :n_fixed, :]).sum(-1)
    q = queries[..., n_fixed:, :].unflatten(-2, (n_blocks, block_size))
    # One product an offset within the block: query heads that share keys are stacked with the positions.
    q = q.movedim(-2, -4).reshape(*batch, n_kv, block_size, group * n_blocks, d)
    k = keys[..., n_fixed:, :].unflatten(-2, (n_blocks, block_size)).transpose(-3, -2)
    every = (q @ k.mT).unflatten(-2, (group, n_blocks)).movedim(-4, -1)

    def finish(logits: Tensor) -> Tensor:
        logits = logits * scaling
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    return finish(fixed), finish(every)


def _cosine(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], floor: float = 0.0) -> Tensor:
    size = torch.hypot(*a).clamp(min=floor) * torch.hypot(*b).clamp(min=floor)
    return (a[0] * b[0] + a[1] * b[1]) / size


def _score(
    fixed: Float[Tensor, "*heads fixed"],
    every: Float[Tensor, "*heads at of offset"],
    distance: Float[Tensor, "*#heads n"],
    pairs: Int[Tensor, "pairs 2"],
    weighting: Weighting,
    tau: float,
) -> _Scores:
    """Scores from the logits of the keys that stay and of every block's keys at every block's positions."""
    block_size = every.shape[-1]
    n_keys = fixed.shape[-1] + every.shape[-2] * block_size
    own = torch.diagonal(every, dim1=-3, dim2=-2).mT
    attention = torch.softmax(torch.cat([fixed, own.flatten(-2)], dim=-1), dim=-1)
    i, j = pairs[:, 0], pairs[:, 1]

    # Log of the unnormalised mass of the keys `of` at the positions `at`; an exchange changes two blocks only.
    mass = every.logsumexp(-1)
    before = torch.diagonal(mass, dim1=-2, dim2=-1)
    before_i, before_j = before[..., i], before[..., j]
    after_i, after_j = mass[..., i, j], mass[..., j, i]

    def scale_free(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        top = torch.maximum(a, b)
        return (a - top).exp(), (b - top).exp()

    old, new = scale_free(before_i, before_j), scale_free(after_i, after_j)
    pair_pos, pair_sym = _cosine(new, old), _cosine(new, old[::-1])

    index = torch.arange(len(pairs), device=pairs.device)
    slots = before[..., None, :].expand(*before.shape[:-1], len(pairs), -1).clone()
    slots[..., index, i] = after_i
    slots[..., index, j] = after_j
    stay = fixed.logsumexp(-1)
    total_before = torch.logaddexp(before.logsumexp(-1), stay)[..., None]
    total_after = torch.logaddexp(slots.logsumexp(-1), stay[..., None])
    # Between blocks, not tokens: where two blocks have equal mass, staying and following look the same.
    pair_moved = ((before_i - total_before).exp() - (before_j - total_before).exp()).abs()

    # In units of the uniform row, 1/n_keys a key.
    def over_uniform(log_mass: Tensor, total: Tensor) -> Tensor:
        return (log_mass - total).exp() * (n_keys / block_size) - 1

    old_c = over_uniform(before_i, total_before), over_uniform(before_j, total_before)
    new_c = over_uniform(after_i, total_after), over_uniform(after_j, total_after)
    pair_pos_c = _cosine(new_c, old_c, _CENTRED_FLOOR)
    pair_sym_c = _cosine(new_c, old_c[::-1], _CENTRED_FLOOR)

    if weighting == "moved":
        weights = torch.softmax(pair_moved / tau, dim=-1)
    elif weighting == "proportional":
        tiny = torch.finfo(pair_moved.dtype).tiny
        weights = (pair_moved + tiny) / (pair_moved + tiny).sum(-1, keepdim=True)
    else:
        weights = torch.full_like(pair_moved, 1 / len(pairs))

    def mean(x: Tensor) -> Tensor:
        return (weights * x).sum(-1)

    return _Scores(
        pos=mean(pair_pos),
        sym=mean(pair_sym),
        pos_c=mean(pair_pos_c),
        sym_c=mean(pair_sym_c),
        moved=mean(pair_moved),
        entropy=torch.special.entr(attention).sum(-1),
        distance=(attention * distance).sum(-1),
        pair_pos=pair_pos,
        pair_sym=pair_sym,
        pair_moved=pair_moved,
    )


def _plan(n_keys: int, n_fixed: int, blocks: int) -> tuple[int, int]:
    """How many blocks, and of how many keys; what is left over joins the keys at the front that stay."""
    n_blocks = min(blocks, n_keys - n_fixed)
    if n_blocks < 2:
        raise InputError(
            f"need at least 2 full blocks, got {max(n_blocks, 0)}: the query sees {n_keys} keys, of which {n_fixed} "
            "stay, so give longer prompts or more blocks"
        )
    return n_blocks, (n_keys - n_fixed) // n_blocks


def _check(blocks: int, weighting: str, tau: float) -> None:
    if blocks < 2:
        raise InputError(f"blocks is {blocks}: need at least 2 full blocks to exchange")
    if weighting not in get_args(Weighting):
        raise InputError(f"weighting is {weighting!r}: give one of {', '.join(get_args(Weighting))}")
    if not tau > 0:
        raise InputError(f"tau is {tau}: give a positive number")


def _pairs(n_blocks: int, device: torch.device) -> Int[Tensor, "pairs 2"]:
    return torch.combinations(torch.arange(n_blocks, device=device), 2)


def block_swap_scores(
    q: Float[Tensor, "*heads d"],
    k: Float[Tensor, "*heads n d"],
    *,
    theta: Float[Tensor, "freqs"],
    positions: Int[Tensor, "n"] | None = None,
    query_position: int | None = None,
    interleaved: bool = False,
    scaling: float | None = None,
    softcap: float | None = None,
    blocks: int = 16,
    keep_first: int = 0,
    weighting: Weighting = "moved",
    tau: float = 0.1,
) -> BlockSwapScores:
    """Positional and symbolic scores of heads given as queries and keys, before their rotary embedding.

    The keys are split into contiguous blocks of equal size; what is left over stays at the front. Two blocks at a time
    exchange their keys, which are then rotated for their new positions, and the two blocks' mean attention is compared
    with what it was: by position for `pos`, by content for `sym`.

    Args:
        q: the query of each head.
        k: its keys, all visible to the query. Leading dimensions are broadcast against those of `q`.
        theta: rotary frequencies, radians a position. There may be fewer than d/2; further dimensions do not rotate.
        positions: of the keys; 0 … n−1 by default.
        query_position: of the query; the last key's by default.
        interleaved: dimensions 2f and 2f+1 make a pair (GPT-J) instead of f and f + freqs (Llama, GPT-NeoX).
        scaling: factor on the logits, 1/√d by default.
        softcap: logits become `softcap·tanh(·/softcap)` where given.
        blocks: how many; fewer where there are fewer keys than that.
        keep_first: keys at the front that stay at least.
        weighting: of the pairs of blocks: "moved" takes the softmax of moved mass / `tau`, "proportional" the moved
            mass itself, "uniform" all alike.
        tau: temperature of that softmax.

    Returns:
        The scores of each head, and of each pair of blocks.

    Raises:
        InputError: shapes or frequencies do not fit, or there are fewer than two full blocks.

    Source:
        Decoupling Positional and Symbolic Attention in Transformers, arXiv 2511.11579. Block count, treatment of
        the remainder and `tau` are not stated there and are choices made here.

    Example:
        >>> import torch
        >>> g = torch.Generator().manual_seed(0)
        >>> q, k = torch.randn(3, 8, generator=g), torch.randn(3, 64, 8, generator=g)
        >>> scores = block_swap_scores(q, k, theta=torch.zeros(4))  # no rotation: attention follows content
        >>> bool((scores.sym > 0.999).all())
        True
    """
    _check(blocks, weighting, tau)
    if q.ndim < 1 or k.ndim < 2 or q.shape[-1] != k.shape[-1]:
        raise InputError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: the last dimension must agree")
    n, d = k.shape[-2:]
    if theta.ndim != 1 or 2 * len(theta) > d:
        raise InputError(f"theta has shape {tuple(theta.shape)}: give at most {d // 2} frequencies in one dimension")
    if positions is None:
        positions = torch.arange(n, device=k.device)
    elif positions.shape != (n,):
        raise InputError(f"positions has shape {tuple(positions.shape)}: give one for each of the {n} keys")
    n_blocks, block_size = _plan(n, keep_first, blocks)

    work = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
    theta = theta.to(work)
    freqs = torch.arange(len(theta), device=k.device)
    pairs = torch.stack([2 * freqs, 2 * freqs + 1] if interleaved else [freqs, freqs + len(theta)], dim=-1)
    rest = torch.arange(2 * len(theta), d, device=k.device)
    at = positions[-1] if query_position is None else torch.as_tensor(query_position, device=k.device)
    heads = torch.broadcast_shapes(q.shape[:-1], k.shape[:-2])
    # A key at position p meets the query as if that stood at p − at: rotations compose.
    queries = _unrotate(q.to(work)[..., None, :], positions - at, theta, pairs, rest)
    keys = torch.cat([k.to(work)[..., pairs[:, 0]], k.to(work)[..., pairs[:, 1]], k.to(work)[..., rest]], dim=-1)
    fixed, every = _logits(
        queries.expand(*heads, n, d)[..., None, None, :, :],
        keys.expand(*heads, n, d)[..., None, :, :],
        n_blocks,
        block_size,
        d**-0.5 if scaling is None else scaling,
        softcap,
    )
    which = _pairs(n_blocks, k.device)
    distance = (at - positions).to(work)
    scores = _score(fixed[..., 0, 0, :], every[..., 0, 0, :, :, :], distance, which, weighting, tau)
    return BlockSwapScores(**scores._asdict(), pairs=which, block_size=block_size, n_fixed=n - n_blocks * block_size)


def exclusion_bound(
    logits: Float[Tensor, "*batch m m"],
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """The two sides of the theorem that a head which is both positional and symbolic attends uniformly.

    Args:
        logits: `[content, position]`, the logit of each key's content at each position; the diagonal is the sequence
            as it stands.

    Returns:
        The variance of the logits as they stand, and its upper bound: the mean squared change of a logit over all
        permutations of contents at fixed positions, plus the same of positions with fixed contents. The sum over the
        m! permutations is taken in closed form.

    Raises:
        InputError: the tables are not square.

    Source:
        Decoupling Positional and Symbolic Attention in Transformers, arXiv 2511.11579, Theorem 1.

    Example:
        >>> import torch
        >>> variance, bound = exclusion_bound(torch.arange(3.0).expand(3, 3))  # a positional head
        >>> round(float(variance), 4), round(float(bound), 4)
        (0.6667, 1.3333)
    """
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2] or logits.shape[-1] == 0:
        raise InputError(f"logits has shape {tuple(logits.shape)}: give square tables, contents by positions")
    m = logits.shape[-1]
    table = logits.to(torch.promote_types(logits.dtype, torch.float32))
    stands = torch.diagonal(table, dim1=-2, dim2=-1)
    # A uniformly random permutation sends any content to a given position with probability 1/m.
    by_content = (table - stands[..., None, :]).square().sum((-2, -1))
    by_position = (table - stands[..., :, None]).square().sum((-2, -1))
    return stands.var(-1, correction=0), (by_content + by_position) / m**2


_MEANS = ("pos", "sym", "pos_c", "sym_c", "moved", "entropy", "distance")


@dataclass
class _Running:
    """Sums over prompts of one layer."""

    theta: Tensor
    n: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Take in `[prompts, heads, …]` values."""
        for name, x in values.items():
            x = x.double() if x.device.type != "mps" else x.float()
            self.sums[name] = self.sums.get(name, 0) + x.sum(0)
            self.squares[name] = self.squares.get(name, 0) + x.square().sum(0)
        self.n += len(x)

    def mean(self, name: str) -> Tensor:
        return (self.sums[name] / self.n).cpu()

    def standard_error(self, name: str) -> Tensor:
        if self.n < 2:
            return torch.full_like(self.mean(name), math.nan)
        variance = self.squares[name].cpu() / self.n - self.mean(name).square()
        return (variance.clamp(min=0) / (self.n - 1)).sqrt()


class RopeHeadsReducer(Reducer):
    """Gathers the scores of every head while a model runs; `result` gives them.

    Args:
        blocks: how many blocks the keys are split into; fewer where there are fewer keys than that.
        keep_first: tokens at the start of the sequence that stay in place at least. Many heads rest on the first
            token; if it moved, they would all be taken for symbolic.
        queries: how many prefixes of each prompt are looked at, evenly spaced and ending with the whole prompt. The
            last token of each is a query, and a prompt counts once with their mean.
        per_frequency: also score each rotary frequency alone.
        weighting: as in `block_swap_scores`.
        tau: as in `block_swap_scores`.
        layers: which layers; all by default.

    Raises:
        InputError: an option is out of its range.
    """

    sites = ("attn",)

    def __init__(
        self,
        *,
        blocks: int = 16,
        keep_first: int = 1,
        queries: int = 1,
        per_frequency: bool = False,
        weighting: Weighting = "moved",
        tau: float = 0.1,
        layers: Collection[int] | None = None,
    ) -> None:
        _check(blocks, weighting, tau)
        if keep_first < 0:
            raise InputError(f"keep_first is {keep_first}: give 0 or more")
        if queries < 1:
            raise InputError(f"queries is {queries}: give 1 or more")
        self.blocks = blocks
        self.keep_first = keep_first
        self.queries = queries
        self.per_frequency = per_frequency
        self.weighting: Weighting = weighting
        self.tau = tau
        self.layers = layers
        self._running: dict[int, _Running] = {}
        self._rotary = False

    def update(self, site: str, layer: int, value: AttentionView, batch: Batch) -> None:
        """Score one layer on one batch."""
        view = value
        n_prompts, _, tokens, _ = view.q.shape
        if view.k.shape[2] != tokens:
            raise NotApplicable("positional and symbolic scores need whole prompts, without a key cache")
        _require_causal(view)
        device = view.q.device
        if batch.valid is None:
            lengths = torch.full((n_prompts,), tokens, device=device)
        else:
            lengths = batch.valid.to(device).sum(-1)
        positions = _positions(batch, n_prompts, tokens, device)
        sums: dict[str, Tensor] = {}
        head = _Head.of(view)
        self._rotary |= len(head.theta) > 0
        for step in range(1, self.queries + 1):
            rows = (lengths * step - 1).div(self.queries, rounding_mode="floor")
            found = self._rows(view, head, rows, positions)
            for name, x in found.items():
                sums[name] = sums.get(name, 0) + x
        running = self._running.setdefault(layer, _Running(head.spectrum.cpu()))
        running.add({name: x / self.queries for name, x in sums.items()})

    def _rows(
        self, view: AttentionView, head: _Head, rows: Int[Tensor, "batch"], positions: Int[Tensor, "batch tokens"]
    ) -> dict[str, Tensor]:
        """Scores `[batch, heads, …]` of one query a prompt, the token at `rows`."""
        n_prompts, n_heads, tokens, d = view.q.shape
        visible = _visible(view, rows)
        # Prompts whose queries see the same keys go through together.
        patterns, group = torch.unique(visible, dim=0, return_inverse=True)
        out: dict[str, Tensor] = {}
        per_prompt = n_heads * tokens * max(self.blocks, d)
        chunk = max(1, _CHUNK_ELEMENTS // per_prompt)
        for g, pattern in enumerate(patterns):
            seen = pattern.nonzero()[:, 0]
            n_fixed = int((seen < self.keep_first).sum())
            for members in (group == g).nonzero()[:, 0].split(chunk):
                q = view.q[members, :, rows[members]]
                k = view.k[members[:, None], :, seen].transpose(1, 2)
                at = positions[members, rows[members]]
                place = positions[members[:, None], seen]
                for name, x in self._score(head, q, k, place, at, n_fixed).items():
                    out.setdefault(name, x.new_empty(n_prompts, *x.shape[1:]))[members] = x
        return out

    def _score(
        self,
        head: _Head,
        q: Float[Tensor, "batch heads d"],
        k: Float[Tensor, "batch kv n d"],
        place: Int[Tensor, "batch n"],
        at: Int[Tensor, "batch"],
        n_fixed: int,
    ) -> dict[str, Tensor]:
        n = k.shape[2]
        n_blocks, block_size = _plan(n, n_fixed, self.blocks)
        work = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(work), k.to(work)
        distance = (at[:, None] - place).to(work)
        frames = _unrotate(q[:, :, None], place[:, None], head.theta, head.pairs, head.rest)
        frames = frames.unflatten(1, (k.shape[1], -1))
        bare = _unrotate(k, place[:, None], head.theta, head.pairs, head.rest)
        which = _pairs(n_blocks, k.device)
        fixed, every = _logits(frames, bare, n_blocks, block_size, head.scaling, head.softcap)
        scores = _score(fixed.flatten(1, 2), every.flatten(1, 2), distance[:, None], which, self.weighting, self.tau)
        out = {name: getattr(scores, name) for name in _MEANS}
        if self.per_frequency:
            out |= self._by_frequency(head, frames, bare, n_blocks, block_size, distance, which)
        return out

    def _by_frequency(
        self,
        head: _Head,
        frames: Float[Tensor, "batch kv group n d"],
        bare: Float[Tensor, "batch kv n d"],
        n_blocks: int,
        block_size: int,
        distance: Float[Tensor, "batch n"],
        which: Int[Tensor, "pairs 2"],
    ) -> dict[str, Tensor]:
        parts = []
        norms = []
        at_once = max(1, _CHUNK_ELEMENTS // (frames[..., 0].numel() * n_blocks))
        for q, k in head.split(frames, bare, at_once):
            # Each frequency is a head of its own, next to the key-value heads: [batch, kv, freqs, group, n, 2].
            fixed, every = _logits(q, k, n_blocks, block_size, head.scaling, None)
            scores = _score(fixed, every, distance[:, None, None, None], which, self.weighting, self.tau)
            parts.append(torch.stack([scores.pos, scores.sym]).transpose(-2, -1).flatten(2, 3))
            norm = q[..., 0, :].norm(dim=-1) * k.norm(dim=-1).mean(-1)[..., None]
            norms.append(norm.transpose(-2, -1).flatten(1, 2))
        both = torch.cat(parts, dim=-1)
        usage = torch.cat(norms, dim=-1)
        usage = usage / usage.sum(-1, keepdim=True).clamp(min=torch.finfo(usage.dtype).tiny)
        return {"freq_pos": both[0], "freq_sym": both[1], "usage": usage}

    def result(self) -> RopeHeadsResult:
        """The scores over all prompts so far.

        Raises:
            NotApplicable: no layer rotates queries and keys.
            InputError: the model has not run.
        """
        if not self._running:
            raise InputError("no prompts were seen: run the model while this reducer is attached")
        if not self._rotary:
            raise NotApplicable(_NO_ROTARY)
        layers = tuple(sorted(self._running))
        runs = [self._running[layer] for layer in layers]

        def rows(tensors: list[Tensor]) -> Tensor:
            return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=math.nan)

        def mean(name: str) -> Tensor:
            return rows([run.mean(name) for run in runs])

        def by_frequency(name: str) -> Tensor | None:
            if not self.per_frequency:
                return None
            wide = max(len(run.theta) for run in runs)
            means = [run.mean(name) for run in runs]
            return rows([nn.functional.pad(x, (0, wide - x.shape[-1]), value=math.nan) for x in means])

        means = {name: mean(name) for name in _MEANS}
        labels = tuple(
            tuple(_label(*triple) for triple in zip(*(run.mean(x).tolist() for x in ("pos_c", "sym_c", "moved"))))
            for run in runs
        )
        return RopeHeadsResult(
            layers=layers,
            **means,
            pos_se=rows([run.standard_error("pos") for run in runs]),
            sym_se=rows([run.standard_error("sym") for run in runs]),
            label=labels,
            theta=rows([run.theta for run in runs]),
            usage=by_frequency("usage"),
            freq_pos=by_frequency("freq_pos"),
            freq_sym=by_frequency("freq_sym"),
            n_prompts=runs[0].n,
        )


class _Head(NamedTuple):
    """What a layer's heads have in common."""

    theta: Tensor
    pairs: Tensor
    rest: Tensor
    scaling: float
    softcap: float | None

    @classmethod
    def of(cls, view: AttentionView) -> _Head:
        d, device = view.q.shape[-1], view.q.device
        rotary = view.block.attention.rotary
        if rotary is None:
            theta, pairs = torch.zeros(0, device=device), torch.zeros(0, 2, dtype=torch.long, device=device)
        else:
            theta, pairs = rotary.inv_freq.detach().to(device), rotary.pairs.to(device)
        unrotated = torch.ones(d, dtype=torch.bool, device=device)
        unrotated[pairs.flatten()] = False
        return cls(theta, pairs, unrotated.nonzero()[:, 0], view.scaling, view.softcap)

    @property
    def spectrum(self) -> Float[Tensor, "freqs"]:
        """The frequencies, and 0 for the dimensions that do not rotate, where there are any."""
        return self.theta if not len(self.rest) else torch.cat([self.theta, self.theta.new_zeros(1)])

    def split(
        self,
        frames: Float[Tensor, "batch kv group n d"],
        bare: Float[Tensor, "batch kv n d"],
        at_once: int,
    ) -> Iterator[tuple[Float[Tensor, "batch kv freqs group n 2"], Float[Tensor, "batch kv freqs n 2"]]]:
        """Queries and keys of some frequencies at a time, then of the dimensions that do not rotate."""
        freqs = len(self.theta)
        for start in range(0, freqs, at_once):
            first = slice(start, min(freqs, start + at_once))
            second = slice(freqs + first.start, freqs + first.stop)
            q = torch.stack([frames[..., first], frames[..., second]], dim=-1)
            k = torch.stack([bare[..., first], bare[..., second]], dim=-1)
            yield q.movedim(-2, 2), k.movedim(-2, 2)
        if len(self.rest):
            yield frames[:, :, None, ..., 2 * freqs :], bare[:, :, None, ..., 2 * freqs :]


def _require_causal(view: AttentionView) -> None:
    if not view.block.attention.causal:
        raise NotApplicable("positional and symbolic scores need causal attention, and this model looks ahead")
    if view.mask is not None and view.mask.shape[1] > 1:
        raise NotApplicable("positional and symbolic scores need one attention mask for all heads")


def _allowed(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _visible(view: AttentionView, rows: Int[Tensor, "batch"]) -> Tensor:
    """`[batch, keys]`: which keys the query at each prompt's row may look at."""
    n_keys = view.k.shape[2]
    if view.mask is None:
        return torch.arange(n_keys, device=rows.device) <= rows[:, None]
    mask = view.mask[:, 0].expand(len(rows), -1, -1)
    return _allowed(mask[torch.arange(len(rows), device=rows.device), rows])


def _positions(batch: Batch, n_prompts: int, tokens: int, device: torch.device) -> Int[Tensor, "batch tokens"]:
    given = batch.inputs.get("position_ids")
    if given is None:
        return torch.arange(tokens, device=device).expand(n_prompts, -1)
    if given.ndim != 2:
        raise NotApplicable("positional and symbolic scores need one position a token")
    return given.to(device).expand(n_prompts, -1)


def rope_heads(
    model: nn.Module,
    batches: Iterable[Tensor | Mapping[str, Any]],
    *,
    blocks: int = 16,
    keep_first: int = 1,
    queries: int = 1,
    per_frequency: bool = False,
    weighting: Weighting = "moved",
    tau: float = 0.1,
    layers: Collection[int] | None = None,
    total: int | None = None,
    progress: Progress = silent,
) -> RopeHeadsResult:
    """Score every attention head of a causal model with rotary position embedding: positional, symbolic, or both.

    Blocks of keys are exchanged in place, under the last token's query. A positional head goes on attending to the
    same positions, whatever keys stand there; a symbolic head follows the keys. Only keys are exchanged, never tokens,
    so a head is judged on what it was given and not on what the layers below make of a shuffled text. Masked keys
    take no part; sliding windows, soft caps and scaling are the model's own.

    Args:
        model: a causal transformers model with rotary position embedding.
        batches: token ids `[batch, tokens]`, or mappings of the model's arguments, padded on the right.
        blocks: how many blocks the keys are split into; fewer where there are fewer keys than that.
        keep_first: tokens at the start of the sequence that stay in place at least. Many heads rest on the first
            token; if it moved, they would all be taken for symbolic.
        queries: how many prefixes of each prompt are looked at, evenly spaced and ending with the whole prompt. The
            last token of each is a query, and a prompt counts once with their mean.
        per_frequency: also score each rotary frequency alone.
        weighting: of the pairs of blocks: "moved", "proportional" or "uniform", as in `block_swap_scores`.
        tau: temperature of the weighting "moved".
        layers: which layers; all by default.
        total: how many batches there are, for the progress only.
        progress: called after every batch.

    Returns:
        Scores `[layers, heads]` averaged over prompts, with attention distance and entropy beside them.

    Raises:
        InputError: an option is out of its range, there are no batches, or a prompt is too short for two blocks.
        NotApplicable: the model has no rotary position embedding or is not causal.
        UnknownArchitecture: the model has no anatomy.

    Source:
        Decoupling Positional and Symbolic Attention in Transformers, arXiv 2511.11579.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(
        ...     LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        ... )
        >>> result = rope_heads(model, [torch.arange(40)[None]])  # untrained: attention is nearly uniform
        >>> result.label
        (('diffuse', 'diffuse'),)
    """
    reducer = RopeHeadsReducer(
        blocks=blocks,
        keep_first=keep_first,
        queries=queries,
        per_frequency=per_frequency,
        weighting=weighting,
        tau=tau,
        layers=layers,
    )
    parts = anatomy(model)
    if not any(block.attention.rotary is not None for block in parts.blocks):
        raise NotApplicable(_NO_ROTARY)
    trace(model, batches, [reducer], anatomy=parts, total=total, progress=progress)
    return reducer.result()
