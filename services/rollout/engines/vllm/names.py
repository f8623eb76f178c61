"""The names of vLLM's engine arguments, without importing vLLM, which takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from penstock.services.runtime.nearest import hint

CLASSES = {"EngineArgs": [], "AsyncEngineArgs": ["EngineArgs"]}
"""Dataclasses of vLLM whose fields they are, each with its bases."""
OTHERS = {
    "tensor_model_parallel_size": "rollout.engine.vllm.tensor_parallel_size",
    "pipeline_model_parallel_size": "rollout.engine.vllm.pipeline_parallel_size",
    "expert_parallel_size": "rollout.engine.vllm.enable_expert_parallel",
    "free_cache_engine": "run.placement=colocated, where engines sleep while the trainer works",
    "response_length": "rollout.sampling.max_new_tokens",
    "n": "rollout.sampling.n",
    "temperature": "rollout.sampling.temperature",
    "top_p": "rollout.sampling.top_p",
    "top_k": "rollout.sampling.top_k",
}
"""What verl has beside vLLM's arguments, or calls otherwise, and what it is here."""


def installed() -> set[str]:
    """All names that the vLLM of this installation knows; empty where there is none, or its source is not as it was."""
    spec = find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or ():
        source = Path(folder) / "engine" / "arg_utils.py"
        if source.is_file():
            return _fields(ast.parse(source.read_text("utf-8")))
    return set()


def _fields(module: ast.Module) -> set[str]:
    found = {node.name: node for node in module.body if isinstance(node, ast.ClassDef) and node.name in CLASSES}
    if {name: [ast.unparse(base) for base in node.bases] for name, node in found.items()} != CLASSES:
        return set()
    fields = (each for node in found.values() for each in node.body if isinstance(each, ast.AnnAssign))
    return {each.target.id for each in fields if isinstance(each.target, ast.Name)}


def unknown(name: str, known: Iterable[str]) -> str:
    """What is said of an argument with a ``name`` that is none of those that are ``known``."""
    meant = f"; verl's {name} is {OTHERS[name]} here" if name in OTHERS else hint(name, known)
    return f"rollout.engine.vllm.{name}: vLLM has no such engine argument{meant}"
