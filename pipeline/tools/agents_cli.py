"""`penstock agents`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from penstock.pipeline.report.console import OwnConsole


def agents(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON object.")] = False,
    give_on: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--abandon", metavar="SESSION", help="Give this session to another agent, from the start."),
    ] = None,
) -> None:
    """List the sessions that agents have in a run with gateways, those first that have been silent longest.

    `key`: the name of the key by which its agent came, if any. `by`: HTTP alone, or AgentClient, which says every few
    seconds that it is alive. `turns`, `tokens`: of the policy so far. `turns waiting`: those that the agent has asked
    for, and has no answer to yet. `silent`: since its agent's last word, or since it was answered. `given on in`: if
    nothing more is heard another agent gets it then (gateway.idle_s, gateway.lost_s). `error`: what went wrong last.

    For instance: penstock agents runs/agent
    or: penstock agents runs/agent --abandon train-349-5-0
    """
    from penstock.pipeline.tools.agents import abandon, sessions, show

    if give_on is not None:
        abandon(run, give_on)
        typer.echo(f"{give_on} is given on")
    elif as_json:
        typer.echo(json.dumps(sessions(run)))
    else:
        show(OwnConsole(), run)
