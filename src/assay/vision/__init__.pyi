"""Images and video."""

__all__: list[str] = []
