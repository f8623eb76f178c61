"""Runs an engine; turns leases into finished groups."""
