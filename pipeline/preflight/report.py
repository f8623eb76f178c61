"""What a look at a run's config found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.pipeline.config import ConfigError
from penstock.protocols.experience import Prompt
from penstock.services.runtime.errors import PackageError, SetupError


@dataclass(frozen=True)
class Done:
    """What a run has trained on already."""

    steps: int = 0
    groups: int = 0


@dataclass
class Report:
    """``lines`` say what is there, ``notes`` what one should know, ``problems`` why the run cannot work, ``here`` why
    it cannot work on this machine, and ``packages`` which of these are packages that are not installed."""

    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    here: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """Rows of each data source, by its key."""
    row: Prompt | None = None
    """A usable prompt of the training data."""
    rows: dict[str, Prompt] = field(default_factory=dict)
    """One of each source whose rewards are asked for: of the training data, or else of an evaluation set."""
    given: dict[str, list[Prompt]] = field(default_factory=dict)
    """By the key of their data the first rows whose own answers are wanted."""
    held_out: dict[str, list[Prompt]] = field(default_factory=dict)
    """The first rows of each evaluation set."""
    trained: set[str] = field(default_factory=set)
    """The sources of the first rows of the training data."""
    evaluated: dict[str, set[str]] = field(default_factory=dict)
    """Those that the rows of each evaluation set count to, which was opened."""
    done: Done = Done()
    """By a run that goes on."""
    characters: set[str] | None = None
    """Those that a tiny model knows; None of another one, or where no environment speaks to it."""

    @contextmanager
    def collect(self) -> Iterator[None]:
        """What is wrong inside is one problem more, not the end of the look."""
        try:
            yield
        except PackageError as error:
            self.lacks_package(str(error))
        except SetupError as error:
            self.problems += [str(error)] * (str(error) not in self.problems)  # several may have met it

    def lacks_package(self, words: str) -> None:
        """Something that is to be installed where it runs."""
        self.packages.append(words)
        self.here.append(words)

    @property
    def remarks(self) -> list[str]:
        """What one should know where other machines may have what this one lacks."""
        return [*self.notes, *(f"on this machine: {lack}" for lack in self.here)]

    def check(self, elsewhere: bool) -> None:
        """Raises `ConfigError` with all problems; with ``elsewhere``, what this machine lacks is none."""
        found = self.problems + ([] if elsewhere else self.here)
        if found:
            raise ConfigError("\n".join(dict.fromkeys(found)))
