"""The critic in the table of actors."""

from penstock.protocols.columns import Column
from penstock.services.runtime.registry import LEARNERS_GRACE_S, ActorSpec

SPEC = ActorSpec(
    kind="critic",
    make="penstock.services.critic.service:make",
    count=lambda config: int(config.with_critic),
    threads=lambda config: config.critic.threads,
    preloaded=lambda config: config.critic.ranks == 1,
    ranks=lambda config: config.critic.ranks,
    nodes=lambda config: config.critic.nodes,
    gpus=lambda config: config.critic.ranks * (config.critic.device != "cpu"),
    columns=lambda config: [Column(name=config.critic_column, scorer="critic", per="token", of_step=True)],
    unneeded="nothing reads what it says: trainer.algorithm.advantage is neither gae nor prime",
    grace_s=LEARNERS_GRACE_S,
    single=True,
    learns=True,
)
