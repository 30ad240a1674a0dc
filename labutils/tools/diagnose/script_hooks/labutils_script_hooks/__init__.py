"""What `labutils diagnose` brings into a training script's process: hooks, clocks and a profiler.

It may import the standard library and the script's own PyTorch only: the script may run in another
environment than the course. `torch_import` waits for PyTorch, `watch` counts and times the steps,
`calls` sees what a step calls, `batches` looks into what the DataLoader brings, and `process_note`
leaves word of the process. The package has a long name of its own, which no script uses.
"""
