"""The reference without a process of its own: with its adapter switched off the policy is the model that it was."""

from __future__ import annotations

from penstock.protocols.columns import REFERENCE
from penstock.services.learning.batch import TrainingBatch
from penstock.services.modeling.lora import without_adapter
from penstock.services.modeling.parallel.fsdp import forward
from penstock.services.trainer.learner import Learner


def with_reference(learner: Learner, step: TrainingBatch, temperature: float) -> TrainingBatch:
    """``step`` with the column `reference`, the log-probabilities of its tokens under the model that the adapter adds
    to: a forward pass over the step more. All ranks together."""
    learner.flops.begin()
    with without_adapter(learner.model):
        found = learner.evaluate(step, lambda rows: forward(learner.model, rows, temperature))
    learner.flops.keep()
    return step.with_tokens(REFERENCE, found)
