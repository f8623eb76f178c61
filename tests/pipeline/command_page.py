"""docs/commands.md: what every command says of itself, as `python -m tests.pipeline.command_page` prints it."""

from __future__ import annotations

import html
import sys

import typer
from typer.cli import get_docs_for_click

from penstock.pipeline.cli import app


def command_page() -> str:
    """Made by typer of the command ``penstock`` and all below it."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="penstock")
    made = get_docs_for_click(obj=command, ctx=context, name="penstock", title="Commands")
    # Outside code a page would take <what looks like this> for HTML.
    return html.unescape(made).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(command_page())
