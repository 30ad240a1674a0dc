"""Checks of exercises: of an answer, and of code that is to give the same results faster or in less
memory.

    print(check("07.1", my_code))                               in an exercise's cell
    print(faster_than(4, baseline, attempt, inputs, times=3))   the same for one that is measured

A check is a message that says what is wrong. Those of the notebooks' own begin as these do:
"Exercise 4: right", "not yet", and where the noise is larger than what is to be decided,
"inconclusive".
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from labutils.profiling import cuda
from labutils.recipe import is_number

LOOKS = (9, 15, 25, 41)
"""Rounds after which a timing is looked at: it ends when it is decided."""
PATIENCE_S = 20.0
"""No further round begins after so many seconds, unless the first look is still to come."""
DOUBT = 0.01
"""How often a median may lie outside of its range."""

Inputs = Callable[[int], tuple]


# ---------------------------------------------------------------------------------------- answers


@functools.cache
def answers() -> dict[str, dict[str, Any]]:
    """Lab and number of an exercise ("07.1") -> its answer, as answers.yaml describes it."""
    return yaml.safe_load(Path(__file__).with_name("answers.yaml").read_text(encoding="utf-8"))


def check(exercise: str, answer: Any) -> str:
    """What is to be said of an answer to `exercise` ("07.1"): "Exercise 1: right", or what helps;
    None: no answer. Whose numbers they are, PyTorch's or NumPy's, does not matter.
    """
    known, start = answers()[exercise], f"Exercise {exercise.partition('.')[2]}:"
    example, slips = known["example"], known.get("slips", ())
    if answer is None:
        return f"{start} no answer yet. Put one in the cell, for example {example}."
    within = known.get("within", 0.005)
    right = _plain(set(known["set"]) if "set" in known else known["right"])
    given = _plain(answer)
    if isinstance(right, frozenset) and isinstance(given, tuple):
        with suppress(TypeError):  # parts that no set can hold
            given = frozenset(given)
    if _form(given) != _form(right):
        return f"{start} not yet. {_form(right)} is asked for, for example {example}."
    if _alike(right, given, within):
        return f"{start} right. {known['why']}"
    for slip in slips:
        wrong = _plain(slip["given"])
        if wrong in given if isinstance(right, frozenset) else _alike(wrong, given, within):
            return f"{start} not yet. {slip['say']}"
    return f"{start} not yet. {known['hint']}"


def _plain(answer: Any) -> Any:
    """An answer in Python's own numbers, words in lower case, or a tuple or frozenset of them."""
    with suppress(AttributeError, TypeError, RuntimeError):  # an array, a tensor or a scalar
        answer = answer.tolist()
        answer = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    if isinstance(answer, set | frozenset):
        return frozenset(map(_plain, answer))
    if isinstance(answer, tuple | list):
        return tuple(map(_plain, answer))
    return answer.strip().casefold() if isinstance(answer, str) else answer


def _form(answer: Any) -> str:
    """The form of a plain answer, in words."""
    if isinstance(answer, tuple):
        return f"A tuple of {len(answer)}"
    names = {frozenset: "A set", str: "A word"}
    return names.get(type(answer), "A number" if is_number(answer) else "Something else")


def _alike(right: Any, given: Any, within: float) -> bool:
    """Whether an answer of the same form is the right one, numbers but for `within` of it."""
    if isinstance(right, tuple):
        return all(_alike(*pair, within) for pair in zip(right, given, strict=True))
    if not (is_number(right) and is_number(given)):
        return right == given
    # Compared and not subtracted: an integer of any size can be compared with a float.
    return right - within * abs(right) <= given <= right + within * abs(right)


# --------------------------------------------------------------------------------------- measured


def faster_than(
    number: int,
    baseline: Callable[..., Any],
    attempt: Callable[..., Any],
    inputs: Inputs,
    times: float,
    tolerance: float = 1e-4,
) -> str:
    """Whether `attempt` gives what `baseline` gives, at `times` its speed: "Exercise `number`:
    right", or what lacks.

    `inputs(round)` makes the arguments of both; each call gets arguments of its own. Results are
    tensors, numbers, or tuples, lists and mappings of them, and are compared in every round, before
    any time counts: none may be off by more than `tolerance` of the largest number that is
    expected. The two take turns, and each round gives one ratio of their times; rounds are added
    until the range of the ratios' median is on one side of `times`. With `times` of 0 results
    alone count.
    """
    wrong = _wrong(baseline, attempt, inputs, tolerance)
    if wrong:
        return f"Exercise {number}: {wrong}"
    ratios: list[float] = []
    began = time.perf_counter()
    for look in LOOKS:
        if ratios and time.perf_counter() - began > PATIENCE_S:
            break
        while len(ratios) < look:
            at = len(ratios)
            turns = {"baseline": baseline, "attempt": attempt}
            order = list(turns) if at % 2 else list(turns)[::-1]
            timed = {name: _timed(turns[name], inputs(at)) for name in order}
            (before, expected), (after, result) = timed["baseline"], timed["attempt"]
            if off := difference(expected, result, tolerance):
                return f"Exercise {number}: not yet. On other inputs {off}"
            ratios.append(before / after)
        low, high = range_of_median(ratios)
        if low > times or high < times:
            break
    said = f"{median(ratios):.2f} times as fast ({low:.2f} to {high:.2f}, {len(ratios)} rounds)"
    if low > times:
        asked = f", {said}; asked for: {times:g} times" * bool(times)
        return f"Exercise {number}: right. The same results{asked}."
    if high < times:
        return f"Exercise {number}: not yet. The same results, but {said}; asked for: {times:g}."
    return (
        f"Exercise {number}: inconclusive. The same results, and {said}: {times:g} lies between. "
        "Close what else runs here and try again, or make it faster still."
    )


