"""What a fine-tune did, measured on the checkpoint before and on the one that was saved."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evaluation.answers import answer, reply_loss
from evaluation.perplexity import named_part, perplexity, read_documents, text_windows

from .arguments import ChatArguments
from .chat import Chat


@dataclass
class Proof:
    """The questions, the same before and after: texts in windows, conversations, and what is asked."""

    windows: dict[str, Tensor]
    conversations: Dataset | None
    questions: list[str]
    max_answer_tokens: int
    chat: Chat
    batch_size: int
    bf16: bool

    def digest(self, base: str) -> str:
        """What the figures of `base` depend on, as one word."""
        asked = [base, self.questions, self.max_answer_tokens, self.chat.training_template, self.bf16]
        asked += [{name: windows.tolist() for name, windows in self.windows.items()}, list(self.conversations or [])]
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
            for text, windows in self.windows.items():
                found = perplexity(model, windows, self.batch_size)
                figures["perplexity"][text] = asdict(found) | {"perplexity": found.perplexity}
            if self.conversations is not None:
                figures["replies"] = asdict(reply_loss(model, list(self.conversations), self.batch_size))
            if self.max_answer_tokens:
                figures["answers"] = [self._answer(model, question) for question in self.questions]
        return figures

    def _answer(self, model, question: str) -> dict:
        prompt = self.chat.prompt([{"role": "user", "content": question}])
        stops = stop_ids(self.chat, model.generation_config.eos_token_id)
        reply = answer(model, self.chat.tokenizer, prompt, stops, self.max_answer_tokens)
        return {"question": question, "answer": reply}


def stop_ids(chat: Chat, others: int | list[int] | None) -> list[int]:
    """The end of a turn first, then what else ended a text before."""
    others = [] if others is None else [others] if isinstance(others, int) else others
    return [chat.stop_id, *(other for other in others if other != chat.stop_id)]


def text_of_proof(arguments: ChatArguments, tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    """Windows of every text of `perplexity_data`, by its file's name. Before the tokenizer learns to chat: its EOS joins
    documents."""
    return {
        named_part(path)[0].rsplit("/", 1)[-1]: text_windows(
            tokenizer, read_documents(path), arguments.perplexity_window_length, arguments.num_perplexity_windows
        )
        for path in arguments.perplexity_data
    }
