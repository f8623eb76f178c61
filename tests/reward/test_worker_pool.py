"""What a reward function does wrong, or does slowly, costs its own trajectory, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.pipeline.run.crashes import is_own
from penstock.services.reward.config import FunctionConfig, RewardConfig
from penstock.services.reward.service import Reward
from penstock.services.runtime.user_folders import VARIABLE, look_in
from penstock.services.user_processes.pool import WorkerPool
from penstock.services.user_processes.worker import Call, ProgramError

HERE = "tests.reward.functions"
FUNCTIONS = Path(__file__).with_name("functions.py")


def line_of(text: str, which: int) -> int:
    """Of the functions' file: where ``text`` stands for the nth time."""
    return [n for n, line in enumerate(FUNCTIONS.read_text().splitlines(), 1) if text in line][which]


def offered(response: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "p"}]
    some = {"truth": "t", "prompt": "p", "messages": messages, "finish_reason": "stop"}
    return {"response": response, "group": 1, "sample": 2, "step": 3, **some, **more}


def only(numbers: list[float]) -> float:
    """The reward of a function that gives nothing beside it."""
    (reward,) = numbers
    return reward


def score(function: FunctionConfig, responses: list[str], workers: int = 1, **more: Any) -> list[float | str]:
    pool = WorkerPool(function.program("reward.functions.0"), workers, limit=512)
    try:
        futures = [pool.submit(Call(offered(response, **more))) for response in responses]
        errors = [future.exception(60) for future in futures]
        assert pool.outstanding == 0
        return [str(e) if e else only(f.result()) for e, f in zip(errors, futures, strict=True)]
    finally:
        pool.close()


def test_options_and_prints_do_no_harm() -> None:
    function = FunctionConfig(function=f"{HERE}:good", options={"bonus": 0.5})
    assert score(function, ["t", "x"]) == [1.5, 0.5]


def test_each_misbehaviour_costs_only_itself() -> None:
    function = FunctionConfig(function=f"{HERE}:misbehaving", timeout_s=1.0)
    responses = ["ok", "raise", "ok", "hang", "ok", "crash", "ok", "nan", "ok", "text", "ok"]
    found = score(function, responses)
    assert [f for f, r in zip(found, responses, strict=True) if r == "ok"] == [1.0] * 6
    wrong = {r: f for f, r in zip(found, responses, strict=True) if r != "ok"}
    assert wrong == {
        "raise": f"raised RuntimeError: no idea ({FUNCTIONS}, line {line_of('raise RuntimeError', 0)})",
        "hang": "timed out after 1 s",
        "crash": "crashed with exit code 3",
        "nan": "returned nan",
        "text": "returned str, not a number",
    }


def test_calls_that_fill_the_pipe_of_a_worker_that_hangs_are_run_by_the_next() -> None:
    function = FunctionConfig(function=f"{HERE}:misbehaving", timeout_s=1.0)
    large = "x" * 50_000
    found = score(function, [*["ok"] * 200, "hang", *[large] * 30])
    assert found == [*[1.0] * 200, "timed out after 1 s", *[1.0] * 30]


def test_of_async_calls_too_each_misbehaviour_costs_only_itself() -> None:
    function = FunctionConfig(function=f"{HERE}:misbehaving_async", timeout_s=1.0)
    responses = ["ok", "raise", "slow", "hang", "ok", "crash", "slow", "block", "ok"]
    found = score(function, responses)
    assert dict(zip(responses, found, strict=True)) == {
        "ok": 1.0,
        "slow": 1.0,
        "raise": f"raised RuntimeError: no idea ({FUNCTIONS}, line {line_of('raise RuntimeError', 1)})",
        "hang": "timed out after 1 s",
        "crash": "crashed with exit code 4",
        "block": "blocked the event loop for 1 s",
    }


