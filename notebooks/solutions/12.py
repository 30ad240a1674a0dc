# %% [markdown]
# Solutions of lab 12's exercises, in order. In the lab: lab.solution("12.1")

# %% 11.1
print(check("12.1", "inconclusive"))

# %% 11.2
print(check("12.2", (2, 2)))

# %% 11.3
print(
    check_claim(
        Claim(
            *("B1.pin", "B1", "2.1", "statement", "Pinned memory shortens the step.", "03"),
            judge="compare",
            runs={"base": THREE_WORKERS, "changed": PINNED},
            how={"direction": "less"},
        )
    )
)


# %% 11.4
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
