"""A model made smaller: what `assay compress` does, step by step."""

from assay.compressor._fit import fit_checkpoint
from assay.compressor._run import Compression, Tried, compress_checkpoint
from assay.compressor._setting import METHODS, Setting

__all__ = ["METHODS", "Compression", "Setting", "Tried", "compress_checkpoint", "fit_checkpoint"]
