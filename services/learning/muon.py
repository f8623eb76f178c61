"""Muon for hidden matrices, AdamW for everything else (Jordan et al. 2024, "Muon: an optimizer for hidden layers in
neural networks"), with steps as long as AdamW's (Moonlight, arXiv:2502.16982, equation 4).

With G the gradient of a matrix ``[m, n]``, M its running mean and μ the momentum:

    M ← μ M + (1 − μ) G
    X ← (1 − μ) G + μ M, or M without Nesterov
    X ← X / ‖X‖, and then, `newton_schulz` times, X ← a X + (b A + c A²) X with A = X Xᵀ
    W ← (1 − lr · weight_decay) W − lr · rms · √max(m, n) · X

as `torch.optim.Muon` has it. Jordan's own M ← μ M + G is the same times 1 / (1 − μ), which dividing by ‖X‖ takes away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.services.learning.dealt_matrices import ROUND_NUMBERS, DealtMatrices
from penstock.services.learning.host_moments import HostAdamW, HostMeans
from penstock.services.learning.optimizer_config import OptimizerConfig
from penstock.services.modeling.experts import is_experts, matrices_of
from penstock.services.modeling.families import IN_MATRICES, TURNED
from penstock.services.modeling.parallel.fsdp import local
from penstock.services.modeling.parallel.world import World
from penstock.services.weights.queues import current_queue

MOMENTUM = "momentum_buffer"
"""What the mean is called in the optimizer's state, as torch calls it: fp32, cut as the matrix is."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c: they bring small singular values near 1 in few steps, and none far beyond it (Jordan et al. 2024)."""
SMALLEST_NORM = 1e-7
"""What is divided by where a matrix is shorter, so that one without a gradient stays as it is."""


