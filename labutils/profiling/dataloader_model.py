"""How long a training step takes with so many DataLoader workers, predicted from what can be
measured without them.

With no worker, reading a micro-batch and computing on it follow one another: read + compute. With
`w` workers they overlap, and the slower one sets the pace: max(compute, read / w). So workers
beyond read / compute bring nothing. Where cores are few, workers and training take time from each
other as well: no step can be shorter than all the processor time in it, shared out among the cores.

`Pipeline.step_ms` is this law. It leaves out that batches are handed over in order, which shows
near the bend.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pipeline:
    """What the prediction needs; times are of one micro-batch, in ms.

    read_ms: one thread's time to make it (decode, resize, tokenise ...). compute_ms: what training
    does with it once it has it. hand_over_ms: what it costs training to take it from a worker.
    cores: threads that can run at once. threads: how many of them training keeps busy while it
    computes: one that launches work on a GPU, all on a CPU.
    """

    read_ms: float
    compute_ms: float
    cores: int
    hand_over_ms: float = 0.0
    threads: int = 1
    accumulation: int = 4

    @property
    def busy_ms(self) -> float:
        """What training does for each micro-batch that a worker made."""
        return self.hand_over_ms + self.compute_ms

    def step_ms(self, workers: int) -> float:
        """The law: milliseconds of one optimizer step with so many workers."""
        if workers == 0:
            return self.accumulation * (self.read_ms + self.compute_ms)
        shared_out = (self.read_ms + self.busy_ms * self.threads) / self.cores
        return self.accumulation * max(self.busy_ms, self.read_ms / workers, shared_out)
