"""assay: try this year's neural-network methods on your own model and data, and see what holds.

Importing it teaches transformers to read the checkpoints that `assay compress` writes.
"""

from importlib.metadata import PackageNotFoundError, version

from assay._on_import import after_import

try:
    __version__ = version("assay")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["__version__"]


def _register_quantizer() -> None:
    from assay.compress._transformers import register

    register()


after_import("transformers.quantizers.auto", _register_quantizer)
