"""Reads interactions of users with items from a table of rows or from a stored sparse matrix."""

from __future__ import annotations

import csv
import math
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from scipy.sparse import coo_matrix, csc_matrix, csr_matrix

from assay.core.errors import InputError

USER_NAMES = ("userid", "user", "uid", "customerid", "customer", "reviewerid", "visitorid", "sessionid")
ITEM_NAMES = (
    "itemid",
    "item",
    "iid",
    "movieid",
    "movie",
    "productid",
    "product",
    "asin",
    "articleid",
    "bookid",
    "trackid",
    "songid",
    "artistid",
    "gameid",
)
RATING_NAMES = ("rating", "ratings", "score", "stars", "count", "plays", "weight")

_MISSING = ["", "nan", "NaN", "NAN", "null", "NULL"]
_WHOLE_NUMBER = r"^-?(0|[1-9][0-9]*)$"
_HEADER_BYTES = 1 << 16
# A vector with one float64 for each user or item then stays below 1 GB.
_MOST_IDS = 100_000_000
_MOST_BYTES = 8 << 30


def read_ratings(path: str | Path) -> csr_matrix:
    """Read a users x items matrix.

    Two forms are recognised by their content:

    - text with a header line, separated by commas, tabs or semicolons, one row an interaction. A user and an item
      column are needed (`userId`, `user_id`, `movieId`, `item`, …: case and punctuation do not matter); a rating
      column is optional and other columns are ignored. Ids may be whole numbers or text; they are numbered in
      ascending order, so that no row or column is empty. Without a rating column, each row counts 1 and repeats add up;
    - an NPZ file with a sparse matrix in CSR, CSC or COO format, as `scipy.sparse.save_npz` writes it, users in rows.
      Its shape is kept. Nothing is unpickled.

    A rating of 0 is the same as no interaction.

    Args:
        path: the file.

    Returns:
        The matrix in float64, one row a user, one column an item.

    Raises:
        InputError: the file cannot be read, lacks a column, or has missing, negative or too large ids, ratings that
            are not finite numbers, or two ratings of one item by one user.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "ratings.csv")
        >>> _ = path.write_text("user_id,item_id,rating\\n7,31,4\\n7,12,5\\n9,12,3\\n")
        >>> read_ratings(path).toarray()
        array([[5., 4.],
               [3., 0.]])
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(_HEADER_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a CSV or NPZ file") from error
    R = _read_npz(path) if start.startswith(b"PK\x03\x04") else _read_text(path, start)
    R.sum_duplicates()
    R.eliminate_zeros()
    if R.nnz == 0:
        raise InputError(f"{path}: holds no interaction; give at least one row with a rating other than 0")
    return R


def _read_text(path: Path, start: bytes) -> csr_matrix:
    delimiter, header = _header(path, start)
    user = _column(path, header, USER_NAMES, "user")
    item = _column(path, header, ITEM_NAMES, "item")
    rating = _column(path, header, RATING_NAMES, None)
    types = {user: pa.large_string(), item: pa.large_string()} | ({rating: pa.float64()} if rating else {})
    try:
        table = pyarrow.csv.read_csv(
            path,
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                null_values=_MISSING,
                strings_can_be_null=True,
            ),
        )
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: cannot be read as a table ({reason}); correct that row") from error
    if table.num_rows == 0:
        raise InputError(f"{path}: has a header and no rows; give at least one interaction")
    users, n_users = _ids(path, user, table[user])
    items, n_items = _ids(path, item, table[item])
    if rating is None:
        values = np.ones(len(users))
    else:
        column = table[rating].to_numpy()
        if (bad := np.flatnonzero(~np.isfinite(column))).size:
            raise InputError(
                f"{path}: data row {bad[0] + 1} has no finite number under {rating!r} "
                f"({bad.size} such rows); correct or drop them"
            )
        values = column
        _refuse_repeats(path, users, items, n_items)
    return coo_matrix((values, (users, items)), shape=(n_users, n_items)).tocsr()


def _header(path: Path, start: bytes) -> tuple[str, list[str]]:
    line = re.split(rb"\r\n|\n|\r", start, maxsplit=1)[0]
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is neither UTF-8 text nor an NPZ file; give a CSV or NPZ file") from error
    splits = {d: next(csv.reader([text], delimiter=d), []) for d in ",\t;"}
    delimiter = max(splits, key=lambda d: len(splits[d]))
    header = splits[delimiter]
    if len(set(header)) != len(header):
        repeated = next(name for name in header if header.count(name) > 1)
        raise InputError(f"{path}: has two columns called {repeated!r}; rename one")
    return delimiter, header


def _column(path: Path, header: list[str], names: tuple[str, ...], wanted: str | None) -> str | None:
    """The column that bears the first of these names; `wanted` says what to call it if it must be there."""
    plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in reversed(header)}
    for name in names:
        if name in plain:
            return plain[name]
    if wanted is None:
        return None
    shown = ", ".join(repr(name) for name in header[:12])
    raise InputError(
        f"{path}: no column is named like a {wanted} ({', '.join(names[:4])}, …) among {shown}; rename one"
    )


def _ids(path: Path, name: str | None, column: pa.ChunkedArray) -> tuple[np.ndarray, int]:
    """Each row's id as its place among the distinct ids in ascending order, and how many there are."""
    if column.null_count:
        first = int(np.flatnonzero(column.is_null().to_numpy())[0]) + 1
        raise InputError(f"{path}: data row {first} has no {name!r} ({column.null_count} such rows); drop them")
    encoded = column.combine_chunks().dictionary_encode()
    labels = encoded.dictionary
    if pc.all(pc.match_substring_regex(labels, _WHOLE_NUMBER)).as_py():
        try:
            labels = pc.cast(labels, pa.int64())
        except pa.ArrowInvalid as error:
            raise InputError(f"{path}: an id under {name!r} does not fit in 64 bits; renumber the ids") from error
        if (least := pc.min(labels).as_py()) < 0:
            raise InputError(f"{path}: id {least} under {name!r} is negative; drop or renumber those rows")
    place = np.empty(len(labels), dtype=np.int64)
    place[pc.sort_indices(labels).to_numpy()] = np.arange(len(labels))
    return place[encoded.indices.to_numpy()], len(labels)


