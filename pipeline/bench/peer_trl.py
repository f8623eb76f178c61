"""TRL's synchronous GRPOTrainer on the quickstart's task, as a process of its own: see `peers`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.pipeline.bench import waiting_agents
from penstock.pipeline.config import load
from penstock.protocols.experience import Prompt
from penstock.services.data import open_source
from penstock.services.reward.functions.exact_match import exact_match
from penstock.services.runtime.plugins import load_plugin


def main(
    config_path: str,
    run_folder: str,
    out: str,
    steps: int,
    seed: int,
    judge: str = "",
    mean_s: float = 0.0,
    tool_s: float = 0.0,
    groups: int = 0,
) -> None:
    """Trains ``steps`` steps from the warm start in ``run_folder``/model and writes rewards and seconds to ``out``."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config = load(Path(config_path))
    kl = config.trainer.algorithm.kl  # TRL's estimate is k3, as this is by default
    sampling, groups = config.rollout.sampling, groups or config.gate.groups_per_step
    longest = sampling.max_new_tokens
    assert longest, "rollout.sampling.max_new_tokens: set it"
    source = open_source(config.prompts.train)
    data = Dataset.from_list([{"prompt": p.text, "truth": p.truth} for p in source[: steps * groups]])
    by_text = {p.as_text(): p for p in source[: steps * groups]}
    path = str(Path(run_folder) / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    counted = {"tokens": 0}

    def reward(completions: list[str], truth: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        counted["tokens"] += sum(len(ids) for ids in completion_ids)
        return [exact_match(text, expected) for text, expected in zip(completions, truth, strict=True)]

    async def judged(
        completions: list[str], truth: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        counted["tokens"] += sum(len(ids) for ids in completion_ids)
        call = load_plugin(judge, "judge")
        waits = {"mean_s": mean_s, "most_s": 8 * mean_s}
        return await asyncio.gather(*(call(text, t, **waits) for text, t in zip(completions, truth, strict=True)))

    seconds: list[float] = []
    rewards: list[float] = []

    class Watch(TrainerCallback):
        started = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            Watch.started = time.perf_counter()

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **__: Any) -> None:
            if logs and "reward" in logs:
                seconds.append(time.perf_counter() - Watch.started)
                rewards.append(logs["reward"])

    arguments = GRPOConfig(
        output_dir=str(Path(out).parent / "trl"), use_cpu=True, bf16=False, max_steps=steps, seed=seed,
        per_device_train_batch_size=groups * sampling.n, num_generations=sampling.n,
        max_completion_length=longest, temperature=1.0, learning_rate=config.trainer.optimizer.lr,
        lr_scheduler_type="constant", warmup_steps=0, beta=kl.coefficient, epsilon=0.2, epsilon_high=0.28,
        max_grad_norm=1.0, adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, loss_type="dapo", logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, gradient_checkpointing=False, model_init_kwargs=None,
    )  # fmt: skip

    def said_by(chosen: list[float], **_: Any) -> list[float]:
        return chosen

    GRPOTrainer(
        model=model, reward_funcs=said_by if tool_s else judged if judge else reward, args=arguments,
        train_dataset=data, processing_class=tokenizer, callbacks=[Watch()],
        rollout_func=two_turns(by_text, longest, tool_s) if tool_s else None,
    ).train()  # fmt: skip
    Path(out).write_text(json.dumps({"seconds": seconds, "rewards": rewards, "generated_tokens": counted["tokens"]}))


def two_turns(tasks: dict[str, Prompt], new: int, tool_s: float) -> Callable[[list[str], Any], dict[str, Any]]:
    """TRL's own door for agents: the agent of `waiting_agents`, for all of a step's trajectories at once. Their tools
    wait side by side, and the second turn begins when the slowest has answered."""

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        import torch

        tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
        asked = [tasks[text] for text in prompts]

        @torch.no_grad()
        def answers(conversations: list[list[int]]) -> list[list[int]]:
            batch = tokenizer.pad({"input_ids": conversations}, padding_side="left", return_tensors="pt")
            found = model.generate(**batch, do_sample=True, temperature=1.0, max_new_tokens=new)
            rows = found[:, batch["input_ids"].shape[1] :].tolist()
            ends = [row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else new for row in rows]
            return [row[:end] for row, end in zip(rows, ends, strict=True)]

        async def tools() -> None:
            await asyncio.gather(*(asyncio.sleep(waiting_agents.tool_s(tool_s)) for _ in prompts))

        def text(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=True)

        opening = [tokenizer(waiting_agents.shown(task))["input_ids"] for task in asked]
        first = answers(opening)
        asyncio.run(tools())
        given = [tokenizer(task.as_text())["input_ids"] for task in asked]
        second = answers([a + b + c for a, b, c in zip(opening, first, given, strict=True)])
        parts = list(zip(first, given, second, strict=True))
        return {
            "prompt_ids": opening,
            "completion_ids": [a + b + c for a, b, c in parts],
            "logprobs": None,
            "env_mask": [[1] * len(a) + [0] * len(b) + [1] * len(c) for a, b, c in parts],
            "chosen": [
                waiting_agents.reward(text(a), text(c), task)
                for task, (a, _, c) in zip(asked, parts, strict=True)
            ],
        }  # fmt: skip

    return roll_out


if __name__ == "__main__":
    _config, _run, _out, _steps, _seed, _judge, _mean, _tool, _groups = sys.argv[1:]
    main(_config, _run, _out, int(_steps), int(_seed), _judge, float(_mean), float(_tool), int(_groups))
