"""Where a model that is made without memory gets it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from penstock.services.modeling.parallel.start import _materialize
from penstock.services.modeling.parallel.world import World


def test_what_is_cut_lies_where_it_is_to_lie_whatever_its_mesh_is_of() -> None:
    """`trainer.offload` has rows on the host that a mesh of GPUs cuts: FSDP looks at where they say that they are."""
    model, mesh = nn.Linear(8, 4), World(torch.device("cpu")).mesh["shard"]
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    elsewhere = torch.device("meta")  # as the host is to a mesh of GPUs
    _materialize(model, torch.device("cpu"), elsewhere)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and parameter.device == parameter.to_local().device == elsewhere
        assert parameter.device_mesh == mesh and parameter.shape[0] == 4
