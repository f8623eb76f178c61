"""Log-probabilities of finished groups under a frozen model."""
