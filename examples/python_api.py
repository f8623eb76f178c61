"""A run from Python, with a reward that is defined right here.

python examples/python_api.py          (the same cells run in a notebook; pip install pandas)
"""

import random
import sys

import penstock

LETTERS = "abcdefgh"


def task(number: int, random_: random.Random) -> penstock.Prompt:
    """Letters to be sorted."""
    letters = random_.sample(LETTERS, random_.randint(3, 6))
    return penstock.Prompt(index=number, text=f"sort {''.join(letters)}=", truth="".join(sorted(letters)))


def right_places(response: str, truth: str) -> float:
    """The share of places that have the right letter; all of it only for the right length."""
    right = sum(one == other for one, other in zip(response, truth, strict=False))
    return right / max(len(truth), len(response), 1)


def main(name: str, steps: int = 60) -> None:
    seeded = random.Random(0)
    rows = [task(number, seeded) for number in range(5000)]
    trainer = penstock.Trainer(
        "configs/quickstart.yaml",
        name=name,
        reward=right_places,
        prompts=rows[:-64],
        evaluation=rows[-64:],
        overrides={"trainer.steps": steps, "replay.archive": 2},
    )
    run = trainer.train()
    summary = run.summary
    assert summary is not None
    print(f"reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}, {run.checkpoint}")
    print(run.metrics[["reward", "lag_mean", "response_tokens"]].tail(3))
    best = max(run.rollouts(steps - 1), key=lambda row: row["reward"])
    print(best["prompt"], best["response"], best["reward"])


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["from-python"])
