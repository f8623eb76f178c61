"""Programs of the run that are asked from machines where they are not."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import BaseModel

from penstock.pipeline.config import Config
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.run.resume import leaves
from penstock.services.environments.config import key_of

HERE = re.compile(r"(?:127(?:\.\d+){3}|localhost|\[::1\]):(\d+)")
"""A port of the machine itself."""


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` whose addresses lead to another machine than the program's."""
    report.notes += unreached(config)


def unreached(config: Config) -> list[str]:
    """A line for each value by which a process that joins from another machine would ask its own one for a program of
    the head's."""
    ports = {port: name for name, program in config.programs.items() for port in HERE.findall(program.ready or "")}
    return [
        f"{key}.{value}={text}: programs.{ports[port]} answers there on the machine of `penstock run` alone, and "
        f"{kind} joins from others (run.elsewhere): start it as a service of your own, at an address that stays, and "
        f"give that, or leave {kind} out of run.elsewhere"
        for kind, key, section in _asking(config)
        for value, text in leaves(section.model_dump(mode="json")).items()
        for port in HERE.findall(str(text))
        if port in ports
    ]


def _asking(config: Config) -> Iterator[tuple[str, str, BaseModel]]:
    """What may ask a program from elsewhere: who does, its key, and its section."""
    for kind in config.run.elsewhere:
        if kind == "rollout":
            yield kind, "rollout.engine", config.rollout.engine
            yield from ((kind, key_of(source), each) for source, each in config.rollout.all_environments.items())
        elif kind == "reward":
            yield from ((kind, f"reward.functions.{i}", each) for i, each in enumerate(config.reward.functions))
        elif kind in config.scorers:
            yield kind, f"scorers.{kind}", config.scorers[kind]
