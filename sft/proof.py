"""What a fine-tune did, measured on the checkpoint before and on the one that was saved."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evaluation.answers import answer, reply_loss
from evaluation.perplexity import cut_text, named_part, perplexity, protocol, read_documents

from .arguments import ChatArguments
from .base import Base
from .chat import Chat


@dataclass
class HeldOutText:
    """Windows of a text, and the protocol by which it was cut."""

    windows: Tensor
    protocol: dict


@dataclass
class Proof:
    """The questions, the same before and after: texts in windows, conversations, and what is asked."""

    texts: dict[str, HeldOutText]
    conversations: Dataset | None
    questions: list[str]
    max_answer_tokens: int
    chat: Chat
    batch_size: int
    bf16: bool

    def digest(self, base: Base) -> str:
        """What the figures of `base` depend on, as one word."""
        asked = [base.fingerprint, self.questions, self.max_answer_tokens, self.chat.training_template, self.bf16]
        # How answers are given is part of the question: older ones followed the checkpoint's penalties
        asked += ["greedy", {name: text.windows.tolist() for name, text in self.texts.items()}]
        asked += [list(self.conversations or [])]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    @contextmanager
    def _ready(self, model: PreTrainedModel) -> Iterator[None]:
        """The model on the accelerator, if there is one, and in the arithmetic of training; as it was afterwards."""
        home, was_training = model.device, model.training
        there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else home
        with torch.autocast(there.type, torch.bfloat16, enabled=self.bf16):
            yield model.to(there)
        model.to(home).train(was_training)

    def measure(self, model: PreTrainedModel) -> dict:
        """Figures of a model: perplexity of each text, loss on the conversations' replies, answers."""
        figures: dict = {"perplexity": {}, "replies": None, "answers": []}
        with self._ready(model):
            for name, text in self.texts.items():
                found = perplexity(model, text.windows, self.batch_size)
                stated = {"perplexity": found.perplexity, "protocol": text.protocol}
                figures["perplexity"][name] = asdict(found) | stated
            if self.conversations is not None:
                figures["replies"] = asdict(reply_loss(model, list(self.conversations), self.batch_size))
            if self.max_answer_tokens:
                figures["answers"] = [self._answer(model, question) for question in self.questions]
        return figures

    def _answer(self, model, question: str) -> dict:
        prompt = self.chat.prompt([{"role": "user", "content": question}])
        stops = self.chat.stop_ids(model.generation_config.eos_token_id)
        reply = answer(model, self.chat.tokenizer, prompt, stops, self.max_answer_tokens)
        return {"question": question, "answer": reply}


def text_of_proof(arguments: ChatArguments, tokenizer: PreTrainedTokenizerBase) -> dict[str, HeldOutText]:
    """Windows of every text of `perplexity_data`, by its file's name. Before the tokenizer learns to chat: its EOS joins
    documents.

    Raises:
        ValueError: a text that is not there, too short, or called like another.
    """
    length, count = arguments.perplexity_window_length, arguments.num_perplexity_windows
    names = [Path(named_part(path)[0]).name for path in arguments.perplexity_data]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"perplexity_data names two texts {min(twice)}: give one of them another name")
    texts = {}
    for name, path in zip(names, arguments.perplexity_data):
        documents = read_documents(path)
        try:
            windows, num_left_over = cut_text(tokenizer, documents, length, count)
        except ValueError as error:
            raise ValueError(f"perplexity_data {path}: {error}") from error
        stated = protocol(tokenizer, windows) | {"first_window": 0, "num_left_over_tokens": num_left_over}
        texts[name] = HeldOutText(windows, stated)
    return texts
