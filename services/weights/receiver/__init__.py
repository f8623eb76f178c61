"""A rollout's side of the weight channel."""
