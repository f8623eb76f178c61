"""Leases prompts, holds the gate, keeps replay, ledger, versions and membership; routes every message."""
