"""The command line: one file per command, imported only when it is called."""

from assay.cli._main import main

__all__ = ["main"]
