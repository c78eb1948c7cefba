"""Tasks that need attention by position, by content or by both, and heads whose kind is known by construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from assay.core.errors import InputError
from assay.reference.sequences import SequenceTask

KIND = "sequences"
ABOUT = "look up an item by its index, by its key, or by the last place of its key"


@dataclass(frozen=True)
class LookUp:
    """A list of items and one question about it.

    Attributes:
        keys: what each item is looked up by.
        values: what each item holds.
        query: the question: an index from 0 (index task) or a key.
        answer: the position of the item asked for.
        target: that item's value.
        tokens: the same as one sequence for a language model, the question last.
    """

    keys: Int[np.ndarray, "rows n"]
    values: Int[np.ndarray, "rows n"]
    query: Int[np.ndarray, "rows"]
    answer: Int[np.ndarray, "rows"]
    target: Int[np.ndarray, "rows"]
    tokens: Int[np.ndarray, "rows length"]


@dataclass(frozen=True)
class _Task:
    """A generator of lists.

    Args:
        n: items in a list.
        vocab: number of different symbols.
    """

    n: int
    vocab: int

    def __post_init__(self) -> None:
        if self.n < 2 or self.vocab < 2:
            raise InputError(f"n={self.n} and vocab={self.vocab}: both must be at least 2")

    @property
    def n_tokens(self) -> int:
        """Number of different tokens."""
        return 2 * self.vocab

    def sample(self, batch: int, rng: np.random.Generator) -> LookUp:
        """Draw lists."""
        raise NotImplementedError

    def _finish(
        self,
        keys: Int[np.ndarray, "rows n"],
        values: Int[np.ndarray, "rows n"],
        query: Int[np.ndarray, "rows"],
        answer: Int[np.ndarray, "rows"],
        context: Int[np.ndarray, "rows length"],
        question: Int[np.ndarray, "rows"],
    ) -> LookUp:
        target = np.take_along_axis(values, answer[:, None], axis=1)[:, 0]
        return LookUp(keys, values, query, answer, target, np.column_stack([context, question]))


@dataclass(frozen=True)
class IndexTask(_Task):
    """Symbols s_0 … s_{n−1}, then an index j: answer s_j. Needs attention by position.

    As tokens: the symbols from 0, then the index as token `vocab + j`.

    >>> import numpy as np
    >>> one = IndexTask(n=4, vocab=8).sample(1, np.random.default_rng(0))
    >>> one.tokens.tolist(), one.target.tolist()
    ([[6, 5, 4, 2, 9]], [5])
    """

    @property
    def n_tokens(self) -> int:
        """Number of different tokens."""
        return self.vocab + self.n

    def sample(self, batch: int, rng: np.random.Generator) -> LookUp:
        """Draw lists; every index is asked for equally often on average."""
        symbols = rng.integers(self.vocab, size=(batch, self.n))
        index = rng.integers(self.n, size=batch)
        return self._finish(symbols, symbols, index, index, symbols, self.vocab + index)


@dataclass(frozen=True)
class RetrievalTask(_Task):
    """Pairs of a key and a value in random order, all keys different, then a key: answer its value.

    Needs attention by content. As tokens: each key from 0 and after it its value from `vocab`, then the key asked for.

    >>> import numpy as np
    >>> one = RetrievalTask(n=2, vocab=4).sample(1, np.random.default_rng(1))
    >>> one.tokens.tolist(), one.target.tolist()
    ([[0, 4, 1, 4, 1]], [0])
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab < self.n:
            raise InputError(f"vocab={self.vocab} and n={self.n}: {self.n} different keys need as many symbols")

    def sample(self, batch: int, rng: np.random.Generator) -> LookUp:
        """Draw lists; every position is asked for equally often on average."""
        keys = rng.permuted(np.tile(np.arange(self.vocab), (batch, 1)), axis=1)[:, : self.n]
        values = rng.integers(self.vocab, size=(batch, self.n))
        answer = rng.integers(self.n, size=batch)
        query = keys[np.arange(batch), answer]
        context = np.stack([keys, self.vocab + values], axis=2).reshape(batch, -1)
        return self._finish(keys, values, query, answer, context, query)


