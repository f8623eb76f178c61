"""What a run was started with, and what it may go on with."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import penstock
from penstock.pipeline.cli import app, main
from penstock.pipeline.config import Config, ConfigError, dump, load
from penstock.pipeline.config.origin import Origin, read, write
from penstock.pipeline.run import lock
from penstock.pipeline.run.data_rows import changed_rows
from penstock.pipeline.run.folder import begin, claim, named, new_folder, run_key, run_name
from penstock.pipeline.run.lock import held, is_live
from penstock.pipeline.run.resume import changes, check_fixed, complete, how_to_go_on, resumed
from penstock.pipeline.run.start import start
from penstock.protocols.agent_line import Search
from penstock.protocols.run_lock import holder, machine, read_summary
from penstock.services.broker.tracker_libraries import run_id
from penstock.services.runtime.user_folders import FIRST, VARIABLE, find_file

FILE = """
model: {type: tiny}
prompts: {train: {type: sort}}
reward: {functions: [{function: exact_match}]}
trainer: {steps: 50}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder, as the start with one override left it."""
    (tmp_path / "run.yaml").write_text(FILE)
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    given = ["gate.max_lag=3"]
    (run / "config.yaml").write_text(dump(load(tmp_path / "run.yaml", given)))
    write(run, Origin(str(tmp_path / "run.yaml"), tuple(given)))
    return run


def test_data_that_have_grown_meanwhile_are_told_of_once(folder: Path) -> None:
    assert not changed_rows(folder, {"prompts.train": 40, "prompts.eval.held_out": 9})
    assert not changed_rows(folder, {"prompts.train": 40, "prompts.eval.held_out": 8})
    (note,) = changed_rows(folder, {"prompts.train": 41})
    assert note.startswith("prompts.train: 41 rows, and 40 when the run was last started")
    assert not changed_rows(folder, {"prompts.train": 41})


def test_alone_it_goes_on_as_it_was(folder: Path) -> None:
    config, origin, changed = resumed(folder, None, [])
    assert config.gate.max_lag == 3 and not changed and origin.overrides == ("gate.max_lag=3",)


def test_every_change_is_a_line_and_is_kept(folder: Path) -> None:
    config, origin, changed = resumed(folder, None, ["gate.max_lag=1", "trainer.optimizer.lr=1.0e-4"])
    assert config.gate.max_lag == 1
    assert changed == ["changed: gate.max_lag: 3 → 1", "changed: trainer.optimizer.lr: 1e-06 → 0.0001"]
    write(folder, origin)
    kept = read(folder)
    assert kept and kept.overrides == ("gate.max_lag=1", "trainer.optimizer.lr=1.0e-4")
    assert resumed(folder, None, ["run.name=other"])[2] == [f"kept: run.name: a run goes on where it lies, in {folder}"]


def test_a_file_that_is_given_again_is_read_anew_under_the_old_overrides(folder: Path) -> None:
    file = folder.parents[1] / "run.yaml"
    file.write_text(FILE.replace("50", "80"))
    config, _, changed = resumed(folder, file, [])
    assert config.trainer.steps == 80 and config.gate.max_lag == 3
    holds = "kept: gate.max_lag: 1 → 3 (given at an earlier start, which holds; run.yaml says otherwise)"
    assert changed == ["changed: trainer.steps: 50 → 80", holds]


def test_a_file_that_was_edited_and_is_not_given_again_is_told_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder.parents[1] / "run.yaml"
    monkeypatch.chdir(file.parent)
    file.write_text(FILE.replace("50", "80"))
    config, _, (told,) = resumed(folder, None, [])
    assert config.trainer.steps == 50
    assert told == (
        "not taken: trainer.steps: 50 → 80 as run.yaml has it by now; to take it: penstock run run.yaml --resume "
        f"{folder}"
    )
    file.write_text(FILE.replace("trainer: {steps: 50}\n", ""))  # what it does not say is as the run began
    assert resumed(folder, None, [])[2] == []
    rows = "{type: hub, path: json, files: [gone.jsonl]}, epochs: 3"
    file.write_text(FILE.replace("{type: sort}", rows).replace("steps: 50", "steps: null"))
    (told,) = resumed(folder, None, [])[2]  # and nothing is read for it
    assert told.startswith("not taken: prompts.")
    file.unlink()
    assert resumed(folder, None, ["trainer.steps=90"])[2] == ["changed: trainer.steps: 50 → 90"]


def test_a_section_that_one_side_has_is_a_line(folder: Path) -> None:
    config = load(folder / "config.yaml")
    more = load(folder / "config.yaml", ["prompts.eval={type: hub, path: json, files: [held_out.jsonl]}"])
    assert changes(config, more) == ["prompts.eval: none → held_out"]
    assert changes(more, config) == ["prompts.eval: held_out → none"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.optimizer.type=muon", r'trainer\.optimizer\.type: "muon", but the run began with "adamw"'),
        ("run.seed=7", r"run\.seed: 7, but the run began with 0"),
        ("prompts.train.size=10", r"prompts\.train\.size: 10, but the run began with 100000"),
        ("model.hidden_size=64", r"model\.hidden_size: 64, but the run began with 128"),
        ("critic.lora.rank=4", r"critic\.lora: .*but the run began with null"),
        ("rollout.sampling.n=2", r"rollout\.sampling\.n: 2, but the run began with"),
    ],
)
def test_what_may_not_change_is_refused_by_its_own_key(folder: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resumed(folder, None, [override])


def test_what_the_config_names_is_found_from_any_folder(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    (project / "model").mkdir(parents=True)
    write(folder, Origin(str(tmp_path / "run.yaml"), (), str(project)))
    monkeypatch.setenv("PENSTOCK_FOLDERS", "")
    monkeypatch.chdir(tmp_path)
    config = load(folder / "config.yaml", ["model={type: pretrained, path: model}"])
    assert config.model.path == str(project / "model")  # type: ignore[union-attr]


def test_another_kind_of_model_is_named_by_its_kind(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r'model\.type: "pretrained", but the run began with "tiny"'):
        resumed(folder, None, ["model={type: pretrained, path: x/y}"])


def test_evaluation_sets_are_named_where_they_are_given_up(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump(load(Path("configs/quickstart.yaml"))))
    with pytest.raises(ConfigError, match=r"^prompts\.eval: none, but the run began with held_out; a resumed run"):
        resumed(tmp_path, None, ["prompts.eval=null"])


def test_nothing_left_to_do_is_said(folder: Path) -> None:
    (folder / "ledger.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(14)))
    with pytest.raises(ConfigError, match=r"trainer\.steps: 10, but 14 steps are done already"):
        resumed(folder, None, ["trainer.steps=10"])
    (folder / "summary.json").write_text('{"outcome": "complete", "steps": 50}')
    for steps, over in ((10, True), (50, True), (60, False)):
        assert bool(complete(folder, resumed(folder, None, [f"trainer.steps={steps}"])[0])) is over


@pytest.mark.parametrize("text", ["", '{"outcome": "comp', "\0" * 16])
def test_a_summary_that_was_cut_short_is_written_again(folder: Path, text: str) -> None:
    (folder / "summary.json").write_text(text)
    config, _, _ = resumed(folder, None, [])
    assert complete(folder, config) is None and read_summary(folder) is None
    assert Search(folder, None).look() is None, "agents wait for a gateway"


def test_only_one_at_a_time_runs_in_a_folder(folder: Path) -> None:
    with held(folder), pytest.raises(ConfigError, match="is going on already"), held(folder):
        pass
    with held(folder):
        pass


def test_who_finds_a_run_at_work_leaves_with_a_code_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", "run", "--resume", str(folder)])
    with held(folder), pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 75, "a cluster's job whose code is another cancels those that have joined"


def test_also_where_the_file_system_knows_no_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with held(folder), pytest.raises(ConfigError, match="is going on already"), held(folder):
        pass
    (folder / "actors.jsonl").write_text("a line\n")  # of a broker on another machine
    with pytest.raises(ConfigError, match="is going on already"), held(folder):
        pass
    os.utime(folder / "actors.jsonl", (0, 0))
    with held(folder):
        pass


def test_a_run_that_goes_on_has_its_folder_before_it_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(config: Config, looked: Path, *_: object) -> None:
        raise ConfigError(f"held by {holder(looked)}")

    monkeypatch.setattr("penstock.pipeline.run.start.look", look)
    with pytest.raises(ConfigError, match=f"held by {os.getpid()}"):
        start(Console(), "trainer.steps=90", [], folder, False)
    with pytest.raises(ConfigError, match="held by None"):
        start(Console(), str(folder / "config.yaml"), [f"run.folder={folder.parent}", "run.name=new"], None, False)
    assert not (folder.parent / "new").exists(), "nothing is made for a run that cannot work"


def test_the_runs_own_file_keeps_where_it_came_from(folder: Path) -> None:
    own = folder / "config.yaml"
    config, origin, _ = resumed(folder, own, ["gate.max_lag=1"])
    begin(config, folder, origin)
    kept = read(folder)
    assert kept and kept.file == str(folder.parents[1] / "run.yaml") and "gate.max_lag=1" in kept.overrides


def test_a_folder_that_is_no_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--resume: .* is not a run's folder: it has no config\.yaml"):
        resumed(tmp_path, None, [])


def test_what_a_look_refuses_today_may_be_in_a_folder_of_older_code(folder: Path) -> None:
    """It can be read, and changed on the way."""
    written = ["trainer.algorithm.preset=dapo", "trainer.algorithm.aggregation=token-sum"]
    config = load(folder / "config.yaml", [*written, "trainer.offload_activations=true"])
    (folder / "config.yaml").write_text(dump(config))
    assert resumed(folder, None, [])[0] == config
    mended, _, changed = resumed(
        folder, None, ["trainer.algorithm.aggregation=token-mean", "trainer.gradient_checkpointing=true"]
    )
    assert mended.trainer.algorithm.aggregated == "token-mean" and len(changed) == 2


def test_with_an_evaluation_nobody_is_told_to_go_on(folder: Path) -> None:
    config = load(folder / "config.yaml", ["trainer.steps=0", f"run.folder={folder.parent}", f"run.name={folder.name}"])
    (folder / "summary.json").write_text(json.dumps({"outcome": "complete", "steps": 0}))
    summary = complete(folder, config)
    assert summary and "was to evaluate, and to train nothing" in how_to_go_on(config, summary).replace(
        "this one", "it"
    )
    with pytest.raises(ConfigError, match="is not empty; choose another name"):
        new_folder(config, folder / "config.yaml")
    with pytest.raises(ConfigError, match="go on with it: penstock run --resume"):
        new_folder(load(folder / "config.yaml", [f"run.folder={folder.parent}", f"run.name={folder.name}"]), folder)


def test_a_run_whose_prompts_have_ended_goes_on_with_more_of_them(folder: Path) -> None:
    """More steps alone would change nothing."""
    config = load(folder / "config.yaml", ["trainer.steps=100", "prompts.epochs=1", "prompts.eval_every=5"])
    (folder / "config.yaml").write_text(dump(config))
    (folder / "summary.json").write_text(json.dumps({"outcome": "complete", "steps": 40}))
    summary = complete(folder, config)
    assert summary and how_to_go_on(config, summary) == "draw the prompts more often, e.g. prompts.epochs=2"
    assert complete(folder, load(folder / "config.yaml", ["trainer.steps=90"]))
    more, _, changed = resumed(folder, None, ["prompts.epochs=2", "prompts.eval_every=10"])
    assert complete(folder, more) is None and len([line for line in changed if line.startswith("changed: ")]) == 2
    with pytest.raises(ConfigError, match=r"prompts\.shuffle: .* a resumed run cannot change that"):
        resumed(folder, None, ["prompts.shuffle=false"])


def test_the_password_of_a_store_is_asked_for_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = load(folder / "config.yaml", ["store.url=redis://me:secret@host:1/0"])
    (folder / "config.yaml").write_text(dump(stored))
    assert "secret" not in (folder / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"store\.url: .*give it again"):
        resumed(folder, None, [])
    config, _, changed = resumed(folder, None, ["store.url=redis://me:other@host:1/0"])
    assert config.store.url == "redis://me:other@host:1/0" and not changed
    monkeypatch.setenv("PENSTOCK_STORE", "redis://me:other@elsewhere:1/0")
    with pytest.raises(ConfigError, match=r"give it again, .* \(PENSTOCK_STORE is redis://me:\*\*\*@elsewhere:1/0\)"):
        resumed(folder, None, [])
    monkeypatch.setenv("PENSTOCK_STORE", "redis://me:another@host:1/0")  # as a cluster hands it on
    config, _, changed = resumed(folder, None, [])
    assert config.store.url == "redis://me:another@host:1/0" and not changed
    assert "another" not in dump(config)
    check_fixed(stored, config)


@pytest.mark.parametrize(
    "override",
    ["store.url=redis://me:secret@host:1/0", "store={url: 'redis://:secret@host:1/0', retry_s: 5}"],
)
def test_no_password_is_written_down_and_none_is_made_up(folder: Path, override: str) -> None:
    write(folder, Origin(str(folder.parents[1] / "run.yaml"), (override,)))
    assert "secret" not in (folder / "origin.json").read_text()
    with pytest.raises(ConfigError, match=r"store\.url: .*give it again"):
        resumed(folder, folder.parents[1] / "run.yaml", [])


def test_starts_of_one_second_have_a_folder_each(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(FILE)
    config = load(tmp_path / "run.yaml", [f"run.folder={tmp_path / 'runs'}"])
    chosen = [new_folder(config, tmp_path / "run.yaml")] * 8
    with ThreadPoolExecutor(8) as starts:
        made = list(starts.map(lambda folder: claim(folder, False), chosen))
    assert sorted(path.name for path in made) == [chosen[0].name, *(f"{chosen[0].name}-{n}" for n in range(2, 9))]
    assert claim(made[0], True) == made[0], "a name that was given stays"


def test_its_name_stays_whatever_its_folder_is_called(folder: Path) -> None:
    config, origin, _ = resumed(folder, None, [])
    begin(config, folder, origin)
    moved = folder.rename(folder.with_name("second"))
    latest = folder.with_name("latest")
    latest.symlink_to(moved)
    assert run_name(moved) == run_name(latest) == "first"
    own = run_id(moved)
    assert own.startswith("first-") and run_id(latest) == own, "trackers go on with their curves"
    (moved / "run.name").unlink()  # of a run that began before there was one
    assert run_name(latest) == "second"


def test_a_copy_is_another_run_to_trackers_and_refused_by_a_store_that_both_reach(folder: Path) -> None:
    config, origin, _ = resumed(folder, None, [])
    run_key(folder)
    assert begin(config, folder, origin) == [] and begin(config, folder, origin) == []
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    (line,) = begin(config, copy, origin)
    assert str(folder) in line and run_key(copy) == run_key(folder), "by which versions have their digests"
    assert run_id(copy) != run_id(folder)
    own = run_id(copy)
    assert begin(config, copy, origin) == [] and run_id(copy) == own
    stored = load(folder.parents[1] / "run.yaml", ["store.url=redis://host:1/0"])
    begin(stored, folder, origin)
    shutil.copytree(folder, folder.with_name("other"))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"store\.url: .*remove run\.name and run\.key"):
            begin(stored, folder.with_name("other"), origin)
    elsewhere = load(folder.parents[1] / "run.yaml", ["store.url=redis://host:1/1"])
    assert begin(elsewhere, folder.with_name("other"), origin)


@pytest.mark.parametrize("preset", ["dapo", "dr_grpo", "gspo", "rloo", "gpg"])
def test_another_preset_is_that_method_and_none_undoes_it(folder: Path, preset: str) -> None:
    asked = [f"trainer.algorithm.preset={preset}", "trainer.algorithm.length_scale=12"]
    fresh = load(folder.parents[1] / "run.yaml", asked)
    config, origin, changed = resumed(folder, None, asked)
    assert config.trainer.algorithm == fresh.trainer.algorithm and len(changed) > 2
    assert load(folder / "config.yaml", asked).trainer == config.trainer, "also for a run of its own"
    begin(config, folder, origin)
    plain, _, _ = resumed(folder, None, ["trainer.algorithm.preset=null", "trainer.algorithm.length_scale=null"])
    assert plain.trainer.algorithm == load(folder.parents[1] / "run.yaml").trainer.algorithm


def test_a_preset_with_a_choice_of_ones_own_keeps_it(folder: Path) -> None:
    tuned, origin, _ = resumed(folder, None, ["trainer.algorithm.loss.clip_high=0.3", "trainer.algorithm.preset=dapo"])
    assert tuned.trainer.algorithm.loss.clip_high == 0.3  # type: ignore[union-attr]
    assert tuned.trainer.algorithm.aggregation == "token-mean"
    begin(tuned, folder, origin)
    again, _, changed = resumed(folder, folder / "config.yaml", ["trainer.algorithm.preset=dapo"])
    assert again == tuned and not changed


def test_a_value_longer_than_a_files_name_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--resume: .* is not a run's folder"):
        start(Console(), f"rollout.sampling.stop=[{'x' * 300}]", [], tmp_path, True)


def test_a_model_and_an_adapter_may_be_elsewhere_once_their_folders_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    for name in ("model", "adapter", "other"):
        (project / name).mkdir(parents=True)
    (project / "run.yaml").write_text(FILE.replace("{type: tiny}", "{type: pretrained, path: model}"))
    monkeypatch.setenv(FIRST, "")
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.chdir(project)
    config = load(Path("run.yaml"), ["trainer.lora={start: adapter}", "critic.lora={start: adapter}"])
    assert config.trainer.lora and config.trainer.lora.start == str(project / "adapter"), "wherever it goes on"
    run = project / "runs" / "first"
    run.mkdir(parents=True)
    begin(config, run, Origin(str(project / "run.yaml")))
    for other in ("model.path=other", "trainer.lora.start=other", "critic.lora.start=other"):
        with pytest.raises(ConfigError, match="but the run began with"):
            resumed(run, None, [other])
    moved = project.rename(tmp_path / "moved")
    monkeypatch.chdir(moved)
    keys = {"model.path": "model", "trainer.lora.start": "adapter", "critic.lora.start": "adapter"}
    config, _, changed = resumed(moved / "runs" / "first", None, [f"{key}={value}" for key, value in keys.items()])
    assert config.model.path == str(moved / "model")  # type: ignore[union-attr]
    assert {line.split(": ")[1] for line in changed} == keys.keys()


def test_a_run_that_is_resumed_from_elsewhere_has_the_data_that_it_began_with(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a file of the same name lies there."""
    began, elsewhere = tmp_path / "began", tmp_path / "elsewhere"
    for place in (began, elsewhere):
        place.mkdir()
        (place / "rows.jsonl").write_text(f'{{"prompt": "{place.name}", "answer": "a"}}\n')
    write(folder, Origin(str(tmp_path / "run.yaml"), (), str(began)))
    monkeypatch.setenv(FIRST, "")
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.chdir(elsewhere)
    load(folder / "config.yaml")
    assert find_file("rows.jsonl") == began / "rows.jsonl"
    load(tmp_path / "run.yaml")  # a run of its own
    assert find_file("rows.jsonl") == elsewhere / "rows.jsonl"


