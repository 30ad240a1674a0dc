# %% [markdown]
# Solutions of lab 09's exercises, in order. In the lab: lab.solution("09.1")

# %% 09.1
my_gb = (4 + 4 + 2 * 4, 4 + 4 + 2 * 1)
print(check("09.1", my_gb))

# %% 09.2
my_start = int((80 * 0.9 - 14) // 6)
print(check("09.2", my_start))


# %% 09.3
class AgainSolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, slope):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        y.backward(slope)  # the block's parameters get their gradients, too
        return None, x.grad


def by_hand_solution(x):
    for block in blocks:
        x = x + AgainSolution.apply(block, x)
    return x


print(smaller_than(3, all_kept, by_hand_solution, some_rows, share=1 / 3, module=blocks))
# -> 0.79 MB kept instead of 7.1
