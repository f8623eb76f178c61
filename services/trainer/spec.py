"""The trainer in the table of actors."""

from penstock.services.runtime.registry import LEARNERS_GRACE_S, ActorSpec

SPEC = ActorSpec(
    kind="trainer",
    make="penstock.services.trainer.service:make",
    threads=lambda config: config.trainer.threads,
    preloaded=lambda config: config.trainer.ranks == 1,  # torchrun's ranks are processes of their own
    ranks=lambda config: config.trainer.ranks,
    nodes=lambda config: config.trainer.nodes,
    gpus=lambda config: config.trainer.ranks * (config.trainer.device != "cpu"),
    grace_s=LEARNERS_GRACE_S,
    single=True,
    learns=True,
)
