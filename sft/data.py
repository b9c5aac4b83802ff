"""Reads conversations of any usual form; all become `messages`.

The rule for rows: a row is a conversation of texts that are not empty, an optional system message first, then user and
assistant in turn, the assistant last. White space around a reply is trimmed, nothing else is changed. A row that breaks
the rule is left out, and its index and the reason are said. What a row says in columns beside the conversation (Alpaca's
`history`, a `system` of its own) belongs to it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled

from checkpoints.names import HUB_ID
from evaluation.perplexity import named_part


ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatbot"), "assistant"),
}
Message = dict[str, str]


class BadRow(ValueError):
    """Why a row is left out."""


@dataclass
class Conversations:
    """`rows` are (index, messages), a message {"role", "content"}; `bad` holds (index, reason) of what was left out.

    `name` is how the data is called, without folders of one machine; `hub_id` where it is found by others, if it is.
    """

    name: str
    form: str
    rows: list[tuple[int, list[Message]]]
    bad: list[tuple[int, str]]
    num_read: int
    hub_id: str | None = None


def _pairs(texts) -> list[Message]:
    """Plain texts in turn, as LIMA has them: question, answer, question, answer."""
    roles = ("user", "assistant")
    return [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(texts)]


def _turns(turns) -> list[Message]:
    """Turns as objects, {"role", "content"} or {"from", "value"}; or one object of two columns."""
    if isinstance(turns, dict):
        turns = [dict(zip(turns, turn)) for turn in zip(*turns.values(), strict=True)]
    return [
        {"role": _first(turn, "from", "role"), "content": _text(_first(turn, "value", "content"))} for turn in turns
    ]


def _first(turn: dict, *columns: str):
    """The first of these that is there: a table has null where another row's column is."""
    return next((turn[column] for column in columns if turn.get(column) is not None), None)


def _text(content):
    """Content in parts that are all text, in one."""
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    return content


def _is_text_part(part) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _lima(row: dict) -> list[Message]:
    return _pairs(_listed(row["conversations"]))


def _listed(texts) -> list:
    if not isinstance(texts, list):
        raise BadRow(f"its conversation is {type(texts).__name__}, not a list")
    return texts


def _sharegpt(row: dict) -> list[Message]:
    return _turns(row["conversations"])


def _messages(row: dict) -> list[Message]:
    return _turns(row["messages"])


def _alpaca(row: dict) -> list[Message]:
    question, context = row["instruction"], row.get("input")
    if isinstance(question, str) and isinstance(context, str) and context.strip():
        question = f"{question}\n\n{context}"
    earlier = [text for pair in row.get("history") or [] for text in _listed(pair)]
    return _pairs([*earlier, question, row["output"]])


def _prompt_completion(row: dict) -> list[Message]:
    sides = zip(("user", "assistant"), (row["prompt"], row["completion"]))
    return [
        turn
        for role, side in sides
        for turn in (_turns(side) if isinstance(side, list) else [{"role": role, "content": side}])
    ]


def _commonsense_qa(row: dict) -> list[Message]:
    """The Hub's form, put into the words of the Alpaca-form file."""
    choices = "\n".join(f"{label}) {text}" for label, text in zip(row["choices"]["label"], row["choices"]["text"]))
    return _pairs([f"Question: {row['question']}\nChoices:\n{choices}\nAnswer:", row["answerKey"]])


def recognise(row: dict) -> tuple[str, Callable[[dict], list[Message]]]:
    """The form of a data set by its columns, and what reads a row of it.

    Raises:
        ValueError: columns of no known form.
    """
    columns = set(row)
    if "messages" in columns:
        return "messages", _messages
    if "conversations" in columns:
        turns = row["conversations"]
        if isinstance(turns, dict) or (isinstance(turns, list) and turns and isinstance(turns[0], dict)):
            return "ShareGPT", _sharegpt
        return "LIMA", _lima
    if {"instruction", "output"} <= columns:
        return "Alpaca", _alpaca
    if {"prompt", "completion"} <= columns:
        return "prompt/completion", _prompt_completion
    if {"question", "choices", "answerKey"} <= columns:
        return "CommonsenseQA", _commonsense_qa
    raise ValueError(
        f"columns {', '.join(sorted(columns)) or 'none'} are of no known form: rename them to `messages`, "
        "`conversations`, `instruction` and `output`, or `prompt` and `completion`"
    )


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
    form, read = recognise(first)
    good, bad = [], []
    for index, row in enumerate(rows, start=part.start or 0):
        try:
            good.append((index, _checked(row, read)))
        except BadRow as reason:
            bad.append((index, str(reason)))
    if not good:
        raise ValueError(f"{name} holds no usable row; the first: row {bad[0][0]}, {bad[0][1]}")
    is_local = is_json or Path(place).exists()
    called = Path(place).name + name.removeprefix(place) if is_local else name
    hub_id = place if HUB_ID.fullmatch(place) and not is_local else None
    return Conversations(called, form, good, bad, len(rows), hub_id)


def _checked(row, read: Callable[[dict], list[Message]]) -> list[Message]:
    """The messages of a row by the rule above."""
    try:
        messages, system = read(row), row.get("system")
    except BadRow:
        raise
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadRow("not of the form of the others") from None
    if not messages:
        raise BadRow("no messages")
    if row.get("tools"):
        raise BadRow("it offers tools, which no reply here can call")
    if system is not None and (not isinstance(system, str) or system.strip()):
        messages = [{"role": "system", "content": system}, *messages]
    for turn, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, str):
            raise BadRow(f"message {turn} is {'null' if content is None else type(content).__name__}, not text")
        if not content.strip():
            raise BadRow(f"message {turn} is empty")
        if not isinstance(message["role"], str) or message["role"] not in ROLES:
            raise BadRow(f"message {turn} has the role {message['role']!r}")
    messages = [{"role": ROLES[message["role"]], "content": message["content"]} for message in messages]
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    expected = ["user", "assistant"] * (len(turns) // 2)
    if not turns or [message["role"] for message in turns] != expected:
        raise BadRow("not user and assistant in turn, the assistant last")
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = message["content"].strip()
    return messages


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
    except ValueError as error:
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
    except ValueError as error:
        raise ValueError(f"{name} cannot be read: {error}, {local}") from error


def _read_parquet(name: str) -> list[dict]:
    if not Path(name).is_file():
        raise ValueError(f"no file at {name}: give a .json, .jsonl or .parquet file, or a Hub id")
    try:
        return load_dataset("parquet", data_files=name, split="train").to_list()
    except (ValueError, DatasetGenerationError) as error:
        raise ValueError(f"{name} is no parquet file that can be read: {error}") from error
