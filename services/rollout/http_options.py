"""``rollout.engine.options`` of the engines over HTTP. Imports no torch: a config is looked at before a run begins."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, ValidationError

from penstock.services.rollout.config import HTTP_LENGTH, HTTP_SEQUENCES
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.nearest import nearest
from penstock.services.runtime.settings import Section

KEY = "rollout.engine.options"


class HttpOptions(Section):
    """Those that all of them have."""

    url: str | list[str]
    """The server's address, e.g. http://127.0.0.1:8000; of several rollouts each has a server of its own:
    ``[http://127.0.0.1:8000, http://127.0.0.1:8001]``."""
    folder: str
    """Versions are written here, for the server to read: shared memory on this host, or a file system of both."""
    max_sequences: int = Field(HTTP_SEQUENCES, ge=1)
    """Continuations in flight at once."""
    max_length: int = Field(HTTP_LENGTH, ge=2)
    """Longest prompt and response together, in tokens."""
    deadline_s: float = Field(60.0, gt=0)
    """For scoring a version, for a connection, and for loading a version: there longer, where its bytes take longer at
    200 MB/s."""
    start_s: float = Field(600.0, gt=0)
    """A server that does not answer, or says that it is not ready, is waited for so long."""
    drain_s: float = Field(1800.0, gt=0)
    """For one answer, and for everything in flight to end before a version is loaded: longer than the longest answer
    takes, e.g. of 32768 tokens at 40 a second 820."""
    head_dtype: Literal["float32"] | None = None
    """What it computes logits in, by its command line; None: in the model's dtype. The same as `model.head_dtype`."""
    key_env: str = ""
    """Environment variable with the server's API key, if it wants one."""

    @classmethod
    def read(cls, options: dict[str, Any]) -> Self:
        """``options``, checked. Raises `SetupError`, one line for each that is wrong, with its key."""
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            raise SetupError("\n".join(dict.fromkeys(_explained(cls, each) for each in error.errors()))) from None


class Call(Section):
    """One request of the sequence that loads a version. ``{folder}`` and ``{version}`` in it are filled in."""

    path: str
    body: dict[str, Any] = {}


class OpenAIOptions(HttpOptions):
    """How to reach the server, and how it loads weights, which the OpenAI protocol says nothing of."""

    model: str = ""
    """Its name for the model; empty: the first that it lists."""
    processed: bool = False
    """It reports log-probabilities after temperature and truncation (vLLM: --logprobs-mode processed_logprobs)."""
    load: list[Call] = Field(
        [
            Call(path="/pause?mode=wait"),
            Call(path="/collective_rpc", body={"method": "reload_weights", "kwargs": {"weights_path": "{folder}"}}),
            Call(path="/reset_prefix_cache"),
            Call(path="/resume"),
        ],
        min_length=1,
    )
    """The default is for vLLM's server, started with VLLM_SERVER_DEV_MODE=1. The last one is sent whatever becomes
    of the others."""


OF = {"openai": OpenAIOptions, "sglang": HttpOptions}
"""Those of each of `HTTP_ENGINES`."""


def _explained(kind: type[HttpOptions], error: Any) -> str:
    if error["loc"][:1] == ("url",) and error["type"] != "missing":
        return f"{KEY}.url: {error['input']!r} is no address; give one, e.g. http://127.0.0.1:8000, or a list of them"
    key = ".".join(map(str, (KEY, *error["loc"])))
    if error["type"] == "missing":
        return f"{key}: missing; give it a value"
    if error["type"] == "extra_forbidden":
        known = kind if len(error["loc"]) == 1 else Call
        return f"{key}: unknown key; {nearest(str(error['loc'][-1]), known.model_fields)}"
    got = "" if error["type"] == "value_error" else f", got {error['input']!r}"
    return f"{key}: {error['msg'].removeprefix('Value error, ')}{got}"
