"""Built-in English text: two samples for default runs, and the longer texts that `tiny_lm` was trained on."""

from __future__ import annotations

import lzma
from importlib.resources import files

from assay.core.errors import InputError

NAMES = {
    "prose": "the first chapters of Jane Austen's Persuasion (public domain)",
    "technical": "topics of the Python language reference (PSF licence)",
}


def _bytes(name: str, suffix: str) -> bytes:
    if name not in NAMES:
        raise InputError(f"no built-in text is called {name!r}: there are {', '.join(NAMES)}")
    return files("assay.reference").joinpath("data", "text", name + suffix).read_bytes()


def sample(name: str = "prose") -> str:
    """A text of some 70 kB for perplexity and activation runs that need one and were given none.

    Args:
        name: "prose" (a novel of 1817) or "technical" (Python's documentation, with code).

    Returns:
        The text, paragraphs parted by an empty line. No built-in checkpoint was trained on it.

    Raises:
        InputError: there is no text of that name.

    Example:
        >>> sample().splitlines()[2][:28]
        'Sir Walter Elliot, of Kellyn'
    """
    return _bytes(name, ".txt").decode("utf-8")


def training_text(name: str = "prose") -> str:
    """The text that `tiny_lm` was trained on; it shares no paragraph with `sample(name)`.

    Args:
        name: "prose" (Emma and Mansfield Park, 1.8 MB) or "technical" (the other topics, 0.3 MB).

    Raises:
        InputError: there is no text of that name.
    """
    return lzma.decompress(_bytes(name, "_training.txt.xz")).decode("utf-8")
