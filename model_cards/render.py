"""Cards of checkpoints: templates are rendered, front matter is checked, a user's own text is kept."""

import json
import re
import sys
from pathlib import Path

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from jinja2 import Environment, FileSystemLoader, StrictUndefined


BEGIN = "<!-- bhyt: generated, do not edit between these marks -->"
END = "<!-- bhyt: end -->"
LICENCE = ("license", "license_name", "license_link")
# The front matter as it was generated, so that the next card knows what a user changed since
RECORD = re.compile(r"<!-- bhyt: front matter (\{.*\}) -->\n")


class FrontMatterLoader(yaml.SafeLoader):
    """PyYAML's, except that `no`, `on` and the like stay words (the Hub reads YAML 1.2: Norwegian is `language: no`), and
    that a key which stands twice is refused, as there."""

    def construct_mapping(self, node, deep=False):
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, True) for key, _ in node.value if key.tag != merge]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"{twice[0]!r} stands there twice")
        return super().construct_mapping(node, deep)


BOOL = "tag:yaml.org,2002:bool"
FrontMatterLoader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0] != BOOL]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
FrontMatterLoader.add_implicit_resolver(BOOL, re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))


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
    assert data["library_name"] in ("transformers", "peft")
    # "-->" would end the comment
    record = json.dumps(data, ensure_ascii=False).replace(">", "\\u003e")
    return _card(data, f"{BEGIN}\n<!-- bhyt: front matter {record} -->\n{text.strip()}\n{END}\n")


def _quoted(text: str) -> str:
    """Every line as a quotation, so that what a model wrote cannot become the card's own headings or HTML."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return "\n".join(f"> {line}".rstrip() for line in escaped.splitlines() or [""])


def _cell(value) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _parts(card: str) -> tuple[dict, str]:
    """(front matter, text). Nothing is left out of the front matter, whatever the Hub would say of it.

    Raises:
        ValueError: front matter that cannot be read.
    """
    found = REGEX_YAML_BLOCK.search(card)
    if found is None:
        return {}, card
    try:
        data = yaml.load(found[2], FrontMatterLoader) or {}
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(f"the front matter of a card cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ValueError("the front matter of a card cannot be read: it holds no keys with values")
    return data, card[found.end() :]


def state_licence(card: str, licence: dict) -> tuple[str, str | None]:
    """(the card, its `license`): `licence`, by the keys of LICENCE, is put into a card that states none."""
    data, text = _parts(card)
    given = {key: value for key, value in licence.items() if value is not None}
    if not given or data.get("license") is not None:
        return card, data.get("license")
    return _card(data | given, text.lstrip("\n")), given["license"]


def check_front_matter(card: str):
    """Raises ValueError for front matter that no card can have, as far as this can be told without the Hub; asked before
    long work."""
    data, _ = _parts(card)
    for key in ("license", "tags", "datasets", "base_model", "language"):
        value = data.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if bad := [item for item in items if not isinstance(item, str)]:
            raise ValueError(f"the front matter of a card says {key}: {bad[0]!r}, which is no text: put it in quotes")


def _card(data: dict, text: str) -> str:
    return f"---\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}---\n\n{text}"


def merge_card(card: str, former: str | None) -> str:
    """`card` with what a user wrote in `former`: text outside the marks, front matter of other keys, items of lists, and
    a licence of the user's own, which wins with a warning on stderr.

    Front matter that stands as an earlier run generated it is not the user's. A former card without marks is the user's
    altogether: the generated part goes below it.

    Raises:
        ValueError: `former` has front matter that cannot be read.
    """
    if former is None or not former.strip():
        return card
    (data, generated), (old, text) = _parts(card), _parts(former)
    written = _generated_data(text)
    if own := _own_licence(old, written):
        if data.get("license") not in (None, own.get("license")):
            kept, ours = own.get("license"), data["license"]
            print(f"warning: the card's own license, {kept}, is kept; it would have been {ours}", file=sys.stderr)
        data = {key: value for key, value in data.items() if key not in LICENCE}
    for key, value in old.items():
        if key in LICENCE:
            continue
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
    return _card(data | own, "\n\n".join(part for part in parts if part) + "\n")


def _generated_data(text: str) -> dict:
    """Front matter as an earlier run generated it; empty for a card that is the user's altogether."""
    record = RECORD.search(text)
    return json.loads(record[1]) if record else {}


def _own_licence(data: dict, written: dict) -> dict:
    """The licence that a user wrote into a card: name and link belong to it. Empty where it is as it was generated."""
    own = {key: data[key] for key in LICENCE if data.get(key) is not None}
    return {} if all(value == written.get(key) for key, value in own.items()) else own


def licences(folder: Path) -> tuple[dict, dict]:
    """(what a folder's card says of its licence, what a user wrote of that), by the keys of LICENCE.

    Raises:
        ValueError: a card that cannot be read.
    """
    data, text = _parts(read_readme(folder) or "")
    return {key: data.get(key) for key in LICENCE}, _own_licence(data, _generated_data(text))


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
        # Some editors begin a file with a byte order mark
        text = file.read_text(encoding="utf-8-sig")
        _parts(text)
    except ValueError as error:
        raise ValueError(f"{file} would be kept in the new card, but {error}: mend it, or move it away") from error
    return text
