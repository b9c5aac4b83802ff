"""Folders that commands of this project write: which files in them are ours, and what else lies there.

A folder is ours if it holds a record that one of our commands left. A record lists the names of its folder's files under
`files`; of an older one, which does not, files are known by their usual names.
"""

import json
import os
import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from .legal import LEGAL_FILES


# Each with a key that nobody else's file of that name has
RECORDS = {"conversion_report.json": "bhyt_version", "results.json": "bhyt_version", "run.json": "data_sha256"}
# What a checkpoint with a report consists of
CHECKPOINT_FILES = (
    *("config.json", "generation_config.json", "*_bhyt.py", "README.md", *LEGAL_FILES),
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "additional_chat_templates"),
    *("conversion_report.json", "conversion_report.md", "conversion_report.png", "conversion_windows.*"),
)
# Of a run that works in a folder, or was killed there
LOCK_FILE = ".bhyt.lock"
# What the Hub's downloads, Python and macOS leave, of no worth
CACHES = (".cache", "__pycache__", ".DS_Store", LOCK_FILE)
# A user's own stay, where no new file has their name
KEPT = (".gitattributes", *LEGAL_FILES)
# A card is merged
NO_STRANGERS = (*CACHES, *KEPT, "README.md")


def own_files(folder: Path, older: Iterable[str] = CHECKPOINT_FILES) -> set[Path] | None:
    """Files, as paths inside the folder, that commands of this project wrote there; None where none left a record.

    older: patterns of names at the folder's top, for a record that lists no files.
    """
    records = [content for name, key in RECORDS.items() if key in (content := _read(folder / name))]
    if not records:
        return None
    files = _files(folder)
    lists = [record["files"] for record in records if isinstance(record.get("files"), list)]
    names = {str(name) for listed in lists for name in listed}
    patterns = () if len(lists) == len(records) else (*older, *RECORDS)
    return {file for file in files if file.as_posix() in names or _matches(file.parts[0], patterns)}


def strangers(folder: Path) -> list[Path]:
    """What a folder holds, as paths inside it, that no command of this project wrote: files, links, and whole folders where
    nothing in them is ours. None in a folder that does not exist."""
    return _strangers(folder, Path(), own_files(folder) or set(), NO_STRANGERS) if folder.is_dir() else []


def refuse_strangers(folder: Path, what: str):
    """Refuses to replace a folder that holds anything which no command of this project wrote; `what` names it to the user.

    Raises:
        ValueError: with three of the strangers and how many there are.
    """
    found = strangers(folder)
    if found:
        shown = ", ".join(f"{path}/" if is_folder(folder / path) else str(path) for path in found[:3])
        raise ValueError(
            f"{what} {folder} holds {shown} ({len(found)} in all), which no command of this project wrote: move that away, "
            "or choose another folder"
        )


def copy_others(folder: Path, new: Path) -> None:
    """Copies what in a folder is not ours, but for caches and the card, into the one that takes its place.

    Raises:
        ValueError: `new` has another file of a stranger's name.
    """
    found = strangers(folder)
    if taken := [path for path in found if os.path.lexists(new / path)]:
        raise ValueError(f"{folder} holds {taken[0]} meanwhile, which this command would replace: move it away")
    own = own_files(folder) or set()
    kept = {path.relative_to(folder) for pattern in KEPT for path in folder.glob(pattern)} - own
    for path in (*found, *(path for path in kept if not os.path.lexists(new / path))):
        (new / path).parent.mkdir(parents=True, exist_ok=True)
        if is_folder(folder / path):
            shutil.copytree(folder / path, new / path, symlinks=True)
        else:
            shutil.copy2(folder / path, new / path, follow_symlinks=False)


def names_of_files(folder: Path) -> list[str]:
    """Every file below a folder, by its name inside it: what a record keeps under `files`."""
    return sorted(file.as_posix() for file in _files(folder))


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _files(folder: Path) -> set[Path]:
    """Files and links below a folder, as paths inside it."""
    return {path.relative_to(folder) for path in folder.rglob("*") if not is_folder(path)}


def _strangers(folder: Path, place: Path, own: set[Path], patterns: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    for entry in sorted((folder / place).iterdir()):
        path = place / entry.name
        if path in own or _matches(entry.name, patterns):
            continue
        is_mixed = is_folder(entry) and any(path in file.parents for file in own)
        found += _strangers(folder, path, own, CACHES) if is_mixed else [path]
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _read(record: Path) -> dict:
    """A record's content; empty where there is none. A file that cannot be read is not ours."""
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def remove_leftover(place: Path):
    """Removes a file or a folder that a finished run needs no longer. What cannot be removed is named: the run is finished."""
    try:
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
    except OSError as error:
        print(f"{place} is no longer needed, but could not be removed ({error}): remove it")
