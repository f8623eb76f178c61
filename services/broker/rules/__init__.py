"""The rules about experience, pure: they know no socket and no Redis."""
