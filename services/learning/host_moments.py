"""AdamW whose two means lie in host memory (`trainer.offload`: ``optimizer``), and visit the device for an update.

All parameters of a group lie one behind the other in a row of numbers, and so do their means, each in one page of host
memory. An update goes along the row, some numbers at a time:

    come    │ means of part 1 │ part 2          │ part 3 …
    update                    │ part 1 │        │ part 2 │
    go                                 │ part 1 to the host │ part 2 …

so that copies in, arithmetic and copies out run side by side, and a device has the means of two parts at most.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from penstock.services.modeling.parallel.fsdp import local
from penstock.services.modeling.pinned import pin, unpin
from penstock.services.weights.queues import borrow_queue, current_queue, give_back

MOMENTS = ("exp_avg", "exp_avg_sq")
"""As torch's AdamW calls them."""
PART_NUMBERS = 32 << 20
"""Numbers of a mean that visit together: of both, 256 MiB."""
ALIGNED = 64
"""Numbers: what a parameter's begin at a multiple of."""


@dataclass(frozen=True)
class _Some:
    """Numbers of one parameter: its ``first`` to ``end``, which lie at ``place`` in a part."""

    parameter: torch.nn.Parameter
    first: int
    end: int
    place: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """These numbers of the parameter's, its gradient's: a view."""
        return local(whole)[self.first : self.end]

    def visiting(self, part: torch.Tensor) -> torch.Tensor:
        """The same of a mean's ``part``."""
        return part[self.place : self.place + self.end - self.first]


class HostMeans:
    """Means of ``parameters``, which lie on ``device``; they begin as 0: a page of host memory for each of ``names``,
    registered with CUDA where that is a GPU."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], names: Iterable[str], device: torch.device) -> None:
        self._places: dict[torch.nn.Parameter, int] = {}
        self._parts: list[tuple[slice, list[_Some]]] = []
        """Of the row, what visits together, and what of it is whose."""
        size = 0
        for parameter in parameters:
            self._places[parameter] = size
            numbers = local(parameter).numel()
            self._deal(parameter, size, numbers)
            size += -(-numbers // ALIGNED) * ALIGNED
        self.pages = {name: torch.zeros(size, dtype=torch.float32, device="cpu") for name in names}
        if device.type == "cuda":
            pinned = [page for page in self.pages.values() if pin(page)]
            weakref.finalize(self, _unpin, pinned).atexit = False

    def __contains__(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._places

    def of(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Views of the pages, shaped and cut as ``parameter`` is, by name."""
        return {name: self._view(parameter, page) for name, page in self.pages.items()}

    def placed(self, parameter: torch.nn.Parameter, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `of`, once they are what ``state``, which is cut as ``parameter`` is, has by these names."""
        found = self.of(parameter)
        for name, mean in found.items():
            local(mean).copy_(local(state[name]))
        return found

    def parts(self) -> Iterator[tuple[slice, list[_Some]]]:
        """What visits together, and what of it is whose; of parameters without a gradient nothing."""
        for which, every in self._parts:
            if some := [each for each in every if each.parameter.grad is not None]:
                yield which, some

    def _view(self, parameter: torch.nn.Parameter, page: torch.Tensor) -> torch.Tensor:
        shape = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        place = self._places[parameter]
        mine = page[place : place + shape.numel()].view(shape)
        if not isinstance(parameter, DTensor):
            return mine
        return DTensor(mine, parameter._spec, requires_grad=False)  # `from_local` would move it to the mesh's device

    def _deal(self, parameter: torch.nn.Parameter, place: int, numbers: int) -> None:
        """Its ``numbers``, which lie at ``place`` of the row, to the parts that have them."""
        first = 0
        while first < numbers:
            begins = (place + first) // PART_NUMBERS * PART_NUMBERS
            end = min(numbers, begins + PART_NUMBERS - place)
            if not self._parts or self._parts[-1][0].start != begins:
                self._parts.append((slice(begins, begins), []))
            some = self._parts[-1][1]
            some.append(_Some(parameter, first, end, place + first - begins))
            self._parts[-1] = slice(begins, place + end), some
            first = end


def _unpin(pages: Iterable[torch.Tensor]) -> None:
    for page in pages:
        unpin(page)


class HostAdamW(torch.optim.AdamW):
    """torch's fused AdamW, number by number the same, of parameters that lie on ``device``."""

    def __init__(self, groups: Any, device: torch.device, **how: Any) -> None:
        super().__init__(groups, **how, fused=True)
        self._device = device
        self._means = [HostMeans(group["params"], MOMENTS, device) for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Changes every parameter that has a gradient. There is no ``closure``. When it returns the means are in host
        memory, and may be read there."""
        changed = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        if not changed:
            return
        torch._foreach_add_([self._begun(each) for each in changed], 1)  # also those of which this rank has no part
        work = [
            (group, means.pages, which, some)
            for group, means in zip(self.param_groups, self._means, strict=True)
            for which, some in means.parts()
        ]
        if not work:
            return
        longest = max(which.stop - which.start for _, _, which, _ in work)
        slots = torch.empty((min(2, len(work)), len(MOMENTS), longest), dtype=torch.float32, device=self._device)
        update, come, go = current_queue(self._device), borrow_queue(self._device), borrow_queue(self._device)
        free = [update.mark()] * len(slots)
        for number, (group, pages, which, some) in enumerate(work):
            turn = number % len(slots)
            means = [mean[: which.stop - which.start] for mean in slots[turn]]
            come.after(free[turn])
            with come.running():
                for name, mean in zip(MOMENTS, means, strict=True):
                    mean.copy_(pages[name][which], non_blocking=True)
            update.after(come.mark())
            self._change(group, some, means)
            go.after(update.mark())
            with go.running():
                for name, mean in zip(MOMENTS, means, strict=True):
                    pages[name][which].copy_(mean, non_blocking=True)
            free[turn] = go.mark()
        for event in free:
            update.after(event)
            event.synchronize()
        give_back(self._device, come)
        give_back(self._device, go)

    def placed(self, parameter: torch.nn.Parameter, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `HostMeans.placed`."""
        return self._of(parameter).placed(parameter, state)

    def _begun(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """How many updates it has had, in its state, which it has from the first one on."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state.update(self._of(parameter).of(parameter))
        step: torch.Tensor = state["step"]
        return step

    def _of(self, parameter: torch.nn.Parameter) -> HostMeans:
        return next(means for means in self._means if parameter in means)

    def _change(self, group: dict[str, Any], some: list[_Some], means: list[torch.Tensor]) -> None:
        first, second = ([each.visiting(mean) for each in some] for mean in means)
        steps = [self.state[each.parameter]["step"] for each in some]
        adamw(
            [each.of(each.parameter) for each in some],
            [each.of(each.parameter.grad) for each in some if each.parameter.grad is not None],
            first,
            second,
            [],
            [*torch._foreach_sub(steps, 1)],  # which counts them itself, but a parameter may lie in several parts
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
