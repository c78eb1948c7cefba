"""Biology, physics, microscopy."""

__all__: list[str] = []
