"""New models, layers and learning rules."""

from assay.models._deql import (
    DEQL,
    EASE,
    EDLAE,
    deql_grid,
    ndcg_at_k,
    recall_at_k,
)
from assay.models._selective_rope import (
    GatedLinearAttention,
    SelectiveRoPE,
    SelectiveRoPECache,
    SoftmaxAttention,
    rfa_temperature,
    rope_temperature,
)

__all__ = [
    "DEQL",
    "EASE",
    "EDLAE",
    "GatedLinearAttention",
    "SelectiveRoPE",
    "SelectiveRoPECache",
    "SoftmaxAttention",
    "deql_grid",
    "ndcg_at_k",
    "recall_at_k",
    "rfa_temperature",
    "rope_temperature",
]
