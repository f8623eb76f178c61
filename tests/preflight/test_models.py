"""Models are looked at before a run begins: their files, their tokenizers, their heads."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GptOssConfig, Qwen3MoeConfig

from penstock.pipeline.config import Config, load
from penstock.pipeline.models import make_tiny as making
from penstock.pipeline.models.characters import ALPHABET
from penstock.pipeline.models.tiny import make_tokenizer
from penstock.pipeline.preflight import data, environment, gateway, pictures
from penstock.pipeline.preflight import model as models
from penstock.pipeline.preflight.report import Report
from penstock.protocols.experience import Prompt
from penstock.services.modeling.load import load_model, load_tokenizer
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime.errors import SetupError
from tests import seeing
from tests.conftest import TINY
from tests.e2e.runs import QUICKSTART, SHORT

CPU = torch.device("cpu")


def saved(
    folder: Path, family: str = "qwen3", vocabulary: int = 64, characters: str = ALPHABET, shard: str = "20KB"
) -> Path:
    config = AutoConfig.for_model(family, **{**TINY, "vocab_size": vocabulary})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size=shard)
    make_tokenizer(set(characters)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("policy"))


def said(policy: Path, look: Callable[[Config, Report], None] = models.look, **given: Any) -> str:
    told = {"model": {"type": "pretrained", "path": str(policy)}, "prompts": {"train": {"type": "sort"}}, **given}
    report = Report()
    look(Config.model_validate(told), report)
    return "\n".join(report.problems)


def test_whoever_reads_the_policys_tokens_must_know_them(policy: Path, tmp_path: Path) -> None:
    small, other = saved(tmp_path / "small", vocabulary=16), saved(tmp_path / "other", characters="answer 3+47=")
    kl, gae = {"algorithm": {"kl": {"coefficient": 0.1}}}, {"algorithm": {"preset": "ppo"}}
    teacher = {"scorer": "teacher", "columns": {"teacher": "token"}}
    for path, why in ((small, "knows 16 tokens"), (other, "has another tokenizer than the policy")):
        assert f"reference.path: {path} {why}" in said(policy, reference={"path": str(path)}, trainer=kl)
        assert f"critic.path: {path} {why}" in said(policy, critic={"path": str(path)}, trainer=gae)
        found = said(policy, scorers={"law": {**teacher, "options": {"path": str(path)}}})
        assert f"scorers.law.options.path: {path} {why}" in found
    bare, marked = (shutil.copytree(policy, tmp_path / name) for name in ("bare", "marked"))
    for file in bare.glob("tokenizer*"):
        file.unlink()
    begins = AutoTokenizer.from_pretrained(marked)
    begins._tokenizer.post_processor = TemplateProcessing("a $A", special_tokens=[("a", 3)])
    begins.save_pretrained(marked)
    for path in (bare, marked):  # what reads ids alone needs no tokenizer, and begins no text
        assert not said(policy, reference={"path": str(path)}, trainer=kl)
    assert not said(policy, reference={"path": str(policy)}, trainer=kl) and not said(policy, trainer=gae)


def test_routers_are_balanced_where_there_are_some(policy: Path) -> None:
    found = said(policy, trainer={"algorithm": {"router_balance": 0.1}})
    assert f"trainer.algorithm.router_balance: {policy} (qwen3) is no mixture of experts whose routers" in found


def test_a_mixture_that_vllm_cannot_be_filled_with_is_named(tmp_path: Path) -> None:
    GptOssConfig(num_local_experts=2).save_pretrained(tmp_path)
    told = {"model": {"type": "pretrained", "path": str(tmp_path)}, "prompts": {"train": {"type": "sort"}}}
    whole = Config.model_validate(told | {"rollout": {"engine": {"type": "vllm"}}})
    with pytest.raises(SetupError, match=r"vLLM cannot be sent versions of .* \(gpt_oss\)"):
        models._check_vllm(str(tmp_path), whole, Report())
    served = {"type": "plugin", "name": "openai", "options": {"url": "http://a", "folder": "v"}}
    with pytest.raises(
        SetupError, match=r"engine\.name: the server of vLLM cannot .* take rollout\.engine\.type=torch"
    ):
        models._check_vllm(str(tmp_path), Config.model_validate(told | {"rollout": {"engine": served}}), Report())
    served["options"]["load"] = [{"path": "/load", "body": {"from": "{folder}"}}]  # a server of another make
    models._check_vllm(str(tmp_path), Config.model_validate(told | {"rollout": {"engine": served}}), Report())
    models._check_vllm(str(tmp_path), Config.model_validate(told), Report())
    beside = {"rollout": {"engine": {"type": "vllm", "adapter": "beside"}}, "trainer": {"lora": {"publish": "adapter"}}}
    with pytest.raises(SetupError, match=r"vLLM cannot be sent versions of .* take rollout\.engine\.type=torch$"):
        models._check_vllm(str(tmp_path), Config.model_validate(told | beside), Report())
    Qwen3MoeConfig().save_pretrained(tmp_path)
    with pytest.raises(
        SetupError, match=r"engine\.adapter: beside is not for mixtures of experts, .*set it to merged$"
    ):
        models._check_vllm(str(tmp_path), Config.model_validate(told | beside), Report())


def test_who_is_shown_pictures_sees_as_the_policy_does(policy: Path, tmp_path: Path) -> None:
    agents = {"gateway": {"count": 1, "pictures": True}}
    found = said(policy, pictures.look, **agents)
    assert "sees nothing, and agents may show pictures; take a model that sees" in found
    assert found.endswith("or set gateway.pictures to false")
    for name in ("sees", "otherwise"):
        seeing.write("qwen3_vl", tmp_path / name)
    told = tmp_path / "otherwise" / "preprocessor_config.json"
    told.write_text(json.dumps(json.loads(told.read_text()) | {"size": {"shortest_edge": 4096, "longest_edge": 8192}}))
    kl = {"algorithm": {"kl": {"coefficient": 0.1}}}
    assert not said(tmp_path / "sees", pictures.look, **agents, reference={"path": str(tmp_path / "sees")}, trainer=kl)
    other = {"path": str(tmp_path / "otherwise")}
    found = said(tmp_path / "sees", pictures.look, **agents, reference=other, trainer=kl)
    assert re.search(r"reference.path: .*otherwise has \d+ tokens for a picture for which the policy has \d+", found)


def test_a_critic_may_be_of_a_family_that_transformers_has_none_of(tmp_path: Path) -> None:
    assert not said(saved(tmp_path / "olmo", family="olmo2"), trainer={"algorithm": {"preset": "ppo"}})
    seeing.write("qwen3_vl", tmp_path / "sees")
    told = {"gateway": {"count": 1, "pictures": True}, "trainer": {"algorithm": {"preset": "ppo"}}}
    for look in (models.look, pictures.look):
        assert not said(tmp_path / "sees", look, **told)
    blind = said(tmp_path / "sees", pictures.look, **told, critic={"path": str(tmp_path / "olmo")})
    assert "critic.path: " in blind and "olmo2) sees nothing" in blind


def test_a_file_that_the_index_names_is_missed(policy: Path, tmp_path: Path) -> None:
    torn = shutil.copytree(policy, tmp_path / "torn")
    (gone := sorted(torn.glob("model-0000*.safetensors"))[1]).unlink()
    assert f"model.path: {torn} lacks {gone.name}, which model.safetensors.index.json names" in said(torn)
    (index := torn / "model.safetensors.index.json").write_text("{")
    assert f"model.path: {index} cannot be read" in said(torn)
    whole = saved(tmp_path / "whole", shard="1GB")
    for other in (index.name, "pytorch_model.bin.index.json"):
        (whole / other).write_text('{"weight_map": {"a": "gone.bin"}}')
    assert not said(whole), "files that nobody reads may be missing"
    assert load_trainable(str(whole), World(CPU), CPU, "float32")


@pytest.mark.parametrize("column", ["text", "talk"])
def test_a_tiny_model_has_a_token_for_each_letter_of_what_it_is_given(tmp_path: Path, column: str) -> None:
    row = {"asked": "1+1=", "text": "ÄZ", "talk": [{"role": "assistant", "content": "ÄZ"}], "truth": "2"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    rows = f"{{type: hub, path: json, files: ['{tmp_path}/rows.jsonl'], prompt_key: asked, truth_key: truth"
    given = [f"prompts.train={rows}, answer_key: {column}}}", "rollout.given.answers=1", "model.warm_start.steps=0"]
    making.make_tiny(load(QUICKSTART, [*SHORT, *given]), tmp_path)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert tokenizer.decode(tokenizer("ÄZ")["input_ids"]) == "ÄZ"


def test_a_tiny_model_is_there_once_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, build = load(QUICKSTART, SHORT), making.build

    def killed(config: Any, source: Any, folder: Path, *more: Any) -> None:
        build(config, source, folder, *more)
        (folder / "model.safetensors").unlink()  # its config.json is written first
        raise KeyboardInterrupt

    monkeypatch.setattr(making, "build", killed)
    with pytest.raises(KeyboardInterrupt):
        making.make_tiny(config, tmp_path)
    assert not (tmp_path / "model").exists()
    monkeypatch.setattr(making, "build", build)
    making.make_tiny(config, tmp_path)
    assert load_model(str(tmp_path / "model"), "float32", CPU)
    assert not (tmp_path / ".model.partial").exists()


PLAIN = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
TOLD = "{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | join(' ') }} {% endif %}" + PLAIN
MISTRAL = TOLD + (
    "{% for m in messages %}{% if m.role == 'tool' and (m.tool_call_id or '') | length != 9 %}"
    "{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}{% endfor %}"
)
ASKED = [{"role": "user", "content": "a"}]


def begun(policy: Path, template: str | None, **prompt: Any) -> tuple[str, Report]:
    """What is said of an environment's first words, by a policy with this chat template."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(policy)
    config = Config.model_validate({
        "model": {"type": "pretrained", "path": str(policy)}, "prompts": {"train": {"type": "sort"}},
        "reward": {"functions": [{"function": "exact_match"}]},
        "rollout": {
            "engine": {"type": "torch", "max_length": 60}, "sampling": {"max_new_tokens": 8},
            "environment": {"environment": "tools", "options": {"functions": ["python"]}},
        },
    })  # fmt: skip
    report, tools = Report(), [{"type": "function", "function": {"name": "python", "parameters": {}}}]
    assert config.rollout.environment
    with report.collect():
        task = Prompt(index=0, **({"messages": ASKED} | prompt))
        found = {"prompt": None, "pictures": (), "tools": tools}
        environment._encode(config, config.rollout.environment, environment.key_of(""), task, found, report)
    return "\n".join(report.problems), report


