"""Watch, audit, steer and edit behaviour."""

__all__: list[str] = []
