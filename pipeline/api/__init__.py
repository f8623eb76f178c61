"""Penstock from Python: in a script, or in a notebook."""
