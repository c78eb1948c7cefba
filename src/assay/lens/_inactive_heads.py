"""Which attention heads do nothing on given texts, and what silencing them costs.

Source: Identifying and Evaluating Inactive Heads in Pretrained LLMs (arXiv 2504.03889).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from assay.core.anatomy import Anatomy
from assay.core.anatomy import anatomy as find_anatomy
from assay.core.errors import InputError, NotApplicable
from assay.core.progress import Progress, silent
from assay.core.results import Column, Result, Table
from assay.core.trace import AttentionView, Batch, PatternSlice, Reducer, attach, trace

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Direction = Literal["<", ">"]

FRACTIONS = (0.0, 0.05, 0.10, 0.15, 0.20, 0.25, 0.30)


@dataclass(frozen=True)
class _Score:
    """A score as a ratio of what is measured of each head."""

    about: str
    top: str
    bottom: str | None = None
    over_layer: bool = False
    direction: Direction = "<"

    @property
    def needs(self) -> set[str]:
        return {self.top} if self.bottom is None else {self.top, self.bottom}


def _normalised(about: str, top: str, direction: Direction = "<") -> _Score:
    return _Score(f"{about}, over its mean in the layer", top, top, True, direction)


_SCORES = {
    "awft": _Score("mean attention weight on the first token", "awft", direction=">"),
    "awft_ln": _normalised("mean attention weight on the first token", "awft", ">"),
    "aeqd": _Score("mean entropy of the attention of a query (nats)", "aeqd"),
    "aeqd_ln": _normalised("mean entropy of the attention of a query", "aeqd"),
    "ftvvn": _Score("norm of the first token's value", "ftvvn"),
    "ftvvn_ln": _normalised("norm of the first token's value", "ftvvn"),
    "avvn": _Score("mean norm of the values", "avvn"),
    "avvn_ln": _normalised("mean norm of the values", "avvn"),
    "lthon": _Score("norm of the head's output at the last token", "lthon"),
    "lthon_ln": _Score("norm of the output at the last token, over the layer's mean ahon", "lthon", "ahon", True),
    "ahon": _Score("mean norm of the head's output", "ahon"),
    "ahon_ln": _normalised("mean norm of the head's output", "ahon"),
    "lthon_hn": _Score("norm of the output at the last token, over the head's own ahon", "lthon", "ahon"),
    "lthon_ln_strict": _normalised("norm of the output at the last token", "lthon"),
    "ahon_full": _Score("mean norm of the head's output after its output projection", "ahon_full"),
    "ahon_full_ln": _normalised("mean norm of the head's output after its output projection", "ahon_full"),
    "random": _Score("uniform between 0 and 1: the baseline", "random"),
}

SCORES = tuple(_SCORES)[:12]
ALL_SCORES = tuple(_SCORES)


def _score(name: str) -> _Score:
    if name not in _SCORES:
        raise InputError(f"no head score is called {name!r}: there are {', '.join(_SCORES)}")
    return _SCORES[name]


def _is_flagged(scores: Tensor, name: str, tau: float) -> Tensor:
    return scores > tau if _score(name).direction == ">" else scores < tau


@dataclass(frozen=True)
class HeadScores(Result):
    """Scores of every head on every sample.

    Attributes:
        scores: by the score's name. Weights, ratios and `random` have no unit, `aeqd` is in nats, norms are in the
            unit of the model's activations. A ratio over a mean that is 0 is 0.
        layers: the number, from 0, of the block behind each position of the axis "layers".
        tokens: how many tokens of each sample were no padding.
    """

    scores: Mapping[str, Float[Tensor, "samples layers heads"]]
    layers: tuple[int, ...]
    tokens: Int[Tensor, "samples"]

    def __getitem__(self, name: str) -> Float[Tensor, "samples layers heads"]:
        if name not in self.scores:
            raise InputError(f"the score {name!r} was not computed: there are {', '.join(self.scores)}")
        return self.scores[name]

    def thresholds(self, name: str, fractions: Sequence[float] = FRACTIONS) -> Float[Tensor, "fractions"]:
        """The thresholds at which a score flags these fractions of all heads; see `thresholds`."""
        return thresholds(self[name], fractions, direction=_score(name).direction)

    def flagged(self, name: str, tau: float) -> Bool[Tensor, "samples layers heads"]:
        """Which heads a score calls inactive at a threshold."""
        return _is_flagged(self[name], name, float(tau))

    def mean(self, name: str) -> Float[Tensor, "layers heads"]:
        """A score's mean over the samples."""
        return self[name].mean(0)

    def table(self) -> Table:
        """One row a head: the mean of each score over the samples."""
        columns = [Column("layer", about="number of the block"), Column("head", about="number of the query head")]
        columns += [Column(n, "nats" if n == "aeqd" else "", _score(n).about) for n in self.scores]
        means = torch.stack([self.mean(n) for n in self.scores], dim=-1).tolist()
        rows = [
            (layer, head, *values)
            for layer, of_layer in zip(self.layers, means, strict=True)
            for head, values in enumerate(of_layer)
        ]
        return Table(tuple(columns), tuple(rows), f"Head scores, mean of {len(self.tokens)} samples")

    def figure(self) -> Figure:
        """A heat map of the mean score, layers by heads, with a menu of the scores."""
        import plotly.graph_objects as go

        names = list(self.scores)
        means = [self.mean(n).double().numpy() for n in names]
        figure = go.Figure(
            go.Heatmap(
                z=means[0],
                y=[str(n) for n in self.layers],
                colorscale="Viridis",
                hovertemplate="layer %{y}, head %{x}: %{z:.4g}<extra></extra>",
            )
        )
        buttons = [
            {"label": n, "method": "update", "args": [{"z": [m]}, {"title.text": f"{n}: {_score(n).about}"}]}
            for n, m in zip(names, means, strict=True)
        ]
        figure.update_layout(
            title=f"{names[0]}: {_score(names[0]).about}",
            xaxis_title="head",
            yaxis_title="layer",
            yaxis_type="category",
            updatemenus=[{"buttons": buttons, "x": 1.0, "xanchor": "right", "y": 1.15}],
        )
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Means over the samples and thresholds; the scores of single samples are left out for their size."""
        return {
            "layers": list(self.layers),
            "tokens": self.tokens.tolist(),
            "mean": {n: self.mean(n).tolist() for n in self.scores},
            "fractions": list(FRACTIONS),
            "thresholds": {n: self.thresholds(n).tolist() for n in self.scores},
        }


class HeadScoreReducer(Reducer):
    """Scores heads while a model runs; hand it to `assay.core.trace.trace` together with other reducers.

    Args:
        which: names of scores: the twelve of the paper by default.
        seed: for the score `random`.

    Raises:
        InputError: an unknown score, or none.
    """

    def __init__(self, which: Sequence[str] = SCORES, *, seed: int = 0) -> None:
        if not which:
            raise InputError(f"no scores were asked for: choose from {', '.join(_SCORES)}")
        self.which = tuple(dict.fromkeys(which))
        self._needs = set().union(*(_score(n).needs for n in self.which))
        self.sites = ("attn.pattern", "attn") if self._needs & {"awft", "aeqd"} else ("attn",)
        self._generator = torch.Generator().manual_seed(seed)
        self._batch: Batch | None = None
        self._sums: dict[tuple[str, int], Tensor] = {}
        self._roots: dict[int, Tensor] = {}
        self._rows: dict[int, list[dict[str, Tensor]]] = {}
        self._tokens: list[Tensor] = []
        self._warned = False

    def update(self, site: str, layer: int, value: Any, batch: Batch) -> Tensor | None:
        """Take in a slice of the pattern, or a layer's values and outputs."""
        if site == "attn.pattern":
            self.see_pattern(value, batch)
            return None
        if self._batch is not batch:
            self._open(batch, value)
            self._tokens.append(self._lengths)
        self._rows.setdefault(layer, []).append(self.score_layer(value, batch))
        return None

    def see_pattern(self, piece: PatternSlice, batch: Batch) -> None:
        """Add one slice of the attention pattern to the sums of its layer."""
        first = piece.heads.start
        if first == 0 and piece.rows.start == 0:
            self._sums.clear()
        if "awft" in self._needs:
            self._add(("awft", first), piece.weights[..., 0], piece.rows, batch.valid)
        if "aeqd" in self._needs:
            self._add(("aeqd", first), piece.entropy, piece.rows, batch.valid)

    def _add(self, key: tuple[str, int], values: Tensor, rows: slice, valid: Tensor | None) -> None:
        values = values.detach()
        total = values.sum(-1) if valid is None else (values * valid[:, None, rows]).sum(-1)
        self._sums[key] = self._sums[key] + total if key in self._sums else total

    @torch.no_grad()
    def score_layer(self, view: AttentionView, batch: Batch) -> dict[str, Float[Tensor, "batch heads"]]:
        """The scores of one layer's heads; its pattern must have been seen."""
        if self._batch is not batch:
            self._open(batch, view)
        attention = view.block.attention
        if "awft" in self._needs and attention.window is not None and not self._warned:
            self._warn_of_window(attention.window)
        root = None
        if "ahon_full" in self._needs:
            root = self._roots.get(view.block.index)
            if root is None:
                root = self._roots[view.block.index] = _roots(attention.o_slices())
        return self._finish_layer(view.v, view.out, batch.valid, root)

    def _open(self, batch: Batch, view: AttentionView) -> None:
        """Check a batch and find each sample's length, once for all layers."""
        if view.k.shape[2] != view.q.shape[2]:
            raise NotApplicable(
                "head scores are of whole sequences, and a cache of earlier tokens was given: pass use_cache=False"
            )
        if not view.block.attention.causal:
            raise NotApplicable("head scores are of causal attention, and in this model tokens look at later ones")
        self._measure(batch, view.out)

    def _measure(self, batch: Batch, out: Tensor) -> None:
        n, _, tokens, _ = out.shape
        if batch.valid is None:
            self._lengths = torch.full((n,), tokens, device=out.device)
        else:
            valid = batch.valid
            if bool((valid[:, 1:] & ~valid[:, :-1]).any()) or not bool(valid[:, 0].all()):
                raise InputError("attention_mask has padding before tokens: pad on the right")
            self._lengths = valid.sum(-1)
        self._batch = batch

    def _warn_of_window(self, window: int) -> None:
        longest = int(self._lengths.max())
        if longest > window:
            self._warned = True
            warnings.warn(
                f"texts of {longest} tokens are longer than a sliding window of {window}: in such layers queries "
                "beyond the window count with weight 0 in awft",
                stacklevel=2,
            )

    def _finish_layer(
        self, v: Tensor, out: Tensor, valid: Tensor | None, root: Tensor | None
    ) -> dict[str, Float[Tensor, "batch heads"]]:
        n_heads = out.shape[1]
        lengths = self._lengths[:, None]

        def mean(values: Tensor) -> Tensor:
            total = values.sum(-1) if valid is None else (values * valid[:, None]).sum(-1)
            return total / lengths

        base: dict[str, Tensor] = {}
        for name in ("awft", "aeqd"):
            if name in self._needs:
                parts = [t for (kind, _), t in sorted(self._sums.items()) if kind == name]
                base[name] = torch.cat(parts, dim=1) / lengths
        self._sums.clear()
        if self._needs & {"ftvvn", "avvn"}:
            norms = _norm(v)
            group = n_heads // v.shape[1]
            base["ftvvn"] = norms[..., 0].repeat_interleave(group, dim=1)
            base["avvn"] = mean(norms).repeat_interleave(group, dim=1)
        if self._needs & {"lthon", "ahon"}:
            norms = _norm(out)
            last = (lengths - 1)[:, :, None].expand(-1, n_heads, 1)
            base["lthon"] = norms.gather(-1, last).squeeze(-1)
            base["ahon"] = mean(norms)
        if root is not None:
            base["ahon_full"] = mean(_norm(out.to(root.dtype) @ root.mT))
        if "random" in self._needs:
            base["random"] = torch.rand(out.shape[:2], generator=self._generator).to(out.device)
        return {name: _ratio(_SCORES[name], base) for name in self.which}

    def result(self) -> HeadScores:
        """The scores of all that was seen.

        Raises:
            InputError: nothing was seen.
        """
        if not self._rows:
            raise InputError("no attention was seen: run the model over at least one batch first")
        layers = tuple(sorted(self._rows))
        scores = {
            name: torch.stack([torch.cat([row[name] for row in self._rows[i]]) for i in layers], dim=1).cpu()
            for name in self.which
        }
        return HeadScores(scores, layers, torch.cat(self._tokens).cpu())


