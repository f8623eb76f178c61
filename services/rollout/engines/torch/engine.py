"""Continuous batching: requests join and leave the batch between two decoding steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.protocols.experience import Finish, no_candidates
from penstock.protocols.routing import no_routing
from penstock.services.modeling.dtypes import DTYPES
from penstock.services.modeling.lengths import positions_of
from penstock.services.modeling.load import ModelError, device_of
from penstock.services.modeling.pinned import to_device
from penstock.services.modeling.resting import Resting, forget, remember
from penstock.services.rollout.config import TorchEngineConfig
from penstock.services.rollout.engines.base import Completion, Refusal, Request, RequestError, refuse_unfit
from penstock.services.rollout.engines.torch.cache import row_of_each
from penstock.services.rollout.engines.torch.fitting import fitting_model
from penstock.services.rollout.engines.torch.hosted import HostedModel
from penstock.services.rollout.engines.torch.routing_table import RoutingTable
from penstock.services.rollout.engines.torch.sampling import sample, stream_key, uniforms
from penstock.services.rollout.engines.torch.stops import Stops
from penstock.services.rollout.engines.torch.transformers_model import NOTHING, Shown
from penstock.services.runtime import health
from penstock.services.weights.receiver.loader import MappedVersion


@dataclass(slots=True)
class _Slots:
    """What is known of each running sequence; arrays over slots, on the host."""

    tokens: np.ndarray
    """int32 ``[slots, length]``: prompt and response."""
    logprobs: np.ndarray
    versions: np.ndarray
    lengths: np.ndarray
    """Tokens so far. All but the last are in the KV cache."""
    prompt: np.ndarray
    limit: np.ndarray
    """Length at which the sequence must end."""
    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    key: np.ndarray
    number: np.ndarray
    sample: np.ndarray

    @classmethod
    def empty(cls, slots: int, length: int) -> _Slots:
        def row(dtype: Any) -> np.ndarray:
            return np.zeros(slots, dtype)

        def table(dtype: Any) -> np.ndarray:
            return np.zeros((slots, length), dtype)

        return cls(
            table(np.int32), table(np.float32), table(np.int32), row(np.int64), row(np.int64), row(np.int64),
            row(np.float32), row(np.float32), row(np.int64), row(np.float32), row(np.uint64), row(np.int64),
            row(np.int32),
        )  # fmt: skip

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copies the ``source`` slots over the ``target`` slots."""
        for name in self.__slots__:
            array = getattr(self, name)
            array[target] = array[source]


