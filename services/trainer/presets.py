"""Published methods as choices of `trainer.algorithm`."""

from __future__ import annotations

from typing import Any, Literal, get_args

from penstock.services.runtime.settings import Section

PresetName = Literal[
    "ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_plus_plus", "gspo", "cispo", "sapo", "gmpo", "dppo", "gpg",
    "opo", "maxrl", "remax", "distillation", "gkd", "sdpo", "gigpo", "lite_ppo", "luspo", "m2po", "topr", "vapo",
    "vespo", "sft", "luffy", "spiral", "prime", "online_dpo", "sppo", "spo", "gvpo", "dpo",
]  # fmt: skip

SECTIONS = ("advantage", "loss", "correction", "imitate", "distill", "given")
"""Choices with options; all else is one value."""
PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {"advantage": {"type": "gae"}},
    "grpo": {"aggregation": "seq-mean-token-mean"},
    "dr_grpo": {"advantage": {"type": "grpo", "std": False}, "aggregation": "seq-mean-token-sum-norm"},
    "dapo": {"loss": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}, "aggregation": "token-mean"},
    "rloo": {"advantage": {"type": "rloo"}},
    "reinforce_plus_plus": {"advantage": {"type": "reinforce_plus_plus"}},
    "gspo": {"loss": {"type": "gspo"}},
    "cispo": {"loss": {"type": "cispo"}},
    "sapo": {"loss": {"type": "sapo"}},
    "gmpo": {"loss": {"type": "geo_mean"}},
    "dppo": {"loss": {"type": "dppo_tv"}},
    "gpg": {"advantage": {"type": "gpg"}, "loss": {"type": "reinforce"}, "correction": {"type": "truncated"}},
    "opo": {"advantage": {"type": "opo"}, "loss": {"type": "reinforce"}, "correction": {"type": "truncated"}},
    "maxrl": {"advantage": {"type": "maxrl"}},
    "remax": {"advantage": {"type": "remax"}},
    "distillation": {
        "advantage": {"type": "distillation"},
        "loss": {"type": "reinforce"},
        "correction": {"type": "truncated"},
    },
    "gkd": {"advantage": {"type": "none"}, "loss": {"type": "reinforce"}, "distill": {"coefficient": 1.0}},
    "sdpo": {
        "advantage": {"type": "self_distillation"},
        "loss": {"type": "reinforce"},
        "correction": {"type": "truncated"},
    },
    "gigpo": {"advantage": {"type": "gigpo"}},
    "lite_ppo": {"advantage": {"type": "grpo", "std": "step"}, "aggregation": "token-mean"},
    "luspo": {"loss": {"type": "gspo"}, "aggregation": "seq-mean-token-sum"},
    "m2po": {"loss": {"type": "m2po"}},
    "topr": {"loss": {"type": "topr"}},
    "vapo": {
        "advantage": {"type": "gae", "length_alpha": 0.05},
        "loss": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        "imitate": {"coefficient": 0.1},
        "aggregation": "token-mean",
    },
    "vespo": {"loss": {"type": "vespo"}},
    "spiral": {
        "advantage": {"type": "rae"},
        "loss": {"type": "reinforce"},
        "correction": {"type": "truncated"},
    },
    "prime": {"advantage": {"type": "prime"}},
    "online_dpo": {
        "advantage": {"type": "online_dpo"},
        "loss": {"type": "reinforce"},
        "aggregation": "seq-mean-token-sum",
    },
    "sppo": {"advantage": {"type": "grpo", "std": False}, "loss": {"type": "sppo"}},
    "gvpo": {"advantage": {"type": "gvpo"}, "loss": {"type": "reinforce"}, "aggregation": "seq-mean-token-sum"},
    "dpo": {
        "advantage": {"type": "online_dpo"},
        "loss": {"type": "reinforce"},
        "given": {"shape": "reinforce", "compared": True},
        "aggregation": "seq-mean-token-sum",
    },
    "spo": {"advantage": {"type": "spo"}, "loss": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}},
    "sft": {"given": {"shape": "nll", "compared": False}},
    "luffy": {
        "advantage": {"type": "grpo", "std": False},
        "given": {"shape": "luffy", "compared": True},
        "aggregation": "token-mean",
    },
}
"""What each leaves as it is by default is not named."""
assert set(PRESETS) == set(get_args(PresetName))
ADVANTAGE, LOSS = ("grpo",), ("ppo_clip",)
"""What a method takes that `PRESETS` says nothing else of."""
EITHER = ("ppo_clip", "reinforce")
FREE: dict[str, dict[str, tuple[str, ...]]] = {
    **{name: {"loss": EITHER} for name in ("rloo", "reinforce_plus_plus", "maxrl", "remax")},
    "topr": {"advantage": ()},
    "sft": {"advantage": (), "loss": ()},
}
"""Where a method leaves a choice: among these; of none named, among all."""


def expand(given: dict[str, Any]) -> dict[str, Any]:
    """``given`` with its preset's choices where it names none itself, and with the preset's options of those that both
    name. Raises `ValueError` where the two name different ones: nobody should train one method under another's name."""
    found, preset = dict(given), given["preset"]
    for key, value in PRESETS[preset].items():
        mine = found.get(key)
        if mine is None:
            found[key] = value
        elif isinstance(mine, dict) and isinstance(value, dict):
            kind = mine.get("type", value.get("type"))
            if "type" in value and kind != value["type"]:
                raise ValueError(
                    f"preset={preset} takes {key}={{type: {value['type']}}}, and {kind} is given; leave out one of them"
                )
            found[key] = value | mine
    return found


def with_types(given: dict[str, Any], advantage: Section, loss: Section) -> dict[str, Any]:
    """``given``, whose sections that name no type are of the default's, where they have none but its keys."""
    found = dict(given)
    for key, default in (("advantage", advantage), ("loss", loss)):
        mine = found.get(key)
        if isinstance(mine, dict) and "type" not in mine and mine.keys() <= type(default).model_fields.keys():
            found[key] = {**mine, "type": default.model_dump()["type"]}
    return found


def contradicted(preset: str, chosen: dict[str, Any]) -> str | None:
    """What of a whole ``chosen`` section is another method than its ``preset``, in words; numbers are tuned. Raised by
    a look before a run begins, and not by the section itself: what is written of a run that is over can be read."""
    for key, value in PRESETS[preset].items():
        pairs = [(f"{key}.{name}", its, chosen[key][name]) for name, its in value.items()] if key in SECTIONS else []
        for name, its, mine in pairs or [(key, value, chosen[key])]:
            if mine != its and (isinstance(its, bool) or not isinstance(its, int | float)):
                return f"preset={preset} takes {name}={its}, and {mine} is given; leave out one of them"
    for key, plain in (("advantage", ADVANTAGE), ("loss", LOSS)):
        theirs = PRESETS[preset].get(key, {}).get("type")
        types, mine = (theirs,) if theirs else FREE.get(preset, {}).get(key, plain), chosen[key]["type"]
        if types and mine not in types:
            return (
                f"preset={preset} takes {key}={{type: {' or '.join(types)}}}, and {mine} is given: that is another "
                "method, or one of your own; leave out one of them"
            )
    return None


def without_choices(written: dict[str, Any], preset: Any) -> dict[str, Any]:
    """``written``, in which every choice stands, without those that its own preset has made or that another ``preset``
    makes; as it is where that is the same one."""
    own = written.get("preset")
    names = {name for name in (own, preset) if isinstance(name, str)} if preset != own else set()
    made = {key for name in names for key in PRESETS.get(name, {})}
    return {key: value for key, value in written.items() if key not in made}