def test_what_a_call_forks_answers_nothing() -> None:
    assert score(FunctionConfig(function=f"{HERE}:forks"), ["0", "3", "back", *["0"] * 50]) == [0, 3, *[0] * 51]
    assert score(FunctionConfig(function=f"{HERE}:forks_async"), ["0", "back"] * 20) == [0.0] * 40


@pytest.mark.parametrize(
    ("ends", "wrong", "words"),
    [("os.kill(os.getpid(), 9)", ConnectionError, "was killed while it was imported"),
     ("os._exit(3)", ProgramError, "ended while it was imported")],
)  # fmt: skip
def test_who_is_killed_while_it_is_imported_may_be_started_again(
    user_module: Callable[[str, str], Path], ends: str, wrong: type[Exception], words: str
) -> None:
    """Whoever ends by itself is told of to the user, as a mistake."""
    user_module("short_lived.py", f"import os\n\n{ends}\n")
    with pytest.raises(wrong, match=words) as raised:
        score(FunctionConfig(function="short_lived:f"), ["a"])
    assert not is_own(raised.value), "a mistake ends the run in another way: it is no crash"


def test_a_worker_that_closes_its_descriptors_and_does_not_end_is_ended() -> None:
    found = score(FunctionConfig(function=f"{HERE}:closes", timeout_s=60.0), ["ok", "close", "ok"])
    assert found == [1.0, "closed the pipe of its answers, and did not end", 1.0]


@pytest.mark.parametrize("name", ["panicking", "panicking_async"])
def test_whatever_a_call_raises_is_its_answer(name: str) -> None:
    found = score(FunctionConfig(function=f"{HERE}:{name}", timeout_s=20.0), ["panic", "ok", "silent", "ok"])
    assert found == [
        f"raised Panic: called unwrap on None ({FUNCTIONS}, line {line_of('raise Panic', 0)})",
        1.0,
        f"raised WithoutWords: its message cannot be formatted ({FUNCTIONS}, line {line_of('raise WithoutWords', 0)})",
        1.0,
    ]


def test_async_calls_run_together_each_with_its_own_timeout() -> None:
    started = time.monotonic()
    found = score(FunctionConfig(function=f"{HERE}:slow", timeout_s=2.0), ["a"] * 300 + ["hang"])
    assert found == [1.0] * 300 + ["timed out after 2 s"]
    assert time.monotonic() - started < 10  # one after the other they would take 90


@pytest.mark.parametrize("kind", ["good", "slow"])
def test_calls_begin_at_the_pace_that_is_given(kind: str) -> None:
    """What waits for that has not begun, and so is not late."""
    function = FunctionConfig(function=f"{HERE}:{kind}", per_minute=600, timeout_s=0.8)
    began = time.monotonic()
    assert score(function, ["t"] * 22, workers=3) == [1.0] * 22
    assert time.monotonic() - began > 1.15, "ten at once, then one each tenth of a second"
    assert function.program("reward.functions.0", 2).per_minute == 300, "of two processes each begins half"


def test_nobody_need_wake_who_waits_for_its_pace() -> None:
    """So fast that a call may begin between the look at the clock and the sleep, again and again."""
    function = FunctionConfig(function=f"{HERE}:good", per_minute=120_000)
    assert score(function, ["t"] * 4000) == [1.0] * 4000


def test_a_late_call_begins_while_others_wait() -> None:
    pool = WorkerPool(FunctionConfig(function=f"{HERE}:slow", timeout_s=20.0).program("reward.functions.0"), 1, 512)
    first = pool.submit(Call(offered("hang")))
    time.sleep(0.2)
    assert pool.submit(Call(offered("b"))).result(5) == [1.0] and not first.done()
    pool.close()


