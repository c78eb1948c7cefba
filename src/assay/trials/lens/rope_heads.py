"""Does exchanging blocks of keys tell positional from symbolic heads better than attention distance or entropy?

Kinds are known for heads that are built (closed forms), heads that are trained on a task which only one kind can do,
and the planted heads of the built-in model. On a model without ground truth the scores' reliability is what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from assay.core.text import token_windows
from assay.core.trace import Batch, PatternSlice, Reducer, trace
from assay.lens import block_swap_scores, rope_heads
from assay.reference import checkpoint, ground_truth
from assay.reference._text import sample
from assay.reference.positional_tasks import (
    IndexTask,
    PartialInductionTask,
    RetrievalTask,
    positional_head,
    symbolic_head,
)
from assay.trials._trial import Arm, Budget, Measured, Metric, Trial

_ITEMS = 8
_SYMBOLS = 12
_INDUCTION_ITEMS = 12
_INDUCTION_SYMBOLS = 4
_LEARNED = 0.9
_QUERIES = 4

# What a head may rotate by, radians a position. The middle of the second range is π/n for the lists of `_ITEMS`.
_LOW = (0.0, 0.003, 0.01)
_MIDDLE = (0.25, 0.39, 0.5)
_HIGH = (1.0, 2.0)
_SINGLE = tuple((theta,) for theta in (*_LOW, *_MIDDLE, *_HIGH))
_INDUCTION_ONE = ((0.0,), (0.01,), (0.03,), (0.1,), (0.3,), (1.0,))
_INDUCTION_TWO = ((0.0, 0.1), (0.0, 0.2), (0.0, 0.3))


@dataclass(frozen=True)
class Heads:
    """One head on several prompts.

    Attributes:
        q: queries before the rotary embedding.
        k: keys before the rotary embedding.
        theta: the head's frequencies, radians a position.
        query_position: where the queries stand.
        positional: its kind, None where that is not known.
    """

    q: Tensor
    k: Tensor
    theta: Tensor
    query_position: int
    positional: bool | None


@dataclass(frozen=True)
class _Data:
    built: list[Heads]
    trained: list[Heads]
    slide: list[Heads]
    sweep: dict[str, float]
    model: nn.Module
    halves: tuple[Tensor, Tensor]
    planted: dict[str, tuple[int, int]]


class ToyHead(nn.Module):
    """Attention-only one-head models that are trained side by side and may each use their own frequencies.

    Keys, queries and values are free tables over symbols; the question stands right after the items.

    Args:
        thetas: the frequencies of each member, as many for all.
        n_keys: number of different keys.
        n_queries: number of different questions.
        n_values: number of different values, which are also the answers.
        generator: for the initial values.
    """

    theta: Tensor

    def __init__(
        self,
        thetas: tuple[tuple[float, ...], ...],
        n_keys: int,
        n_queries: int,
        n_values: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.register_buffer("theta", torch.tensor(thetas))
        members, freqs = len(thetas), len(thetas[0])

        def table(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(members, *shape, generator=generator))

        self.keys = table(n_keys, 2 * freqs)
        self.queries = table(n_queries, 2 * freqs)
        self.values = table(n_values, n_values)

    def attend(self, keys: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Queries `[members, batch, 2·freqs]` and keys `[members, batch, n, 2·freqs]`, before the rotary embedding."""
        return self.queries[:, query], self.keys[:, keys]

    def forward(self, keys: Tensor, values: Tensor, query: Tensor) -> Tensor:
        """Logits of the answers, `[members, batch, values]`."""
        q, k = self.attend(keys, query)
        n, freqs = keys.shape[1], self.theta.shape[1]
        # The query at n sees a key at j turned by (j − n)·θ.
        angle = (torch.arange(n) - n)[:, None] * self.theta[:, None]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        k1, k2 = k[..., :freqs], k[..., freqs:]
        q1, q2 = q[:, :, None, :freqs], q[:, :, None, freqs:]
        logits = (q1 * (k1 * cos - k2 * sin) + q2 * (k1 * sin + k2 * cos)).sum(-1)
        return torch.softmax(logits, -1)[:, :, None].matmul(self.values[:, values])[:, :, 0]


