"""DiffSparse: which share of its tokens each block of a diffusion transformer recomputes at each step, learned."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from assay.core.errors import InputError
from assay.core.results import Column, Result, Table
from assay.core.seeds import generator

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = [
    "BlockSpec",
    "DiffSparseResult",
    "Importance",
    "TokenCache",
    "allocate_sparsity",
    "diffsparse",
    "hand_keep",
    "token_importance",
]

Signal = Literal["attention", "similarity", "norm"]
# At the start full steps on the even grid are cheaper by this, so that no tie decides.
_STEP_SLOPE = 0.1
_MOMENTUM = 0.9


# ---- the budget --------------------------------------------------------------------------------------------------


def allocate_sparsity(
    cost: Float[Tensor, "cells levels"], units: Sequence[int], budget: int, weights: Sequence[int] | None = None
) -> Int[Tensor, "cells"]:
    """The level of every cell that makes the summed cost least, with the whole budget spent.

    Dynamic programming over cells, exact: F(i, r) = min over levels s of F(i − 1, r − w_i u_s) + C[i, s].

    Args:
        cost: what each level costs in each cell, no unit; +inf forbids a level.
        units: what each level takes from the budget, ascending; units of *kept* computation.
        budget: units to spend. Where they cannot be spent to the last, as many as can be are.
        weights: factors of the units, one a cell; all 1 by default.

    Returns:
        The index of the level of each cell. Of equal costs the lowest level of the last cell wins, then of the one
        before it, so that the answer does not depend on chance.

    Raises:
        InputError: shapes disagree, a cost is NaN, the units do not ascend, or the budget is below the least or above
            the most that can be spent.

    Source:
        "DiffSparse: Accelerating Diffusion Transformers with Learned Token Sparsity", arXiv 2604.03674.

    Example:
        >>> import torch
        >>> from assay.compress import allocate_sparsity
        >>> allocate_sparsity(torch.tensor([[3.0, 1, 0], [5, 2, 0], [1, 0.5, 0]]), (0, 1, 2), 3)
        tensor([1, 2, 0])
    """
    if not isinstance(cost, Tensor) or cost.ndim != 2 or not cost.numel():
        raise InputError(f"cost is {_shape(cost)}: pass a tensor of shape [cells, levels]")
    c = cost.detach().double().cpu().numpy()
    if np.isnan(c).any() or np.isneginf(c).any():
        raise InputError("cost has entries that are NaN or -inf: every level needs a cost")
    u = _whole("units", units, c.shape[1])
    if (np.diff(u) <= 0).any():
        raise InputError(f"units is {tuple(units)}: give them ascending, one a level")
    w = np.ones(len(c), np.int64) if weights is None else _whole("weights", weights, len(c))
    if (w < 1).any():
        raise InputError("weights holds a number below 1: give whole numbers from 1")
    least, most = int(u[0] * w.sum()), int(u[-1] * w.sum())
    if not isinstance(budget, int | np.integer) or isinstance(budget, bool):
        raise InputError(f"budget is {budget!r}: give a whole number of units")
    if budget < least:
        raise InputError(f"budget {budget} units cannot be met: the lowest levels alone need {least}")
    if budget > most:
        raise InputError(f"budget {budget} units cannot be spent: all cells at the highest level take {most}")

    r = np.arange(budget + 1)
    total = np.where(r == 0, 0.0, np.inf)
    chosen = np.empty((len(c), budget + 1), np.int16)
    for i, row in enumerate(c):
        before = r - w[i] * u[:, None]
        totals = np.where(before < 0, np.inf, total[np.maximum(before, 0)]) + row[:, None]
        chosen[i] = totals.argmin(0)
        total = np.take_along_axis(totals, chosen[i][None].astype(np.int64), 0)[0]
    reached = np.flatnonzero(np.isfinite(total))
    if not reached.size:
        raise InputError(f"no choice of levels has a finite cost within {budget} units: forbid fewer levels")
    left = int(reached[-1])
    levels = np.empty(len(c), np.int64)
    for i in reversed(range(len(c))):
        levels[i] = chosen[i, left]
        left -= int(w[i] * u[levels[i]])
    return torch.from_numpy(levels)


def hand_keep(
    steps: int,
    blocks: int,
    budget: int,
    *,
    keep_levels: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    units: Sequence[int] | None = None,
    cycle: int | None = None,
) -> Float[Tensor, "steps blocks"]:
    """A table made by hand: some steps in full, the rest of the budget spread evenly over the other cells.

    Args:
        steps: calls of the model.
        blocks: blocks of the model.
        budget: units to spend, as in `allocate_sparsity`; spent to the last where levels allow.
        keep_levels: shares of tokens to choose from, ascending, the last 1.
        units: what each level takes; 0, 1, 2, … by default.
        cycle: every which step is full, as ToCa and FORA do; None for the first step only.

    Returns:
        The share of tokens that each block recomputes at each step.

    Raises:
        InputError: an option is out of range, or the full steps take more than the budget.

    Source:
        The baselines of arXiv 2604.03674; "Accelerating Diffusion Transformers with Token-wise Feature Caching"
        (ToCa), arXiv 2410.05317.

    Example:
        >>> from assay.compress import hand_keep
        >>> hand_keep(4, 1, 10, cycle=2).T
        tensor([[1.0000, 0.2500, 1.0000, 0.2500]])
    """
    levels, u = _levels(keep_levels, units)
    for name, value in (("steps", steps), ("blocks", blocks), ("cycle", cycle if cycle is not None else 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name} is {value!r}: give a whole number from 1")
    full = torch.arange(steps) % (cycle or steps) == 0
    rest, others = budget - int(full.sum()) * blocks * int(u[-1]), int((~full).sum()) * blocks
    if rest < 0:
        raise InputError(f"budget {budget} units cannot be met: the full steps alone need {budget - rest}")
    keep = torch.ones(steps, blocks)
    if others:
        # The mix of levels nearest to the mean, each level then at even distances.
        distance = torch.from_numpy((u - rest / others) ** 2).expand(others, -1)
        counts = torch.bincount(allocate_sparsity(distance, u.tolist(), rest), minlength=len(u))
        place = torch.cat([(torch.arange(int(n)) + 0.5) / max(int(n), 1) for n in counts])
        level = torch.arange(len(u)).repeat_interleave(counts)[place.argsort(stable=True)]
        keep[~full] = torch.tensor(levels)[level].view(-1, blocks)
    return keep


# ---- which tokens ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Importance:
    """How the tokens to recompute are chosen.

    Attributes:
        signal: "attention" is the attention that a token received when the block's self-attention was last computed
            (blocks without `BlockSpec.attend` go by age alone); "similarity" is 1 − the cosine between a token's input
            and the input that it was last recomputed from; "norm" is the norm of its input.
        grid: height and width of the tokens, for the spatial bonus; None for no bonus.
        bonus: what the best token of each 2 × 2 patch gets on top, as a share of its score.
        period: steps after which a token that was not recomputed counts as old.
        age_weight: weight of age / period; 0 lets tokens starve.
        halves: parts of the batch that share the choice of tokens: 2 where it holds the conditional and the
            unconditional half of classifier-free guidance, one after the other.
    """

    signal: Signal = "attention"
    grid: tuple[int, int] | None = None
    bonus: float = 0.6
    period: int = 4
    age_weight: float = 0.25
    halves: int = 1

    def __post_init__(self) -> None:
        if self.signal not in ("attention", "similarity", "norm"):
            raise InputError(f'signal is {self.signal!r}: use "attention", "similarity" or "norm"')
        if self.period < 1 or self.halves < 1:
            raise InputError(f"period is {self.period} and halves is {self.halves}: give numbers from 1")
        if not (self.age_weight >= 0 and self.bonus >= 0):
            raise InputError(f"age_weight is {self.age_weight} and bonus is {self.bonus}: give numbers from 0")


def token_importance(
    ages: Int[Tensor, "batch tokens"],
    signal: Float[Tensor, "batch tokens"] | None = None,
    entropy: Float[Tensor, "batch tokens"] | None = None,
    rule: Importance = Importance(),
) -> Float[Tensor, "batch tokens"]:
    """How much each token wants to be recomputed.

    signal / ‖signal‖ − entropy / ‖entropy‖ + age_weight · age / period, norms over an image's tokens; then the bonus.

    Args:
        ages: steps since each token was recomputed.
        signal: attention received, or another signal of `Importance`; not negative.
        entropy: of each token's cross-attention, in nat; a token that reads the text sharply comes first.
        rule: weights, grid and bonus.

    Returns:
        Scores in float32; where halves share the choice, the same for all of them.

    Raises:
        InputError: shapes disagree, the grid has another number of tokens, or the halves do not part the batch.

    Source:
        arXiv 2604.03674, after ToCa, arXiv 2410.05317.

    Example:
        >>> import torch
        >>> from assay.compress import token_importance
        >>> token_importance(torch.tensor([[0, 1, 2, 3]]), torch.ones(1, 4))
        tensor([[0.5000, 0.5625, 0.6250, 0.6875]])
    """
    score = rule.age_weight / rule.period * ages.float()
    for part, sign in ((signal, 1.0), (entropy, -1.0)):
        if part is None:
            continue
        if part.shape != ages.shape:
            raise InputError(
                f"a signal has shape {tuple(part.shape)} and the ages {tuple(ages.shape)}: give them alike"
            )
        score = score + sign * nn.functional.normalize(part.float(), dim=1)
    if rule.halves > 1:
        if len(score) % rule.halves:
            raise InputError(f"a batch of {len(score)} has no {rule.halves} equal halves: set Importance(halves=…)")
        score = score.unflatten(0, (rule.halves, -1)).mean(0).repeat(rule.halves, 1)
    if rule.grid is not None and rule.bonus:
        height, width = rule.grid
        if height * width != score.shape[1]:
            raise InputError(f"grid is {rule.grid} and there are {score.shape[1]} tokens: give the tokens' own grid")
        image = score.view(-1, 1, height, width)
        best, at = nn.functional.max_pool2d(image, 2, ceil_mode=True, return_indices=True)
        # Entropy can make a score negative; the bonus still has to raise it.
        score = score.scatter_add(1, at.flatten(1), rule.bonus * best.flatten(1).abs())
    return score


# ---- recomputing some tokens -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockSpec:
    """Where the branches of one block are. Each is called with the tokens first, [batch, tokens, width].

    Attributes:
        mlp: acts on each token by itself.
        attention: self-attention; recomputed where all tokens are, and reused otherwise.
        cross: cross-attention, if there is one: acts on each token by itself, given the text.
        attend: called in place of `attention` with the same arguments; returns its output and the attention that
            each token receives, [batch, tokens]. Without it tokens are chosen by age alone.
        cross_attend: called in place of `cross` likewise; returns its output and the entropy of each token's
            attention, [batch, tokens].
    """

    mlp: nn.Module
    attention: nn.Module | None = None
    cross: nn.Module | None = None
    attend: Callable[..., tuple[Tensor, Tensor]] | None = None
    cross_attend: Callable[..., tuple[Tensor, Tensor]] | None = None


class TokenCache:
    """Runs a diffusion transformer with some tokens of each block recomputed and the others taken from a cache.

    Inside a `with` statement the branches of the blocks are replaced: with all tokens kept they are computed and
    cached, with none the cache is returned, otherwise the most important tokens go through the MLP (and the
    cross-attention) and into the cache, and self-attention is reused. What lies between the branches (norms, gates,
    residuals) always is that of the current step. One `with` holds one run of a sampler, and the model is as it was
    after it. Works on any module whose blocks call their branches as modules; not on a compiled one.

    Args:
        model: called once a step by the sampler.
        blocks: its blocks, first to last.
        keep: the share of tokens that each block recomputes at each step, 0 to 1; the first step in full, because
            nothing is cached before it. Shares do not depend on the number of tokens: a table learned at one
            resolution can be used at another.
        importance: how tokens are chosen.

    Raises:
        InputError: the table does not fit the blocks, its first row is not 1, or a share is none.

    Source:
        arXiv 2604.03674, after ToCa, arXiv 2410.05317.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from assay.compress import BlockSpec, TokenCache
        >>> mlp = nn.Linear(2, 2)
        >>> model = nn.Sequential(mlp)
        >>> with TokenCache(model, [BlockSpec(mlp)], torch.tensor([[1.0], [0.0]])), torch.no_grad():
        ...     first, second = model(torch.zeros(1, 4, 2)), model(torch.ones(1, 4, 2))
        >>> torch.equal(first, second)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[BlockSpec],
        keep: Float[Tensor, "steps blocks"],
        importance: Importance = Importance(),
    ) -> None:
        blocks = _blocks(model, blocks)
        if not isinstance(keep, Tensor) or keep.ndim != 2 or keep.shape[1] != len(blocks) or not len(keep):
            raise InputError(f"keep is {_shape(keep)}: pass a tensor of shape [steps, {len(blocks)} blocks]")
        if not bool(((keep >= 0) & (keep <= 1)).all()):
            raise InputError("keep has entries outside 0 to 1: they are shares of the tokens")
        if not bool((keep[0] == 1).all()):
            raise InputError("the first row of keep is not all 1: at the first step nothing is cached, so keep all")
        self.model = model
        self.blocks = blocks
        self.keep = keep.detach().double().cpu()
        self.importance = importance
        self._run: _Run | None = None

    def __enter__(self) -> TokenCache:
        if self._run is not None:
            raise InputError("this token cache is running: leave its `with` before entering another")
        run = _Run(self.model, self.blocks, self.keep.tolist(), self.importance)
        run.attach()
        self._run = run
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._run is not None
        run, self._run = self._run, None
        run.detach()
        if kind is None:
            run.check_finished()


