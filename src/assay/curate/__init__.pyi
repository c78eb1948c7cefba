"""Cluster, select, adapt and federate data."""

__all__: list[str] = []
