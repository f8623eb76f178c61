"""What an engine that is started elsewhere, or samples by itself, cannot do as the config says."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.pipeline.config import Config
from penstock.pipeline.preflight.report import Report
from penstock.services.broker.config import EvalSampling
from penstock.services.rollout.config import HTTP_ENGINES, PluginEngineConfig, SamplingConfig, VllmEngineConfig
from penstock.services.rollout.http_options import OF
from penstock.services.runtime.errors import SetupError


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found."""
    engine = config.rollout.engine
    served = isinstance(engine, PluginEngineConfig) and engine.name in HTTP_ENGINES
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
    if isinstance(engine, PluginEngineConfig) and served:
        try:
            OF[engine.name].read(engine.options)
        except SetupError as error:
            report.problems += str(error).splitlines()
        report.problems += _of_server(config, engine)


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
    evaluated = {f"prompts.eval_sampling.{name}": how for name, how in config.prompts.eval_sampling.items()}
    evaluated = evaluated if config.gateway.count else {}  # other evaluations' log-probabilities are read by nobody
    every: dict[str, SamplingConfig | EvalSampling] = {"rollout.sampling": sampling, **evaluated}
    for key, how in every.items():
        if not engine.options.get("processed") and how.temperature not in (0, 1):
            yield (
                f"{key}.temperature={how.temperature:g}: the server reports log-probabilities before it; start it with "
                "--logprobs-mode processed_logprobs, say, and set rollout.engine.options.processed=true"
            )
        if engine.options.get("processed") and (how.top_p < 1 or how.top_k or how.min_p):
            yield (
                f"{key}: a server that reports log-probabilities after temperature (rollout.engine.options.processed) "
                "does so after top_p, top_k and min_p, too, which the trainer would not know of; leave them out"
            )
