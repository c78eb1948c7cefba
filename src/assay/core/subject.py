"""What an input is, told from its content, and which methods apply to it. Imports no torch."""

from __future__ import annotations

import csv
import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.core.architectures import facts
from assay.core.catalogue import Method
from assay.core.errors import CheckpointError, InputError

# No JSON file of a model is larger than this.
MAX_JSON = 64 << 20
KINDS = {
    "checkpoint": "a model: a Hugging Face directory or a .gguf",
    "ratings": "who liked what: user, item and rating columns, or a sparse matrix in an NPZ",
    "sequences": "token sequences with targets, in an NPZ",
    "texts": "texts: plain text, JSONL or Parquet",
    "table": "a table: CSV or TSV",
    "arrays": "arrays in an NPZ",
    "images": "a folder of images",
}

_REQUIREMENTS = {
    "causal": "a causal language model",
    "text": "a model that reads tokens",
    "rotary": "rotary position embeddings",
    "attention": "attention heads",
    "mlp": "dense feed-forward layers",
    "diffusion": "a diffusion transformer",
    "known": "an architecture that assay knows",
}
# Where GGUF and transformers call an architecture differently.
_GGUF_HEADER = 24
_GGUF_NAMES = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe"}
_IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}


@dataclass(frozen=True)
class Subject:
    """An input and what was recognised in it.

    Attributes:
        source: the path or built-in name as it was given.
        kind: one of `KINDS`.
        reason: what it was told by.
        facts: of a checkpoint, what `assay.core.architectures.facts` says.
        model_type: of a checkpoint, its architecture.
    """

    source: str
    kind: str
    reason: str
    facts: frozenset[str] = frozenset()
    model_type: str = ""


def recognise(path: str | Path) -> Subject:
    """Tell from its content what a path holds.

    Args:
        path: a file or a directory.

    Raises:
        InputError: there is nothing there, or nothing that any method takes.
        CheckpointError: the `config.json` of a model cannot be read.
    """
    path = Path(path)
    source = str(path)
    try:
        if path.is_dir():
            return _directory(path)
        if not path.is_file():
            raise InputError(f"{path} is no regular file" if path.exists() else f"{path} does not exist")
        with path.open("rb") as stream:
            head = stream.read(1 << 16)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    if head[:4] == b"GGUF":
        if len(head) < _GGUF_HEADER:
            raise InputError(f"{path} is truncated: {len(head)} bytes")
        return _gguf(source, head)
    if head[:4] == b"PAR1":
        return Subject(source, "texts", "a Parquet file")
    if head[:4] == b"PK\x03\x04" or path.suffix == ".npz":
        return _npz(path)
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return Subject(source, "texts", "JSON lines")
    try:
        text = head.decode("utf-8", errors="strict" if len(head) < 1 << 16 else "ignore")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is neither text nor a format that assay reads") from error
    if path.suffix.lower() in (".csv", ".tsv"):
        return _table(path, text)
    if "\0" in text:
        raise InputError(f"{path} is neither text nor a format that assay reads")
    return Subject(source, "texts", "plain text")


def _gguf(source: str, head: bytes) -> Subject:
    found = re.search(rb"general\.architecture\x08\0\0\0(.)\0{7}", head, re.DOTALL)
    length = found.group(1)[0] if found else 0
    name = head[found.end() : found.end() + length].decode("ascii", "replace") if found else "unknown"
    model_type = _GGUF_NAMES.get(name, name)
    told = facts({"model_type": model_type, "architectures": ["ForCausalLM"]})
    return Subject(source, "checkpoint", f"a GGUF file of a {model_type} model", told, model_type)


def _directory(path: Path) -> Subject:
    config = path / "config.json"
    if config.exists():
        parsed = read_json(config)
        model_type = parsed.get("model_type")
        name = model_type if isinstance(model_type, str) else "unknown"
        return Subject(str(path), "checkpoint", f"config.json of a {name} model", facts(parsed), name)
    names = [p.name for p in path.iterdir()]
    if "adapter_config.json" in names:
        return Subject(str(path), "checkpoint", "a LoRA adapter: give its base too", frozenset({"text"}), "")
    if any(Path(n).suffix.lower() in _IMAGES for n in names):
        return Subject(str(path), "images", "a folder with images")
    raise InputError(f"{path} has no config.json and no images: it is nothing that a method takes")


def _npz(path: Path) -> Subject:
    try:
        with zipfile.ZipFile(path) as archive:
            names = {n.removesuffix(".npy") for n in archive.namelist()}
    except (zipfile.BadZipFile, OSError) as error:
        raise InputError(f"{path} is a damaged NPZ file") from error
    if {"tokens", "targets"} <= names:
        return Subject(str(path), "sequences", "an NPZ with tokens and targets")
    if {"data", "indices", "indptr", "shape"} <= names:
        return Subject(str(path), "ratings", "an NPZ with a sparse matrix")
    return Subject(str(path), "arrays", f"an NPZ with {', '.join(sorted(names)[:5])}")


def _table(path: Path, text: str) -> Subject:
    lines = text.splitlines()
    if not text.strip():
        raise InputError(f"{path} is empty")
    delimiter = max(",;\t", key=lines[0].count)
    header = next(csv.reader(lines[:1], delimiter=delimiter))
    names = {h.strip().lower().replace("_", "").removesuffix("id") for h in header}
    if names & {"user", "customer"} and names & {"item", "movie", "product", "book", "track"}:
        return Subject(str(path), "ratings", "a table with user and item columns")
    return Subject(str(path), "table", f"a table with {len(header)} columns")


def read_json(path: Path) -> dict[str, Any]:
    """The object in one of a model's JSON files.

    Raises:
        CheckpointError: it cannot be read, is larger than `MAX_JSON`, or is no JSON object.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is no regular file")
        with path.open("rb") as stream:
            content = stream.read(MAX_JSON + 1)
        if len(content) > MAX_JSON:
            raise CheckpointError(f"{path} is larger than {MAX_JSON >> 20} MiB, which no such file is")
        value = json.loads(content.decode("utf-8-sig"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return value


def one_line(error: BaseException) -> str:
    """The whole message of an error on one line: what stands after its first line is often the reason."""
    text = " ".join(str(error).split())
    return f"{text[:400]}…" if len(text) > 400 else text or type(error).__name__


def applies(method: Method, subject: Subject) -> tuple[bool, str]:
    """Whether a method takes this subject, and why or why not.

    Args:
        method: a row of the catalogue.
        subject: as `recognise` told it.
    """
    if subject.kind not in method.subject:
        wanted = " or ".join(KINDS.get(k, k) for k in method.subject)
        return False, f"needs {wanted}; this is {KINDS[subject.kind]}"
    lacking = [r for r in method.requires if r not in subject.facts]
    if lacking:
        wanted = " and ".join(_REQUIREMENTS.get(r, r) for r in lacking)
        return False, f"needs {wanted}; this {subject.model_type or 'model'} has none"
    given = [_REQUIREMENTS.get(r, r) for r in method.requires]
    return True, f"{subject.reason}" + (f", with {' and '.join(given)}" if given else "")
