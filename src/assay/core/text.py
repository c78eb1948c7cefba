"""Texts from files, and token windows from texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from assay.core.errors import InputError

# A run reads no more of a file than this, however large the file is.
MAX_CHARACTERS = 64 << 20
_BLOCK = 1 << 16
_PREFERRED = ("text", "content", "document", "body")


def read_texts(path: str | Path, *, column: str | None = None) -> Iterator[str]:
    """Stream the texts of a file: plain text in blocks, JSONL and Parquet row by row.

    Args:
        path: `.jsonl`/`.ndjson`, `.parquet`, or anything else as plain UTF-8 text.
        column: which column holds the text; by default "text", "content", "document", "body", or the only one that
            holds strings.

    Raises:
        InputError: unreadable, not UTF-8, damaged, or no such column.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} is no file: --text takes plain text, JSONL or Parquet")
    reader = {".jsonl": _jsonl, ".ndjson": _jsonl, ".parquet": _parquet}.get(path.suffix.lower(), _plain)
    seen = 0
    try:
        for text in reader(path, column):
            yield text
            seen += len(text)
            if seen >= MAX_CHARACTERS:
                return
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 (byte {error.start} of a block): convert it, say with `iconv -t UTF-8`"
        ) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _plain(path: Path, column: str | None) -> Iterator[str]:
    with path.open(encoding="utf-8") as stream:
        while block := stream.read(_BLOCK):
            yield block


def _jsonl(path: Path, column: str | None) -> Iterator[str]:
    with path.open(encoding="utf-8") as stream:
        number = 0
        while line := stream.readline(MAX_CHARACTERS):
            number += 1
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path} line {number} is not JSON: one object a line is expected") from error
            if isinstance(row, str):
                yield row
                continue
            if not isinstance(row, dict):
                raise InputError(f"{path} line {number} is no JSON object")
            # A text that is null is passed over, as in Parquet.
            strings = [k for k, v in row.items() if isinstance(v, str)] or [k for k, v in row.items() if v is None]
            name = _choose(path, column, strings, list(row))
            value = row.get(name)
            if value is not None:
                if not isinstance(value, str):
                    raise InputError(f"{path} line {number}: column {name!r} holds no string")
                yield value


def _parquet(path: Path, column: str | None) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
        strings = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        name = _choose(path, column, strings, schema.names)
        if name not in strings:
            raise InputError(f"{path}: column {name!r} holds no strings")
        for batch in file.iter_batches(batch_size=256, columns=[name]):
            for value in batch.column(0):
                if value.is_valid:
                    yield value.as_py()
    except pa.ArrowException as error:
        raise InputError(f"{path} is no readable Parquet file: {str(error).splitlines()[0]}") from error


def _choose(path: Path, column: str | None, strings: list[str], every: list[str]) -> str:
    if column is not None:
        if column not in every:
            raise InputError(f"{path} has no column {column!r}: there are {', '.join(map(str, every)) or 'none'}")
        return column
    for name in _PREFERRED:
        if name in strings:
            return name
    if len(strings) == 1:
        return strings[0]
    if not strings:
        raise InputError(f"{path}: no column holds text; the columns are {', '.join(every) or 'none'}")
    raise InputError(f"{path}: which column holds the text: {', '.join(strings)}? Name it 'text'")


@dataclass(frozen=True)
class Windows:
    """Text as token windows.

    Attributes:
        input_ids: one window a row; all are full.
        starts_with_bos: whether the first token of each is the tokenizer's beginning-of-sequence token.
        n_characters: how many characters of text they cover, about (exact when the text was used up).
    """

    input_ids: Int[Tensor, "windows context"]
    starts_with_bos: bool
    n_characters: int

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return self.input_ids.numel()

    def batches(self, size: int) -> Iterator[Int[Tensor, "batch context"]]:
        """The windows in batches of at most `size`."""
        return iter(self.input_ids.split(size))


def token_windows(tokenizer: Any, texts: Iterable[str], *, tokens: int, context: int) -> Windows:
    """Cut texts into full windows of `context` tokens, `tokens` in all at most.

    Texts follow each other without overlap and window borders fall where they fall. Where the tokenizer puts a
    beginning-of-sequence token by itself, every window starts with one. A text shorter than one window gives one
    window of its own length.

    Args:
        tokenizer: a transformers tokenizer.
        texts: read only as far as needed.
        tokens: the number of tokens wanted.
        context: tokens in a window, at least 2.

    Raises:
        InputError: fewer than two tokens of text.
    """
    if context < 2:
        raise InputError(f"--context is {context}: a window needs at least 2 tokens")
    if tokens < 2:
        raise InputError(f"--tokens is {tokens}: at least 2 are needed")
    bos = getattr(tokenizer, "bos_token_id", None)
    plain = tokenizer("a", add_special_tokens=True)["input_ids"]
    lead: list[int] = [bos] if bos is not None and plain[:1] == [bos] else []
    context = min(context, max(tokens, 1 + len(lead)))
    body = context - len(lead)
    wanted = tokens // context * body
    ids: list[int] = []
    characters = 0
    for text in texts:
        characters += len(text)
        # JSON can carry halves of surrogate pairs, which no tokenizer takes.
        text = text.encode("utf-8", "replace").decode("utf-8")
        ids.extend(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if len(ids) >= wanted:
            characters = round(characters * wanted / len(ids))
            break
    if len(lead) + len(ids) < 2:
        raise InputError("the text is empty or shorter than two tokens: give a longer one with --text")
    body = min(body, len(ids))
    n = min(wanted, len(ids)) // body
    rows = torch.tensor(ids[: n * body], dtype=torch.long).view(n, body)
    if lead:
        rows = torch.cat([torch.tensor([lead]).expand(n, 1), rows], dim=1)
    return Windows(rows, bool(lead), characters)
