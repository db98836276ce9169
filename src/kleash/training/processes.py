"""The little that training needs of several processes: who I am, and sums over all. One process needs no
communication.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn

from kleash.errors import UsageError
from kleash.methods.base import Sums


class Processes:
    """Accelerate's processes. The model is not wrapped: gradients are summed here, once per step (see
    `sum_gradients`).
    """

    def __init__(self, tracker: str | None = None, folder: str | None = None) -> None:
        try:
            # On a machine without an accelerator the CPU must be asked for, or Accelerate sees no processes.
            cpu = not torch.accelerator.is_available()
            self.accelerator = Accelerator(
                cpu=cpu, log_with=tracker, project_dir=folder, mixed_precision="no"
            )
        except ValueError as error:
            raise UsageError(
                f"tracker={tracker} is not one that Accelerate knows or that is installed here: {error}"
            ) from error
        self.tracker = tracker

    @property
    def rank(self) -> int:
        """Number of this process."""
        return int(self.accelerator.process_index)

    @property
    def world(self) -> int:
        """How many processes there are."""
        return int(self.accelerator.num_processes)

    @property
    def main(self) -> bool:
        """Whether this process writes the files."""
        return bool(self.accelerator.is_main_process)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.accelerator.device

    def sum(self, value: float) -> float:
        """The sum of a number over the processes."""
        if self.world == 1:
            return float(value)
        return float(self._all_reduce(torch.tensor(value, dtype=torch.float64, device=self.device)))

    def agree(self, value: str) -> str:
        """The main process's value, on every process."""
        return value if self.world == 1 else str(broadcast_object_list([value])[0])

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any process."""
        return self.sum(float(flag)) > 0

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """The elementwise sum over the processes."""
        return tensor if self.world == 1 else self._all_reduce(tensor.to(self.device)).to(tensor.device)

    def gather(self, tensor: Tensor) -> Tensor:
        """Equally shaped tensors of all processes, joined along their first axis in process order."""
        if self.world == 1:
            return tensor
        gathered: Tensor = self.accelerator.gather(tensor.to(self.device))
        return gathered.to(tensor.device)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up every parameter's gradient over the processes.

        Each process has divided its sum of item losses by the number of items of all of them, so the sum, and
        not the mean that data-parallel wrappers take, is the gradient of one big batch. A parameter that the
        loss did not reach has gradient 0: so all processes issue the same collectives, and one process takes
        the same step as several (the optimizer passes over a parameter without a gradient, momentum and all).
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.world > 1:
                self._all_reduce(parameter.grad)

    def equalise(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every process the main one's weights."""
        if self.world > 1:
            for parameter in parameters:
                torch.distributed.broadcast(parameter.data, src=0)

    def merge(self, sums: Sums) -> Sums:
        """Sums and counts added up over the processes, so that a mean is one over all items and never one of
        means.
        """
        if self.world == 1:
            return sums
        merged: Sums = {}
        for part in gather_object([sums]):
            add_sums(merged, part)
        return merged

    def wait(self) -> None:
        """Wait for the other processes."""
        self.accelerator.wait_for_everyone()

    def start_tracker(self, name: str, config: dict[str, Any]) -> None:
        """Open the tracker, if one was asked for, with the options that a tracker can hold."""
        if self.tracker is not None:
            plain = {
                key: value for key, value in config.items() if isinstance(value, int | float | str | bool)
            }
            self.accelerator.init_trackers(name, config=plain)

    def track(self, values: dict[str, Any], step: int) -> None:
        """Log numbers to the tracker, if there is one."""
        if self.tracker is not None:
            self.accelerator.log({k: v for k, v in values.items() if isinstance(v, int | float)}, step=step)

    def end_tracker(self) -> None:
        """Close the tracker."""
        if self.tracker is not None:
            self.accelerator.end_training()

    @staticmethod
    def _all_reduce(tensor: Tensor) -> Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor


def add_sums(into: Sums, more: Sums) -> None:
    """Add (sum, count) pairs by name, in place; of names that end in /max the largest is kept."""
    for name, (value, count) in more.items():
        have = into.get(name)
        if have is None:
            into[name] = (value, count)
        elif name.endswith("/max"):
            into[name] = (max(have[0], value), count)
        else:
            into[name] = (have[0] + value, have[1] + count)


def means(sums: Sums) -> dict[str, float]:
    """sum / count by name; what was never counted is left out."""
    return {name: value / count for name, (value, count) in sums.items() if count}
