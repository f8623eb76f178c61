"""Run under torchrun by test_ranks.py: trains a few steps, beside one process that trains the same, and publishes each
version. Arguments: broker address, folder (with the model to begin with in start/), and one of `SHAPES`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from penstock.protocols.digests import Gmac
from penstock.protocols.mailbox import Mailbox
from penstock.protocols.messages import Hello
from penstock.services.learning import checkpoint
from penstock.services.learning.config import CheckpointConfig
from penstock.services.modeling.parallel.fsdp import full
from penstock.services.modeling.parallel.world import Shape, World
from penstock.services.trainer.algorithms.losses.ppo_clip import ppo_clip
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.rank_setup import load_policy
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.queues import current_queue
from penstock.services.weights.sender import rank_sender
from penstock.services.weights.sender.publication import Publication
from penstock.services.weights.sender.publisher import Publisher
from penstock.services.weights.sender.rank_sender import RankSender
from penstock.services.weights.sender.shard_exporter import ShardExporter
from penstock.services.weights.transports import cuda_ipc
from tests.conftest import TINY
from tests.trainer.steps import Tokenizer, a_step

VERSIONS = 4
CPU = torch.device("cpu")
CONFIG = {"optimizer": {"lr": 1e-3}, "tokens_per_micro_batch": 60}
LOSS = {"type": "custom", "function": "tests.trainer.rank_program:some_say_more"}
ALGORITHM = {"algorithm": {"ratio": "proximal", "loss": LOSS, "correction": {"type": "truncated", "normalize": True}}}
SHAPES: dict[str, dict[str, Any]] = {
    "together": {},
    "apart": {},
    "tensor": {"ranks": 2, "tensor_parallel": 2},
    "lora": {"lora": {"rank": 3}, "gradient_checkpointing": True},
    "dora": {"lora": {"rank": 3, "variant": "dora", "targets": ["q_proj", "down_proj"]}},
}
"""What the config says besides; ``apart``: as if the ranks shared no memory."""


def some_say_more(*given: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Not every micro-batch has the second metric, nor does every rank."""
    losses, metrics = ppo_clip(*given)
    return losses, {"good": losses.new_tensor(2.0)} | metrics if float(given[2][0].sum()) > 0 else metrics


def a_model(**other: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**TINY | other))


def a_mixture() -> Qwen3MoeForCausalLM:
    """Of 8 experts in the second layer; the first has none."""
    torch.manual_seed(0)
    mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, **mixture, norm_topk_prob=True))


def tokens() -> torch.Tensor:
    return torch.arange(12)[None] % TINY["vocab_size"]


def main(address: str, folder: Path, shape: str) -> None:
    config = TrainerConfig.model_validate(CONFIG | ALGORITHM | SHAPES[shape])
    world = World.of_torchrun(CPU, Shape.of(config))
    if shape in ("apart", "tensor"):  # as ranks on different hosts are
        rank_sender._boot = lambda: str(world.rank)
    start = str(folder / "start")

    def learn(path: str, world: World) -> Learner:
        return Learner(load_policy(path, start, world, "float32", config), config, 1.0, world)

    learner, plain = learn(start, world), learn(start, World(CPU))
    source = ShardExporter(learner.published, "float32", 4096, world, Gmac.of_run("test"))
    # For whoever chooses a transport: each rank has a GPU of its own.
    cuda_ipc.gpu_of = lambda device: f"GPU-{world.rank}@here"
    publisher = follower = None
    if world.rank:
        follower = RankSender(source, "127.0.0.1")
    else:
        box = Mailbox(address, "trainer#1")
        weights = WeightsConfig.model_validate({"deadline_s": 20, "stall_s": 10, "bucket_mb": 0.00390625})
        publisher = Publisher(weights, source, "test-ranks", box)
        box.ask(Hello(kind="trainer", name="trainer", host="", pid=1), 10)
    # Sums in another order: AdamW makes much of small gradients. tests/trainer/test_shapes.py compares the gradients.
    near = 2e-3 if shape == "tensor" else 1e-5
    for version in range(1, VERSIONS + 1):
        mine, other = learner.train(a_step(version)), plain.train(a_step(version))
        for key in ("loss", "grad_norm", "entropy", "good"):
            assert abs(mine[key] - other[key]) <= near * max(1, abs(other[key])), (key, mine[key], other[key])
        for (name, cut), whole in zip(learner.parameters.items(), plain.parameters.values(), strict=True):
            torch.testing.assert_close(full(cut.detach()), whole.detach(), rtol=1e-4, atol=near / 10, msg=name)
        with torch.no_grad():
            logits = learner.model(tokens()).logits[0]
        if publisher:
            np.save(folder / f"logits-{version}.npy", logits.numpy())
            publisher.publish(Publication(version)).committed.result(60)
        elif follower:
            follower.follow(current_queue(CPU).mark(), lambda: None)
        world.share(b"next")
    saver = checkpoint.Saver(learner, Tokenizer(), folder / "checkpoints", CheckpointConfig(keep=1))
    path = saver.begin().result()
    world.share(b"saved")
    again = learn(str(path), world)
    checkpoint.restore(again, path)
    for name, parameter in learner.parameters.items():
        one, two = learner.optimizer.state[parameter], again.optimizer.state[again.parameters[name]]
        assert torch.equal(full(one["exp_avg"]), full(two["exp_avg"])), name
        assert torch.equal(full(parameter.detach()), full(again.parameters[name].detach())), name
    if publisher:
        while not (folder / "seen").exists() and not publisher.error:
            time.sleep(0.05)
        publisher.close()
    world.share(b"end")
    world.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
