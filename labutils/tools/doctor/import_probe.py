"""A program of its own: import the packages named on its command line, and say in lines of JSON how
each went.

The doctor runs it, because an import may crash, hang or patch what was imported before. A package
counts only after a use of it has worked: several import well and fail at their first call.
"""

import importlib
import json
import sys
import warnings

MESSAGE = "\x1e"
"""Begins each line of ours, as `child_process` reads them: packages print what they like."""
LAZY = {"transformers": "CLIPTextModel", "diffusers": "UNet2DConditionModel"}
"""Packages that import nothing until a name is asked for."""


def torch_facts(torch):
    """What PyTorch was built for, and what it does on the GPU, where it can use one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        facts = {"cuda": torch.version.cuda, "available": torch.cuda.is_available(), "trial": ""}
        if facts["available"]:
            card = torch.cuda.get_device_properties(0)
            facts["card"], facts["gb"] = card.name, card.total_memory / 1e9
            facts["used_gb"] = facts["gb"] - torch.cuda.mem_get_info()[0] / 1e9
            facts["capability"] = [card.major, card.minor]
            facts["architectures"] = torch.cuda.get_arch_list()
            try:
                a = torch.rand(64, 64, device="cuda", dtype=torch.float16)
                (a @ a).float().sum().item()
            except Exception as error:
                facts["trial"] = first_words(error)
    return facts | {"warning": " ".join(str(caught[0].message).split()) if caught else ""}


def use(name, module):
    """The smallest use of `module` that shows whether it works; facts about it."""
    if name == "torch":
        return torch_facts(module)
    if name in LAZY:
        getattr(module, LAZY[name])
    elif name == "bitsandbytes":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        module.functional.quantize_4bit(torch.rand(64, 64, device=device), quant_type="nf4")
    elif name == "xformers":
        import torch
        import xformers.ops

        if torch.cuda.is_available():
            q = torch.rand(1, 16, 1, 64, device="cuda", dtype=torch.float16)
            xformers.ops.memory_efficient_attention(q, q, q)
    return {}


def first_words(error):
    return (f"{type(error).__name__}: " + " ".join(str(error).split()))[:300]


def main(names):
    for name in names:
        root = name.partition(".")[0]
        try:
            facts = use(name, importlib.import_module(name))
            version = str(getattr(sys.modules[root], "__version__", ""))
            said = {"status": "ok", "version": version, "facts": facts}
        except BaseException as error:  # also sys.exit
            missing = isinstance(error, ModuleNotFoundError) and error.name == root
            said = {"status": "missing" if missing else "broken", "message": first_words(error)}
        print("\n" + MESSAGE + json.dumps({"name": name, **said}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
