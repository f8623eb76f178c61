"""The rollout actor: leases in, finished groups out, weights replaced in between."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from importlib.metadata import entry_points
from itertools import count
from typing import Any

import structlog
import torch

from penstock.protocols.mailbox import DeadlineError, FencedError
from penstock.protocols.messages import (
    Generate,
    HelloNeeded,
    Lease,
    Loaded,
    LoadFailed,
    Message,
    Stop,
    Unwanted,
)
from penstock.services.environments.config import key_of as environment_key
from penstock.services.modeling import determinism
from penstock.services.modeling.lengths import longest_sequence, positions_of
from penstock.services.modeling.load import load_config
from penstock.services.modeling.whole_weights import AdapterBase
from penstock.services.rollout.by_source import FIRST_NUMBER, BySource, posting
from penstock.services.rollout.config import NoEngineConfig, RolloutConfig, TorchEngineConfig, VllmEngineConfig
from penstock.services.rollout.engines.base import (
    Completion,
    DrainingEngine,
    Engine,
    EngineError,
    Refusal,
    SleepingEngine,
    WorkerEngine,
)
from penstock.services.rollout.group_maker import GroupMaker, Made
from penstock.services.rollout.multi_turn import MultiTurn
from penstock.services.rollout.single_turn import SingleTurn
from penstock.services.rollout.turn_server import TurnServer
from penstock.services.runtime import allowance, device_turn, failpoint, health, registry
from penstock.services.runtime.actor import Actor, ActorContext
from penstock.services.runtime.device_turn import LOOK_S, Guest, GuestsTurn
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.outbox import DURABLE_DEADLINE_S, Answered, Outbox, answer_of, key_of
from penstock.services.runtime.plugins import load_plugin
from penstock.services.runtime.watchdog import ended_if_hung
from penstock.services.turns.tokenizer import Tokenizer
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.receiver.canary import CanaryError, check_canary
from penstock.services.weights.receiver.receiver import Prepared, Receiver
from penstock.services.weights.receiver.worker_desk import WorkerDesk

log = structlog.get_logger()

REFUSE_S, TELL_AGAIN_S = 5.0, 5.0
MOST_WORKERS = 4
"""Of a plain environment, unless `rollout.environment.workers` says more: each has loaded it."""
IDLE_S = 0.5
"""An idle rollout looks around so often; one that shares its device more often."""
READ_S = 0.2
"""So long an engine that has work waits while what has arrived is read: long answers that are given take a while."""


class Rollout:
    """One rollout process. `run` returns the reason it ended for."""

    def __init__(
        self,
        context: ActorContext,
        config: RolloutConfig,
        weights: WeightsConfig,
        model_path: str,
        dtype: str,
        group_size: int,
        deterministic: bool = False,
        template: Mapping[str, Any] | None = None,
        adapter_rank: int = 0,
        turn: GuestsTurn | None = None,
        head_dtype: str | None = None,
        pictures: bool = False,
        towers_learn: bool = False,
    ) -> None:
        """``adapter_rank``: of versions that are adapters, which are added to the model at ``model_path``; 0: they are
        whole. ``turn``, which has come: at the device, which is the trainer's too. ``head_dtype``: of the logits; None:
        ``dtype``. ``pictures``: prompts may show some; ``towers_learn``: versions see them otherwise."""
        torch.set_num_threads(context.threads)
        if deterministic and not config.without_engine:
            determinism.pin(context.folder, "rollout", context.threads)
            engine = config.engine.model_copy(update={"max_sequences": config.sampling.n})  # a group at a time
            config = config.model_copy(update={"engine": engine})
        self.actor = Actor("rollout", context)
        self._text = Tokenizer(model_path, template)
        base = AdapterBase(model_path, dtype)
        if adapter_rank and not config.without_engine:
            base.check([])  # now, before anybody waits for a version
        self.engine = make_engine(
            config, model_path, dtype, self._text, turn is not None, adapter_rank, head_dtype, pictures, towers_learn
        )
        self._guest = _as_guest(turn, self.engine, lambda: bool(self._prepared)) if turn else None
        self._receiver = None if config.without_engine else self._make_receiver(weights, context, base)
        self._maker, self._turns = self._make_maker(config, model_path), TurnServer(self.engine, self._text)
        self._config, self._group_size = config, group_size
        self._outbox = Outbox(self.actor, self._limit)
        self._stop: Stop | None = None
        self.actor.mailbox.handlers[Stop] = self._hear_stop
        self._prepared: deque[Prepared] = deque()
        """Versions that are to be swapped in."""
        self._generated, self._generated_at = 0.0, time.monotonic()

    def _make_maker(self, config: RolloutConfig, model_path: str) -> GroupMaker:
        """What makes groups of leases."""
        max_length = longest_sequence(config.engine, positions_of(load_config(model_path)))
        post, numbers = self.actor.mailbox.post, count(FIRST_NUMBER)
        played: dict[str, GroupMaker] = {}
        for source, environment in config.all_environments.items():
            said = posting(source, post) if config.environments else post
            played[source] = MultiTurn(
                self.engine, self._text, environment, max_length, said, environment_key(source), numbers
            )
        once = played.setdefault("", SingleTurn(self.engine, self._text, config.given, max_length))
        return BySource(played) if config.environments else once

    def _make_receiver(self, weights: WeightsConfig, context: ActorContext, base: AdapterBase) -> Receiver | WorkerDesk:
        """What hears of versions: this process, or the engine's own, for which it speaks."""
        if not isinstance(self.engine, WorkerEngine):
            at_work = self._guest.at_work if self._guest else nullcontext
            return Receiver(self.engine, self.actor.mailbox, weights, context.keys, base=base, at_work=at_work)
        desk = WorkerDesk(self.engine.workers, self.actor.mailbox, weights, context.keys)
        self.engine.join_workers(desk.address, weights, context.keys)
        return desk

    def run(self) -> str:
        """Generates until it is told to stop."""
        try:
            self.actor.join()
            self._outbox.joined()
            with ended_if_hung(self.actor.context.name, self._config.timeout_s, "rollout.timeout_s"):
                return self._run()
        finally:  # an engine's own processes end before this one's last words
            self._maker.close()
            self.engine.close()

    def _run(self) -> str:
        reason: str | None = None
        while reason is None:
            health.beat()
            awake = self._guest is None or self._guest.poll()
            self._swap_waiting(awake)
            reason = self._read_inbox(wait=not (awake and self.engine.pending()))
            if awake and self.engine.pending():
                with self.actor.busy():
                    for result in self.engine.step():
                        self._take(result)
            self._update_gauges()
        self._outbox.drain(lambda: self._read_inbox(wait=True))
        if self._receiver:
            self._receiver.close()
        self.actor.leave(reason)
        return reason

    def _read_inbox(self, wait: bool) -> str | None:
        """Handles what has arrived, for `READ_S` where the engine has work; returns the reason to stop, if there is
        one, which waits for no work that came before it."""
        inbox, until = self.actor.mailbox.inbox, time.monotonic() + READ_S
        try:
            event = inbox.get(timeout=LOOK_S if self._guest else IDLE_S) if wait else inbox.get_nowait()
            while True:
                health.beat()
                stop = event if isinstance(event, Stop) else self.actor.own_stop or self._stop
                if stop and isinstance(event, Stop | Lease | Generate):
                    return stop.reason
                if isinstance(event, Exception):  # fenced by the broker, or the mailbox has failed
                    raise event
                self._handle(event)
                if self.engine.pending() and time.monotonic() >= until:
                    return None
                event = inbox.get_nowait()
        except queue.Empty:
            return None

    def _hear_stop(self, stop: Stop) -> None:
        """In the mailbox's thread."""
        self._stop = stop
        self.actor.mailbox.post(stop)

    def _handle(self, event: object) -> None:
        if isinstance(event, Lease):
            self._start(event)
        elif isinstance(event, Generate):
            self._serve(event)
        elif isinstance(event, Unwanted):
            for id in filter(self._turns.drop, event.ids):
                self.actor.put_down("turn", id)
                self._outbox.dismiss()
        elif isinstance(event, Prepared):
            self._prepared.append(event)
            self._swap_waiting(self._guest is None or self._guest.awake)
        elif isinstance(event, Answered):
            self._outbox.answered(event)
        elif isinstance(event, HelloNeeded):
            self._outbox.forgotten()
        elif isinstance(event, Message):
            log.warning("unexpected message", type=type(event).__name__)
        else:
            self._finish(self._maker.heard(event))

    def _start(self, lease: Lease) -> None:
        if self._maker.has(lease) or key_of(lease) in self._outbox:
            self._outbox.dismiss()  # leased to us again while we still hold it: one answer will do
            return
        try:
            made = self._maker.start(lease)
        except Exception as error:  # a tokenizer's template may raise anything; it costs this prompt alone
            made = lease, f"{type(error).__name__}: {error}"
        self._finish(made)

    def _serve(self, asked: Generate) -> None:
        """One turn of an agent's session."""
        if self._turns.has(asked.id) or ("turn", asked.id) in self._outbox:
            self._outbox.dismiss()  # as in `_start`
        elif refused := self._turns.start(asked):
            self._outbox.say(refused)

    def _take(self, result: Completion | Refusal) -> None:
        """The engine is done with a turn, or with a part of a group."""
        if answered := self._turns.take(result):
            self._outbox.say(answered)
        else:
            self._finish(self._maker.take(result))

    def _finish(self, made: Made | None) -> None:
        if made is not None:
            self._outbox.say(answer_of(*made))

    def _limit(self) -> int:
        """Groups that may be in flight."""
        return self._config.most_groups(self.engine.capacity, self._group_size)

    def _swap_waiting(self, awake: bool) -> None:
        """What is prepared serves, unless the engine is asleep, or has to end something first."""
        while awake and self._prepared and self._drained(self._prepared[0].loaded):
            self._swap(self._prepared.popleft())

    def _drained(self, coming: Loaded) -> bool:
        try:
            return not isinstance(self.engine, DrainingEngine) or self.engine.drained()
        except EngineError as error:
            self._refuse(coming, error)
            raise

    def _swap(self, prepared: Prepared) -> None:
        started = time.monotonic()
        version, digest = prepared.loaded.version, prepared.loaded.digest
        try:
            self.engine.swap(prepared.weights, version)
            pause = time.monotonic() - started
            difference = self._check_canary(prepared)
        except (CanaryError, EngineError) as error:
            self._refuse(prepared.loaded, error)
            raise
        prepared.swapped.set()
        failpoint.reach("receiver-swapped", version)
        self.actor.version, self.actor.digest = version, digest
        log.info("version loaded", version=version, digest=digest, pause_s=round(pause, 6))
        self._tell(prepared.loaded.model_copy(update={"pause_s": pause, "canary": difference}))

    def _tell(self, loaded: Loaded) -> None:
        """Until the broker has heard it: one that has just begun may not know yet that there is this version."""

        def answered(future: Future[Message]) -> None:
            failpoint.reach("receiver-acknowledged", loaded.version)
            serves = self.actor.version, self.actor.digest
            if future.exception() and serves == (loaded.version, loaded.digest):
                again = threading.Timer(TELL_AGAIN_S, self._tell, [loaded])
                again.daemon = True
                again.start()

        try:
            self.actor.mailbox.ask_later(loaded, DURABLE_DEADLINE_S).add_done_callback(answered)
        except (DeadlineError, FencedError):
            pass  # it leaves

    def _check_canary(self, prepared: Prepared) -> float:
        """Of an engine that cannot score before it serves."""
        if prepared.canary is None:
            return prepared.loaded.canary
        return check_canary(self.engine, prepared.weights, prepared.canary)

    def _refuse(self, loaded: Loaded, error: Exception) -> None:
        """What serves is wrong, or nothing does: the trainer hears why, and this process ends, with all that was
        sampled since the swap."""
        reason = f"{type(error).__name__}: {error}"
        try:
            self.actor.mailbox.ask(LoadFailed(epoch=loaded.epoch, version=loaded.version, error=reason), REFUSE_S)
        except Exception as silent:
            log.warning("nobody could be told", error=str(silent))

    def _update_gauges(self) -> None:
        now = time.monotonic()
        if now - self._generated_at < 1.0:
            return
        gauges = self.engine.gauges() | self._maker.gauges()
        if self._guest:
            gauges["slept_s"] = self._guest.slept_s
        generated = gauges.get("generated_tokens", 0.0)
        gauges["tokens_per_s"] = (generated - self._generated) / (now - self._generated_at)
        self._generated, self._generated_at = generated, now
        self.actor.gauges = gauges


