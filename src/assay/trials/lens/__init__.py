"""Trials of the family `lens`."""