def _ratio(score: _Score, base: Mapping[str, Tensor]) -> Tensor:
    top = base[score.top]
    if score.bottom is None:
        return top
    bottom = base[score.bottom]
    if score.over_layer:
        bottom = bottom.mean(-1, keepdim=True)
    # A layer (or head) that puts out nothing at all has 0/0: it keeps the 0 of the plain score.
    return torch.where(bottom == 0, 0, top / bottom)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))


def _roots(slices: Float[Tensor, "heads d_model head_dim"]) -> Float[Tensor, "heads rank head_dim"]:
    """The triangular factors R of W = QR: ‖Wx‖ = ‖Rx‖, at a cost that does not grow with the width of the model."""
    wide = slices.detach().to(torch.promote_types(slices.dtype, torch.float32))
    return torch.linalg.qr(wide, mode="r").R


def head_scores(
    pattern: Float[Tensor, "batch heads tokens tokens"],
    v: Float[Tensor, "batch kv_heads tokens head_dim"],
    *,
    which: Sequence[str] = SCORES,
    valid: Bool[Tensor, "batch tokens"] | None = None,
    o_slices: Float[Tensor, "heads d_model head_dim"] | None = None,
    seed: int = 0,
) -> dict[str, Float[Tensor, "batch heads"]]:
    """Scores of one layer's heads from its attention pattern and values.

    Args:
        pattern: attention weights after the softmax; rows are queries and sum to one.
        v: values; with fewer heads than `pattern` where heads share them (grouped-query attention).
        which: names of scores.
        valid: which tokens are no padding; padding goes to the right.
        o_slices: each head's part of the output projection; only the scores named `ahon_full…` need it.
        seed: for the score `random`.

    Returns:
        The scores by name, float32 or better.

    Raises:
        InputError: an unknown score, shapes that do not fit, padding on the left, or `o_slices` missing.

    Source:
        Identifying and Evaluating Inactive Heads in Pretrained LLMs (arXiv 2504.03889), score functions.

    Example:
        >>> uniform = torch.ones(1, 1, 4, 4).tril()
        >>> uniform = uniform / uniform.sum(-1, keepdim=True)
        >>> scores = head_scores(uniform, torch.ones(1, 1, 4, 2), which=("awft", "aeqd"))
        >>> {name: round(s.item(), 4) for name, s in scores.items()}
        {'awft': 0.5208, 'aeqd': 0.7945}
    """
    if pattern.ndim != 4 or v.ndim != 4 or v.shape[0] != pattern.shape[0] or v.shape[2] != pattern.shape[3]:
        raise InputError(
            f"pattern is {tuple(pattern.shape)} and v is {tuple(v.shape)}: give [batch, heads, tokens, tokens] and "
            "[batch, kv_heads, tokens, head_dim]"
        )
    if pattern.shape[1] % v.shape[1]:
        raise InputError(f"{pattern.shape[1]} query heads cannot share {v.shape[1]} heads of values evenly")
    reducer = HeadScoreReducer(which, seed=seed)
    root = None
    if "ahon_full" in reducer._needs:
        if o_slices is None:
            raise InputError("ahon_full needs o_slices, each head's part of the output projection")
        root = _roots(o_slices)
    batch, n_heads, tokens, _ = pattern.shape
    n_kv = v.shape[1]
    stacked = pattern.reshape(batch, n_kv, -1, tokens).to(v.dtype)
    out = (stacked @ v).view(batch, n_heads, tokens, -1)
    given = Batch(inputs={}, valid=valid, index=0)
    reducer._measure(given, out)
    wide = pattern.to(torch.promote_types(pattern.dtype, torch.float32))
    reducer.see_pattern(PatternSlice(wide, slice(0, n_heads), slice(0, tokens)), given)
    return reducer._finish_layer(v, out, valid, root)


