"""A row that is no prompt costs itself alone, whatever is wrong with it."""

from __future__ import annotations

import datetime
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from penstock.pipeline.config import Config
from penstock.pipeline.models.characters import characters_of
from penstock.pipeline.preflight.look import look
from penstock.protocols import wire
from penstock.protocols.experience import Prompt
from penstock.services.data import DataError, json_rows, open_source
from penstock.services.data.config import CustomData, HubData, ReasoningGymData, says_sources
from penstock.services.data.hub import make_prompt, without_nulls
from penstock.services.data.json_rows import JsonRows
from penstock.services.data.source import PromptSource
from penstock.services.data.written import line
from penstock.services.runtime.user_folders import VARIABLE


def pictures(folder: Path, **config: Any) -> Any:
    """Rows with a picture, of which one is none."""
    rows = {"prompt": ["1+1=", "1+2="], "truth": ["2", "3"], "picture": [{"bytes": b"no picture", "path": None}] * 2}
    kinds = {"prompt": datasets.Value("string"), "truth": datasets.Value("string"), "picture": datasets.Image()}
    datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)).to_parquet(folder / "rows.parquet")
    return open_source(HubData(path="parquet", files=[str(folder / "rows.parquet")], chat=False, **config))


def test_what_no_column_of_the_prompt_has_is_not_decoded(tmp_path: Path) -> None:
    rows = pictures(tmp_path, truth_key="truth")
    assert [(row.text, row.truth) for row in rows] == [("1+1=", "2"), ("1+2=", "3")]


def test_a_cell_that_cannot_be_decoded_costs_its_row(tmp_path: Path) -> None:
    rows = pictures(tmp_path)
    with pytest.raises(DataError, match="row 1: "):
        rows[1]


def test_a_generator_that_raises_costs_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    rows: Any = open_source(ReasoningGymData(task="chain_sum", size=2))
    monkeypatch.setattr(rows, "_tasks", [{"question": "1+1=", "metadata": {(1, 2): 3}}, {"question": "1+2="}])
    with pytest.raises(DataError, match="row 0: TypeError: keys must be"):
        rows[0]
    assert rows[1].text == "1+2="


def test_evaluations_draw_other_tasks_than_training_by_the_same_seed() -> None:
    pytest.importorskip("reasoning_gym")
    config = ReasoningGymData(task="chain_sum", size=20, options={"min_terms": 4, "min_digits": 4})
    trained, held_out = ({prompt.text for prompt in open_source(config, each)} for each in (False, True))
    assert len(trained) == len(held_out) == 20 and not trained & held_out


def in_json(folder: Path, text: str, **config: Any) -> Any:
    (folder / "rows.jsonl").write_text(text)
    return open_source(HubData(path="json", files=[str(folder / "rows.jsonl")], **config))


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_what_json_has_is_what_a_reward_is_told(tmp_path: Path) -> None:
    """Dates among it, which stay the texts that they are."""
    truths = ["2024-01-05", "2024-01-06T10:00:00Z", "10:30", "007"]
    rows = [{"prompt": f"on {truth}", "truth": truth, "made": "2024-01-05 10:00:00"} for truth in truths]
    assert [row.truth for row in in_json(tmp_path, lines(*rows), truth_key="truth")] == truths
    assert in_json(tmp_path, lines(*rows))[0].truth == rows[0]
    mixed = [{"prompt": "a", "truth": {"a": 1}}, {"prompt": "b", "truth": {"b": [1, "2"]}}, {"prompt": "c"}]
    assert [row.truth for row in in_json(tmp_path, lines(*mixed))] == [*mixed[:2], {"prompt": "c", "truth": None}]


BOXED = "{prompt}\n\nPut the answer in \\boxed{}."


