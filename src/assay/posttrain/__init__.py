"""Improve a model with few or no labels."""

from assay.core.catalogue import lazy_family

__getattr__, __dir__, __all__ = lazy_family(__name__)
