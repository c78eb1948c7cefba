"""Multiple-choice questions in text: made-up ones whose right probabilities are known, and readers of your own."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from assay.core.errors import InputError

KIND = "texts"
ABOUT = "made-up questions with four options each, whose right probabilities are known"

MAX_BYTES = 64 << 20
_SIBLINGS = 5
_VOCABULARY = 800
# Spread of the log-frequencies of words: over families of topics, and within a family over its topics.
_FAMILY = 0.8
_TOPIC = 0.8
_SHORTEST, _LONGEST = 8, 28
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Questions:
    """Questions with their options.

    Attributes:
        text: what is asked.
        options: the options of each question, at least two different strings.
        answer: index of the right option.
        kind: the type of each question, from 0; questions of one type resemble each other.
        posterior: the probability of each option given the words, where it is known.
    """

    text: tuple[str, ...]
    options: tuple[tuple[str, ...], ...]
    answer: Int[np.ndarray, "n"]
    kind: Int[np.ndarray, "n"]
    posterior: Float[np.ndarray, "n options"] | None = None

    def __post_init__(self) -> None:
        for i, (options, answer) in enumerate(zip(self.options, self.answer, strict=True)):
            if len(options) < 2 or len(set(options)) < len(options):
                raise InputError(f"question {i} has options {options!r}: options must be at least 2 distinct strings")
            if not 0 <= answer < len(options):
                raise InputError(f"question {i} has answer {answer}: answer not among options")

    def __len__(self) -> int:
        return len(self.text)

    def take(self, rows: Int[np.ndarray, "m"]) -> Questions:
        """Some of the questions."""
        return Questions(
            tuple(self.text[i] for i in rows),
            tuple(self.options[i] for i in rows),
            self.answer[rows],
            self.kind[rows],
            None if self.posterior is None else self.posterior[rows],
        )


def load(*, n: int = 2000, n_topics: int = 40, n_options: int = 4, seed: int = 0) -> Questions:
    """Draw questions about made-up topics.

    Topics come in families of five, a question's type. Each topic has its own frequencies of 800 made-up words:
    Zipf's, times factors common to its family and its own. A question is 8 to 28 words drawn from its topic; its
    options are that topic's name and those of siblings from the same family, in random order. So the probability of
    each option given the words follows from Bayes' rule.

    Args:
        n: questions.
        n_topics: a multiple of 5.
        n_options: 2 to 5.
        seed: of the language and of the draws.

    Returns:
        Questions with the exact posterior.

    Raises:
        InputError: a size out of range.

    Example:
        >>> one = load(n=3)
        >>> len(one.options[0]), one.posterior.sum(1).round(6).tolist()
        (4, [1.0, 1.0, 1.0])
    """
    if n < 1 or n_topics < _SIBLINGS or n_topics % _SIBLINGS:
        raise InputError(f"n={n} and n_topics={n_topics}: at least 1 question, and topics in families of {_SIBLINGS}")
    if not 2 <= n_options <= _SIBLINGS:
        raise InputError(f"n_options={n_options}: a family has {_SIBLINGS} topics, so give 2 to {_SIBLINGS}")
    rng = np.random.default_rng(seed)
    n_families = n_topics // _SIBLINGS
    logits = (
        -np.log(np.arange(_VOCABULARY) + 10.0)
        + _FAMILY * np.repeat(rng.standard_normal((n_families, _VOCABULARY)), _SIBLINGS, axis=0)
        + _TOPIC * rng.standard_normal((n_topics, _VOCABULARY))
    )
    log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    names = _made_up(_VOCABULARY + n_topics, rng)
    topic = rng.integers(n_topics, size=n)
    length = rng.integers(_SHORTEST, _LONGEST + 1, size=n)
    ends = np.cumsum(np.exp(log_p), axis=1)
    draws = rng.random((n, _LONGEST))
    words = np.empty((n, _LONGEST), dtype=np.int64)
    for t in range(n_topics):
        words[topic == t] = np.searchsorted(ends[t] / ends[t, -1], draws[topic == t], side="right")
    # The right topic first, then siblings at random; then all in random order.
    siblings = rng.permuted(np.tile(np.arange(1, _SIBLINGS), (n, 1)), axis=1)[:, : n_options - 1]
    offered = np.column_stack([np.zeros(n, dtype=np.int64), siblings])
    offered = topic[:, None] // _SIBLINGS * _SIBLINGS + (topic[:, None] + offered) % _SIBLINGS
    order = np.argsort(rng.random(offered.shape), axis=1)
    offered = np.take_along_axis(offered, order, axis=1)
    read = np.arange(_LONGEST) < length[:, None]
    evidence = np.stack([(log_p[offered[:, k, None], words] * read).sum(1) for k in range(n_options)], axis=1)
    evidence -= evidence.max(1, keepdims=True)
    posterior = np.exp(evidence) / np.exp(evidence).sum(1, keepdims=True)
    text = tuple(" ".join(names[w] for w in row[:k]) for row, k in zip(words.tolist(), length.tolist(), strict=True))
    options = tuple(tuple(names[_VOCABULARY + t] for t in row) for row in offered.tolist())
    return Questions(text, options, np.argmin(order, axis=1), topic // _SIBLINGS, posterior)


def _made_up(n: int, rng: np.random.Generator) -> list[str]:
    """Different pronounceable words, in random order."""
    syllables = [c + v for c in _CONSONANTS for v in _VOWELS]
    pairs = rng.permutation(len(syllables) ** 2)[:n]
    if n > len(syllables) ** 2:
        raise InputError(f"{n} words are wanted: there are {len(syllables) ** 2}")
    return [syllables[i // len(syllables)] + syllables[i % len(syllables)] for i in pairs.tolist()]


def read_questions(path: str | Path, *, n_options: int = 4, seed: int = 0) -> Questions:
    """Read questions from JSON lines or a table.

    - JSON lines with `question`, `options` (or `choices`) and `answer`: the right option's index, letter or text;
      `type` is taken if it is there.
    - JSON lines with `question`, `answer_matching_behavior` and `answer_not_matching_behavior`: two options.
    - CSV or TSV with a column `text` or `question` and a column `category`, `label`, `intent` or `answer`: the
      options are the right label and others drawn at random.

    Args:
        path: a `.jsonl`, `.ndjson`, `.csv` or `.tsv`, at most 64 MiB.
        n_options: options of a question made from a table.
        seed: of the labels drawn for it.

    Raises:
        InputError: unreadable, not of one of these forms, or a question without a right answer among its options.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} is no file: give questions as JSON lines or a table")
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise InputError(f"{path} is larger than {MAX_BYTES >> 20} MiB: give a part of it")
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: convert it, say with `iconv -t UTF-8`") from error
    if path.suffix.lower() in (".csv", ".tsv"):
        return _table(path, text, n_options, seed)
    return _json_lines(path, text)