def orthogonalize(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Each of ``matrices`` ``[count, m, n]`` with singular values of about 1 (0.7 to 1.2 after 5 ``steps``) and its own
    singular vectors, by Newton-Schulz iterations in the dtype that they have."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    found = matrices.mT if tall else matrices
    found = found / torch.linalg.vector_norm(found, dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if tall else found


def precision(device: torch.device) -> torch.dtype:
    """Of the iteration: what a GPU is fast in, unless every run is to have the same bits (`run.deterministic`)."""
    exact = device.type != "cuda" or torch.are_deterministic_algorithms_enabled()
    return torch.float32 if exact else torch.bfloat16


def hidden_matrices(model: Any, parameters: Mapping[str, nn.Parameter]) -> dict[nn.Parameter, int]:
    """Those of ``parameters`` that are matrices between ``model``'s embedding and its head, ``[m, n]``, or a layer's
    experts, ``[experts, m, n]``; and how many matrices, as files have them, lie above each other in m."""
    within, head = {id(parameter) for parameter in model.base_model.parameters()}, model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is head:
            within -= {id(parameter) for parameter in module.parameters()}
    known, found = model.config.model_type in IN_MATRICES | TURNED, {}
    for name, parameter in parameters.items():
        plain = parameter.ndim == 2 and not name.endswith("bias")  # experts' biases are a matrix together
        if id(parameter) in within and (plain or is_experts(name, parameter)):
            found[parameter] = len(matrices_of(name, 0)) if known and not plain else 1
    return found


class Muon(torch.optim.Optimizer):
    """Of the ``hidden`` matrices (see `hidden_matrices`), as ``config`` says; all else is ``others``', which steps with
    it and has its state in this one's. With ``on_host`` means lie in host memory. Matrices that are cut over ranks of
    ``world`` are dealt out to them, experts stay where they are, and replicas compute each the same. Iterates on the
    device of ``world``, wherever parameters lie. Every rank calls every method."""

    def __init__(
        self,
        hidden: Mapping[nn.Parameter, int],
        others: torch.optim.AdamW | None,
        config: OptimizerConfig,
        world: World,
        on_host: bool = False,
    ) -> None:
        self._config, self._device, self._others = config, world.device, others
        self._means = HostMeans(hidden, (MOMENTUM,), world.device) if on_host else None
        self._hidden: dict[str, Any] = {"params": [*hidden], "weight_decay": config.weight_decay}
        groups = [self._hidden] if hidden else []  # a stage, or an adapter, may have either alone
        super().__init__([*groups, *(others.param_groups if others else ())], {"lr": config.lr})
        if others:
            others.state = self.state
        self._dealt = DealtMatrices([parameter for parameter in hidden if parameter.ndim == 2], world)
        self._experts = {parameter: above for parameter, above in hidden.items() if parameter.ndim == 3}

    def is_hidden(self, parameter: nn.Parameter) -> bool:
        """``parameter`` is Muon's, not AdamW's."""
        return any(parameter is each for each in self._hidden["params"])

    @property
    def on_host(self) -> bool:
        """Means lie in host memory."""
        return self._means is not None

    def placed(self, parameter: nn.Parameter, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `HostMeans.placed`; where it is `on_host`."""
        keeps = self._means if self.is_hidden(parameter) else self._others
        assert isinstance(keeps, HostMeans | HostAdamW)
        return keeps.placed(parameter, state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Changes every parameter that has a gradient. There is no ``closure``."""
        if self._others:
            self._others.step()
        dtype = precision(self._device)
        for dealt in self._dealt.rounds:
            some = [each for each in dealt if each.parameter.grad is not None]
            if not some:
                continue
            mine = [self._direction(each.parameter).to(self._device, dtype) for each in some]
            wholes = self._dealt.gather(some, mine)
            empty = mine[0].new_empty(0)
            del mine
            found = [self._orthogonal(wholes.pop(0)[None])[0] for _ in range(len(wholes))]
            for each, moves in zip(some, self._dealt.scatter(some, found, empty), strict=True):
                self._move(local(each.parameter), moves, max(each.parameter.shape))
        for parameter, above in self._experts.items():
            if parameter.grad is not None:
                self._step_experts(parameter, above, dtype)
        if self._means:
            current_queue(self._device).mark().synchronize()  # they may be read there from now on

    def _step_experts(self, parameter: nn.Parameter, above: int, dtype: torch.dtype) -> None:
        """FSDP cuts between experts, never within one."""
        rows, columns = parameter.shape[1] // above, parameter.shape[2]
        some = max(1, ROUND_NUMBERS // (rows * columns)) * rows * columns
        direction, weights = self._direction(parameter), local(parameter)
        for mine, into in zip(direction.split(some), weights.split(some), strict=True):
            if mine.numel():  # there may be more ranks than experts
                found = self._orthogonal(mine.to(self._device, dtype).view(-1, rows, columns))
                self._move(into, found.reshape(-1), max(rows, columns))

    def _direction(self, parameter: nn.Parameter) -> torch.Tensor:
        """Takes the gradient into the mean; where to move, flat, of this rank's part."""
        state, momentum = self.state[parameter], self._config.momentum
        if MOMENTUM not in state and self._means:
            state.update(self._means.of(parameter))
        elif MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter, requires_grad=False)
        assert parameter.grad is not None
        gradient, kept = local(parameter.grad), local(state[MOMENTUM])
        mean = kept.to(gradient.device, non_blocking=True)
        mean.lerp_(gradient, 1 - momentum)
        if self._means:
            kept.copy_(mean, non_blocking=True)
        return gradient.lerp(mean, momentum) if self._config.nesterov else mean

    def _orthogonal(self, matrices: torch.Tensor) -> torch.Tensor:
        return orthogonalize(matrices, self._config.newton_schulz)

    def _move(self, weights: torch.Tensor, found: torch.Tensor, longest: int) -> None:
        """``weights``, of matrices whose longer side is ``longest``, against what was ``found`` for them."""
        rate: float = self._hidden["lr"]
        weights.mul_(1 - rate * self._config.weight_decay)
        weights.add_(found.to(weights.device, weights.dtype), alpha=-rate * self._config.rms * math.sqrt(longest))
