"""Programs of the model's: which are run, what tests them, and what they can do meanwhile."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.services.reward.config import FunctionConfig
from penstock.services.reward.functions.code_tests import code_tests
from penstock.services.user_processes.sandbox import run as running
from penstock.services.user_processes.sandbox.child import SYSTEMS
from penstock.services.user_processes.sandbox.run import CHILD, run

ADD = "Here you are:\n```python\ndef add(a, b):\n    return a + b\n```\n"
ADDS, FAILS = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return 0\n"
READS = "print(int(input()) + int(input()))"
CHECK = "METADATA = dict(author='x')\ndef check(candidate):\n    assert candidate(1, 2) == 3\n"


def test_programs_are_run_against_assertions() -> None:
    assert code_tests(ADD, ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]) == 1.0
    assert code_tests(ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 3"]) == 0.0
    assert code_tests(ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 3"], partial=True) == 0.5
    assert code_tests("not a program", "assert True") == 0.0


def test_programs_are_run_on_inputs() -> None:
    truth = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
    assert code_tests("print(sum(map(int, input().split())))", truth) == 1.0
    assert code_tests("print(3)", truth, partial=True) == 0.5
    with pytest.raises(ValueError, match="as many inputs as outputs"):
        code_tests("print(3)", {"inputs": ["1"], "outputs": []})


def fenced(program: str, info: str = "python") -> str:
    return f"```{info}\n{program}\n```\n"


@pytest.mark.parametrize(
    "answer",
    [
        fenced("print(3)") + "It prints\n" + fenced("3", ""),
        fenced("pip install numpy", "bash") + "and then\n" + fenced("print(3)"),
        "For\n" + fenced("1 2", "text") + "it is\n" + fenced("print(3)", ""),
        fenced("print(2)", "") + "no:\n" + fenced("print(3)", "Python"),
        fenced("print(3)") + "To check it, run\n```python\nassert ",
        fenced("print(3)", "") + "```\nIt prints 3.",
        fenced("print(3)", "python3"),
        fenced("print(3)", "python title=a.py"),
        "so: " + fenced("print(3)", "py"),
        fenced("print(3)").replace("\n", "\r\n"),
        "1. At last:\n   ```python\n   if True:\n       print(3)\n   ```\n",
        "Use ``` for code.\n" + fenced("print(3)"),
        "print(3)",
        "<answer>```python\nprint(3)\n```</answer>",
        "```python\nprint(3)\n``` This works.",
        "```python\nprint(2)\n```</think>\nSo:\n" + fenced("print(3)"),
        "So:\n```python\nprint(3)",
        fenced("print(3)", "") + "```\n",
    ],
)
def test_the_program_is_the_last_block_of_python(answer: str) -> None:
    assert code_tests(answer, {"inputs": [""], "outputs": ["3"]}) == 1.0


@pytest.mark.parametrize(
    ("right", "wrong", "truth"),
    [
        (READS, "print(4)", '{"inputs": ["1\\n2\\n"], "outputs": ["3\\n"]}'),
        (READS, "print(4)", {"inputs": [["1", "2"]], "outputs": [["3"]], "fn_name": None}),
        (ADDS, FAILS, '["assert add(1, 2) == 3"]'),
        (ADDS, FAILS, {"test": CHECK, "entry_point": "add", "task_id": "1"}),
        (ADDS, FAILS, CHECK + "check(add)"),
        (ADDS, FAILS, {"test": CHECK + "check(add)", "entry_point": "add"}),
        (ADDS, FAILS, {"test": "import random\nrandom.seed(0)\n" + CHECK, "entry_point": "add"}),
        (READS, "print(4)", {"inputs": ["1\n2"], "outputs": [3]}),
        ("def f(n): return 10 ** n", "f = abs",
         f'{{"fn_name": "f", "inputs": [[5000]], "outputs": [1{"0" * 5000}]}}'),
        (ADDS, FAILS, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}),
        (ADDS, FAILS, '{"fn_name": "add", "inputs": [[[1], [2]]], "outputs": [[[1, 2]]]}'),
        (READS, "print(4)", '[{"input": "1\\n2\\n", "output": "3\\n", "testtype": "stdin"}]'),
        (READS, "print(4)", [{"type": "stdin_stdout", "fn_name": None, "input": "1\n2", "output": "3"}]),
        (ADDS, FAILS, [{"testtype": "functional", "input": "[1]\n[2]", "output": "[1, 2]", "metadata": {
            "func_name": "add"}}]),
        (ADDS, FAILS, {"question_content": "?", "metadata": '{"func_name": "add"}', "public_test_cases":
            '[{"input": "[1]\\n[2]", "output": "[1, 2]", "testtype": "functional"}]'}),
        (READS, "print(4)", {"metadata": "{}", "public_test_cases": [
            {"input": "1\n2", "output": "3", "testtype": "stdin"}]}),
        (ADDS, FAILS, [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]),
        ("class Solution:\n    def two(self, a): return (a, None)", "two = abs", {
            "fn_name": "two", "inputs": [[1]], "outputs": [[1, None]]}),
        ("from __future__ import annotations\nclass Solution:\n    def gcd(self, a: List[int]) -> Optional[int]:\n"
         "        count = Counter(a)\n        return math.gcd(*count) + gcd(*count) + pow(2, 3, 7) - 1", "", {
            "fn_name": "gcd", "inputs": [[[4, 6]]], "outputs": [4]}),
    ],
)  # fmt: skip
def test_each_kind_of_tests_tells_right_from_wrong(right: str, wrong: str, truth: Any) -> None:
    assert (code_tests(right, truth), code_tests(wrong, truth)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("truth", "why"),
    [
        (CHECK, "a map of test and entry_point"),
        ("import math\nx = add(1, 2)", "asserts nothing"),
        ("assert add(1, 2) =", "is no Python"),
        ("{'inputs': ['1'], 'outputs': ['2']}", "begins as JSON, and is none"),
        ({"inputs": [None], "outputs": ["2"]}, "neither text nor a list of lines: 'None'"),
        ({"inputs": [["1", 2]], "outputs": ["2"]}, "neither text nor a list of lines"),
        ({"fn_name": "add", "inputs": ["1 2"], "outputs": [3]}, "a list of the function's arguments"),
        ({"fn_name": "a b", "inputs": [[1]], "outputs": [3]}, "a list of the function's arguments"),
        ([], "neither assertions"),
        ([{"input": "1", "output": "2"}, {"input": "1"}], "neither assertions"),
        ([{"input": "1", "output": "2", "testtype": "file"}], "a test of the type 'file'; there are stdin"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "func_name, in metadata.*: 'None'"),
        ({"public_test_cases": "[]", "metadata": "{}"}, "a row with public_test_cases"),
        ([{"input": "a", "output": "2", "testtype": "functional"}], "functional test is no JSON"),
    ],
)
def test_a_truth_that_tests_nothing_is_refused(truth: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        code_tests(ADD, truth)


def test_numbers_that_are_printed_may_differ_by_a_tolerance() -> None:
    truth = {"inputs": [""], "outputs": ["yes 0.50\n0.33333333 1000000"]}
    right, wrong = 'print("yes", .5)\nprint(1 / 3, 1000000)', 'print("yes", .5)\nprint(1 / 3, 1000000.9)'
    assert [code_tests(right, truth, tolerance=each) for each in (1e-6, 0.0)] == [1.0, 0.0]
    assert [
        code_tests(each, truth, tolerance=1e-6) for each in (wrong, 'print("yes", .51)\nprint(1 / 3, 1000000)')
    ] == [0, 0]


@pytest.mark.parametrize("end", ["exit()", "import sys; sys.exit(0)", "import sys; sys.stdout.close()"])
def test_a_program_on_inputs_may_say_that_it_has_ended(end: str) -> None:
    truth = {"inputs": ["1\n2\n"], "outputs": ["3"]}
    assert code_tests(f"{READS}\n{end}", truth) == 1.0
    assert code_tests(f"{READS}\nexit(1)", truth) == 0.0
    assert code_tests(f"{ADDS}\nexit()", "assert add(1, 2) == 3") == 0.0


def test_a_program_that_forks_has_passed_where_it_itself_has() -> None:
    assert code_tests("import os\nchild = os.fork()", "assert True") == 1.0
    assert code_tests("import os\nchild = os.fork()\nif child: os.waitpid(child, 0)", "assert not child") == 0.0


def test_a_program_cannot_take_its_tests_away() -> None:
    assert code_tests("import os\nos.remove('tests.py')", "assert False") == 0.0


@pytest.mark.parametrize("put", ["", "os.mkfifo('output')", "os.mkdir('output')", "open('output', 'w').write('3')"])
def test_a_program_cannot_take_its_output_away(put: str) -> None:
    away = "import os\nif os.path.exists('output'): os.remove('output')\n"
    begun = time.monotonic()
    assert code_tests(f"{away}{put}\nprint(4)", {"inputs": [""], "outputs": ["3"]}, seconds=2) == 0.0
    assert code_tests(f"{away}{put}\nprint(3)", {"inputs": [""], "outputs": ["3"]}, seconds=2) == 1.0
    assert time.monotonic() - begun < 10


def test_a_program_may_print_as_much_as_is_wanted() -> None:
    truth = {"inputs": [""], "outputs": ["\n".join(map(str, range(300_000)))]}
    assert code_tests("for i in range(300_000): print(i)", truth) == 1.0
    assert code_tests("for i in range(300_001): print(i)", truth) == 0.0


@pytest.mark.parametrize(
    "use",
    ["import pickle\nassert type(pickle.loads(pickle.dumps(A()))) is A",
     "import multiprocessing\nwith multiprocessing.Pool(2) as pool: assert pool.map(f, [1, 2]) == [2, 3]"],
)  # fmt: skip
def test_what_a_program_defines_is_found_where_pickle_looks(use: str) -> None:
    assert code_tests("class A: pass\ndef f(x): return x + 1", use) == 1.0


def test_a_program_has_all_of_its_seconds() -> None:
    limit = "import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU)[0])"
    assert run(limit, seconds=1.4).output == "2\n"


def test_the_word_that_says_so_is_in_no_frame_of_a_callers() -> None:
    forge = "import os, sys\nfor name, value in sys._getframe(1).f_locals.items(): print(type(value).__name__)"
    assert "bytes" not in run(forge).output.split()


def test_as_many_tests_as_there_are_have_time_for_each() -> None:
    assert FunctionConfig(function="exact_match").program("").timeout_s == 10
    assert FunctionConfig(function="code_tests").program("").timeout_s == 120
    assert FunctionConfig(function="code_tests", timeout_s=7).program("").timeout_s == 7


def test_a_program_can_do_little_harm() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    reach = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
    assert code_tests(reach, "assert True") == 0.0
    assert code_tests(reach, "assert True", network=True) == 1.0
    server.close()
    assert code_tests("x = bytearray(3 << 30)", "assert True") == 0.0
    assert code_tests("import sys; sys.exit(0)", "assert False") == 0.0  # an early exit is no success
    assert code_tests("import os; os._exit(0)", "assert False") == 0.0
    begun = time.monotonic()
    assert code_tests("while True: pass", "assert True", seconds=1) == 0.0
    assert code_tests("import time; time.sleep(60)", "assert True", seconds=1) == 0.0
    fork = "import os, time\nif os.fork() == 0: time.sleep(60)"
    assert code_tests(fork, "assert True", seconds=1) in (0.0, 1.0)  # the child is ended with it
    assert time.monotonic() - begun < 15


@pytest.mark.skipif(os.uname().machine not in SYSTEMS, reason="sockets are bounded on x86-64 and ARM alone")
def test_a_program_reaches_no_socket_in_the_file_system(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:  # as the Redis of a run
        server.bind(str(tmp_path / "s"))
        server.listen()
        reach = f"import socket\nsocket.socket(socket.AF_UNIX).connect({str(tmp_path / 's')!r})"
        assert code_tests(reach, "assert True") == 0.0
        assert code_tests(reach, "assert True", network=True) == 1.0
    ring = "import ctypes, socket\nassert ctypes.CDLL(None).syscall(425, 1, bytes(120)) == -1"  # io_uring_setup
    pair = "try: socket.socketpair(type=socket.SOCK_DGRAM)\nexcept PermissionError: pass\nelse: raise ValueError"
    assert code_tests(f"{ring}\n{pair}", "assert True") == 1.0
    pipe = "import multiprocessing as m\na, b = m.Pipe()\na.send(1)"
    assert code_tests(pipe, "assert b.recv() == 1") == 1.0


IN_A_CONTAINER = """
import ctypes, os, pathlib, socket, struct, sys
from penstock.services.user_processes.sandbox import run as running
from penstock.services.user_processes.sandbox.child import _assembled
from penstock.services.user_processes.sandbox.run import run

