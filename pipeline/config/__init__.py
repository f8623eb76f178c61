"""The whole config: YAML and dotted overrides into one checked model. Imports no torch.

`schema` has the models, `load` makes them of files, `explain` says what is wrong with one, `reference` says what every
key means.
"""

from penstock.pipeline.config.load import ConfigError, dump, load, parse
from penstock.pipeline.config.models import ModelConfig, PretrainedModel, TinyModel, WarmStart
from penstock.pipeline.config.passwords import hide_password
from penstock.pipeline.config.schema import Config, RunConfig

load_config = load
"""Its name in `penstock`, where ``load`` alone would say too little."""

__all__ = [
    "Config",
    "ConfigError",
    "ModelConfig",
    "PretrainedModel",
    "RunConfig",
    "TinyModel",
    "WarmStart",
    "dump",
    "hide_password",
    "load",
    "load_config",
    "parse",
]
