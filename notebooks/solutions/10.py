# %% [markdown]
# Solutions of lab 10's exercises, in order. In the lab: lab.solution("10.1")

# %% 10.1
my_saving = 100 * (1 - max(25, 20 / 4) / max(25, 40 / 4))
print(check("10.1", my_saving))