if "old" in sys.argv:  # a kernel whose Landlock does not bound signals
    running.CHILD = pathlib.Path(sys.argv[2])
libc, zero = ctypes.CDLL(None), ctypes.c_ulong(0)
refused = 272 if os.uname().machine == "x86_64" else 97  # unshare, as Docker's own filter has it
steps = [("load", 0, "", ""), ("equal", refused, "", "on"), ("end", 0x50001, "", ""), "on", ("end", 0x7FFF0000, "", "")]
code = ctypes.create_string_buffer(_assembled(steps))
about = ctypes.create_string_buffer(struct.pack("@HP", 4, ctypes.addressof(code)))
libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero)
libc.prctl(22, ctypes.c_ulong(2), about, zero, zero)
assert libc.unshare(0x10000000) == -1
server = socket.create_server(("127.0.0.1", 0))
program = f'''
import os, signal, socket, subprocess, sys
def refused(what):
    try:
        what()
    except OSError:
        return True
print(refused(lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 2)))
print(refused(lambda: socket.socket(socket.AF_UNIX)))
print(refused(lambda: open("/proc/{os.getpid()}/environ").read()))
print(refused(lambda: os.kill({os.getpid()}, signal.SIGTERM)))
print(refused(lambda: os.setpgid(0, 0)))
import fcntl
print(refused(lambda: fcntl.fcntl(0, fcntl.F_SETOWN, {os.getpid()})) or {"old" not in sys.argv})
print(subprocess.check_output([sys.executable, "-c", "print(6 * 7)"], text=True).strip())
print(refused(lambda: open("{os.path.realpath(sys.argv[2])}", "a")))
os.makedirs("a/b")
print(refused(lambda: os.rename("a/b", "b")) or "moved")
'''
found = run(program, "assert refused(os.setsid)")
print(found.completed, found.output.split())
print(run("import socket; socket.socket()", network=True).completed)
print(run(f"open('/proc/{os.getpid()}/environ').read()", network=True).completed)
"""


@pytest.mark.skipif(os.uname().machine not in SYSTEMS, reason="sockets are bounded on x86-64 and ARM alone")
@pytest.mark.parametrize("kernel", ["new", "old"])
def test_a_program_is_confined_where_nobody_may_make_a_namespace(kernel: str, tmp_path: Path) -> None:
    """As in containers, whose filter refuses it: there it sees the same processes, and the environment of none."""
    if CDLL(None).syscall(444, None, 0, 1) < 1:
        pytest.skip("there is no Landlock here")
    as_if_old = CHILD.read_text().replace("SCOPED = 6", "SCOPED = 99")
    assert as_if_old != CHILD.read_text()
    (tmp_path / "child.py").write_text(as_if_old)
    command = [sys.executable, "-c", IN_A_CONTAINER, kernel, str(tmp_path / "child.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    wanted = ["True ['True', 'True', 'True', 'True', 'True', 'True', '42', 'True', 'moved']", "True", "False"]
    assert done.stdout.splitlines() == wanted, done.stderr


WRITES = """
import multiprocessing, os, subprocess, tempfile
def refused(what):
    try:
        what()
    except OSError:
        return True
