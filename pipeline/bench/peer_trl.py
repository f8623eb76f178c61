"""TRL's synchronous GRPOTrainer on the quickstart's task, as a process of its own: see `peers`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from penstock.pipeline.config import load
from penstock.services.data import open_source
from penstock.services.reward.functions.exact_match import exact_match
from penstock.services.runtime.plugins import load_plugin


def main(
    config_path: str, run_folder: str, out: str, steps: int, seed: int, judge: str = "", mean_s: float = 0.0
) -> None:
    """Trains ``steps`` steps from the warm start in ``run_folder``/model and writes rewards and seconds to ``out``."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config = load(Path(config_path))
    sampling, groups = config.rollout.sampling, config.gate.groups_per_step
    source = open_source(config.prompts.train)
    data = Dataset.from_list([{"prompt": p.text, "truth": p.truth} for p in source[: steps * groups]])
    path = str(Path(run_folder) / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    counted = {"tokens": 0}

    def reward(completions: list[str], truth: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        counted["tokens"] += sum(len(ids) for ids in completion_ids)
        return [exact_match(text, expected, "") for text, expected in zip(completions, truth, strict=True)]

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
        max_completion_length=sampling.max_new_tokens, temperature=1.0, learning_rate=config.trainer.optimizer.lr,
        lr_scheduler_type="constant", warmup_steps=0, beta=0.0, epsilon=0.2, epsilon_high=0.28, max_grad_norm=1.0,
        adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, loss_type="dapo", logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, gradient_checkpointing=False, model_init_kwargs=None,
    )  # fmt: skip
    GRPOTrainer(
        model=model, reward_funcs=judged if judge else reward, args=arguments, train_dataset=data,
        processing_class=tokenizer, callbacks=[Watch()],
    ).train()  # fmt: skip
    Path(out).write_text(json.dumps({"seconds": seconds, "rewards": rewards, "generated_tokens": counted["tokens"]}))


if __name__ == "__main__":
    _config, _run, _out, _steps, _seed, _judge, _mean = sys.argv[1:]
    main(_config, _run, _out, int(_steps), int(_seed), _judge, float(_mean))
