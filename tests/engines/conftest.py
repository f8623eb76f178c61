"""The engine under test, started once: starting some takes a while."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from penstock.services.rollout.config import SamplingConfig
from tests.engines.server import serving
from tests.engines.workbench import Workbench, make_models


@pytest.fixture(scope="session")
def options(pytestconfig: pytest.Config) -> dict[str, Any]:
    """The engine's section of the config."""
    return yaml.safe_load(pytestconfig.getoption("engine"))


@pytest.fixture(scope="session")
def _bench(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    folder = tmp_path_factory.mktemp("model")
    models = make_models(folder)
    with serving(options, folder) as usable:
        workbench = Workbench(folder, models, usable, SamplingConfig(stop_token_ids=(3,)))
        yield workbench
        workbench.engine.close()


@pytest.fixture
def bench(_bench: Workbench) -> Iterator[Workbench]:
    """The engine, serving a fresh version of the first model, with nothing pending before and after."""
    assert _bench.engine.pending() == 0
    _bench.publish(0)
    yield _bench
    for number in range(_bench._numbers + 1):
        _bench.engine.abort(number)
