"""What a chat template is told beside the messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.config import Config
from penstock.pipeline.models.tiny import ALPHABET, make_tokenizer
from penstock.pipeline.preflight.model import _encode
from penstock.pipeline.preflight.report import Report
from penstock.services.runtime.errors import SetupError
from penstock.services.turns.tokenizer import Tokenizer

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