def test_the_folder_where_one_stands_has_its_runs_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    monkeypatch.setattr("penstock.pipeline.run.start.start", lambda *given, **_: seen.append(given[3]) or 0)
    monkeypatch.chdir(folder)
    assert CliRunner().invoke(app, ["run", "--resume", "."]).exit_code == 0
    assert seen == [folder] and penstock.Run(".").folder == folder
    (folder / "logs").mkdir()
    monkeypatch.chdir(folder / "logs")
    assert named(Path("..")) == folder and named(Path("../../first")) == Path("../../first")
    (folder.parent / "link").symlink_to(folder)
    assert named(folder.parent / "link").name == "link", "what a run is called is for its user to say"


def test_whether_a_run_is_live_is_told_by_the_disks_own_clock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_live(folder)
    beats = folder / "actors.jsonl"
    beats.write_text("a line\n")
    with monkeypatch.context() as patched:
        ahead = time.time() + 60.0
        patched.setattr(lock.time, "time", lambda: ahead)
        assert is_live(folder), "this machine's clock is ahead of the file server's"
    written = beats.stat().st_mtime
    os.utime(beats, (written, written - 60.0))
    assert not is_live(folder)
    monkeypatch.setattr(lock, "LOOK_S", 1.0)
    os.utime(beats, (written, written + 3600.0))
    assert not is_live(folder), "nobody is at work, and a clock was set back"
    writing = threading.Timer(0.1, lambda: beats.write_text("a line\nand one more\n"))
    os.utime(beats, (written, written + 3600.0))
    writing.start()
    assert is_live(folder)


