"""Environments in the process that runs them: an object a trajectory."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.protocols.experience import MOST_REWARD, PICTURE, Prompt
from penstock.protocols.measured import fault
from penstock.protocols.turn import Turn
from penstock.protocols.wire import WireError, check
from penstock.services.data.pictures import marked, marked_chat, read_pictures
from penstock.services.runtime.plugins import load_plugin

LOST = "lost"
"""The answer to a step of a session that this process does not know: it is not the one that the session began in."""


TOLD = ("finish_reason", "thinking", "marked", "before")
"""What a step is told beside the answer, where it has parameters of these names."""


class Sessions:
    """A `user_processes.child.Handler`: calls begin (``reset``), go on (``step``) and end (``close``) a session. One
    that ends before its object says so is asked for its reward (``finish``), where `EnvironmentConfig.settles`."""

    asks = ["op", "session", "given"]

    def __init__(self, program: dict[str, Any]) -> None:
        self._where = f"{program['key']}.environment: {program['function']}"
        self._make = load_plugin(program["function"], f"{program['key']}.environment")
        if not inspect.isclass(self._make):
            raise ValueError(f"{self._where} is a {type(self._make).__name__}; it must be a class")
        step = getattr(self._make, "step", None)
        if not callable(step):
            raise ValueError(f"{self._where} has no method step(answer)")
        _check_options(self._where, self._make, program["options"])
        methods = (getattr(self._make, name, None) for name in ("reset", "step", "close"))
        self.is_async = any(inspect.iscoroutinefunction(method) for method in methods)
        self.timeout_s, self._options = program["timeout_s"], program["options"]
        self._tells = [name for name in TOLD if name in inspect.signature(step).parameters]
        self._open: dict[int, Any] = {}

    def start(self, arguments: dict[str, Any]) -> Any:
        """See `Handler.start`."""
        op, session, given = arguments["op"], arguments["session"], arguments["given"]
        return self._run(op, session, given) if self.is_async else self._run_plain(op, session, given)

    def answer(self, value: Any) -> dict[str, Any]:
        """See `Handler.answer`."""
        op, found, made = value
        try:
            said = found if op == LOST else SAID[op](found, made)
            check(said)
        except (ValueError, WireError) as error:
            return {"error": str(error)}
        return {"value": said}

    async def _run(self, op: str, session: int, given: Any) -> tuple[str, Any, Any]:
        op, found, made = self._run_plain(op, session, given)
        return op, await found if inspect.isawaitable(found) else found, made

    def _run_plain(self, op: str, session: int, given: Any) -> tuple[str, Any, Any]:
        if op == "reset":
            made = self._open[session] = self._make(**self._options)
            reset = getattr(made, "reset", None)
            return op, reset(Prompt.model_validate(given)) if reset else None, made
        made = self._open.get(session)
        if made is None:
            return LOST, {LOST: True}, None
        if op == "step":
            return op, made.step(given["answer"], **{name: given[name] for name in self._tells}), made
        if op == "finish":
            return op, made.finish(), made
        del self._open[session]
        return op, getattr(made, "close", lambda: None)(), made


def _check_options(where: str, made: type, options: dict[str, Any]) -> None:
    try:
        inspect.signature(made).bind(**options)
    except TypeError as error:
        raise ValueError(f"{where} cannot be made with the options {options}: {error}") from None


def _begun(found: Any, made: Any) -> dict[str, Any]:
    """What reset returned: None for the prompt as it is, text, messages, or a `Turn` of these and pictures; and the
    tools that it may have set."""
    tools = getattr(made, "tools", None)
    pictures: tuple[bytes, ...] = ()
    if isinstance(found, Turn):
        found, pictures = found.observation, read_pictures(found.pictures, [], "reset")
        if found is None:
            raise ValueError("reset gave a Turn without an observation, which is what the policy is asked")
    if found is not None and not isinstance(found, str):
        _check_messages("reset", found)
        found = list(found)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"tools is no list of maps (JSON schemas of functions): {str(tools)[:80]}")
    return {"prompt": _marked("reset", found, pictures), "tools": tools, "pictures": list(pictures)}


def _went_on(found: Any, made: Any) -> dict[str, Any]:
    """What step returned: a `Turn`, text that the policy reads next, or None, which ends the task."""
    turn = found if isinstance(found, Turn) else Turn(found) if isinstance(found, str) else None
    if found is None:
        turn = Turn(done=True)
    if turn is None:
        raise ValueError(f"step returned {type(found).__name__}; it must return a penstock.Turn, text, or None")
    reward = _number(turn.reward)
    observation = turn.observation
    if observation is not None and not isinstance(observation, str):
        _check_messages("step", observation)
        observation = list(observation)
    pictures = read_pictures(turn.pictures, [], "step")
    shown = _marked("step", observation, pictures)
    if not shown and not turn.done:
        raise ValueError("step gave no observation, though the task is not done")
    said = {"observation": shown, "reward": reward, "done": bool(turn.done), "pictures": list(pictures)}
    return said | {"metrics": _measured(turn.metrics)}


def _finished(found: Any, made: Any) -> dict[str, Any]:
    """What the object gives at the end: None where it gives no reward."""
    return {"reward": None if found is None else _number(found, "get_reward")}


SAID = {"reset": _begun, "step": _went_on, "finish": _finished, "close": lambda found, made: {}}
"""By the kind of call what is answered."""


def _number(reward: Any, call: str = "step") -> float:
    try:
        found = float(reward)
    except (TypeError, ValueError):
        raise ValueError(f"{call} gave the reward {reward!r}, which is no number") from None
    if not math.isfinite(found) or abs(found) > MOST_REWARD:
        raise ValueError(f"{call} gave the reward {found}" + f", beyond {MOST_REWARD:g}" * math.isfinite(found))
    return found


def _measured(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise ValueError(f"step gave the metrics {str(metrics)[:80]}, which are no map of names and numbers")
    if wrong := fault(metrics):
        raise ValueError(f"step gave metrics: {wrong}")
    return {name: float(value) for name, value in metrics.items()}


def _marked(method: str, said: Any, pictures: tuple[bytes, ...]) -> Any:
    """What was ``said``, with the places of its pictures."""
    if not pictures or said is None:
        return said
    said = marked(said, pictures) if isinstance(said, str) else marked_chat(said, pictures)
    words = said if isinstance(said, str) else "".join(message["content"] for message in said)
    if words.count(PICTURE) != len(pictures):
        raise ValueError(f"{method} says {PICTURE} {words.count(PICTURE)} times, and gave {len(pictures)} pictures")
    return said


def _check_messages(method: str, found: Any) -> None:
    right = isinstance(found, Sequence) and all(
        isinstance(part, dict)
        and {"role", "content"} <= part.keys()
        and all(isinstance(word, str) or name == "tool_calls" for name, word in part.items())
        for part in found
    )
    if not right or not found:
        raise ValueError(f"{method} gave {str(found)[:80]}, which is neither text nor messages with role and content")
