"""Checks of exercises: of an answer, and of code that is to give the same results faster or in less
memory.

    print(check("07.1", my_code))                                  as it stands in an exercise's cell
    print(faster_than(4, baseline, attempt, inputs, times=3))      the same for one that is measured
    solved(faster_than(4, baseline, solution, inputs, times=3))    in its solution's: printed, or an AssertionError

A check is a message that says what is wrong. Those of the notebooks' own begin as these do:
"Exercise 4: right", "not yet", and where the noise is larger than what is to be decided,
"inconclusive".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from math import comb
from numbers import Real
from statistics import median
from typing import Any

from labutils.course.answers import ANSWERS, Answer
from labutils.profiling import cuda

LOOKS = (9, 15, 25, 41)
"""Rounds after which a timing is looked at: it ends when it is decided."""
PATIENCE_S = 20.0
"""No further round begins after so many seconds, unless the first look is still to come."""
DOUBT = 0.01
"""How often a median may lie outside of its range."""

Inputs = Callable[[int], tuple]


def solved(message: str) -> None:
    """Print what a check says of a solution. Raises `AssertionError` where it says that it is
    wrong: that noise hides how fast it is may happen to anybody, and ends no lab."""
    assert message.partition(": ")[2].startswith(("right", "inconclusive")), message
    print(message)


def check(exercise: str, answer: Any) -> str:
    """What is to be said of an answer to `exercise` ("07.1"): "Exercise 1: right", or what helps;
    None: no answer.
    """
    known, number = ANSWERS[exercise], int(exercise.partition(".")[2])
    if answer is None:
        return (
            f"Exercise {number}: no answer yet. Put one in the cell, for example {known.example}."
        )
    given = _plain(answer)
    if not _has_form_of(known.right, given):
        return f"Exercise {number}: not yet. {_form(known.right)} is asked for, for example {known.example}."
    if _alike(known.right, given, known.within):
        return f"Exercise {number}: right. {known.why}"
    return f"Exercise {number}: not yet. {_help(known, given)}"


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
    until the range of the ratios' median is on one side of `times`.
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
            ratio, off = _round(baseline, attempt, inputs, len(ratios), tolerance)
            if off:
                return f"Exercise {number}: not yet. On other inputs {off}"
            ratios.append(ratio)
        low, high = range_of_median(ratios)
        if low > times or high < times:
            break
    found = f"{median(ratios):.2f} times as fast ({low:.2f} to {high:.2f}, {len(ratios)} rounds)"
    if low > times:
        return (
            f"Exercise {number}: right. The same results, {found}; {times:g} times was asked for."
        )
    if high < times:
        return f"Exercise {number}: not yet. The results are the same, but {found}; {times:g} times is asked for."
    return (
        f"Exercise {number}: inconclusive. The results are the same, and {found}: {times:g} lies "
        "between. "
        "Close what else runs here and try again, or make it faster still."
    )


def smaller_than(
    number: int,
    baseline: Callable[..., Any],
    attempt: Callable[..., Any],
    inputs: Inputs,
    share: float,
    module: Any,
    tolerance: float = 1e-4,
) -> str:
    """Whether `attempt` computes what `baseline` does, its gradients too, and keeps at most `share`
    of its bytes.

    Counted is what the forward pass keeps for the backward pass, `module`'s own tensors aside. Both
    return one tensor. Gradients are those of the arguments that require them, for the same random
    gradient of the result. Bytes are exact: they need no second look.
    """
    wrong = _wrong(_with_gradients(baseline), _with_gradients(attempt), inputs, tolerance)
    if wrong:
        return f"Exercise {number}: {wrong}"
    before, after = (
        kept_for_backward(module, function, inputs(0)) for function in (baseline, attempt)
    )
    found = f"{after / 1e6:.3g} MB instead of {before / 1e6:.3g} are kept for the backward pass"
    if after <= share * before:
        return f"Exercise {number}: right. The same result and gradients, and {found}."
    return (
        f"Exercise {number}: not yet. Result and gradients are the same, but {found}; "
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


def difference(expected: Any, found: Any, tolerance: float, place: str = "the result") -> str:
    """What differs between two results, in words; "" where nothing does by more than `tolerance` of
    the largest.
    """
    import torch

    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or expected.keys() != found.keys():
            return f"{place} should have {', '.join(map(str, expected))}."
        pairs = [(expected[name], found[name], str(name)) for name in expected]
    elif isinstance(expected, tuple | list):
        if not isinstance(found, tuple | list) or len(found) != len(expected):
            return f"{place} should be {len(expected)} values."
        pairs = [
            (*pair, f"value {at} of {place}")
            for at, pair in enumerate(zip(expected, found, strict=True), 1)
        ]
    else:
        if isinstance(expected, torch.Tensor) != isinstance(found, torch.Tensor):
            return f"{place} is a {type(found).__name__}, where a {type(expected).__name__} is expected."
        return _numbers_differ(torch.as_tensor(expected), torch.as_tensor(found), tolerance, place)
    return next(filter(None, (difference(*pair[:2], tolerance, pair[2]) for pair in pairs)), "")


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


# ----------------------------------------------------------------------------------------- helpers


def _form(right: Any) -> str:
    """The form in which an answer is asked for, in words."""
    if isinstance(right, tuple):
        return f"A tuple of {len(right)} numbers"
    return (
        "A set"
        if isinstance(right, frozenset)
        else "A word"
        if isinstance(right, str)
        else "A number"
    )


def _plain(answer: Any) -> Any:
    """An answer as Python's own numbers and words in lower case, or a tuple or a frozenset of
    those.
    """
    if isinstance(answer, set | frozenset):
        return frozenset(map(_plain_one, answer))
    one = _plain_one(answer)
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):
        one = one.tolist()  # an array or a tensor of several
    return tuple(map(_plain_one, one)) if isinstance(one, tuple | list) else one


def _plain_one(value: Any) -> Any:
    """A number or a word whoever made it: NumPy's scalars, and arrays and tensors of one element."""
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):
        value = value.item()
    return value.strip().casefold() if isinstance(value, str) else value


