"""Policy losses: one number a token, ``[rows, length]``."""
