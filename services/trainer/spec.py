"""The trainer in the table of actors."""

from penstock.services.runtime.registry import ActorSpec

SPEC = ActorSpec(
    kind="trainer",
    make="penstock.services.trainer.service:make",
    threads=lambda config: config.trainer.threads,
    preloaded=lambda config: config.trainer.ranks == 1,  # torchrun's ranks are processes of their own
    ranks=lambda config: config.trainer.ranks,
    nodes=lambda config: config.trainer.nodes,
    gpus=lambda config: config.trainer.ranks * (config.trainer.device != "cpu"),
    grace_s=600.0,  # the step in hand, and a checkpoint
    single=True,
    learns=True,
)