def _has_form_of(right: Any, given: Any) -> bool:
    if isinstance(right, tuple):
        return isinstance(given, tuple) and len(given) == len(right) and all(map(_is_number, given))
    if isinstance(right, frozenset):
        return isinstance(given, frozenset | tuple) and all(
            isinstance(x, str) or _is_number(x) for x in given
        )
    return isinstance(given, str) if isinstance(right, str) else _is_number(given)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _alike(one: Any, given: Any, within: float) -> bool:
    """Whether an answer of the same form, made plain, is `one`, numbers but for `within` of it."""
    if isinstance(one, tuple):
        return all(_alike(*pair, within) for pair in zip(one, given, strict=True))
    if not _is_number(one):
        return _plain(one) == (frozenset(given) if isinstance(one, frozenset) else given)
    # Compared and not subtracted: an integer of any size can be compared with a float.
    return one - within * abs(one) <= given <= one + within * abs(one)


def _help(known: Answer, given: Any) -> str:
    """What helps who gave this wrong answer on."""
    for slip, said in known.slips.items():
        if (
            _plain(slip) in given
            if isinstance(known.right, frozenset)
            else _alike(slip, given, known.within)
        ):
            return said
    return known.hint


def _wrong(baseline: Callable, attempt: Callable, inputs: Inputs, tolerance: float) -> str:
    """Why `attempt` need not be measured; "" where it must be."""
    found = attempt(*inputs(0))
    if found is None:
        return f"fill in {getattr(attempt, '__name__', 'the function')} first; it returns None."
    off = difference(baseline(*inputs(0)), found, tolerance)
    return f"not yet. It has to give the same first, and {off}" if off else ""


def _round(
    baseline: Callable, attempt: Callable, inputs: Inputs, at: int, tolerance: float
) -> tuple[float, str]:
    """(times as fast, what differs) of one turn each, in alternating order."""
    turns = (("baseline", baseline), ("attempt", attempt))
    timed = {
        name: _timed(function, inputs(at)) for name, function in (turns if at % 2 else turns[::-1])
    }
    (before, expected), (after, found) = timed["baseline"], timed["attempt"]
    return before / after, difference(expected, found, tolerance)


def _timed(function: Callable, arguments: tuple) -> tuple[float, Any]:
    """(milliseconds, result) of one call, until the GPU has done its part."""
    cuda.synchronize()
    began = time.perf_counter()
    result = function(*arguments)
    cuda.synchronize()
    return 1e3 * (time.perf_counter() - began), result


def _numbers_differ(expected: Any, found: Any, tolerance: float, place: str) -> str:
    if expected.shape != found.shape:
        return (
            f"{place} has the shape {list(found.shape)}, where {list(expected.shape)} is expected."
        )
    if expected.dtype != found.dtype:
        return f"{place} is {found.dtype}, where {expected.dtype} is expected."
    if expected.device != found.device:
        return f"{place} is on {found.device}, where {expected.device} is expected."
    wide, narrow = expected.detach().double(), found.detach().double()
    if not narrow.isfinite().all() and wide.isfinite().all():
        return f"{place} holds numbers that are not finite."
    if not wide.numel():
        return ""
    off, largest = (wide - narrow).abs().max().item(), wide.abs().max().item()
    return (
        ""
        if off <= tolerance * largest
        else f"{place} is off by {off:.3g}, where numbers go up to {largest:.3g}."
    )


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the gradients of its arguments beside its result."""
    import torch

    def both(*arguments: Any) -> Any:
        result = function(*arguments)
        if result is None:
            return None
        asked = [argument for argument in arguments if getattr(argument, "requires_grad", False)]
        torch.manual_seed(0)
        gradients: Iterable[Any] = [None] * len(asked)
        if result.requires_grad:
            gradients = torch.autograd.grad(
                result, asked, torch.randn_like(result), allow_unused=True
            )
        given = [
            torch.zeros_like(of) if gradient is None else gradient
            for gradient, of in zip(gradients, asked, strict=True)
        ]
        return {"the result": result.detach()} | {
            f"gradient {at}": one for at, one in enumerate(given, 1)
        }

    both.__name__ = getattr(function, "__name__", "the function")
    return both


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
