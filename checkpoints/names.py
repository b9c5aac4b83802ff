"""Names of checkpoints and data sets: which can only mean a folder, which the Hub could know."""

import re


# name/model, as in a URL of the Hub
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def names_a_folder(name: str) -> bool:
    """Whether a name can only be meant for a folder: the Hub's have one slash at most, and begin with a letter or digit."""
    return name.count("/") > 1 or name.startswith((".", "/", "~"))
