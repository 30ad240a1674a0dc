"""Workloads: what is trained. A recipe runs on any of them; the training loop knows only what
`Workload` says.

workload = open_workload("sd15-lora", scale="tiny")
"""

from labutils.workloads.base import SCALES, Workload, open_workload, workload_names

__all__ = ["SCALES", "Workload", "open_workload", "workload_names"]
