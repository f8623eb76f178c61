"""A task of two turns: half of the letters are hidden, and asked for by naming the others. See docs/environments.md."""

import random

import penstock


class Hidden:
    """``sort hg=`` shows two letters of four. An answer that names exactly these, in any order, is a call: it is
    answered by ``sort hgba=``, with all of them. Then the letters are to be sorted."""

    def __init__(self, share: float = 0.5) -> None:
        self._share = share

    def reset(self, prompt: penstock.Prompt) -> str:
        """What the policy reads first. Returns None to leave the prompt as it is."""
        letters = list(prompt.truth)
        random.Random(prompt.index).shuffle(letters)
        self._truth, self._letters, self._called = prompt.truth, letters, False
        self._shown = letters[: max(1, round(self._share * len(letters)))]
        return f"sort {''.join(self._shown)}="

    def step(self, answer: str) -> penstock.Turn:
        """What the policy reads next, or its reward."""
        if self._called:
            return penstock.Turn(reward=float(answer == self._truth), done=True)
        self._called = True
        if sorted(answer) != sorted(self._shown):
            return penstock.Turn(reward=0.0, done=True)
        return penstock.Turn(f"sort {''.join(self._letters)}=")
