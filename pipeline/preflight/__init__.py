"""What is looked at before a run starts: everything that its config names, so that a mistake is told at once."""