def _refuse_repeats(path: Path, users: np.ndarray, items: np.ndarray, n_items: int) -> None:
    pairs = users * n_items + items
    order = np.argsort(pairs, kind="stable")
    repeats = order[1:][pairs[order[1:]] == pairs[order[:-1]]]
    if repeats.size:
        raise InputError(
            f"{path}: data row {repeats.min() + 1} rates an item that the same user has rated before "
            f"({repeats.size} such rows); keep one rating a pair"
        )


def _read_npz(path: Path) -> csr_matrix:
    try:
        with zipfile.ZipFile(path) as archive:
            parts = {name: _member(path, archive, name) for name in ("format", "shape", "data")}
            kind = str(parts["format"].astype(str))
            places = {"csr": ("indices", "indptr"), "csc": ("indices", "indptr"), "coo": ("row", "col")}.get(kind)
            if places is None:
                raise InputError(f"{path}: sparse format {kind[:20]!r} is not read; save it as 'csr'")
            first, second = (_member(path, archive, name) for name in places)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise InputError(f"{path}: is a damaged NPZ file ({error}); write it again") from error
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        reason = str(error).strip("'\"")
        raise InputError(f"{path}: holds no sparse matrix ({reason}); write it with scipy.sparse.save_npz") from error
    shape = _shape(path, parts["shape"])
    data = parts["data"]
    if data.dtype.kind not in "biuf":
        raise InputError(f"{path}: holds {data.dtype} values; give real numbers")
    if not np.isfinite(data).all():
        raise InputError(f"{path}: holds values that are not finite; drop those entries")
    if any(part.dtype.kind not in "iu" for part in (first, second)):
        raise InputError(f"{path}: its ids are not whole numbers; write it with scipy.sparse.save_npz")
    try:
        if kind == "coo":
            return coo_matrix((data.astype(np.float64), (first, second)), shape=shape).tocsr()
        R = (csr_matrix if kind == "csr" else csc_matrix)((data.astype(np.float64), first, second), shape=shape)
        R.check_format(full_check=True)
    except ValueError as error:
        raise InputError(f"{path}: its ids and its shape {shape} disagree ({error}); write it again") from error
    return R.tocsr()


def _shape(path: Path, stored: np.ndarray) -> tuple[int, int]:
    if stored.shape != (2,) or stored.dtype.kind not in "iu":
        raise InputError(f"{path}: its shape is not two whole numbers; write it with scipy.sparse.save_npz")
    n_users, n_items = (int(n) for n in stored)
    if not (0 < n_users <= _MOST_IDS and 0 < n_items <= _MOST_IDS):
        raise InputError(f"{path}: its shape {n_users} x {n_items} is out of range; use 1 to {_MOST_IDS:,} each way")
    return n_users, n_items


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """One array of the archive, never larger than the archive says and than memory should hold."""
    info = archive.getinfo(f"{name}.npy")
    if info.file_size > _MOST_BYTES:
        raise InputError(f"{path}: array {name!r} unpacks to {info.file_size:,} bytes; {_MOST_BYTES:,} is the most")
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        readers: dict[tuple[int, int], Any] = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        if version not in readers:
            raise ValueError(f"array {name!r} has an unknown version {version}")
        shape, _, dtype = readers[version](file)
        # The header is only a claim: an array is allocated from it before a byte of content is read.
        if dtype.hasobject or math.prod(shape) * dtype.itemsize > info.file_size:
            raise ValueError(f"array {name!r} is not a plain array of the size that it claims")
    with archive.open(info) as file:
        return np.lib.format.read_array(file, allow_pickle=False)
