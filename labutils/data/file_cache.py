"""The cache of drawn files, which several processes may write at once and no crash or full disk
leaves half-written; and what is had from the hub.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from labutils.profiling.machine import usable_cores


def cache_folder() -> Path:
    """Where drawn files and traces are kept. A relative LABUTILS_CACHE begins at the checkout, as
    notebooks run in a folder of their own."""
    asked = Path(os.environ.get("LABUTILS_CACHE") or "~/.cache/labutils").expanduser()
    return Path(__file__).parents[2] / asked


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A place to write what `path` is to hold: it appears there when the block ends well, and
    leaves nothing else.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def drawn_files(folder: Path, suffix: str, count: int, draw: Callable[[int], bytes]) -> list[Path]:
    """Files 0 .. `count` - 1 under `folder`, drawn where they are missing; their paths in order.

    Safe to interrupt and safe to run twice at once: a file appears under its name only when it is
    whole, and every process would write the same bytes. Drawing runs in threads, because numpy,
    Pillow and zlib release the interpreter lock. Raises `OSError`, which says what to type, where
    files can't be kept there: no permission, no room, a file in the way.
    """
    from tqdm import tqdm

    paths = [folder / f"{index:05d}{suffix}" for index in range(count)]
    missing = [index for index, path in enumerate(paths) if not path.is_file()]

    def write(index: int) -> None:
        with whole_file(paths[index]) as part:
            part.write_bytes(draw(index))

    if not missing:
        return paths
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
            place = sys.stdout if "ipykernel" in sys.modules else None  # stderr is red there
            bar = {"desc": f"drawing images in {folder}", "total": len(missing), "file": place}
            list(tqdm(pool.map(write, missing), **bar))
    except OSError as error:
        raise OSError(
            f"Drawn images can't be kept in {folder} ({error.strerror or error}). Make room or put "
            "right what is in the way there, or choose a folder that you may write to: export "
            "LABUTILS_CACHE=FOLDER"
        ) from error
    return paths


class HubOutOfReach(ConnectionError):
    """What a lab was to have from the hub can't be had; the message says what to type."""


def rows_of(name: str, cache_dir: Path, subset: str | None = None, streaming: bool = False) -> Any:
    """The training split of the hub's dataset `name`, from the hub, or as `hf download` left it in
    the hub's cache. Raises `HubOutOfReach` where it is neither within reach nor there."""
    import datasets
    from huggingface_hub import snapshot_download

    where = {"split": "train", "cache_dir": str(cache_dir / "hub"), "streaming": streaming}
    with reaching(name):
        try:
            return datasets.load_dataset(name, subset, **where)
        except ConnectionError as error:
            with contextlib.suppress(OSError):
                there = snapshot_download(name, repo_type="dataset", local_files_only=True)
                return datasets.load_dataset(there, subset, **where)
            raise error


@contextlib.contextmanager
def reaching(name: str, what: str = "dataset") -> Iterator[None]:
    """A context that loads `what` ("dataset" or "model") `name` from the hub. Raises
    `HubOutOfReach`, which says what to type, for whatever fails in it.
    """
    try:
        yield
    except Exception as error:  # offline, a proxy, a moved dataset: some ten different types
        instead = 'data="generated"' if what == "dataset" else 'weights="random"'
        raise HubOutOfReach(
            f"{name} could not be loaded ({type(error).__name__}: {error}). It needs the network "
            f"once. Use {instead} (-p {instead.replace('=', ' ')}), or download it on a connected "
            f"machine with `hf download --repo-type {what} {name}` and copy its cache folder here "
            "(HF_HOME names it)."
        ) from error
