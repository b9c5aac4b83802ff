"""Reads conversations of any usual form, from files and the Hub; all become `messages` by the rule in turns.py.

What a row says in columns beside the conversation (Alpaca's `history`, a `system` of its own) belongs to it. A row that
breaks the rule is left out, and its index and the reason are said.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled

from checkpoints.names import HUB_ID
from evaluation.perplexity import named_part

from .turns import BadRow, Message, Row, check_row


@dataclass
class Conversations:
    """`rows` are (index, messages) as turns.py describes them; `bad` holds (index, reason) of what was left out.

    `name` is how the data is called, without folders of one machine; `hub_id` where it is found by others, if it is.
    The counts are of rows, but for `num_context_replies` and `keys_left`, which are of turns.
    """

    name: str
    form: str
    rows: list[tuple[int, list[Message]]]
    bad: list[tuple[int, str]]
    num_read: int
    hub_id: str | None = None
    # Rows that were bad for a key or a column that could not be learnt
    bad_for: Counter[str] = field(default_factory=Counter)
    num_not_learnt: int = 0
    num_context_replies: int = 0
    num_questions_left: int = 0
    # Metadata, by the name of its column or of its key in a turn
    columns_left: Counter[str] = field(default_factory=Counter)
    keys_left: Counter[str] = field(default_factory=Counter)

    def take(self, index: int, row: Row):
        """Keeps a good row; one in which every reply is marked as not to be learnt is only counted."""
        if not row.num_learnt:
            self.num_not_learnt += 1
            return
        self.rows.append((index, row.messages))
        self.num_context_replies += row.num_context_replies
        self.num_questions_left += row.has_question_left
        self.columns_left.update(row.columns)
        self.keys_left.update(row.keys)

    def leave(self, index: int, reason: BadRow):
        self.bad.append((index, str(reason)))
        self.bad_for.update(reason.keys)


@dataclass(frozen=True)
class Form:
    """A form of rows: the columns that tell it, what reads the turns of a row, and the columns that it may read besides."""

    name: str
    columns: frozenset[str]
    read: Callable[[dict], list]
    others: frozenset[str] = frozenset()


def _pairs(texts) -> list[Message]:
    """Plain texts in turn, as LIMA has them: question, answer, question, answer."""
    roles = ("user", "assistant")
    return [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(texts)]


def _listed(texts) -> list:
    if not isinstance(texts, list):
        raise BadRow(f"its conversation is {type(texts).__name__}, not a list")
    return texts


def _turns(turns) -> list:
    """Turns as objects, {"role", "content"} or {"from", "value"}; or one object that holds a list of each."""
    if not isinstance(turns, dict):
        return _listed(turns)
    lists = {key: _listed(column) for key, column in turns.items() if column is not None}
    return [dict(zip(lists, turn)) for turn in zip(*lists.values(), strict=True)]


def _alpaca(row: dict) -> list:
    question, context = row["instruction"], row.get("input")
    if context is not None and not isinstance(context, str):
        raise BadRow(f"its input is {type(context).__name__}, not text")
    if isinstance(question, str) and context and context.strip():
        question = f"{question}\n\n{context}"
    earlier = []
    for asked, answered in map(_listed, row.get("history") or []):
        earlier += [asked, answered]
    return _pairs([*earlier, question, row["output"]])


def _prompt_completion(row: dict) -> list:
    sides = zip(("user", "assistant"), (row["prompt"], row["completion"]))
    return [
        turn
        for role, side in sides
        for turn in (_turns(side) if isinstance(side, list) else [{"role": role, "content": side}])
    ]


def _commonsense_qa(row: dict) -> list:
    """The Hub's form, put into the words of the Alpaca-form file."""
    labels, texts = (_listed(row["choices"][column]) for column in ("label", "text"))
    if not all(isinstance(text, str) for text in (row["question"], *labels, *texts)):
        raise BadRow("its question or a choice is not text")
    choices = "\n".join(f"{label}) {text}" for label, text in zip(labels, texts, strict=True))
    return _pairs([f"Question: {row['question']}\nChoices:\n{choices}\nAnswer:", row["answerKey"]])


def _form(name: str, *columns: str, read: Callable[[dict], list], others: tuple[str, ...] = ()) -> Form:
    return Form(name, frozenset(columns), read, frozenset(others))


LIMA = _form("LIMA", "conversations", read=lambda row: _pairs(_listed(row["conversations"])))
FORMS = (
    _form("messages", "messages", read=lambda row: _turns(row["messages"])),
    _form("ShareGPT", "conversations", read=lambda row: _turns(row["conversations"])),
    _form("WildChat", "conversation", read=lambda row: _turns(row["conversation"])),
    _form("Alpaca", "instruction", "output", read=_alpaca, others=("input", "history")),
    _form("prompt/completion", "prompt", "completion", read=_prompt_completion),
    _form("CommonsenseQA", "question", "choices", "answerKey", read=_commonsense_qa),
)


