"""Advantages: rewards of a step to ``[rows, length]``, one number a token."""
