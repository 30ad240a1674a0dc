"""Starts the ranks of a launch and waits for them, by torch.distributed.elastic, as torchrun does.

It runs as a file, not as a module of the package, whose imports would take longer than the rest.
Order: {"ranks", "command", "logs"}; answer: {"failures": {rank: exit code}}, those that elastic saw
fail before it stopped the others; a negative exit code is a signal.
"""

import json
import sys
import uuid

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def main() -> None:
    order = json.loads(sys.stdin.readline())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=order["ranks"],
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=order["logs"], redirects=Std.ALL),
    )
    failures = {}
    try:
        elastic_launch(config, sys.executable)(*order["command"])
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
    print("\x1e" + json.dumps({"failures": failures}), flush=True)


if __name__ == "__main__":
    main()
