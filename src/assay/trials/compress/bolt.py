"""Does a student taught the teacher's preferences, with work spent where a router expects it to help, answer better?

Teacher and student are small bag-of-words models trained here. The student reads the beginning of a question; what it
can do beyond that costs extra: read all of it (HR), ask solved questions of the same type (tmRAG), or answer several
random parts and average (QD).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor, nn

from assay.compress import (
    BudgetRouter,
    OptionLog,
    RoutingResult,
    odd_loss,
    option_metrics,
    option_probs,
    option_temperature,
    same_type_neighbours,
)
from assay.core.errors import InputError
from assay.core.seeds import generator, rng
from assay.reference import builtin
from assay.reference.questions import Questions, read_questions
from assay.trials import Arm, Metric, Trial
from assay.trials._trial import Budget, Measured

COSTS = {"HR": 0.50, "tmRAG": 0.30, "QD": 0.35}
_LEAST = 400
_TEACHER_TEMPERATURE = 2.0
_NEIGHBOURS = 4
_ROUNDS, _PART = 3, 0.7
_VOTES = (0.0, 0.5, 1.0, 2.0, 4.0)
_LONGEST_TEXT = 64


@dataclass(frozen=True)
class Coded:
    """Questions as numbers.

    Attributes:
        words: hashed words of each question, 0 for none, [n, words].
        start: how many of them the first pass reads.
        options: row of each option in the list of all, −1 for none, [n, options].
        answer: index of the right option.
        kind: type of question.
        vectors: TF-IDF of the beginning, for retrieval, [n, dim].
    """

    words: Tensor
    start: int
    options: Tensor
    answer: np.ndarray
    kind: np.ndarray
    vectors: np.ndarray

    def __len__(self) -> int:
        return len(self.answer)


@dataclass(frozen=True)
class Data:
    """What all arms of one seed share.

    Attributes:
        train: questions that the student learns from, and may look up later.
        preferences: the teacher's distributions over their options.
        fit: questions that students are chosen, calibrated and routers fitted on.
        tune: questions that thresholds are set on.
        test: questions that the verdict is on.
        names: hashed words of every different option, [all, words].
    """

    train: Coded
    preferences: Tensor
    fit: Coded
    tune: Coded
    test: Coded
    names: Tensor


class Bag(nn.Module):
    """Scores an option by the product of two bags of hashed words, the question's and the option's."""

    def __init__(self, buckets: int, width: int, seed: int) -> None:
        super().__init__()
        self.buckets = buckets
        self.question, self.option = (
            nn.Parameter(torch.randn(buckets + 1, width, generator=generator(seed, side)) / width**0.5)
            for side in ("question", "option")
        )

    def _bag(self, table: Tensor, words: Tensor) -> Tensor:
        there = (words > 0)[..., None]
        found = nn.functional.embedding(torch.where(words > 0, words % self.buckets + 1, 0), table) * there
        return found.sum(-2) / there.sum(-2).clamp(min=1).sqrt()

    def forward(self, words: Tensor, options: Tensor, names: Tensor) -> Tensor:
        """Scores, [n, options]; -inf for an absent option."""
        named = self._bag(self.option, names)[options]
        scores = torch.einsum("nd,nkd->nk", self._bag(self.question, words), named)
        return scores.masked_fill(options < 0, -torch.inf)


def _hashed(words: list[str], width: int) -> list[int]:
    found = [zlib.crc32(w.encode()) + 1 for w in words[:width]]
    return found + [0] * (width - len(found))


def prepare(source: str, *, seed: int, budget: Budget) -> Data:
    """Reads or draws questions, splits them, trains the teacher on its part and asks it about the student's.

    Args:
        source: "builtin:questions", or a file of questions as `assay.reference.questions.read_questions` takes it.
        seed: of the draw, the split and the teacher.
        budget: "questions", "student", "validation", "words", "teacher_epochs".

    Raises:
        InputError: the file holds no questions, or fewer than 400.
    """
    if str(source).startswith("builtin:"):
        asked = builtin(str(source)).load(n=budget["questions"], seed=seed)
    else:
        asked = read_questions(source, seed=seed, n_options=6)
    if len(asked) < _LEAST:
        raise InputError(f"{source} has {len(asked)} questions: {_LEAST} are needed to teach, tune and test on")
    order = rng(seed, "split").permutation(len(asked))[: budget["questions"]]
    asked = asked.take(order)
    coded, names, student, n_fit, n_tune, n_test = _coded(asked, budget)
    ends = np.cumsum([student, n_fit, n_tune, n_test])
    train, fit, tune, test = (_take(coded, slice(b - s, b)) for b, s in zip(ends, (student, n_fit, n_tune, n_test)))
    lessons = _take(coded, slice(int(ends[-1]), None))
    teacher = Bag(2**12, 32, seed)
    target = torch.from_numpy(lessons.answer)
    _train(
        teacher,
        lessons.words,
        lessons.options,
        names,
        lambda scores, rows: odd_loss(scores, _one_hot(target[rows], scores), None, lessons.options[rows] >= 0).loss,
        rate=1e-2,
        epochs=budget["teacher_epochs"],
        batch=128,
        seed=seed,
    )
    with torch.no_grad():
        scores = teacher(train.words, train.options, names)
    return Data(train, option_probs(scores, _TEACHER_TEMPERATURE), fit, tune, test, names)


def _coded(asked: Questions, budget: Budget) -> tuple[Coded, Tensor, int, int, int, int]:
    texts = [t.lower().split() for t in asked.text]
    width = min(_LONGEST_TEXT, max(map(len, texts)))
    words = torch.tensor([_hashed(t, width) for t in texts])
    known: dict[str, int] = {}
    rows = [[known.setdefault(o, len(known)) for o in options] for options in asked.options]
    most = max(map(len, rows))
    options = torch.tensor([r + [-1] * (most - len(r)) for r in rows])
    # An option is known by its words and by the whole of it.
    spelled = [[*o.lower().replace("_", " ").split()[:15], f"={o}"] for o in known]
    names = torch.tensor([_hashed(o, max(map(len, spelled))) for o in spelled])
    n = len(asked)
    student = min(budget["student"], n // 6)
    n_fit = n_tune = min(budget["validation"], n // 6)
    n_test = min(budget["test"], n // 4)
    # Every word of a question's beginning is in the vocabulary if a question that the student learns from has it.
    start = min(budget["words"], max(2, int(np.median([len(t) for t in texts])) // 2))
    beginnings = [" ".join(t[:start]) for t in texts]
    model = TfidfVectorizer(token_pattern=r"\S+", max_features=2000).fit(beginnings[:student])
    vectors = model.transform(beginnings[: student + n_fit + n_tune + n_test]).toarray()
    coded = Coded(words, start, options, np.asarray(asked.answer), asked.kind, vectors)
    return coded, names, student, n_fit, n_tune, n_test


def _take(coded: Coded, rows: slice) -> Coded:
    return Coded(
        coded.words[rows],
        coded.start,
        coded.options[rows],
        coded.answer[rows],
        coded.kind[rows],
        coded.vectors[rows],
    )


def _one_hot(answer: Tensor, scores: Tensor) -> Tensor:
    return nn.functional.one_hot(answer, scores.shape[1]).to(scores.dtype)


def _train(
    model: Bag,
    words: Tensor,
    options: Tensor,
    names: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    rate: float,
    epochs: int,
    batch: int,
    seed: int,
    watch: Callable[[Bag], float] | None = None,
) -> float:
    """Trains a model, and with `watch` leaves it at the epoch with the least of that; returns this least."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    draws = generator(seed, "batches")
    best, kept = math.inf, None
    for _ in range(epochs):
        for rows in torch.randperm(len(words), generator=draws).split(batch):
            optimiser.zero_grad()
            loss(model(words[rows], options[rows], names), rows).backward()
            optimiser.step()
        if watch is not None and (value := watch(model)) < best:
            best, kept = value, {k: v.clone() for k, v in model.state_dict().items()}
    if kept is not None:
        model.load_state_dict(kept)
    return best


