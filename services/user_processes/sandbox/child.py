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

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 1 << 1, 1 << 2, 1 << 14, 1 << 18
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
SYSTEMS = {
    "x86_64": (0xC000003E, 41, 53, (109, 112), (62, 129, 200, 234, 297), (72, 16)),
    "aarch64": (0xC00000B7, 198, 199, (154, 157), (129, 138, 130, 131, 240), (25, 29)),
}
"""Of each machine: what the kernel calls its calls (AUDIT_ARCH), and the numbers of socket, of socketpair, of those
that leave a group of processes (setpgid, setsid), and of those that signal others (kill, rt_sigqueueinfo, tkill,
tgkill, rt_tgsigqueueinfo), and of fcntl and ioctl, some of whose commands have others signalled."""
OWNERS = ((8, 15), (0x8901, 0x8902))
"""Those commands: F_SETOWN, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP."""
IO_URING_SETUP, PIDFD_SEND_SIGNAL = 425, 424
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_VERSION, LANDLOCK_PATH_BENEATH, LANDLOCK_SCOPE_SIGNAL = 1, 1, 2
LANDLOCK_WRITE, LANDLOCK_MAKE_BLOCK, LANDLOCK_REFER, LANDLOCK_TRUNCATE = 1 << 1, 1 << 11, 1 << 13, 1 << 14
LANDLOCK_CHANGES = LANDLOCK_WRITE | 0x1FF0
"""To write, and whatever removes (2 rights) or makes (7) what is in a folder."""
REFERRED, TRUNCATED = 2, 3
"""The versions of Landlock that know of moving to another folder, and of cutting files."""
SCOPED = 6
"""The version that bounds signals too."""
CAPABILITIES = 0x20080522
"""Version of how they are told."""
SOCK_STREAM, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16  # Linux's; the module socket takes long to import
NO_NAMESPACE = 97
"""Exit code: this machine lets nobody leave the network."""
NO_PROCESS = 96
"""Exit code: no more processes may be started here, at present."""
FILE_BYTES, FOLDER_BYTES, SHARED_BYTES = 16 << 20, 128 << 20, 64 << 20
"""Of one file; and, in a namespace, of all in the program's folder, and in its /dev/shm: they are in memory then."""
PROCESSES = 256
"""At once, threads too; see `_counts_here`."""