def test_an_environments_first_words_have_room_and_tell_of_its_tools(policy: Path, tmp_path: Path) -> None:
    path = shutil.copytree(policy, tmp_path / "chats")
    assert "tools are told by a chat template" in begun(path, None)[0]
    assert "does not tell of them; take a model whose template does" in begun(path, PLAIN)[0]
    found, report = begun(path, TOLD)
    assert not found and "does not say <tool_call>, so the policy may call tools in another form" in report.notes[0]
    found, report = begun(path, "{% if tools %}<tool_call>{% endif %}" + PLAIN)
    assert not found and not report.notes
    asks = (("<function=", "set it to xml"), ("<arg_key>", "to vllm:glm45"), ("<|channel|>", "set it to harmony"))
    for says, remedy in asks:
        found, report = begun(path, f"{{% if tools %}}<tool_call>{says}{{% endif %}}{PLAIN}")
        assert not found and f"tool_calls=hermes: the chat template of {path} tells of {says}" in report.notes[0]
        assert remedy in report.notes[0]
    long = [{"role": "user", "content": "a" * 80}]
    found, report = begun(path, TOLD, messages=long)
    assert not found and "rollout.environment: 1 of the first 1 prompts are too long" in report.notes[-1]
    system = [{"role": "system", "content": "tools"}, *ASKED]
    found, report = begun(path, PLAIN, messages=system)
    assert not found and "unless the system message of each prompt tells of them" in report.notes[0]
    raises = "{{ raise_exception('no such role') }}"
    assert "what row 0 begins with: TemplateError: no such role" in begun(path, raises)[0]
    refuses = TOLD.replace("{{ m.role }}", "{{ raise_exception('no tools') if m.role == 'tool' else m.role }}")
    found = begun(path, refuses)[0]
    assert "the chat template refuses what they give" in found and "no tools; give model.chat_template" in found
    forgets = TOLD.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
    assert "the chat template leaves out what they give (a message of the role tool)" in begun(path, forgets)[0]
    assert not begun(path, MISTRAL)[0], "a result has the id of its call"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (PLAIN, "does not tell of tools"),
        (TOLD.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"), "leaves out what"),
        (TOLD.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' else raise_exception('no') }}"), "refuses"),
        (TOLD, ""),
        ("{% if tools %}<function={% endif %}" + TOLD, "tells of <function=NAME> in <tool_call>"),
    ],
)
def test_agents_that_would_tell_of_tools_in_vain_are_told_of(
    policy: Path, tmp_path: Path, template: str, why: str
) -> None:
    path, report = shutil.copytree(policy, tmp_path / "chats"), Report()
    begun(path, template.replace("{% if tools %}", "{% if tools %}<tool_call>"))
    config = {"model": {"type": "pretrained", "path": str(path)}, "prompts": {"train": {"type": "sort"}}}
    gateway._look_at_template(Config.model_validate(config), report)
    assert [f"the chat template of {path} {why}" in note for note in report.notes] == [True] * bool(why)


