"""Everything that a first week gets wrong, by the real command: what is said, with which key, and how soon.

`pytest tests/preflight/test_mistakes.py -s` prints the table: exit code and message; of those that are started as users
start them, also CPU seconds until it is told. The others are forked from a process that has loaded what they need.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.run.join import FailedError, join
from penstock.protocols.run_lock import came_to
from tests import warm

CONFIG = """
model: {type: tiny, warm_start: {steps: 2}}
prompts:
  train: {type: hub, path: json, files: [rows.jsonl], prompt_key: question, truth_key: answer, chat: false}
gate: {groups_per_step: 4}
rollout:
  engine: {type: torch, max_length: 40}
  sampling: {n: 2, max_new_tokens: 8}
reward: {functions: [{function: exact_match}]}
trainer: {steps: 2}
"""
ROWS = '{"question": "1+1=", "answer": "2"}\n{"question": "2+3=", "answer": "5"}\n'
SHOWN = "{type: custom, function: 'mine:seen', pictures: true}"
SLEEPER = (
    "{judge: {command: sleep 60, ready: 'tcp://127.0.0.1:9', sleep: 'http://127.0.0.1:9', wake: 'http://127.0.0.1:9'}}"
)
TALK = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
MODULE = '''
"""Functions of a user's own, most of them wrong."""
import time

import penstock


def good(response, truth):
    return float(response == truth)


def raises(response, truth):
    return {}["nothing"]


def finds(text):
    return text


def gives_text(response, truth):
    return "very good"


def wants_more(response, embedding):
    return 1.0


def of_completions(completions, **rest):
    return [1.0]


def hangs(response):
    time.sleep(100)


class Stepless:
    pass


class Mute:
    def go(self):
        pass


class Shows:
    def reset(self, prompt):
        return penstock.Turn("what?", pictures=[b"P6 1 1 255 rgb"])

    def step(self, answer):
        return None


class Guess:
    def step(self, answer):
        if answer == "2":
            return penstock.Turn(reward=0.5, done=True)
        return penstock.Turn("Too low")


class Angry:
    def step(self, answer):
        return {}["no"]


def rows():
    return [penstock.Prompt(index=0, text="1+1=", truth="2")]


def seen():
    return [penstock.Prompt(index=0, text="<image>1+1=", truth="2", pictures=(b"P6 1 1 255 rgb",))]


def of_two():
    return [penstock.Prompt(index=0, text="1+1=", truth="2", source="a"),
            penstock.Prompt(index=1, text="2+3=", truth="5", source="b")]


def raises_on_5(response, truth):
    return 1.0 if truth == "2" else {}["five"]


def dicts():
    return [{"prompt": "1+1="}]


def generator():
    yield penstock.Prompt(index=0, text="1+1=", truth="2")


def boom():
    raise RuntimeError("no such folder")


def scalar_loss(old_log_prob, log_prob, advantages, mask, importance_weights=None):
    return (-(log_prob * advantages) * mask).sum() / mask.sum(), {}


def detached_loss(old_log_prob, log_prob, advantages, mask, importance_weights=None):
    return -(log_prob.detach() * advantages), {}


def nan_loss(old_log_prob, log_prob, advantages, mask, importance_weights=None):
    return log_prob * float("nan"), {}


def buggy_loss(old_log_prob, log_prob, advantages, mask, importance_weights=None):
    return log_probs * advantages, {}


def few_arguments(log_prob, advantages):
    return log_prob * advantages, {}


def flat_advantage(scores, mask, groups):
    return scores.mean()


class Scorer:
    def score_group(self, group, columns):
        return {}


class NoScorer:
    pass


class Bored:
    def log(self, values):
        pass


class Wants:
    def __init__(self, folder, url):
        pass

    def log(self, step, values):
        pass


def none_metric(old_log_prob, log_prob, advantages, mask, importance_weights=None):
    return -log_prob * advantages, {"x": None}


def taken_metric(old_log_prob, log_prob, advantages, mask, importance_weights=None):
    return -log_prob * advantages, {"step": 3.0}


def in_place(old_log_prob, log_prob, advantages, mask, importance_weights=None):
    ratio = (log_prob - old_log_prob).exp()
    losses = -ratio * advantages
    ratio.mul_(2)
    return losses, {}


not_callable = 3
'''
SERVER = '''
"""A server of the Model Context Protocol, of one tool."""
import json, sys

INFO = {"name": "a", "version": "1"}
GIVES = {
    "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": INFO},
    "tools/list": {"tools": [{"name": "fetch", "inputSchema": {"type": "object"}}]},
}
for line in sys.stdin:
    asked = json.loads(line)
    told = {"error": {"code": -32601, "message": "no"}}
    if asked["method"] in GIVES:
        told = {"result": GIVES[asked["method"]]}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **told}), flush=True)
