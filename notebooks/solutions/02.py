# %% [markdown]
# Solutions of lab 02's exercises, in order. In the lab: lab.solution("02.1")

# %% 02.1
import gzip

events = json.loads(gzip.decompress(micro_step.path.read_bytes()))["traceEvents"]
forward = next(event for event in events if event["name"] == "forward")
launches = [e["ts"] for e in events if "Launch" in e["name"] and e["ph"] == "X"]
gpu_work = spans_of("kernel", "gpu_memcpy", "gpu_memset") or spans_of("cpu_op")
inside = launches or [1e3 * start for start, _ in spans_of("cpu_op")]
inside = [ts for ts in inside if forward["ts"] <= ts < forward["ts"] + forward["dur"]]
reached, gap_ms = 0.0, 0.0
for start, end in [*sorted(gpu_work), (micro_step.wall_ms, micro_step.wall_ms)]:
    gap_ms, reached = max(gap_ms, start - reached), max(reached, end)
reading = {"kernels": len(spans_of("kernel") or spans_of("cpu_op")), "longest_gap_ms": gap_ms}
print(check_reading(micro_step, **reading, us_a_launch=forward["dur"] / len(inside)))
# -> 5,983 kernels, 109 ms, 66 µs a launch, in the H200's file


# %% 02.2
def profiled_solution(step, folder):
    prof = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder)),
    )
    prof.start()
    for _ in range(5):
        step()
        prof.step()
    prof.stop()
    (file,) = folder.glob("*.pt.trace.json")
    took = Counter()
    for event in json.loads(file.read_text())["traceEvents"]:
        if event.get("cat") == "user_annotation":
            took[event["name"]] += event["dur"] / 1e3 / 3
    return took


print(check_profiled(profiled_solution))
# -> read 6.1 ms, compute 4.2 ms

# %% 02.3
print(check("02.3", (0.85 * 98, 0.85 * 98 / 4, "micro-step")))

# %% 02.4
TABLE = [
    [math.sin(at / 10_000 ** (column / 64)) for column in range(64)] for at in range(POSITIONS)
]
TABLE = torch.tensor(TABLE, device=device)


def calm_step_solution(x):
    hidden = layer(x + TABLE)
    loss = hidden.square().mean()
    assert loss.isfinite(), "NaN or Inf"  # one read; any NaN in it makes the mean one
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, layer.weight)[0]}


print(faster_than(4, hurried_step, calm_step_solution, hidden_states, times=3))
# -> 16 times as fast on two CPU cores