def test_a_class_of_tools_gives_a_reward_or_somebody_else_is_named(policy: Path, tmp_path: Path) -> None:
    path = shutil.copytree(policy, tmp_path / "chats")
    begun(path, TOLD)
    row = Prompt(index=0, messages=ASKED, truth={"prompt": "count", "target": 0})
    for name, problems in (("Adding", 0), ("Silent", 1)):
        told = {"environment": "tools", "options": {"class": f"tests.environments.games:{name}"}}
        config = Config.model_validate({
            "model": {"type": "pretrained", "path": str(path)}, "prompts": {"train": {"type": "sort"}},
            "rollout": {"environment": told},
        })  # fmt: skip
        report = Report(row=row)
        environment.look(config, report)
        assert len(report.problems) == problems
    assert "options.class: tests.environments.games:Silent has no get_reward(), so that" in report.problems[0]


@pytest.mark.parametrize("right", [False, True])
def test_two_objects_that_are_told_the_same_should_say_the_same(right: bool) -> None:
    played = {"environment": "tests.environments.games:Secret", "options": {"right": right}}
    told = {"model": {"type": "tiny"}, "prompts": {"train": {"type": "sort"}}, "rollout": {"environment": played}}
    report = Report(row=Prompt(index=3, text="a=", truth="7"))
    environment.look(Config.model_validate(told), report)
    assert "step('7'), on row 3, gave a reward of 0 and went on: 'it is 0." in report.lines[0]
    (note,) = report.notes
    if right:
        assert "step('I think the answer is 42.'), tried on row 3, raised KeyError" in note
    else:
        assert "step('7'), on row 3, gave the observation 'it is 0." in note and "should follow from its prompt" in note


