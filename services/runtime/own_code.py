"""Code that comes with a model (`auto_map` in its config.json): it runs where `model.trust_remote_code` says so alone.

A process works for one config, so what that says is known to all of it: policy, reference, critic, teachers, graders.
"""

from __future__ import annotations

_trusted = False


def trust(said: bool) -> None:
    """From now on such code may run in this process, or may not."""
    global _trusted
    _trusted = said


def trusted() -> bool:
    """It may run."""
    return _trusted