def train(
    task: IndexTask | RetrievalTask | PartialInductionTask,
    thetas: tuple[tuple[float, ...], ...],
    *,
    steps: int,
    batch: int,
    seed: int,
) -> tuple[ToyHead, Tensor]:
    """Train one toy head for each set of frequencies on the same batches; returns them and their accuracies."""
    rng = np.random.default_rng(seed)
    n_queries = task.n if isinstance(task, IndexTask) else task.vocab
    heads = ToyHead(thetas, task.vocab, n_queries, task.vocab, torch.Generator().manual_seed(seed))
    optimiser = torch.optim.Adam(heads.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=0.05, total_steps=steps)

    def draw(size: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        drawn = task.sample(size, rng)
        arrays = (drawn.keys, drawn.values, drawn.query, drawn.target)
        keys, values, query, target = (torch.from_numpy(a) for a in arrays)
        return (keys, values, query), target

    for _ in range(steps):
        inputs, target = draw(batch)
        logits = heads(*inputs)
        # Summed over members, whose gradients do not mix.
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.repeat(len(thetas))) * len(thetas)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        inputs, target = draw(4096)
        accuracy = (heads(*inputs).argmax(-1) == target).double().mean(-1)
    return heads, accuracy


def _built(rng: np.random.Generator, n_heads: int, prompts: int) -> list[Heads]:
    """Built heads of both kinds; where they look and how sharply is drawn alike for both."""
    n = 32
    heads = []
    for _ in range(n_heads):
        sharpness = float(np.exp(rng.uniform(np.log(3), np.log(30))))
        theta = float(np.exp(rng.uniform(np.log(0.1), np.log(1.0))))
        q, k = positional_head(n, theta=theta, target=int(rng.integers(n)), sharpness=sharpness)
        noise = 0.05 * rng.standard_normal((prompts, n, 2))
        heads.append(_head(np.tile(q, (prompts, 1)), k + noise, [theta], n - 1, True))

        sharpness = float(np.exp(rng.uniform(np.log(3), np.log(30))))
        theta = float(np.exp(rng.uniform(np.log(1e-4), np.log(1e-2))))
        symbols = rng.integers(8, size=(prompts, n))
        q, k = symbolic_head(symbols, symbols[:, int(rng.integers(n))], vocab=8, sharpness=sharpness)
        heads.append(_head(q, k + 0.05 * rng.standard_normal(k.shape), [theta] * 4, n - 1, False))
    return heads


def _head(q: np.ndarray, k: np.ndarray, theta: list[float], at: int, positional: bool | None) -> Heads:
    return Heads(torch.from_numpy(q), torch.from_numpy(k), torch.tensor(theta).double(), at, positional)


