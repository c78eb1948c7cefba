"""Get more out of an LLM without touching weights."""

__all__: list[str] = []
