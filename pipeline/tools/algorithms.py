"""`penstock algorithms`: what `trainer.algorithm` can be made of."""

from __future__ import annotations

from typing import get_args

from rich.console import Console
from rich.table import Table

from penstock.services.trainer.advantage_config import BuiltInAdvantage
from penstock.services.trainer.algorithm_config import BuiltInCorrection
from penstock.services.trainer.choice import Choice
from penstock.services.trainer.loss_config import BuiltInLoss
from penstock.services.trainer.presets import PRESETS


def choices() -> dict[str, list[type[Choice]]]:
    """The built-in ones, by the key that takes them."""
    unions = {"advantage": BuiltInAdvantage, "loss": BuiltInLoss, "correction": BuiltInCorrection}
    return {key: list(get_args(union)) for key, union in unions.items()}


def show(console: Console) -> None:
    """Prints a table of each, and one of the presets."""
    for key, kinds in choices().items():
        table = Table("type", "what it is", "options", "paper", title=f"trainer.algorithm.{key}", title_justify="left")
        for kind in kinds:
            options = ", ".join(name for name in kind.model_fields if name != "type")
            what = " ".join((kind.__doc__ or "").split())
            table.add_row(kind.model_fields["type"].default, what, options, kind.paper)
        console.print(table)
    presets = Table("preset", "stands for", title="trainer.algorithm.preset", title_justify="left")
    for name, found in PRESETS.items():
        told = "; ".join(f"{key}: {value}" for key, value in found.items())
        presets.add_row(name, told.replace("'", "") or "the defaults")
    console.print(presets)
    console.print("Their options: penstock config trainer.algorithm.loss. A function of your own: docs/extending.md.")
