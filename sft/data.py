"""Reads conversations of any usual form; all become `messages`.

The rule for rows: a row is a conversation of texts that are not empty, an optional system message first, then user and
assistant in turn, the assistant last. White space around a reply is trimmed, nothing else is changed. A row that breaks
the rule is left out, and its index and the reason are said.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from datasets import load_dataset
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled

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
    """`rows` are (index, messages), a message {"role", "content"}; `bad` holds (index, reason) of what was left out."""

    name: str
    form: str
    rows: list[tuple[int, list[Message]]]
    bad: list[tuple[int, str]]
    num_read: int


def _pairs(texts) -> list[Message]:
    """Plain texts in turn, as LIMA has them: question, answer, question, answer."""
    roles = ("user", "assistant")
    return [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(texts)]


def _lima(row: dict) -> list[Message]:
    return _pairs(row["conversations"])


def _sharegpt(row: dict) -> list[Message]:
    return [{"role": turn.get("from"), "content": turn.get("value")} for turn in row["conversations"]]


def _messages(row: dict) -> list[Message]:
    return [{"role": turn.get("role"), "content": turn.get("content")} for turn in row["messages"]]


def _alpaca(row: dict) -> list[Message]:
    question, context = row["instruction"], row.get("input")
    if isinstance(question, str) and isinstance(context, str) and context.strip():
        question = f"{question}\n\n{context}"
    return _pairs([question, row["output"]])


def _prompt_completion(row: dict) -> list[Message]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return _messages({"messages": prompt + completion})
    return _pairs([prompt, completion])


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
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
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


def read_conversations(name: str, split: str) -> Conversations:
    """The conversations of a file or a Hub id; NAME[a:b] takes rows a to b.

    Raises:
        ValueError: what cannot be read, with the remedy; no good row at all.
    """
    place, part = named_part(name)
    is_json = Path(place).suffix in (".json", ".jsonl")
    rows = (_read_json(Path(place)) if is_json else _load(place, split))[part]
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
    return Conversations(Path(place).name if Path(place).suffix else name, form, good, bad, len(rows))


def _checked(row, read: Callable[[dict], list[Message]]) -> list[Message]:
    """The messages of a row by the rule above."""
    try:
        messages = read(row)
    except (AttributeError, KeyError, TypeError):
        raise BadRow("not of the form of the others") from None
    if not messages:
        raise BadRow("no messages")
    for turn, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, str):
            raise BadRow(f"message {turn} is {'null' if content is None else type(content).__name__}, not text")
        if not content.strip():
            raise BadRow(f"message {turn} is empty")
        if message["role"] not in ROLES:
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


def _load(name: str, split: str) -> list[dict]:
    """Rows of a .parquet file or of a data set on the Hub."""
    is_file = Path(name).suffix == ".parquet"
    if is_file and not Path(name).is_file():
        raise ValueError(f"no file at {name}: give a .json, .jsonl or .parquet file, or a Hub id")
    local = "or pass the rows as a local file (.json, .jsonl, .parquet)"
    try:
        return (
            load_dataset("parquet", data_files=name, split="train") if is_file else load_dataset(name, split=split)
        ).to_list()
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
