"""The built-in reward functions, called as a reward process calls them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

import pytest

from penstock.services.reward.functions import judge as judging
from penstock.services.reward.functions.exact_match import exact_match
from penstock.services.reward.functions.judge import judge
from penstock.services.reward.functions.math_verify import math_verify
from penstock.services.reward.functions.number import number
from penstock.services.reward.functions.overlong import overlong
from penstock.services.runtime import asking
from penstock.services.runtime.asking import AskingError
from tests.reward.serving import serving


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        (r"so it is $\boxed{\frac{1}{2}}$", "0.5", 1.0),
        (r"so it is $\boxed{\frac{1}{2}}$", r"\frac{2}{4}", 1.0),
        (r"$x = 3$ and then \boxed{4}", "4", 1.0),
        ("the answer is 1,200", "1200", 1.0),
        (r"\boxed{\{1, 2\}}", r"$\{2, 1\}$", 1.0),
        (r"\boxed{7}", "8", 0.0),
        (r"\boxed{3\pi}", r"3\pi", 1.0),
        (r"\boxed{3}", r"3\pi", 0.0),
        (r"\boxed{2}", r"2\sqrt{3}", 0.0),
        (r"\boxed{1024}", "2^{10}", 1.0),
        (r"\boxed{10}", "10!", 0.0),
        (r"\boxed{3+4i}", "3+4i", 1.0),
        (r"\boxed{3, 1, 2}", "1,2,3", 1.0),
        (r"\boxed{3\pi}", r"3\pi \text{ square feet}", 1.0),
        (r"\boxed{1000}", "1,000", 1.0),
        (r"\boxed{5}", "5 cm", 1.0),
        (r"\boxed{20}", "20 cm^2", 1.0),
        (r"\boxed{5}", "The answer is 5", 1.0),
        (r"\boxed{7}", "3 + 4 = <<3+4=7>>7 apples\n#### 7", 1.0),
        ("The answer is 1500.", "1.5e3", 1.0),
        (r"\boxed{0.0001}", 1e-4, 1.0),
        (r"\boxed{0.0002}", 1e-4, 0.0),
        ("I do not know", "8", 0.0),
        ("", 12, 0.0),
        (r"\boxed{5}? No: 2 + 4 is \boxed{6}.", "6", 1.0),
        (r"\boxed{5}? No: 2 + 4 is \boxed{6}.", "5", 0.0),
        (r"\boxed{5}? No, $\boxed{1}$, so $x_1=\boxed{2}$ and $x_2 = \boxed{3}$", "2,3", 1.0),
        (r"\boxed{\{1\}} no, \boxed{1} and \boxed{2}", "1,2", 1.0),
        (r"\boxed{1}, \boxed{2}, and \boxed{3}", "1,2,3", 1.0),
        (r"\boxed{5}, no, $\boxed{\boxed{6}}$ is my answer in a \boxed{}", "6", 1.0),
        (r"\boxed{6}", r"It is \boxed{5}; no, it is \boxed{6}", 1.0),
        (r"\boxed{3e8}", "3e8", 1.0),
        ("The answer is 3e8.", "3e8", 1.0),
        ("The answer is -1.6e-19.", "-1.6E-19", 1.0),
        (r"\boxed{1.5e3}", "1500", 1.0),
        (r"\boxed{-1.5e3}", "-1500", 1.0),
        (r"\boxed{0.0015}", "1.5e-3", 1.0),
        (r"\boxed{1.6\times 10^{-19}\text{ C}}", "1.6e-19", 1.0),
        (r"\boxed{9.9\times 10^{-19}}", "1.6e-19", 0.0),
        (r"\boxed{9.9\cdot 10^{-19}}", r"1.6 \times 10^{-19}", 0.0),
        (r"\boxed{0}", "1.6e-19", 0.0),
        (r"\boxed{6.02\times 10^{23}}", "6.02E+23", 1.0),
        (r"\boxed{6.02e23}", r"6.02\times 10^{23}", 1.0),
        (r"\boxed{6.03\times 10^{23}}", "6.02E+23", 0.0),
        (r"\boxed{2e-1}", "2e - 1", 1.0),
        ("1" * 5000 + "e1", "8", 0.0),
        (r"\boxed{x^3\times 10^2}", r"100x^3", 1.0),
        (r"\boxed{6}, or so I thought until \boxed{7", "6", 1.0),
    ],
)
def test_mathematics_is_compared_by_what_it_is_worth(answer: str, truth: Any, reward: float) -> None:
    assert math_verify(answer, truth) == reward


@pytest.mark.parametrize("truth", ["12", "12.0"])
def test_numbers_are_compared_to_so_many_digits_whole_ones_too(truth: str) -> None:
    assert [math_verify(r"\boxed{12.001}", truth, digits) for digits in (2, 3)] == [1.0, 0.0]
    assert [math_verify(r"\boxed{12}", "12.001", digits) for digits in (2, 3)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("so it is -5", "-5"),
        ("so it is \N{MINUS SIGN}5", "-5"),
        ("so 10-5", "5"),
        ("between x-3 and 7-3", "3"),
        ("the roots are 1,2,3", "3"),
        ("from 1, to 1000,200", "200"),
        ("1,234,567.5 in all", "#### 1,234,567.5"),
        ("$1{,}000$", "1000"),
        ("= .5", "0.5"),
        ("-.5", "-0.5"),
        ("it is 18.", "18"),
        ("12,", "12"),
        ("it costs 1,00,000", "100000"),
        ("a loss of -$5", "-5"),
        (r"so $-\$1,200.50$", "-1200.5"),
        ("from $10-$5", "5"),
        ("it is $5", "5"),
    ],
)
def test_the_last_number_is_read_as_people_write_it(answer: str, truth: str) -> None:
    assert number(answer, truth) == 1.0


@pytest.mark.parametrize("function", [exact_match, number, math_verify])
def test_no_truth_and_a_whole_row_are_nothing_to_compare_with(function: Callable[..., float]) -> None:
    with pytest.raises(TypeError, match="this prompt has none"):
        function("None", None)
    with pytest.raises(TypeError, match="set truth_key to what has the answer, one of question, answer"):
        function("4", {"question": "2 + 2?", "answer": "4"})


def test_what_was_only_thought_is_no_part_of_an_answer() -> None:
    assert exact_match("<think>Rome?</think>\n\nParis", "Paris") == exact_match("Rome?</think> Paris", "Paris") == 1.0
    assert exact_match("<think>Rome?</think>\n\nParis", "Paris", strip=False) == 1.0
    assert exact_match(" Paris", "Paris", strip=False) == 0.0 == exact_match("<think>Paris", "Paris")


def test_overlong_answers_lose_evenly() -> None:
    assert [overlong(length, longest=100, buffer=20) for length in (10, 80, 90, 100, 500)] == [0, 0, -0.5, -1, -1]
    with pytest.raises(ValueError, match="buffer=200"):
        overlong(1, longest=100, buffer=200)


class Server(BaseHTTPRequestHandler):
    """Answers with what is next in `script`: a status and a body, or a body."""

    script: ClassVar[list[Any]] = []
    asked: ClassVar[list[float]] = []
    body: ClassVar[dict[str, Any]] = {}

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Server.body = body
        self.asked.append(time.monotonic())
        status, body = self.script.pop(0)
        if body.isdigit() or body.startswith("grade"):
            body = f'{{"choices": [{{"message": {{"content": "{body}"}}}}]}}'
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", body if body[-1].isdigit() or body.endswith("GMT") else "1")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(asking, "FIRST_WAIT_S", 0.05)
    judging._grades.clear(), Server.asked.clear()
    with serving(Server) as address:
        yield f"{address}/v1"


def ask(url: str, response: str, *script: tuple[int, str]) -> float:
    Server.script[:] = script
    return asyncio.run(judge(response, "1 + 1?", "2", url=url, model="m"))


def test_a_judge_is_asked_again_while_it_is_busy_and_never_twice_the_same(url: str) -> None:
    assert ask(url, "2", (500, "oops"), (429, "later"), (200, "grade: 8")) == 0.8
    assert len(Server.asked) == 3 and Server.asked[2] - Server.asked[1] >= 0.9, "it asked for a second"
    assert ask(url, "2") == 0.8  # remembered: the script has nothing more to say
    assert ask(url, "3", (200, "1")) == 0.1


@pytest.mark.parametrize(
    "reply",
    ["8", "grade: 8/10", "grade **8** / **10**", "grade: 8 (out of 10)", "grade: 5, no, 8.0 out of  10.",
     "grade: 8 out of a possible 10", "grade: 8 of 10", "grade **8** of **10**", "grade of 8", "grades: 7-8",
     "grade: 8 on a scale of 0-10", "grade: 8 (scale: 0 to 10)", "grade: 8 (1–10)", "grade: 8,0",
     "grade (from 0 to 10): 8", "grade: 8 on a scale of 10", "grade: 8, by v2 of the rules",
     "grade: \u5f97\u52068\u5206", "grade: \u6211\u7ed98\u5206\u3002", "grade: __8__"],
)  # fmt: skip
def test_the_scale_behind_a_grade_is_no_grade(url: str, reply: str) -> None:
    assert ask(url, "2", (200, reply)) == 0.8


def test_what_a_prompt_says_in_braces_is_no_place_for_the_answer(url: str) -> None:
    Server.script[:] = [(200, "grade: 8")]
    question = "{prompt} | {truth} | {response} | {other}"
    asyncio.run(judge("{truth}", "print({response})", "{prompt}", url=url, model="m", question=question))
    said = {"role": "user", "content": "print({response}) | {prompt} | {truth} | {other}"}
    assert Server.body == {"model": "m", "temperature": 0.0, "max_tokens": 512, "messages": [said]}


def test_what_a_judge_is_asked_with_is_told_by_its_body(url: str) -> None:
    """OpenAI's models that think refuse both."""
    Server.script[:] = [(200, "grade: 8")]
    body = {"temperature": None, "max_tokens": None, "max_completion_tokens": 4096, "reasoning_effort": "low"}
    asyncio.run(judge("2", "1 + 1?", "2", url=url, model="m", question="?", body=body))
    said = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    assert Server.body == said | {"max_completion_tokens": 4096, "reasoning_effort": "low"}