'''
TOOLS = "rollout.environment={{environment: tools, options: {{{}}}}}"
LOSS = "trainer.algorithm.loss={{type: custom, function: 'mine:{}'}}"
TEACHER = "scorers={{maths: {{scorer: teacher, columns: {{maths: token}}, options: {{{}}}}}}}"
REWARD = "reward.functions=[{{function: '{}'}}]"
MIXED = "prompts.train={type: mix, sources: {sums: {type: sort}, words: {type: sort}}}"


@dataclass(frozen=True)
class Mistake:
    """``says`` must all stand in the message."""

    name: str
    says: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    config: str = CONFIG


def m(name: str, *says: str, overrides: list[str] | None = None, **more: object) -> Mistake:
    return Mistake(name, says, tuple(overrides or ()), **more)  # type: ignore[arg-type]


MISTAKES = [
    m("a section twice", "config.yaml, line 12: 'gate' is given twice, first in line 5; put both into one section",
      config=CONFIG + "run: {seed: 1}\ngate: {max_lag: 2}\n"),
    m("steps that nobody can count", "trainer.steps: null is as many as prompts.epochs makes, and that is not given",
      "set prompts.epochs, e.g. 1", overrides=["trainer.steps=null"]),
    m("an unknown key", "gate.max_lagg: unknown key; did you mean 'max_lag'?", overrides=["gate.max_lagg=1"]),
    m("a union without its type", "prompts.train: say which kind it is, with one of type: sort, type: hub",
      overrides=["prompts.train={path: json}"]),
    m("no config", "give a config, e.g. penstock run configs/quickstart.yaml", config=""),
    m("truncated with behaviour", "trainer.algorithm.ratio", "set trainer.algorithm.ratio=proximal",
      overrides=["trainer.algorithm.correction={type: truncated}"]),
    m("wandb without a key", "run.trackers: wandb has no key here; run: wandb login, or set WANDB_API_KEY",
      overrides=["run.trackers=[wandb]"]),
    m("a tracker that nobody knows", "run.trackers.0: 'wandbb' is none of tensorboard", "did you mean 'wandb'?",
      overrides=["run.trackers=[wandbb]"]),
    m("a tracker that is not installed", "run.trackers: swanlab is not installed; run: ", "swanlab]",
      overrides=["run.trackers=[swanlab]"]),
    m("a tracker that is not there", "run.trackers: cannot load 'mine:Board' as module:name", "did you mean 'Bored'?",
      overrides=["run.trackers=['mine:Board']"]),
    m("a tracker without log", "run.trackers: mine:NoScorer has no method log(step, values)",
      overrides=["run.trackers=['mine:NoScorer']"]),
    m("a tracker that takes no step", "run.trackers: mine:Bored.log cannot be called with (step, values)",
      overrides=["run.trackers=['mine:Bored']"]),
    m("a tracker that wants more", "run.trackers: mine:Wants asks for url; it may ask for folder, project, config",
      overrides=["run.trackers=['mine:Wants']"]),
    m("an adapter that is not there", "trainer.lora.start: nowhere has no adapter_config.json, so it is no adapter",
      overrides=["trainer.lora={start: nowhere}"]),
    m("an adapter of another rank", "trainer.lora.rank=4: the adapter in ", "adapter has rank 8; set",
      files={"adapter/adapter_config.json": '{"r": 8}', "adapter/adapter_model.safetensors": ""},
      overrides=["trainer.lora={rank: 4, start: adapter}"]),
    m("an adapter that some layers have more of", "adapter/adapter_config.json says alpha_pattern=",
      "merge it with peft first",
      files={"adapter/adapter_config.json": '{"r": 8, "alpha_pattern": {"q_proj": 64}}',
             "adapter/adapter_model.safetensors": ""},
      overrides=["trainer.lora={rank: 8, start: adapter}"]),
    m("a critic's adapter", "trainer.lora.start: the adapter in ", "is of a critic of values; name one of a",
      files={"adapter/adapter_config.json": '{"r": 8, "task_type": "TOKEN_CLS"}',
             "adapter/adapter_model.safetensors": ""},
      overrides=["trainer.lora={rank: 8, start: adapter}"]),
    m("a store of another scheme", "store.url", "'^(redis|rediss|unix)://'", overrides=["store.url=postgres://h/1"]),
    m("a store that is not there", "store.url: no Redis answers at redis://127.0.0.1:1",
      overrides=["store.url=redis://127.0.0.1:1"]),
    m("a file that is not there", "prompts.train.files.0: no such file: nowhere.jsonl; looked in",
      overrides=["prompts.train.files=[nowhere.jsonl]"]),
    m("a pattern of no file", "prompts.train.files.0: no file matches data/*.jsonl; looked in",
      overrides=["prompts.train.files=[data/*.jsonl]"]),
    m("an empty file", "prompts.train.files.0: rows.jsonl is empty", files={"rows.jsonl": ""}),
    m("broken JSONL", "prompts.train.files.0", "rows.jsonl, line 2: not JSON",
      files={"rows.jsonl": '{"question": "1+1=", "answer": "2"}\n{"question": "2+3=, "answer": "5"}\n'}),
    m("a column of two types", "rows.jsonl, line 2: 'answer' is a map, and text in line 1; a column has one type",
      files={"rows.jsonl": '{"question": "1+1=", "answer": "2"}\n{"question": "2+3=", "answer": {"a": 5}}\n'}),
    m("a line that is no map", "rows.jsonl, line 3: a list", files={"rows.jsonl": ROWS + "[1, 2]\n"}),
    m("a column that is not there", "prompts.train.prompt_key: no column 'prompt' in rows.jsonl; it has question",
      overrides=["prompts.train.prompt_key=prompt"]),
    m("pictures for a tiny model", "model.type: a tiny model sees nothing, and prompts show pictures",
      overrides=[f"prompts.train={SHOWN}"]),
    m("pictures for agents and for a server", "gateway.pictures: it is false, and tasks show pictures",
      "rollout.engine.name: openai is handed none, and prompts show pictures",
      overrides=[f"prompts.train={SHOWN}", "gateway.count=1",
                 "rollout.engine={type: plugin, name: openai, options: {url: 'http://127.0.0.1:1', folder: v}}"]),
    m("options that a server's engine does not have", "rollout.engine.options.ulr: unknown key; did you mean 'url'?",
      "rollout.engine.options.url: missing", "rollout.engine.options.deadline_s: Input should be a valid number",
      overrides=["rollout.engine={type: plugin, name: sglang, options: {ulr: x, folder: v, deadline_s: soon}}"]),
    m("pictures that nobody is told of", "prompts: some show pictures, and none of the sources says so: set pictures:",
      overrides=["prompts.train={type: custom, function: 'mine:seen'}"]),
    m("an environment that shows pictures",
      "mine:Shows: reset, tried on row 0, shows pictures, and rollout.environment.pictures is false",
      overrides=["rollout.environment={environment: 'mine:Shows'}"]),
    m("a picture that is not there", "images: picture 0: no such file: nowhere.png, also beside",
      overrides=["prompts.train.files=[lost.jsonl]", "prompts.train.images_key=images"],
      files={"lost.jsonl": '{"question": "1+1=", "answer": "2", "images": ["nowhere.png"]}\n'}),
    m("prompts that speak of pictures and show none",
      "prompts.train: 1 of the first 1 rows have <image> in their words "
      "and show no picture, e.g. row 0; name the column of their pictures as prompts.train.images_key",
      overrides=["prompts.train.files=[blind.jsonl]"],
      files={"blind.jsonl": '{"question": "<image>1+1=", "answer": "2", "images": ["nowhere.png"]}\n'}),
    m("a local file as a hub name", "prompts.train.path: 'rows.jsonl' is a local file; say path: json, files: [rows",
      overrides=["prompts.train={type: hub, path: rows.jsonl}"]),
    m("files without their format", "prompts.train.path: with `files` it is a format", "say path: json",
      overrides=["prompts.train.path=openai/gsm8k"]),
    m("no row that can be used", "prompts.train: none of the first 2 rows can be used; row 0: the prompt is empty",
      files={"rows.jsonl": '{"question": "", "answer": "2"}\n{"question": "", "answer": "5"}\n'}),
    m("evaluation without a row that can be used", "prompts.eval.held_out: none of the first 1 rows can be used; row 0",
      files={"eval.jsonl": '{"question": [{"role": "user", "content": [{"type": "image"}]}]}\n'},
      overrides=["prompts.eval={type: hub, path: json, files: [eval.jsonl], prompt_key: question}"]),
    m("tools for a tiny model", "prompts.train: row 0 has tools, or calls of them, which a chat template tells of",
      "take a pretrained model, or leave tools_key out", overrides=["prompts.train.tools_key=tools"],
      files={"rows.jsonl": '{"question": "1+1=", "answer": "2", "tools": [{"name": "add"}]}\n'}),
    m("prompts that are all too long", "prompts.train: 2 of the first 2 prompts are too long",
      "rollout.engine.max_length=40 has room for 32", files={"rows.jsonl": ROWS.replace("=", "=" * 60)}),
    m("a part of the truth that no row has", "reward.functions.0.truth_key: 'level' is not in the truth of row 0; it h",
      "it has question, answer", overrides=["prompts.train.truth_key=null", "model.warm_start.steps=0",
      "reward.functions.0.truth_key=level"]),
    m("a part of a truth that has none", "reward.functions.0.truth_key: 'a.b' is not in the truth of row 0; it is no m",
      "set prompts.train.truth_key=null for the whole row", overrides=["reward.functions.0.truth_key=a.b"]),
    m("no text to teach", "model.warm_start: the truth of prompt 0 is dict", "set model.warm_start.steps=0",
      overrides=["prompts.train.truth_key=null", "rollout.environment={environment: 'mine:Guess'}"]),
    m("a source that gives dicts", "prompts.train", "mine:dicts gave a dict, not a penstock.Prompt; e.g. penstock.Pr",
      overrides=["prompts.train={type: custom, function: 'mine:dicts'}"]),
    m("a generator as a source", "prompts.train.function: mine:generator returned a generator; it must return a se",
      overrides=["prompts.train={type: custom, function: 'mine:generator'}"]),
    m("a source that raises", "prompts.train.function: mine:boom raised RuntimeError: no such folder (", "mine.py",
      overrides=["prompts.train={type: custom, function: 'mine:boom'}"]),
    m("a source that wants options", "prompts.train.function: mine:rows raised TypeError",
      overrides=["prompts.train={type: custom, function: 'mine:rows', options: {size: 3}}"]),
    m("an environment without step", "rollout.environment.environment: mine:Stepless has no method step(answer)",
      overrides=["rollout.environment={environment: 'mine:Stepless'}"]),
    m("an environment that raises", "rollout.environment: mine:Angry: step(", "raised KeyError: 'no'",
      overrides=["rollout.environment={environment: 'mine:Angry'}"]),
    m("tools for plain text", "rollout.environment: tools has tools, which a chat template tells of", overrides=[
      "rollout.environment={environment: tools, options: {functions: ['mine:good']}}"]),
    m("tools of a server that is not there", "environment.options: mcp.0 (http://127.0.0.1:1/mcp): it is not reached",
      overrides=[TOOLS.format("mcp: [{url: 'http://127.0.0.1:1/mcp'}]")]),
    m("a server's command that is not there", "options.mcp.0: there is no command 'uvxx' here; install it, or give its",
      overrides=[TOOLS.format("mcp: [{command: uvxx mcp-server-fetch}]")]),
    m("a tool that a server has not", "options: mcp.0.tools: ", "server.py has no 'fech'; did you mean 'fetch'?",
      files={"server.py": SERVER},
      overrides=[TOOLS.format(f"mcp: [{{command: {sys.executable} server.py, tools: [fech]}}]")]),
    m("a secret in a config", "options: mcp.0.headers: Authorization: a secret is in the environment alone",
      overrides=[TOOLS.format("mcp: [{url: 'http://a', headers: {Authorization: 'Bearer sk-1'}}]")]),
    m("a ready tool that is not there", "options: functions: 'pythn' is neither module:function nor one of python",
      overrides=[TOOLS.format("functions: [pythn]")]),
    m("a method without words", "environment.options: class: mine:Mute.go has no docstring", "call it _go where it is",
      overrides=[TOOLS.format("class: mine:Mute")]),
    m("a program that outlasts its step", "environment: options.python.seconds=60 is not below timeout_s=30",
      overrides=[TOOLS.format("functions: [python], python: {seconds: 60}")]),
    m("a band without room", "lower=3 exceeds upper=2: every token would be left out", overrides=[
      "trainer.algorithm.correction={type: icepop, lower: 3, upper: 2}", "trainer.algorithm.ratio=proximal"]),
    m("weights that are all the same", "lower=3 exceeds upper=2: every weight would be the same", overrides=[
      "trainer.algorithm.correction={type: truncated, lower: 3, upper: 2}", "trainer.algorithm.ratio=proximal"]),
    m("no environment to reward", "reward.functions: environment stands for what an environment or an agent gave",
      overrides=["reward.functions=[{function: environment}]"]),
    m("agents and an environment", "gateway.count: agents make the groups of a run, or rollout.environment does",
      overrides=["gateway.count=1", "rollout.environment={environment: 'mine:Stepless'}"]),
    m("calls that are found by nothing", "gateway.tool_calls: mine:finds returned str; it must return the text",
      overrides=["gateway.count=1", "gateway.tool_calls=mine:finds"]),
    m("a gateway that listens nowhere", "gateway.http: 'nonsense' is nowhere to listen; give host and port, e.g. 0.0.0",
      overrides=["gateway.http=nonsense"]),
    m("a port that there is not", "gateway.http: '0.0.0.0:99999' is nowhere to listen",
      "gateway.bind: 'tcp://0.0.0.0:99999' is nowhere to listen; give host and port, e.g. tcp://0.0.0.0:8421",
      overrides=["gateway.http=0.0.0.0:99999", "gateway.bind=tcp://0.0.0.0:99999"]),
    m("a gateway whose agents reach nobody", "gateway.bind: 'nonsense' is nowhere to listen",
      overrides=["gateway.bind=nonsense"]),
    m("more gateways than ports", "gateway.http: cannot listen on 127.0.0.1:65536: there is no such port; choose an",
      overrides=["gateway.count=2", "gateway.http=127.0.0.1:65534", "gateway.bind=tcp://127.0.0.1:0"]),
    m("a gateway for others, of a broker that is here alone", "gateway.bind=tcp://0.0.0.0:0: others can reach it, and",
      "set broker.bind=tcp://NETWORK:0",
      overrides=["gateway.count=1", "gateway.http=127.0.0.1:0", "gateway.bind=tcp://0.0.0.0:0"]),
    m("weights for others, of a broker that is here alone", "weights.host=203.0.113.0/24: others can reach it, and it",
      "set broker.bind=tcp://NETWORK:0", overrides=["weights.host=203.0.113.0/24", "run.elsewhere=[trainer,rollout]"]),
    m("a network that this machine is not on", "weights.host: this host has no address on 203.0.113.0/24",
      overrides=["weights.host=203.0.113.0/24", "broker.bind=tcp://0.0.0.0:0"]),
    m("a host that nobody knows", "weights.host: no-such-host.invalid is no address, and nobody knows the name",
      overrides=["weights.host=no-such-host.invalid", "broker.bind=tcp://0.0.0.0:0"]),
    m("a broker that listens nowhere", "broker.bind: 'nonsense' is nowhere to listen", "broker.advertise: '10.1.0.7'",
      overrides=["broker.bind=nonsense", "broker.advertise=10.1.0.7"]),
    m("heartbeats that come too late", "broker: heartbeat_s=20 is not below dead_after_s=15: whoever is well would",
      overrides=["broker.heartbeat_s=20"]),
    m("leases that nobody can renew", "broker: heartbeat_s=1 is not below lease_s=0.5",
      overrides=["broker.lease_s=0.5"]),
    m("a broker on a network that is another's", "broker.bind: this host has no address on 203.0.113.0/24",
      overrides=["broker.bind=tcp://203.0.113.0/24:0"]),
    m("metrics at a port that there is not", "run.prometheus: 0.0.0.0:99999: ports end at 65535",
      overrides=["run.prometheus=0.0.0.0:99999"]),
    m("a seed without end", "run.seed", "less than 9223372036854775808",
      overrides=["run.seed=99999999999999999999999"]),
    m("more answers given than there are", "rollout.given.answers=3 is more than rollout.sampling.n=2",
      overrides=["rollout.given.answers=3"]),
    m("answers given beside too few to compare", "rollout.sampling.n must be at least 2 beside the 1 that are given",
      overrides=["rollout.given.answers=1"]),
    m("answers in a column that no row has", "prompts.train.answer_key: no column 'solution' in rows.jsonl; it has",
      overrides=["rollout.given.answers=2", "prompts.train.answer_key=solution"]),
    m("answers that are no text", "rollout.given.answers: of the first 2 rows of prompts.train none can give an",
      "row 0: its answer is a number, not text or messages: prompts.train.answer_key names its column",
      files={"rows.jsonl": '{"question": "1+1=", "answer": 2}\n{"question": "2+3=", "answer": 5}\n'},
      overrides=["rollout.given.answers=2", "model.warm_start.steps=0"]),
    m("answers that are lists of texts", "rollout.given.answers: of the first 1 rows of prompts.train none can give an",
      "row 0: its answer is a list of something else, not text or messages: prompts.train.answer_key",
      files={"rows.jsonl": '{"question": "1+1=", "answer": ["2", "two"]}'},
      overrides=["rollout.given.answers=2", "model.warm_start.steps=0"]),
    m("a penalty where nothing is sampled", "trainer.algorithm.kl: it is of what the policy says, and",
      "rollout.given.answers=2 is all of rollout.sampling.n=2",
      overrides=["trainer.algorithm.preset=sft", "trainer.algorithm.kl.coefficient=0.1"]),
    m("SFT of some answers", "rollout.given.answers=1: preset=sft learns from given answers alone; set it to",
      overrides=["trainer.algorithm.preset=sft", "rollout.given.answers=1"]),
    m("LUFFY without demonstrations", "trainer.algorithm.given: no answers are given that it could learn from; set",
      overrides=["trainer.algorithm.preset=luffy"]),
    m("pairs of which nothing is preferred", "rollout.given.rejected=1: nothing is preferred to these; set",
      overrides=["rollout.given={rejected: 1}"]),
    m("pairs beside sampled answers", "rollout.given.rejected=1: with rollout.given.answers=1 it is 2 of",
      "rollout.sampling.n=4 answers", overrides=["trainer.algorithm.preset=dpo", "rollout.sampling.n=4"]),
    m("pairs that are both learned", "rollout.given.rejected=1: an answer that others are preferred to would be",
      "take preset=dpo", overrides=["rollout.given={answers: 1, rejected: 1}", "rollout.sampling.n=2"]),
    m("given answers that are half of a pair", "given.compared: advantage=online_dpo reads what the policy",
      overrides=["trainer.algorithm={advantage: {type: online_dpo}, loss: {type: reinforce}, given: {compared: true}}",
                 "rollout.given.answers=1", "rollout.sampling.n=4"]),
    m("pairs whose loss is nobody's", "rollout.given.rejected=1: an answer that others are preferred to would be",
      overrides=["trainer.algorithm={advantage: {type: online_dpo}, given: {shape: reinforce, compared: true}}",
                 "rollout.given={answers: 1, rejected: 1}", "rollout.sampling.n=2"]),
    m("a rejected answer of nothing", "rollout.given.rejected: of the first 1 rows of prompts.train none can give",
      "row 0: the answer that its own is preferred to is nothing (prompts.train.rejected_key)",
      files={"rows.jsonl": '{"question": "1+1=", "answer": "2", "other": ""}\n'},
      overrides=["trainer.algorithm.preset=dpo", "model.warm_start.steps=0", "prompts.train.rejected_key=other"]),
    m("a pair of one answer", "row 0: its two answers are the same: prompts.train.rejected_key names the column of",
      files={"rows.jsonl": '{"question": "1+1=", "answer": "2"}\n'},
      overrides=["trainer.algorithm.preset=dpo", "model.warm_start.steps=0", "prompts.train.answer_key=answer",
                 "prompts.train.rejected_key=answer"]),
    m("DPO without pairs", "rollout.given.rejected: preset=dpo learns from pairs of given answers; set it and",
      overrides=["trainer.algorithm.preset=dpo", "rollout.given={answers: 2, rejected: 0}"]),
    m("a penalty beside pairs", "trainer.algorithm.kl: it is of what the policy says, and",
      "rollout.given.answers=1 + rejected=1 is all of rollout.sampling.n=2",
      overrides=["trainer.algorithm.preset=dpo", "trainer.algorithm.kl.coefficient=0.1"]),
    m("pairs of which a half is missing", "rollout.given.rejected: of the first 2 rows of prompts.train none can give",
      "row 0: it has no answer that its own is preferred to: prompts.train.rejected_key names its",
      overrides=["trainer.algorithm.preset=dpo", "model.warm_start.steps=0"]),
    m("a chat template that is not there is told something", "prompts.train: row 0 has chat_template_kwargs, which a",
      "take a pretrained model, or leave them out",
      overrides=["prompts.train.chat_template_kwargs={enable_thinking: false}"]),
    m("a chat template's own words", "prompts.train.chat_template_kwargs", "tools is not for a prompt to say",
      overrides=["prompts.train.chat_template_kwargs={tools: []}"]),
    m("no engine for answers that are sampled", "rollout.engine.type: none samples nothing, and 2 of",
      overrides=["rollout.engine={type: none}"]),
    m("no engine for an evaluation", "rollout.engine.type: none has nobody who could answer prompts.eval; take another",
      overrides=["rollout.engine={type: none}", "trainer.algorithm.preset=sft", "prompts.eval={type: sort}"]),
    m("answers given to agents", "rollout.given.answers=1: agents make their groups themselves",
      overrides=["rollout.given.answers=1", "gateway.count=1"]),
    m("answers that end before they begin", "rollout.sampling.stop: an empty text is in every answer",
      overrides=['rollout.sampling.stop=[""]']),
    m("a gateway without room", "gateway.sessions=1 has no room for a group of 2", overrides=[
      "gateway.count=1", "gateway.sessions=1"]),
    m("a teacher of trajectories", "teachers: reward/exact_match has a value for each trajectory",
      overrides=["trainer.algorithm.advantage={type: distillation, teachers: {reward/exact_match: 1.0}}"]),
    m("a teacher of trajectories beside a reward", "teacher_advantage.teachers: reward/exact_match has a value for eac",
      overrides=["trainer.algorithm.teacher_advantage={teachers: {reward/exact_match: 1.0}}"]),
    m("ranks that cannot be dealt out", "trainer: ranks=3 is no multiple of replicas=1 x sequence_parallel=2",
      overrides=["trainer.ranks=3", "trainer.sequence_parallel=2"]),
    m("machines that do not share ranks evenly", "trainer: nodes=2 does not divide ranks=3",
      overrides=["trainer.ranks=3", "trainer.nodes=2"]),
    m("machines that nobody starts", "trainer.nodes=2: its ranks join from so many machines; add trainer",
      overrides=["trainer.ranks=2", "trainer.nodes=2"]),
    m("a critic on another machine's GPUs", "critic.own_gpus: with run.placement=colocated it is on the trainer's",
      "set critic.own_gpus=true", overrides=["run.placement=colocated", "trainer.algorithm.preset=ppo",
                                             "run.elsewhere=[trainer]", "broker.bind=tcp://127.0.0.0/8:0"]),
    m("a program on another machine's GPUs", "programs.judge.sleep: with run.placement=colocated it is on the",
      "leave sleep and wake out", overrides=["run.placement=colocated", f"programs={SLEEPER}",
                                             "run.elsewhere=[trainer]", "broker.bind=tcp://127.0.0.0/8:0"]),
    m("a program that loads longer than a turn", "programs.judge.ready_s=600 must be less than run.turn_s=300: while",
      overrides=["run.placement=colocated", f"programs={SLEEPER}", "run.turn_s=300"]),
    m("a call of a program that sleeps, longer than a turn", "reward.functions.0.timeout_s=1200 must be less than",
      "run.turn_s=900: before a program (judge) is put to sleep",
      overrides=["run.placement=colocated", f"programs={SLEEPER}", "reward.functions.0.function=mine:good",
                 "reward.functions.0.timeout_s=1200"]),
    m("a program that sleeps, laid out by auto", "programs.judge.sleep: run.placement=auto does not lay out programs",
      "plan FILE run.placement=colocated --gpus", overrides=["run.placement=auto", f"programs={SLEEPER}"]),
    m("machines that do not reach each other", "weights.host=127.0.0.1: the machines of trainer.nodes do not reach",
      overrides=["trainer.ranks=2", "trainer.nodes=2", "run.elsewhere=[trainer]",
                 "broker.bind=tcp://0.0.0.0:0", "broker.advertise=tcp://127.0.0.1:5555"]),
    m("an address of weights that leads to no port", "snapshot_advertise: it leads to one port: give that, too",
      overrides=["weights.snapshot_advertise=tcp://203.0.113.7:5601"]),
    m("an answer that is shown where nothing can be", "self_distillation shows a good answer in the prompt",
      overrides=["trainer.algorithm.preset=sdpo", "gateway.count=1"]),
    m("a method that is another one", "trainer.algorithm: preset=dapo takes aggregation=token-mean, and token-sum is",
      overrides=["trainer.algorithm.preset=dapo", "trainer.algorithm.aggregation=token-sum"]),
    m("activations that stay where they are", "trainer.offload_activations: it moves what gradient_checkpointing=true",
      "set trainer.gradient_checkpointing=true", overrides=["trainer.offload_activations=true"]),
    m("weights that are sent from where they do not lie", "weights.transport: nccl sends weights that lie on a GPU",
      "use auto", overrides=["trainer.offload=true", "weights.transport=nccl"]),
    m("a template in the wrong place", "model.chat_template_kwargs: chat_template is a key of its own",
      "set model.chat_template",
      overrides=["model={type: pretrained, path: a/b, chat_template_kwargs: {chat_template: x}}"]),
    m("a teacher that is not there", "scorers.maths.options.path: no such folder: /nope/x",
      overrides=[TEACHER.format("path: /nope/x, column: maths")]),
    m("a teacher that writes another column", "scorers.maths: it writes the column 'teacher' (options.column), and its",
      "columns are maths", overrides=[TEACHER.format("path: a/b, column: teacher")]),
    m("a teacher of another temperature", "scorers.maths.options.temperature=0.5 is not rollout.sampling.temperature=1",
      "leave it out", overrides=[TEACHER.format("path: a/b, temperature: 0.5")]),
    m("a teacher of whole distributions that nobody writes", "trainer.algorithm.distill.teachers: no scorer writes a",
      "column 'teacher'", overrides=["trainer.algorithm={preset: gkd}"]),
    m("a teacher that says nothing of other tokens", "distill.teachers: maths says nothing of tokens that were not",
      "set scorers.maths.options.top_k, e.g. to 64",
      overrides=[TEACHER.format("path: a/b, column: maths"), "trainer.algorithm.distill={teachers: {maths: 1.0}}"]),
    m("more likely tokens than a teacher has", "scorers.maths.options.top_k=64: ", "has 51 tokens; take no more",
      files={"small/config.json": '{"model_type": "qwen3", "vocab_size": 51}', "small/model.safetensors": ""},
      overrides=[TEACHER.format("path: small, column: maths, top_k: 64")]),
    m("a number of tokens that is none", "scorers.maths: options.top_k='many' is no number of tokens; set it to one",
      overrides=[TEACHER.format("path: a/b, column: maths, top_k: many")]),
    m("what only distill may read", "reward.functions.0.columns: maths.top8_ids is read by trainer.algorithm.distill",
      overrides=[TEACHER.format("path: a/b, column: maths, top_k: 8"),
                 "reward.functions=[{function: exact_match, columns: [maths.top8_ids]}]"]),
    m("nothing that is learned", "trainer.algorithm: advantage=none: nothing is learned; give distill",
      overrides=["trainer.algorithm.advantage={type: none}"]),
    m("luffy without an advantage", "given.compared: with advantage=none no answer is worth more than another",
      overrides=["trainer.algorithm={preset: gkd, given: {shape: luffy, compared: true}}",
                 "rollout.given.answers=1"]),
    m("rows' answers without a teacher", "given.shape=distill: there is no teacher; give distill",
      overrides=["trainer.algorithm.given={shape: distill}", "rollout.given.answers=1"]),
    m("a teacher by trajectories", "distill.teachers: maths has a value for each trajectory",
      overrides=[TEACHER.format("path: a/b, column: maths, top_k: 8").replace(": token", ": trajectory"),
                 "trainer.algorithm={preset: gkd, distill: {teachers: {maths: 1.0}}}"]),
    m("a whole distribution under another name", "set scorers.maths.options.column=maths, by which it writes",
      overrides=[TEACHER.format("path: a/b, column: other, top_k: 8"),
                 "trainer.algorithm={preset: gkd, distill: {teachers: {maths: 1.0}}}"]),
    m("a divergence that is another", "trainer.algorithm.distill.beta", "less than 1",
      overrides=["trainer.algorithm.distill={divergence: jsd, beta: 1.0}"]),
    m("costs that nobody pays", "constraints: it is taken off the reward, and advantage=gdpo has no use for that",
      overrides=["trainer.algorithm.advantage={type: gdpo, components: {reward/exact_match: 1.0}}",
                 "trainer.algorithm.constraints=[{column: reward/exact_match, limit: 1}]"]),
    m("a module that is not there", "reward.functions.0.function: cannot load 'mime:good'", "looked in",
      "did you mean 'mine'?", overrides=[REWARD.format("mime:good")]),
    m("a function that is not there", "reward.functions.0.function", "has no 'goood'; did you mean 'good'?",
      overrides=[REWARD.format("mine:goood")]),
    m("a module that does not import", "reward.functions.0.function: cannot load 'broken:good'", "SyntaxError",
      files={"broken.py": "def good(:\n"}, overrides=[REWARD.format("broken:good")]),
    m("a module that needs another", "No module named 'nothing_like_it'", "broken.py, line 1); is that installed?",
      files={"broken.py": "import nothing_like_it\n"}, overrides=[REWARD.format("broken:good")]),
    m("a module that is hidden by another", "is hidden by another module that is called numbers", "my_numbers",
      files={"numbers.py": "def good(response):\n    return 1.0\n"}, overrides=[REWARD.format("numbers:good")]),
    m("a reward that wants more", "reward.functions.0: mine:wants_more asks for embedding; it may ask for response",
      overrides=[REWARD.format("mine:wants_more")]),
    m("a reward with options that it does not take", "reward.functions.0: mine:good does not take scale",
      overrides=["reward.functions=[{function: 'mine:good', options: {scale: 1}}]"]),
    m("a reward that raises", "reward.functions.0: mine:raises, called on row 0", "raised KeyError: 'nothing' (",
      "mine.py, line 13)", overrides=[REWARD.format("mine:raises")]),
    m("a reward that gives text", "mine:gives_text, called on row 0", "returned str, not a number; it is to",
      overrides=[REWARD.format("mine:gives_text")]),
    m("a reward of one number where several are wanted", "returned float, not a dict with score, brief",
      "it is to return these, each finite", overrides=["reward.functions=[{function: 'mine:good', also: {brief: 1}}]"]),
    m("a reward that is no function", "reward.functions.0.function: mine:not_callable is a int, which cannot be called",
      overrides=[REWARD.format("mine:not_callable")]),
    m("a reward that hangs", "reward.functions.0: mine:hangs, called on row 0", "timed out after 0.5 s",
      overrides=["reward.functions=[{function: 'mine:hangs', timeout_s: 0.5}]"]),
    m("rewards that are only watched", "reward.functions: every weight is 0, so that there is no reward to train on",
      "reward.columns", overrides=["reward.functions=[{function: exact_match, weight: 0}]"]),
    m("a loss for old experience that sees none", "trainer.algorithm.ratio=proximal: loss=vespo goes by how far",
      "set trainer.algorithm.ratio=behaviour", overrides=["trainer.algorithm={loss: {type: vespo}, ratio: proximal}"]),
    m("a scalar loss", "trainer.algorithm.loss.function: mine:scalar_loss: it returned a scalar, and shape [4, 5] is",
      overrides=[LOSS.format("scalar_loss")]),
    m("a loss without a gradient", "mine:detached_loss: its losses have no gradient; compute them from the argument",
      overrides=[LOSS.format("detached_loss")]),
    m("a loss that is NaN", "trainer.algorithm.loss.function: mine:nan_loss gives numbers that are not finite",
      overrides=[LOSS.format("nan_loss")]),
    m("a loss with a bug", "trainer.algorithm.loss.function: mine:buggy_loss raised NameError", "mine.py, line",
      overrides=[LOSS.format("buggy_loss")]),
    m("a loss with other arguments", "trainer.algorithm.loss.function: mine:few_arguments raised TypeError",
      overrides=[LOSS.format("few_arguments")]),
    m("a loss that is not there", "trainer.algorithm.loss.function: cannot load 'no.such:thing'",
      overrides=["trainer.algorithm.loss={type: custom, function: 'no.such:thing'}"]),
    m("a metric that is no number", "mine:none_metric: its metric 'x' is no number or tensor",
      overrides=[LOSS.format("none_metric")]),
    m("a metric with a name that is taken", "mine:taken_metric", "name it otherwise",
      overrides=[LOSS.format("taken_metric")]),
    m("a loss that changes what backward needs", "mine:in_place: its gradient cannot be computed", "inplace",
      overrides=[LOSS.format("in_place")]),
    m("a module that ends the process", "trainer.algorithm.loss.function: cannot load 'ends:loss'", "SystemExit",
      overrides=["trainer.algorithm.loss={type: custom, function: 'ends:loss'}"],
      files={"ends.py": "import sys\nsys.exit(0)\n"}),
    m("a column with the name of a trajectory's own field", "scorers.mine.columns: 'logprobs' is in the row of every",
      overrides=["scorers={mine: {scorer: 'mine:Scorer', columns: {logprobs: token}}}"]),
    m("a column with the name of what algorithms are given", "scorers.mine.columns: 'lags' is what built-in algorithms",
      overrides=["scorers={mine: {scorer: 'mine:Scorer', columns: {lags: trajectory}}}"]),
    m("a column with a metric's name", "scorers.mine.columns: 'entropy' is a metric of every step",
      overrides=["scorers={mine: {scorer: 'mine:Scorer', columns: {entropy: token}}}"]),
    m("exact_match over whole rows", "reward.functions.0: exact_match", "set truth_key to what has the answer",
      overrides=["prompts.train.truth_key=null", "model.warm_start.steps=0"]),
    m("no row with its answer", "none of the first 2 rows can be used; row 0: 'answer' is missing or null",
      files={"rows.jsonl": '{"question": "1+1=", "answer": null}\n{"question": "2+3="}\n'}),
    m("an evaluation set without its type", "prompts.eval: say which kind it is, with one of type: sort, type: hub",
      overrides=["prompts.eval={path: json, files: [rows.jsonl]}"]),
    m("a negative number of samples", "replay.samples", overrides=["replay.samples=-1"]),
    m("a checkpoint that is not there", "model.path: no such folder: runs/first/checkpoints/step-000030",
      overrides=["model={type: pretrained, path: runs/first/checkpoints/step-000030}"]),
    m("an advantage of another shape", "trainer.algorithm.advantage.function: mine:flat_advantage: it returned a scal",
      "an advantage a trajectory, [rows]",
      overrides=["trainer.algorithm.advantage={type: custom, function: 'mine:flat_advantage'}"]),
    m("a scorer without its method", "scorers.mine.scorer: mine:NoScorer has no method score_group(group, columns)",
      overrides=["scorers={mine: {scorer: 'mine:NoScorer', columns: {x: token}}}"]),
    m("a scorer that cannot sleep", "scorers.mine.own_gpus=false: mine:Scorer has no sleep() and wake()",
      overrides=["scorers={mine: {scorer: 'mine:Scorer', columns: {x: token}, gpus: 1, own_gpus: false}}"]),
    m("a scorer that shares no GPU", "scorers.mine: own_gpus=false is for processes with a GPU, and gpus=0",
      overrides=["scorers={mine: {scorer: 'mine:Scorer', columns: {x: token}, own_gpus: false}}"]),
    m("a scorer with options that it does not take", "scorers.mine.options: mine:Scorer cannot be made with them",
      overrides=["scorers={mine: {scorer: 'mine:Scorer', columns: {x: token}, options: {a: 1}}}"]),
    m("a model's folder that is not there", "model.path: no such folder: /nowhere/model",
      overrides=["model={type: pretrained, path: /nowhere/model}"]),
    m("a folder that is no model's", "has no config.json, so it is no model's folder",
      overrides=["model={type: pretrained, path: .}"]),
    m("a reference that is not there", "reference.path: no such folder: /nowhere/model",
      overrides=["reference.path=/nowhere/model", "trainer.algorithm.kl.coefficient=0.1"]),
    m("an engine that is not there", "rollout.engine.name: 'nothing' is not of the form module:name",
      overrides=["rollout.engine={type: plugin, name: nothing}"]),
    m("vLLM's workers on a cluster of Ray", "rollout.engine.vllm.distributed_executor_backend=ray: workers that Ray",
      overrides=["rollout.engine={type: vllm, max_length: 40, vllm: {distributed_executor_backend: ray}}"]),
    m("a key of another optimizer", "trainer.optimizer: momentum is a key of type=muon alone",
      overrides=["trainer.optimizer.momentum=0.9"]),
    m("a head that a server was not started with", "model.head_dtype=float32: a server over HTTP (openai) computes",
      overrides=["model.dtype=bfloat16", "model.head_dtype=float32", "rollout.engine={type: plugin, name: openai}"]),
    m("a device of another kind", "trainer.device: 'gpu' is none of auto, cpu, cuda", overrides=["trainer.device=gpu"]),
    m("a device that is not there", "trainer.device: cuda is asked for, and there is no GPU here",
      overrides=["trainer.device=cuda"]),
    m("a folder that cannot be written", "run.folder: cannot write to /proc", overrides=["run.folder=/proc/runs"]),
    m("a run that is not there", "--resume: nowhere is not a run's folder", overrides=["--resume", "nowhere"]),
    m("a reward of whole groups that returns one number", "returned float, not a list of numbers", "reward.functions.0",
      overrides=["reward.functions=[{function: 'mine:good', whole_group: true}]"]),
    m("a reward of whole groups that returns one number in a list", "returned 1 numbers for 2 answers",
      files={"of_groups.py": "def one(completions, **kwargs): return [1.0]"},
      overrides=["reward.functions=[{function: 'of_groups:one', whole_group: true, truth_key: null}]"]),
    m("a best checkpoint of a run without evaluations", "trainer.checkpoint.keep_best: nothing is evaluated",
      "prompts.eval_every=50", overrides=["trainer.checkpoint.keep_best=true"]),
    m("a command for checkpoints that is not here", "trainer.checkpoint.then: there is no command 'hf-uplaod' here",
      overrides=["trainer.checkpoint.then=hf-uplaod {folder}"]),
    m("a file for checkpoints that is no command", "'mine.py' is a file, and no command: write ./mine.py",
      overrides=["trainer.checkpoint.then=mine.py {folder}"]),
    m("a command for checkpoints with an unknown name", "there is no {foldr}; there are {folder} and {step}",
      overrides=["trainer.checkpoint.then=cp -r {foldr} /tmp/x"]),
    m("a command for checkpoints that wants a shell", "'&&' is for a shell, and there is none: give [bash, -c,",
      overrides=["trainer.checkpoint.then=tar cf x {folder} && rm x"]),
    m("a best checkpoint of versions that have none", "prompts.eval_every=30 is no multiple of",
      overrides=["trainer.checkpoint.keep_best=true", "prompts.eval={type: sort}", "prompts.eval_every=30"]),
    m("a reference that is mixed with nothing", "reference.mix=0.5: nothing is mixed where the reference stays",
      "set reference.refresh_every", overrides=["reference.mix=0.5", "trainer.algorithm.kl.coefficient=0.1"]),
    m("a reference that is refreshed from what is not saved", "reference.refresh_every=30 is no multiple of",
      "trainer.checkpoint.every=50", overrides=["reference.refresh_every=30", "trainer.algorithm.kl.coefficient=0.1"]),
    m("an end without evaluations", "stop_after: nothing is evaluated", overrides=["prompts.stop_after=3"]),
    m("an adapter, and layers that stand still", "freeze: of a model with an adapter",
      overrides=["trainer.lora={rank: 4}", "trainer.freeze=[model.layers.0.*]"]),
    m("an adapter, and towers that learn", "train_towers: an adapter (lora) is of the decoder, and learns alone",
      overrides=["trainer.lora={rank: 4}", "trainer.train_towers=true"]),
    m("towers that learn, and nothing to see", "trainer.train_towers: nothing shows pictures, so towers would learn",
      overrides=["trainer.train_towers=true"]),
    m("the best by a set that is not there", "best_by: there is no evaluation set 'aime'",
      overrides=["prompts.best_by=aime"]),
    m("a mixture with a weight too many", "weights: each of sources has one, and nothing else has; look at odd",
      overrides=["prompts.train={type: mix, sources: {one: {type: sort}}, weights: {one: 1, odd: 2}}"]),
    m("a filter by a column that is not there", "replay.filter.column: no scorer writes a column 'reward/exact'; did y",
      overrides=["replay.filter={type: range, column: reward/exact}"]),
    m("a judge that is not there", "reward.functions.0.options.url: nobody listens at http://127.0.0.1:1/v1 (",
      overrides=["reward.functions=[{function: judge, options: {url: 'http://127.0.0.1:1/v1', model: m}}]"]),
    m("a source that nobody judges", "prompts.train: no reward is made for the source 'words'", "(sources: [])",
      overrides=[MIXED, "reward.functions=[{function: exact_match, sources: [sums]}, {function: length, weight: 0}]"]),
    m("rows of a source that nobody judges", "prompts.train: no reward is made for rows of the source 'b', of which th",
      overrides=["prompts.train={type: custom, function: 'mine:of_two'}",
                 "reward.functions=[{function: exact_match, sources: [a]}]"]),
    m("a reward that raises on rows of its own source", "reward.functions.1: mine:raises_on_5, called on row 1",
      overrides=["prompts.train={type: custom, function: 'mine:of_two'}",
                 "reward.functions=[{function: exact_match, sources: [a]}, "
                 "{function: 'mine:raises_on_5', sources: [b]}]"]),
    m("a source that no evaluation set has", "functions.0.sources: no prompt is of a source 'sumz'", "you mean 'sums'?",
      overrides=[MIXED, "prompts.eval={odd: {type: custom, function: 'mine:of_two'}}",
                 "reward.functions=[{function: exact_match, sources: [sumz]}, {function: length, weight: -0.01}]"]),
    m("rows of an evaluation set that nobody judges", "prompts.eval.odd: no reward is made for rows of the source 'b'",
      overrides=[MIXED, "prompts.eval={odd: {type: custom, function: 'mine:of_two'}}",
                 "reward.functions=[{function: exact_match, sources: [sums, words, a]}]"]),
    m("a source that a reward cannot judge", "reward.functions.0: mine:raises_on_5, called on row 1 of 'b'", "five",
      overrides=["prompts.train={type: custom, function: 'mine:of_two'}", REWARD.format("mine:raises_on_5")]),
    m("tools that nobody judges", "reward.functions: the environment `tools` gives no reward", "give a function",
      config=CONFIG.replace("reward:", "#"), overrides=[TOOLS.format("functions: [python]")]),
    m("a conversation that shows its answer", "ends with the assistant's words", "name its column as answer_key too",
      files={"talk.jsonl": json.dumps({"messages": TALK, "answer": "2"})},
      overrides=["prompts.train={type: hub, path: json, files: [talk.jsonl], prompt_key: messages, "
                 "truth_key: answer}"]),
    m("a rest that is not given", "reward.functions.0: mine:of_completions asks for completions", "whole_group: true",
      overrides=[REWARD.format("mine:of_completions")]),
    m("several mistakes", "prompts.train.prompt_key: no column 'x'", "has no 'best'", "mine:buggy_loss",
      overrides=["prompts.train.prompt_key=x", REWARD.format("mine:best"), LOSS.format("buggy_loss")]),
]  # fmt: skip


WITHOUT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """The command in ``folder``, and the CPU seconds that it took."""
    env = {**os.environ, **WITHOUT}
    before = children_s()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "penstock.pipeline.cli", "run", *arguments],
        cwd=folder, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done, children_s() - before


def children_s() -> float:
    """CPU seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lay_out(folder: Path, mistake: Mistake) -> list[str]:
    for name, text in ({"rows.jsonl": ROWS, "mine.py": MODULE} | mistake.files).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    if mistake.config:
        (folder / "config.yaml").write_text(mistake.config)
    return [*(["config.yaml"] if mistake.config else []), *mistake.overrides]


LOADING_S = 4.0
AT_ONCE = (
    "an unknown key",
    "a loss with a bug",
    "several mistakes",
)
CPU_S = 5.0
"""That these may take, on a machine that loads torch and transformers in `LOADING_S`."""


@pytest.fixture(scope="module")
def slowness() -> float:
    """How many times longer this machine takes to load them."""
    before = children_s()
    subprocess.run([sys.executable, "-c", "import torch; from transformers import Qwen3ForCausalLM"], check=True)
    return max(1.0, (children_s() - before) / LOADING_S)


def forked(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit code, and what was said, of penstock with these ``arguments``, from ``folder``."""
    with (folder / "said").open("wb") as output:
        done = warm.start(*arguments, output=output, env={**WITHOUT, **environment}, folder=folder)
        return done.wait(60), (folder / "said").read_text()


def check(folder: Path, mistake: Mistake, code: int, said: str) -> None:
    for part in mistake.says:
        assert part in said
    assert code == 2 and "Traceback" not in said
    assert not (folder / "runs").exists()


def told_by_the_config(folder: Path, arguments: list[str]) -> str:
    """What is wrong with it by itself, which needs no process: that the command then ends with this and nothing else is
    `AT_ONCE`'s to show. Empty: nothing is, or it is no run of a config."""
    path, *overrides = arguments or [""]
    if not path.endswith(".yaml") or not all("=" in override for override in overrides):
        return ""
    with contextlib.chdir(folder):
        try:
            load(Path(path), overrides)
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_it_is_told_with_its_key_and_a_way_out(tmp_path: Path, mistake: Mistake) -> None:
    arguments = lay_out(tmp_path, mistake)
    if said := told_by_the_config(tmp_path, arguments):
        assert all(part in said for part in mistake.says), said
        return
    code, said = forked(tmp_path, "run", *arguments)
    sys.stdout.write(f"\n{code}  {mistake.name}: {said.strip()}\n")
    check(tmp_path, mistake, code, said)


@pytest.mark.parametrize("name", AT_ONCE, ids=lambda name: name.replace(" ", "-"))
def test_it_is_told_at_once(tmp_path: Path, name: str, slowness: float) -> None:
    (mistake,) = (known for known in MISTAKES if known.name == name)
    done, cpu_s = run(tmp_path, *lay_out(tmp_path, mistake))
    sys.stdout.write(f"\n{cpu_s:5.1f} s  {done.returncode}  {mistake.name}: {done.stderr.strip()}\n")
    check(tmp_path, mistake, done.returncode, done.stderr + done.stdout)
    assert cpu_s < CPU_S * slowness


def test_a_dry_run_tells_the_same_and_starts_nothing(tmp_path: Path) -> None:
    lay_out(tmp_path, Mistake("", (), ()))

    def dry(override: str, code: int = 0, *more: str) -> str:
        found, said = forked(tmp_path, "run", "config.yaml", "--dry-run", override, *more)
        assert found == code, said
        return said

    wrong = dry(REWARD.format("mine:raises"), 2)
    assert "mine:raises, called on row 0" in wrong
    assert "# prompts.train: 2 rows" in wrong and "\nmodel:" not in wrong, "what is wrong is not to be lost"
    good = dry(REWARD.format("mine:good"))
    assert "# prompts.train: 2 rows; row 0: '1+1='" in good
    gave = "# reward.functions.0: mine:good, called on row 0, gave 1 for the truth, 0 for 'I think the answer is 42.'"
    assert gave in good and "\nmodel:" in good
    assert "model.warm_start: 2 of the first 2 answers have less than 3 characters" in good
    played = dry("rollout.environment={environment: 'mine:Guess'}")
    for words in (
        "step('2'), on row 0, gave a reward of 0.5 and ended the task",
        "step('I think the answer is 42.'), on row 0, gave a reward of 0 and went on: '<unk>oo low'",
        "says characters that the tiny model does not know, and reads as <unk>: 'T'; it knows a-z",
    ):
        assert f"rollout.environment: mine:Guess: {words}" in played
    unread = "reward.functions: the rewards of rollout.environment are not read; add {function: environment}"
    assert "tried twice" not in played and played.count(unread) == 1
    read = dry("rollout.environment={environment: 'mine:Guess'}", 0, REWARD.format("environment"))
    assert "are not read" not in read
    assert "# on this machine: trainer.device: cuda" in dry("trainer.device=cuda")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("rows", ["answer_key: completion", "prompt_key: messages, answer_key: messages"])
@pytest.mark.parametrize("held_out", [False, True])
def test_what_is_given_is_tried_on_no_reward_but_what_is_evaluated(tmp_path: Path, rows: str, held_out: bool) -> None:
    """Both rows of docs/moving.md's table for TRL's SFTTrainer, whose truths are whole rows."""
    (tmp_path / "given.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2", "messages": TALK}))
    lay_out(tmp_path, Mistake("", (), (), config=CONFIG.replace("reward:", "#")))
    evaluated = ["prompts.eval={type: hub, path: json, files: [rows.jsonl], prompt_key: question, truth_key: answer}"]
    overrides = [
        f"prompts.train={{type: hub, path: json, files: [given.jsonl], {rows}}}", "trainer.algorithm.preset=sft",
        "model.warm_start.steps=0", *(evaluated if held_out else ["rollout.engine.type=none"]),
    ]  # fmt: skip
    code, said = forked(tmp_path, "run", "config.yaml", "--dry-run", *overrides)
    assert code == 0 and ("exact_match, called on row 0, gave 1 for the truth" in said) == held_out, said


def test_prepare_tells_what_is_lacking_and_refuses_a_package_that_an_image_lacks(tmp_path: Path) -> None:
    lay_out(tmp_path, Mistake("", (), ()))
    if importlib.util.find_spec("mlflow"):
        pytest.skip("mlflow is installed")
    given = [REWARD.format("mine:good"), "run.trackers=[mlflow]", "trainer.device=cuda"]

    def prepare(*more: str, **environment: str) -> tuple[int, str]:
        return forked(tmp_path, "prepare", "config.yaml", *given, *more, "--folder", "made", "--tell", **environment)

    code, refused = prepare(PENSTOCK_ONE_PER_HOST="1")
    wanted = "run.trackers: mlflow is not installed; run: PENSTOCK_EXTRAS=mlflow docker compose build"
    assert code == 2 and wanted in refused and not (tmp_path / "made" / "config.yaml").exists()
    assert "Traceback" not in refused and len(refused.splitlines()) < 12
    prepare("reward.functions=[{function: 'mine:none'}]", PENSTOCK_ONE_PER_HOST="1")
    with pytest.raises(FailedError, match="mine:none"):  # at once, who waits to join it; of the last try
        join(Console(), tmp_path / "made", "rollout", None, "here", 60.0, [])
    began = time.monotonic()
    with pytest.raises(FailedError):  # or after a while, for whoever may be about to go on with it
        join(Console(), tmp_path / "made", "rollout", None, "here", 60.0, [], failed_patience_s=1.5)
    assert 1.5 < time.monotonic() - began < 20
    summary = tmp_path / "made" / "summary.json"
    failed = summary.read_text()
    summary.write_text(json.dumps({"outcome": "complete", "steps": 5}))
    began = time.monotonic()
    assert join(Console(), tmp_path / "made", "rollout", None, "here", 60.0, [], failed_patience_s=1.5)
    assert time.monotonic() - began > 1.5, "it was complete before, and may go on"
    summary.write_text(failed)
    code, said = prepare()
    assert code == 0, said
    assert came_to(tmp_path / "made") is None, "mended, it begins"
    for lack in ("run.trackers: mlflow is not installed", "trainer.device: cuda is asked for"):
        assert f"note: on this machine: {lack}" in said
