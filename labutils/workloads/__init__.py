"""What is trained. A recipe runs on any workload; the loop knows only what `Workload` says.

It may import layers, data, profiling, results and recipe.

workload = open_workload("sd15-lora", scale="tiny")
"""

from labutils.workloads.base import SCALES, Workload, open_workload

__all__ = ["SCALES", "Workload", "open_workload"]
