"""What `labutils diagnose` brings into a training script's process: hooks, clocks and a profiler.

It may import the standard library and the script's own PyTorch only: the script may run in another
environment than the course. `watch` waits for PyTorch, counts and times the steps, `calls` sees
what a step calls, `facts` are the batches' and settings' numbers, `process_note` leaves word of the
process, `run_notebook` runs a notebook's cells, and what reaches inside PyTorch is in `compat`. The
package has a long name of its own, which no script uses.
"""
