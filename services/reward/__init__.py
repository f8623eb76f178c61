"""Scores finished groups."""