def test_a_template_stands_around_the_text_or_the_users_last_message(tmp_path: Path) -> None:
    said = "{2+2}?\n\nPut the answer in \\boxed{}."
    talk = [{"role": role, "content": "{2+2}?"} for role in ("user", "assistant", "user", "tool")]
    rows = in_json(tmp_path, lines({"prompt": "{2+2}?"}), template=BOXED, chat=False)
    assert rows[0].text == said
    rows = in_json(tmp_path, lines({"prompt": talk}, {"prompt": talk[1:2] * 2}), template=BOXED, answer_key="prompt")
    assert [m["content"] for m in rows[0].messages] == [said] and rows[0].answer[0]["content"] == "{2+2}?"
    with pytest.raises(DataError, match=r"row 1: .*the user says nothing"):
        rows[1]
    rows = in_json(tmp_path, lines({"prompt": talk}), template=BOXED, system="{prompt}")
    assert [m["content"] for m in rows[0].messages] == ["{prompt}", "{2+2}?", "{2+2}?", said, "{2+2}?"]
    (tmp_path / "own.jsonl").write_text(line({"prompt": "{2+2}?", "truth": "4"}))
    given = {"function": "penstock.services.data.written:Written", "options": {"file": str(tmp_path / "own.jsonl")}}
    assert open_source(CustomData(**given, template=BOXED))[0].as_text() == said


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_a_row_says_what_the_chat_template_is_told_over_what_its_source_says(tmp_path: Path, kind: str) -> None:
    told: list[Any] = [{"level": "high"}, {"enable_thinking": True}, None]
    if kind == "csv":
        told = [each and json.dumps(each) for each in told]
    rows = [{"prompt": "a", "truth": "1", "told": each} for each in told]
    file = tmp_path / f"rows.{kind}"
    made = datasets.Dataset.from_list(rows)
    {"jsonl": made.to_json, "parquet": made.to_parquet, "csv": made.to_csv}[kind](file)
    path = "json" if kind == "jsonl" else kind
    ours: dict[str, Any] = {"path": path, "files": [str(file)], "truth_key": "truth"}
    of_source, key = {"enable_thinking": False}, {"chat_template_kwargs_key": "told"}
    found = [open_source(HubData(**ours, **key, chat_template_kwargs=each)) for each in ({}, of_source)]
    assert [row.chat_template_kwargs for row in found[0]] == [{"level": "high"}, {"enable_thinking": True}, None]
    assert hash(Prompt(index=0, text="a")) == hash(Prompt(index=0, text="a")), "a user's dict may have it for a key"
    wanted = [{**of_source, "level": "high"}, {"enable_thinking": True}, of_source]
    assert [row.chat_template_kwargs for row in found[1]] == wanted
    back = Prompt.model_validate(wire.unpack(wire.pack(found[1][0].model_dump())))
    assert back == found[1][0]
    (tmp_path / "own.jsonl").write_text("".join(line({**row, "chat_template_kwargs": row["told"]}) for row in rows))
    given = {"function": "penstock.services.data.written:Written", "options": {"file": str(tmp_path / "own.jsonl")}}
    own = open_source(CustomData(**given, chat_template_kwargs=of_source))
    assert [row.chat_template_kwargs for row in own] == wanted


@pytest.mark.parametrize(
    ("told", "why"),
    [("{a", "it is no JSON: {a"), ({"tools": None, "eos_token": 1}, "eos_token is not"),
     (["a"], "it is no map"), ({"tools": []}, "tools is not for a prompt to say"),
     ({"eos_token": "a"}, "eos_token is not for a prompt"), ({"level": float("nan")}, "cannot be written as JSON"),
     ({"level": "\ud83d"}, "cannot be written as JSON"), ({1: "a"}, "it is no map"),
     ({f"a{i}": 1 for i in range(65)}, "it has 65 names"), ({"level": "a" * 70_000}, "it has 70,013 characters")],
)  # fmt: skip
def test_what_no_chat_template_can_be_told_costs_its_row(told: Any, why: str) -> None:
    with pytest.raises(DataError, match=f"row 3: its chat_template_kwargs: .*{why}"):
        make_prompt(3, "hi", "1", True, None, chat_template_kwargs=told)


