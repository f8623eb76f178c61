"""The gateways in the table of actors."""

from penstock.services.runtime.registry import ActorSpec

SPEC = ActorSpec(
    kind="gateway",
    make="penstock.services.gateway.service:make",
    count=lambda config: config.gateway.count,
    unneeded="gateway.count is 0: no agents take part",
)