class TorchEngine:
    """`base.Engine` over whatever `fitting.fitting_model` gives.

    ``stop_ids`` end a sequence; ``decode`` turns token ids into text, for requests with stop texts; ``head_dtype`` is
    that of the logits, None: the model's. Where it ``sees_anew``, towers are those of each version.
    """

    remote = False

    def __init__(
        self, config: TorchEngineConfig, model_config: Any, dtype: str, stop_ids: set[int],
        decode: Callable[[Any], str], head_dtype: str | None = None, path: str | None = None, sees_anew: bool = False,
    ) -> None:  # fmt: skip
        self.version = -1
        self._capacity = config.max_sequences
        self._config = config
        self.device = device_of(config.device, "rollout.engine.device")
        self._length = min(config.max_length, positions_of(model_config) or config.max_length)
        self._model = fitting_model(model_config, self._capacity, self._length, DTYPES[dtype], self.device, head_dtype)
        self._blind = f"the prompt shows pictures, and a {model_config.model_type} sees none; take a model that does"
        if path and isinstance(self._model, HostedModel) and self._model.see(path, dtype, sees_anew):
            self._blind = ""
        self._vocabulary = model_config.get_text_config().vocab_size
        self._stop_ids = np.array(sorted(stop_ids), np.int32)
        self._slots = _Slots.empty(self._capacity, self._length)
        self._active = 0
        self._queue: deque[Request] = deque()
        self._stops = Stops(decode)
        self._masked: set[int] = set()
        """Requests whose candidates are recorded."""
        self._kept: dict[tuple[int, int], list[np.ndarray]] = {}
        """By request and sample: for each new token, what it was chosen from."""
        self._shown: dict[int, Shown] = {}
        """Of requests whose prompts show pictures."""
        self._routed: dict[int, int] = {}
        """Requests whose routing is noted, and from which token on it is wanted."""
        self._routing: RoutingTable | None = None
        """From the first such request on."""
        self._generated = 0
        self._resting = Resting(self.device)
        self._forgotten = False
        """The slots' keys and values are to be computed again before the next token."""

    @property
    def capacity(self) -> int:
        """See `base.Engine.capacity`."""
        return self._capacity

    def submit(self, request: Request) -> None:
        """See `base.Engine.submit`."""
        refuse_unfit(request, self._vocabulary, self._length, self._blind)
        sampling = request.sampling
        if sampling.n > self._capacity:
            raise RequestError(f"n={sampling.n} exceeds rollout.engine.max_sequences={self._capacity}")
        if sampling.routing_replay:
            self._route(request)
        if request.pictures:
            assert isinstance(self._model, HostedModel), "no other sees"
            self._shown[request.number] = self._model.shown(request)
        self._queue.append(request)
        self._stops.add(request)
        if sampling.candidates and sampling.temperature > 0:
            self._masked.add(request.number)

    @torch.inference_mode()
    def step(self) -> list[Completion | Refusal]:
        """See `base.Engine.step`."""
        if self.version < 0:
            return []
        done: list[Completion | Refusal] = []
        if self._forgotten:
            self._recompute()
        if self._queue:
            self._admit(done)
        if self._active:
            self._decode_step()
            done += self._retire(self._active)
        return done

    def abort(self, number: int) -> None:
        """See `base.Engine.abort`."""
        self._queue = deque(request for request in self._queue if request.number != number)
        gone = np.flatnonzero(self._slots.number[: self._active] == number)
        if gone.size:
            self._compact(gone)
        self._stops.drop(number)
        self._masked.discard(number)
        self._shown.pop(number, None)
        self._routed.pop(number, None)
        self._kept = {key: recorded for key, recorded in self._kept.items() if key[0] != number}

    def pending(self) -> int:
        """See `base.Engine.pending`."""
        return self._active + sum(request.sampling.n for request in self._queue)

    def prepare(self, weights: Mapping[str, torch.Tensor], memory: MappedVersion | None = None) -> Any:
        """See `base.Engine.prepare`."""
        try:
            return self._model.prepare(weights)
        except KeyError as error:
            raise ModelError(f"the version does not fit the model: it has no {error.args[0]}") from None

    @torch.inference_mode()
    def score(self, prepared: Any, tokens: np.ndarray) -> np.ndarray:
        """See `base.Engine.score`."""
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
        logits = self._model.logits(prepared, ids)[:-1]
        return torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0].cpu().numpy()

    @torch.inference_mode()
    def swap(self, prepared: Any, version: int) -> None:
        """See `base.Engine.swap`."""
        self._model.weights = prepared
        self.version = version
        if self._config.kv_on_update == "recompute" and not self._forgotten:
            self._recompute()

    def sleep(self) -> None:
        """See `base.SleepingEngine.sleep`."""
        self._forgotten = True
        forget(self._model.cached)
        if self.device.type != "cpu":  # there they lie in the host's memory, as they have come
            self._resting.rest(self._model.kept)

    @torch.inference_mode()  # in which some models have made their cache
    def wake(self) -> None:
        """See `base.SleepingEngine.wake`."""
        self._resting.wake()
        remember(self._model.cached)

    def gauges(self) -> dict[str, float]:
        """See `base.Engine.gauges`."""
        return {"running": self._active, "queued": len(self._queue), "generated_tokens": self._generated}

    def close(self) -> None:
        """See `base.Engine.close`."""

    def _recompute(self) -> None:
        """Keys and values of what is running, with the weights that serve."""
        self._forgotten = False
        if self._active:
            s, active = self._slots, self._active
            slots = [[i] for i in range(active)]
            self._prefill(s.tokens[:active], s.lengths[:active] - 1, slots, s.number[:active].tolist())

    def _admit(self, done: list[Completion | Refusal]) -> None:
        """Prefills queued requests, first come first served, while slots and the prefill budget last."""
        chosen: list[Request] = []
        room, budget = self._capacity - self._active, self._config.prefill_tokens
        while self._queue and self._queue[0].sampling.n <= room:
            if chosen and len(self._queue[0].tokens) > budget:
                break
            request = self._queue.popleft()
            room -= request.sampling.n
            budget -= len(request.tokens)
            chosen.append(request)
        if not chosen:
            return
        slots: list[list[int]] = []
        start = self._active
        for request in chosen:
            mine = list(range(self._active, self._active + request.sampling.n))
            self._active = mine[-1] + 1
            slots.append(mine)
            self._occupy(request, mine)
        lengths = np.array([len(request.tokens) for request in chosen])
        tokens = np.zeros((len(chosen), int(lengths.max())), np.int32)
        for row, request in enumerate(chosen):
            tokens[row, : lengths[row]] = request.tokens
        numbers = [request.number for request in chosen]
        logits = self._prefill(tokens, lengths, slots, numbers, self._routing if self._routed else None)
        self._extend(logits.index_select(0, row_of_each(slots, self.device)), start, self._active)
        done += self._retire(self._active, start)

    def _route(self, request: Request) -> None:
        """Its routing will be noted. Raises `RequestError` where there is none, or none that can be seen."""
        if self._routing is None:
            self._routing = RoutingTable(self._model, self._capacity, self._length)
        self._routed[request.number] = request.known

    def _occupy(self, request: Request, mine: list[int]) -> None:
        s, sampling, size = self._slots, request.sampling, len(request.tokens)
        s.tokens[mine, :size] = request.tokens
        s.lengths[mine] = s.prompt[mine] = size
        s.limit[mine] = size + sampling.max_new_tokens
        s.temperature[mine], s.top_p[mine], s.top_k[mine] = sampling.temperature, sampling.top_p, sampling.top_k
        s.min_p[mine] = sampling.min_p
        s.number[mine] = request.number
        s.sample[mine] = range(len(mine))
        s.key[mine] = [stream_key(request.seed, request.stream, i) for i in range(len(mine))]

    def _prefill(
        self, tokens: np.ndarray, lengths: np.ndarray, slots: list[list[int]], numbers: list[int],
        routing: RoutingTable | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Runs the first ``lengths[i]`` of each row, of request ``numbers[i]``, into its slots, rows of like length
        together. ``routing`` notes."""
        order = np.argsort(lengths, kind="stable")
        logits: list[torch.Tensor] = []
        start = 0
        while start < len(order):
            end = start + 1
            # A run of rows is cut where padding would be more than a quarter of it, or the budget is spent.
            while (
                end < len(order)
                and lengths[order[end]] * (end + 1 - start) <= max(self._config.prefill_tokens, lengths[order[end]])
                and lengths[order[start]] >= 0.6 * lengths[order[end]]
            ):
                end += 1
            health.beat()
            rows, start = order[start:end], end
            width = int(lengths[rows[-1]])
            block, mine = self._put(tokens[rows, :width].astype(np.int64)), [slots[r] for r in rows]
            sizes = self._put(lengths[rows])
            with routing.prefilling(mine, lengths[rows], width) if routing else nullcontext():
                places = [self._put(np.array(each)) for each in mine]
                more = {"shown": [self._shown.get(numbers[r], NOTHING) for r in rows]} if self._shown else {}
                logits.append(self._model.prefill(block, sizes, places, **more))
        return torch.cat(logits)[self._put(np.argsort(order))]

    def _decode_step(self) -> None:
        s, active = self._slots, self._active
        positions = s.lengths[:active] - 1
        last = s.tokens[np.arange(active), positions].astype(np.int64)
        with self._routing.decoding(positions) if self._routing and self._routed else nullcontext():
            logits = self._model.decode(self._put(last), self._put(positions), int(positions.max()) + 1)
        self._extend(logits, 0, active)

    def _extend(self, logits: torch.Tensor, start: int, end: int) -> None:
        """Samples one token for each of the slots ``[start, end)`` and appends it."""
        s, rows = self._slots, slice(start, end)
        lengths = s.lengths[rows]
        drawn = uniforms(s.key[rows], lengths - s.prompt[rows]).astype(np.float32)
        uniform = np.minimum(drawn, np.float32(1 - 2**-24))  # rounding must not reach 1
        truncating = (s.top_p[rows] < 1).any(), (s.top_k[rows] > 0).any(), (s.min_p[rows] > 0).any()
        masked = np.isin(s.number[rows], list(self._masked)) if self._masked else None
        tokens, logprobs, kept = sample(
            logits,
            self._put(s.temperature[rows]),
            self._put(s.top_p[rows]) if truncating[0] else None,
            self._put(s.top_k[rows]) if truncating[1] else None,
            self._put(uniform),
            self._put(masked) if masked is not None else None,
            self._put(s.min_p[rows]) if truncating[2] else None,
            None if ((s.top_p[rows] < 1) & (s.top_k[rows] == 0)).any() else int(s.top_k[rows].max()) or None,
        )
        if masked is not None and kept is not None:
            self._keep(kept.cpu().numpy(), masked, start)
        slots = np.arange(start, end)
        s.tokens[slots, lengths] = tokens.cpu().numpy()
        s.logprobs[slots, lengths] = logprobs.cpu().numpy()
        s.versions[slots, lengths] = self.version
        s.lengths[rows] += 1
        self._generated += end - start

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self.device)

    def _keep(self, kept: np.ndarray, masked: np.ndarray, start: int) -> None:
        """Notes which tokens the sampler chose among: bool ``[rows, vocabulary]``, for the ``masked`` rows."""
        s = self._slots
        for row in np.flatnonzero(masked):
            slot = start + int(row)
            recorded = self._kept.setdefault((int(s.number[slot]), int(s.sample[slot])), [])
            recorded.append(np.flatnonzero(kept[row]).astype(np.int32))

    def _retire(self, end: int, start: int = 0) -> list[Completion]:
        """Removes finished sequences among the slots ``[start, end)``."""
        s = self._slots
        slots = np.arange(start, end)
        lengths = s.lengths[slots]
        stopped = np.isin(s.tokens[slots, lengths - 1], self._stop_ids)
        if self._stops:
            for i, slot in enumerate(slots):
                answer = s.tokens[slot, s.prompt[slot] : lengths[i]]
                stopped[i] = stopped[i] or self._stops.reached(int(s.number[slot]), answer)
        finished = slots[stopped | (lengths >= s.limit[slots])]
        if not finished.size:
            return []
        done = [self._completion(int(slot), bool(stopped[slot - start])) for slot in finished]
        self._compact(finished)
        if self._stops or self._masked or self._routed or self._shown:
            running = set(s.number[: self._active].tolist()) | {r.number for r in self._queue}
            self._stops.keep(running)
            self._masked &= running
            self._shown = {number: shown for number, shown in self._shown.items() if number in running}
            self._routed = {number: known for number, known in self._routed.items() if number in running}
        return done

    def _completion(self, slot: int, stopped: bool) -> Completion:
        s = self._slots
        part = slice(int(s.prompt[slot]), int(s.lengths[slot]))
        finish: Finish = "stop" if stopped else "length"
        number, sample = int(s.number[slot]), int(s.sample[slot])
        recorded, known = self._kept.pop((number, sample), []), self._routed.get(number)
        return Completion(
            number,
            sample,
            s.tokens[slot, part].copy(),
            s.logprobs[slot, part].copy(),
            s.versions[slot, part].copy(),
            finish,
            np.array([len(ids) for ids in recorded], np.int32) if recorded else no_candidates(),
            np.concatenate(recorded) if recorded else no_candidates(),
            self._routing.of(slot, known, part.stop) if self._routing and known is not None else no_routing(),
        )

    def _compact(self, finished: np.ndarray) -> None:
        """Moves the last running sequences into the freed slots, so that the running ones stay in front."""
        remaining = self._active - len(finished)
        holes = finished[finished < remaining]
        movers = np.setdiff1d(np.arange(remaining, self._active), finished)
        if holes.size:
            length = int(self._slots.lengths[movers].max())
            if not self._forgotten:
                self._model.move(self._put(movers), self._put(holes), length)
            self._slots.move(movers, holes)
            if self._routing and self._routed:
                self._routing.move(movers, holes)
        self._active = remaining