def test_a_run_at_work_on_another_machine_is_kept_where_locks_are_each_machines_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "run.lock").write_text("1 1790000000.25 another-machine")
    with held(folder):
        assert (folder / "run.lock").read_text().endswith(machine()) and holder(folder) == os.getpid()
    beats = folder / "actors.jsonl"
    (folder / "run.lock").write_text("1 1790000000.25 another-machine")
    done = threading.Event()

    def work() -> None:
        while not done.wait(0.1):
            with beats.open("a") as file:
                file.write("a line\n")

    beats.write_text("")
    working = threading.Thread(target=work)
    working.start()
    try:
        with pytest.raises(ConfigError, match="is going on already"), held(folder):
            pass
    finally:
        done.set()
        working.join()


def test_a_lock_whose_machine_may_be_gone_is_told_how_to_remove(folder: Path) -> None:
    with (folder / "run.lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("1 1790000000.25 another-machine")
        file.flush()
        with (
            pytest.raises(ConfigError, match=r"no broker of the run is at work: .*, run: rm .*/run\.lock"),
            held(folder),
        ):
            pass


@pytest.mark.parametrize("named", ["rows.jsonl", "row*.jsonl"])
def test_data_may_be_elsewhere_once_its_files_are_gone(tmp_path: Path, named: str) -> None:
    rows, run = tmp_path / "rows.jsonl", tmp_path / "runs" / "first"
    rows.write_text('{"prompt": "a", "truth": "b"}\n')
    data = f"{{type: hub, path: json, files: [{tmp_path / named}], truth_key: truth}}"
    (tmp_path / "run.yaml").write_text(FILE.replace("{type: sort}", f"{data}, eval: {{mine: {data}}}"))
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump(load(tmp_path / "run.yaml")))
    moved = tmp_path / "other.jsonl"
    given = [f"prompts.train.files=[{moved}]", f"prompts.eval.mine.files=[{moved}]"]
    moved.write_bytes(rows.read_bytes())
    with pytest.raises(ConfigError, match=r"prompts.eval.mine.files.0: .*a resumed run cannot change that"):
        resumed(run, None, given)
    rows.unlink()
    config, _, changed = resumed(run, None, given)
    assert len(changed) == 2 and list(config.prompts.train.files) == [str(moved)]  # type: ignore[union-attr]


def test_a_folder_that_is_prepared_from_its_own_config_keeps_where_that_is_from(tmp_path: Path) -> None:
    """As a run of a tiny model does with its folder, before it begins."""
    folder, file = tmp_path / "run", tmp_path / "mine.yaml"
    folder.mkdir()
    config = load(Path("configs/quickstart.yaml"), ["trainer.steps=60"])
    begin(config, folder, Origin(str(file), ("trainer.steps=60", "gate.max_lag=1"), "/elsewhere", ("rollout.count=2",)))
    begin(config, folder, Origin(str((folder / "config.yaml").resolve()), ("gate.max_lag=3",)))
    assert read(folder) == Origin(str(file), ("trainer.steps=60", "gate.max_lag=3"), "/elsewhere", ("rollout.count=2",))
