"""The whole config as pydantic models: what a key is called, what it may be, and what it is if not given."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.pipeline.config.colocated import check_colocated
from penstock.pipeline.config.columns import check_columns, columns_read, critic_column
from penstock.pipeline.config.engine import check_engine
from penstock.pipeline.config.evaluation import check_evaluation
from penstock.pipeline.config.gateway import check_gateway
from penstock.pipeline.config.given import check_given, given_by_preset
from penstock.pipeline.config.head import check_head
from penstock.pipeline.config.lora import check_lora
from penstock.pipeline.config.models import ModelConfig, PretrainedModel
from penstock.pipeline.config.programs import ProgramConfig
from penstock.pipeline.config.reference import check_reference
from penstock.pipeline.config.sources import check_sources
from penstock.pipeline.config.updates import check_updates, given_by_trainer
from penstock.protocols.columns import REFERENCE, ColumnTable
from penstock.protocols.experience import Sampling
from penstock.services.broker.config import (
    BrokerConfig,
    GateConfig,
    PromptsConfig,
    ReplayConfig,
    StoreConfig,
    TrackerName,
)
from penstock.services.critic.config import CriticConfig
from penstock.services.gateway.config import GatewayConfig
from penstock.services.reference.config import ReferenceConfig
from penstock.services.reward.config import ENVIRONMENT, RewardConfig
from penstock.services.rollout.config import RolloutConfig
from penstock.services.runtime import registry
from penstock.services.runtime.custom_scorer import ScorerConfig
from penstock.services.runtime.settings import MOST_PORT, Section
from penstock.services.trainer.config import LoraConfig, TrainerConfig
from penstock.services.weights.config import WeightsConfig


class RunConfig(Section):
    """The run itself."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run's folder, e.g. ``first-try``; null: the config file's name and the time."""
    folder: str = "runs"
    """Folder in which the folders of runs are made, e.g. ``/data/runs``."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Every random number of the run follows from it: the order of the prompts, the tokens that are sampled."""
    deterministic: bool = False
    """The same weights bit by bit from the same ledger, on the same kind of machine; generation is slower, since each
    group is decoded alone. See docs/recovery.md."""
    max_restarts: int = Field(10, ge=0)
    """How often within a day one process (a rollout, the trainer, …) is started again after it died, before the run
    gives up."""
    trackers: tuple[TrackerName, ...] = ()
    """Where the metrics of steps and evaluations go besides the run's own files, e.g. ``[wandb]``: ``tensorboard``,
    ``wandb``, ``mlflow``, ``trackio``, ``swanlab``, or ``module:Class`` of your own. See docs/metrics.md."""
    tracker_samples: int = Field(0, ge=0)
    """Answers of each step that trackers are shown as a table, with their prompts and rewards, e.g. ``4``: of as many
    groups as there are, one of each before a second of any. 0: none."""
    prometheus: str | None = Field(None, pattern=r"^[^:]*:\d{1,5}$")
    """Where the broker serves the run's state for Prometheus, e.g. ``127.0.0.1:9400``; port 0: any that is free, which
    ``prometheus-NAME.json`` beside the run's folder says; null: nowhere. See docs/prometheus.md."""
    traces: str | None = Field(None, pattern=r"^https?://")
    """Where OpenTelemetry traces go, by OTLP over HTTP: one for each group, from its lease to its step, e.g.
    ``http://127.0.0.1:4318``; null: there are none. See docs/metrics.md."""
    project: str = "penstock"
    """What trackers file the run under, e.g. ``sorting``."""
    gpu_gib: float | None = Field(None, gt=0)
    """Memory of each GPU in GiB, e.g. ``80``; null: not checked. With it, a run whose model cannot fit is refused
    before anything starts."""
    placement: Literal["as_given", "colocated", "auto"] = "as_given"
    """Who gets which GPUs: ``as_given``, each process its own, as `trainer.ranks`, `rollout.count` and so on say;
    ``colocated``: rollouts, reference, critic and programs that sleep are on the trainer's, and take turns with it;
    ``auto``: `penstock run` takes the fastest layout on paper that fits the GPUs of this machine, and says why. See
    docs/memory.md."""
    turn_s: float = Field(900.0, gt=0)
    """With `placement`: colocated, so many seconds may pass until rollouts and all others sleep and trainer, or critic,
    can begin; then it ends with an error, and is started again. For each other these two wait however long it takes."""
    elsewhere: tuple[str, ...] = ()
    """Kinds of processes that `penstock run` does not start, e.g. ``[rollout]``: they join from other machines, by
    `penstock join`. See docs/clusters.md."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important messages that still go into `logs/`."""

    @property
    def colocated(self) -> bool:
        """The trainer's devices are others' too."""
        return self.placement == "colocated"

    @field_validator("prometheus")
    @classmethod
    def _a_port(cls, value: str | None) -> str | None:
        if value is not None and int(value.rpartition(":")[2]) > MOST_PORT:
            raise ValueError(f"{value}: ports end at {MOST_PORT}")
        return value

    @field_validator("folder")
    @classmethod
    def _at_home(cls, value: str) -> str:
        """A shell does so for ~/runs, and not for run.folder=~/runs."""
        try:
            return str(Path(value).expanduser()) if value.startswith("~") else value
        except RuntimeError:
            raise ValueError(f"nobody here has the home folder {value}; give the whole path") from None

    @model_validator(mode="before")
    @classmethod
    def _was_tensorboard(cls, data: Any) -> Any:
        """Runs of older code have this key in their folder."""
        if isinstance(data, dict) and isinstance(data.get("tensorboard"), bool):
            data = dict(data)
            if data.pop("tensorboard"):
                data.setdefault("trackers", ["tensorboard"])
        return data