@dataclass
class _State:
    """What one block remembers from step to step."""

    caches: dict[str, Tensor] = field(default_factory=dict)
    signal: Tensor | None = None
    entropy: Tensor | None = None
    inputs: Tensor | None = None
    ages: Tensor | None = None
    # The tokens of this step, most important first; None until the block's first branch is called.
    order: Tensor | None = None


class _Run:
    """One run of a sampler through replaced branches.

    With `levels` and `chances` all tokens are computed, and a mask that carries a gradient to the chances blends them
    with the cached ones; the values are those of the plain run. `straight_through=False` blends by the chances
    themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[BlockSpec],
        keep: Sequence[Sequence[float]],
        rule: Importance,
        *,
        levels: Tensor | None = None,
        chances: Tensor | None = None,
        straight_through: bool = True,
        recompute: bool = False,
    ) -> None:
        self.model, self.blocks, self.keep, self.rule = model, blocks, keep, rule
        self.levels, self.chances = levels, chances
        self.straight_through, self.recompute = straight_through, recompute
        self.states = [_State() for _ in blocks]
        self.watched = self._watch(chances is not None)
        self.step = -1
        self._replaced: list[nn.Module] = []
        self._counter: Any = None

    def __enter__(self) -> _Run:
        self.attach()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.detach()
        if kind is None:
            self.check_finished()

    def attach(self) -> None:
        branches = [(i, n, m) for i, b in enumerate(self.blocks) for n, m in _branches(b)]
        if any("forward" in vars(m) for _, _, m in branches):
            raise InputError("a branch's forward is replaced already: leave the other token cache first")
        self._counter = self.model.register_forward_pre_hook(self._next_step)
        for i, name, module in branches:
            plain = module.forward
            spec = self.blocks[i]
            other = {"attention": spec.attend, "cross": spec.cross_attend}.get(name)
            call = self._attention if name == "attention" else partial(self._tokenwise, name)
            module.forward = partial(call, i, plain, other)
            self._replaced.append(module)

    def detach(self) -> None:
        for module in self._replaced:
            del module.forward
        self._replaced.clear()
        self._counter.remove()
        self.states = []

    def check_finished(self) -> None:
        if self.step + 1 != len(self.keep):
            raise InputError(
                f"the sampler called the model {self.step + 1} times and the table has {len(self.keep)} steps: "
                "give one row a call"
            )

    def _next_step(self, *_: object) -> None:
        self.step += 1
        if self.step == len(self.keep):
            raise InputError(
                f"the sampler calls the model more than {self.step} times, which are the table's steps: "
                "give one row a call, and one `with` a run"
            )
        for state in self.states:
            state.order = None

    def _watch(self, always: bool) -> list[list[bool]]:
        """Whether a block's attention map is looked at before its attention is next computed, per step and block."""
        looked = [always] * len(self.blocks)
        rows = []
        for row in reversed(self.keep):
            rows.append(looked)
            looked = [always or (0 < v < 1) or (v < 1 and later) for v, later in zip(row, looked)]
        return rows[::-1]

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        return function(*args, **kwargs)

    def _fresh(self, plain: Any, other: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, told = self._call(other, x, *args, **kwargs) if other else (self._call(plain, x, *args, **kwargs), None)
        if not isinstance(out, Tensor) or out.shape[:2] != x.shape[:2]:
            raise InputError(f"a branch returns {_shape(out)} for tokens {_shape(x)}: it has to return tokens alone")
        return out, None if told is None else told.detach().float()

    def _attention(self, i: int, plain: Any, other: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state, full = self._enter(i, x), self._count(i, x) == x.shape[1]
        cached = state.caches.get("attention")
        if cached is not None and self.chances is None and not full:
            return cached.clone()
        fresh, told = self._fresh(plain, other if self._looks(i) else None, x, *args, **kwargs)
        if full:
            state.signal = told if self.rule.signal == "attention" else None
        if cached is not None and self.chances is not None:
            hard = torch.tensor(float(full), device=x.device)
            fresh = self._blend(fresh, cached, hard, self.chances[self.step, i, -1])
        state.caches["attention"] = fresh
        # A caller that scales what it gets in place must not scale the cache.
        return fresh.clone()

    def _tokenwise(self, name: str, i: int, plain: Any, other: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state, kept, tokens = self._enter(i, x), self._count(i, x), x.shape[1]
        cached = state.caches.get(name)
        if cached is None or kept == tokens or self.chances is not None:
            fresh, told = self._fresh(plain, other, x, *args, **kwargs)
            if cached is not None and self.chances is not None:
                rank = self._order(i).argsort(1)
                hard = (rank < kept).float()
                counts = torch.tensor([_round(v, tokens) for v in self.levels.tolist()], device=x.device)
                soft = (rank.unsqueeze(-1) < counts).to(self.chances.dtype) @ self.chances[self.step, i]
                fresh = self._blend(fresh, cached, hard.unsqueeze(-1), soft.unsqueeze(-1))
                if told is not None and state.entropy is not None:
                    told = torch.where(hard.bool(), told, state.entropy)
            state.caches[name] = fresh
        elif kept:
            index = self._order(i)[:, :kept]
            wide = index.unsqueeze(-1)
            fresh, told = self._fresh(plain, other, x.gather(1, wide.expand(-1, -1, x.shape[2])), *args, **kwargs)
            state.caches[name] = cached.scatter(1, wide.expand(-1, -1, cached.shape[2]), fresh.to(cached.dtype))
            told = None if told is None else state.entropy.scatter(1, index, told)
        else:
            told = None
        if told is not None:
            state.entropy = told
        return state.caches[name].clone()

    def _blend(self, fresh: Tensor, cached: Tensor, hard: Tensor, soft: Tensor) -> Tensor:
        # The two soft terms cancel exactly: the mask is 0 or 1, and its gradient is that of the soft one.
        mask = (hard + (soft - soft.detach()) if self.straight_through else soft).to(fresh.dtype)
        return mask * fresh + (1 - mask) * cached

    def _looks(self, i: int) -> bool:
        return self.rule.signal == "attention" and self.watched[self.step][i]

    def _count(self, i: int, x: Tensor) -> int:
        return _round(self.keep[self.step][i], x.shape[1])

    def _order(self, i: int) -> Tensor:
        order = self.states[i].order
        assert order is not None
        return order

    @torch.no_grad()
    def _enter(self, i: int, x: Tensor) -> _State:
        """The block's state; at its first branch of a step, its tokens are put in order and grow older."""
        if self.step < 0:
            raise InputError("a block runs before the model was called: the sampler has to call the model itself")
        if x.ndim != 3:
            raise InputError(f"a branch of block {i} is called with {_shape(x)}: tokens are [batch, tokens, width]")
        state = self.states[i]
        if state.order is not None:
            return state
        if state.ages is None:
            state.ages = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        elif state.ages.shape != x.shape[:2]:
            raise InputError(
                f"block {i} has tokens {tuple(x.shape[:2])} and had {tuple(state.ages.shape)} a step before: "
                "batch and tokens have to stay as they are within a run"
            )
        kept, tokens = self._count(i, x), x.shape[1]
        if self.chances is None and kept in (0, tokens):
            state.order = torch.arange(tokens, device=x.device).expand(len(x), -1)
        else:
            score = token_importance(state.ages, self._signal(state, x), state.entropy, self.rule)
            state.order = score.argsort(dim=1, descending=True, stable=True)
        index = state.order[:, :kept]
        state.ages = (state.ages + 1).scatter(1, index, 0)
        if self.rule.signal == "similarity":
            wide = index.unsqueeze(-1).expand(-1, -1, x.shape[2])
            now = x.detach()
            state.inputs = now if state.inputs is None else state.inputs.scatter(1, wide, now.gather(1, wide))
        return state

    def _signal(self, state: _State, x: Tensor) -> Tensor | None:
        if self.rule.signal == "norm":
            return x.float().norm(dim=-1)
        if self.rule.signal == "similarity":
            if state.inputs is None:
                return None
            return 1 - nn.functional.cosine_similarity(x.float(), state.inputs.float(), dim=-1)
        return state.signal


# ---- learning the table ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiffSparseResult(Result):
    """A learned table and how it was reached.

    Attributes:
        keep: share of tokens that each block recomputes at each step, [steps, blocks]; give it to `TokenCache`.
        costs: the learned cost of each level in each cell, −log of its chance, [steps, blocks, levels]. Those of the
            first step, which is always full, were not learned.
        keep_levels: the levels.
        units: what each level takes from the budget.
        budget: units that were to be spent.
        spent: units that the table takes.
        target: share of the units that was to be saved.
        realised: share of the units that the table saves; it differs from `target` by rounding.
        full_steps: the steps that stage 1 ended with in full.
        losses: the loss of every iteration, [iterations].
    """

    keep: Float[Tensor, "steps blocks"]
    costs: Float[Tensor, "steps blocks levels"]
    keep_levels: tuple[float, ...]
    units: tuple[int, ...]
    budget: int
    spent: int
    target: float
    realised: float
    full_steps: tuple[int, ...]
    losses: Float[Tensor, "iterations"]

    def table(self) -> Table:
        """One row a step: what its blocks recompute."""
        columns = (
            Column("step", "", "calls of the model, from 0"),
            Column("kept", "", "mean share of tokens that the blocks recompute"),
            Column("full blocks", "", "blocks that recompute all tokens, self-attention included"),
            Column("idle blocks", "", "blocks that recompute nothing"),
        )
        rows = tuple(
            (t, row.mean().item(), int((row == 1).sum()), int((row == 0).sum())) for t, row in enumerate(self.keep)
        )
        return Table(columns, rows, f"{1 - self.realised:.0%} of the units kept")

    def figure(self) -> Figure:
        """The table as a heat map, steps across and blocks up."""
        from plotly.graph_objects import Figure, Heatmap

        figure = Figure(
            Heatmap(
                z=self.keep.T.tolist(), zmin=0, zmax=1, colorscale="Blues", xgap=1, ygap=1, colorbar={"title": "kept"}
            )
        )
        figure.update_layout(template="plotly_white", height=360, xaxis_title="step", yaxis_title="block")
        return figure


def diffsparse(
    model: nn.Module,
    sampler: Callable[..., Tensor],
    blocks: Sequence[BlockSpec],
    draw: Callable[[torch.Generator], tuple[Any, ...]],
    *,
    steps: int,
    target: float = 0.5,
    keep_levels: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    units: Sequence[int] | None = None,
    iterations: int = 1000,
    stages: Literal[1, 2] = 2,
    full_steps: int | None = None,
    delta: float = 10.0,
    lr: float = 0.1,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss,
    importance: Importance = Importance(),
    checkpointing: bool = False,
    seed: int = 0,
) -> DiffSparseResult:
    """Learns how many tokens each block recomputes at each step, within one budget for the whole run.

    Every iteration draws noise, samples with the full model and with the current table, and moves the costs of the
    levels against the loss between the two; `allocate_sparsity` makes the table of the costs. The model is neither
    trained nor changed.

    The gradient passes straight through the choice: the hard mask of recomputed tokens moves with the mask expected
    under chances p ∝ exp(−C − λu), where λ makes the expected units equal to the budget (it shifts the costs by the
    same constant for every table). It is averaged over iterations and scaled as a whole, not entry by entry as Adam
    does, because what counts is which cell gains most from a unit. Stage 1 learns beside it which steps to do in full, and makes full levels cheaper by `delta`
    there; stage 2 starts from that and lets go of full steps that do not pay.

    Args:
        model: in evaluation mode.
        sampler: called as `sampler(model, *draw(generator))`; calls the model `steps` times and returns samples with
            their gradient (not under `torch.no_grad`).
        blocks: the model's blocks, first to last.
        draw: draws the noise and conditions of one batch on the device of the model.
        steps: calls of the model in one run.
        target: share of the units to save, 0 to below 1.
        keep_levels: shares of tokens to choose from, ascending, the last 1.
        units: what each level takes from the budget; 0, 1, 2, … by default, which counts kept tokens. Self-attention
            runs at the last level only: give whole numbers in proportion to the operations to count those.
        iterations: how many, half of them in each stage.
        stages: 2, or 1 to learn the levels alone.
        full_steps: full steps of stage 1, the first one included; by default as many as half of the budget pays for.
        delta: how much cheaper stage 1 makes full levels, in nat.
        lr: root mean square of the first changes of the costs, in nat.
        loss: of the sparse and the full samples, a scalar; a perceptual distance does better than the default.
        importance: how tokens are chosen.
        checkpointing: recompute the branches in the backward pass, for less memory.
        seed: of the generator that `draw` gets.

    Returns:
        The table and the course of its learning.

    Raises:
        InputError: an option is out of range, the budget cannot be met, the model is in training mode, or the sampler
            gives no gradient or calls the model another number of times.

    Source:
        "DiffSparse: Accelerating Diffusion Transformers with Learned Token Sparsity", arXiv 2604.03674.

    Example:
        >>> from functools import partial
        >>> from assay.compress import BlockSpec, diffsparse
        >>> from assay.reference.tiny_dit import draw_noise, euler, open_model
        >>> model = open_model()
        >>> blocks = [BlockSpec(b.mlp, b.attention, attend=b.attention.attend) for b in model.blocks]
        >>> found = diffsparse(model, partial(euler, steps=4), blocks, partial(draw_noise, 2), steps=4, iterations=2)
        >>> found.keep.shape, found.realised
        (torch.Size([4, 4]), 0.5)
    """
    blocks = _blocks(model, blocks)
    levels, u = _levels(keep_levels, units)
    budget, rest = _budget(steps, len(blocks), u, target)
    n_full = _full_steps(full_steps, steps, len(blocks), u, budget)
    if stages not in (1, 2):
        raise InputError(f"stages is {stages!r}: use 1 or 2")
    if not isinstance(iterations, int) or isinstance(iterations, bool) or iterations < stages:
        raise InputError(f"iterations is {iterations!r}: give a whole number, at least one a stage")
    if not (math.isfinite(delta) and delta >= 0 and math.isfinite(lr) and lr > 0):
        raise InputError(f"delta is {delta} and lr is {lr}: give a number from 0 and one above 0")
    if model.training:
        raise InputError("model is in training mode, and dropout would be taken for the cost of caching: call .eval()")

    streams = generator(seed, "diffsparse")
    mean = rest / max((steps - 1) * len(blocks), 1) / u[-1]
    # Dearer by the square of the distance from the mean: training begins at the even table.
    theta = torch.from_numpy((u / u[-1] - mean) ** 2).float().expand(steps, len(blocks), -1).clone().requires_grad_()
    grid = torch.arange(n_full) * steps // n_full
    phi = torch.zeros(steps, 2).index_put_((grid, torch.tensor(0)), torch.tensor(_STEP_SLOPE)).requires_grad_()
    descents = [_Descent(theta, lr), _Descent(phi, lr)]
    chosen = torch.tensor([0])
    switch = iterations // 2 if stages == 2 else 0
    losses = []
    for iteration in range(iterations):
        if iteration == switch and switch:
            chosen = _cheapest_steps(phi, n_full)
            with torch.no_grad():
                theta[chosen, :, -1] -= delta
        first = iteration < switch
        chances = _chances(theta, u, rest)
        shifted = theta
        if first:
            picked = _cheapest_steps(phi, n_full)
            shifted = _shift(theta, picked, delta)
            full = (-phi).softmax(-1)[:, 1].view(-1, 1, 1)
            chances = full * nn.functional.one_hot(torch.tensor(len(u) - 1), len(u)) + (1 - full) * chances
        table = _table(shifted, u, rest)
        arguments = draw(streams)
        with torch.no_grad():
            teacher = sampler(model, *arguments)
        run = _Run(
            model,
            blocks,
            [[levels[s] for s in row] for row in table.tolist()],
            importance,
            levels=torch.tensor(levels),
            chances=chances.to(teacher.device),
            recompute=checkpointing,
        )
        with run:
            student = sampler(model, *arguments)
            if not student.requires_grad and steps > 1:
                raise InputError("the sampler's result has no gradient: it must not run under torch.no_grad")
        value = loss(student, teacher)
        if not torch.isfinite(value):
            raise InputError(
                f"the loss is {value.item()} at iteration {iteration}: the sampler's results are not finite"
            )
        losses.append(value.detach().float().cpu())
        if steps > 1:
            for descent, gradient in zip(descents, torch.autograd.grad(value, [theta, phi], allow_unused=True)):
                descent.step(gradient)
    final = theta.detach()
    table = _table(final, u, rest)
    spent = int(u[table.numpy()].sum())
    return DiffSparseResult(
        keep=torch.tensor(levels)[table],
        costs=-(-final).log_softmax(-1),
        keep_levels=levels,
        units=tuple(u.tolist()),
        budget=budget,
        spent=spent,
        target=target,
        realised=1 - spent / (steps * len(blocks) * int(u[-1])),
        full_steps=tuple(chosen.tolist()),
        losses=torch.stack(losses),
    )


class _Descent:
    """Gradient descent with momentum, its step scaled by the running size of the whole gradient."""

    def __init__(self, parameter: Tensor, lr: float) -> None:
        self.parameter, self.lr = parameter, lr
        self.mean, self.square, self.weight = torch.zeros_like(parameter), 0.0, 0.0

    @torch.no_grad()
    def step(self, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        self.mean.lerp_(gradient, 1 - _MOMENTUM)
        self.square += (1 - _MOMENTUM) * (gradient.double().square().mean().item() - self.square)
        self.weight += (1 - _MOMENTUM) * (1 - self.weight)
        if self.square:
            self.parameter -= self.lr * self.mean / math.sqrt(self.square * self.weight)


def _chances(theta: Tensor, units: np.ndarray, rest: int) -> Float[Tensor, "steps blocks levels"]:
    """softmax(−theta − λ units), where λ makes the units expected after the first step those of the budget."""
    u = torch.from_numpy(units).to(theta.dtype)
    low, high = -1.0, 1.0

    def expected(at: float) -> float:
        return ((-theta[1:].detach() - at * u).softmax(-1) @ u).double().sum().item()

    if not int(units[0]) < rest / max(theta[1:, :, 0].numel(), 1) < int(units[-1]):
        return (-theta).softmax(-1)
    while expected(low) < rest:
        low *= 2
    while expected(high) > rest:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) > rest else (low, middle)
    return (-theta - (low + high) / 2 * u).softmax(-1)


def _shift(theta: Tensor, picked: Tensor, delta: float) -> Tensor:
    """The costs with full levels cheaper in the picked steps."""
    shift = torch.zeros_like(theta)
    shift[picked, :, -1] = delta
    return theta - shift


def _table(theta: Tensor, units: np.ndarray, rest: int) -> Int[Tensor, "steps blocks"]:
    """The levels of least cost, the first step in full."""
    steps, blocks, levels = theta.shape
    table = torch.full((steps, blocks), levels - 1)
    if steps > 1:
        cost = -(-theta[1:].detach()).log_softmax(-1).flatten(0, 1)
        table[1:] = allocate_sparsity(cost, units.tolist(), rest).view(steps - 1, blocks)
    return table


def _cheapest_steps(phi: Tensor, n: int) -> Int[Tensor, "n"]:
    """The first step, and of the others the n − 1 that cost least in full."""
    if n == 1:
        return torch.tensor([0])
    cost = -(-phi[1:].detach()).log_softmax(-1)
    full = allocate_sparsity(cost, (0, 1), n - 1)
    return torch.cat([torch.tensor([0]), full.nonzero()[:, 0] + 1])


# ---- checks ------------------------------------------------------------------------------------------------------


def _round(share: float, tokens: int) -> int:
    # Shares come in float32 and float64: a half has to be a half in both.
    return int(share * tokens + 0.5 + 1e-5)


def _shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _whole(name: str, values: Sequence[int], n: int) -> np.ndarray:
    found = np.asarray(values)
    if found.shape != (n,) or not np.issubdtype(found.dtype, np.integer) or (found < 0).any():
        raise InputError(f"{name} is {values!r}: give {n} whole numbers from 0")
    return found.astype(np.int64)


def _levels(keep_levels: Sequence[float], units: Sequence[int] | None) -> tuple[tuple[float, ...], np.ndarray]:
    levels = tuple(float(v) for v in keep_levels)
    if len(levels) < 2 or levels[0] < 0 or levels[-1] != 1 or not all(a < b for a, b in itertools.pairwise(levels)):
        raise InputError(f"keep_levels is {tuple(keep_levels)}: give shares from 0 ascending to 1, at least two")
    u = np.arange(len(levels)) if units is None else _whole("units", units, len(levels))
    if (np.diff(u) <= 0).any():
        raise InputError(f"units is {tuple(units or ())}: give them ascending, one a level")
    return levels, u


def _budget(steps: int, blocks: int, units: np.ndarray, target: float) -> tuple[int, int]:
    """Units to spend in all, and after the first step."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise InputError(f"steps is {steps!r}: give the number of times that the sampler calls the model")
    if not 0 <= target < 1:
        raise InputError(f"target is {target}: give the share of the units to save, from 0 to below 1")
    budget = round((1 - target) * int(units[-1]) * steps * blocks)
    first = int(units[-1]) * blocks
    if budget < first:
        raise InputError(f"budget {budget} units cannot be met: the first step alone needs {first}; lower the target")
    least = first + (steps - 1) * blocks * int(units[0])
    if budget < least:
        raise InputError(f"budget {budget} units cannot be met: the lowest levels alone need {least}")
    return budget, budget - first


def _full_steps(asked: int | None, steps: int, blocks: int, units: np.ndarray, budget: int) -> int:
    """Full steps of stage 1."""
    spare = budget - steps * blocks * int(units[0])
    affordable = min(steps, spare // (blocks * int(units[-1] - units[0])))
    if asked is None:
        return max(1, affordable // 2)
    if not isinstance(asked, int) or isinstance(asked, bool) or not 1 <= asked <= affordable:
        raise InputError(f"full_steps is {asked!r}: the budget of {budget} units pays for 1 to {affordable}")
    return asked


def _branches(block: BlockSpec) -> list[tuple[str, nn.Module]]:
    found = (("attention", block.attention), ("cross", block.cross), ("mlp", block.mlp))
    return [(name, module) for name, module in found if module is not None]


def _blocks(model: nn.Module, blocks: Sequence[BlockSpec]) -> tuple[BlockSpec, ...]:
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: pass a torch module")
    blocks = tuple(blocks)
    if not blocks or not all(isinstance(b, BlockSpec) for b in blocks):
        raise InputError("blocks has to hold one BlockSpec a block, and at least one")
    modules = [m for b in blocks for _, m in _branches(b)]
    if len({id(m) for m in modules}) < len(modules):
        raise InputError("blocks names a module twice: each branch needs a module of its own")
    inside = {id(m) for m in model.modules()}
    if not all(id(m) in inside for m in modules):
        raise InputError("blocks names a module that is not in the model: take the branches from this model")
    return blocks
