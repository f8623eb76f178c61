"""A run's sessions, played one after the other, many at once, until the run is over."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from penstock.protocols.agent_client import AgentRefusedError, AsyncAgentClient, AsyncAgentSession, RunOver
from penstock.protocols.mailbox import DeadlineError
from penstock.services.players.base import Played, Player

log = structlog.get_logger()

WAIT_S = 300.0
"""For a session; then it is asked for again."""
NOT_READ = "not_read"
"""How a gateway refuses rewards of turns."""
PAUSE_S = 1.0
"""After a session that could not be played."""


@dataclass
class Score:
    """What has come of it so far."""

    played: int = 0
    given_up: int = 0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    """Rewards, where the environment gave one."""

    def __str__(self) -> str:
        mean = f", reward of the last {len(self.last)}: {sum(self.last) / len(self.last):.3f}" if self.last else ""
        return f"{self.played} played, {self.given_up} given up{mean}"


async def play_run(
    gateway: str | Path,
    keys: Path | None,
    player: Player,
    at_once: int,
    told: Callable[[Score], None] = lambda score: None,
) -> Score:
    """Plays ``at_once`` sessions at a time; ``told`` hears of each that has ended. Raises `DeadlineError` where no
    gateway has answered for `WAIT_S`."""
    score, late = Score(), None
    try:
        async with AsyncAgentClient(gateway, keys) as client:
            await player.open()
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(at_once):
                        group.create_task(_work(client, player, score, told))
            except* DeadlineError as away:
                late = away
            finally:
                await player.close()
    except RunOver:  # before it was there
        await player.close()
    if late is not None:
        raise DeadlineError(f"no session for {WAIT_S:g} s: {_first(late)}; {score}")
    return score


def _first(several: BaseExceptionGroup[DeadlineError]) -> BaseException:
    one = several.exceptions[0]
    return _first(one) if isinstance(one, BaseExceptionGroup) else one


async def _work(client: AsyncAgentClient, player: Player, score: Score, told: Callable[[Score], None]) -> None:
    while True:
        try:
            session = await client.session(wait_s=WAIT_S)
            try:
                await _play(session, player, score)
            except DeadlineError as error:  # whether the gateway comes back shows when the next session is asked for
                session.forget()
                score.given_up += 1
                log.warning("a session is given up", session=session.id, reason=str(error))
        except RunOver:
            return
        except AgentRefusedError as refused:  # no session for so long, a quota, or it was lost
            log.warning("a session was refused", code=refused.code, reason=str(refused))
            await asyncio.sleep(max(refused.retry_s, PAUSE_S))
        told(score)


async def _play(session: AsyncAgentSession, player: Player, score: Score) -> None:
    try:
        played = await player.play(session)
        await _finish(session, played)
    except DeadlineError:  # the gateway is away: abandoning would only wait again
        raise
    except AgentRefusedError as refused:
        if refused.lost:
            session.forget()
            raise
        await session.abandon(str(refused))
        score.given_up += 1
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        await session.abandon(reason)
        if not isinstance(error, Exception):  # the player is told to end
            raise
        score.given_up += 1
        log.warning("a session is given up: another may try", session=session.id, reason=reason)
        await asyncio.sleep(PAUSE_S)
        return
    score.played += 1
    if (total := played.total) is not None:
        score.last.append(total)


async def _finish(session: AsyncAgentSession, played: Played) -> None:
    """Says what came of it. Where the run's reward functions judge, nobody reads what turns were worth."""
    try:
        await session.finish(played.reward, played.metrics, played.turn_rewards, played.truncated)
    except AgentRefusedError as refused:
        if refused.code != NOT_READ:
            raise
        await session.finish(played.total, played.metrics, truncated=played.truncated)