# What each student is taught: the weight of the teacher's distribution, the weight of the label.
def _soft(data: Data) -> tuple[Tensor, float, float]:
    return data.preferences, 1.0, 0.1


def _hard(data: Data) -> tuple[Tensor, float, float]:
    return _one_hot(data.preferences.argmax(1), data.preferences), 1.0, 0.1


def _labels(data: Data) -> tuple[Tensor, float, float]:
    return data.preferences, 0.0, 1.0


def _student(data: Data, lesson: Callable[[Data], tuple[Tensor, float, float]], seed: int, budget: Budget) -> Bag:
    """The student of the learning rate and epoch with the least calibrated loss on validation questions."""
    teacher, lam_kl, lam_ce = lesson(data)
    train, target = data.train, torch.from_numpy(data.train.answer)
    beginnings = train.words[:, : train.start]

    def loss(scores: Tensor, rows: Tensor) -> Tensor:
        there = train.options[rows] >= 0
        return odd_loss(scores, teacher[rows], target[rows], there, lam_kl=lam_kl, lam_ce=lam_ce).loss

    def watch(model: Bag) -> float:
        scores = _scores(model, data.fit, data)
        probs = torch.softmax(torch.from_numpy(scores) / option_temperature(scores, data.fit.answer), 1)
        return float(-probs[np.arange(len(scores)), data.fit.answer].clamp(min=1e-12).log().mean())

    best: tuple[float, Bag | None] = (math.inf, None)
    for rate in budget["rates"]:
        model = Bag(2**11, budget["width"], seed)
        found = _train(
            model,
            beginnings,
            train.options,
            data.names,
            loss,
            rate=rate,
            epochs=budget["epochs"],
            batch=64,
            seed=seed,
            watch=watch,
        )
        if best[1] is None or found < best[0]:
            best = found, model
    assert best[1] is not None
    return best[1]


