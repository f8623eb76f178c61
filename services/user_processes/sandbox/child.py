"""The inside of the sandbox: gives up the network and most of the machine, then runs a program. Imports nothing of
ours.

Called as ``python -I child.py PROGRAM SOCKET CPU_S MEMORY_MB NETWORK PARENT``; of two files beside PROGRAM,
``tests.py`` is run in the same names, and ``built_in.py`` defines what is there as ``len`` is. Once both have come to
their end, it says on the descriptor SOCKET what it reads there: only then, since a program may look at what its callers
know. One that exits early never comes to that, but that without tests it may end with ``exit()``.

Three processes do it. The one that was called watches, and ends the others on SIGTERM, or when PARENT has ended, and
then removes the program's folder too. The second is the first of a namespace of processes, where the kernel has one for
us: when it ends, so does all that is in it, whatever sessions it has made. The third is the program.
"""

import builtins
import contextlib
import ctypes
import errno
import os
import re
import resource
import signal
import struct
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
SYSTEMS = {"x86_64": (0xC000003E, 41, 53), "aarch64": (0xC00000B7, 198, 199)}
"""Of each machine: what the kernel calls its calls (AUDIT_ARCH), and the numbers of socket and socketpair."""
IO_URING_SETUP = 425
SOCK_STREAM, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16  # Linux's; the module socket takes long to import
NO_NAMESPACE = 97
"""Exit code: this machine lets nobody leave the network."""
FILE_BYTES = 16 << 20
PROCESSES = 256
"""At once, threads too; see `_counts_here`."""


def main(program: Path, said: int, cpu_s: int, memory_mb: int, network: bool, parent: int) -> None:
    """Does not return where the program ends the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    alone = _leave(libc, network)
    if child := os.fork():
        _watch(libc, child, program.parent, parent)
    _end_with_parent(libc, signal.SIGKILL)
    if not network:
        _leave_sockets(libc)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a pipe that is read would fill whoever reads it
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)
    for what, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        *([(resource.RLIMIT_NPROC, PROCESSES)] if alone and _counts_here() else []),
    ):
        resource.setrlimit(what, (limit, limit))
    sys.argv = [program.name]
    itself, names = os.getpid(), _main_module()
    tests = program.with_name("tests.py").read_text()  # now: the program may write to its folder
    _build_in(program.with_name("built_in.py").read_text())
    try:
        exec(compile(program.read_text(), program.name, "exec"), names)
    except SystemExit as end:  # which is how it may end where nothing is to run behind it
        if tests or end.code not in (None, 0):
            raise
    exec(compile(tests, "tests.py", "exec"), names)
    with contextlib.suppress(AttributeError, ValueError):  # closed, or replaced by nothing
        sys.stdout.flush()
    if os.getpid() == itself:  # and no child that the program has made
        os.write(said, os.read(said, 64))


def _main_module() -> dict[str, Any]:
    """The names of a new ``__main__``, where pickle and multiprocessing look for what a program defines."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    return vars(module)


def _build_in(text: str) -> None:
    """What ``text`` defines is no name of the program's own, and takes the place of nothing."""
    names: dict[str, Any] = {}
    exec(text, {}, names)
    for name, value in names.items():
        vars(builtins).setdefault(name, value)


def _leave(libc: Any, network: bool) -> bool:
    """Leaves the network, unless ``network``, and what others' processes are, where the kernel lets us; whether there
    is a namespace of our own now. Ends this process where it cannot leave the network."""
    if not hasattr(libc, "unshare"):  # not Linux
        return network or _refuse("it is not Linux")
    wanted = CLONE_NEWUSER | (0 if network else CLONE_NEWNET)
    if not libc.unshare(wanted | CLONE_NEWPID):
        return True
    if network:
        return False
    return not libc.unshare(wanted) or _refuse(os.strerror(ctypes.get_errno()))


def _leave_sockets(libc: Any) -> None:
    """From now on a new socket is of those that a namespace of networks bounds: IPv4, IPv6 and netlink. Sockets in the
    file system are not bounded by it, a run's Redis among them. Pairs stay, which multiprocessing takes; not those of
    datagrams, which could be sent elsewhere. Does nothing where the kernel has no seccomp, or for other machines."""
    if os.uname().machine not in SYSTEMS or sys.maxsize < 1 << 32 or not hasattr(libc, "prctl"):
        return
    arch, new, pair = SYSTEMS[os.uname().machine]
    load, equal, at_least, both, end = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF_LD | BPF_W | BPF_ABS, and so on
    refused, allowed = 14, 15
    steps = [
        (load, 0, 0, 4),  # for which machine the call is
        (equal, 0, refused - 2, arch),
        (load, 0, 0, 0),  # its number
        (at_least, refused - 4, 0, 1 << 30),  # x32's
        (equal, refused - 5, 0, IO_URING_SETUP),  # which makes sockets too
        (equal, 0, 3, pair),
        (load, 0, 0, 24),  # the second argument: the kind
        (both, 0, 0, 0xF),  # without its flags
        (equal, allowed - 9, refused - 9, SOCK_STREAM),
        (equal, 0, allowed - 10, new),
        (load, 0, 0, 16),  # the first argument: the family
        (equal, allowed - 12, 0, AF_INET),
        (equal, allowed - 13, 0, AF_INET6),
        (equal, allowed - 14, refused - 14, AF_NETLINK),
        (end, 0, 0, 0x50000 | errno.EPERM),
        (end, 0, 0, 0x7FFF0000),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    about = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(program)))
    zero = ctypes.c_ulong(0)  # as wide as the kernel looks at it
    libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
    libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), about, zero, zero)


def _refuse(why: str) -> NoReturn:
    os.write(2, why.encode())
    os._exit(NO_NAMESPACE)


def _watch(libc: Any, child: int, folder: Path, parent: int) -> NoReturn:
    """Until ``child`` has ended, by itself or because it must."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    _end_with_parent(libc, signal.SIGTERM)
    if os.getppid() != parent:  # it ended just before
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if os.getppid() != parent:
        os.execvp("rm", ["rm", "-rf", str(folder)])  # however deep it is
    os._exit(0)


def _end_with_parent(libc: Any, number: int) -> None:
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, number)


def _counts_here() -> bool:
    """Linux counts a user's processes in each namespace, since 5.14; before, all that the user has anywhere."""
    return [int(part) for part in re.findall(r"\d+", os.uname().release)[:2]] >= [5, 14]


if __name__ == "__main__":
    _said, _cpu_s, _memory_mb = map(int, sys.argv[2:5])
    main(Path(sys.argv[1]), _said, _cpu_s, _memory_mb, sys.argv[5] == "True", int(sys.argv[6]))
