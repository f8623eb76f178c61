"""What a choice of `trainer.algorithm` says of itself. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from penstock.protocols.columns import GREEDY
from penstock.services.runtime.settings import Section

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"]


class Traits(Section):
    """What the rest of the config wants to know of a choice, built in or not."""

    least_n: ClassVar[int] = 1
    """Of an advantage: fewer trajectories in a group teach nothing."""
    given: ClassVar[tuple[str, ...]] = ()
    """What it is given behind its columns: an advantage `GREEDY`, for which each group has a greedy answer more,
    `BASELINE`, `SAMPLED`, `STATES`, `SCORES`, `SESSIONS`, or `POLICY`, `SQUARES`, `WEIGHTS` and `TAUGHT`, for which the
    step takes a forward pass more; a loss `PICKED`."""
    by_token: ClassVar[bool] = False
    """Of an advantage: it takes the reward of each token, not of the whole trajectory."""
    compares: ClassVar[bool] = True
    """Of an advantage: an answer is worth what it is beside others of its group."""
    equal_teach: ClassVar[bool] = False
    """Of one that compares: a group whose rewards are all equal may teach something nevertheless."""
    beside_reference: ClassVar[bool] = False
    """Of an advantage: it compares whole answers by how much likelier the policy finds them than the reference does,
    whoever has said them."""
    whitens: ClassVar[bool] = False
    """Of an advantage: its mean over all sampled tokens of a step is 0, and their deviation 1."""
    aggregation: ClassVar[Aggregation] = "token-mean"
    """Of a loss: how its authors make one number of its tokens."""
    has_ratio: ClassVar[bool] = True
    """Of a loss: it holds the ratio of the policy to the one that sampled, or that the step starts from."""

    clips_tokens: ClassVar[bool] = False
    """Of a loss: it keeps a token's ratio between 1 - `clip_low` and 1 + `clip_high`."""

    @property
    def reads_lags(self) -> bool:
        """Of a loss: it is given `LAGS`, before what else it is given."""
        return False

    @property
    def greedy_baseline(self) -> bool:
        """Of an advantage: it wants a greedy answer in each group."""
        return GREEDY in self.given


class Choice(Traits):
    """One of the built-in ones."""

    implementation: ClassVar[str] = ""
    """``package.module:function`` below `services.trainer.algorithms`; empty: there is nothing to compute."""
    paper: ClassVar[str] = ""
    picks_by: ClassVar[str] = ""
    """Of a loss that is given `PICKED`: the function that picks tokens, like `implementation`."""

    @property
    def columns(self) -> list[str]:
        """Columns of experience that it reads, beside the reward."""
        return []

    def options(self) -> dict[str, Any]:
        """What its function is called with besides."""
        return self.model_dump(exclude={"type"})

    def picking(self) -> dict[str, Any]:
        """What the function that picks is called with."""
        return {}
