"""Under which licence a checkpoint is: as the card of what it was made from says, or as the user says; never guessed."""

import re
from contextlib import suppress
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HTTPError

from .render import LICENCE, check_front_matter, licences, read_readme, state_licence
from .validation import ask_the_hub


UNKNOWN = "unknown"
# As the Hub writes them: apache-2.0, llama3.2, other
IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.+_-]*")
SAY_IT = f"say it with --license (as in --license apache-2.0; --license {UNKNOWN} if nobody knows)"


def read_licence(folder: Path) -> dict[str, str | None]:
    """`license`, `license_name` and `license_link` of a folder's card; None where it says nothing that can be read."""
    with suppress(ValueError):
        return licences(folder)[0]
    return dict.fromkeys(LICENCE)


def check_flag(given: str | None):
    """Raises ValueError for a --license that is no name of a licence."""
    if given is not None and not (isinstance(given, str) and IDENTIFIER.fullmatch(given)):
        raise ValueError(f"license is {given!r}: give it as the Hub calls it, as in apache-2.0, other or {UNKNOWN}")


def settle_licence(found: dict, given: str | None, former: Path, to_push: bool) -> dict[str, str | None]:
    """The licence to state of what is made from a checkpoint whose card says `found`; all None where it is unknown.

    given: --license, which outweighs `found`; former: a folder whose card will be kept, with the licence that a user
    wrote into it; to_push: whether the result is to be uploaded.

    Raises:
        ValueError: flag and card contradict each other; or an upload under a licence that nobody named, or with a card
            that the Hub would refuse.
    """
    _, own = licences(former)
    if given and own.get("license") not in (None, given):
        raise ValueError(
            f"--license {given} contradicts {former}/README.md, which says license: {own['license']}: leave the flag out, "
            "or change the card"
        )
    stated = found.get("license") not in (None, "", UNKNOWN)
    if to_push and not (given or own or stated):
        raise ValueError(
            f"push_to_hub: the licence is unknown, as the card of what this is made from says none: {SAY_IT}"
        )
    licence = {key: found.get(key) if given or stated else None for key in LICENCE}
    if given and given != found.get("license"):
        licence = dict.fromkeys(LICENCE) | {"license": given}
    if to_push:
        _rehearse(former, licence)
    return licence


def _rehearse(former: Path, licence: dict):
    """Tries, before the work, whether the Hub will take a kept card with this licence; without the Hub as far as can be."""
    card, _ = state_licence(read_readme(former) or "", licence)
    try:
        check_front_matter(card)
        # That it cannot be reached now says nothing about the end of the work
        with suppress(HTTPError, OSError):
            ask_the_hub(card)
    except ValueError as error:
        raise ValueError(
            f"push_to_hub: the card with {former}/README.md and the licence would be refused: {error}"
        ) from error


def licence_words(licence: dict) -> str:
    """A licence by the keys of LICENCE as a card's text names it."""
    identifier, name, link = (licence.get(key) for key in LICENCE)
    if identifier in (None, "", UNKNOWN):
        return "unknown: nobody has named one, so ask the makers of what it was made from before you pass it on"
    stated = ", ".join(identifier) if isinstance(identifier, list) else str(identifier)
    own = f", {name}" if name else ""
    return " ".join(f"{stated}{own}{f' ({link})' if link else ''}".split())


def data_licence(hub_id: str | None, told: str | None) -> str:
    """The licence of a data set in words: as its card on the Hub says, or as the user says, else unknown.

    The card is looked for in the Hub's cache, too. One that says "other" alone says too little: then the user's word counts.
    """
    found: dict = {}
    if hub_id is not None:
        # A card that cannot be had is no reason to lose what was trained
        with suppress(HTTPError, OSError, ValueError):
            found = read_licence(Path(hf_hub_download(hub_id, "README.md", repo_type="dataset")).parent)
    name = found.get("license_name") or found.get("license")
    if name in (None, "", "other", UNKNOWN):
        return told or name or UNKNOWN
    return ", ".join(name) if isinstance(name, list) else str(name)
