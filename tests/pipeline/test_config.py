"""Configs: every shipped one is valid, every mistake is named with its key and a way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from penstock.pipeline.cli import app
from penstock.pipeline.config import ConfigError, dump, hide_password, load, parse
from penstock.pipeline.config.foreign_names import HERE
from penstock.pipeline.config.key_reference import find
from penstock.pipeline.config.load import read_sections
from penstock.pipeline.tools.export import FIXED, TOKENS
from penstock.protocols.columns import FIELDS, METRICS
from penstock.services.broker.config import VarianceFilter

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.parent.name == "recipes"], ids=lambda p: p.stem)
def test_a_recipe_has_nothing_of_another_datas_columns(path: Path) -> None:
    prompts = load(path).prompts
    base = load(path.parent.parent / "grpo-8b.yaml").prompts.train
    for data in (prompts.train, *prompts.eval.values()):
        assert data.path == base.path or data.name != base.name, "a part of the other set"
        assert data.path == base.path or data.prompt_key != base.prompt_key or data.truth_key != base.truth_key


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_real_config_tells_how_good_what_it_saves_is(path: Path) -> None:
    config = load(path)
    if config.model.type == "pretrained":
        assert config.prompts.eval_every == config.trainer.checkpoint.every < config.trainer.counted_steps
    assert config.trainer.checkpoint.keep_best or not config.prompts.best_by


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_what_a_real_config_needs_is_said_in_it(path: Path) -> None:
    config = load(path)
    if config.model.type != "pretrained":
        return
    (extras,) = re.findall(r"^# Needs: pip install -e '\.\[(.+)\]'", path.read_text(), re.MULTILINE)
    functions = {function.function for function in config.reward.functions}
    needed = {
        "vllm": config.rollout.engine.type == "vllm",
        "math": "math_verify" in functions,
        "http": "judge" in functions or path.stem == "search",
        "lora": bool(config.trainer.lora) and not config.trainer.lora.quantize,
        "qlora": bool(config.trainer.lora and config.trainer.lora.quantize),
    }
    assert set(extras.split(",")) == {"train", "data", "redis-server"} | {
        name for name, is_so in needed.items() if is_so
    }


OPTIONS = "reward.functions=[{{function: 'mine:good', options: {}}}]"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_survive_a_round_trip(path: Path) -> None:
    config = load(path)
    assert parse(yaml.safe_load(dump(config))) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("gate.max_lagg=1", "gate.max_lagg: unknown key; did you mean 'max_lag'?"),
        ("max_lag=2", "max_lag: unknown key; did you mean gate.max_lag?"),
        ("trainer.lr=1e-4", "trainer.lr: unknown key; did you mean trainer.optimizer.lr or "),
        ("trainer.total_epochs=1", "trainer.total_epochs: unknown key; here it is prompts.epochs, with trainer.steps="),
        ("num_generations=8", "num_generations: unknown key; here it is rollout.sampling.n (docs/moving.md)"),
        ("reward.custom_reward_function={path: a.py}", "here it is reward.functions (docs/moving.md)"),
        ("trainer.v1={trainer_mode: sync}", "trainer.v1: unknown key; here it is gate.max_lag, trainer.mini_batches"),
        ("trainer.algorithm.clip_ratio=0.3", "are 0.2 unless they are set, and go before it (docs/moving.md)"),
        (
            "data.train_batch_size=8",
            "a section of verl's: train_batch_size is gate.groups_per_step here",
        ),
        ("actor_rollout_ref.rollout.n=8", "a section of verl's: docs/moving.md says what each of its keys is here"),
        ("model.path=x", "model.path: unknown key; it belongs to model.type=pretrained"),
        ("reward.functions=[mine:slow]", "functions.0: 'mine:slow' is no section; give {function: \"mine:slow\"}"),
        ("trainer.algorithm.loss=gspo", "trainer.algorithm.loss: 'gspo' is no section; give {type: gspo}"),
        ("trainer.algorithm.advantage=grpoo", "'grpoo' is no section; give {type: grpo}"),
        ("trainer.algorithm.loss.type=ppo", "did you mean 'ppo_clip'?"),
        ("model=q3", "model: 'q3' is no section; give {type: pretrained, path: q3}, or another type: tiny"),
        ("reward.functions=null", "reward.functions: None is no list; leave it out"),
        ("gate=3", "gate: 3 is no section; give keys and values, such as {max_lag: …}"),
        ("run.name=with space", "run.name: 'with space' is no name: give letters, digits, ., _ and - alone"),
        ("rollout.environment={environment: tools, turns: 2}", "turns: unknown key; did you mean 'max_turns'?"),
        ("gatee.max_lag=1", "gatee: unknown key; did you mean 'gate'?"),
        ("rollout.engine.max_seqs=1", "rollout.engine.max_seqs: unknown key; did you mean 'max_sequences'?"),
        ("trainer.algorithm.loss.clip=1", "trainer.algorithm.loss.clip: unknown key; did you mean 'clip_"),
        ("rollout.count=-1", "rollout.count: Input should be greater than or equal to 1, got -1"),
        ("trainer.steps=many", "trainer.steps: Input should be a valid integer"),
        ("weights.transport=glo", "did you mean 'gloo'?"),
        ("gate.window=100", "gate: window=100 with groups_per_step=32 needs max_lag >= 4, got 2"),
        ("rollout.sampling.n=1", "rollout.sampling.n must be at least 2"),
        ("rollout.sampling.routing_replay=true", "there are no experts; set model.experts"),
        ("model.head_dtype=bfloat16", "model.head_dtype: Input should be 'float32'"),
        ("model.kv_heads=3", "model: kv_heads=3 does not divide heads=4; set it to a divisor"),
        ("model.head_dim=33", "model: head_dim=33 is odd"),
        ("model={type: tiny, experts: 4, experts_per_token: 8}", "model: experts_per_token=8 is more than experts=4"),
        ("rollout.sampling.n=300", "exceeds rollout.engine.max_sequences=256"),
        ("rollout.sampling.max_new_tokens=32", "leaves no room for a prompt"),
        (
            "rollout={engine: {type: plugin, name: 'my_engine:Mine'}, sampling: {max_new_tokens: null}}",
            "rollout.sampling.max_new_tokens=null: only the engine (my_engine:Mine) knows how long",
        ),
        ("trainer.algorithm.aggregation=seq-mean-token-sum-norm", "length_scale is needed"),
        (
            "reward.functions=[{function: exact}]",
            "reward.functions.0.function: 'exact' is neither module:function nor one",
        ),
        ("prompts.train={type: hub}", "prompts.train.path: missing"),
        ("prompts.train={type: json, files: rows.jsonl}", "path: json, files: [rows.jsonl]}"),
        ("prompts.train={files: 5}", "prompts.train: say which kind it is"),
        ("trainer.optimizer.epsilon=1e-8", "trainer.optimizer.epsilon: unknown key; did you mean"),
        ("critic.optimizer.learning_rate=1", "critic.optimizer.learning_rate: unknown key; known keys"),
        ("prompts.train={type: jsonl}", "files of your own are {type: hub, path: json, files: [rows.jsonl]}"),
        ("prompts.eval={files: [a.csv]}", "files of your own are {type: hub, path: csv, files: [a.csv]}"),
        (
            "rollout.engine={max_length: 64}",
            "rollout.engine: say which kind it is, with one of type: torch, type: vllm",
        ),
        ("prompts.train={type: sorted}", "prompts.train: type is 'sorted', but must be one of 'sort', 'hub',"),
        ("prompts.train={type: sorted}", "did you mean 'sort'?"),
        (
            "prompts.train={type: hub, path: json, template: 'Q: {question}'}",
            "template: 'Q: {question}' has no {prompt}",
        ),
        (r'prompts.train={type: hub, path: json, template: "{prompt} \boxed{}"}', r"write \\boxed and \\frac there"),
        (
            "prompts.train={type: custom, function: 'a:b', template: '<image> {prompt}'}",
            "it says <image>, which stands",
        ),
        (
            "replay.filter=ranges",
            "replay.filter: type is 'ranges', but must be one of 'none', 'zero_variance', 'range'",
        ),
        ("replay.filter=column", "replay.filter: 'column' is no section; give {type: column}"),
        ("replay.filter={type: range, low: 1}", "replay.filter: low=1 is not below high=1: every group would be left"),
        ("replay.filter={type: range, column: reward/exact}", "no scorer writes a column 'reward/exact'; did you mean"),
        ("replay.filter={type: column, column: values}", "replay.filter.column: values is written when a step has"),
        ("nonsense", "is not of the form dotted.key=value"),
        ("trainer.steps=true", "trainer: steps=true is no number"),
        ("trainer.steps=1:30", "trainer.steps: Input should be a valid integer"),
        ("trainer.optimizer.lr=.inf", "trainer.optimizer.lr: Input should be a finite number"),
        ("trainer.optimizer.momentum=0.9", "trainer.optimizer: momentum is a key of type=muon alone; set that, or"),
        ("trainer.optimizer={type: muon, moments: 8bit}", "trainer.optimizer: moments=8bit: muon keeps its means in"),
        ("trainer.algorithm.preset=simpo", "got 'simpo'; of pairs that rows bring there is preset: dpo alone"),
        ("trainer.algorithm.loss={type: dpo}", "; training from pairs is preset: dpo"),
        ("trainer.optimizer.betas=[0.9, 1.5]", "trainer.optimizer: betas=[0.9, 1.5]: each is at least 0 and below 1"),
        (
            "trainer.algorithm.reject=[{kind: token_k1, lower: 2, upper: 1}]",
            "lower=2 is not below upper=1: everything would be left out",
        ),
        ("trainer.algorithm.loss={type: clip_cov, cov_low: 5}", "cov_low=5 is not below cov_high=5"),
        ("reward.columns={reward: 1}", "reward.columns: reward is no scorer's column"),
        ("gate.max_lag.x=1", "gate.max_lag is a value, not a section"),
        ("rollout.engine={type: torch, type: vllm}", "the value, line 1: 'type' is given twice"),
        ("run.name=2024-13-45", "the value cannot be read: month must be in 1..12; put text in quotes"),
        (
            OPTIONS.format("{by_level: {1: 0.5}}"),
            "reward.functions.0.options: the key by_level.1 is no text; put it in",
        ),
        (OPTIONS.format("{1: 0.5}"), "reward.functions.0.options.1.[key]: Input should be a valid string"),
        (OPTIONS.format("{days: [2024-01-01]}"), "options: days.0=2024-01-01 is neither text nor a finite number; put"),
        (OPTIONS.format("{cap: .inf}"), "reward.functions.0.options: cap=inf is neither text nor a finite number"),
        ("trainer.algorithm.loss={type: custom, function: 'm:f', options: {at: {2: 1}}}", "loss.options: the key at.2"),
    ],
)
def test_mistakes_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(QUICKSTART, re.split(r" (?=[a-z.]+=)", override))
    assert message in str(caught.value)


def test_a_model_with_a_path_is_one_by_name_and_needs_no_type() -> None:
    sections = read_sections(QUICKSTART)
    assert parse({**sections, "model": {"path": "ORG/MODEL"}}).model.type == "pretrained"
    for model, message in (
        ({"layers": 3}, "model: say which kind it is, with one of type: pretrained, type: tiny"),
        ({"path": "ORG/MODEL", "layers": 3}, "model.layers: unknown key; it belongs to model.type=tiny"),
        ({"path": "ORG/MODEL", "chat_templat": "x"}, "model.chat_templat: unknown key; did you mean 'chat_template'?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse({**sections, "model": model})


def test_a_section_given_by_its_type_alone_may_be_given_more() -> None:
    read = load(QUICKSTART, ["replay.filter=zero_variance", "replay.filter.column=reward/exact_match"])
    assert read.replay.filter == VarianceFilter(column="reward/exact_match")


def test_a_critic_that_says_nothing_else_learns_as_often_as_the_trainer() -> None:
    def updates(*overrides: str) -> tuple[int, int]:
        critic = load(QUICKSTART, ["trainer.algorithm.preset=ppo", "trainer.mini_batches=4", *overrides]).critic
        return critic.epochs, critic.mini_batches

    assert updates() == (1, 4)
    assert updates("trainer.epochs=3", "critic.mini_batches=2", "critic.warmup_steps=5") == (3, 2)
    assert updates("trainer.epochs=3", "critic.epochs=1") == (1, 4)
    again = parse(yaml.safe_load(dump(load(QUICKSTART, ["trainer.mini_batches=4", "critic.mini_batches=1"]))))
    assert again.critic.mini_batches == 1, "of a run that goes on"
    with pytest.raises(ConfigError, match="^trainer.epochs: .*got 'many'$"):
        updates("trainer.epochs=many")


def test_numbers_are_read_as_people_write_them() -> None:
    read = load(QUICKSTART, ["trainer.steps=010", "trainer.optimizer.lr=1e-6", "run.seed=1_000"])
    assert (read.trainer.steps, read.trainer.optimizer.lr, read.run.seed) == (10, 1e-6, 1000)
    assert load(QUICKSTART, ["trainer.steps=1e3"]).trainer.steps == 1000
    numbers = "{a: 1e-3, b: 1.5e3, c: -.5E+2, d: [2e0], e: '1e-3', f: e3, g: 0x1e5}"
    options = load(QUICKSTART, [OPTIONS.format(numbers)]).reward.functions[0].options
    assert options == {"a": 1e-3, "b": 1500.0, "c": -50.0, "d": [2.0], "e": "1e-3", "f": "e3", "g": 0x1E5}


def test_a_section_that_merges_may_itself_be_merged(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {type: tiny}\n"
        "prompts:\n"
        "  train: &train {<<: &sort {type: sort, size: 5}, size: 7}\n"
        "  eval: {<<: *train, size: 9}\n"
    )
    assert (load(file).prompts.train.size, load(file).prompts.eval["held_out"].size) == (7, 9)  # type: ignore[union-attr]
    by_name = load(file, ["prompts.eval.held_out.size=11"])
    assert by_name.prompts.eval["held_out"].size == 11, "as notes call it"  # type: ignore[union-attr]
    file.write_text(file.read_text().replace("size: 9", "size: 9, size: 8"))
    with pytest.raises(ConfigError, match="line 4: 'size' is given twice, first in line 4"):
        load(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {name: b\xfcrger}".encode("latin-1"), "it is not UTF-8"),
        (b"? [a, b]\n: 1", "a key must be a word"),
        (b"run: {name: 2024-13-45}", "cannot be read: month must be in"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "bad.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "bad.yaml")


def test_options_are_the_same_in_the_runs_own_copy(tmp_path: Path) -> None:
    given = "{levels: {'1': 0.5, 'no': [1, true, null]}, day: '2024-01-01', cap: 1.0e+300, text: '010', more: '1e-3'}"
    config = load(QUICKSTART, [OPTIONS.format(given)])
    (tmp_path / "own.yaml").write_text(dump(config))
    assert parse(yaml.safe_load(dump(config))) == load(tmp_path / "own.yaml") == config
    options = config.reward.functions[0].options
    assert options["levels"] == {"1": 0.5, "no": [1, True, None]} and options["day"] == "2024-01-01"


def test_a_folder_at_home_is_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert load(QUICKSTART, ["run.folder=~/runs"]).run.folder == "/home/ada/runs"


def test_an_evaluation_has_as_many_answers_as_are_decoded_at_a_time() -> None:
    """One more is drawn for `remax`, by itself."""
    remax = ["run.deterministic=true", "trainer.algorithm.advantage={type: remax}", "rollout.sampling.n=4"]
    drawn = "prompts.eval_sampling={held_out: {n: %d, temperature: 1}}"
    assert load(QUICKSTART, [*remax, drawn % 4]).prompts.eval_sampling["held_out"].n == 4
    with pytest.raises(ConfigError, match=r"held_out\.n=5 exceeds 4 \(run\.deterministic"):
        load(QUICKSTART, [*remax, drawn % 5])


def test_an_adapter_lies_beside_only_where_it_is_sent() -> None:
    beside = "rollout.engine={type: vllm, max_length: 32, adapter: beside}"
    config = load(QUICKSTART, [beside, "trainer.lora={publish: adapter}"])
    assert config.rollout.engine.adapter == "beside"  # type: ignore[union-attr]
    for lora in ("null", "{rank: 4}", "{publish: adapter, variant: dora}", "{publish: adapter, targets: [lm_head]}"):
        with pytest.raises(ConfigError, match=r"beside wants versions that are an adapter alone"):
            load(QUICKSTART, [beside, f"trainer.lora={lora}"])
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        with pytest.raises(ConfigError, match=f"{name} is for rollout.engine.adapter=merged alone"):
            load(QUICKSTART, [f"rollout.engine={{type: vllm, max_length: 32, adapter: beside, vllm: {{{name}: 2}}}}"])
    with pytest.raises(ConfigError, match=r"max_loras is set by rollout.engine.adapter"):
        load(QUICKSTART, ["rollout.engine={type: vllm, max_length: 32, adapter: beside, vllm: {max_loras: 2}}"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["weights.transport=cuda_ipc"], "versions go by the hosts' memory; use auto"),
        (["rollout.engine={type: plugin, name: openai}"], "a server over HTTP (openai) does not sleep"),
        (["rollout.engine={type: vllm, start_s: 900}"], "start_s=900 must be less than run.turn_s=900"),
    ],
)
def test_who_cannot_share_devices_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(QUICKSTART, ["run.placement=colocated", *overrides])
    assert message in str(caught.value)


def test_an_engine_that_cannot_be_told_of_the_head_has_to_say_that_it_has_it() -> None:
    def engine(name: str, head: str | None) -> str:
        return f"rollout.engine={{type: plugin, name: '{name}', options: {{head_dtype: {head or 'null'}}}}}"

    wide, narrow = "model.head_dtype=float32", "model.head_dtype=null"
    for chosen, message in (
        ((wide, engine("openai", None)), """was started: start it with --hf-overrides '{"head_dtype": "float32"}'"""),
        ((wide, engine("sglang", None)), "--enable-fp32-lm-head, and say so by rollout.engine.options.head_dtype="),
        ((wide, engine("mine:Engine", None)), "an engine of your own (mine:Engine) has to compute logits so, too"),
        ((narrow, engine("openai", "float32")), "would compute logits in bfloat16; set model.head_dtype=float32 too"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(QUICKSTART, ["model.dtype=bfloat16", *chosen])
        assert message in str(caught.value)
        load(QUICKSTART, ["model.dtype=float32", *chosen])  # of which it changes nothing
    for name in ("openai", "sglang", "mine:Engine"):
        load(QUICKSTART, ["model.dtype=bfloat16", wide, engine(name, "float32")])
    load(QUICKSTART, ["model.dtype=bfloat16", narrow, engine("mine:Engine", "float32")])  # its options are its own


def test_a_file_goes_on_from_others_and_says_only_what_is_other(tmp_path: Path) -> None:
    machine, task = tmp_path / "base" / "machine.yaml", tmp_path / "base" / "task.yaml"
    machine.parent.mkdir()
    machine.write_text("rollout: {count: 2, engine: {type: torch, max_length: 640}}\ntrainer: {steps: 7, threads: 2}\n")
    task.write_text("model: {type: tiny}\nprompts: {train: {type: sort}}\nreward: {functions: [{function: length}]}\n")
    file = tmp_path / "own.yaml"
    file.write_text(
        "extends: [base/machine.yaml, base/task.yaml]\ntrainer: {steps: 3}\nrollout: {engine: {type: http, url: u}}\n"
        "reward: {functions: [{function: exact_match}]}\n"
    )
    assert read_sections(file) == {
        "model": {"type": "tiny"}, "prompts": {"train": {"type": "sort"}},
        "rollout": {"count": 2, "engine": {"type": "http", "url": "u"}}, "trainer": {"steps": 3, "threads": 2},
        "reward": {"functions": [{"function": "exact_match"}]},
    }  # fmt: skip
    file.write_text("extends: base/machine.yaml\ntrainer: {extends: null, steps: 3}\n")
    assert read_sections(file)["trainer"] == {"steps": 3}
    file.write_text("extends: base/machine.yaml\nmodel: {type: tiny}\nprompts: {train: {type: sort}}\n")
    assert load(file, ["trainer.steps=4"]).trainer.steps == 4
    task.write_text("extends: ../own.yaml\n")
    for text, why in [
        ("extends: base/task.yaml", "task.yaml: extends: ../own.yaml goes on from this file itself"),
        ("extends: 3", "own.yaml: extends: give a config file"), ("extends: no.yaml", "cannot read .*no.yaml"),
    ]:  # fmt: skip
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            load(file)


def test_a_missing_file_and_bad_yaml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere.yaml: No such file"):
        load(tmp_path / "nowhere.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        load(tmp_path / "bad.yaml")


def test_passwords_are_not_shown() -> None:
    config = load(QUICKSTART, ["store.url=rediss://user:secret@host:6379/0"])
    assert "secret" not in dump(config) and "rediss://user:***@host:6379/0" in dump(config)
    assert hide_password("unix:///a/b.sock") == "unix:///a/b.sock"


def test_dry_run_prints_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", str(QUICKSTART), "--dry-run", "gate.max_lag=0"])
    assert done.exit_code == 0 and yaml.safe_load(done.output)["gate"]["max_lag"] == 0
    assert not list(tmp_path.iterdir())


def test_no_column_can_have_the_name_of_a_field_of_what_is_exported() -> None:
    assert {*FIXED, *TOKENS, "metrics"} <= FIELDS | METRICS


def test_what_others_call_it_is_in_the_docs_and_is_a_key_here() -> None:
    rows = Path("docs/moving.md").read_text().splitlines()
    for name, here in HERE.items():
        key = re.match(r"[\w.]+", here)
        assert key and find(key[0]), here
        told = [row for row in rows if re.search(rf"[`.]{name}[`.:]", row.partition(" | ")[0])]
        assert any(key[0] in row.partition(" | ")[2] for row in told), (name, here)


def test_an_evaluation_set_that_is_null_is_left_out(tmp_path: Path) -> None:
    def sets(*overrides: str) -> list[str]:
        return [*load(QUICKSTART, list(overrides)).prompts.eval]

    two = "prompts.eval={sums: {type: sort}, words: {type: sort}}"
    assert sets(two, "prompts.eval.sums=null") == ["words"] and sets(two, "prompts.eval=null") == []
    assert sets("prompts.eval.held_out=null") == [] and sets("prompts.eval.held_out.seed=3") == ["held_out"]
    with pytest.raises(ConfigError, match=r"prompts.eval.sums: unknown key"):
        sets("prompts.eval.sums=null")