def main(program: Path, said: int, cpu_s: int, memory_mb: int, network: bool, parent: int) -> None:
    """Does not return where the program ends the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = _leave(libc, network)
    if child := _fork():
        _watch(libc, child, program.parent, parent)
    _end_with_parent(libc, signal.SIGKILL)
    if place == "namespace":
        _own_files(libc, program.parent)
    if not network:
        _leave_sockets(libc, place)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a pipe that is read would fill whoever reads it
    with contextlib.suppress(OSError):  # where memory ends it is the program that the kernel ends, and nobody larger
        Path("/proc/self/oom_score_adj").write_text("1000")
    if child := _fork():
        os.waitpid(child, 0)
        os._exit(0)
    _keep_to(libc, program.parent)
    for what, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        # Elsewhere the user's processes count that other containers have, too.
        *([(resource.RLIMIT_NPROC, PROCESSES)] if place == "namespace" and _counts_here() else []),
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


def _fork() -> int:
    """As `os.fork`; ends this process where others have all that may be."""
    try:
        return os.fork()
    except BlockingIOError:
        os._exit(NO_PROCESS)


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


def _leave(libc: Any, network: bool) -> str:
    """Leaves the network, unless ``network``, and what others' processes are, where the kernel lets us. Returns where
    this process is now: in a ``namespace`` of its own; or, where there may be none, as in most containers, in a domain
    of Landlock ``without_signals`` to others, or in one ``with_signals``, and no network is left only once no socket
    can be made; or nowhere else (empty). Ends this process where it cannot leave the network."""
    if not hasattr(libc, "unshare"):  # not Linux
        return "" if network else _refuse("it is not Linux")
    wanted, itself = CLONE_NEWUSER | (0 if network else CLONE_NEWNET), (os.getuid(), os.getgid())
    if not libc.unshare(wanted | CLONE_NEWPID):
        _stay(*itself)
        return "namespace"
    if network:
        return _landlock(libc)
    if not libc.unshare(wanted):
        _stay(*itself)
        return "namespace"
    why = os.strerror(ctypes.get_errno())
    return _landlock(libc) or _refuse(why)


def _stay(user: int, group: int) -> None:
    """In a new namespace of users the same one as before, or no file could be made in what is mounted there."""
    for name, told in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with contextlib.suppress(OSError):
            Path(f"/proc/self/{name}").write_text(told)


def _own_files(libc: Any, folder: Path) -> None:
    """What lies in ``folder``, and in /dev/shm, is in memory of its own from now on, of which there is so much, and
    which ends with it: others' memory, which may be mapped by processes that would die of its end, is not there. Does
    nothing where the kernel allows none."""
    kept = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None):
        return
    if Path("/dev/shm") not in folder.resolve().parents:  # it would be hidden
        _mount(libc, b"/dev/shm", f"size={SHARED_BYTES},mode=1777")
    if _mount(libc, os.fsencode(folder), f"size={FOLDER_BYTES},mode=700"):
        os.chdir(folder)
        for name, content in kept.items():
            (folder / name).write_bytes(content)


def _mount(libc: Any, place: bytes, options: str) -> bool:
    """Memory, at ``place``. Whether that was done."""
    return not libc.mount(b"tmpfs", place, b"tmpfs", ctypes.c_ulong(MS_NOSUID | MS_NODEV), options.encode())


def _landlock(libc: Any) -> str:
    """Nothing of processes outside can be read from now on, such as their environment (/proc/PID/environ). See `_leave`
    for what it returns; empty where the kernel has no Landlock, or no filter for this machine."""
    version = _landlock_version(libc)
    if version < 1 or os.uname().machine not in SYSTEMS or sys.maxsize < 1 << 32:
        return ""
    # A domain must forbid something, and nobody makes devices. Each forbids moving files to another folder, too, but
    # where that is allowed.
    moving = LANDLOCK_REFER if version >= REFERRED else 0
    if not _domain(libc, version, LANDLOCK_MAKE_BLOCK | moving, {"/": moving} if moving else {}):
        return ""
    libc.capset(struct.pack("=Ii", CAPABILITIES, 0), bytes(24))  # or root would read there nevertheless
    return "without_signals" if version >= SCOPED else "with_signals"


def _landlock_version(libc: Any) -> int:
    """Below 1: there is none."""
    return int(libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_VERSION))


def _domain(libc: Any, version: int, forbidden: int, allowed: dict[str, int]) -> bool:
    """Enters a domain of Landlock: what is ``forbidden`` of files is ``allowed`` below these paths alone (one that is
    not there is passed over); signals go nowhere else, where the ``version`` bounds them. Whether that was done."""
    told = struct.pack("=3Q", forbidden, 0, LANDLOCK_SCOPE_SIGNAL)[: 24 if version >= SCOPED else 8]
    made = libc.syscall(LANDLOCK_CREATE_RULESET, told, ctypes.c_size_t(len(told)), 0)
    if made < 0:
        return False
    for path, rights in allowed.items():
        with contextlib.suppress(OSError):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            libc.syscall(LANDLOCK_ADD_RULE, made, LANDLOCK_PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
            os.close(place)
    zero = ctypes.c_ulong(0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
    entered = not libc.syscall(LANDLOCK_RESTRICT_SELF, made, 0)
    os.close(made)
    return entered


def _keep_to(libc: Any, folder: Path) -> None:
    """From now on files are written, made and removed in ``folder`` alone, and where multiprocessing has its locks:
    what lies elsewhere would stay, and fill a disk that others need. Devices such as /dev/null can be written to. Does
    nothing where the kernel has no Landlock."""
    version = _landlock_version(libc) if hasattr(libc, "unshare") else 0
    if version < 1:
        return
    rights = LANDLOCK_CHANGES | (version >= REFERRED and LANDLOCK_REFER) | (version >= TRUNCATED and LANDLOCK_TRUNCATE)
    devices = rights & (LANDLOCK_WRITE | LANDLOCK_TRUNCATE)
    _domain(libc, version, rights, {str(folder): rights, "/dev/shm": rights, "/dev": devices})


def _leave_sockets(libc: Any, place: str) -> None:
    """From now on a new socket is of those that a namespace of networks bounds: IPv4, IPv6 and netlink. Sockets in the
    file system are not bounded by it, a run's Redis among them. Pairs stay, which multiprocessing takes; not those of
    datagrams, which could be sent elsewhere. Without a namespace none can be made, nobody leaves the group of processes
    that is ended in the end, and, where Landlock does not see to that, nobody signals others. Does nothing where the
    kernel has no seccomp, or for other machines."""
    if os.uname().machine not in SYSTEMS or sys.maxsize < 1 << 32 or not hasattr(libc, "prctl"):
        return
    arch, new, pair, leaving, signalling, owning = SYSTEMS[os.uname().machine]
    families, refused = [AF_INET, AF_INET6, AF_NETLINK], [IO_URING_SETUP]  # which makes sockets too
    if place != "namespace":
        families, refused = [], [*refused, *leaving]
    if place == "with_signals":
        refused += [PIDFD_SEND_SIGNAL, *signalling]
    told: list[tuple[str, int, str, str] | str] = []
    for call, commands in zip(owning, OWNERS, strict=True) if place == "with_signals" else ():
        told += [("equal", call, "", f"not {call}"), ("load", 24, "", "")]
        told += [*(("equal", command, "no", "") for command in commands), ("equal", 0, "yes", "yes"), f"not {call}"]
    steps: list[tuple[str, int, str, str] | str] = [
        ("load", 4, "", ""),  # for which machine the call is
        ("equal", arch, "", "no"),
        ("load", 0, "", ""),  # its number
        ("at least", 1 << 30, "no", ""),  # x32's
        *(("equal", number, "no", "") for number in refused),
        *told,
        ("equal", pair, "", "no pair"),
        ("load", 24, "", ""),  # the second argument: the kind
        ("and", 0xF, "", ""),  # without its flags
        ("equal", SOCK_STREAM, "yes", "no"),
        "no pair",
        ("equal", new, "", "yes"),
        ("load", 16, "", ""),  # the first argument: the family
        *(("equal", family, "yes", "") for family in families),
        "no",
        ("end", 0x50000 | errno.EPERM, "", ""),
        "yes",
        ("end", 0x7FFF0000, "", ""),
    ]
    code = _assembled(steps)
    program = ctypes.create_string_buffer(code)
    about = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(program)))
    zero = ctypes.c_ulong(0)  # as wide as the kernel looks at it
    libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
    failed = libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), about, zero, zero)
    if failed and place != "namespace":
        _refuse(os.strerror(ctypes.get_errno()))


def _assembled(steps: "list[tuple[str, int, str, str] | str]") -> bytes:
    """BPF of ``steps``: an operation, its number, and the labels to go to where it holds and where not (empty: on); or
    a label of the next one."""
    names = {"load": 0x20, "equal": 0x15, "at least": 0x35, "and": 0x54, "end": 0x06}  # BPF_LD | BPF_W | BPF_ABS, …
    places: dict[str, int] = {}
    found: list[tuple[str, int, str, str]] = []
    for step in steps:
        if isinstance(step, str):
            places[step] = len(found)
        else:
            found.append(step)

    def jump(label: str, at: int) -> int:
        return places[label] - at - 1 if label else 0

    return b"".join(
        struct.pack("=HBBI", names[what], jump(yes, at), jump(no, at), number)
        for at, (what, number, yes, no) in enumerate(found)
    )


def _refuse(why: str) -> NoReturn:
    os.write(2, why.encode())
    os._exit(NO_NAMESPACE)


def _watch(libc: Any, child: int, folder: Path, parent: int) -> NoReturn:
    """Until ``child`` has ended, by itself or because it must."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    _end_with_parent(libc, signal.SIGTERM)
    if os.getppid() != parent:  # it ended just before
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if os.getppid() != parent:
        os.execvp("rm", ["rm", "-rf", str(folder)])  # however deep it is
    os._exit(code if code in (NO_NAMESPACE, NO_PROCESS) else 0)


def _end_with_parent(libc: Any, number: int) -> None:
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, number)


def _counts_here() -> bool:
    """Linux counts a user's processes in each namespace, since 5.14; before, all that the user has anywhere."""
    return [int(part) for part in re.findall(r"\d+", os.uname().release)[:2]] >= [5, 14]


if __name__ == "__main__":
    _said, _cpu_s, _memory_mb = map(int, sys.argv[2:5])
    main(Path(sys.argv[1]), _said, _cpu_s, _memory_mb, sys.argv[5] == "True", int(sys.argv[6]))
