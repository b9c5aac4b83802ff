"""Names of checkpoints and data sets: which can only mean a folder, which the Hub could know."""

import re
from pathlib import Path


# name/model, as in a URL of the Hub
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def names_a_folder(name: str) -> bool:
    """Whether a name can only be meant for a folder: the Hub's have one slash at most, and begin with a letter or digit."""
    return name.count("/") > 1 or name.startswith((".", "/", "~"))


def at_home(name: str) -> str:
    """A path with its `~` made a folder, as a shell does it; a configuration file meets no shell.

    Raises:
        ValueError: a user who has no home here.
    """
    try:
        return str(Path(name).expanduser()) if name.startswith("~") else name
    except RuntimeError as error:
        raise ValueError(f"{name}: there is no such home: write the path out") from error