@pytest.mark.parametrize("template", [PLAIN, TOLD])
def test_tools_and_calls_of_rows_that_the_template_leaves_out_are_told(
    policy: Path, tmp_path: Path, template: str
) -> None:
    path = shutil.copytree(policy, tmp_path / "chats")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}
    talk = [*ASKED, call, {"role": "tool", "content": "2"}] if template == TOLD else ASKED
    row = {"prompt": talk, "tools": [{"type": "function", "function": {"name": "add"}}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    train = {"type": "hub", "path": "json", "files": [str(tmp_path / "rows.jsonl")], "tools_key": "tools"}
    lost = "the call of add in its conversation" if template == TOLD else "its tools"

    def look(config: Config, report: Report) -> None:
        data.look(config, report)
        models.look(config, report)

    assert f"row 0: the chat template of {path} does not tell of {lost}" in said(path, look, prompts={"train": train})


@pytest.mark.parametrize(("role", "write"), [("human", "write user"), ("narrator", "write system, user or assistant")])
def test_words_of_a_role_that_the_template_does_not_know_are_told(
    policy: Path, tmp_path: Path, role: str, write: str
) -> None:
    path = shutil.copytree(policy, tmp_path / "chats")
    tokenizer = AutoTokenizer.from_pretrained(path)
    known = "{% if m.role in ['system', 'user', 'assistant'] %}{{ m.role }}: {{ m.content }} {% endif %}"
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{known}{{% endfor %}}{{% if add_generation_prompt %}}a{{% endif %}}"
    )
    tokenizer.save_pretrained(path)
    rows, train = tmp_path / "rows.jsonl", {"type": "hub", "path": "json", "files": [str(tmp_path / "rows.jsonl")]}

    def look(config: Config, report: Report) -> None:
        data.look(config, report)
        models.look(config, report)

    for asked, told in (("user", False), (role, True)):
        rows.write_text(json.dumps({"prompt": [{"role": "system", "content": "1"}, {"role": asked, "content": "2"}]}))
        report = Report()
        model = {"type": "pretrained", "path": str(path), "dtype": "float32"}
        look(Config.model_validate({"model": model, "prompts": {"train": train}}), report)
        found = [each for each in report.problems if "does not tell of messages whose role is" in each]
        assert bool(found) == told and all(f"{role!r}; {write}" in each for each in found)


@pytest.mark.parametrize(
    ("template", "given", "told"),
    [(PLAIN, {}, True), (PLAIN, {"chat": False}, False), (PLAIN, {"system": "Think."}, False), (None, {}, False)],
)
def test_questions_that_a_model_of_chats_is_asked_as_bare_text_are_told_of(
    policy: Path, tmp_path: Path, template: str | None, given: dict[str, Any], told: bool
) -> None:
    path, report = shutil.copytree(policy, tmp_path / "chats"), Report()
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    sums = {"type": "mix", "sources": {"sums": {"type": "reasoning_gym", "task": "chain_sum", **given}}}
    config = {"model": {"type": "pretrained", "path": str(path), "dtype": "float32"}, "prompts": {"train": sums}}
    models.look(Config.model_validate(config), report)
    assert [note.partition(":")[0] for note in report.notes] == ["prompts.train.sources.sums.chat"] * told


def test_a_reward_model_without_a_head_that_grades_is_refused(policy: Path) -> None:
    scorer = {"scorer": "reward_model", "columns": {"preference": "trajectory"}, "options": {"path": str(policy)}}
    found = said(policy, scorers={"taste": scorer})
    assert "scorers.taste.options.path: " in found and "has 2 labels; a reward model has one, its grade" in found


def test_a_model_of_which_nothing_ends_an_answer_is_refused(policy: Path, tmp_path: Path) -> None:
    path = shutil.copytree(policy, tmp_path / "endless")
    endless = AutoTokenizer.from_pretrained(path)
    endless.eos_token = None
    endless.save_pretrained(path)
    for name in ("config.json", "generation_config.json"):
        told = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({key: value for key, value in told.items() if key != "eos_token_id"}))
    rows = {"prompts": {"train": {"type": "sort", "size": 8}}}
    assert "nothing ends an answer of" in said(path, **rows)
    assert not said(path, **rows, rollout={"sampling": {"stop": ["="]}})
    assert not said(path, **rows, rollout={"sampling": {"stop_token_ids": [63]}})
    strange = said(path, **rows, rollout={"sampling": {"stop_token_ids": [63, 64]}})
    assert f"rollout.sampling.stop_token_ids: 64 is no token of {path}, which has 64 of them" in strange


def test_files_in_32_bits_that_a_cpu_would_compute_with_in_16_are_told_of(policy: Path) -> None:
    def notes(**model: str) -> list[str]:
        told = {"model": {"type": "pretrained", "path": str(policy), **model}, "prompts": {"train": {"type": "sort"}}}
        models.look(Config.model_validate(told), report := Report())
        return [note for note in report.notes if note.startswith("model.dtype: bfloat16, the default, and the files")]

    assert len(notes()) == 1 and not notes(dtype="bfloat16") and not notes(dtype="float32")
