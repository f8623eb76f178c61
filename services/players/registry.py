"""Players by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from penstock.services.data.config import ReasoningGymData
from penstock.services.environments.config import EnvironmentConfig
from penstock.services.players.base import Player
from penstock.services.runtime.errors import SetupError


def make_player(environment: str, options: Mapping[str, Any], key: str) -> Player:
    """``environment``: ``verifiers:TASKSET``, ``openenv:URL``, ``reasoning_gym:TASK``, ``tools``, or ``module:Class``
    of the user's own; ``key``: the gateway's, for what speaks HTTP. Raises `SetupError` for what cannot be made."""
    kind, _, name = environment.partition(":")
    try:
        if kind == "verifiers":
            from penstock.services.players.verifiers import VerifiersPlayer

            return VerifiersPlayer(name, options, key)
        if kind == "openenv":
            from penstock.services.players.openenv import OpenEnvConfig, OpenEnvPlayer

            return OpenEnvPlayer(OpenEnvConfig(url=name, **options))
        if kind == "reasoning_gym":
            from penstock.services.players.reasoning_gym import ReasoningGymPlayer

            return ReasoningGymPlayer(ReasoningGymData(task=name, **options))
        from penstock.services.players.own import OwnPlayer

        return OwnPlayer(EnvironmentConfig(environment=environment, **{"pictures": True, **options}))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'ENVIRONMENT'}: {e['msg']}" for e in error.errors()[:3])
        raise SetupError(f"{environment}: {wrong}") from None
    except (Exception, SystemExit) as error:  # libraries' and users' own code
        raise SetupError(f"{environment}: {type(error).__name__}: {error}") from error