def make(context: ActorContext, config: Any, kind: str) -> Rollout:
    """The actor, for a run's whole config."""
    turn = None
    if config.run.colocated:
        device = getattr(config.rollout.engine, "device", "auto")
        turn = device_turn.enter(context.folder, context.name, device, registry.actors(config)[kind].gpus(config))
    return Rollout(
        context,
        _with_workers(config),
        config.weights,
        context.model_path,
        config.model.dtype,
        1 if config.gateway.count else config.sampling.trajectories,  # agents ask for one answer at a time
        config.run.deterministic,
        config.template,
        config.trainer.lora.rank if config.trainer.sends_adapter else 0,
        turn,
        config.model.head_dtype,
        config.show_pictures,
        config.trainer.train_towers,
    )


def _with_workers(config: Any) -> RolloutConfig:
    """With as many processes of the environments as there are cores to spare, where the config does not say."""
    rollout: RolloutConfig = config.rollout
    count = max(1, len(rollout.all_environments))
    spare = {"workers": allowance.spare_cores(config, rollout.count * count, MOST_WORKERS)}
    made = {
        name: each if each.workers else each.model_copy(update=spare) for name, each in rollout.all_environments.items()
    }
    return rollout.model_copy(update={"environment": made.pop("", None), "environments": made})


