"""How a version's bytes travel: shared by the trainer, which sends, and the rollouts, which receive."""
