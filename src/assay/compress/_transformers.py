"""How transformers reads a checkpoint with packed layers: `quant_method` "assay" in its configuration."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from assay.compress._packed_linear import PackedLinear
from assay.core.errors import CheckpointError

METHOD = "assay"
_VERSION = 1


class PackedConfig(QuantizationConfigMixin):
    """Which layers are packed, and how.

    Args:
        layers: by the layer's name, the description that `stored_form` gives.
        format_version: of the description.
    """

    def __init__(self, layers: dict[str, Any] | None = None, format_version: int = _VERSION, **kwargs: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.layers = layers or {}
        self.format_version = format_version
        if format_version != _VERSION:
            raise CheckpointError(f"the packed layers have format {format_version}: this assay reads {_VERSION}")


class PackedQuantizer(HfQuantizer):
    """Puts empty packed layers in place before the weights are read."""

    requires_calibration = True
    quantization_config: PackedConfig

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        for name, description in self.quantization_config.layers.items():
            try:
                old = model.get_submodule(name)
            except AttributeError as error:
                raise CheckpointError(f"{name} is described as packed, and the model has no such layer") from error
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, PackedLinear.empty(description, old._parameters.get("bias")))

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Packed layers are saved as they are."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters on top can be trained; the packed weights stay."""
        return False


def register() -> None:
    """Make the method known to transformers, once."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(PackedConfig)
        register_quantizer(METHOD)(PackedQuantizer)