@torch.no_grad()
def _scores(model: Bag, asked: Coded, data: Data, words: Tensor | None = None) -> np.ndarray:
    words = asked.words[:, : asked.start] if words is None else words
    return model(words, asked.options, data.names).double().numpy()


def _votes(asked: Coded, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """For each option the summed similarity of the nearest solved questions that it was the answer of; affinity."""
    found = same_type_neighbours(asked.vectors, data.train.vectors, asked.kind, data.train.kind, k=_NEIGHBOURS)
    solved = data.train.options.numpy()[np.arange(len(data.train)), data.train.answer][found.index]
    agree = solved[:, None, :] == asked.options.numpy()[:, :, None]
    return (agree * found.similarity[:, None, :]).sum(2), found.affinity


def _log(model: Bag, asked: Coded, data: Data, vote: float, seed: int, name: str) -> OptionLog:
    base = _scores(model, asked, data)
    votes, affinity = _votes(asked, data)
    beginning = asked.words[:, : asked.start]
    draw = rng(seed, "parts", name)
    parts = [
        _scores(model, asked, data, torch.where(torch.from_numpy(draw.random(beginning.shape) < _PART), beginning, 0))
        for _ in range(_ROUNDS)
    ]
    actions = {"HR": _scores(model, asked, data, asked.words), "tmRAG": base + vote * votes, "QD": np.stack(parts, 1)}
    return OptionLog(base, actions, asked.answer, affinity)


class _Random(BudgetRouter):
    """Does actions at random, as often as the budget allows."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(COSTS, **options)
        self._draw = rng(seed, "random actions")

    def gains(self, features: np.ndarray) -> np.ndarray:
        # Times the cost, so that every action is as likely to have the largest utility.
        return self._draw.random((len(features), len(self.costs))) * np.array(list(self.costs.values()))


class _Entropy(BudgetRouter):
    """Does one action where the first pass is least sure."""

    def gains(self, features: np.ndarray) -> np.ndarray:
        return np.repeat(features[:, 2:3], len(self.costs), axis=1)


def _learned(data: Data, logs: dict[str, OptionLog], seed: int, mean_cost: float) -> RoutingResult:
    return BudgetRouter(COSTS).fit(logs["fit"]).tune(logs["tune"], mean_cost).route(logs["test"])


def _random(data: Data, logs: dict[str, OptionLog], seed: int, mean_cost: float) -> RoutingResult:
    return _Random(seed).fit(logs["fit"]).tune(logs["tune"], mean_cost).route(logs["test"])


def _entropy(data: Data, logs: dict[str, OptionLog], seed: int, mean_cost: float) -> RoutingResult:
    """The action that does best on the questions of `fit` at this mean cost."""
    found = []
    for name, cost in COSTS.items():
        router = _Entropy({name: cost}).fit(logs["fit"]).tune(logs["tune"], mean_cost)
        found.append((float((router.route(logs["fit"]).option == logs["fit"].answer).mean()), router))
    return max(found, key=lambda f: f[0])[1].route(logs["test"])


def _all(data: Data, logs: dict[str, OptionLog], seed: int, mean_cost: float) -> RoutingResult:
    everything = 1 + sum(COSTS.values())
    router = BudgetRouter(COSTS, budget=everything, max_rounds=len(COSTS), threshold=-np.inf)
    return router.fit(logs["fit"]).route(logs["test"])


def _none(data: Data, logs: dict[str, OptionLog], seed: int, mean_cost: float) -> RoutingResult:
    return BudgetRouter(COSTS, threshold=np.inf).fit(logs["fit"]).route(logs["test"])


def _run(
    data: Data,
    lesson: Callable[[Data], tuple[Tensor, float, float]],
    route: Callable[[Data, dict[str, OptionLog], int, float], RoutingResult],
    *,
    seed: int,
    budget: Budget,
) -> Measured:
    model = _student(data, lesson, seed, budget)
    base, (votes, _) = _scores(model, data.fit, data), _votes(data.fit, data)
    vote = max(_VOTES, key=lambda v: float(((base + v * votes).argmax(1) == data.fit.answer).mean()))
    parts = {"fit": data.fit, "tune": data.tune, "test": data.test}
    logs = {name: _log(model, asked, data, vote, seed, name) for name, asked in parts.items()}
    answer = data.test.answer
    routed = {cost: route(data, logs, seed, cost) for cost in (1.1, 1.25, 1.5)}
    final = option_metrics(routed[1.25].probs, answer)
    raw, tau = logs["test"].base, option_temperature(base, data.fit.answer)
    first, calibrated = (option_metrics(option_probs(torch.from_numpy(raw), t).numpy(), answer) for t in (1.0, tau))
    return {
        "accuracy": final.accuracy,
        "first-pass accuracy": first.accuracy,
        "accuracy at 1.1": float((routed[1.1].option == answer).mean()),
        "accuracy at 1.5": float((routed[1.5].option == answer).mean()),
        "NLL": final.nll,
        "ECE": final.ece,
        "AURC": final.aurc,
        "over-confident wrong": final.overconfident_wrong,
        "first-pass ECE": calibrated.ece,
        "first-pass ECE, raw": first.ece,
        "mean cost": routed[1.25].mean_cost,
    }


def _arm(name: str, lesson: Any, route: Any, about: str) -> Arm:
    run: Any = partial(_run, lesson=lesson, route=route)
    return Arm(name, run, about)


TRIAL = Trial(
    slug="bolt",
    question="Does a student taught the teacher's preferences answer better, and a learned router spend extra work best?",
    subject="texts",
    builtin="builtin:questions",
    prepare=prepare,
    arms=(
        _arm("odd+router", _soft, _learned, "teacher's distribution and labels; the learned router"),
        _arm("labels+router", _labels, _learned, "labels alone; the learned router"),
        _arm("hard+router", _hard, _learned, "teacher's best option and labels; the learned router"),
        _arm("odd+random", _soft, _random, "teacher's distribution and labels; random actions at the same mean cost"),
        _arm("odd+entropy", _soft, _entropy, "the same; the best action on validation where entropy is largest"),
        _arm("odd+all", _soft, _all, "the same; every action on every question, at a cost of 2.15"),
        _arm("odd", _soft, _none, "the same; the first pass alone, at a cost of 1"),
    ),
    metrics=(
        Metric("accuracy", "higher", "", "share of questions answered rightly at a mean cost of 1.25"),
        Metric("first-pass accuracy", "higher", "", "of the student alone, before any action"),
        Metric("accuracy at 1.1", "higher", "", "at a mean cost of 1.1"),
        Metric("accuracy at 1.5", "higher", "", "at a mean cost of 1.5"),
        Metric("NLL", "lower", "nat", "of the right option, at a mean cost of 1.25"),
        Metric("ECE", "lower", "", "calibration error of the answers at a mean cost of 1.25, 15 bins"),
        Metric("AURC", "lower", "", "area under the risk-coverage curve at a mean cost of 1.25"),
        Metric("over-confident wrong", "lower", "", "share of the wrong answers with a probability of at least 0.7"),
        Metric("first-pass ECE", None, "", "calibration error of the student alone, with its temperature"),
        Metric("first-pass ECE, raw", None, "", "the same without a temperature"),
        Metric("mean cost", None, "first passes", "what a test question cost where 1.25 was aimed at"),
    ),
    budgets={
        "tiny": {
            "questions": 600,
            "student": 60,
            "validation": 80,
            "test": 100,
            "words": 8,
            "width": 8,
            "rates": (1e-2,),
            "epochs": 2,
            "teacher_epochs": 2,
            "seeds": 1,
        },
        "quick": {
            "questions": 4000,
            "student": 600,
            "validation": 600,
            "test": 1500,
            "words": 10,
            "width": 16,
            "rates": (1e-2, 3e-2),
            "epochs": 15,
            "teacher_epochs": 6,
            "seeds": 2,
        },
        "full": {
            "questions": 8000,
            "student": 800,
            "validation": 800,
            "test": 2000,
            "words": 10,
            "width": 16,
            "rates": (1e-2, 3e-2, 1e-1),
            "epochs": 30,
            "teacher_epochs": 8,
            "seeds": 6,
        },
    },
)
