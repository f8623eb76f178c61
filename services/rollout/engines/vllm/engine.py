"""vLLM's `AsyncLLM` in a thread of its own, token ids in and out."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import numpy as np
import psutil
import structlog
import torch

from penstock.protocols.experience import Sampling
from penstock.protocols.keys import ClientKeys
from penstock.services.modeling.dtypes import DTYPES
from penstock.services.modeling.experts import experts_of
from penstock.services.modeling.families import is_recurrent
from penstock.services.modeling.lengths import positions_of
from penstock.services.modeling.pictures import PictureReader
from penstock.services.modeling.version_weights import weight_count
from penstock.services.rollout.config import VllmEngineConfig
from penstock.services.rollout.engines.asynchronous import CLOSE_S, AsyncEngine, load_within_s
from penstock.services.rollout.engines.base import (
    Completion,
    EngineError,
    Request,
    RequestError,
    refuse_partial,
)
from penstock.services.rollout.engines.torch import native
from penstock.services.rollout.engines.vllm.arguments import engine_arguments, environment, looked_at, lora_request
from penstock.services.rollout.engines.vllm.cause import Said
from penstock.services.rollout.engines.vllm.processes import end_all, started_since, wrong_with
from penstock.services.rollout.engines.vllm.prompts import BLIND, check_shown, shown_prompt
from penstock.services.rollout.engines.vllm.results import as_recorded, completion_of
from penstock.services.rollout.engines.vllm.stall import Stall
from penstock.services.rollout.engines.vllm.statistics import Load
from penstock.services.runtime.errors import LibraryError, SetupError
from penstock.services.weights.buffers import HostBuffer
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.layout import make_layout, view_weights
from penstock.services.weights.receiver.loader import MappedVersion
from penstock.services.weights.receiver.worker_desk import ReceivedVersion

log = structlog.get_logger()

AHEAD = -1
"""Priority of a score: it waits for no seat and for no queue."""
FREED_S, MEMORY = 30.0, re.compile(r"memory|CUDA error", re.IGNORECASE)
"""So long memory may be missing that the dead had; and what is said of it."""
MOVES = 5
"""So many times as long as for anything else the weights may take to leave a device, or to come back, and the first
token of what is waited for to come."""
DEADLINE = "rollout.engine.deadline_s"
SHUTDOWN_S = 1.0
"""Its engine core is given this long to end; there is nothing that it would lose."""


class VllmEngine(AsyncEngine):
    """`base.Engine` over V1 ``AsyncLLM``.

    Log-probabilities are raw where training samples at temperature 1 without candidates, and processed (after
    temperature and truncation) elsewhere. ``sampling`` is that of training: other requests may only be such that the
    same kind gives them what `Completion` promises. ``llm`` is vLLM's own object, in a thread that `call` reaches.
    """

    remote = True
    device = torch.device("cpu")

    def __init__(
        self,
        config: VllmEngineConfig,
        model_config: Any,
        model_path: str,
        dtype: str,
        stop_ids: set[int],
        sampling: Sampling,
        threads: int,
        sleeps: bool = False,
        beside: int = 0,
        head_dtype: str | None = None,
        pictures: PictureReader | None = None,
        towers_learn: bool = False,
    ) -> None:
        """``sleeps``: see `base.SleepingEngine`. ``beside``: rank of adapters that are not merged; 0: all are.
        ``head_dtype``: of the logits; None: ``dtype``. ``pictures``: what reads those that prompts may show;
        ``towers_learn``: what the model finds in one changes with each version."""
        positions = positions_of(model_config) or config.max_length + 1
        length = min(config.max_length, positions)
        self._replicas = config.replicas
        self._seated = config.max_sequences * self._replicas
        super().__init__("vLLM", model_config.vocab_size, length, self._seated)
        self._config, self._stop_ids = config, sorted(stop_ids)
        self._deadline_s = config.deadline_s
        """For an answer of the engine core now."""
        self._raw = sampling.temperature in (0.0, 1.0) and not sampling.candidates
        self._routed = sampling.routing_replay
        if beside and experts_of(model_config):
            raise SetupError("rollout.engine.adapter: beside is not for mixtures of experts; use merged")
        self._load = Load()
        self._requests, self._answering, self._loads, self._salt = 0, 0, 0, "-1"
        self._loading = False
        """It is awake in part, for the version that is to be loaded."""
        self._shared: list[HostBuffer] = []
        self._processes: list[psutil.Process] = []
        environment(threads)
        kv = native.kv_numbers(model_config) * DTYPES[dtype].itemsize
        arguments = engine_arguments(
            config, model_path, dtype, self._raw, kv, positions, sampling.top_k, self._routed, sleeps, beside,
            head_dtype, is_recurrent(model_config), pictures is not None,
        )  # fmt: skip
        self._model_path, self._weight_bytes = model_path, DTYPES[dtype].itemsize
        self._model_config, self._adapter = model_config, lora_request() if beside else None
        self._sees_anew = towers_learn and pictures is not None
        self._pictures, self.blind = pictures, "" if pictures else BLIND
        self._opening = asyncio.Lock()
        started, before = time.monotonic(), set(psutil.Process().children(recursive=True))
        self.llm: Any = self.call(self._start(arguments), config.start_s, "start (rollout.engine.start_s)")
        parallel = self.llm.vllm_config.parallel_config
        self.workers = parallel.world_size * parallel.data_parallel_size
        self._processes = started_since(before)
        names = {p.pid: p.name() for p in self._processes}
        log.info("vllm is up", seconds=round(time.monotonic() - started, 1), processes=names)
        self._watching = self.spawn(self._watch())

    @property
    def capacity(self) -> int:
        """What its scheduler really runs at once, where the KV cache has no room for ``max_sequences``."""
        running, waiting = sum(self._load.running.values()), sum(self._load.waiting.values())
        return min(self._seated, running) if waiting and running else self._seated

    def submit(self, request: Request) -> None:
        """See `base.Engine.submit`."""
        sampling = request.sampling
        if sampling.routing_replay and not self._routed:
            raise RequestError("rollout.sampling.routing_replay: this engine was started without it")
        if self._raw and (sampling.candidates or sampling.temperature not in (0.0, 1.0)) and not request.unread:
            raise RequestError(
                f"temperature {sampling.temperature:g}, candidates {sampling.candidates}: this engine was started for "
                "temperature 1 without candidates (rollout.sampling), whose log-probabilities it reports"
            )
        if not self._raw and not sampling.candidates and sampling.truncated and not request.unread:
            raise RequestError(
                "vLLM reports no log-probabilities of the untruncated distribution at a temperature other than 1: "
                "set rollout.sampling.candidates, leave top_p, top_k and min_p out, or use temperature 1"
            )
        super().submit(request)

    def prepare(self, weights: Mapping[str, torch.Tensor], memory: MappedVersion | None = None) -> MappedVersion:
        """See `base.Engine.prepare`. Weights that lie in memory of this process alone are copied once."""
        if memory is None:
            own = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in weights.items()}
            layout = make_layout({name: tuple(tensor.shape) for name, tensor in weights.items()}, "float32", own=own)
            buffer = HostBuffer(layout.nbytes, shared=True)
            for name, view in view_weights(layout, buffer.tensor).items():
                view.copy_(weights[name])
            self._shared = [*self._shared[-1:], buffer]
            memory = MappedVersion(buffer.path, 0, layout)
        refuse_partial(memory.layout.names, self._model_path)
        return memory

    def score(self, prepared: Any, tokens: np.ndarray) -> np.ndarray:
        """See `base.Engine.score`."""
        return self.call(self._score(tokens.tolist()), self._config.deadline_s, f"score a sequence ({DEADLINE})")

    def join_workers(self, address: str, weights: WeightsConfig, keys: ClientKeys | None) -> None:
        """See `base.WorkerEngine.join_workers`."""
        told = {
            "address": address,
            "config": weights.model_dump_json(),
            "keys": dataclasses.asdict(keys) if keys else None,
        }
        join = self.llm.collective_rpc("penstock_join", kwargs=told)
        self.call(join, self._config.deadline_s, f"have its workers join the weight channel ({DEADLINE})")

    def swap(self, prepared: MappedVersion | ReceivedVersion, version: int) -> None:
        """See `base.Engine.swap`. Requests in flight are frozen, not lost, while the workers load."""
        within_s = load_within_s(weight_count(self._model_path) * self._weight_bytes, self._config.deadline_s)
        what = f"load version {version} ({DEADLINE})"
        self._patiently(self._load_version(prepared, version), within_s, what)
        self.serve(version)

    def sleep(self) -> None:
        """See `base.SleepingEngine.sleep`. A CPU has nothing to give back: there vLLM only stops."""
        within_s = MOVES * self._config.deadline_s  # the first time the host's memory for the weights is made
        self._patiently(self.llm.engine_core.sleep_async(1, "keep"), within_s, f"go to sleep ({DEADLINE})")

    def wake(self) -> None:
        """See `base.SleepingEngine.wake`."""
        self._wake(None)

    def wake_to_load(self) -> None:
        """As `wake`, for the `swap` that follows at once: nothing is computed before it, since what is asleep in part
        stays paused."""
        self._wake(["weights"])
        self._loading = True

    def _wake(self, tags: list[str] | None) -> None:
        """Who died a moment ago may still have memory that is wanted: then it is tried again."""
        within_s, until = MOVES * self._config.deadline_s, time.monotonic() + FREED_S
        while True:
            try:
                self._patiently(self.llm.engine_core.wake_up_async(tags), within_s, f"wake up ({DEADLINE})")
                return
            except EngineError as error:
                if self.ended or time.monotonic() > until or not MEMORY.search(str(error)):
                    raise
                log.warning("it cannot wake up yet", error=str(error))
                time.sleep(1.0)

    def _patiently(self, asked: Coroutine[Any, Any, Any], within_s: float, what: str) -> None:
        """`call` of something in which the engine core answers nobody else."""
        self._deadline_s = within_s
        try:
            self.call(asked, within_s, what)
        finally:
            self._deadline_s = self._config.deadline_s

    @staticmethod
    def update_info(version: MappedVersion | ReceivedVersion) -> dict[str, Any]:
        """What our weight-transfer engine in the workers is told (`worker.ShadowUpdate`)."""
        if isinstance(version, ReceivedVersion):
            return dataclasses.asdict(version)
        return {"path": version.path, "offset": version.offset, "layout": version.layout.model_dump_json()}

    def gauges(self) -> dict[str, float]:
        """See `base.Engine.gauges`."""
        self.check()
        load, running = self._load, sum(self._load.running.values())
        return {
            "running": running,
            "queued": max(0, self.pending() - running),
            "generated_tokens": load.generated,
            "kv_usage": max(load.kv_usage.values(), default=0.0),
            "preempted": load.preempted,
        }

    def close(self) -> None:
        """See `base.Engine.close`."""
        if self.ended:
            return
        self._watching.cancel()
        try:
            self.call(self._shut_down(), CLOSE_S, "shut down")
        except EngineError as error:
            log.warning("vllm did not end by itself", error=str(error))
        end_all(self._processes, CLOSE_S)
        self.end()

    def who(self) -> str:
        """Its processes that are dead or stopped, by name."""
        return wrong_with(self._processes)

    # --- in vLLM's thread --------------------------------------------------------------------------------------------

    async def generate(self, request: Request, sample: int, seed: int) -> Completion:
        """See `AsyncEngine.generate`. `AsyncLLM.generate` aborts its request where it is cancelled."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        try:
            shown = await self._shown(request)  # a version may come meanwhile
            # Salted, so that blocks of an older version are never taken for this one's.
            prompt = {**shown, "cache_salt": self._salt}
            parameters = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                max_tokens=sampling.max_new_tokens,
                seed=seed if self._config.seeded else None,
                stop=list(sampling.stop) or None,
                stop_token_ids=sorted({*self._stop_ids, *request.stop_ids}),
                ignore_eos=True,  # the stop ids are ours alone
                logprobs=looked_at(sampling.top_k, self._vocabulary) if sampling.candidates else 0,
                flat_logprobs=True,
                detokenize=bool(sampling.stop),
                output_kind=RequestOutputKind.FINAL_ONLY,
                routed_experts_prompt_start=request.known if sampling.routing_replay else 0,
            )
            result = await self._answer(prompt, parameters, f"{request.number}-{sample}")
        except (ValueError, VLLMValidationError) as error:  # the request's fault
            raise RequestError(str(error)) from error
        check_shown(request, result.prompt_token_ids)
        found = completion_of(request.number, sample, result.outputs[0], sampling.candidates)
        if not sampling.routing_replay:
            return found
        size, routed = len(request.tokens) - request.known + len(found.tokens), result.outputs[0].routed_experts
        return dataclasses.replace(found, routing=as_recorded(routed, size, self._model_config))

    async def _shown(self, request: Request) -> dict[str, Any]:
        """Pictures are opened in another thread: everybody else's answers go on meanwhile; once for a whole group."""
        if not request.pictures:
            return shown_prompt(request, None)
        async with self._opening:
            return await asyncio.to_thread(shown_prompt, request, self._pictures)

    async def _answer(self, prompt: dict[str, Any], parameters: Any, name: str, **how: Any) -> Any:
        self._requests += 1
        name = f"{name}-{self._requests}"
        self._answering += 1
        try:
            async for result in self.llm.generate(prompt, parameters, name, lora_request=self._adapter, **how):
                if result.finished:
                    return result
        finally:
            self._answering -= 1
        raise EngineError(f"vLLM ended request {name} without a result")

    async def _score(self, tokens: list[int]) -> np.ndarray:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt = {"prompt_token_ids": tokens, "cache_salt": f"score {self._requests}"}

        async def of(replica: int | None) -> list[float]:
            found = await self._answer(prompt, parameters, "score", priority=AHEAD, data_parallel_rank=replica)
            rows = list(found.prompt_logprobs)[1:]
            return [row[token].logprob for row, token in zip(rows, tokens[1:], strict=True)]

        if self._replicas == 1:
            return np.array(await of(None), np.float32)
        return np.array(await asyncio.gather(*map(of, range(self._replicas))), np.float32)

    async def _load_version(self, prepared: MappedVersion | ReceivedVersion, version: int) -> None:
        core = self.llm.engine_core
        # A number may come again with other weights. Before the pause: what is handed over in it is computed after it.
        self._loads += 1
        self._salt = f"{version} {self._loads}"
        recompute = self._config.kv_on_update == "recompute"
        if not self._loading:  # or it is paused, and forgot all as it went to sleep
            # Not `AsyncLLM.pause_generation`, which sleeps 20 ms after the same call.
            await core.pause_scheduler_async(mode="keep", clear_cache=recompute)
            if self._sees_anew and not recompute:
                await core.reset_encoder_cache_async()
        told = {"update_info": self.update_info(prepared), "beside": self._adapter is not None}
        await self.llm.collective_rpc("penstock_load", kwargs=told)
        await core.set_weight_version_async(str(version))
        await (core.wake_up_async(["kv_cache"]) if self._loading else core.resume_scheduler_async())
        self._loading = False

    async def _start(self, arguments: Any) -> Any:
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase

        load = self._load

        class Recorder(StatLoggerBase):
            """Hands each step's statistics to the engine."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                self._core = engine_index

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                load.record(self._core, scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                pass

        try:
            config = arguments.create_engine_config(UsageContext.LLM_CLASS)  # many tokens of prompts at once
        except ValueError as error:
            raise SetupError(f"rollout.engine.vllm: {error}") from error
        said = Said()
        try:
            return AsyncLLM.from_vllm_config(config, stat_loggers=[Recorder])
        except RuntimeError as error:
            raise LibraryError(f"rollout.engine.vllm: vLLM could not start: {said.cause() or error}") from error

    async def _watch(self) -> None:
        """Notices a dead engine core while nothing is asked of it, one that hangs, and one that stalls."""
        asked, stall = time.monotonic(), Stall(MOVES * self._config.deadline_s)
        while True:
            await asyncio.sleep(0.2)
            if self.llm.errored:
                self.fail("an engine process died")
            elif time.monotonic() - asked > self._config.deadline_s / 4:
                try:
                    paused = await asyncio.wait_for(self.llm.is_paused(), self._deadline_s)
                    waiting = 0 if paused else self._answering
                    if wrong := stall.look(time.monotonic(), self._load.generated, waiting):
                        self.fail(f"{wrong} ({DEADLINE}, {MOVES} times)")
                except TimeoutError:
                    self.fail(f"no answer for {self._deadline_s:g} s ({DEADLINE})")
                except Exception as error:
                    self.fail(f"{type(error).__name__}: {error}")
                asked = time.monotonic()

    async def _shut_down(self) -> None:
        self.llm.shutdown(timeout=SHUTDOWN_S)
