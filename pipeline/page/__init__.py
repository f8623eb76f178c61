"""The page: a run, or several, in a browser."""
