"""Config sections that the broker reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import regex
from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from penstock.protocols.columns import REWARD
from penstock.protocols.connection import is_address
from penstock.protocols.experience import Sampling
from penstock.services.data.config import DataConfig, shows_pictures
from penstock.services.runtime.nearest import hint
from penstock.services.runtime.settings import Section, check_bind

ONE_SET, ONE_GIVEN_SET = "held_out", "given"
"""The name of a single evaluation set that has none: of `PromptsConfig.eval`, and of `PromptsConfig.eval_given`."""

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")


def _a_tracker(value: str) -> str:
    if value in TRACKERS or all(value.partition(":")):
        return value
    raise ValueError(
        f"{value!r} is none of {', '.join(TRACKERS)}, and not of the form module:Class, e.g. my_trackers:Board"
        + hint(value, TRACKERS)
    )


TrackerName = Annotated[str, AfterValidator(_a_tracker)]
"""A library's, or ``module:Class`` of the user's own."""


BOXED = "boxed"
"""As `EvalSampling.answer`: no pattern can read braces in braces and be quick."""


FITS = "fits"
"""An answer may be as long as there is room."""


class EvalSampling(Section):
    """How the prompts of an evaluation set are answered; greedily, once, where nothing is said."""

    n: int = Field(1, ge=1)
    """Answers to each prompt, e.g. ``16``: then there are pass@k, for k of 1, 2, 4 and so on, and maj@n too."""
    temperature: float = Field(0.0, ge=0)
    """How freely tokens are drawn; 0 is greedy. With n above 1 it must be above 0, e.g. ``0.6``."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the likeliest tokens that together have this probability, e.g. ``0.95``; 1 keeps all."""
    top_k: int = Field(0, ge=0)
    """Draw from so many of the likeliest tokens, e.g. ``20``; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Draw from the tokens that are at least this times as likely as the likeliest one, e.g. ``0.05``; 0 keeps all."""
    max_new_tokens: Annotated[int, Field(ge=1, strict=True)] | Literal["fits"] | None = None
    """Longest answer, e.g. ``4096``; ``fits``: as long as `rollout.engine.max_length` has room for behind each prompt;
    null: as `rollout.sampling.max_new_tokens` says."""
    column: str = REWARD
    """By which column an answer passes and votes are worth something: the whole reward, or one that it is made of, e.g.
    ``reward/math_verify`` where another function takes off for length."""
    passes: float = 1.0
    """An answer for which `column` has at least this has passed, e.g. ``0.5``."""
    answer: str | None = None
    """What votes in maj@n: ``boxed``, what the last ``\\boxed{}`` has; or a regular expression, of which the last
    match's group counts, e.g. ``'answer is (\\d+)'``; null: the whole answer, or an environment's last turn."""

    @field_validator("answer")
    @classmethod
    def _a_pattern(cls, value: str | None) -> str | None:
        if value is not None and value != BOXED:
            try:
                groups = regex.compile(value).groups
            except regex.error as error:
                raise ValueError(f"no regular expression: {error}") from None
            if groups != 1:
                raise ValueError(f"has {groups} groups; one says what the answer is, e.g. answer: (\\d+)")
        return value

    @model_validator(mode="after")
    def _drawn(self) -> EvalSampling:
        if self.n > 1 and not self.temperature:
            raise ValueError(f"n={self.n} greedy answers are all the same; set temperature, e.g. 0.6")
        return self

    def of(self, greedy: Sampling) -> Sampling:
        """As rollouts are told; ``greedy`` has the rest."""
        own = {name: getattr(self, name) for name in ("n", "temperature", "top_p", "top_k", "min_p")}
        longest = 0 if self.max_new_tokens == FITS else self.max_new_tokens or greedy.max_new_tokens
        return greedy.model_copy(update=own | {"max_new_tokens": longest})


class CurriculumConfig(Section):
    """Prompts that teach little now rest for some epochs: those whose answers were all good, or all bad, when they were
    asked last."""

    column: str = REWARD
    """What says how good the answers were: the whole reward, or one that it is made of, e.g. ``reward/math_verify``
    where another function takes off for length."""
    low: float = 0.0
    """A group whose mean of that is at most this was too hard, e.g. ``0.1``."""
    high: float = 1.0
    """A group whose mean of it is at least this was too easy, e.g. ``0.9``."""
    rest_hard: int = Field(1, ge=0)
    """Epochs for which a prompt that was too hard is left out, e.g. ``2``; 0: it is asked again in the next one."""
    rest_easy: int = Field(2, ge=0)
    """Epochs for which a prompt that was too easy is left out, e.g. ``4``."""

    @model_validator(mode="after")
    def _between(self) -> CurriculumConfig:
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} is not below high={self.high:g}: every prompt would rest")
        return self