@dataclass(frozen=True)
class PartialInductionTask(_Task):
    """Symbols x_0 … x_n with repeats, then a symbol: answer what followed its last occurrence.

    Item i has the key x_i and the value x_{i+1}, so the look-back by one that full induction needs is given, and what
    is left needs content (the symbol) and position (the last). As tokens: the symbols from 0, then the symbol asked
    for as token `vocab + x`. Every symbol that occurs is asked for with equal probability.

    >>> import numpy as np
    >>> one = PartialInductionTask(n=5, vocab=2).sample(1, np.random.default_rng(0))
    >>> one.tokens.tolist(), one.answer.tolist(), one.target.tolist()
    ([[1, 1, 1, 0, 0, 0, 3]], [2], [0])
    """

    def sample(self, batch: int, rng: np.random.Generator) -> LookUp:
        """Draw sequences."""
        symbols = rng.integers(self.vocab, size=(batch, self.n + 1))
        keys, values = symbols[:, :-1], symbols[:, 1:]
        occurs = (keys[:, :, None] == np.arange(self.vocab)).any(axis=1)
        query = np.where(occurs, rng.random((batch, self.vocab)), -1.0).argmax(axis=1)
        answer = self.n - 1 - (keys == query[:, None])[:, ::-1].argmax(axis=1)
        return self._finish(keys, values, query, answer, symbols, self.vocab + query)


TASKS: dict[str, type[_Task]] = {"index": IndexTask, "retrieval": RetrievalTask, "induction": PartialInductionTask}


def load(
    *,
    task: Literal["index", "retrieval", "induction"] = "index",
    n: int = 1000,
    items: int = 8,
    vocab: int = 16,
    seed: int = 0,
) -> SequenceTask:
    """Draw sequences of one task; the last position is the only one that is scored.

    Args:
        task: "index", "retrieval" or "induction", see the classes here.
        n: sequences.
        items: items in a sequence.
        vocab: number of different symbols; "induction" is meant for fewer than there are items.
        seed: of the draw.

    Returns:
        Integer and boolean arrays, one row a sequence. Targets are values from 0.

    Raises:
        InputError: an unknown task or a size out of range.

    Source: the canonical tasks of Decoupling Positional and Symbolic Attention in Transformers, arXiv 2511.11579.

    >>> load(task="index", n=2, items=4, vocab=8).tokens.shape
    (2, 5)
    """
    if task not in TASKS:
        raise InputError(f"task={task!r}: choose one of {', '.join(TASKS)}")
    if n < 1:
        raise InputError(f"n={n}: must be at least 1")
    made = TASKS[task](items, vocab)
    drawn = made.sample(n, np.random.default_rng(seed))
    targets = np.zeros_like(drawn.tokens)
    targets[:, -1] = drawn.target
    mask = np.zeros(drawn.tokens.shape, dtype=bool)
    mask[:, -1] = True
    return SequenceTask(drawn.tokens, targets, mask, made.n_tokens)


def positional_head(
    n: int, *, theta: float, target: int, sharpness: float
) -> tuple[Float[np.ndarray, "2"], Float[np.ndarray, "n 2"]]:
    """A head of one frequency that attends to one position, whatever stands there.

    Args:
        n: keys, at positions 0 … n−1; the query stands at the last.
        theta: the frequency, radians a position.
        target: the position that it attends to most.
        sharpness: c in the logits c·cos(θ·(j − target)).

    Returns:
        The query and the keys, before the rotary embedding; logits are taken without scaling.

    Source: the constructive positional head of arXiv 2511.11579.
    """
    angle = theta * (target - (n - 1))
    return sharpness * np.array([np.cos(angle), np.sin(angle)]), np.tile([1.0, 0.0], (n, 1))


def symbolic_head(
    symbols: Int[np.ndarray, "*batch n"], query: Int[np.ndarray, "*batch"], *, vocab: int, sharpness: float
) -> tuple[Float[np.ndarray, "*batch vocab"], Float[np.ndarray, "*batch n vocab"]]:
    """A head that attends to where one symbol is, wherever that is; it uses no rotation (θ = 0).

    Args:
        symbols: what stands at each position.
        query: the symbol sought.
        vocab: number of different symbols.
        sharpness: the logit of a match; all others are 0.

    Returns:
        The query and the keys; logits are taken without scaling.

    Source: the constructive symbolic head of arXiv 2511.11579.
    """
    one_hot = np.eye(vocab)
    return sharpness * one_hot[query], one_hot[symbols]
