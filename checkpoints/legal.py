"""Licences and notices, which travel with whatever is made of a checkpoint."""

from pathlib import Path


# As the Hub's repositories call them; Llama's licence points to its policy of acceptable use
LEGAL_FILES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


def legal_files(folder: Path) -> list[Path]:
    """The legal texts at the top of a folder. A folder of such a name is none of them."""
    return sorted({file for pattern in LEGAL_FILES for file in folder.glob(pattern) if file.is_file()})
