"""Config section of the reference processes."""

from __future__ import annotations

from pydantic import Field

from penstock.services.runtime.settings import Section


class ReferenceConfig(Section):
    """The reference processes; none are started where nothing reads the column `reference`: no KL penalty, no teacher
    of that name, no function of yours."""

    count: int = Field(1, ge=1)
    """How many reference processes, where there are any."""
    path: str | None = None
    """The frozen model: a folder or a hub name, e.g. ``Qwen/Qwen2.5-0.5B-Instruct``; null: the model that training
    starts from, without the adapter of `trainer.lora.start`: merge one that is to count (`penstock merge`)."""
    in_trainer: bool = False
    """With `trainer.lora`: no process is started; the trainer switches its adapter off for a forward pass over each
    step, which is the model that training starts from, e.g. ``true`` where memory is short. Only losses, advantages and
    corrections may read the column `reference` then, since it is there when a step has taken a group."""
    refresh_every: int = Field(0, ge=0)
    """Take the policy's own version in the model's place after every so many steps, e.g. ``200`` (Liu et al. 2025,
    ProRL, arXiv:2505.24864): a multiple of `trainer.checkpoint.every`, since it is read from there. Groups that were
    scored before keep what they have; 0: the model stays what it is."""
    mix: float = Field(1.0, gt=0, le=1)
    """With `refresh_every`: the policy's share of what the reference then becomes, e.g. ``0.6``; the rest stays as it
    was, so that it follows the policy as a running mean (TR-DPO, Gorbatovski et al. 2024, arXiv:2404.09656). 1.0: the
    policy's version takes its place. Of less, the reference's newest models lie in the run's folder, in `reference/`,
    in float32, and the host has room for one in float32 while it is made."""
    device: str = "auto"
    """Where it computes, e.g. ``cpu`` or ``cuda``; ``auto``: a GPU where there is one."""
    gpus: int = Field(1, ge=1)
    """GPUs of each process, e.g. ``4`` for a model that one has no room for: its layers are dealt out over them, and
    each computes its own while the one before it computes the next pass. On a CPU it says nothing."""
    tokens_per_batch: int = Field(8192, ge=1)
    """Tokens of one forward pass, padding included; fewer need less memory."""
    groups_in_hand: int = Field(64, ge=1)
    """Groups that one reference process asks for at once."""
    threads: int = Field(1, ge=1)
    """Compute threads of each process."""
