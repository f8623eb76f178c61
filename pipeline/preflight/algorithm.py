"""The advantage, the loss and the correction of the user's own: called once, on numbers as a step has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.pipeline.config import Config
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.preflight.without_effect import idle_choices, idle_notes
from penstock.protocols.columns import GREEDY, LAGS, PICKED, POLICY, REFERENCE, SAMPLED, SQUARES, UNDECIDED, WEIGHTS
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.plugins import UserCodeError
from penstock.services.trainer.algorithm_config import CustomFunction
from penstock.services.trainer.presets import contradicted

if TYPE_CHECKING:
    import torch

    from penstock.services.trainer.algorithms.compose import Algorithm, Part

GROUPS, LENGTH = 2, 5


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found; built-in choices are not called."""
    algorithm = config.trainer.algorithm
    if algorithm.preset and (said := contradicted(algorithm.preset, algorithm.model_dump())):
        report.problems.append(f"trainer.algorithm: {said}")
    report.problems += idle_choices(config)
    report.notes += idle_notes(config)
    updates = config.trainer.updates
    if updates > 1 and not algorithm.loss.has_ratio:
        report.notes.append(
            f"trainer.epochs={config.trainer.epochs}, trainer.mini_batches={config.trainer.mini_batches}: the loss "
            f"{algorithm.loss.type} has no ratio, which says how far the policy has moved on within a step; "
            "take one update a step with it, or a loss that clips"
        )
    taught = {name: getattr(algorithm, name) for name in ("advantage", "teacher_advantage")}
    for name in [name for name, by in taught.items() if REFERENCE in getattr(by, "teachers", {})]:
        if config.reference.path is None:
            report.notes.append(
                f"trainer.algorithm.{name}: its teacher is the reference, which is the model that training starts "
                f"from; set reference.path to the teacher, or name scorers as {name}.teachers"
            )
    own = [c for c in ("advantage", "loss", "correction") if isinstance(getattr(algorithm, c), CustomFunction)]
    if not own:
        return
    with report.collect():
        try:
            _try(config, own)
        except UserCodeError as error:
            if not isinstance(error.__cause__, AssertionError):
                raise SetupError(str(error)) from error
            report.notes.append(f"{error}; it was called on random numbers, and may be right on real ones")


def _try(config: Config, own: list[str]) -> None:
    """Raises `SetupError` or `UserCodeError` where one of them gives what no step can use."""
    import torch

    from penstock.services.modeling.load import device_of
    from penstock.services.trainer.algorithms.compose import Algorithm
    from penstock.services.trainer.algorithms.totals import Totals

    chosen = config.trainer.algorithm
    algorithm = Algorithm(chosen)
    torch.manual_seed(0)
    device = device_of("cpu" if config.trainer.device == "cpu" else "auto")  # a GPU that is named may not be here
    rows = GROUPS * config.rollout.sampling.n
    mask = torch.ones(rows, LENGTH, dtype=torch.bool)
    mask[::2, -1] = False  # the last token of every second row does not count
    advantages = (torch.randn(rows, LENGTH) * mask).to(device)
    if "advantage" in own:
        advantages = _advantages(config, algorithm, mask).to(device)
        _finite(advantages, "advantage", chosen.advantage.function)  # type: ignore[union-attr]
    log_prob, part = _part(config, algorithm.columns, advantages, mask.to(device))
    weights, _ = algorithm.weights(part)
    if "correction" in own and weights is not None:
        _finite(weights, "correction", chosen.correction.function)  # type: ignore[union-attr]
    loss, _ = algorithm.loss(part, Totals(float(part.mask.sum()), float(rows)))
    if "loss" not in own:
        return
    name = chosen.loss.function  # type: ignore[union-attr]
    _finite(loss.detach(), "loss", name)
    if not loss.requires_grad:
        raise SetupError(
            f"trainer.algorithm.loss.function: {name}: its losses have no gradient; compute them from the argument "
            "log_prob, the second one, without detach() or item()"
        )
    algorithm.backward(loss)
    if log_prob.grad is None:
        raise SetupError(f"trainer.algorithm.loss.function: {name}: its losses do not depend on log_prob")
    _finite(log_prob.grad, "loss", name, "gives a gradient that is not finite")


def _advantages(config: Config, algorithm: Algorithm, mask: torch.Tensor) -> torch.Tensor:
    """As the function says of some rewards."""
    import torch

    rows, token = len(mask), config.columns.by_token
    scores, groups = torch.rand(rows, dtype=torch.float64), torch.arange(GROUPS).repeat_interleave(rows // GROUPS)
    by_row = {name: torch.rand((rows, LENGTH) if name in token else rows) for name in algorithm.group_columns}
    by_row |= {GREEDY: torch.rand(rows), SAMPLED: -torch.rand(rows, LENGTH), POLICY: -torch.rand(rows, LENGTH)}
    by_row |= {SQUARES: torch.rand(rows, LENGTH), WEIGHTS: torch.ones(rows, LENGTH)}
    return algorithm.advantages(scores, mask, groups, by_row).float()


def _part(
    config: Config, columns: list[str], advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, Part]:
    """Log-probabilities that a gradient is wanted of, and the micro-batch that they make."""
    import torch

    from penstock.services.trainer.algorithms.compose import Part

    rows = len(advantages)
    device = advantages.device
    log_prob = (-torch.rand(rows, LENGTH, device=device)).requires_grad_()
    token = config.columns.by_token
    values = {name: -torch.rand(rows, LENGTH if name in token else 1, device=device) for name in columns}
    values[LAGS] = torch.randint(0, 3, (rows, LENGTH), device=device).float()
    values[UNDECIDED] = torch.ones(rows, LENGTH, device=device)
    values[PICKED] = (torch.rand(rows, LENGTH, device=device) < 0.1).float()
    behaviour = (log_prob.detach() - 0.1 * torch.rand(rows, LENGTH, device=device)) * mask
    return log_prob, Part(log_prob * 1.0, behaviour, advantages, mask, values)


def _finite(values: torch.Tensor, choice: str, name: str, what: str = "gives numbers that are not finite") -> None:
    if not values.isfinite().all():
        raise SetupError(
            f"trainer.algorithm.{choice}.function: {name} {what}, called on ordinary ones; look for a logarithm of 0, "
            "a division by 0, or an exp() of large differences"
        )
