"""Values of states under a model with a value head: what rewards are still to come, before each sampled token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.services.modeling.logprobs import of_places
from penstock.services.modeling.packing import Rows


def values(model: Any, rows: Rows) -> torch.Tensor:
    """The value of the state in which each sampled token was chosen: of all tokens before it. float32
    ``[trajectories, longest - 1]``, 0 where ``rows.mask`` is False. Differentiable."""
    return rows.scatter(of_places(model, rows, lambda hidden, _: value_head(model)(hidden).T, 1)[0].float())


def value_head(model: Any) -> nn.Linear:
    """The one linear layer behind the base model, with one output."""
    (head,) = value_heads(model).values()
    return head


def value_heads(model: Any) -> dict[str, nn.Linear]:
    """By its name; none of a language model."""
    linear = {name: module for name, module in model.named_children() if isinstance(module, nn.Linear)}
    return {name: module for name, module in linear.items() if module.out_features == 1}
