"""`penstock play`: an environment as a service."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Optional

import typer

from penstock.pipeline.config import ConfigError
from penstock.pipeline.config.load import options_of
from penstock.pipeline.report.console import RunConsole
from penstock.protocols.keys import KeysError
from penstock.protocols.mailbox import DeadlineError
from penstock.services.players.playing import Score, play_run
from penstock.services.players.registry import make_player
from penstock.services.runtime.user_folders import look_in

SAY_S = 10.0
"""Between two lines about how it goes."""


def play(
    run: Annotated[str, typer.Argument(help="A run's folder, or a gateway: tcp://host:8421.", show_default=False)],
    environment: Annotated[
        str,
        typer.Argument(
            help="verifiers:TASKSET, openenv:URL, reasoning_gym:TASK, tools, or module:Class of your own.",
            show_default=False,
        ),
    ],
    option: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--option", "-o", help="Of the environment, as key=value; the value is YAML."),
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="Played at once.")] = 32,
    keys: Annotated[Optional[Path], typer.Option(help="The file that penstock keys add wrote.")] = None,  # noqa: UP045
    key: Annotated[
        str, typer.Option(envvar="PENSTOCK_AGENTS_KEY", help="The gateway's HTTP key, for verifiers.")
    ] = "none",
) -> None:
    """Play a run's tasks in an environment, until the run is over: start as many of these as you like, anywhere.

    For instance: penstock play runs/agent reasoning_gym:chain_sum -o size=1000 --sessions 64
    or: penstock play runs/agent openenv:http://127.0.0.1:8000 -o action=message
    or: penstock play runs/agent my_env:Guess -o max_turns=4 -o options.digits=2
    """
    console = RunConsole()
    look_in(Path.cwd())
    own = Path(run) / "keys" / "agents.key"
    if key == "none" and own.is_file():
        key = own.read_text().strip()
    player = make_player(environment, options_of(option or [], "--option"), key)
    said = time.monotonic()

    def told(score: Score) -> None:
        nonlocal said
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            console.print(str(score), highlight=False)

    try:
        score = asyncio.run(play_run(run, keys, player, sessions, told))
    except (KeysError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from None
    except DeadlineError as error:
        words = f"{error}. Has the run ended, or its gateway? Start this again once it is there"
        console.print(words, highlight=False, markup=False)
        raise typer.Exit(1) from None
    console.print(f"the run is over: {score}", highlight=False)