assert refused(lambda: open({there!r}, "a")) and refused(lambda: os.remove({there!r}))
assert refused(lambda: os.rename({there!r}, "mine")) and refused(lambda: os.mkdir({there!r} + "-folder"))
os.makedirs("a/b")
os.rename("a/b", "b")
open("b/c", "w").close()
os.truncate("b/c", 9)
open(os.devnull, "w").close()
assert os.path.dirname(tempfile.mkstemp()[1]) == os.getcwd()
subprocess.check_call("echo 1 > d && rm d && mktemp", shell=True)
multiprocessing.Lock()
"""


@pytest.mark.parametrize("network", [False, True])
def test_a_program_writes_in_its_folder_alone(network: bool, tmp_path: Path) -> None:
    if CDLL(None).syscall(444, None, 0, 1) < 3:
        pytest.skip("Landlock is too old here, or there is none")
    (there := tmp_path / "of a run").write_text("x")
    assert run(WRITES.format(there=str(there)), network=network).completed
    assert there.read_text() == "x" and [each.name for each in tmp_path.iterdir()] == [there.name]


FILLS = """
import multiprocessing, os
from pathlib import Path
shared = Path("/dev/shm")
assert not list(shared.iterdir()), "what others have there may be cut short under their hands"
(shared / "left").write_text("x")
multiprocessing.Lock()
written = 0
try:
    for number in range(30):
        with open(f"{number}", "wb") as file:
            for _ in range(15):
                written += file.write(bytes(1 << 20))
