"""A small training script that comes to PyTorch, to its update and to its loop in many ways.

python many_ways.py --torch lazily --optimizer own --loop thread
"""

import argparse
import importlib
import importlib.util
import multiprocessing
import sys
import threading


def imported(how):
    spec = importlib.util.find_spec("torch")  # as datasets and transformers look for it
    if how == "lazily":  # executed when something of it is first used
        spec.loader = importlib.util.LazyLoader(spec.loader)
        sys.modules["torch"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["torch"])
    elif how == "in a thread":
        thread = threading.Thread(target=importlib.import_module, args=["torch"])
        thread.start()
        thread.join()
    return importlib.import_module("torch")


class Descent:
    """An optimizer of one's own, which knows nothing of PyTorch's class."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        for parameter in self.parameters:
            parameter.data -= 0.01 * parameter.grad


def optimizers(how, torch, model):
    if how == "several":
        return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (model[0], model[2])]
    if how == "bitsandbytes":
        import bitsandbytes

        return [bitsandbytes.optim.AdamW8bit(model.parameters())]
    if how == "lbfgs":
        return [torch.optim.LBFGS(model.parameters(), max_iter=5)]
    return [{"own": Descent, "adamw": torch.optim.AdamW}[how](model.parameters())]


def train(options):
    torch = imported(options.torch)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    update = optimizers(options.optimizer, torch, model)
    network = torch.compile(model, backend="eager") if options.compiled else model

    def closure():
        for optimizer in update:
            optimizer.zero_grad()
        loss = 0
        for _ in range(10):
            loss = loss + network(torch.rand(32, 16)).square().mean()
        loss.backward()
        return loss

    for step in range(40):
        if options.optimizer == "lbfgs":
            update[0].step(closure)
            continue
        closure()
        for optimizer in update if step >= options.passed_over else []:
            optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", default="found")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--loop", default="function")
    parser.add_argument("--passed-over", type=int, default=0, help="updates, as by a GradScaler")
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    if options.loop == "function":
        train(options)
        return
    kinds = {"thread": threading.Thread, "fork": multiprocessing.get_context("fork").Process}
    loop = kinds[options.loop](target=train, args=[options])
    loop.start()
    loop.join()


if __name__ == "__main__":
    main()