def inactive_heads(
    model: nn.Module,
    batches: Iterable[Tensor | Mapping[str, Any]],
    *,
    which: Sequence[str] = SCORES,
    seed: int = 0,
    anatomy: Anatomy | None = None,
    total: int | None = None,
    progress: Progress = silent,
) -> HeadScores:
    """Score how active each attention head is on given texts, in one pass over them.

    The scores: `awft` mean attention weight on the first token (inactive when high; all others when low), `aeqd` mean
    entropy of a query's attention, `ftvvn` norm of the first token's value, `avvn` mean norm of the values, `lthon`
    norm of the head's output at the last token, `ahon` mean norm of the head's output; each with `_ln`, over its mean
    among the heads of the same layer and sample. `lthon_ln` is over the layer's mean `ahon`, as in the authors' code;
    `lthon_ln_strict` is over its own. Also `lthon_hn` (over the same head's `ahon`), `ahon_full` and `ahon_full_ln`
    (after the output projection), and `random`. Heads that share values tie in `ftvvn` and `avvn`.

    Args:
        model: a causal transformers model that `assay.core.anatomy` knows.
        batches: token ids `[batch, tokens]`, or mappings of the model's keyword arguments; padding on the right.
        which: names of scores; fewer are faster, and without `awft…` and `aeqd…` the pattern is not looked at.
        seed: for the score `random`.
        anatomy: the model's anatomy, where the caller has it already.
        total: how many batches there are, for the progress only.
        progress: called after every batch.

    Returns:
        The scores of every sample, layer and query head.

    Raises:
        InputError: an unknown score, no batches, or padding before tokens.
        NotApplicable: attention that is not causal.
        UnknownArchitecture: the model has no anatomy.

    Source:
        Identifying and Evaluating Inactive Heads in Pretrained LLMs (arXiv 2504.03889), score functions.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> scores = inactive_heads(LlamaForCausalLM(config), [torch.arange(20).view(2, 10)])
        >>> scores["ahon_ln"].shape
        torch.Size([2, 2, 4])
    """
    reducer = HeadScoreReducer(which, seed=seed)
    trace(model, batches, [reducer], anatomy=anatomy, total=total, progress=progress)
    return reducer.result()


