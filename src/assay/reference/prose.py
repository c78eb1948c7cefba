"""A novel as plain text, for methods that train on text."""

from __future__ import annotations

from assay.reference._text import training_text

KIND = "texts"
ABOUT = "two novels by Jane Austen, 1.8 million characters (public domain)"


def load() -> str:
    """Emma and Mansfield Park, paragraphs parted by an empty line.

    Example:
        >>> len(load()) > 1_700_000
        True
    """
    return training_text("prose")
