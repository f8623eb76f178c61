"""The reference in the table of actors."""

from penstock.protocols.columns import REFERENCE, Column
from penstock.services.runtime.registry import ActorSpec

SPEC = ActorSpec(
    kind="reference",
    make="penstock.services.reference.service:make",
    count=lambda config: config.reference.count if config.with_reference else 0,
    threads=lambda config: config.reference.threads,
    preloaded=lambda config: True,
    gpus=lambda config: config.reference.gpus * (config.reference.device != "cpu"),
    columns=lambda config: [Column(name=REFERENCE, scorer="reference", per="token")],
    unneeded="trainer.algorithm.kl.coefficient is 0, or the trainer itself computes it (reference.in_trainer)",
)
