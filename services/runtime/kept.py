"""Values that are kept as long as there is room for them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """By key, those that were asked for last, of ``most`` in all, e.g. bytes: each counts by its ``size``. The newest
    is kept however large it is. Threads may share one."""

    def __init__(self, most: int, size: Callable[[T], int] = lambda value: 1) -> None:
        self._most, self._size = most, size
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._sum = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of ``key``, which ``make`` makes where none is kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                self._sum += self._size(value)
            while self._sum > self._most and len(self._values) > 1:
                self._sum -= self._size(self._values.popitem(last=False)[1])
        return value

    def clear(self) -> None:
        """Forgets them all."""
        with self._lock:
            self._values.clear()
            self._sum = 0
