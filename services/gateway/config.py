"""Config section of the gateways."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from penstock.services.runtime.settings import Section, check_bind


class GatewayConfig(Section):
    """The gateways: with one or more of them, agents outside the pipeline make all groups. See docs/agents.md."""

    count: int = Field(0, ge=0)
    """How many gateway processes; 0: no agents, the rollouts make groups by themselves."""
    http: str = "127.0.0.1:8420"
    """Where the first one speaks HTTP, e.g. ``0.0.0.0:8420``; a second one has the port two higher, and so on. Port 0:
    any free one. Beyond the loopback agents need the key in the run's folder."""
    advertise: str | None = None
    """What agents that came by `bind` are told to reach HTTP by, e.g. ``http://10.0.0.7:8420``; null: `http`."""
    bind: str = "tcp://127.0.0.1:8421"
    """Where the first one is reached by `penstock.AgentClient`, e.g. ``tcp://127.0.0.1:0``; a second one has the port
    two higher, and so on."""
    sessions: int = Field(256, ge=1)
    """Sessions that one gateway holds at most, e.g. ``512``: at least a group's."""
    idle_s: float = Field(600.0, gt=0)
    """Seconds without a request from an agent that speaks HTTP alone after which its session is given to another, from
    the start, e.g. ``120``: more than its tools take, and than the 60 after which a key with a quota may ask again."""
    lost_s: float = Field(30.0, gt=0)
    """Seconds without a heartbeat from its `AgentClient` after which a session is given to another; what speaks HTTP
    alone has none."""
    session_s: float | None = Field(3600.0, gt=0)
    """Seconds without a turn, since the last one or the beginning, after which a session is given to another whatever
    its agent says meanwhile, e.g. ``7200`` where tools take long: one that hangs would hold its group, and the run, for
    ever. null: none."""
    attempts: int = Field(3, ge=1)
    """How often a session is given out; then its trajectory has no reward."""
    turn_s: float = Field(600.0, gt=0)
    """Seconds that a turn may take before its agent is told to try again, e.g. ``60``."""
    waiting: int = Field(1024, ge=1)
    """Turns that may wait for the policy at once, e.g. ``256``; beyond them agents are told to ask again (429)."""
    max_turns: int = Field(64, ge=1, le=4096)
    """Turns of the policy in one session; more are refused."""
    pictures: bool = False
    """Agents may show the policy pictures, e.g. ``true``, for a model that sees: engines must know before the first
    comes. See docs/agents.md."""
    tool_calls: str = "hermes"
    """How the policy asks for tools, e.g. ``none``: not at all; ``hermes``: by JSON in ``<tool_call>``, as Qwen's;
    ``xml``: by ``<function=NAME>`` there, as Qwen3-Coder's; ``json``: the whole answer is one call or a list of
    some, as Llama 3's and Mistral's; ``harmony``: in channels, as gpt-oss'; ``template``: as the tokenizer's
    ``response_template`` says; ``vllm:llama3_json``: by vLLM's parser of that name; or a ``module:function`` of
    your own that takes what it said and returns the text that is left, and the calls. See docs/agents.md."""

    thoughts: Literal["inline", "apart"] = "inline"
    """How agents are told what an answer begins with that is only thought, up to ``</think>``: ``inline``, in its
    content, as the policy wrote it; ``apart``, e.g. for frameworks that would read calls or code in it: as
    ``reasoning_content`` (OpenAI's chats), items of type ``reasoning`` (responses), or ``thinking`` blocks
    (Anthropic's messages), and the content begins behind it."""

    @field_validator("http")
    @classmethod
    def _http(cls, value: str) -> str:
        return check_bind(value, "0.0.0.0:8420")

    @field_validator("bind")
    @classmethod
    def _zmq(cls, value: str) -> str:
        return check_bind(value, "tcp://0.0.0.0:8421")