@pytest.mark.parametrize("called", ["slow", "slowly"])
def test_calls_that_are_held_begin_later_and_are_not_late(called: str) -> None:
    """Of an async function, and of a plain one."""
    pool = WorkerPool(FunctionConfig(function=f"{HERE}:{called}", timeout_s=2.0).program("reward.functions.0"), 2, 3)
    pool.hold()
    futures = [pool.submit(Call(offered("a"))) for _ in range(12)]
    time.sleep(2.5)
    assert not pool.under_way and pool.outstanding == 12
    pool.go()
    deadline = time.monotonic() + 20
    while not pool.under_way and time.monotonic() < deadline:
        time.sleep(0.001)
    pool.hold()
    while pool.under_way and time.monotonic() < deadline:
        time.sleep(0.001)
    left = pool.outstanding
    time.sleep(0.5)
    assert 0 < left < 12 and (pool.under_way, pool.outstanding) == (0, left)
    pool.go()
    assert {only(future.result(20)) for future in futures} == {1.0}
    pool.close()


def test_a_modules_own_semaphore_works_for_as_long_as_the_worker_lives() -> None:
    pool = WorkerPool(FunctionConfig(function=f"{HERE}:limited").program("reward.functions.0"), 1, 512)
    for _ in range(3):
        found = [only(future.result(20)) for future in [pool.submit(Call(offered("a"))) for _ in range(20)]]
        assert max(found) == 3
    pool.close()


def test_a_modules_own_http_client_works() -> None:
    class Judge(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(str(len(self.path)).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    function = FunctionConfig(function=f"{HERE}:asks_over_http", options={"url": url})
    pool = WorkerPool(function.program("reward.functions.0"), 1, 512)
    for _ in range(3):  # its connections outlive a batch of calls
        found = [only(future.result(20)) for future in [pool.submit(Call(offered("a" * n))) for n in range(30)]]
        assert found == [float(len("/?answer=") + n) for n in range(30)]
    pool.close()
    server.shutdown()


def test_an_object_with_an_async_call_is_async() -> None:
    pool = WorkerPool(FunctionConfig(function=f"{HERE}:judge").program("reward.functions.0"), 4, 512)
    started = time.monotonic()
    futures = [pool.submit(Call(offered("a"))) for _ in range(100)]
    assert {only(future.result(20)) for future in futures} == {2.0}
    assert time.monotonic() - started < 10
    pool.close()


def test_a_functions_child_may_read_its_stdin() -> None:
    assert score(FunctionConfig(function=f"{HERE}:runs_python"), ["0.5", "0.25"]) == [0.5, 0.25]


def test_plain_calls_are_shared_by_the_workers() -> None:
    function = FunctionConfig(function="time:sleep", name="sleep", options={"seconds": 0.1})
    with pytest.raises(ProgramError, match="no signature found|it asks for|options give"):
        WorkerPool(function.program("reward.functions.0"), 1, 512).close()
    function = FunctionConfig(function=f"{HERE}:runs_python")
    pool = WorkerPool(function.program("reward.functions.0"), 3, 512)
    futures, deadline = [pool.submit(Call(offered("1")))], time.monotonic() + 20
    while pool.under_way < 3 and time.monotonic() < deadline:
        futures.append(pool.submit(Call(offered("1"))))
        time.sleep(0.02)
    assert pool.under_way >= 3
    assert {only(future.result(60)) for future in futures} == {1.0}
    pool.close()


def all_ready(pool: WorkerPool) -> None:
    """Waits until each worker has loaded the program."""
    deadline = time.monotonic() + 60
    while not all(each.ready for each in pool._queues):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_no_slow_call_waits_behind_another_while_a_worker_is_idle() -> None:
    pool = WorkerPool(FunctionConfig(function=f"{HERE}:slowly").program("reward.functions.0"), 2, 512)
    all_ready(pool)
    for _ in range(3):
        futures, deadline = [pool.submit(Call(offered("a"))) for _ in range(2)], time.monotonic() + 20
        while pool.under_way < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [each.under_way for each in pool._queues] == [1, 1]
        assert [future.result(20) for future in futures] == [[1.0], [1.0]]
    pool.close()


def test_of_fast_calls_a_worker_has_several_ready() -> None:
    pool = WorkerPool(FunctionConfig(function=f"{HERE}:constant").program("reward.functions.0"), 1, 512)
    most, deadline = 0, time.monotonic() + 20
    while most < 2 and time.monotonic() < deadline:
        last = [pool.submit(Call(offered("a"))) for _ in range(500)][-1]
        while not last.done():
            most = max(most, pool.under_way)
    assert most >= 2
    pool.close()


def test_where_calls_may_be_held_a_worker_has_one_alone() -> None:
    """Or it would go through many that are ready before the last one that is under way is done."""
    pool = WorkerPool(FunctionConfig(function=f"{HERE}:constant").program("reward.functions.0"), 1, 512, ahead=False)
    last, most = [pool.submit(Call(offered("a"))) for _ in range(2000)][-1], 0
    while not last.done():
        most = max(most, pool.under_way)
    assert most == 1
    pool.close()


def test_the_workers_of_all_functions_load_them_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_load.py").write_text(
        "import os, time\nfrom pathlib import Path\n\n"
        "at = Path(__file__).parent\n(at / f'begun-{os.getpid()}').touch()\n"
        "while len(list(at.glob('begun-*'))) < int((at / 'wanted').read_text()):\n    time.sleep(0.05)\n\n\n"
        "def one(response): return 1.0\n\n\ndef two(response): return 2.0\n"
    )
    monkeypatch.setenv(VARIABLE, "")
    look_in(tmp_path)
    (tmp_path / "wanted").write_text("2")
    functions = [{"function": f"slow_to_load:{name}"} for name in ("one", "two")]
    reward = Reward(RewardConfig.model_validate({"functions": functions}), workers=3, group_size=1)
    (tmp_path / "wanted").write_text("6")
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("begun-*"))) < 6 and time.monotonic() < deadline:
        time.sleep(0.05)
    reward.close()
    assert len(list(tmp_path.glob("begun-*"))) == 6