def thresholds(
    scores: Float[Tensor, "..."], fractions: Sequence[float] = FRACTIONS, *, direction: Direction = "<"
) -> Float[Tensor, "fractions"]:
    """The thresholds at which given fractions of pooled scores count as inactive.

    Args:
        scores: scores of a calibration set, pooled over all axes.
        fractions: which fractions to flag, between 0 and 1.
        direction: "<" where low scores mean inactive, ">" where high ones do (`awft`, `awft_ln`).

    Returns:
        One threshold a fraction, float64. Comparisons are strict, so fraction 0 flags none of the scores given; ties at
        a threshold stay unflagged.

    Raises:
        InputError: no scores, a score that is not finite, a fraction outside [0, 1], or another direction.

    Source:
        arXiv 2504.03889: quantiles of the pooled scores, linear interpolation of the empirical distribution function.

    Example:
        >>> thresholds(torch.arange(1.0, 11.0), (0.0, 0.25)).tolist()
        [1.0, 2.5]
    """
    if direction not in ("<", ">"):
        raise InputError(f"direction is {direction!r}: give '<' or '>'")
    wrong = [f for f in fractions if not 0 <= f <= 1]
    if wrong:
        raise InputError(f"a fraction is {wrong[0]}: give fractions between 0 and 1")
    pooled = _pooled(scores, "scores")
    asked = np.asarray(fractions, dtype=np.float64)
    levels = asked if direction == "<" else 1 - asked
    return torch.from_numpy(np.quantile(pooled, levels, method="interpolated_inverted_cdf"))


