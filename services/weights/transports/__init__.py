"""The ways by which a version's bytes travel."""
