"""Cards of checkpoints: templates are rendered, front matter is checked, a user's own text is kept."""

import contextlib
import json
import re
from pathlib import Path

import yaml
from huggingface_hub import ModelCard
from jinja2 import Environment, FileSystemLoader, StrictUndefined


BEGIN = "<!-- bhyt: generated, do not edit between these marks -->"
END = "<!-- bhyt: end -->"
LICENCE = ("license", "license_name", "license_link")
# The front matter as it was generated, so that the next card knows what a user changed since
RECORD = re.compile(r"<!-- bhyt: front matter (\{.*\}) -->\n")


def render(template: str, **values) -> str:
    """A template of this folder with its values; the generated text stands between marks, under its front matter.

    Raises:
        ValueError: front matter that is not YAML, or no card's.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    # Values go into YAML as JSON strings, which are YAML too
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    environment.filters |= {"quote": _quoted, "cell": _cell}
    data, text = _parts(environment.get_template(template).render(values))
    assert data["library_name"] == "transformers"
    # "-->" would end the comment
    record = json.dumps(data, ensure_ascii=False).replace(">", "\\u003e")
    return _card(data, f"{BEGIN}\n<!-- bhyt: front matter {record} -->\n{text.strip()}\n{END}\n")


def read_licence(folder: Path) -> dict[str, str | None]:
    """`license`, `license_name` and `license_link` of a folder's card; None where it says nothing that can be read."""
    data: dict = {}
    with contextlib.suppress(ValueError):
        data, _ = _parts(read_readme(folder) or "")
    return {key: data.get(key) for key in LICENCE}


def _quoted(text: str) -> str:
    """Every line as a quotation, so that what a model wrote cannot become the card's own headings or HTML."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return "\n".join(f"> {line}".rstrip() for line in escaped.splitlines() or [""])


def _cell(value) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _parts(card: str) -> tuple[dict, str]:
    """(front matter, text).

    Raises:
        ValueError: front matter that cannot be read.
    """
    if not card.lstrip().startswith("---"):
        return {}, card
    try:
        loaded = ModelCard(card, ignore_metadata_errors=True)
        return loaded.data.to_dict(), loaded.text
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(f"the front matter of a card cannot be read: {' '.join(str(error).split())}") from error


def _card(data: dict, text: str) -> str:
    return f"---\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}---\n\n{text}"


def merge_card(card: str, former: str | None) -> str:
    """`card` with what a user wrote in `former`: text outside the marks, front matter of other keys, items of lists.

    Front matter that stands as an earlier run generated it is not the user's. A former card without marks is the user's
    altogether: the generated part goes below it.

    Raises:
        ValueError: `former` has front matter that cannot be read.
    """
    if former is None or not former.strip():
        return card
    (data, generated), (old, text) = _parts(card), _parts(former)
    record = RECORD.search(text)
    written = json.loads(record[1]) if record else {}
    for key, value in old.items():
        if value == written.get(key):
            continue
        if isinstance(value, list) and isinstance(written.get(key), list):
            value = [item for item in value if item not in written[key]]
        if isinstance(value, list) and isinstance(data.get(key), list):
            data[key] = [*data[key], *(item for item in value if item not in data[key])]
        else:
            data.setdefault(key, value)
    before, mark, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END) if mark else ("", "", "")
    parts = [part.strip() for part in (before, generated, after)]
    return _card(data, "\n\n".join(part for part in parts if part) + "\n")


def save_readme(folder: Path, card: str, former: Path | None = None):
    """Writes `card` to the folder's README.md, merged with the one in `former` (by default this folder itself)."""
    (folder / "README.md").write_text(merge_card(card, read_readme(former or folder)), encoding="utf-8")


def read_readme(folder: Path) -> str | None:
    """A folder's README.md, which a card can be merged with; asked before long work, too.

    Raises:
        ValueError: it is not UTF-8, or has front matter that cannot be read.
    """
    file = folder / "README.md"
    if not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8")
        _parts(text)
    except ValueError as error:
        raise ValueError(f"{file} would be kept in the new card, but {error}: mend it, or move it away") from error
    return text