def _pooled(scores: Tensor, name: str) -> np.ndarray:
    pooled = torch.as_tensor(scores).detach().cpu().double().reshape(-1)
    if pooled.numel() == 0:
        raise InputError(f"{name} is empty: score at least one sample")
    if not bool(pooled.isfinite().all()):
        raise InputError(f"{name} has values that are not finite: check the model's activations")
    return pooled.numpy()


@dataclass
class AblationStats:
    """How much was silenced so far inside an `ablate_heads` block.

    Attributes:
        zeroed: on how many samples each head was zeroed.
        samples: how many samples the model has seen.
    """

    zeroed: Int[Tensor, "layers heads"]
    samples: int = 0

    @property
    def fraction_zeroed(self) -> float:
        """The fraction of all (sample, layer, head) that was zeroed; 0 before the first pass."""
        return float(self.zeroed.sum()) / (self.zeroed.numel() * self.samples) if self.samples else 0.0


class _Silencer(Reducer):
    """Zeroes the outputs of flagged heads before the output projection."""

    def __init__(
        self, stats: AblationStats, choose: Callable[[AttentionView, Batch], Tensor], scorer: HeadScoreReducer | None
    ) -> None:
        self.sites = scorer.sites if scorer is not None else ("attn",)
        self._stats, self._choose, self._scorer = stats, choose, scorer

    def update(self, site: str, layer: int, value: Any, batch: Batch) -> Tensor | None:
        if site == "attn.pattern":
            assert self._scorer is not None
            self._scorer.see_pattern(value, batch)
            return None
        flagged = self._choose(value, batch)
        if layer == 0:
            self._stats.samples += len(flagged)
        self._stats.zeroed[layer] += flagged.sum(0)
        return value.out.masked_fill(flagged[:, :, None, None], 0)