def _as_guest(turn: GuestsTurn, engine: Engine, coming: Callable[[], bool]) -> Guest:
    """``engine`` sleeps while the trainer works; ``coming``: a version is to be loaded then. Raises `SetupError`."""
    if not isinstance(engine, SleepingEngine):
        raise SetupError(
            "run.placement: colocated wants an engine that can sleep, and this one has no sleep() and wake(); use "
            "rollout.engine.type=torch or vllm, or run.placement=as_given"
        )
    return Guest(turn, engine.sleep, lambda: getattr(engine, "wake_to_load" if coming() else "wake", engine.wake)())


def make_engine(
    config: RolloutConfig, model_path: str, dtype: str, text: Tokenizer, sleeps: bool = False, adapter_rank: int = 0,
    head_dtype: str | None = None, pictures: bool = False, towers_learn: bool = False,
) -> Engine:  # fmt: skip
    """The engine that ``config.engine`` names. Its weights come by the weight channel. It must know from the start that
    it ``sleeps`` while others have its device, the rank of adapters that are to lie beside the model (0: none), the
    ``head_dtype`` of its logits (None: ``dtype``), which one of another make is told by its options, and whether
    prompts may show ``pictures``, which each version sees otherwise where ``towers_learn``."""
    engine = config.engine
    if isinstance(engine, NoEngineConfig):
        from penstock.services.rollout.engines.nothing import NoEngine

        return NoEngine()
    whole = load_config(model_path)
    model_config = whole.get_text_config()
    stop_ids = text.stop_ids | text.special_ids(config.sampling.stop) | {*config.sampling.stop_token_ids}
    if isinstance(engine, TorchEngineConfig):
        from penstock.services.rollout.engines.torch.engine import TorchEngine

        return TorchEngine(
            engine, whole, dtype, stop_ids, lambda ids: text.decode([ids])[0], head_dtype, model_path, towers_learn
        )
    if isinstance(engine, VllmEngineConfig):
        from penstock.services.rollout.engines.vllm.engine import VllmEngine

        beside = adapter_rank if engine.adapter == "beside" else 0
        return VllmEngine(
            engine, model_config, model_path, dtype, stop_ids, config.sampling.training(), config.threads, sleeps,
            beside, head_dtype, text.pictures if pictures else None, towers_learn,
        )  # fmt: skip
    found = next(iter(entry_points(group="penstock.engines", name=engine.name)), None)
    if found is None and ":" not in engine.name:
        raise SetupError(f"rollout.engine.name: no entry point {engine.name!r} in the group penstock.engines")
    factory = found.load() if found else load_plugin(engine.name, "rollout.engine.name")
    return factory(engine.options, model_path, dtype, stop_ids)
