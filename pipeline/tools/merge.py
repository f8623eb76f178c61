"""`penstock merge`: a checkpoint as a model for others: whole, with its adapter merged into it, in any precision."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.pipeline.config import ConfigError
from penstock.protocols.versions import Dtype
from penstock.services.modeling.adapter_files import CONFIG, AdapterShape, read_shape
from penstock.services.modeling.families import TURNED
from penstock.services.runtime import own_code
from penstock.services.runtime.checkpoint_folders import latest
from penstock.services.runtime.files import let_read
from penstock.services.runtime.install import install


def adapter_of(checkpoint: Path) -> AdapterShape | None:
    """The adapter that ``checkpoint`` is, with a base that is there; None where it is none. Raises `SetupError`."""
    if not (checkpoint / CONFIG).is_file():
        return None
    found = read_shape(checkpoint, "CHECKPOINT")
    if not found.base:
        raise ConfigError(f"CHECKPOINT: {checkpoint / CONFIG} does not say what model it is for")
    run, of_critic = checkpoint.resolve().parent.parent, found.valued or in_critics_folder(checkpoint)
    run = run.parent if of_critic else run
    beside = run / "model"  # of a tiny model, whose run's folder may have been moved
    elsewhere = of_critic and Path(found.base).is_dir()  # a critic may have begun as another run's model
    if Path(found.base).name == "model" and (beside / "config.json").is_file() and not elsewhere:
        return replace(found, base=str(beside))  # where it was may be another run's by now
    if not Path(found.base).is_absolute() or Path(found.base).is_dir():
        return found
    if not (beside / "config.json").is_file():
        raise ConfigError(
            f"CHECKPOINT: the model that it is for is not in {found.base} any more; say where it is now as "
            f"base_model_name_or_path in {checkpoint / CONFIG}"
        )
    return replace(found, base=str(beside))


def refuse_run(path: Path) -> None:
    """Raises `ConfigError` where ``path`` is a run's folder in the place of one of its checkpoints."""
    if (path / "checkpoints").is_dir() and not (path / "config.json").is_file():
        newest = latest(path / "checkpoints")
        there = f"its newest checkpoint is {newest}" if newest else "there is no checkpoint in it yet"
        raise ConfigError(f"CHECKPOINT: {path} is the folder of a run; {there}")


def merge(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The folder to make.", show_default=False)],
    dtype: Annotated[Dtype, typer.Option(help="Of the weights that are written, e.g. bfloat16.")] = "float32",
    trust_remote_code: Annotated[bool, typer.Option(help="Run the code that came with the model.")] = False,
) -> None:
    """Write CHECKPOINT as a model for others, in transformers' layout, to OUT: with its adapter merged into it, where
    it is one (trainer.lora, critic.lora), and in any precision, without what the trainer goes on from. What lay in 4
    bits as it was trained (trainer.lora.quantize) is as it then was. A critic of values is written with its head.

    For instance: penstock merge runs/first-try/checkpoints/step-000150 merged --dtype bfloat16
    """
    if not checkpoint.is_dir():
        raise ConfigError(f"CHECKPOINT: no such folder: {checkpoint}")
    refuse_run(checkpoint)
    about = adapter_of(checkpoint)
    if about is None and not (checkpoint / "config.json").is_file():
        raise ConfigError(f"CHECKPOINT: {checkpoint} is no checkpoint: it has neither config.json nor {CONFIG}")
    own_code.trust(trust_remote_code)
    if out.exists():
        raise ConfigError(f"OUT: {out} exists; choose another folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"OUT: cannot write to {out.parent}: {error.strerror}") from None
    try:
        _write_merged(checkpoint, about, making, dtype)
        making.chmod(0o755)
        making.rename(out)
    except OSError as error:
        raise ConfigError(f"OUT: cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
    typer.echo(f"written: {out}")


def _write_merged(checkpoint: Path, about: AdapterShape | None, out: Path, dtype: Dtype) -> None:
    import torch
    from transformers import GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    from penstock.services.modeling.dtypes import DTYPES
    from penstock.services.modeling.files_beside import name_own_code, read_beside, write_beside
    from penstock.services.modeling.generation_config import write_generation_config
    from penstock.services.modeling.load import Head, folder_of, has_own_code, load_model, load_tokenizer

    disable_progress_bar()
    path = about.base if about else str(checkpoint)
    valued = about.valued if about else is_critic(checkpoint)
    head: Head = "value" if valued else "language"
    merged: Any = load_model(path, "float32" if about else dtype, torch.device("cpu"), "CHECKPOINT", head)
    if about:
        from peft import PeftModel

        if about.quantize:  # the adapter has learned beside what these matrices were then
            round_as_trained(merged, checkpoint, about)
        merged = PeftModel.from_pretrained(merged, str(checkpoint)).merge_and_unload()
    told = None  # a critic generates nothing
    if not valued:
        told, merged.generation_config = merged.generation_config, GenerationConfig()
    beside = read_beside(folder_of(path, "CHECKPOINT"), has_own_code(merged.config))
    name_own_code(merged.config, beside)
    for parameter in merged.parameters():  # and no buffer: rounded, a router's biases choose other experts
        parameter.data = parameter.data.to(DTYPES[dtype])
    merged.save_pretrained(out)
    if merged.config.model_type in TURNED:
        _write_as_in_files(out, merged.config.model_type)
    let_read(out)
    write_beside(beside, out)
    tokenizer = load_tokenizer(str(checkpoint), key="CHECKPOINT")
    if told is not None:
        write_generation_config(told, tokenizer, out)
    tokenizer.save_pretrained(out)


def _write_as_in_files(out: Path, model_type: str) -> None:
    """As the hub has this family's experts; transformers reads them either way, and vLLM so alone."""
    from safetensors.torch import load_file, save_file

    from penstock.services.modeling.experts import as_in_files

    for path in out.glob("*.safetensors"):
        turned = as_in_files(model_type, load_file(path))
        save_file({name: weight.contiguous() for name, weight in turned}, path, {"format": "pt"})


def in_critics_folder(checkpoint: Path) -> bool:
    """It lies where a run has its critic's: NAME/critic/checkpoints/step-…"""
    owner = checkpoint.resolve().parent.parent
    return owner.name == "critic" and not (owner / "config.yaml").is_file()


def is_critic(checkpoint: Path) -> bool:
    """It is a whole critic, with a head of values."""
    try:
        told = json.loads((checkpoint / "config.json").read_text()).get("architectures") or [""]
    except OSError:  # of a hub name
        return False
    return str(told[0]).endswith("ForTokenClassification")


def round_as_trained(base: Any, checkpoint: Path, about: AdapterShape) -> None:
    """The matrices of ``base``, a model of transformers in float32, that lay in 4 bits while the adapter ``about`` in
    ``checkpoint`` was trained, are as they then were. Raises `ConfigError`."""
    import torch
    from safetensors import safe_open

    from penstock.services.modeling.adapter_files import FILE
    from penstock.services.modeling.dtypes import DTYPES
    from penstock.services.modeling.lora import PREFIX

    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"CHECKPOINT: its model was in 4 bits, and bitsandbytes is not installed: {install('qlora')}")
    from penstock.services.modeling.four_bit import rounded

    end = ".lora_A.weight"
    with safe_open(checkpoint / FILE, framework="pt") as file, torch.no_grad():
        for name in sorted(file.keys()):
            if name.endswith(end):
                weight = base.get_submodule(name.removeprefix(PREFIX).removesuffix(end)).weight
                weight.copy_(rounded(weight.to(DTYPES[about.dtype])))
