"""Versions on their way from the trainer to rollouts.

A line may break with an offer in it, which neither side sees: the trainer would wait for an answer until its deadline.
So a rollout that says hello again, by a line that is new, is told again what it has not answered. One that has heard it
refuses the second word.
"""

from __future__ import annotations

from penstock.protocols import messages as m
from penstock.services.broker.membership import Member
from penstock.services.broker.state import BrokerState


def relay(state: BrokerState, message: m.Invite | m.Propose | m.CommitVersion) -> list[str]:
    """Passes on what the trainer says to rollouts; returns those that are not here."""
    here = {rollout.identity: rollout for rollout in state.members.of_kind("rollout")}
    for target in message.targets:
        if target not in here:
            continue
        state.router.send(target, message)
        if isinstance(message, m.Propose):
            here[target].offered = [message]
        elif isinstance(message, m.CommitVersion) and _is_offered(here[target], message):
            here[target].offered.append(message)
    return [target for target in message.targets if target not in here]


def say_again(state: BrokerState, before: Member, member: Member) -> None:
    """To ``member``, which was ``before`` until its line broke."""
    member.offered = before.offered
    for offer in member.offered:
        state.router.send(member.identity, offer)


def answered(member: Member, answer: m.Loaded | m.LoadFailed) -> None:
    """It will not be told of this version again."""
    if _is_offered(member, answer):
        member.offered = []


def _is_offered(member: Member, message: m.CommitVersion | m.Loaded | m.LoadFailed) -> bool:
    return [(each.epoch, each.version) for each in member.offered[:1]] == [(message.epoch, message.version)]