def smaller_than(
    number: int,
    baseline: Callable[..., Any],
    attempt: Callable[..., Any],
    inputs: Inputs,
    share: float,
    module: Any,
) -> str:
    """Whether `attempt` computes what `baseline` does, its gradients too, and keeps at most `share`
    of its bytes.

    Counted is what the forward pass keeps for the backward pass, `module`'s own tensors aside. Both
    return one tensor. Gradients are those of the arguments that require them, for the same random
    gradient of the result. Bytes are exact: they need no second look.
    """
    wrong = _wrong(_with_gradients(baseline), _with_gradients(attempt), inputs, 1e-4)
    if wrong:
        return f"Exercise {number}: {wrong}"
    before, after = (kept_for_backward(module, one, inputs(0)) for one in (baseline, attempt))
    said = f"{after / 1e6:.3g} MB instead of {before / 1e6:.3g} are kept for the backward pass"
    if after <= share * before:
        return f"Exercise {number}: right. The same result and gradients, and {said}."
    return (
        f"Exercise {number}: not yet. Result and gradients are the same, but {said}; "
        f"{100 * share:.3g} % of it is asked for, {share * before / 1e6:.3g} MB."
    )


def range_of_median(values: list[float]) -> tuple[float, float]:
    """Where the median of what `values` were drawn from lies, but for `DOUBT`; whatever their
    distribution.

    The sign test's range: of n values the k-th smallest to the k-th largest, with the largest k
    that is sure enough.
    """
    ordered, n = sorted(values), len(values)
    beyond, k = 0.0, 0
    while 2 * (beyond := beyond + comb(n, k) / 2**n) <= DOUBT:
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]


def difference(expected: Any, given: Any, tolerance: float) -> str:
    """What differs between two results, in words; "" where nothing does by more than `tolerance` of
    the largest number. Results are tensors, numbers, or mappings and sequences of them.
    """
    import torch

    wanted, others = dict(_parts(expected)), dict(_parts(given))
    if wanted.keys() != others.keys():
        return f"the result should have: {', '.join(wanted)}."
    for place, one in wanted.items():
        other = others[place]
        if torch.is_tensor(one) != torch.is_tensor(other) or isinstance(other, str):
            return f"{place} is a {type(other).__name__}, not a {type(one).__name__}."
        kinds = ("shape", "dtype", "device") if torch.is_tensor(one) else ("shape",)
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        for what in kinds:
            if getattr(one, what) != getattr(other, what):
                return f"{place}: its {what} should be {getattr(one, what)}."
        one, other = one.detach().double(), other.detach().double()
        off = (one - other).abs().max().item() if one.numel() else 0.0
        largest = one.abs().max().item() if one.numel() else 0.0
        if not off <= tolerance * largest:  # also where it is NaN
            return f"{place} is off by up to {off:.3g}, of {largest:.3g}."
    return ""


def _parts(result: Any, place: str = "the result") -> Iterator[tuple[str, Any]]:
    """(place, tensor or number) of each part of a result."""
    if isinstance(result, Mapping):
        for name, part in result.items():
            yield from _parts(part, str(name))
    elif isinstance(result, tuple | list):
        for at, part in enumerate(result, 1):
            yield from _parts(part, f"value {at} of {place}")
    else:
        yield place, result


def kept_for_backward(module: Any, function: Callable[..., Any], arguments: tuple) -> int:
    """Bytes that `function(*arguments)` keeps for its backward pass, by whatever means, without
    `module`'s own.
    """
    from labutils.profiling.memory_model import saved_for_backward

    results: list[Any] = []
    saved = saved_for_backward(module, lambda: results.append(function(*arguments)))
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers(), *arguments)}
    hung = {id(tensor): tensor for tensor in _hung_on(results[0]) if id(tensor) not in own}
    return saved + sum(tensor.numel() * tensor.element_size() for tensor in hung.values())


def _hung_on(result: Any) -> Iterator[Any]:
    """Tensors that an autograd.Function hung on its `ctx`, in the graph behind `result`: no hook
    sees those.
    """
    import torch

    waiting, seen = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        held = vars(node).values() if hasattr(node, "__dict__") else ()
        yield from (value for value in held if isinstance(value, torch.Tensor))
        waiting += [following for following, _ in node.next_functions]


def _wrong(baseline: Callable, attempt: Callable, inputs: Inputs, tolerance: float) -> str:
    """Why `attempt` need not be measured; "" where it must be."""
    result = attempt(*inputs(0))
    if result is None:
        return f"fill in {getattr(attempt, '__name__', 'the function')} first; it returns None."
    off = difference(baseline(*inputs(0)), result, tolerance)
    return f"not yet: {off}" if off else ""


def _timed(function: Callable, arguments: tuple) -> tuple[float, Any]:
    """(milliseconds, result) of one call, until the GPU has done its part."""
    cuda.synchronize()
    began = time.perf_counter()
    result = function(*arguments)
    cuda.synchronize()
    return 1e3 * (time.perf_counter() - began), result


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the gradients of its arguments beside its result."""
    import torch

    @functools.wraps(function)
    def both(*arguments: Any) -> Any:
        result = function(*arguments)
        if result is None:
            return None
        asked = [argument for argument in arguments if getattr(argument, "requires_grad", False)]
        torch.manual_seed(0)
        upstream = torch.randn_like(result)
        gradients = [torch.zeros_like(argument) for argument in asked]
        if result.requires_grad:
            gradients = torch.autograd.grad(
                result, asked, upstream, allow_unused=True, materialize_grads=True
            )
        given = {f"gradient {at}": gradient for at, gradient in enumerate(gradients, 1)}
        return {"the result": result.detach()} | given

    return both
