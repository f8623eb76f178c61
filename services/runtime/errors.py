"""The base of every error that a better config would mend."""

EXIT_SETUP = 78
"""Exit code of an actor that cannot work with what it was given: starting it again would not help."""

EXIT_LATER = 75
"""Exit code of a command that may work later, as sysexits.h has it."""


class SetupError(ValueError):
    """The actor cannot work with what it was given: starting it again would not help."""


class PackageError(SetupError):
    """A package that is not installed here."""


class LibraryError(RuntimeError):
    """A library could not do what it was asked for: that may be a passing thing once, and is none the second time."""