@contextmanager
def ablate_heads(
    model: nn.Module,
    score: str | None = None,
    tau: float | None = None,
    *,
    mask: Bool[Tensor, "layers heads"] | None = None,
    seed: int = 0,
    anatomy: Anatomy | None = None,
) -> Iterator[AblationStats]:
    """Zero the outputs of inactive heads in every forward pass inside the `with` block.

    With `score` and `tau` the heads are chosen anew for each input: every layer scores its heads on what it is given
    in that very pass, after the layers before it were ablated. With `mask` the same heads are zeroed on all inputs.
    Outputs are zeroed at all positions, before the output projection.

    Args:
        model: a causal transformers model that `assay.core.anatomy` knows; it is left as it was found.
        score: name of a score, see `inactive_heads`.
        tau: its threshold.
        mask: True where a head is to be zeroed.
        seed: for the score `random`.
        anatomy: the model's anatomy, where the caller has it already.

    Yields:
        Counts of what was zeroed, which grow with every pass.

    Raises:
        InputError: neither or both of a score with threshold and a mask; an unknown score; a mask of another shape.
        NotApplicable: in the pass: scores on top of a cache of earlier tokens (give `use_cache=False`; a mask works
            with a cache too), or attention that is not causal.

    Source:
        arXiv 2504.03889, the intervention on inactive heads.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> with ablate_heads(model, "ahon_ln", 1e9) as stats:
        ...     out = model(torch.arange(10)[None], use_cache=False)
        >>> stats.fraction_zeroed
        1.0
    """
    found = find_anatomy(model) if anatomy is None else anatomy
    shape = (found.n_layers, found.blocks[0].attention.n_heads)
    scorer = None
    if mask is None:
        if score is None or tau is None:
            raise InputError("what to ablate is not given: pass a score with its threshold tau, or a mask")
        scorer = HeadScoreReducer((score,), seed=seed)
        limit, rule = float(tau), scorer

        def choose(view: AttentionView, batch: Batch) -> Tensor:
            return _is_flagged(rule.score_layer(view, batch)[score], score, limit)

    else:
        if score is not None or tau is not None:
            raise InputError("both a score and a mask are given: pass one of them")
        if tuple(mask.shape) != shape or mask.dtype != torch.bool:
            raise InputError(f"mask is {mask.dtype} {tuple(mask.shape)}: give torch.bool {shape}, layers by heads")
        fixed = mask.to(next(model.parameters()).device)

        def choose(view: AttentionView, batch: Batch) -> Tensor:
            return fixed[view.block.index].expand(len(view.out), -1)

    device = next(model.parameters()).device
    stats = AblationStats(torch.zeros(shape, dtype=torch.long, device=device))
    with attach(model, [_Silencer(stats, choose, scorer)], anatomy=found):
        yield stats


