"""What TRL and verl call what a run is told here: who comes from there is told its name. docs/moving.md has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HERE = {
    "total_epochs": "prompts.epochs, with trainer.steps=null",
    "num_train_epochs": "prompts.epochs, with trainer.steps=null",
    "max_steps": "trainer.steps",
    "total_training_steps": "trainer.steps",
    "num_iterations": "trainer.epochs",
    "ppo_epochs": "trainer.epochs",
    "steps_per_generation": "trainer.mini_batches",
    "ppo_mini_batch_size": "trainer.mini_batches",
    "train_batch_size": "gate.groups_per_step",
    "generation_batch_size": "gate.groups_per_step",
    "per_device_train_batch_size": "trainer.tokens_per_micro_batch",
    "gradient_accumulation_steps": "trainer.tokens_per_micro_batch",
    "ppo_max_token_len_per_gpu": "trainer.tokens_per_micro_batch",
    "log_prob_max_token_len_per_gpu": "reference.tokens_per_batch",
    "num_generations": "rollout.sampling.n",
    "max_completion_length": "rollout.sampling.max_new_tokens",
    "max_response_length": "rollout.sampling.max_new_tokens",
    "max_prompt_length": "rollout.engine.max_length, of prompt and answer together",
    "max_model_len": "rollout.engine.max_length",
    "max_num_seqs": "rollout.engine.max_sequences",
    "use_vllm": "rollout.engine: {type: vllm}",
    "vllm_gpu_memory_utilization": "rollout.engine.vllm: {gpu_memory_utilization: …}",
    "gpu_memory_utilization": "rollout.engine.vllm: {gpu_memory_utilization: …}",
    "tensor_model_parallel_size": "rollout.engine.vllm: {tensor_parallel_size: …}",
    "learning_rate": "trainer.optimizer.lr",
    "lr_scheduler_type": "trainer.optimizer.schedule",
    "lr_warmup_steps": "trainer.optimizer.warmup_steps",
    "lr_warmup_steps_ratio": "trainer.optimizer.warmup_share",
    "grad_clip": "trainer.optimizer.max_grad_norm",
    "adv_estimator": "trainer.algorithm.advantage, or trainer.algorithm.preset",
    "beta": "trainer.algorithm.kl.coefficient, or trainer.algorithm.advantage.beta",
    "rpo_alpha": "trainer.algorithm.imitate.coefficient",
    "use_kl_loss": "trainer.algorithm.kl.coefficient",
    "kl_loss_coef": "trainer.algorithm.kl.coefficient",
    "kl_coef": "trainer.algorithm.kl.coefficient",
    "epsilon": "trainer.algorithm.loss.clip_low, which trainer.algorithm.loss.clip_high does not follow: set both",
    "epsilon_high": "trainer.algorithm.loss.clip_high",
    "clip_ratio": "trainer.algorithm.loss.clip_low and trainer.algorithm.loss.clip_high, where verl's clip_ratio_low "
    "and clip_ratio_high are null; these are 0.2 unless they are set, and go before it",
    "clip_ratio_low": "trainer.algorithm.loss.clip_low",
    "clip_ratio_high": "trainer.algorithm.loss.clip_high",
    "clip_ratio_c": "trainer.algorithm.loss.dual_clip",
    "loss_type": "trainer.algorithm.aggregation or trainer.algorithm.preset, of DPO trainer.algorithm.advantage.shape",
    "loss_agg_mode": "trainer.algorithm.aggregation",
    "entropy_coef": "trainer.algorithm.entropy_bonus",
    "entropy_coeff": "trainer.algorithm.entropy_bonus",
    "lora_rank": "trainer.lora.rank",
    "peft_config": "trainer.lora.rank, trainer.lora.alpha and trainer.lora.targets",
    "reward_funcs": "reward.functions",
    "custom_reward_function": "reward.functions",
    "reward_manager": "reward.workers: functions run in processes of their own",
    "reward_kwargs": "reward.functions: [{function: overlong, …}]",
    "rollout_correction": "trainer.algorithm.ratio, trainer.algorithm.correction and trainer.algorithm.reject",
    "async_training": "gate.max_lag, gate.groups_per_step and trainer.mini_batches",
    "v1": "gate.max_lag, trainer.mini_batches and run.placement",
    "reward_weights": "reward.functions, each with its weight",
    "train_dataset": "prompts.train",
    "eval_dataset": "prompts.eval",
    "train_files": "prompts.train",
    "val_files": "prompts.eval",
    "eval_steps": "prompts.eval_every",
    "test_freq": "prompts.eval_every",
    "val_before_train": "prompts.eval_before",
    "eval_on_start": "prompts.eval_before",
    "save_steps": "trainer.checkpoint.every",
    "save_freq": "trainer.checkpoint.every",
    "save_total_limit": "trainer.checkpoint.keep",
    "max_actor_ckpt_to_keep": "trainer.checkpoint.keep",
    "n_gpus_per_node": "trainer.ranks and rollout.count: penstock plan FILE --gpus 8xH100 says which",
    "nnodes": "trainer.nodes and rollout.count",
    "report_to": "run.trackers",
    "logger": "run.trackers",
    "project_name": "run.project",
    "experiment_name": "run.name",
    "default_local_dir": "run.folder",
}
"""By the last part of a key of theirs."""
SECTIONS = ("actor_rollout_ref", "data", "reward_model")
"""Of verl's, that are none here."""
WITHIN = ("trainer", "trainer.algorithm", "reward")
"""Where else than alone a key of theirs may stand for what is elsewhere here."""


def known_here(path: Sequence[Any], value: Any = None) -> str | None:
    """What to say of the key at ``path``, or of one within its ``value``, that is another's for something that is here;
    None: it is nobody's that is known."""
    name, within = str(path[-1]), ".".join(map(str, path[:-1]))
    # In a section of ours, below those that others have too, a name that is alike may be meant for it.
    if (here := HERE.get(name)) and (not within or within in WITHIN or path[0] in SECTIONS):
        return f"here it is {here} (docs/moving.md)"
    if name not in SECTIONS or within:
        return None
    found = [f"{key} is {HERE[key]} here" for key in _names_within(value) if key in HERE][:3]
    return f"a section of verl's: {', '.join([*found, 'docs/moving.md says what each of its keys is here'])}"


def _names_within(value: Any) -> list[str]:
    if not isinstance(value, dict):
        return []
    return [name for key, each in value.items() for name in (str(key), *_names_within(each))]