@pytest.mark.parametrize("form", ["a line each", "one list", "with a mark and empty lines", "compressed"])
def test_json_files_come_in_several_forms(tmp_path: Path, form: str) -> None:
    rows = [{"prompt": "a\u2028b", "truth": "x"}, {"prompt": "b", "truth": "y"}, {"prompt": "c", "truth": "z"}]
    text = json.dumps(rows, indent=1) if form == "one list" else lines(*rows)
    if form == "with a mark and empty lines":
        text = "\ufeff" + text.replace("\n", "\n\n")
    name = "rows.jsonl.gz" if form == "compressed" else "rows.jsonl"
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if form == "compressed" else text.encode())
    files = [str(tmp_path / name)] * 2
    found = open_source(HubData(path="json", files=files, truth_key="truth", chat=False, limit=5))
    assert [(row.text, row.truth) for row in found] == ([(r["prompt"], r["truth"]) for r in rows] * 2)[:5]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            lines(*[{"prompt": "a", "truth": n} for n in range(10_001)], {"prompt": "a", "truth": "7"}),
            r"files.0: .*rows.jsonl, line 10002: 'truth' is text, and a number in line 1; a column has one type",
        ),
        (
            '[{"prompt": "a", "truth": 1},\n {"prompt": "b", "truth": "2"}]',
            "row 2: 'truth' is text, and a number in row 1",
        ),
        ('[{"prompt": "a"},\n {"prompt" "b"}]', "line 2: not JSON"),
        (lines({"prompt": "a", "truth": "x"}) + "\n[3]\n", "line 3: a list; each must be a map of columns"),
    ],
)
def test_what_is_wrong_with_json_is_named_wherever_it_is(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        in_json(tmp_path, text, truth_key="truth")


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_a_split_has_a_part_of_the_rows_of_local_files(tmp_path: Path, kind: str) -> None:
    file = str(tmp_path / f"rows.{kind}")
    rows = datasets.Dataset.from_dict({"prompt": [f"q{number}" for number in range(100)]})
    getattr(rows, f"to_{kind}")(file)

    def split(text: str, **config: Any) -> list[str | None]:
        return [row.text for row in open_source(HubData(path=kind, files=[file], chat=False, split=text, **config))]

    every = [f"q{number}" for number in range(100)]
    assert split("train") == every
    assert (split("train[:90%]"), split("train[90%:]")) == (every[:90], every[90:])
    assert split("train[10:20]", limit=3) == every[10:13]
    assert split("train[-5:]+train[:1]") == [*every[-5:], "q0"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"split": "test"}, r"prompts.train.split: 'test': .*local files are one split, train"),
        ({"split": "train[:x]"}, r"prompts.train.split: 'train\[:x\]': .*such as train\[:90%\]"),
        ({"split": "train[2:2]"}, r"prompts.train.split: 'train\[2:2\]' has none of the 3 rows of .*rows.jsonl"),
        ({"name": "main"}, r"prompts.train.name: 'main' is of a dataset on the hub, and `files` have none"),
    ],
)
def test_what_local_files_do_not_have_is_refused(tmp_path: Path, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        in_json(tmp_path, lines(*[{"prompt": "a"}] * 3), **given)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes('{"prompt": "für"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"files.0: cannot read .*rows.jsonl: UnicodeDecodeError.*must be UTF-8"):
        open_source(HubData(path="json", files=[str(tmp_path / "rows.jsonl")]))


def test_a_pattern_names_all_files_that_match_it_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").mkdir()
    monkeypatch.chdir(tmp_path / "config")
    monkeypatch.setenv(VARIABLE, json.dumps([str(tmp_path)]))
    for name in ("b", "a/b", "a/a"):
        file = tmp_path / "data" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(lines({"prompt": name}))
    (tmp_path / "first.jsonl").write_text(lines({"prompt": "first"}))
    config = HubData(path="json", files=["first.jsonl", "data/**/*.jsonl"], chat=False)
    assert [row.text for row in open_source(config)] == ["first", "a/a", "a/b", "b"]
    file.write_text("[")
    with pytest.raises(DataError, match="files.1: .*a/a.jsonl, line 1"):
        open_source(config)


def test_types_are_compared_over_files(tmp_path: Path) -> None:
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file, truth in zip(files, (1, "1"), strict=True):
        file.write_text(lines({"prompt": "a", "truth": truth}))
    with pytest.raises(DataError, match=r"two.jsonl, line 1: 'truth' is text, and a number in .*one.jsonl, line 1"):
        open_source(HubData(path="json", files=list(map(str, files))))


def test_a_column_of_dates_is_named_at_the_start(tmp_path: Path) -> None:
    day = datetime.datetime(2024, 1, 5)
    rows = {"prompt": ["a"], "truth": ["x"], "made": [{"timestamp": "a", "when": [day]}]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
    config: dict[str, Any] = {"path": "parquet", "files": [str(tmp_path / "rows.parquet")]}
    assert open_source(HubData(**config, truth_key="truth"))[0].truth == "x"
    with pytest.raises(DataError, match=r"prompts.train.truth_key: the column 'made' of .* has dates"):
        open_source(HubData(**config))


def test_only_an_empty_cell_of_a_csv_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,truth\nWhich letters?,NA\nq,None\nr,null\ns,\n")
    rows = open_source(HubData(path="csv", files=[str(tmp_path / "rows.csv")], truth_key="truth"))
    assert [rows[i].truth for i in range(3)] == ["NA", "None", "null"]
    with pytest.raises(DataError, match="row 3: 'truth' is missing"):
        rows[3]


def test_a_csv_column_has_numbers_where_all_of_its_cells_are_some(tmp_path: Path) -> None:
    """However many rows there are: a part of a column alone would say something else."""
    head, rest = "q,007,1,2.5,NA\n", "q,3.10,2,1e3,5\n" * 11_000 + "q,NA,,-.5,6\n"
    (tmp_path / "rows.csv").write_text(f"prompt,text,whole,broken,other\n{head}{rest}")
    rows = open_source(HubData(path="csv", files=[str(tmp_path / "rows.csv")]))
    first, middle, last = (rows[place].truth for place in (0, 10_999, 11_001))
    assert first == {"prompt": "q", "text": "007", "whole": 1, "broken": 2.5, "other": "NA"}
    assert middle == {"prompt": "q", "text": "3.10", "whole": 2, "broken": 1000.0, "other": "5"}
    assert last == {"prompt": "q", "text": "NA", "whole": None, "broken": -0.5, "other": "6"}


@pytest.mark.parametrize(
    ("truth_key", "truth"), [("answer", 7), (None, {"prompt": "3+4", "answer": 7}), ("prompt", "3+4")]
)
def test_an_answer_of_digits_is_the_text_that_a_csv_file_has(tmp_path: Path, truth_key: str | None, truth: Any) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\n3+4,007\n3+3,6\n5+5,\n")
    data = HubData(path="csv", files=[str(tmp_path / "rows.csv")], truth_key=truth_key, answer_key="answer")
    rows = open_source(data)
    assert (rows[0].truth, rows[0].answer, rows[1].answer) == (truth, "007", "6")
    with pytest.raises(DataError, match="row 2: 'answer' is missing"):
        rows[2]


def test_an_answer_that_is_no_text_is_told_of_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "3+4", "answer": 7}')
    rows = open_source(HubData(path="json", files=[str(tmp_path / "rows.jsonl")], answer_key="answer"))
    with pytest.raises(DataError, match=r"row 0: 'answer' \(answer_key\) is a number, not text.*as text: 7"):
        rows[0]


def test_a_comma_at_the_end_of_each_line_of_a_csv_file_is_no_cell(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer,level\n1+1=,two,easy,\n2+2=,four,hard,\n")
    rows = open_source(HubData(path="csv", files=[str(tmp_path / "rows.csv")], truth_key="answer", chat=False))
    assert [(row.text, row.truth) for row in rows] == [("1+1=", "two"), ("2+2=", "four")]


@pytest.mark.parametrize("line", ["1+1=,two,easy,more", "1+1=,two,easy\n2+2=,four,hard,more"])
def test_a_cell_of_a_csv_file_without_a_column_is_an_error(tmp_path: Path, line: str) -> None:
    (tmp_path / "rows.csv").write_text(f"prompt,answer,level\n{line}\n")
    with pytest.raises(DataError, match=r"prompts.train.files: cannot read .*rows.csv: Parser(Warning|Error): "):
        open_source(HubData(path="csv", files=[str(tmp_path / "rows.csv")], truth_key="answer"))


def test_integers_that_no_message_has_room_for_are_text_in_a_csv_file_and_an_error_in_a_json_file(
    tmp_path: Path,
) -> None:
    large = str(98765432109**2 * 3)
    (tmp_path / "rows.csv").write_text(f"prompt,truth\n3*4=,12\nmuch=,{large}\n")
    rows = open_source(HubData(path="csv", files=[str(tmp_path / "rows.csv")], truth_key="truth"))
    assert [rows[i].truth for i in range(2)] == ["12", large]
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "a", "truth": 1}}\n{{"prompt": "b", "truth": {large}}}\n')
    with pytest.raises(DataError, match="line 2: 'truth' is an integer of more than 64 bits; put it into quotes"):
        open_source(HubData(path="json", files=[str(tmp_path / "rows.jsonl")], truth_key="truth"))


def test_a_key_that_only_other_messages_have_is_not_told() -> None:
    said = [{"role": "user", "content": "hi", "name": None}, {"role": "user", "content": "hi", "name": "b"}]
    assert make_prompt(0, said, "1", True, None).messages == [{"role": "user", "content": "hi"}, said[1]]
    with pytest.raises(DataError, match="content of message 0 is null, not text"):
        make_prompt(0, [{"role": "user", "content": None}], "1", True, None)


ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "number"}}}}}


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}, **more}]}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_conversations_with_calls_of_tools_are_read_as_data_sets_have_them(tmp_path: Path, kind: str) -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "1+1"}, {"type": "text", "text": "=?"}]}
    result = {"role": "tool", "content": "2", "tool_call_id": "c1"}
    talk = [asked, {**called('{"a": 1}', id="c1", type="function"), "content": None}, result]
    last = {"role": "assistant", "content": "2", "tool_calls": []}
    other = {**ADD, "function": {"name": "now", "description": "The time."}}
    rows = [{"talk": [*talk, last], "tools": [ADD, other]}, {"talk": [*talk[:2]], "tools": [ADD]}]
    file = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text(lines(rows[0], {**rows[1], "tools": [ADD]}))
    else:
        rows = json.loads(json.dumps(rows))
        rows[0]["talk"][0]["content"] = "1+1=?"  # a column has one type
        datasets.Dataset.from_list([{**rows[0]}, {**rows[1], "talk": [rows[0]["talk"][0], talk[1]]}]).to_parquet(file)
    path = "json" if kind == "jsonl" else kind
    keys = {"prompt_key": "talk", "answer_key": "talk", "tools_key": "tools", "truth_key": "talk"}
    source = open_source(HubData(path=path, files=[str(file)], **keys))
    said = [{"role": "user", "content": "1+1=?"}, {"content": "", **called({"a": 1}, type="function", id="c1")}, result]
    assert (source[0].messages, source[0].answer) == (said, [{"role": "assistant", "content": "2"}])
    assert (source[1].messages, source[1].answer) == (said[:1], [said[1]])
    assert (source[0].tools, source[1].tools) == ([ADD, other], [ADD]), "no nulls of a table"
    assert source[0].as_text() == '1+1=?\n\n{"name": "add", "arguments": {"a": 1}}\n\n2'
    back = Prompt.model_validate(wire.unpack(wire.pack(source[0].model_dump())))
    assert back == source[0] and json.loads(json.dumps(back.model_dump()))


