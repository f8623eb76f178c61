"""What learners ask of this installation, and whether their keys go together."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.pipeline.config import Config
from penstock.pipeline.preflight.report import Report
from penstock.services.runtime.install import install
from penstock.services.runtime.user_folders import lacks_command, path_with_ours


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is wrong."""
    learners = {"trainer": config.trainer} | ({"critic": config.critic} if config.with_critic else {})
    for name, learner in learners.items():
        if learner.offload_activations and learner.gradient_checkpointing is not True:
            report.problems.append(
                f"{name}.offload_activations: it moves what gradient_checkpointing=true keeps (without it all weights "
                f"would be moved as well, and what selective keeps is not seen); set {name}.gradient_checkpointing=true"
            )
        if learner.optimizer.moments == "8bit" and find_spec("torchao") is None:
            report.lacks_package(
                f"{name}.optimizer.moments=8bit: torchao is not installed; run: {install('adam8bit')}, or set it to "
                "float32"
            )
        if learner.optimizer.type == "custom":
            from penstock.services.learning.custom_optimizer import kept_by

            with report.collect():
                kept_by(learner.optimizer, f"{name}.optimizer")
        kept = learner.checkpoint
        others = kept.keep_every or kept.keep_best or config.reference.refresh_every
        if kept.keep_optimizer == "newest" and not others:
            report.notes.append(
                f"{name}.checkpoint.keep_optimizer=newest: no checkpoint stays beyond the newest {kept.keep}; set "
                "keep_every or keep_best, or leave it out"
            )
        program = next(iter(learner.checkpoint.then_words), "")
        if program and (lacks := lacks_command(program, path_with_ours())):
            report.here.append(f"{name}.checkpoint.then: {lacks}")
        own = config.critic.path if name == "critic" else None
        path, key = own or getattr(config.model, "path", ""), "critic.path" if own else "model.path"
        if learner.tokens_per_mlp and path:
            from penstock.services.modeling.load import empty_model
            from penstock.services.modeling.tiled_mlp import tile_mlps

            with report.collect():
                tile_mlps(empty_model(path, key=key), learner.tokens_per_mlp, f"{name}.tokens_per_mlp")
    if config.with_critic and config.critic.warmup_steps >= config.trainer.counted_steps:
        report.notes.append(
            f"critic.warmup_steps={config.critic.warmup_steps}: the policy stands still in these steps, and there are "
            f"trainer.steps={config.trainer.counted_steps}: the critic alone learns"
        )
    if config.trainer.weights_on_host and config.weights.transport in ("nccl", "cuda_ipc"):
        report.problems.append(
            f"weights.transport: {config.weights.transport} sends weights that lie on a GPU, and with "
            "trainer.offload=true they lie on the host; use auto, or set trainer.offload=optimizer"
        )