except OSError:
    pass
print(written >> 20)
"""


def test_what_a_program_leaves_and_fills_is_its_own() -> None:
    namespace = "import ctypes; assert not ctypes.CDLL(None).unshare(0x10020000)"
    if subprocess.run([sys.executable, "-c", namespace], capture_output=True).returncode:
        pytest.skip("nobody may make a namespace here")
    victim = Path(f"/dev/shm/penstock-{uuid.uuid4()}")
    victim.write_bytes(bytes(100))
    try:
        found = run(FILLS, seconds=20)
    finally:
        there = victim.stat().st_size
        victim.unlink()
    assert found.completed and there == 100 and not Path("/dev/shm/left").exists()
    assert 100 <= int(found.output) <= 128, "MiB, and then there is no more room"


def test_where_no_process_may_be_started_a_program_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container where another program has all that there may be: it is no fault of this one's."""
    once = "import os, sys\nif os.path.exists({there!r}):\n    os.remove({there!r})\n    sys.exit(96)\n"
    (there := tmp_path / "all of them").touch()
    late = tmp_path / "child.py"
    late.write_text(
        f"{once.format(there=str(there))}os.execv(sys.executable, ['python', '-I', {str(CHILD)!r}, *sys.argv[1:]])"
    )
    monkeypatch.setattr(running, "CHILD", late)
    assert code_tests(ADD, "assert add(1, 2) == 3") == 1.0 and not there.exists()
    late.write_text("raise SystemExit(96)")
    monkeypatch.setattr(running, "START_S", 0.2)
    with pytest.raises(running.SandboxError, match="pids_limit"):
        code_tests(ADD, "assert add(1, 2) == 3")


