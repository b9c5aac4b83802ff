"""Licences and notices, which travel with whatever is made of a checkpoint."""

from fnmatch import fnmatchcase
from pathlib import Path


# As the Hub's repositories call them; Llama's licence points to its policy of acceptable use
LEGAL_FILES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


def legal_files(folder: Path) -> list[Path]:
    """The legal texts at the top of a folder. A folder of such a name is none of them."""
    # glob would take a folder that may not be listed for an empty one
    files = (file for file in folder.iterdir() if any(fnmatchcase(file.name, pattern) for pattern in LEGAL_FILES))
    return sorted(file for file in files if file.is_file())
