"""Know when to believe an output, a judge, a risk."""

__all__: list[str] = []