def test_a_program_may_open_its_own_stdout() -> None:
    assert run("open('/dev/stdout', 'w').write('right')").output == "right"


def test_where_memory_ends_the_program_is_the_first_to_go() -> None:
    """And not whoever runs it, which may be larger than each of its processes."""
    assert run("print(open('/proc/self/oom_score_adj').read())").output.strip() == "1000"


@pytest.mark.parametrize(
    "made", ["for _ in range(1100): os.mkdir('a'); os.chdir('a')", "os.mkdir('a', 0); os.chmod('.', 0)"]
)
def test_a_program_leaves_no_folder_whatever_it_has_made(
    made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run(f"import os\nopen('x', 'w').close()\n{made}").completed and not list(tmp_path.iterdir())


def test_numpy_has_one_thread_however_many_cores_there_are() -> None:
    assert code_tests("import os, numpy", "assert len(os.listdir('/proc/self/task')) == 1") == 1.0


def alive(name: str) -> bool:
    """Some process that was called so has not ended."""
    return any(name in (each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))


@pytest.mark.parametrize("network", [False, True])
def test_what_a_program_starts_ends_with_it_whatever_session_it_is_in(network: bool) -> None:
    name = f"program-{uuid.uuid4()}"
    sleep = f"os.execv({sys.executable!r}, ['python', '-c', 'import time; time.sleep(60)', {name!r}])"
    escape = f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: {sleep}\n    os._exit(0)\n"
    assert code_tests(escape + "time.sleep(0.5)", "assert True", network=network) == 1.0
    assert not alive(name)
    assert code_tests(escape + "while True: pass", "assert True", seconds=1, network=network) == 0.0
    assert not alive(name)


def test_what_a_program_writes_without_end_is_kept_nowhere() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert code_tests("import os\nwhile True: os.write(2, bytes(1 << 20))", "assert True", seconds=2) == 0.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_program_ends_with_the_process_that_runs_it_and_leaves_no_folder(tmp_path: Path) -> None:
    name = f"program-{uuid.uuid4()}"
    deep = "import os\nfor _ in range(1100): os.mkdir('a'); os.chdir('a')\n"
    forever = f"{deep}os.execv({sys.executable!r}, ['python', '-c', 'import time; time.sleep(60)', {name!r}])"
    worker = subprocess.Popen(
        [sys.executable, "-c", f"from {run.__module__} import run; run({forever!r}, seconds=60)"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    until(lambda: alive(name))
    assert list(tmp_path.iterdir())
    worker.kill()
    worker.wait()
    until(lambda: not alive(name) and not list(tmp_path.iterdir()))


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_programs_folder_may_lie_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    try:
        assert run("print(open('program.py').read())", "assert True").completed
    finally:
        folder.rmdir()
