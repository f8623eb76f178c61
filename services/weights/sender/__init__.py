"""The trainer's side of the weight channel."""
