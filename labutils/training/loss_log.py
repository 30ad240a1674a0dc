"""Where the losses go: read at once and written at once, or kept on the device and written in
passing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function
from tqdm import tqdm

Write = Callable[[dict[str, float], int], None]
Across = Callable[[Tensor], Tensor]
"""What makes this process's losses those of all ranks: their mean. Every rank calls it, or none."""


def own(values: Tensor) -> Tensor:
    """A process that trains alone: its loss is the loss."""
    return values


class NotFinite(ArithmeticError):
    """The loss became NaN or infinite; the message names the optimizer step."""

    def __init__(self, loss: float, step: int) -> None:
        super().__init__(
            f"The loss is {loss} at optimizer step {step}: training stopped there. Lower the "
            "learning_rate, or try precision='fp32': is it half precision's range?"
        )


class SynchronousLog:
    """As the public script does: the loss is read on the host twice a micro-step (before the
    backward pass for the average, at its end for the progress bar), and each step's average is
    written and flushed to the disk."""

    def __init__(self, write: Write, accumulation: int, across: Across = own) -> None:
        self.write = write
        self.accumulation = accumulation
        self.across = across
        self.step = 0
        self.losses: list[float] = []
        self.total = 0.0
        self.sink = open(os.devnull, "w")  # noqa: SIM115  closed in close()
        # A bar's cost without its picture, even where TQDM_DISABLE silences the others.
        self.bar = tqdm(desc="Steps", file=self.sink, disable=False)

    def micro_step(self, loss: Tensor) -> None:
        with record_function("log"):
            self.total += self.across(loss.detach().mean()).item() / self.accumulation

    def end_micro_step(self, loss: Tensor) -> None:
        with record_function("log"):
            self.bar.set_postfix(step_loss=loss.detach().item())

    def end_step(self) -> None:
        with record_function("log"):
            self.bar.update(1)
            self.step += 1
            self.losses.append(self.total)
            self.write({"train_loss": self.total}, self.step)
            if not math.isfinite(self.total):
                raise NotFinite(self.total, self.step)
            self.total = 0.0

    def start_at(self, step: int) -> None:
        self.step = step

    def flush(self) -> None:
        """Nothing is left to do: every loss was read at once."""

    def close(self) -> None:
        self.bar.close()
        self.sink.close()


class RingLog:
    """Losses stay on the device, in a ring of two halves. When steps have filled one half, its copy
    to the host is queued behind them on the GPU; it is written when the next half is full. So the
    host never waits for a loss, and NaN is noticed up to `2 * half` steps late. `micro_step` and
    `put` can be captured in a CUDA graph.
    """

    def __init__(
        self,
        write: Write,
        accumulation: int,
        device: torch.device,
        half: int = 16,
        across: Across = own,
    ) -> None:
        self.write = write
        self.accumulation = accumulation
        self.across = across
        self.half = half
        self.start_at(0)
        self.losses: list[float] = []
        self.total = torch.zeros((), device=device)
        self.ring = torch.zeros(2 * half, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        on_gpu = device.type == "cuda"
        self.copy = torch.zeros(2 * half, pin_memory=on_gpu)
        self.arrived = torch.cuda.Event() if on_gpu else None
        self.travelling = 0

    @property
    def tensors(self) -> list[Tensor]:
        """What the device part changes in place."""
        return [self.total, self.ring, self.place]

    def micro_step(self, loss: Tensor) -> None:
        self.total.add_(loss.detach().mean(), alpha=1 / self.accumulation)

    def end_micro_step(self, loss: Tensor) -> None:
        """Nothing is left to do: no bar is kept."""

    def end_step(self) -> None:
        self.put()
        self.passed()

    @torch.no_grad()
    def put(self) -> None:
        """Device part: the step's mean loss goes to its place in the ring."""
        self.ring.index_copy_(0, self.place, self.total.unsqueeze(0))
        self.place.add_(1).remainder_(2 * self.half)
        self.total.zero_()

    def passed(self) -> None:
        """Host part: count the step; at every full half send it off and write the one before."""
        self.step += 1
        if (self.step - self.first_step) % self.half == 0:
            self._write_arrived()
            self._send()

    def start_at(self, step: int) -> None:
        self.first_step = self.step = self.written = step

    def flush(self) -> None:
        self._write_arrived()
        self._send()
        self._write_arrived()

    close = flush

    def _send(self) -> None:
        """Queue the copy of the ring to the host. On a GPU the host doesn't wait for it."""
        self.copy.copy_(self.across(self.ring), non_blocking=True)
        if self.arrived is not None:
            self.arrived.record()
        self.travelling = self.step - self.written

    def _write_arrived(self) -> None:
        """Write the losses of the last copy, which started half a ring of steps ago."""
        if not self.travelling:
            return
        if self.arrived is not None:
            self.arrived.synchronize()
        for _ in range(self.travelling):
            loss = self.copy[(self.written - self.first_step) % (2 * self.half)].item()
            self.written += 1
            self.losses.append(loss)
            self.write({"train_loss": loss}, self.written)
            if not math.isfinite(loss):
                bad, self.written, self.travelling = self.written, self.step, 0
                raise NotFinite(loss, bad)  # what follows is no better
        self.travelling = 0


def open_log(
    kind: str, write: Write, accumulation: int, device: torch.device, across: Across = own
) -> SynchronousLog | RingLog:
    """The log of a recipe's `logging`. A driver tells it each micro-batch's loss, and the end of
    each micro-step and step.
    """
    if kind == "synchronous":
        return SynchronousLog(write, accumulation, across)
    return RingLog(write, accumulation, device, across=across)


def tensorboard(folder: Path, flush: bool) -> tuple[Write, Callable[[], None]]:
    """A TensorBoard writer's write and close; `flush` has each value on the disk before the call
    returns.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))

    def write(values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, global_step=step)
        if flush:
            writer.flush()

    return write, writer.close
