"""Chat templates, and what they are told beside the messages; tokens and their bytes."""

from __future__ import annotations

import shutil
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import MistralConfig, PreTrainedTokenizerFast

from penstock.pipeline.config import Config, load
from penstock.pipeline.config.load import as_yaml, dump
from penstock.pipeline.models.characters import ALPHABET
from penstock.pipeline.models.tiny import make_tokenizer
from penstock.pipeline.preflight.model import _encode
from penstock.pipeline.preflight.report import Report
from penstock.protocols.experience import Prompt
from penstock.services.data import open_source
from penstock.services.gateway.replies import Replies
from penstock.services.modeling.load import load_tokenizer
from penstock.services.reward.functions.number import number
from penstock.services.runtime.errors import SetupError
from penstock.services.turns.answers import Answer
from penstock.services.turns.given import given_trajectory
from penstock.services.turns.library_parsers import parser_of
from penstock.services.turns.tokenizer import TextError, Tokenizer
from penstock.services.turns.tool_calls import Call, Said
from tests.rollout.test_stop_texts import SPECIAL, bytewise, letter, with_bytes_to_fall_back_on

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a' if enable_thinking is defined and not enable_thinking else 'b' }}{% endif %}"
)
SAY = [{"role": "user", "content": "cde"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer(set(ALPHABET))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_template_is_told_what_the_config_says_at_the_beginning_and_between_turns(folder: Path) -> None:
    plain, told = Tokenizer(str(folder)), Tokenizer(str(folder), {"enable_thinking": False})
    assert plain.decode([plain.encode_chat(SAY)]) == ["cdeb"] and told.decode([told.encode_chat(SAY)]) == ["cdea"]
    between = [each.observe("de", True, 5) for each in (plain, told)]
    assert [plain.decode([ids]) for ids in between] == [["deb"], ["dea"]]
    assert not told.unread() and Tokenizer(str(folder), {"enable_thinkin": False}).unread() == ["enable_thinkin"]


def test_a_name_that_the_template_does_not_look_at_is_refused_before_the_run(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    model = {"type": "pretrained", "path": str(folder), "chat_template_kwargs": {"thinking": True}}
    config = Config.model_validate({"model": model, "prompts": {"train": {"type": "sort"}}})
    with pytest.raises(SetupError, match="model.chat_template_kwargs.thinking: the chat template of .* does not look"):
        _encode(config, Report())


def test_a_prompt_may_have_it_told_more_or_otherwise_than_the_config(folder: Path) -> None:
    text = Tokenizer(str(folder), {"enable_thinking": True})
    own = Prompt(index=0, messages=SAY, chat_template_kwargs={"enable_thinking": False, "level": None})
    assert text.decode([text.encode(own), text.encode(Prompt(index=0, messages=SAY))]) == ["cdea", "cdeb"]
    told = text.telling(own.chat_template_kwargs)
    assert told is text.telling({"enable_thinking": False}) and told.telling(own.chat_template_kwargs) is told
    assert text.telling({}) is text.telling(None) is text and text.telling({"enable_thinking": True}) is text
    assert text.telling({"enable_thinking": 1}) is not text, "a template may ask whether it is true itself"
    assert text.decode([told.observe("de", True, 5)]) == ["dea"]
    turn = [{"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}]
    given = own.model_copy(update={"answer": [*turn, {"role": "assistant", "content": "c"}]})
    assert text.decode([given_trajectory(text, given, "all", 0, None).tokens])[0] == "cdeadeac"


@pytest.mark.parametrize(
    ("given", "why"),
    [({"messages": SAY, "chat_template_kwargs": {"thinking": 1}}, "kwargs.thinking: the chat template does not look"),
     ({"text": "cde", "chat_template_kwargs": {"enable_thinking": 1}}, "the prompt must be messages")],
)  # fmt: skip
def test_what_a_prompt_has_told_in_vain_costs_it(folder: Path, given: dict[str, Any], why: str) -> None:
    with pytest.raises(TextError, match=why):
        Tokenizer(str(folder)).encode(Prompt(index=0, **given))


@pytest.mark.parametrize("where", ["prompts.train", "prompts.train.sources.few", "prompts.eval.one"])
def test_a_source_that_has_it_told_in_vain_is_named_before_the_run(folder: Path, where: str) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "rows.jsonl").write_text('{"prompt": "cde"}\n' * 200)
    plain = {"type": "hub", "path": "json", "files": [str(folder / "rows.jsonl")]}
    told = {**plain, "chat_template_kwargs": {"enable_thinkin": False}, "limit": 1}
    train: dict[str, Any] = told if where == "prompts.train" else plain
    if "sources" in where:
        train = {"type": "mix", "sources": {"many": plain, "few": told}}
    prompts = {"train": train, "eval": {"one": told if "eval" in where else plain}}
    config = Config.model_validate({"model": {"type": "pretrained", "path": str(folder)}, "prompts": prompts})
    with pytest.raises(SetupError, match=f"{where}.chat_template_kwargs.enable_thinkin: the chat template of"):
        _encode(config, Report())


def test_rows_that_have_a_template_told_what_it_does_not_look_at_are_named_before_the_run(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "rows.jsonl").write_text('{"prompt": "cde", "told": {"thinking": true}}\n')
    train = {"type": "hub", "path": "json", "files": [str(folder / "rows.jsonl")], "chat_template_kwargs_key": "told"}
    model = {"type": "pretrained", "path": str(folder)}
    config = Config.model_validate({"model": model, "prompts": {"train": train}})
    with pytest.raises(SetupError, match="cannot encode row 0: .*chat_template_kwargs.thinking: .* does not look"):
        _encode(config, Report(row=open_source(config.prompts.train)[0]))


@pytest.mark.parametrize("name", ["add_generation_prompt", "messages"])
def test_what_whoever_renders_a_chat_says_is_not_the_configs(folder: Path, name: str) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    model = {"type": "pretrained", "path": str(folder), "chat_template_kwargs": {name: False}}
    config = Config.model_validate({"model": model, "prompts": {"train": {"type": "sort"}}})
    with pytest.raises(SetupError, match=f"model.chat_template_kwargs.{name}: whoever renders a chat says it"):
        _encode(config, Report())


def configured(folder: Path, **model: object) -> Config:
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    file = folder / "run.yaml"
    file.write_text(
        as_yaml({"model": {"type": "pretrained", "path": str(folder), **model}, "prompts": {"train": {"type": "sort"}}})
    )
    return load(file)


def test_another_template_stands_in_a_file_or_in_the_config_and_the_run_keeps_it(folder: Path) -> None:
    (folder / "chat.jinja").write_text("{% for m in messages %}x{{ m.content }}{% endfor %}{{ level }}")
    for given in ("chat.jinja", (folder / "chat.jinja").read_text()):
        config = configured(folder, chat_template=given, chat_template_kwargs={"level": "z"})
        assert "messages" in dump(config) and Config.model_validate(yaml.safe_load(dump(config))) == config
        _encode(config, Report())
        text = Tokenizer(str(folder), config.template)
        assert text.decode([text.encode_chat(SAY)]) == ["xcdez"]
    load_tokenizer(str(folder), config.template).save_pretrained(folder / "checkpoint")
    kept = Tokenizer(str(folder / "checkpoint"), {"level": "z"})
    assert kept.decode([kept.encode_chat(SAY)]) == ["xcdez"]


@pytest.mark.parametrize(
    ("given", "why"),
    [("chta.jinja", "model.chat_template: there is no file 'chta.jinja', and a template itself has braces"),
     ("{% for m in messages %}", "model.chat_template: a chat cannot be told by it: TemplateSyntaxError"),
     ("{{ messages[3].content }}", "model.chat_template: a chat cannot be told by it: UndefinedError")],
)  # fmt: skip
def test_a_template_that_is_none_is_told_before_the_run(folder: Path, given: str, why: str) -> None:
    with pytest.raises(SetupError, match=why):
        _encode(configured(folder, chat_template=given), Report())


def numbered(text: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in text.encode()]


WORDS = "ab 你ab é\ufffd"
MARKS = {
    bytewise: [letter(byte) for byte in WORDS.encode()],
    with_bytes_to_fall_back_on: ["▁a", "b", "▁", *numbered("你"), "ab", "▁é", *numbered("\ufffd")],
}


@pytest.mark.parametrize("made", MARKS)
def test_the_bytes_of_tokens_are_those_of_their_text(tmp_path: Path, made: Callable[[], Backend]) -> None:
    """Also of those that are a part of a character."""
    PreTrainedTokenizerFast(tokenizer_object=made(), eos_token=SPECIAL).save_pretrained(tmp_path)
    tokenizer = Tokenizer(str(tmp_path))
    ids = tokenizer.plain.convert_tokens_to_ids(MARKS[made])
    (*spelled, ended) = tokenizer.spelled([*ids, tokenizer.plain.eos_token_id])
    assert b"".join(added or b"" for _, added in spelled).decode() == tokenizer.decode([ids])[0] == WORDS
    assert all(text == (added or b"").decode(errors="replace") for text, added in spelled)
    assert ended == (SPECIAL, b""), "it is named, and adds nothing"


def test_bytes_that_a_tokenizer_does_not_tell_are_none(tmp_path: Path) -> None:
    broken = Backend(models.WordLevel({"ab": 0, "\ufffd": 1}, "ab"))
    PreTrainedTokenizerFast(tokenizer_object=broken).save_pretrained(tmp_path)
    assert Tokenizer(str(tmp_path)).spelled([0, 1, 99]) == [("ab", b"ab"), ("\ufffd", None), ("", b"")]


def _sentencewise(rstrip: bool, scheme: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose words begin with a mark, and in which special tokens may swallow the space behind them."""
    letters = list("▁\nabcdefghijklmnopqrstuvwxyz.")
    vocabulary = {"<unk>": 0} | {each: number for number, each in enumerate(letters, 1)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    special = ("<|end|>", "<|user|>", "<|assistant|>")
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False, rstrip=rstrip) for each in special])
    found = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", unk_token="<unk>")
    found.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    return found


@pytest.mark.parametrize("scheme", ["first", "never"])
@pytest.mark.parametrize("rstrip", [True, False])
def test_an_observation_has_the_tokens_that_it_has_in_the_whole_chat(rstrip: bool, scheme: str, tmp_path: Path) -> None:
    library = _sentencewise(rstrip, scheme)
    library.save_pretrained(tmp_path)
    mine, end = Tokenizer(str(tmp_path)), library.convert_tokens_to_ids("<|end|>")
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "so"},
    ]
    whole = library.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    begun = mine.encode_chat(chat[:1]).tolist()
    answered = [place for place, token in enumerate(whole) if token == end][1] + 1
    assert whole[: len(begun)] == begun
    assert whole[answered:] == mine.observe("so", True, end).tolist()
    assert mine.observe("so", True, library.convert_tokens_to_ids("a")).tolist() == whole[answered - 1 :]


def test_mistrals_own_tokenizer_beside_it_takes_no_chat_template_away(tmp_path: Path) -> None:
    common = pytest.importorskip("mistral_common")
    tokenizer = make_tokenizer(set(string.printable))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    MistralConfig(vocab_size=131072, architectures=["MistralForCausalLM"]).save_pretrained(tmp_path)
    shutil.copy(Path(common.__file__).parent / "data" / "tekken_240911.json", tmp_path / "tekken.json")
    found = Tokenizer(str(tmp_path))
    assert found.has_template and found.plain.chat_template == TEMPLATE
    assert found.stop_ids


def test_an_answer_that_ended_as_a_last_one_does_is_not_ended_twice(tmp_path: Path) -> None:
    """gpt-oss ends the last answer by another token than those before it."""
    tokenizer = make_tokenizer(set(string.printable))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>", "<|return|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    text = Tokenizer(str(tmp_path))
    last, other = (text.plain.convert_tokens_to_ids(mark) for mark in ("<|return|>", "a"))
    said = [text.plain.decode(text.observe("on", True, ended)) for ended in (last, other)]
    assert said == ["<|start|>user:on<|end|><|start|>assistant:", "<|end|><|start|>user:on<|end|><|start|>assistant:"]


@pytest.fixture
def harmony(tmp_path: Path) -> Tokenizer:
    """With the special tokens of gpt-oss."""
    tokenizer = make_tokenizer(set(string.printable))
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.save_pretrained(tmp_path)
    return Tokenizer(str(tmp_path))


THOUGHT = "<|channel|>analysis<|message|>Option A? no."
FINAL = "<|start|>assistant<|channel|>final<|message|>-5"
ASKS = '<|start|>assistant<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>'


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (f"{THOUGHT}<|end|>{FINAL}<|return|>", "<think>Option A? no.</think>-5"),
        (f"{THOUGHT}<|end|>{FINAL}", "<think>Option A? no.</think>-5"),
        (THOUGHT, "<think>Option A? no."),
        (FINAL.removeprefix("<|start|>assistant"), "-5"),
        (f"{THOUGHT}<|end|>{ASKS}", '<think>Option A? no.</think>commentary to=functions.add{"a": 1}'),
        ('<|start|>assistant<|channel|>final<|constrain|>json<|message|>{"a": 1}<|return|>', '{"a": 1}'),
        ("<|start|>user<|message|>hi<|end|><|start|>assistant", "userhiassistant"),
        ("-5<|return|>", "-5"),
    ],
)
def test_thoughts_that_special_tokens_tell_apart_stay_apart_in_the_text(
    harmony: Tokenizer, said: str, text: str
) -> None:
    row = harmony._tokenize(said)
    assert harmony.decode([row]) == [text]
    assert number(text, "-5") == float(text.endswith("-5"))
    assert "".join(spelled for spelled, _ in harmony.spelled(row)) == said


ADD = Call("add", {"a": 1})
COMMENTARY = "<|start|>assistant<|channel|>commentary"
ROLE = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}'


@pytest.mark.parametrize(
    ("said", "left", "calls"),
    [
        (f"{THOUGHT}<|end|>{ASKS}", "<think>Option A? no.</think>", [ADD]),
        (f"{THOUGHT}<|end|>{ROLE}<|call|>", "<think>Option A? no.</think>", [ADD]),
        (f"{COMMENTARY}<|message|>Well.<|end|>{ROLE}<|end|>{ROLE}<|call|>", "Well.", [ADD, ADD]),
        (f"{COMMENTARY} to=functions.now <|constrain|>json<|message|><|call|>", "", [Call("now", {})]),
        (' to=functions.add<|channel|>commentary<|message|>{"a": 1}<|call|>', "", [ADD]),
        (f'{ROLE}<|end|><|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|>', "", [ADD]),
        ('<|start|>user to=functions.add<|message|>{"a": 1}<|end|>', None, []),
        (f"{COMMENTARY} to=functions.add<|message|>[1]<|call|>", None, []),
        (f'{ROLE}<|end|>{COMMENTARY} to=functions.add<|message|>{{"a": <|call|>', None, []),
        (f"{COMMENTARY} to=somebody<|message|>{{}}<|call|>", None, []),
        (f"{THOUGHT} to=functions.add<|end|>{FINAL}<|return|>", None, []),
        ("-5<|return|>", None, []),
    ],
)
def test_calls_in_channels_are_those_that_are_addressed(
    harmony: Tokenizer, said: str, left: str | None, calls: list[Call]
) -> None:
    row = harmony._tokenize(said)
    told = Said(harmony.decode([row])[0], harmony.decode_marked(row), "[]")
    parse = parser_of("harmony", harmony, "key")
    assert parse(told) == (told.text if left is None else left, calls)
    assert parse(replace(told, cut=True)) == (told.text, []), "half of a call would do for one"


def test_a_tokenizer_without_channels_has_no_calls_in_them(tmp_path: Path) -> None:
    make_tokenizer(set(string.printable)).save_pretrained(tmp_path)
    with pytest.raises(SetupError, match=r"^key: harmony: the model's tokenizer has no special tokens for channels"):
        parser_of("harmony", Tokenizer(str(tmp_path)), "key")


def test_so_do_those_of_channels_that_are_opened_and_closed(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(set(string.printable))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel>", "<channel|>", "<turn|>"]})
    tokenizer.save_pretrained(tmp_path)
    text = Tokenizer(str(tmp_path))
    said = ["<|channel>thought\nhm\nno<channel|>-5<turn|>", "<|channel>thought\nhm", "-5<turn|>", ""]
    found = text.decode([text._tokenize(each) for each in said])
    assert found == ["<think>hm\nno</think>-5", "<think>hm", "-5", ""]


def test_agents_are_told_thoughts_of_a_channel_apart(harmony: Tokenizer) -> None:
    none = np.zeros(0, np.float32)
    answer = Answer(np.array(harmony._tokenize(f"{THOUGHT}<|end|>{FINAL}<|return|>"), np.int32), none, none)
    lease: Any = None
    message, _ = Replies(harmony, "none", apart=True).message(lease, 0, 0, answer, "")
    assert (message["reasoning_content"], message["content"]) == ("Option A? no.", "-5")