@pytest.mark.parametrize("edited", ["def f(response:\n", "def f(response, more): return 1.0\n"])
def test_who_waits_for_a_worker_that_does_not_start_again_is_told_why(
    edited: str, user_module: Callable[[str, str], Path]
) -> None:
    file = user_module("edited_meanwhile.py", "import time\n\n\ndef f(response): time.sleep(99)\n")
    function = FunctionConfig(function="edited_meanwhile:f", timeout_s=1.0)
    pool = WorkerPool(function.program("reward.functions.0"), 1, 512)
    pool._queues[0]._start_s = 3.0  # of those that come after
    file.write_text(edited)
    late, *others = [pool.submit(Call(offered(response))) for response in ("hang", "ok", "ok")]
    assert str(late.exception(20)) == "timed out after 1 s"
    for each in others:
        error = each.exception(20)
        assert (
            isinstance(error, ProgramError)
            and "edited_meanwhile:f" in str(error)
            and "was it edited? then mend it" in str(error)
        )
    assert isinstance(pool.submit(Call(offered("ok"))).exception(20), ProgramError)
    file.write_text("def f(response): return 1.0\n")
    deadline = time.monotonic() + 20
    while (again := pool.submit(Call(offered("ok")))).exception(20) and time.monotonic() < deadline:
        pass
    assert again.result() == [1.0]
    pool.close()


def test_what_one_worker_cannot_do_another_does(user_module: Callable[[str, str], Path]) -> None:
    file = user_module(
        "broken_for_some.py",
        "import os\n\n\ndef f(response):\n    return os._exit(3) if response == 'crash' else 1.0\n",
    )
    pool = WorkerPool(FunctionConfig(function="broken_for_some:f").program("reward.functions.0"), 2, 512)
    all_ready(pool)
    for each in pool._queues:
        each._start_s = 1.0
    file.write_text("def f(response:\n")
    assert str(pool.submit(Call(offered("crash"))).exception(20)) == "crashed with exit code 3"
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        assert pool.submit(Call(offered("ok"))).result(20) == [1.0]
    assert sum(each.ready for each in pool._queues) == 1
    pool.close()


