"""Trials of the family `compress`."""
