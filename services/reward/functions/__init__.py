"""Reward functions of the registry, one a file."""
