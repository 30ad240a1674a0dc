"""The real datasets, from the Hugging Face hub or the copy of them that a cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datasets


def hub_dataset(name: str, count: int, cache_dir: Path) -> datasets.Dataset:
    """The first `count` rows of the training split of `name`.

    Raises `ConnectionError` where it is neither within reach nor in the cache, `ValueError` where
    it has fewer rows.
    """
    import datasets

    with reaching(name):
        whole = datasets.load_dataset(name, split="train", cache_dir=str(cache_dir / "hub"))
    if count > len(whole):
        raise ValueError(f"{name} has {len(whole)} examples; {count} were asked for.")
    return whole.select(range(count))


@contextmanager
def reaching(name: str) -> Iterator[None]:
    """A context that reads the dataset `name`. Raises `ConnectionError` for whatever fails in it."""
    try:
        yield
    except (
        Exception
    ) as error:  # offline, a proxy, a moved dataset: the libraries raise some ten different types
        raise ConnectionError(
            f"{name} could not be loaded ({type(error).__name__}: {error}). The real dataset needs "
            "the network "
            'once. Use data="generated" (-p data generated), or download it on a connected machine with '
            f"`hf download --repo-type dataset {name}` and copy its cache folder here (HF_HOME "
            "names it)."
        ) from error