def _slide(rng: np.random.Generator, prompts: int) -> list[Heads]:
    """Heads with random keys and one frequency, from none to fast."""
    q = np.tile([3.0, 0.0], (prompts, 1))
    thetas = [0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
    return [_head(q, 2 * rng.standard_normal((prompts, 32, 2)), [theta], 31, None) for theta in thetas]


def _trained(rng: np.random.Generator, budget: Budget) -> tuple[list[Heads], dict[str, float]]:
    """Toy heads that learned a task which only one kind of head can do, and the accuracy by allowed frequency."""
    how = {"steps": budget["steps"], "batch": budget["batch"]}
    seeds = rng.integers(2**31, size=4).tolist()
    index, retrieval = IndexTask(_ITEMS, _SYMBOLS), RetrievalTask(_ITEMS, _SYMBOLS)
    induction = PartialInductionTask(_INDUCTION_ITEMS, _INDUCTION_SYMBOLS)
    sweep, heads = {}, []
    for name, task, seed in (("index", index, seeds[0]), ("retrieval", retrieval, seeds[1])):
        model, accuracy = train(task, _SINGLE, seed=seed, **how)
        for band, which in (("low", _LOW), ("middle", _MIDDLE), ("high", _HIGH)):
            chosen = [i for i, (theta,) in enumerate(_SINGLE) if theta in which]
            sweep[f"{name}_{band}"] = float(accuracy[chosen].mean())
        drawn = task.sample(budget["prompts"], rng)
        with torch.no_grad():
            q, k = model.attend(torch.from_numpy(drawn.keys), torch.from_numpy(drawn.query))
        heads += [
            Heads(q[i].double(), k[i].double(), model.theta[i].double(), _ITEMS, name == "index")
            for i in range(len(_SINGLE))
            if accuracy[i] >= _LEARNED
        ]
    sweep["induction_one"] = float(train(induction, _INDUCTION_ONE, seed=seeds[2], **how)[1].max())
    sweep["induction_two"] = float(train(induction, _INDUCTION_TWO, seed=seeds[3], **how)[1].max())
    return heads, sweep


def prepare(source: str, *, seed: int, budget: Budget) -> _Data:
    """Build and train the heads of known kind, and load the model with two halves of prompts.

    Args:
        source: a built-in checkpoint or the path of one.
        seed: of the draws and the training.
        budget: one of the trial's budgets.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        InputError: its tokenizer makes too little of the built-in text.
    """
    rng = np.random.default_rng(seed)
    trained, sweep = _trained(rng, budget)
    truth = ground_truth(source)
    planted = {k: truth[f"{k}_head"] for k in ("positional", "induction") if f"{k}_head" in truth}
    opened = checkpoint(source)
    context = budget["context"]
    windows = token_windows(
        opened.tokenizer(), [sample()], tokens=2 * budget["windows"] * context, context=context // 2
    ).input_ids
    # Text that comes twice gives heads which match content something to match.
    start = windows[:, :1]
    prompts = torch.cat([windows, windows[:, 1:] if bool((start == start[0]).all()) else windows], dim=1)
    order = torch.from_numpy(rng.permutation(len(prompts)))[: 2 * budget["windows"]]
    first, second = prompts[order].chunk(2)
    return _Data(
        built=_built(rng, budget["heads"], budget["prompts"]),
        trained=trained,
        slide=_slide(rng, budget["prompts"]),
        sweep=sweep,
        model=opened.load(dtype=torch.float32),
        halves=(first, second),
        planted=planted,
    )


def _swap_score(suffix: str, heads: Heads) -> Tensor:
    scores = block_swap_scores(heads.q, heads.k, theta=heads.theta, query_position=heads.query_position, scaling=1.0)
    return getattr(scores, f"pos{suffix}") - getattr(scores, f"sym{suffix}")


def _attention(heads: Heads) -> tuple[Tensor, Tensor]:
    """Weights `[prompts, n]` of a head and the distances `[n]` of its keys."""
    distance = heads.query_position - torch.arange(heads.k.shape[1])
    angle = -distance[:, None].double() * heads.theta
    freqs = len(heads.theta)
    k1, k2 = heads.k[..., :freqs], heads.k[..., freqs : 2 * freqs]
    turned = torch.cat(
        [k1 * angle.cos() - k2 * angle.sin(), k1 * angle.sin() + k2 * angle.cos(), heads.k[..., 2 * freqs :]], -1
    )
    return torch.softmax((turned @ heads.q[..., None])[..., 0], -1), distance.double()


def _distance(weights: Tensor, distance: Tensor) -> Tensor:
    return weights @ distance


def _entropy(weights: Tensor, distance: Tensor) -> Tensor:
    return torch.special.entr(weights).sum(-1)


class _Rows(Reducer):
    """Means of a function of some rows of attention, `[layers, heads]`."""

    sites = ("attn.pattern",)

    def __init__(self, of: Callable[[Tensor, Tensor], Tensor], rows: list[int]) -> None:
        self.of = of
        self.rows = rows
        self.sums: dict[tuple[int, int], Tensor] = {}
        self.n = 0

    def update(self, site: str, layer: int, value: PatternSlice, batch: Batch) -> None:
        first_head = value.heads.start
        for row in self.rows:
            if value.rows.start <= row < value.rows.stop:
                weights = value.weights[:, :, row - value.rows.start].double()
                found = self.of(weights, row - torch.arange(weights.shape[-1], device=weights.device).double())
                key = (layer, first_head)
                self.sums[key] = self.sums.get(key, 0) + found.sum(0)

    def result(self) -> np.ndarray:
        layers = sorted({layer for layer, _ in self.sums})
        return np.stack(
            [torch.cat([v for (at, _), v in sorted(self.sums.items()) if at == layer]).numpy() for layer in layers]
        )


def _swap_model(suffix: str, model: nn.Module, prompts: Tensor) -> np.ndarray:
    result = rope_heads(model, prompts.split(8), queries=_QUERIES)
    return (getattr(result, f"pos{suffix}") - getattr(result, f"sym{suffix}")).numpy()


def _rows_model(of: Callable[[Tensor, Tensor], Tensor], model: nn.Module, prompts: Tensor) -> np.ndarray:
    tokens = prompts.shape[1]
    rows = _Rows(of, [(tokens * step - 1) // _QUERIES for step in range(1, _QUERIES + 1)])
    trace(model, prompts.split(8), [rows])
    return rows.result() / (len(prompts) * _QUERIES)


def _separation(heads: list[Heads], score: Callable[[Heads], Tensor]) -> float:
    """AUROC of the score of single prompts between the two kinds, turned whichever way is better."""
    if len({h.positional for h in heads}) < 2:
        return math.nan
    scores = [score(h) for h in heads]
    kinds = np.repeat([h.positional for h in heads], [len(s) for s in scores])
    area = float(roc_auc_score(kinds, torch.cat(scores)))
    return max(area, 1 - area)


def _run(
    score: Callable[[Heads], Tensor],
    on_model: Callable[[nn.Module, Tensor], np.ndarray],
    data: _Data,
    *,
    seed: int,
    budget: Budget,
) -> Measured:
    first, second = (on_model(data.model, half) for half in data.halves)
    slide = [float(score(h).mean()) for h in data.slide]
    measured = {
        "separation_trained": _separation(data.trained, score),
        "separation_built": _separation(data.built, score),
        "slide": abs(float(spearmanr(range(len(slide)), slide).statistic)),
        "split_half": float(spearmanr(first.ravel(), second.ravel()).statistic),
        "planted": _planted(first + second, data.planted),
    }
    return measured | data.sweep


def _planted(scores: np.ndarray, planted: dict[str, tuple[int, int]]) -> float:
    """How far apart the model's planted heads rank, turned whichever way is better: 1 is the two ends."""
    if len(planted) < 2:
        return math.nan
    rank = scores.ravel().argsort().argsort().reshape(scores.shape) / (scores.size - 1)
    return abs(float(rank[planted["positional"]] - rank[planted["induction"]]))


def _by_exchange(suffix: str) -> Callable[..., Measured]:
    return partial(_run, partial(_swap_score, suffix), partial(_swap_model, suffix))


def _by_attention(of: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Measured]:
    def score(heads: Heads) -> Tensor:
        return of(*_attention(heads))

    return partial(_run, score, partial(_rows_model, of))


TRIAL = Trial(
    slug="rope-heads",
    question="Does exchanging blocks of keys tell positional from symbolic heads better than attention distance or entropy?",
    subject="checkpoint",
    builtin="builtin:tiny-lm",
    prepare=prepare,
    arms=(
        Arm("rope-heads", _by_exchange(""), "positional minus symbolic score"),
        Arm("rope-heads-centred", _by_exchange("_c"), "the same of the centred scores, which the labels go by"),
        Arm("attention-distance", _by_attention(_distance), "mean distance to where a head attends"),
        Arm("attention-entropy", _by_attention(_entropy), "entropy of a head's attention"),
    ),
    metrics=(
        Metric(
            "separation_trained",
            "higher",
            about="AUROC, on one prompt, between heads trained to look up by index and by key; whichever way is better",
        ),
        Metric("separation_built", "higher", about="the same for heads built as one kind or the other"),
        Metric("slide", "higher", about="rank correlation of the score with the frequency of a head on random keys"),
        Metric("split_half", "higher", about="rank correlation over the model's heads between two halves of prompts"),
        Metric("planted", None, about="distance in rank between the model's planted positional and induction heads"),
        Metric("index_low", None, about="accuracy on look-up by index of heads with θ ≤ 0.01"),
        Metric("index_middle", None, about="the same with θ near π/n"),
        Metric("index_high", None, about="the same with θ ≥ 1"),
        Metric("retrieval_low", None, about="accuracy on look-up by key of heads with θ ≤ 0.01"),
        Metric("retrieval_middle", None, about="the same with θ near π/n"),
        Metric("retrieval_high", None, about="the same with θ ≥ 1"),
        Metric("induction_one", None, about="best accuracy on the last place of a key with one frequency"),
        Metric("induction_two", None, about="the same with θ = 0 and a moderate one"),
    ),
    budgets={
        "quick": {"seeds": 2, "steps": 300, "batch": 32, "prompts": 16, "heads": 8, "windows": 8, "context": 128},
        "full": {"seeds": 5, "steps": 1000, "batch": 256, "prompts": 64, "heads": 24, "windows": 48, "context": 256},
    },
)
