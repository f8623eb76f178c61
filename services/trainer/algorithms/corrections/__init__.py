"""Corrections for tokens that another policy sampled: a weight a token, ``[rows, length]``."""