@dataclass(frozen=True)
class ZeroableResult(Result):
    """What silencing costs, by score and by the fraction of heads that the threshold was set for.

    Attributes:
        scores: the names of the scores.
        fractions: the fractions that the thresholds flag on the calibration set.
        thresholds: the thresholds.
        zeroed: the fraction of (sample, layer, head) that was really zeroed in the evaluation.
        values: what the evaluation gave.
        reference: what the unmodified model gave.
        tolerance: how much worse than `reference` still counts as equal, in the unit of the evaluation.
        better: whether higher or lower values are better.
    """

    scores: tuple[str, ...]
    fractions: tuple[float, ...]
    thresholds: Float[Tensor, "scores fractions"]
    zeroed: Float[Tensor, "scores fractions"]
    values: Float[Tensor, "scores fractions"]
    reference: float
    tolerance: float
    better: Literal["higher", "lower"]

    @property
    def cost(self) -> Float[Tensor, "scores fractions"]:
        """How much worse than the unmodified model, in the unit of the evaluation; negative where better."""
        return (self.reference - self.values) * (1 if self.better == "higher" else -1)

    @property
    def zeroable(self) -> dict[str, float]:
        """For each score, the largest fraction really zeroed at a cost within the tolerance; 0 where none is."""
        held = torch.where(self.cost <= self.tolerance, self.zeroed, 0).amax(1)
        return dict(zip(self.scores, held.tolist(), strict=True))

    def table(self) -> Table:
        """One row a score: the fraction that can be zeroed, and the cost at each threshold."""
        columns = [
            Column("score", about="how heads were chosen"),
            Column("zeroable", "%", f"most heads zeroed at a cost of at most {self.tolerance:g}"),
            *(Column(f"cost at {f:.0%}", about="evaluation against the unmodified model") for f in self.fractions),
        ]
        zeroable = self.zeroable
        rows = [(name, 100 * zeroable[name], *cost) for name, cost in zip(self.scores, self.cost.tolist(), strict=True)]
        rows.sort(key=lambda row: -row[1])
        return Table(tuple(columns), tuple(rows), f"Zeroing heads; unmodified: {self.reference:.4g}")

    def figure(self) -> Figure:
        """The evaluation against the fraction of heads zeroed, one line a score."""
        import plotly.graph_objects as go

        figure = go.Figure()
        for name, zeroed, values in zip(self.scores, self.zeroed.tolist(), self.values.tolist(), strict=True):
            order = np.argsort(zeroed, kind="stable")
            figure.add_scatter(
                x=[100 * zeroed[i] for i in order], y=[values[i] for i in order], name=name, mode="lines+markers"
            )
        sign = -1 if self.better == "higher" else 1
        figure.add_hline(y=self.reference + sign * self.tolerance, line_dash="dot", annotation_text="tolerance")
        figure.update_layout(xaxis_title="heads zeroed (%)", yaxis_title="evaluation")
        return figure

    def to_dict(self) -> dict[str, Any]:
        """The fields, and `zeroable`."""
        return super().to_dict() | {"zeroable": self.zeroable}


def zeroable_fraction(
    model: nn.Module,
    evaluate: Callable[[nn.Module], float],
    calibration: HeadScores,
    *,
    scores: Sequence[str] | None = None,
    fractions: Sequence[float] = FRACTIONS,
    tolerance: float = 0.01,
    better: Literal["higher", "lower"] = "higher",
    seed: int = 0,
    progress: Progress = silent,
) -> ZeroableResult:
    """How many heads each score can zero before the model gets worse.

    Args:
        model: a causal transformers model that `assay.core.anatomy` knows.
        evaluate: takes the model, runs it on whole sequences without a cache, and returns one number.
        calibration: scores on other texts than `evaluate` uses; the thresholds come from them.
        scores: which scores to try; by default all of `calibration`.
        fractions: the fractions of heads for which thresholds are set.
        tolerance: how much worse still counts as equal, in the unit of `evaluate`: 0.01 is one point of accuracy, or
            1 % of perplexity where `evaluate` gives nats a token.
        better: whether higher or lower values of `evaluate` are better.
        seed: for the score `random`.
        progress: called after every evaluation.

    Returns:
        The values, the fractions zeroed, and the largest fraction within the tolerance.

    Raises:
        InputError: a score that `calibration` has not, or a negative tolerance.

    Source:
        arXiv 2504.03889, the share of heads that can be zeroed within 1 % of the unmodified accuracy.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> ids = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(0))
        >>> def loss(model):
        ...     with torch.no_grad():
        ...         return model(ids[2:], labels=ids[2:], use_cache=False).loss.item()
        >>> calibration = inactive_heads(model, [ids[:2]], which=("ahon_ln", "random"))
        >>> result = zeroable_fraction(model, loss, calibration, better="lower")
        >>> sorted(result.zeroable)
        ['ahon_ln', 'random']
    """
    if tolerance < 0:
        raise InputError(f"tolerance is {tolerance}: give 0 or more")
    if better not in ("higher", "lower"):
        raise InputError(f"better is {better!r}: give 'higher' or 'lower'")
    names = tuple(calibration.scores if scores is None else scores)
    taus = torch.stack([calibration.thresholds(name, fractions) for name in names])
    found = find_anatomy(model)
    reference = float(evaluate(model))
    zeroed, values = torch.zeros_like(taus), torch.zeros_like(taus)
    for i, name in enumerate(names):
        for j, tau in enumerate(taus[i].tolist()):
            with ablate_heads(model, name, tau, seed=seed, anatomy=found) as stats:
                values[i, j] = float(evaluate(model))
            zeroed[i, j] = stats.fraction_zeroed
            progress(i * len(fractions) + j + 1, taus.numel(), "evaluations")
    return ZeroableResult(names, tuple(fractions), taus, zeroed, values, reference, tolerance, better)


