"""The rule for rows, in one place: what a turn and the columns beside a conversation may say.

A row is a conversation of texts that are not empty, an optional system message first, then user and assistant in turn.
White space around a reply is trimmed, nothing else is changed. A last question without a reply is left out and counted.
`weight` (0, 1) and `train` (false, true), of a turn or a row, say whether a reply is learnt; one that is not stays as
context. What would have to be learnt or shown and cannot be makes the row bad. Every other key and column is metadata: left
out and counted.
"""

import json
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

from evaluation.perplexity import lone_surrogate


ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatbot"), "assistant"),
}
# role and content under the names that they have in data; "role" and "content" come last, as a table that holds both has
# null in the others
ALIASES = {"role": ("from", "role"), "content": ("value", "content")}
# What a turn says besides its text, which no template here is given: a reply without it is another reply
BESIDE_TEXT = ("reasoning_content", "thinking", "tool_calls", "function_call", "tool_call_id", "name")
# Whether a reply is learnt, and what says that it is and that it is not
LEARNT = {"weight": (1, 0), "train": (True, False)}
# Columns that change what is learnt, with the reason why a row that says something there is left out. All others but
# LEARNT and what a form reads are metadata
_TOOLS = "it offers tools, which no reply here can call"
_REASONING = "its reply has reasoning, which is not learnt here"
_CALLS = "its reply calls tools, which is not learnt here"
_SEEN = "its conversation is about what no text model can see or hear"
_SYSTEM = "it has a system message under a name that is not read (rename it to `system`)"
COLUMNS = {
    **dict.fromkeys(("tools", "functions"), _TOOLS),
    **dict.fromkeys(("reasoning_content", "thinking"), _REASONING),
    **dict.fromkeys(("tool_calls", "function_call", "tool_call_id"), _CALLS),
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), _SEEN),
    **dict.fromkeys(("system_prompt", "system_message"), _SYSTEM),
    "history": "it has earlier turns, which only Alpaca's form holds beside a question",
    "documents": "it shows the template documents, which are not passed on",
    "chat_template": "it brings a chat template of its own, and a run has one",
    "chat_template_kwargs": "it changes how the template renders it, which is not passed on",
}
# {"role", "content"}; a reply that is not learnt has "train": False too
Message = dict[str, Any]


class BadRow(ValueError):
    """Why a row is left out; `keys` are those that it was left out for, if it was for keys."""

    def __init__(self, reason: str, keys: tuple[str, ...] = ()):
        super().__init__(reason)
        self.keys = keys


@dataclass
class Row:
    """A good row: its messages, whether a last question was left out, and which columns and keys of turns were."""

    messages: list[Message]
    has_question_left: bool
    columns: list[str]
    keys: list[str]

    @property
    def num_learnt(self) -> int:
        return sum(is_learnt(message) for message in self.messages)

    @property
    def num_context_replies(self) -> int:
        """How many replies are context only."""
        return sum(message["role"] == "assistant" for message in self.messages) - self.num_learnt