def test_what_a_call_has_started_ends_with_its_worker(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    function = FunctionConfig(function=f"{HERE}:leaves_a_child", timeout_s=1.0, options={"told": str(told)})
    assert score(function, ["hang", "crash", "ok"]) == ["timed out after 1 s", "crashed with exit code 3", 1.0]
    pids = list(map(int, told.read_text().split()))
    assert len(pids) == 3
    psutil.wait_procs(left := [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    assert not [child for child in left if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_many_descriptors_do_no_harm() -> None:
    code = (
        "import os, resource\n"
        "from tests.reward.test_worker_pool import HERE, FunctionConfig, score\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, hard))\n"
        "if __name__ == '__main__':\n"
        "    assert score(FunctionConfig(function=f'{HERE}:constant'), ['a'] * 8, workers=6) == [1.0] * 8\n"
        "    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]\n"
        "    slowly = FunctionConfig(function=f'{HERE}:slowly')\n"
        "    assert score(slowly, ['x' * 300_000] * 3) == [1.0] * 3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_function_is_given_what_it_asks_for() -> None:
    assert score(FunctionConfig(function=f"{HERE}:asks"), ["a"]) == [122.0]
    function = FunctionConfig(function=f"{HERE}:asks", columns=["reward/first"])
    assert score(function, ["a"], reward_first=0.5) == [123.5]


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (FunctionConfig(function=f"{HERE}:missing"), "cannot load"),
        (FunctionConfig(function="no.such.module:f"), "cannot load"),
        (FunctionConfig(function=f"{HERE}:wants_more"), "asks for embedding; it may ask for response, response_tokens"),
        (FunctionConfig(function=f"{HERE}:good", options={"malus": 1}), "does not take malus, which its options give"),
    ],
)
def test_a_function_that_cannot_be_called_is_named(function: FunctionConfig, complaint: str) -> None:
    with pytest.raises(ProgramError, match=complaint) as caught:
        WorkerPool(function.program("reward.functions.0"), 1, 512)
    assert function.function in str(caught.value) and "reward.functions" in str(caught.value)


def test_no_worker_is_left_behind() -> None:
    before = set(psutil.Process().children())
    pool = WorkerPool(FunctionConfig(function=f"{HERE}:good").program("reward.functions.0"), 2, 512)
    children = set(psutil.Process().children()) - before
    assert len(children) >= 2
    pool.close()
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_memory_is_flat_over_many_calls() -> None:
    pool = WorkerPool(FunctionConfig(function=f"{HERE}:limited").program("reward.functions.0"), 1, 512)
    processes = [psutil.Process(), *psutil.Process().children()]

    def used() -> int:
        return sum(p.memory_info().rss for p in processes if p.is_running())

    for turn in range(20):
        for future in [pool.submit(Call(offered("a" * 500))) for _ in range(100)]:
            future.result(60)
        if turn == 4:
            before = used()
    assert used() - before < 8 << 20
    pool.close()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda f: f("exact_match")(" ab ", "ab"), 1.0),
        (lambda f: f("exact_match")("ba", "ab"), 0.0),
        (lambda f: f("number")("so it is 1,234.", "reason #### 1234"), 1.0),
        (lambda f: f("number")("I do not know", "#### 3"), 0.0),
        (lambda f: f("number")("-7", "7"), 0.0),
    ],
)
def test_registered_functions(call: Callable, expected: float) -> None:
    from penstock.services.reward.config import REGISTRY
    from penstock.services.runtime.plugins import load_plugin

    assert call(lambda name: load_plugin(REGISTRY[name], "test")) == expected