def _json_lines(path: Path, text: str) -> Questions:
    asked, offered, answers, kinds = [], [], [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} line {number} is not JSON: one object a line is expected") from error
        if not isinstance(row, dict) or not isinstance(row.get("question"), str):
            raise InputError(f"{path} line {number} has no text under 'question'")
        options, answer = _row(row, f"{path} line {number}")
        asked.append(row["question"])
        offered.append(options)
        answers.append(answer)
        kinds.append(str(row.get("type", "")))
    if not asked:
        raise InputError(f"{path} is empty")
    return Questions(tuple(asked), tuple(offered), np.array(answers), np.unique(kinds, return_inverse=True)[1])


def _row(row: dict[str, Any], place: str) -> tuple[tuple[str, ...], int]:
    if "answer_matching_behavior" in row:
        answer, other = row["answer_matching_behavior"], row.get("answer_not_matching_behavior")
        # In alphabetical order, so that the place of an option does not tell whether it is right.
        options: Any = sorted((str(answer), str(other)))
    else:
        options = row.get("options", row.get("choices"))
        answer = row.get("answer")
    strings = isinstance(options, list) and all(isinstance(o, str) for o in options)
    if not strings or len(options) < 2 or len(set(options)) < len(options):
        raise InputError(f"{place}: options must be at least 2 distinct strings")
    if isinstance(answer, str) and answer in options:
        return tuple(options), options.index(answer)
    if isinstance(answer, str) and len(answer) == 1 and answer in _LETTERS[: len(options)]:
        return tuple(options), _LETTERS.index(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(options):
        return tuple(options), answer
    raise InputError(f"{place}: answer {answer!r} not among options; give its index from 0, its letter or its text")


def _table(path: Path, text: str, n_options: int, seed: int) -> Questions:
    if n_options < 2:
        raise InputError(f"n_options={n_options}: a choice needs at least 2")
    lines = text.splitlines()
    if not lines:
        raise InputError(f"{path} is empty")
    delimiter = max(",;\t", key=lines[0].count)
    try:
        rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))
    except csv.Error as error:
        raise InputError(f"{path} is no readable table: {error}") from error
    names = list(rows[0]) if rows else []
    asked = _column(path, names, ("text", "question"))
    label = _column(path, names, ("category", "label", "intent", "answer"))
    rows = [r for r in rows if r[asked] and r[label]]
    labels, at = np.unique([r[label] for r in rows], return_inverse=True)
    if len(labels) < n_options:
        raise InputError(f"{path} has {len(labels)} different labels: {n_options} options need as many")
    rng = np.random.default_rng(seed)
    # Ranks of random numbers, with the right label put first, give distinct labels without a loop.
    order = rng.random((len(rows), len(labels)))
    order[np.arange(len(rows)), at] = -1.0
    offered = np.argpartition(order, n_options - 1, axis=1)[:, :n_options]
    offered = rng.permuted(offered, axis=1)
    answer = (offered == at[:, None]).argmax(1)
    return Questions(
        tuple(r[asked] for r in rows),
        tuple(tuple(row) for row in labels[offered].tolist()),
        answer,
        np.zeros(len(rows), dtype=np.int64),
    )


def _column(path: Path, names: Sequence[str], wanted: tuple[str, ...]) -> str:
    for name in wanted:
        for found in names:
            if found and found.strip().lower() == name:
                return found
    raise InputError(f"{path} has no column {' or '.join(wanted)}: there are {', '.join(map(str, names)) or 'none'}")
