"""Programs of others that a run starts beside itself."""

from __future__ import annotations

import re

from pydantic import Field, field_validator, model_validator

from penstock.services.runtime.command_words import words_of
from penstock.services.runtime.settings import MOST_PORT, Section

ADDRESS = re.compile(r"(https?|tcp)://(\[[^\s/\[\]]+\]|[^\s:/\[\]]+)(?::(?P<port>\d{1,5}))?(?P<path>/\S*)?")


EXAMPLE = "vllm serve MODEL --port 8431"
RUN = "RUN"
"""The word of a command that stands for the run's folder."""


class ProgramConfig(Section):
    """A program beside the run, e.g. the server of a judge. It is started first, and ended last; one that ends before,
    with exit code 0 too, is started again."""

    command: str | tuple[str, ...]
    """What is started, without a shell, e.g. ``vllm serve Qwen/Qwen3-8B --port 8431``; a list where a word has spaces,
    e.g. ``[bash, -c, "source env/bin/activate && exec python judge.py"]``. Programs are looked for beside Penstock's
    own Python first. It runs in the first folder, of where you start from and beside the config, that has a file which
    the command names, or where you start from. The word ``RUN`` is the run's folder, e.g. ``penstock play RUN
    my_env:Guess``: such a program is started once the run is under way."""
    ready: str | None = None
    """What must answer before anything else is done, e.g. ``http://127.0.0.1:8431/health`` (any status below 400) or
    ``tcp://127.0.0.1:6333`` (a port that listens); null: it is not waited for."""
    ready_s: float = Field(600.0, gt=0)
    """Seconds in which `ready` must answer: a large model takes minutes to load."""
    gpus: int = Field(0, ge=0)
    """GPUs of this machine that are its own, e.g. ``1``: the last ones; the run has the others. 0: it sees none."""
    sleep: str | None = None
    """With `run.placement`: colocated its `gpus` are the trainer's, and it sleeps while a learner works: what is posted
    to then, with an empty JSON object, e.g. ``http://127.0.0.1:8431/sleep`` of vLLM (``--enable-sleep-mode``, and
    ``VLLM_SERVER_DEV_MODE: "1"`` in `env`) or ``http://127.0.0.1:8431/release_memory_occupation`` of SGLang
    (``--enable-memory-saver``). null: they are its own. See docs/scoring.md."""
    wake: str | None = None
    """What is posted to so that it wakes, e.g. ``http://127.0.0.1:8431/wake_up``, or
    ``http://127.0.0.1:8431/resume_memory_occupation``."""
    gpu_gib: float | None = Field(None, gt=0)
    """GiB that it takes of each of its GPUs while it is awake, e.g. ``20``: `penstock plan` counts them where it
    sleeps. null: it does not know."""
    env: dict[str, str] = {}
    """Environment variables that it has beside those of `penstock run`, e.g. ``{HF_HUB_OFFLINE: "1"}``. They are
    written to the run's folder: set secrets where the run is started."""

    @field_validator("command")
    @classmethod
    def _has_words(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        words_of(value, EXAMPLE)
        return value

    @field_validator("ready")
    @classmethod
    def _is_somewhere(cls, value: str | None) -> str | None:
        found = ADDRESS.fullmatch(value) if value is not None else None
        if value is not None and (
            not found
            or int(found["port"] or 1) not in range(1, MOST_PORT + 1)
            or (value.startswith("tcp:") and (not found["port"] or found["path"]))
        ):
            raise ValueError(
                f"{value!r} cannot be asked; give e.g. http://127.0.0.1:8431/health or tcp://127.0.0.1:6333"
            )
        return value

    @field_validator("sleep", "wake")
    @classmethod
    def _can_be_posted_to(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if value.startswith("tcp:"):
            raise ValueError(f"{value!r} cannot be posted to; give e.g. http://127.0.0.1:8431/sleep")
        return cls._is_somewhere(value)

    @model_validator(mode="after")
    def _wakes_again(self) -> ProgramConfig:
        if (self.sleep is None) != (self.wake is None):
            there, lacks = ("sleep", "wake") if self.sleep else ("wake", "sleep")
            raise ValueError(f"{there} and no {lacks}: one that sleeps has to wake; give {lacks} too")
        if self.sleep and not self.of_run and self.ready is None:
            raise ValueError(
                "sleep and no ready: it says when it may be put to sleep, and be asked again; give ready too"
            )
        if self.sleep and self.of_run:
            raise ValueError(
                f"sleep: a program that is told of the run ({RUN}) is started behind all else, and never sleeps; leave "
                "sleep and wake out"
            )
        return self

    @model_validator(mode="after")
    def _waits_for_one_thing(self) -> ProgramConfig:
        if self.of_run and self.ready is not None:
            raise ValueError(
                f"ready: a program that is told of the run ({RUN}) is started behind all else; leave it out"
            )
        return self

    @property
    def of_run(self) -> bool:
        """It is told of the run, and so wants it to be there."""
        return RUN in self.words

    @property
    def words(self) -> list[str]:
        """The program, and what it is told."""
        return words_of(self.command, EXAMPLE)
