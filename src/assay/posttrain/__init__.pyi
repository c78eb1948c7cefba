"""Improve a model with few or no labels."""

__all__: list[str] = []
