"""Parts that benchmarks and tests put in place of a broker or a fleet."""