class PromptsConfig(Section):
    """Which prompts a run trains on, in which order."""

    train: DataConfig
    """Where the prompts to train on come from."""
    eval: dict[str, DataConfig] = {}
    """Held-out prompts, answered greedily before (`eval_before`) and after training: a data source, or several by name,
    e.g. ``{sums: {type: hub, path: json, files: [sums.jsonl]}, words: {type: sort}}``, each with a curve of its own.
    null: no evaluation; of one set, e.g. ``prompts.eval.sums=null`` over a file: all but that one."""
    eval_given: dict[str, DataConfig] = {}
    """Held-out rows with answers of their own (``answer_key``): the trainer measures the loss on these answers, before
    the first step (`eval_before`), after every `eval_every` steps and after the last; with `trainer.algorithm.preset`:
    dpo that of pairs, where rows bring both answers (``rejected_key``). A data source, or several by
    name, e.g. ``{solved: {type: hub, path: json, files: [held_out.jsonl], answer_key: solution}}``; null: none."""
    eval_size: int = Field(256, ge=0)
    """Held-out prompts that one evaluation asks of each set of `eval`, at most, and rows of each set of `eval_given`:
    its first ones. 0: no evaluation."""
    eval_sampling: dict[str, EvalSampling] = {}
    """How the sets of `eval` are answered, by name (``held_out`` is one without a name), e.g.
    ``{aime: {n: 16, temperature: 0.6}}``; greedily where nothing is said."""
    eval_samples: int = Field(8, ge=0)
    """Prompts of each set of `eval` whose answers every evaluation writes to eval_samples.jsonl: its first ones, e.g.
    ``32``; 0: none."""
    eval_before: bool = True
    """Evaluate the model as it is before the first step too; false: train at once, and evaluate first after
    `eval_every` steps, or after the last one. With `trainer.steps` 0 it is evaluated in any case."""
    eval_every: int = Field(0, ge=0)
    """Evaluate also after every so many steps, e.g. ``50``, while training goes on; 0: not."""
    best_by: str | None = None
    """The evaluation set by whose mean reward a version is the best one, or no better, e.g. ``aime``; or something else
    that it tells, e.g. ``aime/reward/math_verify`` or ``aime/pass@8``; of `eval_given` by its loss, of which less is
    better. null: the mean over the prompts of all sets of `eval`; where there are none,
    the mean loss of those of `eval_given`."""
    stop_after: int = Field(0, ge=0)
    """End the run early once so many evaluations in a row were no better than the best before them, e.g. ``3`` with
    `eval_every` 50: 150 steps in vain; 0: never."""
    stop_margin: float = Field(0.0, ge=0)
    """What counts as better for `stop_after`: more than this above the best, or a loss that far below, e.g.
    ``0.01``."""
    shuffle: bool = True
    """Draw the prompts in random order (by `run.seed`), another in each epoch; false: in the data's own order."""
    epochs: int | None = Field(None, ge=1)
    """How often every prompt is drawn, e.g. ``1``; null: as often as the steps need."""
    curriculum: CurriculumConfig | None = None
    """Leave out for a while what is too easy or too hard by the last answers to it, e.g. ``{low: 0.1, high: 0.9}``;
    null: every prompt is asked in every epoch. Groups whose rewards are all equal, when they come, are another matter:
    `replay.filter`."""

    @property
    def best_set(self) -> str | None:
        """The set that `best_by` is, or names something of; None where it is of none."""
        by, sets = self.best_by or "", [*self.eval, *self.eval_given]
        return max((name for name in sets if by == name or by.startswith(f"{name}/")), key=len, default=None)

    @property
    def best_part(self) -> str:
        """What `best_by` names of its set, such as ``pass@4``; empty: the set itself."""
        return (self.best_by or "").removeprefix(self.best_set or "").removeprefix("/")

    @property
    def evaluates(self) -> bool:
        """There is something to evaluate on."""
        return bool(self.eval and self.eval_size)

    @property
    def measures(self) -> bool:
        """There is something to measure the loss on."""
        return bool(self.eval_given and self.eval_size)

    @property
    def watched(self) -> bool:
        """One or the other is done while the run trains."""
        return bool(self.eval_every) and (self.evaluates or self.measures)

    @property
    def show_pictures(self) -> bool:
        """Some of them may."""
        return any(map(shows_pictures, [self.train, *self.eval.values(), *self.eval_given.values()]))

    @field_validator("eval", "eval_given", mode="before")
    @classmethod
    def _named(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            return {}
        if not isinstance(value, dict):
            return value
        sets = {name: part for name, part in value.items() if part is not None}  # one that is null is left out
        if all(isinstance(part, dict) for part in sets.values()):
            return sets
        name = ONE_SET if info.field_name == "eval" else ONE_GIVEN_SET
        if name in value and value[name] is None:
            return {}
        if isinstance(named := value.get(name), dict):  # an override may call it so, as notes do
            return {name: {key: part for key, part in value.items() if key != name} | named}
        return {name: value}

    @model_validator(mode="after")
    def _sampled(self) -> PromptsConfig:
        for name in self.eval_sampling:
            if name not in self.eval:
                there = ", ".join(self.eval) or "none"
                raise ValueError(f"eval_sampling: there is no evaluation set {name!r}; the sets of eval are: {there}")
        if both := self.eval.keys() & self.eval_given.keys():
            raise ValueError(f"eval_given: eval has a set of the name {min(both)!r}, too; give it another name")
        if self.best_by is not None and self.best_set is None:
            there = ", ".join({**self.eval, **self.eval_given}) or "none"
            raise ValueError(
                f"best_by: there is no evaluation set {self.best_by!r}; the sets of eval and eval_given are: {there}"
            )
        if self.stop_after and not self.watched:
            raise ValueError(
                "stop_after: nothing is evaluated while the run trains; set eval or eval_given, and eval_every, e.g. 50"
            )
        return self


class GateConfig(Section):
    """How old experience may be. See docs/bounded-lag.md."""

    max_lag: int = Field(1, ge=0)
    """η: no token older than this many versions is trained on. 0 is synchronous training."""
    groups_per_step: int = Field(32, ge=1)
    """B: groups in a training step. With 32 groups of 8 trajectories a step learns from 256 answers."""
    window: int = Field(1, ge=1)
    """W: a finished group may be trained on while it is at most W - 1 places behind the oldest unfinished one, e.g.
    ``33``; 1 keeps strict order. With k * groups_per_step + 1 a slow group lets k steps pass before it holds up the
    run, and max_lag must be k or more; up to groups_per_step it may hold up the very next step."""

    prefetch: int | None = Field(None, ge=1)
    """Groups that may be leased, scored or ready beyond the step in training, e.g. ``32``. null: as many as max_lag
    allows. About groups_per_step keeps experience one version old where rollouts are faster than the trainer; at least
    that many, plus window - 1, are always allowed."""

    @model_validator(mode="after")
    def _enough_lag(self) -> GateConfig:
        needed = -(-(self.window - 1) // self.groups_per_step)
        if self.max_lag < needed:
            raise ValueError(
                f"window={self.window} with groups_per_step={self.groups_per_step} needs max_lag >= {needed}, "
                f"got {self.max_lag}"
            )
        return self


class BrokerConfig(Section):
    """The broker process."""

    bind: str = "tcp://127.0.0.1:0"
    """Where it listens, e.g. ``tcp://0.0.0.0:5555``, or ``tcp://10.1.0.0/16:5555``: at this host's address on that
    network; port 0 takes a free one. Beyond the loopback it makes keys, and speaks to nobody without them."""
    advertise: str | None = None
    """The address that others use, e.g. ``tcp://10.1.0.7:5555``; null: the one that was bound, and this machine's own
    where it listens at all of them."""
    heartbeat_s: float = Field(1.0, gt=0)
    """Seconds between the signs of life that each process sends to the broker."""
    dead_after_s: float = Field(15.0, gt=0)
    """A process that is silent for so many seconds is treated as dead."""
    lease_s: float = Field(30.0, gt=0)
    """A lease that is not renewed (by its holder's heartbeats) for so many seconds is given to another rollout."""
    stall_s: float = Field(60.0, gt=0)
    """When no step completes for so many seconds, log and live view name the group, the actor and the wait."""
    max_attempts: int = Field(5, ge=1)
    """A group that was leased or scored this often without an answer is dropped."""
    max_consecutive_drops: int = Field(64, ge=1)
    """So many groups that failed, without one that was scored in between, end the run with an error."""

    @field_validator("bind")
    @classmethod
    def _zmq(cls, value: str) -> str:
        return check_bind(value, "tcp://0.0.0.0:5555")

    @field_validator("advertise")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        if value is not None and not is_address(value):
            raise ValueError(f"{value!r} is no address, e.g. tcp://10.1.0.7:5555")
        return value

    @model_validator(mode="after")
    def _heard_in_time(self) -> BrokerConfig:
        for name in ("dead_after_s", "lease_s"):
            if self.heartbeat_s >= (limit := getattr(self, name)):
                raise ValueError(
                    f"heartbeat_s={self.heartbeat_s:g} is not below {name}={limit:g}: whoever is well would count as "
                    "gone between two heartbeats; leave room for several"
                )
        return self


class NoFilter(Section):
    """Every group whose answers have rewards is trained on."""

    type: Literal["none"] = "none"


class VarianceFilter(Section):
    """Leaves out groups whose answers were all judged alike, from which nothing can be learned (Yu et al. 2025,
    arXiv:2503.14476)."""

    type: Literal["zero_variance"] = "zero_variance"
    column: str = REWARD
    """What is compared: the whole reward, or one of its functions or another column, e.g. ``reward/exact_match``."""
    tolerance: float = Field(0.0, ge=0)
    """The largest and the smallest value may lie so far apart and still be alike, e.g. ``0.01``."""


class RangeFilter(Section):
    """Keeps groups whose mean is between two bounds and is neither of them: of a reward that is 0 or 1, those with
    right and wrong answers alike, as DAPO does (Yu et al. 2025, arXiv:2503.14476, section 3.2)."""

    type: Literal["range"] = "range"
    column: str = REWARD
    """Whose mean over the answers that have a value: the whole reward's, or that of one of its functions or of another
    column, e.g. ``reward/exact_match``."""
    low: float = 0.0
    """A group whose mean is at most this is left out, e.g. ``0.1``."""
    high: float = 1.0
    """A group whose mean is at least this is left out, e.g. ``0.9``."""

    @model_validator(mode="after")
    def _between(self) -> RangeFilter:
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} is not below high={self.high:g}: every group would be left out")
        return self


class ColumnFilter(Section):
    """A rule of your own: leaves out groups whose column is 0, or has no value, for each of their answers."""

    type: Literal["column"] = "column"
    column: str
    """Who says so: a reward function of weight 0 (with `whole_group` it sees all answers), or a scorer, e.g.
    ``reward/keep``."""


FilterConfig = Annotated[NoFilter | VarianceFilter | RangeFilter | ColumnFilter, Field(discriminator="type")]


class ReplayConfig(Section):
    """What becomes of trained groups."""

    archive: Literal["all", "none"] | Annotated[int, Field(ge=0, strict=True)] = "none"
    """Steps whose groups are kept on disk, in the run's folder, for `penstock replay`, `penstock rollouts` and the
    page: all, the last N (e.g. ``100``), or none. They come there once a checkpoint covers them."""
    samples: Literal["some", "all"] | Annotated[int, Field(ge=0, strict=True)] = "some"
    """Trajectories that are written to samples.jsonl, a flat row each (``pandas.read_json("samples.jsonl",
    lines=True, dtype=False)``): ``all``; those of N groups of every step (e.g. ``2``); or ``some``: the best and the
    worst of a group in the first 5 steps and about 40 others of the run, as the report shows them."""
    filter: FilterConfig = NoFilter()
    """Which groups are left out once they are judged, and others generated instead, e.g.
    ``{type: range, column: reward/exact_match}``. A kind's name alone is enough where it needs nothing else:
    ``zero_variance``."""
    max_consecutive_filtered: int = Field(1024, ge=1)
    """So many filtered groups without one that is kept end the run: there is nothing left to learn."""

    @field_validator("filter", mode="before")
    @classmethod
    def _by_its_name(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) and value != "column" else value


class StoreConfig(Section):
    """Redis, the pipeline's memory."""

    url: str | None = Field(None, pattern=r"^(redis|rediss|unix)://")
    """Address of a Redis of your own: ``redis://…``, ``rediss://…`` (TLS) or ``unix://…``, e.g.
    ``redis://10.1.0.7:6379/0``. null: a private server in the run's folder. A password in it is written down nowhere:
    who goes on with the run gives the address again, here or as the environment variable PENSTOCK_STORE."""
    fsync: Literal["always", "everysec"] = "always"
    """When the private server writes its file through to the disk: at every write, or once a second, which a power cut
    may cost."""
    retry_s: float = Field(300.0, gt=0)
    """How many seconds the broker waits for a store that has answered and does not any more, before it gives up, e.g.
    ``900``: a disk may stand still, and a server may give its place to another one. One that never answered is waited
    for 45 at most; one that reads what it has, for as long as that takes. Everybody else waits with it."""
    shutdown: bool = False
    """When the run is over, the broker ends the server too: for one that serves this run alone, as in a container."""
