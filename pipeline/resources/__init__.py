"""GPUs and memory: what a run needs, and who gets what."""
