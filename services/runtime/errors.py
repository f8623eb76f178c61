"""The base of every error that a better config would mend."""


class SetupError(ValueError):
    """The actor cannot work with what it was given: starting it again would not help."""