def test_what_is_asked_otherwise_or_read_otherwise_is_another_question(url: str) -> None:
    """One reply may have several grades, each found by a pattern of its own."""
    Server.script[:] = [(200, "grades: style 2, sense 7"), (200, "grades: style 2, sense 7"), (200, "grades: style 9")]

    async def three() -> list[float]:
        style = {"url": url, "model": "m", "pattern": r"style (\d)"}
        return [
            await judge("5", "1 + 1?", "2", **style),
            await judge("5", "1 + 1?", "2", **(style | {"pattern": r"sense (\d)"})),
            await judge("5", "1 + 1?", "2", **style, body={"reasoning_effort": "high"}),
        ]

    assert asyncio.run(three()) == [0.2, 0.7, 0.9]


def test_the_same_question_is_asked_once_also_while_it_is_asked(url: str) -> None:
    Server.script[:] = [(200, "grade: 8"), (200, "grade: 2")]

    async def several() -> list[float]:
        first = asyncio.ensure_future(judge("2", "1 + 1?", "2", url=url, model="m"))
        others = [asyncio.ensure_future(judge("2", "1 + 1?", "2", url=url, model="m")) for _ in range(8)]
        different = asyncio.ensure_future(judge("3", "1 + 1?", "2", url=url, model="m"))
        return await asyncio.gather(first, *others, different)

    *same, different = asyncio.run(several())
    assert len(Server.asked) == 2 and len(set(same)) == 1 and {same[0], different} == {0.8, 0.2}


