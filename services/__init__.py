"""The actors: one folder each. They know each other by messages alone."""
