"""Reinforcement learning and search."""

__all__: list[str] = []
