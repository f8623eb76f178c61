"""How the tiny model of configs/agent.yaml asks for its tool. Chat models have ways of their own (`hermes`, …)."""

from penstock.services.turns.tool_calls import Call


def reveal(text: str) -> tuple[str, list[Call]]:
    """All that it says, while it is told of tools, is the argument of one. Returns what is left, and the calls."""
    return "", [Call("reveal", {"letters": text})]