def recognise(row: dict) -> Form:
    """The form of a data set by its columns.

    Raises:
        ValueError: columns of no known form.
    """
    for form in FORMS:
        if form.columns <= set(row):
            return LIMA if form.name == "ShareGPT" and not _holds_objects(row["conversations"]) else form
    raise ValueError(
        f"columns {', '.join(sorted(row)) or 'none'} are of no known form: rename them to `messages`, "
        "`conversations`, `instruction` and `output`, or `prompt` and `completion`"
    )


def _holds_objects(turns) -> bool:
    return isinstance(turns, dict) or (isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict))


def read_conversations(name: str, split: str, configuration: str | None = None) -> Conversations:
    """The conversations of a file or a Hub id; NAME[a:b] takes rows a to b.

    `configuration` chooses among those of a data set on the Hub that has several.

    Raises:
        ValueError: what cannot be read, with the remedy; no good row at all.
    """
    place, part = named_part(name)
    if configuration and Path(place).is_file():
        raise ValueError(f"{place} is a file, which has no configuration {configuration!r}: leave it out")
    is_json = Path(place).suffix in (".json", ".jsonl")
    rows = (_read_json(Path(place)) if is_json else _load(place, split, configuration))[part]
    shapes = [row for row in rows if isinstance(row, dict)]
    if not shapes:
        raise ValueError(f"{name} holds no rows")
    # A first row that is broken must not decide what the others are
    first = next((row for row in shapes if row.get("conversations") or "conversations" not in row), shapes[0])
    form = recognise(first)
    is_local = is_json or Path(place).exists()
    called = Path(place).name + name.removeprefix(place) if is_local else name
    hub_id = place if HUB_ID.fullmatch(place) and not is_local else None
    read = Conversations(called, form.name, [], [], len(rows), hub_id)
    for index, row in enumerate(rows, start=part.start or 0):
        try:
            read.take(index, check_row(row, _turns_of(row, form), form.columns | form.others))
        except BadRow as reason:
            read.leave(index, reason)
    if not read.rows:
        why = (
            f"the first: row {read.bad[0][0]}, {read.bad[0][1]}"
            if read.bad
            else "every reply is marked as not to be learnt"
        )
        raise ValueError(f"{name} holds no usable row; {why}")
    return read


def _turns_of(row, form: Form) -> list:
    """The turns of a row with all their keys, not yet checked."""
    try:
        return form.read(row)
    except BadRow:
        raise
    except (AttributeError, LookupError, TypeError, ValueError):
        raise BadRow("not of the form of the others") from None


def _read_json(file: Path) -> list:
    """A JSON array, or one JSON object a line; always UTF-8."""
    if not file.is_file():
        raise ValueError(f"no file at {file}: give a .json, .jsonl or .parquet file, or a Hub id")
    try:
        text = file.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            return json.loads(text)
        # Not splitlines(): JSON strings may hold characters such as U+2028 that it takes for line ends
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not UTF-8 JSON: {error}") from error


def _load(name: str, split: str, configuration: str | None) -> list[dict]:
    """Rows of a .parquet file or of a data set on the Hub."""
    if Path(name).suffix == ".parquet":
        return _read_parquet(name)
    local = "or pass the rows as a local file (.json, .jsonl, .parquet)"
    try:
        return load_dataset(name, configuration, split=split).to_list()
    except RuntimeError as error:
        if "script" not in str(error).lower():
            raise
        raise ValueError(
            f"{name} is made by a script, which datasets no longer runs: use its parquet branch, {local}"
        ) from error
    except (DatasetNotFoundError, GatedRepoError) as error:
        gated = "gated" in str(error).lower() or isinstance(error, GatedRepoError)
        why = (
            f"is gated: accept its terms at https://huggingface.co/datasets/{name} and log in (`hf auth login`)"
            if gated
            else "was not found on the Hub: check the name, log in (`hf auth login`) where it is private"
        )
        raise ValueError(f"{name} {why}, {local}") from error
    except (ConnectionError, OfflineModeIsEnabled) as error:
        raise ValueError(f"{name} could not be downloaded (no connection): try again later, {local}") from error
    except (ValueError, DatasetGenerationError) as error:
        raise ValueError(f"{name} cannot be read: {error}, {local}") from error


def _read_parquet(name: str) -> list[dict]:
    if not Path(name).is_file():
        raise ValueError(f"no file at {name}: give a .json, .jsonl or .parquet file, or a Hub id")
    try:
        return load_dataset("parquet", data_files=name, split="train").to_list()
    except (ValueError, DatasetGenerationError) as error:
        raise ValueError(f"{name} is no parquet file that can be read: {error}") from error