@pytest.mark.parametrize(
    ("message", "tools", "why"),
    [
        ({"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}, None, "call 0 of message 1 .*OpenAI"),
        (called("{a: 1}"), None, r"call 0 of message 1 \(add\) has arguments that are no map, nor JSON of one: {a: 1}"),
        ({"role": "user", "content": [{"type": "image"}]}, None, "message 1 has a part that is no text .*images_key"),
        ({"role": "user", "content": "", "weight": 1}, None, "weight of message 1 is 1, not text"),
        (called({}), '[{"type": ', "tools are no JSON"),
        (called({}), ["add"], "tools are no list of maps"),
    ],
)
def test_a_call_or_a_tool_that_is_none_costs_its_row(message: dict[str, Any], tools: Any, why: str) -> None:
    with pytest.raises(DataError, match=f"row 3: .*{why}"):
        make_prompt(3, [{"role": "user", "content": "hi"}, message], "1", True, None, "yes", tools=tools)
    assert make_prompt(3, "hi", "1", True, None, tools=json.dumps([ADD])).tools == [ADD]


class Odd(PromptSource):
    """Whose second row raises."""

    def __len__(self) -> int:
        return 3

    def prompt(self, index: int) -> Prompt:
        if index == 1:
            raise KeyError("question")
        return Prompt(index=index, text="1+1=")


def test_whatever_a_source_raises_is_an_error_of_the_row() -> None:
    rows = Odd()
    assert [row.index for row in rows[::2]] == [0, 2]
    for ask in (lambda: rows[1], lambda: rows[:], lambda: list(rows)):
        with pytest.raises(DataError, match="row 1: KeyError: 'question'"):
            ask()


def test_a_rows_own_answer_is_its_columns_or_the_last_message_of_its_conversation(tmp_path: Path) -> None:
    say = [{"role": role, "content": text} for role, text in (("user", "1+1="), ("assistant", "2"), ("user", "+1="))]
    last, other = {"role": "assistant", "content": "3"}, {"role": "user", "content": "thanks"}
    text = lines({"prompt": "1+1=", "own": "2, since"}, {"prompt": "1+2="})
    rows = in_json(tmp_path, text, answer_key="own", truth_key="prompt", chat=False)
    assert (rows[0].text, rows[0].answer, rows[0].truth) == ("1+1=", "2, since", "1+1=")
    with pytest.raises(DataError, match="row 1: 'own' is missing or null, so there is no answer to give"):
        rows[1]
    every = [[*say, last, other], say[:1], [*say, {**last, "reasoning_content": "two and one", "name": None}]]
    talks = in_json(tmp_path, lines(*({"talk": talk} for talk in every)), prompt_key="talk", answer_key="talk")
    assert (talks[0].messages, talks[0].answer) == (say, [last])
    assert talks[2].answer == [{**last, "reasoning_content": "two and one"}]
    with pytest.raises(DataError, match="row 1: no conversation in which the assistant says something"):
        talks[1]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_rows_other_answer_is_its_columns_or_the_last_message_of_its_conversation(tmp_path: Path, kind: str) -> None:
    file, rows = tmp_path / f"rows.{kind}", [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]
    made = datasets.Dataset.from_list(rows)
    (made.to_json if kind == "jsonl" else made.to_csv)(file)
    path = "json" if kind == "jsonl" else kind
    source = open_source(HubData(path=path, files=[str(file)], answer_key="chosen", rejected_key="rejected"))
    assert (source[0].answer, source[0].rejected) == ("2", "3")
    asked, other = {"role": "user", "content": "1+1="}, {"role": "user", "content": "1+2="}
    said = [{"role": "assistant", "content": text} for text in "23"]
    talks = [{"chosen": [first, said[0]], "rejected": [asked, said[1]]} for first in (asked, other)]
    keys = {"prompt_key": "chosen", "answer_key": "chosen", "rejected_key": "rejected"}
    rows_of = in_json(tmp_path, lines(*talks, {"chosen": [asked, said[0]], "rejected": None}), **keys)
    assert (rows_of[0].messages, rows_of[0].answer, rows_of[0].rejected) == ([asked], [said[0]], [said[1]])
    in_parts = {**asked, "content": [{"type": "text", "text": "1+1="}], "name": None}
    (alike,) = in_json(tmp_path, lines({"chosen": [asked, said[0]], "rejected": [in_parts, said[1]]}), **keys)
    assert alike.rejected == [said[1]]
    assert {"Ж", "!"} <= characters_of([alike.model_copy(update={"rejected": "Ж!"})], False, True)
    with pytest.raises(DataError, match="row 1: its two conversations .* begin otherwise"):
        rows_of[1]
    with pytest.raises(DataError, match="row 2: 'rejected' is missing or null, so there is no answer .*rejected_key"):
        rows_of[2]


def test_a_file_is_looked_at_once_unless_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of millions of rows that takes minutes, each time that a broker starts."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "truth": 1}\n{"prompt": "b", "truth": null, "more": null}\n')
    first = JsonRows([file], "files")
    parsed: list[str] = []
    monkeypatch.setattr(json_rows, "_parsed", lambda text, *_: parsed.append(text) or json.loads(text))
    again = JsonRows([file], "files")
    assert not parsed and again.column_names == first.column_names == ["prompt", "truth", "more"]
    assert again[1] == first[1] == {"prompt": "b", "truth": None, "more": None}
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "c", "truth": "1"}\n')
    with pytest.raises(DataError, match=r"files.1: .*other.jsonl, line 1: 'truth' is text, and a number in .*rows"):
        JsonRows([file, other], "files")
    file.write_text('{"prompt": "a", "truth": 1}\n{"prompt": "b", "truth": "two"}\n')
    with pytest.raises(DataError, match="line 2: 'truth' is text, and a number in line 1"):
        JsonRows([file], "files")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_truth_inside_a_map_and_a_rows_own_source_are_read_as_verl_writes_them(tmp_path: Path, kind: str) -> None:
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": "1+1="}],
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra": {"index": 1},
        }
        for source, truth in (("sums", "2"), ("words", "b"), ("", "c"))
    ]
    file = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        datasets.Dataset.from_list(rows).to_parquet(file)
    keys = {"truth_key": "reward_model.ground_truth", "source_key": "data_source"}
    config = HubData(path="json" if kind == "jsonl" else "parquet", files=[str(file)], **keys)
    source = open_source(config)
    assert [(source.prompt(i).source, source.prompt(i).truth) for i in (0, 1)] == [("sums", "2"), ("words", "b")]
    with pytest.raises(DataError, match="row 2: 'data_source' \\(source_key\\) is '', which names no source"):
        source.prompt(2)
    with pytest.raises(DataError, match="'reward_model.answer' is missing or null"):
        open_source(config.model_copy(update={"truth_key": "reward_model.answer"})).prompt(0)
    with pytest.raises(DataError, match="truth_key: no column 'model.ground_truth' in .*; it has data_source, prompt"):
        open_source(config.model_copy(update={"truth_key": "model.ground_truth"}))
    assert says_sources(config) and not says_sources(config.model_copy(update={"source_key": None}))


