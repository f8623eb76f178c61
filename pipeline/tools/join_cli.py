"""`penstock join`: this machine helps a run along."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Optional

import typer

from penstock.pipeline.report.console import RunConsole
from penstock.pipeline.tools.arguments import OVERRIDES
from penstock.services.runtime.errors import EXIT_LATER
from penstock.services.runtime.plain import visible


def join(
    run: Annotated[Path, typer.Argument(help="The run's folder, on a disk of both machines.", show_default=False)],
    actor: Annotated[
        str, typer.Argument(help="rollout, reference, reward, critic, trainer, gateway, or a scorer of the config's.")
    ] = "rollout",
    overrides: OVERRIDES = None,
    count: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Processes; not given: as many as the GPUs here take, or 1.", show_default=False),
    ] = None,
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="What tells these processes from other machines': ACTOR-NAME-0, ….", show_default="host-pid"),
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the run's broker: to begin, or to be back.")
    ] = 300.0,
    failed_patience: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds to wait for who goes on with a run that failed, or was complete before; then exit code 0.",
        ),
    ] = 0.0,
) -> None:
    """Add this machine's processes to a run: rollouts, say. It ends with the run.

    The run's broker must listen where this machine reaches it: penstock run CONFIG broker.bind=tcp://10.1.0.0/16:0
    weights.host=10.1.0.0/16. With run.elsewhere=\\[rollout] it starts none itself. What dies is started again; where
    the run is stopped and goes on, on whatever machine, these processes go on with it. SIGTERM: what they have finished
    is made durable, and they leave; the run does not mind.

    Exit codes: 0 the run is complete, 130 told to leave, 1 the run has failed, 75 its broker was not there for so long
    (try again later), 2 a setup that cannot work.

    For instance: penstock join /shared/runs/first-try
    or: penstock join /shared/runs/first-try rollout --count 2 weights.transport=snapshot
    """
    from penstock.pipeline.run.folder import named
    from penstock.pipeline.run.join import FailedError, NobodyError
    from penstock.pipeline.run.join import join as join_run
    from penstock.pipeline.run.launcher import RunError

    if "=" in actor:
        overrides, actor = [actor, *(overrides or [])], "rollout"
    try:
        mine = name or f"{socket.gethostname()}-{os.getpid()}"
        over = join_run(RunConsole(), named(run), actor, count, mine, patience, overrides or [], failed_patience)
    except RunError as error:
        typer.echo(f"error: {visible(str(error))}\nlogs: {run / 'logs'}", err=True)
        if failed_patience and isinstance(error, FailedError):
            raise typer.Exit(0) from None
        raise typer.Exit(EXIT_LATER if isinstance(error, NobodyError) else 1) from None
    raise typer.Exit(0 if over else 130)
