"""The sessions of the groups that this gateway holds: given to agents, answered by the policy, delivered when complete.

Everything here runs in one asyncio loop. What must survive this process is with the broker before an agent hears of it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import structlog

from penstock.protocols.experience import Branches, Group
from penstock.protocols.mailbox import RefusedError
from penstock.protocols.messages import Lease, Message
from penstock.services.data.picture_files import MOST_OF_GROUP
from penstock.services.gateway.access import WHO, Visitor
from penstock.services.gateway.config import GatewayConfig
from penstock.services.gateway.conversation import NOTHING, Conversation, Telling
from penstock.services.gateway.errors import LEAVING, LOST, AgentError
from penstock.services.gateway.formats import Forms
from penstock.services.gateway.fruitless import PEER, Fruitless
from penstock.services.gateway.measured import said_at_the_end, turn_rewards
from penstock.services.gateway.policy import Policy, Spliced
from penstock.services.gateway.questions import ONCE, Ask, Asking, EndedError
from penstock.services.gateway.records import Records, at_the_end, restore, session_id
from penstock.services.gateway.replies import Replies
from penstock.services.gateway.session import Said, Session, Turn
from penstock.services.gateway.silence import Silence
from penstock.services.gateway.turn_names import TurnName, turn_called
from penstock.services.gateway.turn_times import TurnTimes
from penstock.services.gateway.work import Ended, Held, Key, Work
from penstock.services.turns.tokenizer import Tokenizer

log = structlog.get_logger()

BUSY_S = 2.0
UNASKED_S = 5.0
"""Without an agent that asks for a session, groups that nobody is at are given back after so long."""
SETTLING_S = 20.0
"""After its start, a gateway waits for sessions that it does not know."""


class Desk:
    """See the module's docstring. ``ask`` says something to the broker; ``deliver`` hands over a finished group, or the
    reason why there is none; ``gone`` is told of groups that another gateway has now; ``reads`` says of a source that
    its prompts' rewards are made of what agents say."""

    def __init__(
        self,
        config: GatewayConfig,
        text: Tokenizer,
        max_length: int | None,
        ask: Callable[[Message, float], Future[Message]],
        deliver: Callable[[Lease, Group | str], None],
        gone: Callable[[Key], None],
        reads: Callable[[str], bool],
        wants: Callable[[int], None] = lambda openers: None,
        gave_back: Callable[[Key], None] = lambda key: None,
    ) -> None:
        self.config, self._text, self.max_length = config, text, max_length
        self._deliver, self._gone, self._reads = deliver, gone, reads
        self._records = Records(ask, self.forget)
        self._wants, self._gave_back = wants, gave_back
        self._openers, self._opened_at = 0, time.monotonic()
        """Agents that wait for a session, and when one was last asked for."""
        self._silence = Silence(config, self.abandon)
        self.replies, self.forms = Replies(text, config.tool_calls, config.thoughts == "apart"), Forms()
        self._policy = Policy(config, text, self.replies, max_length, ask, self._records)
        self._works: dict[Key, Work] = {}
        self._free: deque[tuple[Work, Session]] = deque()
        self._held: dict[str, Held] = {}
        self._opening = Counter[str]()
        """By the key's name: sessions that are about to be held."""
        self._ended, self._fruitless = Ended(), Fruitless()
        self._more = asyncio.Event()
        self._times = TurnTimes()
        self._settled_at = time.monotonic() + SETTLING_S
        self.over = ""
        """Why no session is given out any more."""
        self._leaves_alone = False

    # --- groups ------------------------------------------------------------------------------------------------------

    def has(self, lease: Lease) -> bool:
        """The group is here."""
        return (lease.purpose, lease.number) in self._works

    def start(self, lease: Lease) -> None:
        """A group to be made, with what is known of it from a gateway before this one."""
        try:
            prompt = self._text.encode(lease.prompt)
            count = lease.sampling.trajectories
            work = Work(lease, prompt, [Session(place, room=MOST_OF_GROUP // count) for place in range(count)])
            restore(work, self.replies)
        except Exception as error:  # a tokenizer's template may raise anything; it costs this prompt alone
            self._deliver(lease, f"{type(error).__name__}: {error}")
            return
        self._works[work.key] = work
        for session in work.sessions:
            if session.opened and not session.ended:
                held = Held(session_id(work.lease, session), work, session, session.life, session.owner)
                held.heard = time.monotonic() if session.beats else None
                for turn in session.turns.values():
                    held.questions.remember(turn)
                self._held[held.id] = held
            elif session.ended:
                self._ended.add(session_id(work.lease, session), session.owner)
            else:
                self._free.append((work, session))
        self._more.set()
        self._complete(work)

    def end(self, reason: str, alone: bool = False) -> None:
        """The run is over, or this gateway ``alone`` leaves it: whoever waits or asks is told."""
        self.over, self._leaves_alone = reason, alone
        self._more.set()
        for held in self._held.values():
            held.questions.cancel()
        self.forms.close()

    def expire(self) -> None:
        """Sessions of silent agents are given to others. Called every second or so."""
        self._silence.look(list(self._held.values()))
        if not self._openers and self._opened_at < time.monotonic() - UNASKED_S:
            self._give_back()

    def heard(self, sessions: Sequence[str]) -> None:
        """The client that has these is alive."""
        for id in sessions:
            if (held := self._held.get(id)) and WHO.get().sees(held.owner):
                held.heard, held.taken = time.monotonic(), True

    def rows(self) -> list[dict[str, Any]]:
        """Live sessions, for people."""
        return [held.row(self.config) for held in self._held.values() if WHO.get().sees(held.owner)]

    def gauges(self) -> dict[str, float]:
        """For the dashboard."""
        counts = {"sessions": len(self._held), "sessions_free": len(self._free), "turns_waiting": self._waiting}
        return self._times.means() | {name: float(count) for name, count in counts.items()}

    # --- agents ------------------------------------------------------------------------------------------------------

    async def open(self, wait_s: float, beats: bool = False) -> Held:
        """The next session that no agent has; of a client that ``beats``, it is lost when that stops. Raises
        `AgentError` where there is none within ``wait_s``."""
        deadline = time.monotonic() + wait_s
        await self._fruitless.wait(PEER.get(), deadline, lambda: bool(self.over))
        self._openers, self._opened_at = self._openers + 1, time.monotonic()
        try:
            return await self._open(deadline, beats, WHO.get())
        finally:
            self._openers, self._opened_at = self._openers - 1, time.monotonic()

    async def _open(self, deadline: float, beats: bool, who: Visitor) -> Held:
        while True:
            who.check_sessions(self._opening[who.name] + sum(h.owner == who.name for h in self._held.values()))
            while self._free:
                work, session = self._free.popleft()
                if self._works.get(work.key) is not work:
                    continue
                held = Held(session_id(work.lease, session), work, session, session.life, who.name)
                held.heard, held.taken = time.monotonic() if beats else None, not beats
                self._opening[who.name] += 1
                try:
                    await self._records.keep(work, session, {"opened": True, "beats": beats, "owner": who.name})
                except AgentError as error:
                    if error.code == LOST:  # with its group
                        continue
                    self._free.append((work, session))
                    raise
                finally:
                    self._opening[who.name] -= 1
                session.opened = True
                self._held[held.id] = held
                return held
            self._check_over()
            self._wants(self._openers)
            if (left := deadline - time.monotonic()) <= 0:
                raise AgentError(503, "no_session", "no task is free now; ask again", 1.0)
            self._more.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), left)

    async def untaken(self, held: Held) -> None:
        """Its agent had gone before it heard of the session: it is free again, and has lost no life."""
        if self._held.get(held.id) is held and not held.session.turns and not held.questions.pending:
            await self._set_free(held)

    async def find(self, id: str) -> Held:
        """The session that an agent speaks of. Raises `AgentError`."""
        await self._settled(id)
        held = self._held.get(id)
        if held is None or not WHO.get().sees(held.owner):
            self._check_over()
            raise AgentError(404, "unknown_session", f"there is no session {id!r} here: it has ended, or was given on")
        held.touched, held.taken = time.monotonic(), True
        return held

    async def chat(
        self,
        held: Held,
        conversation: Conversation,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        asked: Asking = ONCE,
    ) -> Turn:
        """The policy's answer to a conversation. Raises `AgentError`."""
        return await self.chats(held, conversation, max_tokens, stop)(asked)

    def chats(
        self,
        held: Held,
        conversation: Conversation,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        calls: bool = True,
    ) -> Ask:
        """As `chat`, for several answers. Without ``calls`` nothing that they say asks for a tool."""
        said, spliced, telling = self._spliced(held, conversation)
        about = json.dumps([said, *telling.named, max_tokens, list(stop)] + ["none"] * (not calls), sort_keys=True)
        return lambda asked: self._once(held, asked, about, spliced, telling, max_tokens, stop, calls)

    def _spliced(self, held: Held, conversation: Conversation) -> tuple[Said, Spliced, Telling]:
        whole = conversation.about(held.work.lease.prompt, self._text)
        return *self._policy.spliced(held.session, whole, telling := whole.telling), telling

    def count(self, held: Held, conversation: Conversation) -> int:
        """Tokens of a conversation, up to where the next answer begins."""
        _, spliced, _ = self._spliced(held, conversation)
        return len(held.session.tokens(spliced.parent)) + len(spliced.given)

    async def generate(
        self,
        held: Held,
        tokens: np.ndarray,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        asked: Asking = ONCE,
    ) -> Turn:
        """The policy's answer to tokens of the agent's own."""
        spliced = self._policy.of_tokens(held.session, tokens)
        about = json.dumps([[{"tokens": tokens.tolist()}], max_tokens, list(stop)])
        return await self._once(held, asked, about, spliced, NOTHING, max_tokens, stop)

    def completes(self, held: Held, text: str, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Ask:
        """The policy's next words after a text of the agent's own. Raises `AgentError`."""
        spliced = self._policy.written_on(held.session, text)
        about = json.dumps([[{"text": text}], max_tokens, list(stop)])
        return lambda asked: self._once(held, asked, about, spliced, NOTHING, max_tokens, stop)

    async def reward(self, id: str, reward: float, name: TurnName = None) -> Turn:
        """What the turn of that ``name`` was worth, durably. Said again, it replaces what was said. Raises
        `AgentError`."""
        held = await self._unended(id)
        async with held.alone():
            held = await self._unended(id)
            turn = turn_called(name, id, held.session)
            found = turn_rewards(held, {turn.number: reward}, self._reads(held.work.lease.source))
            await self._records.keep_reward(held.work, held.session, turn.number, found[turn.number])
            turn.reward = found[turn.number]
            return turn

    async def finish(
        self, id: str, reward: float | None, metrics: Mapping[str, float] | None = None,
        rewards: Mapping[str, float] | None = None, truncated: bool = False, branches: Branches = "shared",
    ) -> None:  # fmt: skip
        """The agent is done, or was cut off (``truncated``); ``rewards`` are of turns, by their names. Without any the
        reward functions say how good it was. Said again, it is true."""
        await self._settled(id)
        if self._ended.heard_of(id):
            return
        held = await self.find(id)
        async with held.alone():
            if id not in self._ended:
                held = await self.find(id)
                read = self._reads(held.work.lease.source)
                how = said_at_the_end(held, reward, metrics or {}, rewards or {}, read)
                await self._settle(held, how | {"truncated": truncated, "branches": branches})
                self._ended.add(held.id, held.owner)

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _unended(self, id: str) -> Held:
        """As `find`, of one that may still be spoken of. Raises `AgentError`."""
        await self._settled(id)
        if self._ended.heard_of(id):
            raise AgentError(409, "session_ended", f"the session {id!r} is finished: its rewards are said")
        return await self.find(id)

    async def _settled(self, id: str) -> None:
        """A gateway that has just begun waits for a session: it may be about to be given what another one had."""
        while not (id in self._held or id in self._ended or time.monotonic() > self._settled_at or self.over):
            await asyncio.sleep(0.05)

    @property
    def _waiting(self) -> int:
        """Turns that agents wait for."""
        return sum(held.questions.pending for held in list(self._held.values()))  # gauges are read in another thread

    async def _once(self, held: Held, asked: Asking, about: str, *rest: Any) -> Turn:
        """What is asked again has one answer."""
        try:
            return await held.questions.once(
                asked, about, lambda digest: self._times.timed(self._policy.ask(held, digest, *rest)),
                self._check_room, held.note, self.config.turn_s,
            )  # fmt: skip
        except EndedError:
            self._check_over()
            raise AgentError(410, LOST, "the session has ended") from None
        except Exception as error:
            told = self._records.refused(held.work.key, error) if isinstance(error, RefusedError) else error
            held.error = str(told)
            raise told from None

    def _check_room(self) -> None:
        """For one more turn. Raises `AgentError`."""
        if self._waiting >= self.config.waiting:
            full = f"gateway.waiting={self.config.waiting} turns are waiting for the policy; ask again"
            raise AgentError(429, "busy", full, BUSY_S)
        WHO.get().take_turn()
        self._fruitless.had_turn(PEER.get())

    async def abandon(self, held: Held, reason: str) -> None:
        """The agent gives up, or is gone: another gets it, or it has failed. One that has ended meanwhile stays so."""
        async with held.alone():
            if self._held.get(held.id) is not held:
                return
            self._fruitless.gave_up(PEER.get(), bool(held.session.turns))
            given_out = held.life + 1 - held.session.spared
            if held.taken and given_out >= self.config.attempts:
                failure = f"given out {given_out} times (gateway.attempts): {reason}"
                await self._settle(held, {"reward": 0.0, "failure": failure})
                return
            log.info("a session begins anew", session=held.id, reason=reason)
            held.questions.cancel()
            held.session.begin_anew(held.taken)
            await self._set_free(held)

    async def _set_free(self, held: Held) -> None:
        """Another may have the session, also where the broker cannot be told of it now."""
        self._held.pop(held.id, None)
        work, session = held.work, held.session
        session.opened = False
        try:
            await self._records.keep(work, session, {"opened": False})
        finally:
            self._free.append((work, session))
            self._more.set()

    async def _settle(self, held: Held, how: dict[str, Any]) -> None:
        """The session has ended, durably."""
        work, session = held.work, held.session
        held.questions.cancel()
        how = {"failure": "", "metrics": {}} | at_the_end(session, held.owner) | how
        await self._records.keep(work, session, how)
        session.end(how)
        self._held.pop(held.id, None)
        self._complete(work)

    def _complete(self, work: Work) -> None:
        if not all(session.ended for session in work.sessions) or self._works.get(work.key) is not work:
            return
        del self._works[work.key]
        try:
            self._deliver(work.lease, work.group(lambda ids: self._text.decode([list(ids)])[0]))
        except Exception as error:  # an engine's numbers that break a trajectory's rules, say
            log.exception("a group cannot be delivered", group=work.lease.number)
            self._deliver(work.lease, f"{type(error).__name__}: {error}")

    def _give_back(self) -> None:
        """Groups that no agent is at are for gateways that have agents."""
        busy = {held.work.key for held in self._held.values()}
        for key, work in list(self._works.items()):
            if key not in busy:
                del self._works[key]
                self._free = deque((other, session) for other, session in self._free if other is not work)
                self._gave_back(key)

    def forget(self, key: Key) -> None:
        """The group is another gateway's, or gone."""
        work = self._works.pop(key, None)
        if work is not None:
            self._gone(key)
        for held in [held for held in self._held.values() if held.work is work]:
            del self._held[held.id]

    def _check_over(self) -> None:
        if self.over and self._leaves_alone:
            raise AgentError(503, LEAVING, f"this gateway ends: {self.over}; another has its sessions", BUSY_S)
        if self.over:
            raise AgentError(410, "run_over", f"the run is over: {self.over}")
