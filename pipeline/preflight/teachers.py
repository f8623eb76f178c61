"""Teachers behind servers: whether they are there, read the policy's words, and say of each token what is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.pipeline.config import Config, PretrainedModel
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.preflight.servers import nobody_at
from penstock.protocols.experience import Group, Prompt, Trajectory
from penstock.services.modeling.served_teacher import ServedTeacher
from penstock.services.runtime.asking import AskingError
from penstock.services.runtime.custom_scorer import SERVED, ScorerConfig
from penstock.services.runtime.errors import SetupError

TRIAL_S = 60.0
FEW = 8
"""Tokens that it is asked about where no tokenizer says which."""


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found."""
    policy = config.model.path if isinstance(config.model, PretrainedModel) else None
    for kind, scorer in config.scorers.items():
        url, key = scorer.options.get("url"), f"scorers.{kind}.options"
        if scorer.scorer != SERVED or not url or "model" not in scorer.options:
            continue  # what it lacks is told with all scorers
        if why := nobody_at(str(url), f"{key}.url"):
            report.here.append(why)
            continue
        with report.collect():
            report.lines += filter(None, [_tried(scorer, key, policy)])


def _tried(scorer: ScorerConfig, key: str, policy: str | None) -> str:
    """What is told of it. Raises `SetupError`."""
    try:
        teacher = ServedTeacher(**scorer.arguments(1.0) | {"seconds": TRIAL_S, "attempts": 1})
    except TypeError:
        return ""  # which option it does not know is told with all scorers
    try:
        tokens = _words(teacher, scorer.options, key, policy) if policy else list(range(FEW))
        found = teacher.score_group(_group(tokens), {})[scorer.writes]
    except AskingError as error:
        raise SetupError(f"{key}: {error}") from None
    finally:
        teacher.close()
    mean = found[1:].mean()
    return f"{key}: {scorer.options['model']} at {scorer.options['url']} says {mean:.2f} a token of {len(tokens)}"


def _words(teacher: ServedTeacher, options: Mapping[str, Any], key: str, policy: str) -> list[int]:
    """Of a sentence, as the ``policy`` reads it. Raises `SetupError` where the server reads it otherwise."""
    from penstock.services.modeling.load import TRIED, load_tokenizer, tried_by

    ours = tried_by(load_tokenizer(policy))
    its = teacher.reads(TRIED)
    if its is not None and its != ours:
        raise SetupError(
            f"{key}.model: {options['model']} has another tokenizer than the policy, {policy}: it would read other "
            "words than were said; take a model of the same family"
        )
    return ours


def _group(tokens: list[int]) -> Group:
    size = len(tokens)
    trajectory = Trajectory(
        np.array(tokens, np.int32), np.ones(size, np.uint8), np.zeros(size, np.float32), np.zeros(size, np.int32)
    )
    return Group(0, Prompt(index=0, text=""), (trajectory,))
