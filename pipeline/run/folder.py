"""A run's folder: made for a new run, taken up by one that goes on."""

from __future__ import annotations

import secrets
import tempfile
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

from penstock.pipeline.config import Config, ConfigError, PretrainedModel, dump, hide_password, load
from penstock.pipeline.config.origin import Origin
from penstock.pipeline.config.origin import read as read_origin
from penstock.pipeline.config.origin import write as write_origin
from penstock.pipeline.run import crashes
from penstock.pipeline.run.lock import is_at_work
from penstock.pipeline.run.resume import changes, check_fixed, complete
from penstock.protocols.run_lock import LOCK, is_of_before
from penstock.services.runtime import device_turn
from penstock.services.runtime.files import write_whole


def new_folder(config: Config, config_path: Path) -> Path:
    """Where a new run will lie. Raises `ConfigError` where something is there already."""
    if not config.run.name:
        return _free(Path(config.run.folder) / f"{config_path.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    folder = Path(config.run.folder) / config.run.name
    # Where a start before was told that it cannot work there may be what its programs said.
    if folder.exists() and any(entry.name not in ("logs", LOCK) for entry in folder.iterdir()):
        goes_on = (folder / "config.yaml").is_file() and config.trainer.counted_steps > 0  # else it evaluates alone
        on = f"go on with it: penstock run --resume {folder}; or " if goes_on else ""
        raise ConfigError(f"run.name: {folder} exists and is not empty; {on}choose another name")
    return folder


def claim(folder: Path, given: bool) -> Path:
    """Makes the ``folder`` of a new run. Where its name is not ``given``, other starts of the same second have the same
    one: who is later has a number behind it. Raises `ConfigError` where it cannot be made."""
    make_folder(folder.parent, "run.folder")
    mine = folder
    while not given:
        try:
            mine.mkdir()
            break
        except FileExistsError:
            mine = _free(folder)
    make_folder(mine, "run.folder")
    return mine


def _free(folder: Path) -> Path:
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return folder if not folder.exists() else next(other for other in numbered if not other.exists())


def named(folder: Path) -> Path:
    """``folder`` as it was typed, whose last part is its run's name; ``.`` and ``..`` name none, and become the whole
    path."""
    return folder.resolve() if folder.name in ("", "..") else folder


def make_folder(folder: Path, key: str) -> None:
    """Raises `ConfigError`, which names ``key``, where ``folder`` cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: cannot write to {folder}: {error.strerror}; choose another folder") from None


def began_in(folder: Path) -> Config | None:
    """The config of the run in ``folder``; None where none has begun there."""
    recorded = folder / "config.yaml"
    return load(recorded) if recorded.is_file() else None


def open_folder(config: Config, folder: Path, origin: Origin) -> list[str]:
    """Makes ``folder`` ready for actors that are started one by one, for the first time or again; returns what is
    changed since then, a line for each key. Raises `ConfigError` where its run is complete, or began with another model
    or data."""
    make_folder(folder, "--folder")
    began = began_in(folder)
    if began:
        check_fixed(began, config)
    if began and began != config and is_at_work(folder):
        raise ConfigError(
            f"the run in {folder} is going on, and its config cannot change meanwhile: stop it, or give the same config"
        )
    before = complete(folder, config)
    if began and before:
        reward = before["reward_last"]
        raise ConfigError(
            f"the run in {folder} is complete: {before['steps']} steps"
            f"{'' if reward is None else f', reward {reward:.3f}'}, see "
            f"{folder / 'summary.json'}; raise trainer.steps to go on, or choose another folder for another run"
        )
    copied = begin(config, folder, origin)
    return [*(changes(began, config) if began else []), *copied]


def begin(config: Config, folder: Path, origin: Origin) -> list[str]:
    """A run starts in ``folder``, or goes on: its config and its origin are written down, each in one piece (others may
    be reading the one before), and what an earlier start came to is forgotten. Returns a line where the folder is a
    copy. Raises `ConfigError` where a store would take it for the run that it is a copy of."""
    own = folder / "config.yaml"
    copied = _settle(config, folder)
    began = read_origin(folder)
    if began and Path(origin.file) == own.resolve():  # its own copy says nothing of where it is from
        before_auto = origin.before_auto or began.before_auto
        origin = replace(began.with_overrides([*origin.overrides]), before_auto=before_auto)
    write_origin(folder, origin)
    write_whole(own, dump(config))
    run_name(folder)  # now, before the folder can be moved
    for name in ("summary.json", "report.html"):
        (folder / name).unlink(missing_ok=True)
    device_turn.forget_turns(folder)
    crashes.forget(folder)
    return copied


def _settle(config: Config, folder: Path) -> list[str]:
    """Writes down where the run lies. One that was moved is the same run; a copy of one that is there yet is another,
    and gets a mark of its own beside the key that they share, by which the digests of its versions are made."""
    file, own, before = folder / "run.place", folder / "config.yaml", _place(folder)
    copied: list[str] = []
    if _is_copy(folder, before):
        url = hide_password(config.store.url or "")
        if url and url == hide_password(load(own).store.url or ""):
            raise ConfigError(
                f"store.url: {url}: {folder} is a copy of {before}, and this store would take one for the other; give "
                f"another one, or remove run.name and run.key in {folder}"
            )
        write_whole(folder / "run.copy", secrets.token_hex(16))
        copied = [f"a copy of {before}: to trackers it is a run of its own from now on"]
    write_whole(file, str(folder.resolve()))
    return copied


def _place(folder: Path) -> Path:
    """Where the run in ``folder`` lay when it was last started."""
    file = folder / "run.place"
    return Path(file.read_text()) if file.is_file() else folder


def is_of_another(folder: Path) -> bool:
    """What ``folder`` says of a cluster's jobs is said of the folder that it is a copy of, and that is there yet."""
    before = _place(folder)
    return before.is_dir() and not folder.samefile(before)


def _is_copy(folder: Path, before: Path) -> bool:
    """What was written in ``folder`` when it was ``before`` lies there yet, too."""
    mine, other = folder / "run.key", before / "run.key"
    try:
        return mine.read_text() == other.read_text() and not folder.samefile(before)
    except OSError:
        return False


def model_path(config: Config, folder: Path) -> str:
    """Where the model that training starts from lies. Raises `ConfigError` where a tiny model is not made yet."""
    if isinstance(config.model, PretrainedModel):
        return config.model.path
    path = folder / "model"
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model: there is no model in {path}; make it with: penstock prepare CONFIG --folder {folder}"
        )
    return str(path)


