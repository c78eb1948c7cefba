"""Trials of the family `models`."""