def is_learnt(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("train", True)


def check_row(row: dict, turns: list[dict], read_columns: frozenset[str]) -> Row:
    """The row by the rule above; `turns` are those that its form reads from `read_columns`, with all their keys.

    Raises:
        BadRow: what breaks the rule.
    """
    _refuse_columns(row, read_columns)
    if not turns:
        raise BadRow("no messages")
    if (system := row.get("system")) is not None and (not isinstance(system, str) or system.strip()):
        turns = [{"role": "system", "content": system}, *turns]
    turns = [_with_plain_names(number, turn) for number, turn in enumerate(turns)]
    _refuse_what_is_beside_text(turns)
    messages = [_message(number, turn) for number, turn in enumerate(turns)]
    has_question_left = _leave_last_question(messages)
    if not _says_learnt(row, "it"):
        for message in messages:
            if message["role"] == "assistant":
                message["train"] = False
    known = {*ALIASES, *LEARNT, *BESIDE_TEXT}
    keys = [_printable(key) for turn in turns for key in turn if key not in known and turn[key] is not None]
    known = {*read_columns, *LEARNT, *COLUMNS, "system"}
    columns = [_printable(name) for name in row if name not in known and row[name] is not None]
    return Row(messages, has_question_left, columns, keys)


def _printable(name: str) -> str:
    """Any JSON string may be a name; the terminal and results.json get text."""
    return name if name.isprintable() else ascii(name)[1:-1]


def _refuse_columns(row: dict, read_columns: frozenset[str]):
    if keys := tuple(name for name in COLUMNS if name not in read_columns and not _says_nothing(row.get(name))):
        raise BadRow("; ".join(dict.fromkeys(COLUMNS[key] for key in keys)), keys)


def _says_nothing(value) -> bool:
    """Null or empty; a table fills the fields of an object that is not there with nulls."""
    if isinstance(value, dict):
        return all(part is None for part in value.values())
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def _with_plain_names(number: int, turn) -> dict:
    """A turn with its role and content called so, whatever the data calls them."""
    if not isinstance(turn, dict):
        raise BadRow(f"message {number} is {_kind(turn)}, not an object")
    plain = {key: value for key, value in turn.items() if all(key not in names for names in ALIASES.values())}
    for name, aliases in ALIASES.items():
        given = {alias: turn[alias] for alias in aliases if turn.get(alias) is not None}
        first, *others = given.values() or [None]
        if any(other != first for other in others):
            raise BadRow(f"message {number} says one thing as `{aliases[0]}` and another as `{aliases[1]}`")
        plain[name] = first
    return plain


def _refuse_what_is_beside_text(turns: list[dict]):
    found = [
        (number, key) for number, turn in enumerate(turns) for key in BESIDE_TEXT if not _says_nothing(turn.get(key))
    ]
    if found:
        number, key = found[0]
        raise BadRow(
            f"message {number} has {key}, which no text here holds", tuple(dict.fromkeys(key for _, key in found))
        )


def _message(number: int, turn: dict) -> Message:
    role, content = turn["role"], _text(turn["content"])
    if not isinstance(content, str):
        raise BadRow(f"message {number} is {_kind(content)}, not text")
    if not content.strip():
        raise BadRow(f"message {number} is empty")
    if (lone := lone_surrogate(content)) is not None:
        raise BadRow(f"message {number} holds {lone}")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"message {number} has the role {shown(role)}")
    message: Message = {"role": ROLES[role], "content": content}
    learnt = _says_learnt(turn, f"message {number}")
    if message["role"] == "assistant":
        message["content"] = content.strip()
        if learnt is False:
            message["train"] = False
    elif learnt and any(turn.get(key) is not None for key in LEARNT):
        keys = tuple(key for key in LEARNT if turn.get(key) is not None)
        raise BadRow(f"message {number} is to be learnt ({', '.join(keys)}), and replies alone are", keys)
    return message


def _leave_last_question(messages: list[Message]) -> bool:
    """Takes a last question off, as there is nothing in it to learn; whether there was one.

    Raises:
        BadRow: the roles are not in turn, or there is no reply.
    """
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    roles = [message["role"] for message in turns]
    if len(turns) < 2 or roles != (["user", "assistant"] * len(turns))[: len(turns)]:
        raise BadRow("not user and assistant in turn, with a reply")
    if roles[-1] == "assistant":
        return False
    messages.pop()
    return True


def _text(content):
    """Content in parts that are all text, in one."""
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    return content


def _is_text_part(part) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _kind(value) -> str:
    return "null" if value is None else type(value).__name__


def _says_learnt(holder: dict, what: str) -> bool:
    """Whether the `weight` and `train` of a turn or a row ask for it to be learnt; where they are silent it is."""
    said = set()
    for key, (yes, no) in LEARNT.items():
        value = holder.get(key)
        if value is None:
            continue
        # True == 1 in Python, and a table's weights may be floats
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool) != isinstance(yes, bool)
            or value not in (yes, no)
        ):
            raise BadRow(f"{what} has {key} {shown(value)}: {json.dumps(no)} and {json.dumps(yes)} are known", (key,))
        said.add(bool(value))
    if len(said) > 1:
        raise BadRow(f"{what} is to be learnt by one of weight and train, and not by the other", tuple(LEARNT))
    return said != {False}