def test_who_waits_for_anothers_question_asks_itself_where_that_one_gives_up(url: str) -> None:
    Server.script[:] = [(429, "later"), (200, "grade: 8")]

    async def two() -> float:
        first = asyncio.ensure_future(judge("2", "1 + 1?", "2", url=url, model="m"))
        second = asyncio.ensure_future(judge("2", "1 + 1?", "2", url=url, model="m"))
        while len(Server.asked) < 1:
            await asyncio.sleep(0.01)
        first.cancel()  # at its deadline
        return await second

    assert asyncio.run(two()) == 0.8


def test_who_waits_for_anothers_question_has_its_error_too(url: str) -> None:
    Server.script[:] = [(401, "who are you")]

    async def two() -> list[Any]:
        calls = [judge("2", "1 + 1?", "2", url=url, model="m") for _ in range(2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(error, AskingError) for error in asyncio.run(two()))


def test_a_judge_says_how_long_to_wait(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "LONGEST_WAIT_S", 0.1)
    assert ask(url, "2", (429, "later"), (200, "grade: 8")) == 0.8
    assert Server.asked[1] - Server.asked[0] >= 0.9, "it asked for a second"


def test_a_loop_has_one_client_which_keeps_few_connections() -> None:
    async def two() -> tuple[Any, Any]:
        return asking._client(), asking._client()

    (one, same), (other, _) = asyncio.run(two()), asyncio.run(two())
    assert one is same and one is not other
    assert one._transport._pool._max_keepalive_connections == asking.KEPT_CONNECTIONS


def test_a_judge_says_until_when_to_wait(url: str) -> None:
    assert ask(url, "2", (429, "1.2"), (200, "grade: 8")) == 0.8
    assert Server.asked[1] - Server.asked[0] >= 1.2
    began, date = time.time(), formatdate(int(time.time()) + 2, usegmt=True)
    assert ask(url, "3", (429, date), (200, "grade: 8")) == 0.8
    assert time.time() >= int(began) + 2
    assert ask(url, "4", (429, "soon GMT"), (200, "grade: 8")) == 0.8


CUT_OFF = '{"choices": [{"message": {"content": "Of 7 steps, 3"}, "finish_reason": "length"}]}'


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ([(200, "<html>hello</html>")], "no chat completion: '<html>"),
        ([(200, CUT_OFF)], "cut off before the grade; raise the option max_tokens .*: 'Of 7 steps, 3'"),
        ([(200, "grade: none")], "no grade in its reply"),
        ([(200, "grade: /10")], "no grade in its reply"),
        ([(200, "95")], r"95 is no grade from 0 to scale=10, in its reply: '95'"),
        ([(200, "grade: -1")], "-1 is no grade from 0 to scale=10"),
        ([(401, "who are you")], "answered 401: 'who are you'"),
        ([(503, "down")] * 6, "failed 6 times, the last time with 503"),
    ],
)
def test_a_judge_that_gives_no_grade_is_named(url: str, script: list[tuple[int, str]], said: str) -> None:
    with pytest.raises(AskingError, match=said):
        ask(url, "4", *script)