class Config(Section):
    """Everything a run is. `penstock run FILE --dry-run` prints all keys with their values, `penstock config` explains
    them."""

    run: RunConfig = RunConfig()
    """The run itself: name, folder, seed, how it deals with crashes."""
    model: ModelConfig
    """The model that is trained: by name, or a tiny one made on the spot. With a `path` it is one by name."""
    prompts: PromptsConfig
    """The tasks that the model is given, to train and to evaluate on."""
    gate: GateConfig = GateConfig()
    """How old experience may be, and how much of it makes a step."""
    rollout: RolloutConfig = RolloutConfig()
    """The processes that generate, each with an inference engine."""
    reward: RewardConfig = RewardConfig()
    """The processes that say how good an answer is."""
    reference: ReferenceConfig = ReferenceConfig()
    """Processes that run a frozen model, for the KL penalty or to teach."""
    gateway: GatewayConfig = GatewayConfig()
    """The processes that agents outside the pipeline speak to."""
    critic: CriticConfig = CriticConfig()
    """PPO's critic, which learns what is still to be won; or PRIME's."""
    scorers: dict[str, ScorerConfig] = {}
    """Scorers by name: classes of your own, reward models, teachers. Each adds columns to finished groups, for losses,
    advantages and rewards, e.g. ``{surprise: {scorer: "my_module:Surprise", columns: {surprise: token}}}``."""
    trainer: TrainerConfig = TrainerConfig()
    """The process that learns: algorithm, optimizer, checkpoints."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights get to the rollouts, and how they are checked."""
    broker: BrokerConfig = BrokerConfig()
    """The process in the middle: its address and its patience."""
    store: StoreConfig = StoreConfig()
    """Redis, where everything lies that must survive a crash."""
    replay: ReplayConfig = ReplayConfig()
    """Finished groups: which are left out, which are kept on disk."""
    programs: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")], ProgramConfig] = {}
    """Programs of others beside the run, by name. `penstock run` starts them, and ends them with the run, e.g.
    ``{judge: {command: vllm serve Qwen/Qwen3-8B --port 8431, ready: "http://127.0.0.1:8431/health", gpus: 1}}``."""

    @property
    def sleepers(self) -> dict[str, ProgramConfig]:
        """Programs on the trainer's devices, which sleep while a learner works."""
        return {name: program for name, program in self.programs.items() if program.sleep and self.run.colocated}

    @property
    def template(self) -> dict[str, Any]:
        """What the tokenizer's chat template is told beside the messages; and, as ``chat_template``, another one."""
        if not isinstance(self.model, PretrainedModel):
            return {}
        return self.model.chat_template_kwargs | ({"chat_template": own} if (own := self.model.chat_template) else {})

    @property
    def show_pictures(self) -> bool:
        """Prompts may, or what an environment answers, or agents."""
        return self.prompts.show_pictures or self.rollout.shows_pictures or self.gateway.pictures

    @property
    def reference_quantized(self) -> LoraConfig | None:
        """The adapter of whose quantized model the reference is a copy; None: it lies whole."""
        lora = self.trainer.lora
        return lora if lora and lora.quantize and self.reference.path is None else None

    @property
    def with_reference(self) -> bool:
        """Somebody reads the log-probabilities of a reference process: the KL penalty, or something of the user's
        own."""
        return REFERENCE in columns_read(self) and not self.reference.in_trainer

    @property
    def reference_in_trainer(self) -> bool:
        """The trainer computes them itself."""
        return REFERENCE in columns_read(self) and self.reference.in_trainer

    @property
    def with_critic(self) -> bool:
        """Somebody reads what one says."""
        return self.critic_column is not None

    @property
    def critic_column(self) -> str | None:
        """Its values, or PRIME's process rewards."""
        return critic_column(self)

    @property
    def critic_warmup(self) -> int:
        """First steps in which the policy stands still."""
        return self.critic.warmup_steps if self.with_critic else 0

    @property
    def sampling(self) -> Sampling:
        """How training groups are drawn: `rollout.sampling`, and what the advantage compares with."""
        return self.rollout.sampling.training(self.trainer.algorithm.advantage.greedy_baseline)

    @cached_property
    def columns(self) -> ColumnTable:
        """Every column that a group of this run has."""
        return registry.columns(self)

    @property
    def unjudged(self) -> bool:
        """Training reads rewards, and only an environment or an agent may give one."""
        judges = [f for f in self.reward.functions if any(f.terms.values()) and f.function != ENVIRONMENT]
        reads = self.trainer.algorithm.advantage.type not in ("none", "distillation", "custom")
        return reads and not (judges or self.reward.columns)

    @model_validator(mode="before")
    @classmethod
    def _with_its_type(cls, data: Any) -> Any:
        """A model that has a path needs no type."""
        model = data.get("model") if isinstance(data, dict) else None
        if isinstance(model, dict) and "path" in model and "type" not in model:
            data = {**data, "model": {"type": "pretrained", **model}}
        return data

    @model_validator(mode="before")
    @classmethod
    def _judged_by_its_environment(cls, data: Any) -> Any:
        """Where there is an environment, or agents, and nothing else is said, the reward is what they give."""
        if not isinstance(data, dict):
            return data
        rollout, reward, gateway = (data.get(key) or {} for key in ("rollout", "reward", "gateway"))
        if not all(isinstance(section, dict) for section in (rollout, reward, gateway)):
            return data
        if rollout.get("environment") or gateway.get("count"):
            data = {**data, "reward": {"functions": [{"function": ENVIRONMENT}], **reward}}
        return given_by_preset(given_by_trainer(data))

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        sampling, algorithm = self.rollout.sampling, self.trainer.algorithm
        check_engine(self)
        check_given(self)
        weighs = algorithm.correction.type not in ("none", "custom") and algorithm.loss.has_ratio
        if weighs and algorithm.ratio == "behaviour":
            raise ValueError(
                f"trainer.algorithm.ratio: behaviour holds the ratio that correction={algorithm.correction.type} "
                "weighs by, and both together would count it twice; set trainer.algorithm.ratio=proximal, or "
                "correction={type: none}"
            )
        check_evaluation(self)
        check_updates(self)
        if sampling.n == 1 and self.replay.filter.type == "zero_variance":
            raise ValueError(
                "replay.filter=zero_variance drops every group of one answer; set it to none, or rollout.sampling.n "
                "above 1"
            )
        if sampling.temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature must be above 0: greedy groups have no variance to learn from"
            )
        if algorithm.aggregated == "seq-mean-token-sum-norm" and algorithm.length_scale is None:
            raise ValueError(
                "trainer.algorithm.length_scale is needed by seq-mean-token-sum-norm; "
                "rollout.sampling.max_new_tokens is a good value"
            )
        if algorithm.advantage.type == "self_distillation" and (self.gateway.count or self.rollout.all_environments):
            raise ValueError(
                "trainer.algorithm.advantage: self_distillation shows a good answer in the prompt, and what agents and "
                "environments are asked begins elsewhere; take another advantage"
            )
        if self.with_critic and self.sampling.greedy_baseline:
            raise ValueError(
                f"trainer.algorithm: advantage={algorithm.advantage.type} compares with greedy answers, of which a "
                f"critic says nothing; leave out the column {self.critic_column}"
            )
        if self.gateway.count:
            check_gateway(self)
        elif not self.rollout.all_environments and self.reward.reads_environment:
            raise ValueError(
                "reward.functions: environment stands for what an environment or an agent gave, and there is none; set "
                "rollout.environment or gateway.count, or take another function"
            )
        _check_judged(self)
        if self.run.colocated:
            check_colocated(self)
        for kind in self.run.elsewhere:
            if kind not in (kinds := [name for name in registry.actors(self) if name != "broker"]):
                raise ValueError(f"run.elsewhere: {kind!r} is none of {', '.join(kinds)}")
        check_reference(self)
        check_lora(self)
        check_head(self)
        check_columns(self)
        check_sources(self)
        return self


def _check_judged(config: Config) -> None:
    """Raises `ValueError` where tools are called, and nobody says what the answer was worth."""
    every = config.rollout.all_environments.values()
    if any(environment.tools and not environment.settles for environment in every) and config.unjudged:
        raise ValueError(
            "reward.functions: the environment `tools` gives no reward, and nobody else is named to judge the answer; "
            "give a function, e.g. reward.functions=[{function: exact_match}]"
        )
