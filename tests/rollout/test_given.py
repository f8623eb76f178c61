"""A row's own answer is what a rollout would have sampled, had the policy said it: behind the same prompt, ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from penstock.protocols.experience import Group, Prompt, Sampling, summarize
from penstock.protocols.messages import Lease, Stop
from penstock.protocols.packed_groups import pack_group, unpack_group
from penstock.services.modeling.generation_config import write_generation_config
from penstock.services.rollout import service
from penstock.services.rollout.config import GivenConfig, RolloutConfig
from penstock.services.rollout.engines.nothing import NoEngine
from penstock.services.rollout.service import Rollout
from penstock.services.rollout.single_turn import SingleTurn
from penstock.services.runtime.actor import ActorContext
from penstock.services.turns.given import given_trajectory
from penstock.services.turns.tokenizer import TextError, Tokenizer
from penstock.services.weights.config import WeightsConfig
from tests.rollout.test_stop_texts import bytewise

MARKS = ["<|im_start|>", "<|im_end|>", "<eos>"]
PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN3 = """{% for m in messages %}{% set said = m.content.split('</think>')[-1].lstrip() %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>
{{ m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' }}
</think>

{% endif %}{{ said }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
R1 = """{% for m in messages %}{% if m.role == 'assistant' %}[A]{{ m.content.split('</think>')[-1] }}<eos>
{%- else %}[U]{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[A]<think>
{% endif %}"""
PHI = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% else %}<eos>{% endif %}"""
GLM = """{% for m in messages %}{% if m.role == 'user' %}<|user|>
{{ m.content }}{% elif m.role == 'tool' %}<|observation|>
{{ m.content }}{% else %}<|assistant|>
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
NO_END = """{% for m in messages %}{{ m.role }}: {{ m.content }}

{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
ASKED = [{"role": "user", "content": "2+2?"}]
TALK = [*ASKED, {"role": "assistant", "content": "<think>two</think>4"}, {"role": "user", "content": "+1?"}]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    def made(template: str | None, **told: Any) -> Tokenizer:
        folder = tmp_path_factory.mktemp("tokenizer")
        backend = bytewise()
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.add_special_tokens(MARKS)
        plain = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
        plain.chat_template = template
        plain.save_pretrained(folder)
        return Tokenizer(str(folder), told)

    return made


def shown(text: Tokenizer, prompt: Prompt, turns: Any = "all") -> list[tuple[bool, str]]:
    """The trajectory's stretches of text, each with whether it is learned."""
    made = given_trajectory(text, prompt, turns, 3, 512)
    assert made.given and made.finish == "stop" and not made.logprobs.any()
    assert set(made.versions[made.loss_mask == 1]) == {3}
    ends = [*(np.flatnonzero(np.diff(made.loss_mask.astype(int))) + 1), len(made.tokens)]
    stretches = [made.tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    every = [text.plain.decode(part, skip_special_tokens=False) for part in stretches]
    return [(bool(made.loss_mask[begin]), part) for begin, part in zip([0, *ends], every, strict=False)]


@pytest.mark.parametrize(
    ("template", "told", "answer", "learned"),
    [
        (PLAIN, {}, " 4 ", "4<|im_end|>"),
        (None, {}, " 4", " 4<eos>"),
        (NO_END, {}, "4", "4<eos>"),
        # Its own thoughts, as the template tells them of the last turn; none, as it says that; none asked for.
        (QWEN3, {}, "<think>two</think>4", "<think>\ntwo\n</think>\n\n4<|im_end|>"),
        (QWEN3, {}, "4", "<think>\n\n</think>\n\n4<|im_end|>"),
        (QWEN3, {"enable_thinking": False}, "4", "4<|im_end|>"),
        # What the template leaves out of an answer is learned all the same, behind the tag that it has opened itself.
        (R1, {}, "<think>\ntwo</think>4", "two</think>4<eos>"),
        (R1, {}, "two</think>4", "two</think>4<eos>"),
        # What a template puts behind an answer's end is never sampled.
        (PHI, {}, "4", "4<|im_end|>"),
        # Special tokens that end nothing.
        (None, {}, "4<|im_start|>", "4<|im_start|><eos>"),
        (NO_END, {}, "4<|im_end|>", "4<|im_end|><eos>"),
        (PLAIN, {}, "4<|im_start|>", "4<|im_start|><|im_end|>"),
    ],
)
def test_the_prompt_is_the_beginning_and_the_answer_is_learned_with_its_end(
    make: Callable[..., Tokenizer], template: str | None, told: dict[str, Any], answer: str, learned: str
) -> None:
    text, prompt = make(template, **told), Prompt(index=0, messages=ASKED, answer=answer)
    asked = text.plain.decode(text.encode(prompt), skip_special_tokens=False)
    assert shown(text, prompt) == [(False, asked), (True, learned)]
    assert given_trajectory(text, prompt, "last", 0, None).turns == ()


def test_an_answer_that_the_next_ones_mark_ends_is_taught_that_end(tmp_path: Path) -> None:
    """As GLM's templates have it: a call is ended by the mark of its result, and another answer by the user's."""
    backend, marks = bytewise(), ["<|user|>", "<|observation|>", "<|assistant|>", "<eos>"]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(marks)
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    plain.chat_template = GLM
    plain.save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=plain.convert_tokens_to_ids(["<eos>", *marks[:2]])).save_pretrained(tmp_path)
    call = {"id": "0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "0", "content": "2"},
        {"role": "assistant", "content": "4"},
        *TALK[-1:],
        {"role": "assistant", "content": "5"},
    ]
    asked = "<tool_call>" + json.dumps(call["function"]) + "</tool_call><|observation|>"
    assert shown(Tokenizer(str(tmp_path)), Prompt(index=0, messages=ASKED, answer=talk)) == [
        (False, "<|user|>\n2+2?<|assistant|>"),
        (True, f"\n{asked}"),
        (False, "\n2<|assistant|>"),
        (True, "\n4<|user|>"),
        (False, "\n+1?<|assistant|>"),
        (True, "\n5<|user|>"),
    ]


def test_of_a_conversation_every_turn_is_learned_behind_what_was_said_before_or_the_last_alone(
    make: Callable[..., Tokenizer],
) -> None:
    text = make(QWEN3)
    prompt = Prompt(index=0, messages=TALK, answer=[{"role": "assistant", "content": "5"}])
    first, between = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", "\n<|im_start|>user\n+1?<|im_end|>\n"
    asks = "<|im_start|>assistant\n"
    assert shown(text, prompt) == [
        (False, first), (True, "<think>\ntwo\n</think>\n\n4<|im_end|>"), (False, between + asks),
        (True, "<think>\n\n</think>\n\n5<|im_end|>"),
    ]  # fmt: skip
    # The last alone: the earlier turn is as the template tells of it, which leaves its thoughts out.
    assert shown(text, prompt, "last") == [
        (False, first + "4<|im_end|>" + between + asks), (True, "<think>\n\n</think>\n\n5<|im_end|>"),
    ]  # fmt: skip
    assert len(given_trajectory(text, prompt, "all", 0, None).turns) == 2


TOOLS = """{% if tools %}<|im_start|>system
{{ tools | map('tojson') | join('\n') }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{{ '<tool_response>' + m.content + '</tool_response>' if m.role == 'tool' else m.content }}
{%- for c in m.tool_calls or [] %}
<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLS = [{"function": {"name": "add", "arguments": '{"a": "2", "b": [2, true]}'}}]
CALLED = [{"role": "assistant", "content": None, "tool_calls": CALLS}, {"role": "tool", "content": "4"}]


def test_calls_of_tools_are_learned_as_the_template_tells_them_behind_the_tools(make: Callable[..., Tokenizer]) -> None:
    text = make(TOOLS)
    prompt = Prompt(index=0, messages=[*ASKED, *CALLED], answer=[{"role": "assistant", "content": "4"}], tools=[ADD])
    head = f"<|im_start|>system\n{json.dumps(ADD)}<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "2", "b": [2, true]}}\n</tool_call><|im_end|>'
    between = "\n<|im_start|>user\n<tool_response>4</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert shown(text, prompt) == [(False, head), (True, call), (False, between), (True, "4<|im_end|>")]
    assert shown(text, prompt, "last") == [(False, head + call + between), (True, "4<|im_end|>")]
    asked = text.plain.apply_chat_template(ASKED, tools=[ADD], add_generation_prompt=True, return_dict=False)
    (_, one), (_, two) = shown(text, Prompt(index=0, messages=ASKED, answer=CALLED[:1], tools=[ADD]))
    assert (one, two) == (head, call) and text.encode(prompt.model_copy(update={"messages": ASKED})).tolist() == asked


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (PLAIN, "the chat template leaves out the call of add; write it into the answer's content"),
        (TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"), "leaves out the call of sum"),
        (TOOLS.replace("assistant\n{% endif", "assistant\n<think>{% endif"), "tells of an answer with calls otherwise"),
        (None, "tools are told by a chat template"),
    ],
)  # fmt: skip
def test_calls_that_would_be_lost_cost_their_row(
    make: Callable[..., Tokenizer], template: str | None, why: str
) -> None:
    two = {**CALLED[0], "tool_calls": [*CALLS, {"function": {"name": "sum", "arguments": {}}}]}
    with pytest.raises(TextError, match=why):
        given_trajectory(make(template), Prompt(index=0, messages=ASKED, answer=[two], tools=[ADD]), "all", 0, 512)


@pytest.mark.parametrize(
    ("template", "ends"),
    [(PLAIN, {"<|im_end|>", "<eos>"}), (PHI, {"<|im_end|>", "<eos>"}), (NO_END, {"<eos>"}), (None, {"<eos>"}),
     ("{{ raise_exception('no') }}", {"<eos>"})],
)  # fmt: skip
def test_what_is_learned_as_an_answers_end_ends_sampled_ones_and_those_of_whoever_loads_the_checkpoint(
    make: Callable[..., Tokenizer], tmp_path: Path, template: str | None, ends: set[str]
) -> None:
    text = make(template)
    assert set(text.plain.convert_ids_to_tokens(sorted(text.stop_ids))) == ends
    write_generation_config(GenerationConfig(eos_token_id=text.plain.eos_token_id), text.plain, tmp_path)
    listed = GenerationConfig.from_pretrained(tmp_path).eos_token_id
    assert set(listed if isinstance(listed, list) else [listed]) == text.stop_ids


@for_all(
    asked=st.text(min_size=1), answer=st.text(min_size=1), template=st.sampled_from([None, PLAIN, QWEN3, R1, NO_END])
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_asked_and_answered_its_prompt_is_that_of_sampled_answers(
    make: Callable[..., Tokenizer], asked: str, answer: str, template: str | None
) -> None:
    text = KEPT.get(template) or KEPT.setdefault(template, make(template))
    prompt = Prompt(index=0, messages=[{"role": "user", "content": asked}], answer=answer)
    made, tokens = given_trajectory(text, prompt, "all", 0, None), text.encode(prompt)
    assert np.array_equal(made.tokens[: len(tokens)], tokens) and not made.loss_mask[: len(tokens)].any()
    assert made.loss_mask[len(tokens) :].all() and made.tokens[-1] in text.stop_ids | text.special_ids(MARKS)


KEPT: dict[Any, Any] = {}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"text": "2+2="}, "no answer to give: its answer is nothing.*answer_key"),
        ({"text": "2+2=", "truth": 4}, "its answer is a number, not text"),
        ({"messages": ASKED, "truth": ["4", "four"]}, "its answer is a list of something else, not text"),
        ({"messages": ASKED, "truth": [{"input": "1", "output": "2"}]}, "its answer is a list of something else"),
        ({"text": "2+2=", "answer": "4" * 600}, "have 605 tokens or more, and there is room for 512"),
        ({"text": "2+2=", "answer": "4" * 20_000}, "adds 20004 characters: too many for the 512 tokens"),
        ({"messages": [*TALK, *TALK[1:]] * 99, "answer": "4"}, "have 5.. tokens or more"),
        ({"text": "2+2=", "answer": [{"role": "assistant", "content": "4"}]}, "prompt is text and its answer messages"),
        ({"messages": ASKED, "answer": ASKED}, "ends with what the user says"),
        ({"messages": TALK[1:], "answer": "5"}, "begins with the assistant"),
        (
            {"messages": ASKED, "answer": [{"role": "assistant", "content": "4", "reasoning_content": "two"}]},
            "leaves out the answer's reasoning_content; write it into its content",
        ),
    ],
)
def test_a_row_without_an_answer_that_could_be_given_costs_itself(
    make: Callable[..., Tokenizer], more: dict[str, Any], why: str
) -> None:
    with pytest.raises(TextError, match=why):
        given_trajectory(make(PLAIN), Prompt(index=0, **more), "all", 0, 512)


def test_what_the_models_own_list_says_ends_an_answer_too(make: Callable[..., Tokenizer]) -> None:
    text, prompt = make(None), Prompt(index=0, messages=ASKED, answer="4<|im_end|>")
    (end,) = text.special_ids(["<|im_end|>"])
    (Path(text.plain.name_or_path) / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    assert given_trajectory(text, prompt, "all", 0, None).tokens[-1] == end


def lease(number: int, n: int = 1) -> Lease:
    prompt = Prompt(index=0, text="2+2=", truth="4")
    return Lease(purpose="train", number=number, attempt=1, seed=0, prompt=prompt, sampling=Sampling(n=n), version=5)


def test_a_group_that_is_given_whole_asks_no_engine_and_crosses_the_wire(make: Callable[..., Tokenizer]) -> None:
    maker = SingleTurn(NoEngine(), make(None), GivenConfig(answers=2), 64)
    asked = lease(7, n=2)
    _, group = maker.start(asked) or (None, "")
    assert isinstance(group, Group) and not maker.has(asked)
    said = summarize(group)
    assert (said.oldest, said.newest, said.sampled, said.given) == (5, 5, 4, 4)
    back = unpack_group(pack_group(group))
    assert [t.given for t in back.trajectories] == [True, True] and back.trajectories[0].text == "4"


@pytest.fixture
def rollout(make: Callable[..., Tokenizer], tmp_path: Path) -> Iterator[Rollout]:
    """One without an engine, whose broker is not there."""
    folder = make(None).plain.name_or_path
    (Path(folder) / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    config = RolloutConfig.model_validate({"engine": {"type": "none"}, "given": {"answers": 1}})
    context = ActorContext("rollout-0", "run", tmp_path, "tcp://127.0.0.1:1")
    made = Rollout(context, config, WeightsConfig(), folder, "float32", 1)
    yield made
    made.actor.mailbox.close(0)


@pytest.mark.parametrize("of_broker", [True, False])
@pytest.mark.parametrize("works", [True, False])
def test_answers_that_take_long_to_make_keep_nobody_waiting(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch, works: bool, of_broker: bool
) -> None:
    made, beats = list[int](), list[int]()
    monkeypatch.setattr(service, "READ_S", 0.0)
    monkeypatch.setattr(service.health, "beat", lambda: beats.append(1))
    monkeypatch.setattr(rollout, "_start", lambda lease: made.append(lease.number))
    monkeypatch.setattr(rollout.engine, "pending", lambda: int(works))
    for number in range(4):
        rollout.actor.mailbox.post(lease(number))
    assert rollout._read_inbox(wait=False) is None
    assert made == ([0] if works else [0, 1, 2, 3]) and len(beats) == len(made)
    rollout.actor.mailbox.post(lease(9))
    if of_broker:
        rollout.actor.mailbox.handlers[Stop](Stop(reason="done"))
    else:
        rollout.actor.stop("done")
    assert rollout._read_inbox(wait=False) == "done" and 9 not in made, "work is somebody else's now"
