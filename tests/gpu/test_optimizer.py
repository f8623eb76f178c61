"""An optimizer whose means lie on the host: the same bits, half of the memory, and as fast as PCIe is."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from penstock.services.learning.optimizer import make_optimizer
from penstock.services.learning.optimizer_config import OptimizerConfig
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.resting import release
from tests.gpu.machine import GIB, Machine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

UPDATES = 4


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_means_on_the_host_give_the_same_bits(kind: str, machine: Machine, note: Callable[[str, str], None]) -> None:
    width, layers = (256, 3) if machine.rehearsed else (8192, 6)
    found, held, took = [], [], []
    for on_host in (False, True):
        torch.manual_seed(0)
        with machine.device:
            model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        model.base_model, model.config = model, torch.nn.Module()  # what Muon asks of a model
        model.config.model_type, model.get_output_embeddings = "llama", lambda: None  # type: ignore[assignment]
        config = OptimizerConfig.model_validate({"type": kind, "lr": 1e-2, "weight_decay": 0.1})
        optimizer = make_optimizer(model, dict(model.named_parameters()), config, World(machine.device), on_host)
        for update in range(UPDATES):
            for number, parameter in enumerate(model.parameters()):
                random = torch.Generator(machine.device).manual_seed(100 * update + number)
                parameter.grad = torch.randn(parameter.shape, generator=random, device=machine.device)
            machine.settle()
            machine.forget_peak()
            begun = time.monotonic()
            optimizer.step()
            machine.settle()
        took.append(time.monotonic() - begun)
        held.append(machine.peak_gib())
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
        del model, optimizer, parameter
        release(machine.device)  # what is left in the allocator would count as the other's
    assert all(map(torch.equal, *found))
    numbers = sum(parameter.numel() for parameter in found[0])
    gb = numbers * (8 if kind == "adamw" else 4) / 1e9
    note(
        f"means on the host, {kind}, {numbers / 1e9:.2f} B parameters",
        f"an update {took[1]:.3f} s, {took[0]:.3f} on the GPU; {gb / took[1]:.1f} GB/s each way; "
        f"peak {held[1]:.1f} GiB and not {held[0]:.1f}",
    )
    if not machine.rehearsed:
        assert held[0] - held[1] > 0.6 * gb * 1e9 / GIB
