"""`penstock config`: what the keys of a config mean."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from penstock.pipeline.config import ConfigError
from penstock.pipeline.config.foreign_names import known_here
from penstock.pipeline.config.key_reference import REQUIRED, Block, Key, find, nearest, reference, walk


def show_sections(console: Console) -> None:
    """Prints the sections, a line each."""
    table = Table("section", "what it holds", box=None)
    for key in reference():
        table.add_row(key.path, _plain(key.meaning.partition(". ")[0].rstrip(".") + "."))
    console.print(table)
    console.print("\npenstock config KEY says more, e.g. penstock config gate.max_lag", highlight=False)


def show_key(console: Console, path: str) -> None:
    """Prints type, default, meaning and an example of the key at ``path``, once for every choice of a union that has
    it, and the keys below it. Raises `ConfigError` with the nearest keys where there is none."""
    keys = find(path)
    if not keys:
        near = nearest(path)
        hint = f"did you mean {' or '.join(near)}?" if near else "penstock config lists the sections"
        hint = known_here(path.split(".")) or known_here(path.split(".")[:1]) or hint
        raise ConfigError(f"{path}: there is no such key; {hint}")
    for number, key in enumerate(keys):
        if number:
            console.print()
        _show(console, key)


def _show(console: Console, key: Key) -> None:
    console.print(Text(key.path, style="bold"))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("type", Text(_plain(key.type)))
    table.add_row("default", Text("none: it must be given" if key.default == REQUIRED else key.default))
    if key.needs:
        table.add_row("with", Text(", ".join(key.needs)))
    table.add_row("meaning", Text(_plain(key.meaning)))
    console.print(Padding(table, (0, 0, 0, 2)))
    shown = key if key.example else next(below for below in walk((key,)) if below.example)
    console.print(f"  example  penstock run FILE {shown.assignment}", highlight=False, markup=False, soft_wrap=True)
    for block in key.blocks:
        _show_block(console, block)


def _show_block(console: Console, block: Block) -> None:
    title = f"type: {block.choice}" if block.choice else "keys"
    console.print()
    console.print(Text(f"  {title}", style="bold"), Text(_plain(block.meaning) if block.choice else ""))
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for below in block.keys:
        default = below.default if len(below.default) <= 24 else "…"
        table.add_row(Text(below.path.rpartition(".")[2]), Text(default), Text(_plain(below.meaning)))
    console.print(Padding(table, (0, 0, 0, 2)))


def _plain(text: str) -> str:
    return text.replace("`", "")
