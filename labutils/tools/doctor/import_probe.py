"""A program of its own: import the packages named on the command line, and say in JSON lines how
each went.

The doctor runs it in a process that may crash, hang or be patched by what it imports. A package
counts only after a use of it has worked, because several import well and fail at their first call.
"""

import gc
import importlib
import json
import sys
import warnings

MARK = "@labutils@"
"""Begins each line of ours: packages print what they like."""


def say(**found):
    print(MARK + json.dumps(found), flush=True)


def first_words(error):
    return (f"{type(error).__name__}: " + " ".join(str(error).split()))[:300]


def torch_facts(torch):
    """See `labutils.tools.doctor.facts.Torch`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {
            "cuda": torch.version.cuda,
            "architectures": [],
            "available": torch.cuda.is_available(),
            "trial": "",
        }
        if found["available"]:
            card = torch.cuda.get_device_properties(0)
            found |= {
                "architectures": torch.cuda.get_arch_list(),
                "name": card.name,
                "memory": card.total_memory,
            }
            found |= {"capability": [card.major, card.minor]}
            try:
                a = torch.rand(64, 64, device="cuda", dtype=torch.float16)
                (a @ a).float().sum().item()
            except Exception as error:
                found["trial"] = first_words(error)
    return found | {"warning": " ".join(str(caught[0].message).split()) if caught else ""}


def use(name, module):
    """The smallest use of `module` that shows whether it works."""
    if name == "torch":
        say(torch=torch_facts(module))
    elif name in ("transformers", "diffusers"):  # these import nothing until a name is asked for
        getattr(
            module, {"transformers": "CLIPTextModel", "diffusers": "UNet2DConditionModel"}[name]
        )
    elif name == "bitsandbytes":
        import torch

        there = "cuda" if torch.cuda.is_available() else "cpu"
        module.functional.quantize_4bit(torch.rand(64, 64, device=there), quant_type="nf4")
    elif name == "xformers":
        import torch
        import xformers.ops

        if torch.cuda.is_available():
            q = torch.rand(1, 16, 1, 64, device="cuda", dtype=torch.float16)
            xformers.ops.memory_efficient_attention(q, q, q)


def main(names):
    for name in names:
        root = name.partition(".")[0]
        try:
            use(name, importlib.import_module(name))
            say(name=name, status="ok", version=str(getattr(sys.modules[root], "__version__", "")))
        except (
            BaseException
        ) as error:  # sys.exit and pytest-like outcomes are failures to import, too
            absent = isinstance(error, ModuleNotFoundError) and error.name == root
            say(name=name, status="missing" if absent else "broken", message=first_words(error))


if __name__ == "__main__":
    # looking through what is being imported takes a fifth of the time, and finds nothing to free
    gc.disable()
    main(sys.argv[1:])
