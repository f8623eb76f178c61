"""Prompts to token ids, token ids to text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from penstock.protocols.experience import PICTURE, Prompt
from penstock.services.data.picture_files import PictureError, open_pictures
from penstock.services.modeling.answer_end import (
    TemplateEnd,
    end_between,
    listed_ends,
    special_tokens,
    stop_ids,
    template_end,
)
from penstock.services.modeling.load import load_tokenizer
from penstock.services.modeling.pictures import PictureReader
from penstock.services.turns import beside, between
from penstock.services.turns.calls_told import Message, takes_text_alone, with_arguments_as_text, with_names
from penstock.services.turns.channels import Channels
from penstock.services.turns.spelling import spelled
from penstock.services.turns.tool_calls import THINK
from penstock.services.turns.words import contents, says, shown_in_parts

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Where templates look for what the assistant has thought before it spoke."""
MOST_OF_TAG = 16
"""Tokens of a tag and the space behind it."""
UNTOLD = "pictures are told by a chat template, and the tokenizer has none: give model.chat_template"
TELLINGS = 64
"""Of the same chat template, what prompts and agents have it told, of which each is kept."""


class TextError(ValueError):
    """A prompt or an observation that cannot be made tokens of; says why. It costs itself alone."""


class Tokenizer:
    """The tokenizer of a model, as a rollout uses it. ``template``: what its chat template is told beside messages, and
    as ``chat_template`` another one."""

    def __init__(self, path: str, template: Mapping[str, Any] | None = None, base: Tokenizer | None = None) -> None:
        """``base``: of the same model, whose files are not read again."""
        self.path, self.given = path, dict(template or {})
        """Where it lies, and what the run says of its chat template."""
        self._base, self._tokenizer = base, base.plain if base else load_tokenizer(path, template)
        self._template = {name: value for name, value in self.given.items() if name != "chat_template"}
        self._telling = lru_cache(TELLINGS)(self._told)

    def telling(self, template: Mapping[str, Any] | None) -> Tokenizer:
        """One whose chat template is told ``template`` too, over what the run says. Raises `TextError` where it does
        not look at that."""
        added = self.added(template)
        return self._telling(beside.in_json(added)) if added else self

    def added(self, template: Mapping[str, Any] | None) -> dict[str, Any]:
        """What of ``template`` the run does not say itself."""
        return beside.added(self._template, template)

    def _told(self, template: str) -> Tokenizer:
        added = json.loads(template)
        if odd := next(filter(self.ignores, added), None):
            why = "does not look at it" if self.has_template else "is not there"
            raise TextError(f"chat_template_kwargs.{odd}: the chat template {why}; leave it out")
        return Tokenizer(self.path, self.given | added, self._base or self)

    @cached_property
    def _words(self) -> frozenset[str]:
        return beside.words_of(self._tokenizer.chat_template)

    def encode(self, prompt: Prompt, tools: list[dict[str, Any]] | None = None) -> np.ndarray:
        """int32 ``[tokens]``. Chats go through the chat template, with the JSON schemas of ``tools``, or else of the
        prompt's own; without one, their contents are joined by blank lines. Raises `TextError` where tools, calls of
        them, or what the template is told, cannot be told."""
        tools = tools or prompt.tools
        calls = any("tool_calls" in message for message in prompt.messages or ())
        told = "tools are" if tools or calls else "chat_template_kwargs are" if prompt.chat_template_kwargs else ""
        if told and (prompt.messages is None or not self.has_template):
            raise TextError(
                f"{told} told by a chat template: the prompt must be messages (chat: true), and the tokenizer must "
                "have one"
            )
        return self.telling(prompt.chat_template_kwargs)._encode(prompt, tools)

    def _encode(self, prompt: Prompt, tools: list[dict[str, Any]] | None) -> np.ndarray:
        if prompt.pictures:
            return self._encode_shown(prompt, tools)
        if prompt.messages is not None:
            return self.encode_chat(prompt.messages, tools)
        return self.encode_text(prompt.as_text())

    def _encode_shown(self, prompt: Prompt, tools: list[dict[str, Any]] | None) -> np.ndarray:
        """int32 ``[tokens]`` of a prompt that shows pictures. Raises `TextError`."""
        if prompt.marks != len(prompt.pictures):
            raise TextError(
                f"the prompt says {PICTURE} {prompt.marks} times, and shows {len(prompt.pictures)} pictures"
            )
        try:
            for _ in open_pictures(prompt.pictures):  # one that breaks off shall cost its prompt here
                pass
        except PictureError as error:
            raise TextError(str(error)) from error
        if prompt.messages is not None and self.has_template:
            return self.encode_chat(shown_in_parts(prompt.messages), tools, prompt.pictures)
        text = prompt.as_text().replace(PICTURE, self.pictures.framed_mark)
        return self._with_pictures(text, prompt.pictures, begun=False)

    def _with_pictures(self, text: str, pictures: Sequence[bytes], begun: bool) -> np.ndarray:
        try:
            return self.pictures.encode(text, pictures, begun)
        except PictureError as error:
            raise TextError(str(error)) from error

    def check_bare(self, parts: Sequence[np.ndarray]) -> None:
        """Raises `TextError` where ``parts`` of a conversation, which show nothing, have the tokens of a picture: once
        any is shown they would be taken for a part of it."""
        try:
            for part in parts:
                self.pictures.check_bare(part)
        except PictureError as error:
            raise TextError(str(error)) from error

    @cached_property
    def pictures(self) -> PictureReader:
        """How the model's processor reads them. Raises `ModelError`."""
        return self._base.pictures if self._base else PictureReader(self.path, self._tokenizer)

    def encode_text(self, text: str) -> np.ndarray:
        """int32 ``[tokens]`` of a text that stands at the beginning, as the tokenizer begins one."""
        ids = self._tokenizer(text)["input_ids"]
        twice = len(ids) > 1 and ids[0] == ids[1] == self._tokenizer.bos_token_id  # it says itself how it begins
        return np.array(ids[1:] if twice else ids, np.int32)

    @property
    def has_template(self) -> bool:
        """It knows how a chat is told to the model."""
        return bool(self._tokenizer.chat_template)

    def unread(self) -> list[str]:
        """What the chat template is told, and does not look at."""
        return [name for name in self._template if self.ignores(name)]

    def ignores(self, name: str) -> bool:
        """The chat template does not look at it."""
        return name not in self._words

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None,
        pictures: Sequence[bytes] = (),
    ) -> np.ndarray:  # fmt: skip
        """int32 ``[tokens]``, up to where the answer begins. Without a chat template the contents are joined by blank
        lines, and nobody is told of ``tools``. ``pictures``: what messages in parts show. Raises `TextError`."""
        if pictures and not self.has_template:
            raise TextError(UNTOLD)
        if pictures:
            return self._with_pictures(self._render(messages, True, tools), pictures, begun=True)
        if not self.has_template:
            return self.encode_text(contents(messages))
        return np.array(self._render(messages, True, tools, tokenize=True), np.int32)

    def _render(
        self, messages: Sequence[Message], asks: bool, tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = False,
    ) -> Any:  # fmt: skip
        """A chat as its template has it, up to its end, or up to where the next answer begins: text, or ids."""
        if any(message.get("tool_calls") for message in messages):
            messages = with_names(messages)
            if self._arguments_are_text:
                messages = with_arguments_as_text(messages)
        return self._apply(messages, tools=list(tools or ()) or None, add_generation_prompt=asks, tokenize=tokenize)

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        options = {"tokenize": False, "return_dict": False, **options, **self._template}
        return self._tokenizer.apply_chat_template(list(messages), **options)

    @cached_property
    def _arguments_are_text(self) -> bool:
        return takes_text_alone(self._apply)

    def answer_to_text(self, text: str, answer: str) -> np.ndarray:
        """int32 ``[tokens]`` of an ``answer`` as one samples it behind a ``text`` that stands at the beginning: as the
        tokenizer has both together, where that begins as the text alone does, and with its end of sequence. Raises
        `TextError` where it has none."""
        before, whole = (self._tokenizer(part)["input_ids"] for part in (text, text + answer))
        goes_on = whole[: len(before)] == before
        return self._ended(whole[len(before) :] if goes_on else self._tokenize(answer))

    def answer_to_chat(
        self, before: Sequence[Message], answer: Message, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> np.ndarray:
        """int32 ``[tokens]`` of an ``answer`` to a chat as one samples it behind `encode_chat`: what the template makes
        of it, up to the token that ends it. Where the template begins it otherwise than where it asks for it, or leaves
        thoughts out, it is the answer as it is written, with the template's end. Raises `TextError` where calls, or
        thoughts in a field of their own, would be lost, or nothing ends an answer."""
        written = answer["content"]
        if not self.has_template:
            return self.answer_to_text(contents(before), written)
        begun, whole = self._render(before, True, tools), self._render([*before, answer], False, tools)
        told = whole.removeprefix(begun) if whole.startswith(begun) else ""
        if call := self.lost_call(answer, tools):
            raise TextError(f"the chat template leaves out the call of {call}; write it into the answer's content")
        if answer.get("tool_calls") and not (told and says(told, written)):
            raise TextError(
                "the chat template tells of an answer with calls otherwise than where it asks for one, or leaves its "
                "content out; write the calls into the content"
            )
        if not says(told, written):
            tag = re.match(r"\s*(<[^<>\s]+>)\s*", written)  # one that the template has opened already
            opened = tag and begun.rstrip().endswith(tag[1])
            told = written[tag.end() if tag and opened else 0 :] + self._end.whole
        if lost := next((name for name in THOUGHTS if answer.get(name) and not says(told, answer[name])), None):
            raise TextError(f"the chat template leaves out the answer's {lost}; write it into its content")
        if self._end.token is not None and told.endswith(self._end.whole):
            told = told.removesuffix(self._end.whole) + self._end.text
        ids, before_ids = self._tokenize(begun + told.rstrip()), self._tokenize(begun)
        goes_on = ids[: len(before_ids)] == before_ids
        own = ids[len(before_ids) :] if goes_on else self._tokenize(told.rstrip())
        return self._ended(own, self._next_end(answer, tools) if self._end.token is None else None)

    def _ended(self, ids: list[int], end: int | None = None) -> np.ndarray:
        """With ``end``, or the end of sequence, unless a token that ends one does already; others, though special, end
        nothing."""
        if not ids or ids[-1] not in self.stop_ids:
            end = self._tokenizer.eos_token_id if end is None else end
            if end is None:
                raise TextError("nothing ends an answer: neither the chat template nor an end of sequence")
            ids = [*ids, end]
        return np.array(ids, np.int32)

    def _next_end(self, answer: Message, tools: Sequence[Mapping[str, Any]] | None) -> int | None:
        """The token with which the next one begins to speak, where that ends an ``answer``, as GLM's do; None: it does
        not."""
        try:
            ids = self._tokenize(self._behind(answer, between.next_words(answer), "", tools).lstrip())
        except Exception:  # a template may raise anything
            return None
        return ids[0] if ids and ids[0] in self.stop_ids else None

    @cached_property
    def _end(self) -> TemplateEnd:
        return template_end(self._tokenizer, self._template)

    @cached_property
    def _end_between(self) -> str:
        return end_between(self._tokenizer, self._template)

    @cached_property
    def stop_ids(self) -> set[int]:
        """The ids that end an answer: of the tokenizer, of the chat template, and of the model's own list."""
        return stop_ids(self._tokenizer, self._listed, self._end)

    @cached_property
    def _listed(self) -> Any:
        return self._base._listed if self._base else listed_ends(self.path)

    def observe(
        self, observation: str | Sequence[Message], chat: bool, ended_with: int, answer: Message | None = None,
        pictures: Sequence[bytes] = (), tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> np.ndarray:  # fmt: skip
        """int32 ``[tokens]``: what stands between an answer, whose last token is ``ended_with``, and the next one. In
        a ``chat`` it is what the template puts there, less the end of the answer where that was sampled; else the
        observation alone. ``answer``, as a message, tells the template which tools it asked for, and ``tools`` are
        those that the conversation is told of. Tokens that were sampled are never made again from text. ``pictures``:
        what the observation shows, by its marks, or in parts of its messages. Raises `TextError`."""
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        if pictures:
            return self._observe_shown(messages, chat and self.has_template, ended_with, answer, pictures, tools)
        if not chat or not self.has_template:
            text = contents(messages)
        else:
            end = self._special.get(ended_with, "")  # any other token may only look like the answer's end
            text = self._behind(answer, messages, end, tools)
            if ended_with == self._end.token and self._end_between and text.startswith(self._end_between):
                end = self._end_between  # the answer has ended, if by the token of a last one
            if end and text.startswith(end):
                ids = self._tokenize(text)  # behind its end, as in the template: alone its rest may be other tokens
                if ids and self._special.get(ids[0]) == end:
                    return np.array(ids[1:], np.int32)
                text = text.removeprefix(end)
        return np.array(self._tokenize(text), np.int32)

    def _observe_shown(
        self, messages: Sequence[Message], chat: bool, ended_with: int, answer: Message | None,
        pictures: Sequence[bytes], tools: Sequence[Mapping[str, Any]] | None,
    ) -> np.ndarray:  # fmt: skip
        told: Sequence[Message]
        if any(isinstance(message.get("content"), list) for message in messages):
            if not chat:
                raise TextError(UNTOLD)
            told = messages
        elif chat:
            told = shown_in_parts(messages)
        else:
            mark = self.pictures.framed_mark
            told = [{**message, "content": message["content"].replace(PICTURE, mark)} for message in messages]
        try:
            return self.pictures.expand(self.observe(told, chat, ended_with, answer, (), tools), pictures)
        except PictureError as error:
            raise TextError(str(error)) from error

    def _tokenize(self, text: str) -> list[int]:
        """Of a part of a conversation: nothing is put before or behind it."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _behind(
        self, answer: Message | None, messages: Sequence[Message], end: str, tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        """What the template puts behind an ``answer`` that may have ended by ``end``. Raises `TextError`."""
        results = any(message.get("role") == "tool" for message in messages)
        if tools and not results and self._tells_again(tools):
            tools = None
        if calls := (answer or {}).get("tool_calls"):
            ends = [[end], self._special.values()]
            if text := between.behind_calls(self._asking, calls, messages, ends, tools):
                return text
        if (behind := between.behind_answer(self._asking, messages, tools)) is None:
            raise TextError("the chat template leaves out what the assistant said; it cannot be used in turns")
        return behind

    def lost_call(self, answer: Message, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """See `between.lost_call`."""
        return between.lost_call(self._asking, answer, tools)

    @cached_property
    def _tells_again(self) -> between.ToldAgain:
        return between.ToldAgain(self._asking)

    def _asking(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """A chat up to where the next answer begins."""
        return str(self._render(messages, True, tools))

    @cached_property
    def _special(self) -> dict[int, str]:
        """Tokens that are no text, by their ids."""
        return special_tokens(self._tokenizer)

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row, special tokens left out; thoughts that these alone tell apart stand in ``<think>``."""
        if self.channels:
            return [self.channels.text(row) for row in rows]
        return self._decoded(rows)

    @cached_property
    def channels(self) -> Channels | None:
        """Where special tokens tell apart what is thought, said and asked of tools, as gpt-oss'."""
        return Channels.of(self._special, lambda row: self._decoded([row])[0])

    def _decoded(self, rows: Sequence[Sequence[int]]) -> list[str]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:  # one call into the tokenizer's own threads instead of one a row
            return backend.decode_batch([list(row) for row in rows], skip_special_tokens=True)
        return [self._tokenizer.decode(row, skip_special_tokens=True) for row in rows]

    def spelled(self, row: Sequence[int]) -> list[tuple[str, bytes | None]]:
        """Each token's own text, and the UTF-8 bytes that it adds to the text of the row: none of a special one, of
        others maybe a part of a character. None where the tokenizer does not tell."""
        marks, texts = self._tokenizer.convert_ids_to_tokens(list(row)), self._decoded([[token] for token in row])
        return spelled([self._special.get(token) for token in row], marks, texts)

    def decode_marked(self, row: Sequence[int]) -> str:
        """The text of a turn with its special tokens, but for the one that ends it."""
        ended = bool(row) and (row[-1] in self._tokenizer.all_special_ids or row[-1] in self.stop_ids)
        return self._tokenizer.decode(row[:-1] if ended else row, skip_special_tokens=False)

    def begins_thought(self, given: np.ndarray) -> bool:
        """What stands before an answer, ``given``, ends with a thought's beginning, as templates of models have it that
        always think."""
        return self.decode_whole(given[-MOST_OF_TAG:]).rstrip().endswith(THINK)

    def decode_whole(self, given: np.ndarray) -> str:
        """The text of ``given``, int32 ``[tokens]``, special tokens and all."""
        text: str = self._tokenizer.decode(given.tolist(), skip_special_tokens=False)
        return text

    @property
    def has_response_template(self) -> bool:
        """It knows how what its model says is parsed."""
        return getattr(self._tokenizer, "response_template", None) is not None

    def parse_response(self, text: str, tools: list[dict[str, Any]] | None, before: str = "") -> Any:
        """A turn as a message, by the tokenizer's ``response_template``; ``before``: what stands before it."""
        before = before or self._render([{"role": "user", "content": "?"}], True, tools)
        return self._tokenizer.parse_response(text, prefix=before, tools=tools)

    @property
    def plain(self) -> Any:
        """The library's own object."""
        return self._tokenizer

    def special_ids(self, texts: Sequence[str]) -> set[int]:
        """Of those ``texts`` that are special tokens, which no decoded text shows."""
        return {id for id, text in self._special.items() if text in texts}
