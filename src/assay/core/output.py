"""Writing results so that a kill leaves the old or the new and never half, and nothing of the user's is overwritten."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from assay.core.errors import OutputError

MARKER = ".assay"


def is_ours(path: Path) -> bool:
    """Whether the directory is empty or was written by assay."""
    return not any(path.iterdir()) or (path / MARKER).exists()


def claim_directory(path: str | Path) -> Path:
    """Make the directory for results, or take one that assay made before.

    Raises:
        OutputError: it is a file, belongs to something else, or cannot be made.
    """
    path = Path(path)
    check_directory(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / MARKER).touch()
    except OSError as error:
        raise _explain(path, error) from error
    return path


def check_directory(path: str | Path) -> None:
    """Raise what `claim_directory` would raise for a place that is taken or cannot be written, and leave nothing."""
    path = Path(path)
    try:
        if path.is_dir() and not is_ours(path):
            raise OutputError(f"{path} exists and was not written by assay: choose another --out")
        if path.exists() and not path.is_dir():
            raise OutputError(f"{path} is a file: choose a directory for --out")
        place = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        # Permission bits do not tell (root passes them all, /proc takes no files): only an attempt does.
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise _explain(path, error) from error


def check_new(path: str | Path) -> None:
    """Refuse a place where anything stands, or that cannot be written; leaves nothing.

    Raises:
        OutputError: it does, or cannot.
    """
    if Path(path).exists() or Path(path).is_symlink():
        raise OutputError(f"{path} exists: choose another place, or delete it")
    check_directory(path)


def write_text(path: str | Path, text: str) -> None:
    """Write a file through a temporary sibling that is renamed at the end.

    Raises:
        OutputError: the disk is full, or the place cannot be written.
    """
    path = Path(path)
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise _explain(path, error) from error


@contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """A temporary sibling to fill; it takes the name when the block ends without an error.

    A directory that assay wrote before is replaced; anything else at that place is refused.

    Raises:
        OutputError: the place is taken, the disk is full, or the place cannot be written.
    """
    path = Path(path)
    check_directory(path)
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.absolute().parent, prefix=f".{path.name}."))
    except OSError as error:
        raise _explain(path, error) from error
    try:
        yield temporary
        (temporary / MARKER).touch()
        os.chmod(temporary, 0o777 & ~_umask())
        if path.exists():
            old = temporary.with_name(temporary.name + ".old")
            os.replace(path, old)
            os.replace(temporary, path)
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _explain(path, error) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _explain(path: Path, error: OSError) -> OutputError:
    return OutputError(f"{path} cannot be written: {error.strerror or error}")
