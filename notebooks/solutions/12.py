# %% [markdown]
# Solutions of lab 12's exercises, in order. In the lab: lab.solution("12.1")

# %% 12.1
print(check("12.1", "inconclusive"))

# %% 12.2
print(check("12.2", (1 / 0.5, 1 / (0.5 * 0.7))))


# %% 12.3
def the_rule(a, again, b):
    _, least, most = effect(a, again)
    _, low, high = effect(a, b)
    if least < 0.97 or most > 1.03:
        return "inconclusive"
    f = max(most, 1 / least)
    if high < 1 / f:
        return "confirmed"
    return "refuted" if low > f else "inconclusive"


print(lab12_scoreboard.check_rule(the_rule))
# -> 200 of 200 verdicts are the course's


# %% 12.4
def best_step(inputs, labels):
    # Each position by itself, and as many to learn in each micro-batch: one batch of these.
    asked = labels != -100
    hidden = encoder(inputs[asked])
    adapted = hidden @ W.T + hidden @ A.T @ B.T
    loss = cross_entropy(adapted @ words.T, labels[asked])
    gradients = torch.autograd.grad(loss, adapter)
    return {"loss": loss.item()} | dict(
        zip(("A's gradient", "B's gradient"), gradients, strict=True)
    )


print(faster_than(4, stock_step, best_step, micro_batches, times=4, tolerance=1e-3))
# -> 17 times as fast on two CPU cores
