"""The inside of the sandbox: gives up the network and most of the machine, then runs a program. Imports nothing of
ours.

Called as ``python -I child.py PROGRAM SOCKET CPU_S MEMORY_MB NETWORK``; a second file beside PROGRAM, ``tests.py``, is
run in the same names. What it reads from the descriptor SOCKET at the start it says there once both have come to their
end, which a program that exits early never does.
"""

import ctypes
import os
import resource
import sys
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
NO_NAMESPACE = 97
"""Exit code: this machine lets nobody leave the network."""
FILE_BYTES = 16 << 20


def main(program: Path, socket: int, cpu_s: int, memory_mb: int, network: bool) -> None:
    """Does not return where the program ends the process."""
    if not network and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET):
        os.write(2, os.strerror(ctypes.get_errno()).encode())
        os._exit(NO_NAMESPACE)
    for what, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    word = os.read(socket, 64)
    sys.argv = [program.name]
    names = {"__name__": "__main__"}
    for path in (program, program.with_name("tests.py")):
        if path.exists():
            exec(compile(path.read_text(), path.name, "exec"), names)
    sys.stdout.flush()
    os.write(socket, word)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "True")
