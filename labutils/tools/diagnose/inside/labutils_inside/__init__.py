"""What `labutils diagnose` brings into a training script's process: hooks, clocks and a profiler.

Only the standard library and the script's own PyTorch are used here: the script may run in another
environment than the course. `arrival` waits for PyTorch, `watch` goes through the stages, `calls`
sees what one step calls, `batches` looks into what the DataLoader brings. It is a package of its
own name, so that the course stays off the script's path.
"""
