"""Errors that a user can act on: one line that names the input, what is wrong with it and what to do."""

from __future__ import annotations


class AssayError(Exception):
    """Base of every error that assay raises on purpose; the command line prints it and exits with 2."""


class InputError(AssayError, ValueError):
    """An argument or a data file is not what the method takes."""


class CheckpointError(AssayError):
    """A model cannot be read: missing, damaged, in a refused format, or its parts disagree."""


class UnknownArchitecture(AssayError):
    """The architecture has no entry in `assay.core.anatomy`."""


class NotApplicable(AssayError):
    """The method does not apply to this subject (say, a causal measure to an encoder); says why."""


class OutputError(AssayError):
    """A result cannot be written: the place is taken by something else, or there is no room."""


class MissingDependency(AssayError, ImportError):
    """An optional package is needed; the message names the extra to install."""
