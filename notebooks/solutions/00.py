# %% [markdown]
# Solutions of lab 00's exercises, in order. In the lab: lab.solution("00.1")

# %% 00.1
ridge = 877.9e12 / 2 / 1792e9
print(check("00.1", ridge))


# %% 00.2
def backward_floor(tokens, width, tflops, gb_per_s):
    flops, moved = 2 * tokens * width**2, 2 * (2 * tokens * width + width**2)
    return max(flops / tflops / 1e9, moved / gb_per_s / 1e6)


print(check_floor(backward_floor))
# -> right: with few tokens the floor is the reading of W


# %% 00.3
def in_turns(a, b, rounds=9):
    def seconds(call):
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    found = []
    for turn in range(rounds):
        order = (a, b) if turn % 2 else (b, a)  # neither is always the later one
        took = {call: seconds(call) for call in order}
        found.append(took[a] / took[b])
    return median(found)


print(check_ratio(in_turns))
# -> 2.02, where 2 is true

# %% 00.4
print(faster_than(4, one_by_one, torch.bmm, rows_and_adapters, times=4))
# -> 10 times as fast on two CPU cores
