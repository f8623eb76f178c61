"""What an engine that is started elsewhere, or samples by itself, cannot do as the config says."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.pipeline.config import Config
from penstock.pipeline.preflight.report import Report
from penstock.services.rollout.config import PluginEngineConfig, VllmEngineConfig
from penstock.services.rollout.engines.vllm import names
from penstock.services.rollout.http_options import OF
from penstock.services.runtime.errors import SetupError


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found."""
    engine = config.rollout.engine
    served = isinstance(engine, PluginEngineConfig) and engine.over_http
    if config.run.deterministic and (served or (isinstance(engine, VllmEngineConfig) and not engine.seeded)):
        report.notes.append(
            "run.deterministic: training is repeated to the bit, and what this engine samples is not: it follows from "
            "more than seed, group and sample"
        )
    if isinstance(engine, VllmEngineConfig):
        report.problems += [
            f"rollout.engine.vllm.{name}=ray: workers that Ray starts are no children of the rollout, which hands them "
            "versions; leave it out (mp), and take another rollout for each machine"
            for name in ("distributed_executor_backend", "data_parallel_backend")
            if engine.vllm.get(name) == "ray"
        ]
        _look_at_names(config, engine, report)
    if isinstance(engine, PluginEngineConfig) and served:
        try:
            OF[engine.name].read(engine.options)
        except SetupError as error:
            report.problems += str(error).splitlines()
        report.problems += _of_server(config, engine)


def _look_at_names(config: Config, engine: VllmEngineConfig, report: Report) -> None:
    """Of arguments that vLLM is given: the one that is installed here need not be the one of another machine."""
    known = set() if "rollout" in config.run.elsewhere else names.installed()
    report.problems += [names.unknown(name, known) for name in engine.vllm if name in names.OTHERS]
    strange = [name for name in engine.vllm if known and name not in known and name not in names.OTHERS]
    report.here += [names.unknown(name, known) for name in strange]


def _of_server(config: Config, engine: PluginEngineConfig) -> Iterator[str]:
    """Of an engine over HTTP, which samples as it was started to."""
    sampling, urls = config.rollout.sampling, engine.options.get("url")
    if sampling.candidates:
        yield (
            f"rollout.sampling.candidates: a server over HTTP ({engine.name}) does not say which tokens its sampler "
            "kept; use rollout.engine.type=torch or vllm"
        )
    servers = len(urls) if isinstance(urls, list) else 1
    if config.rollout.count > servers and "rollout" not in config.run.elsewhere:
        yield (
            f"rollout.count={config.rollout.count}: each rollout loads versions into a server of its own, and "
            f"rollout.engine.options.url names {servers}; name as many, e.g. [http://127.0.0.1:8000, "
            "http://127.0.0.1:8001], or use fewer rollouts"
        )
    if engine.name != "openai":
        return
    processed = engine.options.get("processed")
    if not processed and sampling.temperature not in (0, 1):
        yield (
            f"rollout.sampling.temperature={sampling.temperature:g}: the server reports log-probabilities before it; "
            "start it with --logprobs-mode processed_logprobs, say, and set rollout.engine.options.processed=true"
        )
    if processed and (sampling.top_p < 1 or sampling.top_k or sampling.min_p):
        yield (
            "rollout.sampling: a server that reports log-probabilities after temperature "
            "(rollout.engine.options.processed) does so after top_p, top_k and min_p, too, which the trainer would not "
            "know of; leave them out"
        )
