"""``docs/configuration.md``, made of `reference`. ``penstock config --markdown`` prints it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from penstock.pipeline.config.key_reference import Block, Key, reference
from penstock.pipeline.config.type_words import is_list

INTRODUCTION = """\
# Configuration

<!-- Made by `penstock config --markdown > docs/configuration.md`: edit the docstrings of the config's models. -->

A run is described by one YAML file. It is a map of sections, and a section is a map of keys. Only `model` and `prompts`
must be there; every other key has a default. This is a whole config:

```yaml
model: {type: tiny}
prompts:
  train: {type: sort}
gate:
  max_lag: 2
rollout:
  engine: {type: torch, max_length: 32}
  sampling: {max_new_tokens: 12}
```

`configs/` has one file for each thing that people train; start from the nearest. Words such as *lag* and *lease* are
explained in the [glossary](glossary.md).

**A key's path** has dots between section and key: `gate.max_lag` is the key `max_lag` of the section `gate`. In a list
the position stands between the dots, counted from 0: `reward.functions.0.timeout_s`. The tables leave the position out.
On the command line an element can be named only where the file has the list.

**On the command line** any key can be given another value, in YAML, behind the file; what the file does not name is
made. Quote what the shell would read itself:

```
penstock run configs/quickstart.yaml gate.max_lag=0 trainer.optimizer.lr=1.0e-5
penstock run configs/quickstart.yaml 'rollout.sampling.stop=["</answer>"]' run.name=first-try
```

**A file may go on from another one**, or from several: `extends` at its top names them, from its own folder. Then it
says only what is other. Sections are put together key by key; a list, a section whose `type` is another, and one that
says `extends: null` are as the later file has them. A run's own copy of its config has all of it. What the files name
(functions, data) is looked for beside the last one, and where the run is started. [recipes.md](recipes.md) has some.

```yaml
extends: ../configs/grpo-8b.yaml
trainer: {steps: 1000, lora: {rank: 64}}
```

**A choice** between several kinds of a thing is a section with the key `type`, which says which other keys there are.
It must be named whenever one of the others is:

```yaml
rollout:
  engine: {type: vllm, max_length: 4096, vllm: {tensor_parallel_size: 2}}
```

To change to another kind on the command line, replace the section: `'rollout.engine={type: vllm}'`.

**Mistakes are found before anything starts.** A key that does not exist, a value of the wrong type and values that
contradict each other are errors that name the key and the nearest that is right. Then everything that the config names
is looked at: data, model, every function, the machine. `penstock run FILE --dry-run` stops after that, and prints the
whole config, defaults included, what was found, and the GPUs that it needs.

**How to read the tables.** *null* is YAML's word for nothing. `{}` as a default is a section with the defaults of its
own keys. *required* means that there is no default. Where data comes from is told at length in [data.md](data.md), and
what functions of your own are given and return in [extending.md](extending.md). Keys that end in `_s` are seconds. The
example is a value to try, not advice. `penstock config KEY` shows a row of these tables in the terminal:

```
penstock config gate.max_lag
```
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    parts.append("## Sections\n")
    parts += [
        textwrap.fill(f"- [`{key.path}`](#{_anchor(key.path)}): {_linked(key.meaning)}", 120, subsequent_indent="  ")
        for key in reference()
    ]
    parts[-1] += "\n"
    printed: dict[tuple[type, ...], str] = {}
    for key in reference():
        parts += _section(key, 2, printed)
    return "\n".join(parts)


def _section(key: Key, depth: int, printed: dict[tuple[type, ...], str]) -> Iterator[str]:
    """Heading, prose and table of ``key``, then those of what stands below it. ``printed`` knows where a union of the
    same kinds of section stands already."""
    yield f"{'#' * depth} {key.path}\n"
    models = tuple(block.model for block in key.blocks)
    if key.chooses and models in printed:
        there = printed[models]
        yield _prose(f"{key.meaning} The choices and their keys are those of [`{there}`](#{_anchor(there)}).")
        return
    printed[models] = key.path
    if not key.chooses:
        (block,) = key.blocks
        yield _prose(key.meaning + _more(key, block))
        yield from _table(block)
    else:
        yield _prose(key.meaning)
        for block in key.blocks:
            yield _prose(f"**`type: {block.choice}`** – {block.meaning}")
            yield from _table(block)
    for block in key.blocks:
        for below in block.keys:
            if below.blocks:
                yield from _section(below, depth + 1, printed)


def _more(key: Key, block: Block) -> str:
    """What the section's own docstring adds: of a list, what an element is; of others, where more is said."""
    if is_list(key.field.annotation):
        return f" {block.meaning}"
    return "".join(f" {pointer}" for pointer in re.findall(r"See docs/[\w-]+\.md\.", block.meaning))


def _table(block: Block) -> Iterator[str]:
    if not block.keys:
        yield "No other keys.\n"
        return
    yield "| key | type | default | example | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    rows = [_row(key) for key in block.keys]
    yield from rows[:-1]
    yield rows[-1] + "\n"


def _row(key: Key) -> str:
    meaning = _linked(key.meaning)
    if key.blocks:
        meaning += f" See [below](#{_anchor(key.path)})."
    example = f"`{key.example}`" if key.example else ""
    default = f"`{key.default}`" if key.default != "required" else "*required*"
    cells = [f"`{key.path}`", key.type, default, example, meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _prose(text: str) -> str:
    wrapped = textwrap.fill(_linked(text), 120, break_long_words=False, break_on_hyphens=False)
    return wrapped + "\n"


def _linked(text: str) -> str:
    """``text`` with Markdown's backticks, and with links to the pages that it names."""
    text = text.replace("``", "`")
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text)


def _anchor(path: str) -> str:
    """What GitHub makes of the heading ``path``."""
    return path.replace(".", "").lower()
