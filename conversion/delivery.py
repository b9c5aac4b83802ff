"""Puts a finished folder in OUTPUT's place: whole or not at all, and nothing of the user's is lost.

A folder is made in `new` of a staging folder beside OUTPUT; at the end what stands at OUTPUT moves to `old` there, and `new` takes
its place. A run that is killed leaves its staging folder, which the next run names.
"""

import contextlib
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoints.command_line import deferred_signals
from checkpoints.outputs import copy_others, refuse_strangers
from model_cards.render import read_readme

from .arguments import AUTO, OutputArguments
from .saving import parse_size


NEW, OLD, PROBE = "new", "old", "probe"
# What mkdtemp puts after a prefix
RANDOM_NAME = re.compile(r"[a-z0-9_]{8}")


def place_of(output: str) -> Path:
    """Where OUTPUT really is: a symbolic link stays, its target is replaced."""
    return Path(os.path.realpath(output))


def check_place(arguments: OutputArguments, num_bytes: int):
    """Refuses an OUTPUT that cannot be made or replaced, or holds what would be lost, and a shard size that is none.

    Puts an earlier folder back that a killed run had moved away, and names what killed runs left.

    Raises:
        ValueError: with what to do instead.
    """
    place = place_of(arguments.output)
    if arguments.max_shard_size != AUTO:
        parse_size(arguments.max_shard_size)
    _settle_leftovers(place, arguments.dry_run)
    if os.path.lexists(place):
        _check_existing(arguments, place)
    above = next(folder for folder in place.parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"OUTPUT {arguments.output} cannot be made: {above} is not a folder that can be written to")
    _try_replacing(arguments, place, above)
    free = shutil.disk_usage(above).free
    if free < num_bytes:
        raise ValueError(
            f"OUTPUT {arguments.output} needs {num_bytes / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free on its disk: make room, "
            "or choose another disk"
        )


def _check_existing(arguments: OutputArguments, place: Path):
    name = f"OUTPUT {arguments.output}"
    if os.path.ismount(place):
        raise ValueError(f"{name} is a mount point, which cannot be replaced: name a folder in it")
    if not place.is_dir():
        raise ValueError(f"{name} is no folder: choose another name")
    if Path.cwd().is_relative_to(place):
        raise ValueError(f"{name} holds the folder that this command runs in: start it from elsewhere")
    refuse_strangers(place, "OUTPUT")
    if any(place.iterdir()) and not arguments.overwrite:
        raise ValueError(f"{name} exists: choose another folder, or replace it with --overwrite")
    read_readme(place)


def _try_replacing(arguments: OutputArguments, place: Path, above: Path):
    """Does what the end will do, as far as that can be taken back: a folder beside OUTPUT, and a move of OUTPUT onto a folder
    that is not empty, which fails, but otherwise where OUTPUT must not be moved.

    Raises:
        ValueError: the end would fail.
    """
    prefix = f".{place.name}." if above == place.parent else ".bhyt."
    try:
        with deferred_signals(), tempfile.TemporaryDirectory(prefix=prefix, dir=above) as staging:
            probe = Path(staging) / PROBE
            (probe / NEW).mkdir(parents=True)
            if place.is_dir():
                place.rename(probe)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise ValueError(f"OUTPUT {arguments.output} cannot be made: {error.strerror} ({above})") from error


def _leftovers(place: Path) -> list[Path]:
    """Staging folders beside a place: of runs that were killed, or that still run."""
    if not place.parent.is_dir():
        return []
    prefix = f".{place.name}."
    named = [path for path in place.parent.iterdir() if path.name.startswith(prefix)]
    found = [path for path in named if RANDOM_NAME.fullmatch(path.name.removeprefix(prefix)) and path.is_dir()]
    return sorted(path for path in found if {inner.name for inner in path.iterdir()} <= {NEW, OLD, PROBE})


def _settle_leftovers(place: Path, dry_run: bool):
    for staging in _leftovers(place):
        # Both are there only between the two moves: the earlier folder is whole
        if not os.path.lexists(place) and (staging / OLD).is_dir() and (staging / NEW).is_dir():
            if not dry_run:
                (staging / OLD).rename(place)
            verb = "would be put" if dry_run else "was put"
            _note(f"{place} {verb} back from {staging / OLD}, where a run that was killed had moved it")
        _note(f"{staging} is left of a run that was killed, or that still runs: remove it if none does")


def _note(words: str):
    print(f"note: {words}", file=sys.stderr)


@contextmanager
def save_whole(arguments: OutputArguments) -> Iterator[Path]:
    """A folder beside OUTPUT that takes its place when the block ends, and vanishes where it fails or a signal ends it.

    What in OUTPUT is not ours by then is copied into the new folder.

    Raises:
        ValueError: OUTPUT appeared meanwhile, or files in it that are not ours, of the same names as the new ones.
    """
    place = place_of(arguments.output)
    missing = [folder for folder in place.parents if not folder.exists()]
    staging: Path | None = None
    try:
        with deferred_signals():
            place.parent.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
            (staging / NEW).mkdir()
        yield staging / NEW
        if place.is_dir():
            if any(place.iterdir()) and not arguments.overwrite:
                raise ValueError(f"OUTPUT {place} appeared meanwhile: choose another folder, or add --overwrite")
            copy_others(place, staging / NEW)
            shutil.copymode(place, staging / NEW)
        with deferred_signals():
            _change_places(staging, place)
            arguments.is_delivered = True
    finally:
        with deferred_signals():
            _clean_up(staging, place, missing)


def _change_places(staging: Path, place: Path):
    if os.path.lexists(place):
        place.rename(staging / OLD)
    try:
        (staging / NEW).rename(place)
    except OSError:
        if os.path.lexists(staging / OLD):
            (staging / OLD).rename(place)
        raise


def _clean_up(staging: Path | None, place: Path, missing: list[Path]):
    """Removes the staging folder, and the folders above OUTPUT that were made for nothing."""
    if staging is not None:
        if os.path.lexists(staging / OLD) and not os.path.lexists(place):
            _note(f"{place} could not be put back: it is whole in {staging / OLD}")
            return
        shutil.rmtree(staging, ignore_errors=True)
        if staging.exists():
            _note(f"{staging} could not be removed: remove it")
    for folder in missing:
        with contextlib.suppress(OSError):
            folder.rmdir()
