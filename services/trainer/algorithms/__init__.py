"""Advantages, policy losses, corrections and their parts: pure functions on tensors, one small file each.

Shapes: ``rows`` trajectories by ``length`` token positions, right-padded; ``mask`` is 1 on the tokens that count.
"""
