"""Conversations become token ids and labels: which template, which token ends a turn, what is supervised.

Every reply that the data does not mark as context is supervised with the token that ends it, and nothing else is. The text between two replies is what a
chat would send: the ids before a reply are the ids of the prompt that ends there. Spellings of control tokens inside the
data (`</s>` in a text about HTML) are encoded as plain text.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from jinja2 import TemplateError
from rich.progress import track
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from evaluation.answers import IGNORED
from evaluation.perplexity import adds_bos

from .data import Conversations
from .turns import BadRow, Message, is_learnt


OUR_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
PROBE = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, ("a", "b", "c", "d"))]


@dataclass
class Chat:
    """How one checkpoint talks. `training_template` renders as `template` does, which is saved with the model.

    `named` are the templates that the checkpoint has for other uses (tool_use, rag): kept as they are, not trained.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str
    training_template: str
    origin: str
    named: dict[str, str] = field(default_factory=dict)
    stop_id: int = field(init=False)

    def __post_init__(self):
        self.stop_id = self._find_stop()
        ids, labels = self.encode(PROBE)
        learned = [label for label in labels if label != IGNORED]
        expected = [message["content"] + self.stop_token for message in PROBE if message["role"] == "assistant"]
        # White space around a reply belongs to some templates
        if "".join((text := self.tokenizer.decode(learned)).split()) != "".join(expected):
            raise ValueError(f"of two replies it would teach {text!r}, not {''.join(expected)!r}")

    @property
    def stop_token(self) -> str:
        return self.tokenizer.convert_ids_to_tokens(self.stop_id)

    def stop_ids(self, others: int | list[int] | None) -> list[int]:
        """The end of a turn first, then what else ended a text before."""
        others = [] if others is None else [others] if isinstance(others, int) else others
        return [self.stop_id, *(other for other in others if other != self.stop_id)]

    def prompt(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation up to where the next reply begins."""
        return self._ids(messages, add_generation_prompt=True)

    def encode(self, messages: list[Message]) -> tuple[list[int], list[int]]:
        """(ids, labels) of a conversation, -100 where nothing is learned.

        Raises:
            BadRow: the template refuses the row, does not render earlier turns as it did before, or does not end a reply.
        """
        try:
            return self._encode(messages)
        except TemplateError as error:
            raise BadRow(f"the chat template refuses it: {error}") from None

    def _encode(self, messages: list[Message]) -> tuple[list[int], list[int]]:
        ids = self._ids(messages)
        labels = [IGNORED] * len(ids)
        for turn, message in enumerate(messages):
            if not is_learnt(message):
                continue
            before, after = self.prompt(messages[:turn]), self._ids(messages[: turn + 1])
            if after[: len(before)] != before or ids[: len(after)] != after:
                raise BadRow(f"message {turn} changes how the template renders what stands before it")
            reply = after[len(before) :]
            if reply.count(self.stop_id) != 1:
                raise BadRow(f"message {turn} has {reply.count(self.stop_id)} ends of turn")
            end = len(before) + reply.index(self.stop_id) + 1
            labels[len(before) : end] = ids[len(before) : end]
        return ids, labels

    def _ids(self, messages: list[Message], add_generation_prompt: bool = False) -> list[int]:
        try:
            return self.tokenizer.apply_chat_template(
                [{"role": message["role"], "content": message["content"]} for message in messages],
                chat_template=self.training_template,
                add_generation_prompt=add_generation_prompt,
                sanitize_control_tokens=True,
                return_dict=True,
            )["input_ids"]
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            # What Python says where a template computes with what is not there
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    def _find_stop(self) -> int:
        """The control token that follows a reply."""
        reply = self._ids(PROBE[:2])[len(self.prompt(PROBE[:1])) :]
        control = self.tokenizer.added_tokens_decoder
        ends = [token for token in reply if token in control]
        if not ends:
            raise ValueError("it ends no reply with a control token")
        return ends[0]

    def hand_to_tokenizer(self):
        """Makes the tokenizer save these templates wherever it is saved: the one trained is the default."""
        self.tokenizer.chat_template = self.named | {"default": self.template} if self.named else self.template

    def save(self, folder: Path):
        """Tokenizer and templates: in files of their own with the marks that training needs, and, for servers that look
        there and know no marks, the default without them in tokenizer_config.json."""
        self.hand_to_tokenizer()
        self.tokenizer.save_pretrained(folder)
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text(encoding="utf-8"))
        settings["chat_template"] = without_marks(self.template)
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def without_marks(template: str) -> str:
    """The template as engines read it that know nothing of {% generation %}; it renders the same text."""
    # A comment keeps what the tag says about the white space around it
    return re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", r"{#\1 \2#}", template)


def choose_chat(tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> Chat:
    """The template named by `path`, else the checkpoint's own where TRL can train on it, else ours.

    Where the checkpoint has several, its own is the one called "default".

    Raises:
        ValueError: the template that the user named cannot be trained on.
    """
    templates = tokenizer.chat_template or {}
    named = dict(templates) if isinstance(templates, dict) else {"default": templates}
    own = named.pop("default", None)
    # What is asked of the tokenizer from here on is asked of its default alone
    tokenizer.chat_template = own
    chat = _named_by_user(tokenizer, path) if path is not None else _own_or_ours(tokenizer, own)
    chat.named = named
    chat.hand_to_tokenizer()
    return chat


def _named_by_user(tokenizer, path: str) -> Chat:
    try:
        template = Path(path).read_text(encoding="utf-8")
        return _chat(tokenizer, template, template, Path(path).name)
    except (OSError, ValueError, TemplateError) as error:
        raise ValueError(f"the chat template {path} cannot be trained on: {error}") from error


def _own_or_ours(tokenizer, own: str | None) -> Chat:
    reason = "the checkpoint has none"
    if own is not None:
        try:
            return _chat(tokenizer, own, get_training_chat_template(tokenizer) or own, "the checkpoint's own")
        except (ValueError, TemplateError) as error:
            reason = "the checkpoint's own is not known to TRL" if not has_generation_markers(own) else str(error)
    ours = OUR_TEMPLATE.read_text(encoding="utf-8")
    return _chat(tokenizer, ours, ours, f"sft/{OUR_TEMPLATE.name} ({reason})")


def _chat(tokenizer, template: str, training_template: str, origin: str) -> Chat:
    chat = Chat(tokenizer, template, training_template, origin)
    # What the tokenizer puts before every text belongs before a chat too, in training and after it
    if adds_bos(tokenizer) and chat.prompt(PROBE[:1])[0] != tokenizer.bos_token_id:
        bos = "{{- bos_token -}}"
        return Chat(tokenizer, bos + template, bos + training_template, f"{origin}, with BOS before it")
    return chat


@dataclass
class Tokenized:
    """Rows ready to train on, and what became of the others."""

    dataset: Dataset
    num_rows: int
    bad: list[tuple[int, str]]
    num_without_reply: int
    num_cut: int
    num_without_end: int
    num_supervised: int
    num_tokens: int


def tokenize(conversations: Conversations, chat: Chat, max_length: int | None) -> Tokenized:
    """Encodes and cuts to `max_length` tokens from the start.

    Raises:
        ValueError: no token is left to learn from.
    """
    rows, bad = [], list(conversations.bad)
    without_reply = cut = without_end = 0
    for index, messages in track(conversations.rows, description="tokenizing"):
        try:
            ids, labels = chat.encode(messages)
        except BadRow as reason:
            bad.append((index, str(reason)))
            continue
        kept = labels[:max_length]
        if all(label == IGNORED for label in kept):
            without_reply += 1
            continue
        cut += len(ids) > len(kept)
        without_end += any(label != IGNORED for label in labels[len(kept) :])
        rows.append({"input_ids": ids[:max_length], "labels": kept})
    if not rows:
        raise ValueError(
            f"{conversations.name}: no token of a reply is left to learn from in {conversations.num_read} rows "
            f"({len(bad)} bad, {without_reply} whose replies lie beyond max_length = {max_length}): give a larger "
            "--max_length"
        )
    return Tokenized(
        Dataset.from_list(rows),
        conversations.num_read,
        sorted(bad),
        without_reply,
        cut,
        without_end,
        sum(label != IGNORED for row in rows for label in row["labels"]),
        sum(len(row["input_ids"]) for row in rows),
    )
