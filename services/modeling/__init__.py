"""Models and what is computed with them: loading, log-probabilities, packing, cutting over ranks."""
