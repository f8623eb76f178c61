"""Ranks are the command that started them, whatever folder they are started in, and leave nothing behind."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from base64 import b64encode
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError

from penstock.pipeline.run.meeting import meeting
from penstock.pipeline.run.rendezvous import NAME, Sealed, together
from penstock.services.runtime.address import interface_of
from penstock.services.weights.transports.broadcast_group import serve_store

PROGRAM = """
import sys
from penstock.pipeline.run import torchrun

sys.argv = ["penstock", "algorithms"]
sys.exit(torchrun.launch(2, 5))
"""


def test_files_of_the_users_own_stand_in_for_no_library(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit('the file of the user was imported')")
    (scratch := tmp_path / "scratch").mkdir()
    command, env = [sys.executable, "-P", "-c", PROGRAM], os.environ | {"TMPDIR": str(scratch)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("dr_grpo") >= 2, done.stderr
    assert not list(scratch.iterdir())


WAITS = """
from penstock.pipeline.run import torchrun

torchrun.penstock = lambda *_: ["sleep", "60"]
torchrun.launch(2, 5)
"""


def test_on_one_machine_no_other_one_is_listened_to() -> None:
    agent = psutil.Popen([sys.executable, "-P", "-c", WAITS])
    try:
        until = time.monotonic() + 60
        while len(agent.children(recursive=True)) < 2:
            assert agent.is_running() and time.monotonic() < until
            time.sleep(0.1)
        heard = [at.laddr.ip for at in agent.net_connections("inet") if at.status == psutil.CONN_LISTEN]
        assert heard == ["127.0.0.1"]
        loopback = interface_of("127.0.0.1")
        for rank in agent.children(recursive=True):
            told = rank.environ()
            assert (told["GLOO_SOCKET_IFNAME"], told["NCCL_SOCKET_IFNAME"]) == (loopback, f"={loopback}")
    finally:
        agent.terminate()
        agent.wait(30)


class Trap:
    """What a stranger would like to have unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return exec, (f"open({str(self.file)!r}, 'w')",)  # type: ignore[return-value]


def test_where_machines_meet_a_strangers_pickle_is_not_loaded(tmp_path: Path) -> None:
    store, endpoint = serve_store("127.0.0.1")
    first, second = (Sealed(store, b"known") for _ in range(2))
    assert first.get_state() is None
    assert first.set_state(b"a") is not None
    state = second.get_state()
    assert state is not None and state[0] == b"a"
    told = second.set_state(b"b", state[1])
    assert told is not None and told[0] == b"b" and told[2]
    late = first.set_state(b"c", state[1])
    assert late is not None and late[0] == b"b" and not late[2], "another was faster"
    stranger = TCPStore("127.0.0.1", int(endpoint.rpartition(":")[2]), is_master=False, wait_for_workers=False)
    stranger.set(f"torch.rendezvous.{NAME}", b64encode(pickle.dumps(Trap(tmp_path / "ran"))).decode())
    met = RendezvousParameters(NAME, "", NAME, 2, 2, local_addr="127.0.0.1", join_timeout=5)
    with pytest.raises(RendezvousStateError, match="a stranger"):
        together(store, b"known", met).next_rendezvous()
    assert not (tmp_path / "ran").exists()


def test_machines_meet_by_a_file_that_their_user_alone_reads(tmp_path: Path) -> None:
    with meeting(tmp_path, "trainer", "127.0.0.1", 5) as (served, secret, serves):
        assert serves and (tmp_path / "trainer.meeting").stat().st_mode & 0o777 == 0o600
        with meeting(tmp_path, "trainer", "127.0.0.1", 5) as (found, same, too):
            assert not too and same == secret and len(secret) == 32
            served.set("said", "heard")
            assert found.get("said") == b"heard"
    assert not (tmp_path / "trainer.meeting").read_text().strip(), "what was served there is for nobody any more"


def test_machines_whose_locks_are_their_own_meet_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on BeeGFS, by default. Of two that come at once the last to write serves."""
    monkeypatch.setattr("penstock.pipeline.run.meeting._take", lambda file, kind: True)
    barrier, hosted = threading.Barrier(2), list[bool]()

    def meet() -> None:
        barrier.wait()
        with meeting(tmp_path, "trainer", "127.0.0.1", 20) as (store, _, serves):
            store.set(f"here-{serves}", "yes")
            assert store.get(f"here-{not serves}") == b"yes"
            barrier.wait(20)
            hosted.append(serves)

    both = [threading.Thread(target=meet) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(40)
    assert sorted(hosted) == [False, True]
