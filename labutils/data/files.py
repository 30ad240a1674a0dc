"""The cache of drawn files, which several processes may write at once and no crash or full disk
leaves half-written; and what is had from the hub.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from labutils.profiling.machine import usable_cores

if TYPE_CHECKING:
    import datasets

MANIFEST = ".manifest.json"
"""File's name -> CRC-32 of its content. Hidden, so that `datasets` takes it for no example."""

ABANDONED_S = 3600
"""A temporary file older than this was left behind by a process that died."""


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


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` so that `path` holds either all of it or what it held before."""
    with whole_file(path) as part:
        part.write_bytes(content)


@contextlib.contextmanager
def cache_folder(folder: Path, what: str) -> Iterator[None]:
    """Make `folder` and clear it of what died half-written. Raises `OSError` that says what to type
    where `what` can't be kept there: no permission, no room, a file in the way."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        yield
    except OSError as error:
        raise OSError(
            f"{what} can't be kept in {folder} ({error.strerror or error}). Make room or put right "
            "what is in the way there, or choose a folder that you may write to: export "
            "LABUTILS_CACHE=FOLDER"
        ) from error


def _sweep(folder: Path) -> None:
    """Remove what interrupted processes left half-written."""
    for part in folder.glob(".*.part"):
        try:
            if time.time() - part.stat().st_mtime > ABANDONED_S:
                part.unlink()
        except OSError:  # another process was quicker, or the folder is read-only
            continue


def drawn_files(
    folder: Path, what: str, suffix: str, count: int, draw: Callable[[int], bytes]
) -> list[Path]:
    """Files 0 .. `count` - 1 under `folder`, drawn where they are missing or damaged; their paths
    in order.

    Safe to interrupt and safe to run twice at once: a file appears under its name only when it is
    whole, and every process would write the same bytes. The manifest is written last: a file that
    it doesn't vouch for is drawn again. Drawing runs in threads, because numpy, Pillow and zlib
    release the interpreter lock. Raises `OSError` as `cache_folder`.
    """
    from tqdm import tqdm

    paths = [folder / f"{index:05d}{suffix}" for index in range(count)]
    with cache_folder(folder, what), ThreadPoolExecutor(max_workers=usable_cores()) as pool:
        manifest = _read_manifest(folder / MANIFEST)

        def checksum(index: int) -> int:
            path = paths[index]
            if path.name in manifest and path.is_file():
                kept = zlib.crc32(path.read_bytes())
                if kept == manifest[path.name]:
                    return kept
            content = draw(index)
            write_whole(path, content)
            return zlib.crc32(content)

        new = any(path.name not in manifest for path in paths)
        bar = tqdm(total=count, desc=f"{what.lower()} in {folder}", unit="file", disable=not new)
        sums = {}
        with bar:
            for path, value in zip(paths, pool.map(checksum, range(count)), strict=True):
                sums[path.name] = value
                bar.update()
        if not sums.items() <= manifest.items():
            write_whole(folder / MANIFEST, json.dumps(manifest | sums, indent=0).encode())
    return paths


def _read_manifest(path: Path) -> dict[str, int]:
    """The manifest; {} where there is none or it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def generated_or_hub(
    data: str, name: str, count: int, cache_dir: Path, generated: Callable[[], datasets.Dataset]
) -> datasets.Dataset:
    """What is `generated()` here, or the first `count` rows of the hub's training split of `name`.

    Raises `ConnectionError` where the latter is neither within reach nor in the cache, `ValueError`
    where it has fewer rows or `data` is neither "generated" nor "hub".
    """
    import datasets

    if count < 1:
        raise ValueError(f"count={count}: a dataset needs at least 1 image.")
    if data == "generated":
        return generated()
    if data != "hub":
        raise ValueError(
            f"data={data!r} is not known. Choose 'generated' (drawn here) or 'hub' (the real one)."
        )
    with reaching(name):
        whole = datasets.load_dataset(name, split="train", cache_dir=str(cache_dir / "hub"))
    if count > len(whole):
        raise ValueError(f"{name} has {len(whole)} examples; {count} were asked for.")
    return whole.select(range(count))


@contextlib.contextmanager
def reaching(name: str, what: str = "dataset") -> Iterator[None]:
    """A context that loads `what` ("dataset" or "model") `name` from the hub. Raises
    `ConnectionError`, which says what to type, for whatever fails in it.
    """
    try:
        yield
    except Exception as error:  # offline, a proxy, a moved dataset: some ten different types
        instead = 'data="generated"' if what == "dataset" else 'weights="random"'
        raise ConnectionError(
            f"{name} could not be loaded ({type(error).__name__}: {error}). It needs the network "
            f"once. Use {instead} (-p {instead.replace('=', ' ')}), or download it on a connected "
            f"machine with `hf download --repo-type {what} {name}` and copy its cache folder here "
            "(HF_HOME names it)."
        ) from error