def address_file(folder: Path) -> Path:
    """Where the broker of the run in ``folder`` says how it is reached."""
    return folder / "broker.address"


def address_of(folder: Path) -> str | None:
    """How the broker of the run in ``folder`` is reached; None where none has listened since the run began, or goes on
    (as a `penstock run` of this machine does)."""
    file = address_file(folder)
    try:
        return None if is_of_before(folder, file) else file.read_text().strip()
    except OSError:
        return None


def keys_folder(folder: Path) -> Path:
    """Where the CURVE keys of the run in ``folder`` are."""
    return folder / "keys"


def client_file(folder: Path) -> Path | None:
    """The keys by which processes of the run in ``folder`` speak to its broker; None: it has none. Raises
    `ConfigError`."""
    path = keys_folder(folder) / "client.json"
    try:
        found = path.is_file()
    except PermissionError:
        raise ConfigError(
            f"RUN: the keys of the run in {folder} are another user's, and not to be read: come in as that one, or ask "
            f"for a copy of {path} and give it with --keys"
        ) from None
    return path if found else None


def run_key(folder: Path) -> str:
    """The run's own key, made once, kept in its folder: by it the store is known to be this run's."""
    path = folder / "run.key"
    if not path.is_file():
        write_whole(path, secrets.token_hex(16), mode=0o600)
    return path.read_text().strip()


def run_name(folder: Path) -> str:
    """What the run in ``folder`` is called: as that was when it began, whatever it is called now. By it the store knows
    what is this run's."""
    path = folder / "run.name"
    if not path.is_file():
        write_whole(path, folder.resolve().name)
    return path.read_text().strip()