def test_what_a_table_adds_to_maps_is_none_of_a_calls_arguments_also_where_it_is_called_content() -> None:
    call = {"function": {"name": "read", "arguments": {"path": "x", "content": None}}}
    (message,) = without_nulls([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["content"] is None and message["tool_calls"][0]["function"]["arguments"] == {"path": "x"}


def test_columns_that_no_chat_template_is_told_of_are_named(tmp_path: Path) -> None:
    """By name they are what TRL tells it; of rows that are no chat nobody is told."""
    row = {"prompt": "1+1=", "answer": "2", "tools": [], "chat_template_kwargs": {"level": "low"}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    data = {"type": "hub", "path": "json", "files": [str(tmp_path / "rows.jsonl")], "truth_key": "answer"}
    parts = {"left": {**data, "tools_key": "tools"}, "right": {**data, "chat": False}}
    given = {"model": {"type": "tiny"}, "prompts": {"train": {"type": "mix", "sources": parts}}}
    notes = [note for note in look(Config.model_validate(given), tmp_path).notes if "no chat template" in note]
    assert notes == [
        "prompts.train.sources.left: rows have a column chat_template_kwargs, and nothing names it, so that no chat "
        "template is told of it; where it should be, set prompts.train.sources.left.chat_template_kwargs_key="
        "chat_template_kwargs"
    ]
