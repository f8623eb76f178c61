"""What lies between an actor and its broker, and can break."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class BreakableLine:
    """Passes bytes on to the broker at ``address``, until `cut` or the first that has ``word`` on its way there, or
    ``back``: ``word`` is lost then, and the connection with it; ``again``: so is each one after it. New connections are
    taken as before."""

    def __init__(self, address: str, word: bytes = b"", again: bool = False, back: bool = False) -> None:
        self.word, self.cuts, self._again, self._back = word, 0, again, back
        self._there = int(address.rpartition(":")[2])
        self._open: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Breaks every connection."""
        self.cuts += 1
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                there = socket.create_connection(("127.0.0.1", self._there))
                self._open += [here, there]
                for source, to, out in ((here, there, True), (there, here, False)):
                    threading.Thread(target=self._pass_on, args=(source, to, out), daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, out: bool) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                if out != self._back and self.word and self.word in part:
                    self.word = self.word if self._again else b""
                    self.cut()
                to.sendall(part)
        for each in (source, to):
            each.close()
