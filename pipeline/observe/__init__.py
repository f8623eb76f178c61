"""Looking at a run while it goes on."""
