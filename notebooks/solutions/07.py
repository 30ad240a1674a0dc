# %% [markdown]
# Solutions of lab 07's exercises, in order. In the lab: lab.solution("07.1")

# %% 07.1
my_code = round(-1.3 * 127 / 5.2)
print(check("07.1", my_code))

# %% 07.2
my_bits_a_weight = 8 / 32 + 32 / (32 * 128)
print(check("07.2", my_bits_a_weight))

# %% 07.3
my_ms = 1e3 * 3 * 31.2e9 * (4.127 / 8 + 2) / 3000e9
print(check("07.3", my_ms))


# %% 07.4
def my_weight():
    codes8 = four_bit.codes8.view(-1, 256).int()
    constants = four_bit.levels8[codes8] * four_bit.absmax8[:, None] + four_bit.mean
    codes = torch.stack([four_bit.packed >> 4, four_bit.packed & 0b1111], dim=-1)
    return (four_bit.levels[codes.view(-1, 64).int()] * constants.view(-1, 1)).view(512, 256)


class RestoredTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x @ my_weight().T

    @staticmethod
    def backward(ctx, dY):
        return dY @ my_weight()


@patch.object(bnb, "dequantize_4bit", None)
def lean_solution(x):
    return RestoredTwice.apply(x)


print(smaller_than(4, restoring, lean_solution, some_inputs, share=0.1, module=four_bit))
# -> 0 MB kept instead of 0.52
