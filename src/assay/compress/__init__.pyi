"""Make it smaller."""

from assay.compress._bof4 import (
    Bof4Result,
    Codebook,
    QTensor,
    QuantizedLinear,
    af4_codebook,
    bof4,
    nf4_codebook,
    quantize,
    quantize_module,
    rtn_codebook,
    solve_codebook,
)

__all__ = [
    "Bof4Result",
    "Codebook",
    "QTensor",
    "QuantizedLinear",
    "af4_codebook",
    "bof4",
    "nf4_codebook",
    "quantize",
    "quantize_module",
    "rtn_codebook",
    "solve_codebook",
]