@dataclass(frozen=True)
class ScoreComparison(Result):
    """How two sets of scores agree.

    Attributes:
        wasserstein: Wasserstein-1 distance of the pooled distributions, in the unit of the scores.
        fractions: the fractions of heads that both flag.
        iou: heads that both flag over heads that either flags; NaN where none is flagged or the shapes differ.
        precision: of the heads that the first flags, the part that the second flags too; NaN likewise.
    """

    wasserstein: float
    fractions: tuple[float, ...]
    iou: Float[Tensor, "fractions"]
    precision: Float[Tensor, "fractions"]

    def table(self) -> Table:
        """One row a fraction."""
        columns = (
            Column("flagged", "%", "heads that each side flags"),
            Column("IoU", about="both over either"),
            Column("precision", about="of the first side's heads, those that the second flags too"),
        )
        rows = zip([100 * f for f in self.fractions], self.iou.tolist(), self.precision.tolist(), strict=True)
        return Table(columns, tuple(rows), f"Wasserstein-1 distance {self.wasserstein:.4g}")

    def figure(self) -> Figure:
        """Overlap against the fraction flagged."""
        import plotly.graph_objects as go

        figure = go.Figure()
        x = [100 * f for f in self.fractions]
        figure.add_scatter(x=x, y=self.iou.tolist(), name="IoU", mode="lines+markers")
        figure.add_scatter(x=x, y=self.precision.tolist(), name="precision", mode="lines+markers")
        figure.update_layout(xaxis_title="heads flagged (%)", yaxis_title="overlap", yaxis_range=[0, 1])
        return figure


def compare_scores(
    a: Float[Tensor, "..."],
    b: Float[Tensor, "..."],
    *,
    directions: tuple[Direction, Direction] = ("<", "<"),
    fractions: Sequence[float] = FRACTIONS[1:],
) -> ScoreComparison:
    """Compare two scores on the same heads, or one score of two models or data sets.

    Args:
        a: scores of any shape.
        b: scores. Where the shape is that of `a`, the flagged heads are compared too.
        directions: "<" or ">" for `a` and for `b`, see `thresholds`.
        fractions: at which equal fractions to compare the flagged heads; each side sets its own threshold.

    Returns:
        The distance of the distributions, and the overlap of the flagged heads.

    Raises:
        InputError: empty scores, or a score that is not finite.

    Source:
        arXiv 2504.03889, comparison of score distributions and of flagged heads.

    Example:
        >>> x = torch.linspace(0, 1, 40).view(2, 4, 5)
        >>> same = compare_scores(x, x + 1, fractions=(0.1,))
        >>> round(same.wasserstein, 6), same.iou.tolist()
        (1.0, [1.0])
    """
    from scipy.stats import wasserstein_distance

    distance = float(wasserstein_distance(_pooled(a, "a"), _pooled(b, "b")))
    nan = torch.full((len(fractions),), torch.nan, dtype=torch.float64)
    if a.shape != b.shape:
        return ScoreComparison(distance, tuple(fractions), nan, nan)

    def flags(x: Tensor, direction: Direction) -> Tensor:
        values = x.detach().cpu().double().reshape(1, -1)
        taus = thresholds(x, fractions, direction=direction)[:, None]
        return values < taus if direction == "<" else values > taus

    in_a, in_b = flags(a, directions[0]), flags(b, directions[1])
    both = (in_a & in_b).sum(1).double()
    return ScoreComparison(distance, tuple(fractions), both / (in_a | in_b).sum(1), both / in_a.sum(1))
