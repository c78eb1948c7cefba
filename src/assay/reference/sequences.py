"""Token sequences with a known rule: parity, copying and associative recall."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from assay.core.errors import InputError

KIND = "sequences"
ABOUT = "token sequences with a target at each scored position: parity, copying, associative recall"

LETTERS = 26
KEYS = 64
# Far above what a trial reads, far below what a hostile file could ask for.
_MAX_BYTES = 2 << 30
_MAX_VOCAB = 1 << 18


@dataclass(frozen=True)
class SequenceTask:
    """Sequences and what to predict after each of their tokens.

    Attributes:
        tokens: inputs, from 0 to `vocab - 1`.
        targets: the right answer at each position, on the same scale.
        mask: True where the answer is scored.
        vocab: number of different tokens.
    """

    tokens: Int[np.ndarray, "rows length"]
    targets: Int[np.ndarray, "rows length"]
    mask: Bool[np.ndarray, "rows length"]
    vocab: int


def load(
    *,
    task: Literal["parity", "copy", "mqar"] = "parity",
    length: int = 16,
    n: int = 1000,
    seed: int = 0,
    min_length: int | None = None,
) -> SequenceTask:
    """Draw sequences of one task.

    - "parity": a start token (2) and `length` bits; the answer after each bit is the parity of all bits so far.
    - "copy": a start token (26), `length` letters, a separator (27), the letters again; the answer from the
      separator on is the next letter, then an end token (28). Padded on the right with 29.
    - "mqar" (multi-query associative recall): `length` pairs of a key (0 to 63) and a value (64 to 127), then all keys
      in another order; the answer after each of those is the key's value.

    Args:
        task: which task.
        length: bits, letters or pairs.
        n: sequences.
        seed: of the draw.
        min_length: draw each length evenly between this and `length`, and pad or stop scoring after it. Default:
            all have `length`.

    Returns:
        Integer and boolean arrays, one row a sequence.

    Raises:
        InputError: an unknown task or a size out of range.

    Source: the synthetic tasks of Selective Rotary Position Embedding, arXiv 2511.17388.

    >>> one = load(task="parity", length=4, n=1, seed=1)
    >>> one.tokens.tolist(), one.targets.tolist()
    ([[2, 0, 1, 1, 1]], [[0, 0, 1, 0, 1]])
    """
    if task not in _DRAW:
        raise InputError(f"task={task!r}: choose one of {', '.join(_DRAW)}")
    if n < 1:
        raise InputError(f"n={n}: must be at least 1")
    shortest = length if min_length is None else min_length
    if not 1 <= shortest <= length:
        raise InputError(f"lengths from {shortest} to {length}: must be at least 1 and rise")
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, length + 1, size=n)
    return _DRAW[task](rng, lengths, length)


def _parity(rng: np.random.Generator, lengths: np.ndarray, length: int) -> SequenceTask:
    bits = rng.integers(0, 2, size=(len(lengths), length))
    tokens = np.pad(bits, ((0, 0), (1, 0)), constant_values=2)
    targets = np.pad(np.cumsum(bits, axis=1) % 2, ((0, 0), (1, 0)))
    at = np.arange(length + 1)
    return SequenceTask(tokens, targets, (at >= 1) & (at <= lengths[:, None]), 3)


def _copy(rng: np.random.Generator, lengths: np.ndarray, length: int) -> SequenceTask:
    begin, separator, end, padding = LETTERS, LETTERS + 1, LETTERS + 2, LETTERS + 3
    letters = rng.integers(0, LETTERS, size=(len(lengths), length))
    many, at = lengths[:, None], np.arange(2 * length + 3)
    # Position 0 is the start, 1..n the letters, n+1 the separator, n+2..2n+1 the letters, 2n+2 the end.
    source = np.where(at <= many, at - 1, at - many - 2).clip(0, length - 1)
    full = np.take_along_axis(letters, source, axis=1)
    full[:, 0] = begin
    full = np.where(at == many + 1, separator, full)
    full = np.where(at == 2 * many + 2, end, full)
    full = np.where(at > 2 * many + 2, padding, full)
    mask = (at[:-1] > many) & (at[:-1] <= 2 * many + 1)
    return SequenceTask(full[:, :-1], full[:, 1:], mask, LETTERS + 4)


def _mqar(rng: np.random.Generator, lengths: np.ndarray, length: int) -> SequenceTask:
    if length > KEYS:
        raise InputError(f"length={length}: mqar has {KEYS} keys and gives each one value")
    rows = len(lengths)
    keys = rng.permuted(np.tile(np.arange(KEYS), (rows, 1)), axis=1)[:, :length]
    values = rng.integers(KEYS, 2 * KEYS, size=(rows, length))
    order = rng.permuted(np.tile(np.arange(length), (rows, 1)), axis=1)
    pairs = np.stack([keys, values], axis=2).reshape(rows, 2 * length)
    tokens = np.concatenate([pairs, np.take_along_axis(keys, order, axis=1)], axis=1)
    targets = np.concatenate([np.zeros_like(pairs), np.take_along_axis(values, order, axis=1)], axis=1)
    at = np.arange(3 * length)
    mask = (at >= 2 * length) & (at < 2 * length + lengths[:, None])
    return SequenceTask(tokens, targets, mask, 2 * KEYS)


_DRAW = {"parity": _parity, "copy": _copy, "mqar": _mqar}


def read_sequences(path: str | Path) -> SequenceTask:
    """Read sequences from an NPZ file with the arrays `tokens`, `targets` and `mask`.

    Args:
        path: the file. `tokens` and `targets` are integers and `mask` booleans, all (rows, length).

    Returns:
        The arrays, with a vocabulary just large enough for them.

    Raises:
        InputError: not such a file, too large, or arrays that do not fit together. Pickled objects are refused.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            held = {i.filename: i.file_size for i in archive.infolist()}
            missing = [k for k in ("tokens", "targets", "mask") if f"{k}.npy" not in held]
            if missing:
                raise InputError(f"{path} has no array {missing[0]!r}: it needs tokens, targets and mask")
            size = sum(held[f"{k}.npy"] for k in ("tokens", "targets", "mask"))
            if size > _MAX_BYTES:
                raise InputError(f"{path} holds {size:,} bytes of arrays: at most {_MAX_BYTES:,} are read")
            tokens, targets, mask = (
                _read_array(archive, k, held[f"{k}.npy"], path) for k in ("tokens", "targets", "mask")
            )
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise InputError(f"{path} is not a readable NPZ file: {error}") from error
    for name, array in (("tokens", tokens), ("targets", targets)):
        if array.ndim != 2 or array.dtype.kind not in "iu":
            raise InputError(f"{name} in {path} is {array.dtype} of shape {array.shape}: expected 2-D integers")
    if mask.dtype != np.bool_:
        raise InputError(f"mask in {path} is {mask.dtype}: expected booleans, True where the target is scored")
    if not tokens.shape == targets.shape == mask.shape:
        raise InputError(
            f"{path} has tokens {tokens.shape}, targets {targets.shape} and mask {mask.shape}: shapes must agree"
        )
    if not mask.any():
        raise InputError(f"mask in {path} scores nothing: set it True where the target counts")
    scored = targets[mask]
    low, high = min(tokens.min(), scored.min()), max(tokens.max(), scored.max())
    if low < 0 or high >= _MAX_VOCAB:
        raise InputError(f"tokens in {path} go from {low} to {high}: they must lie between 0 and {_MAX_VOCAB - 1}")
    # Targets that are not scored may hold any filler, such as -100.
    clean = np.where(mask, targets, 0)
    return SequenceTask(tokens.astype(np.int64), clean.astype(np.int64), mask, int(high) + 1)


def _read_array(archive: zipfile.ZipFile, name: str, size: int, path: Path) -> np.ndarray:
    """One array of the archive, after checking that its header asks for no more than the archive holds."""
    try:
        with archive.open(f"{name}.npy") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
        if dtype.hasobject or int(np.prod(shape, dtype=object)) * dtype.itemsize > size:
            raise InputError(f"{name} in {path} is not a plain array of numbers")
        with archive.open(f"{name}.npy") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name} in {path} cannot be read: {error}") from error
