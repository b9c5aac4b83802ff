"""Perplexity and KL divergence over fixed windows of text.

The protocol, so that a figure can be repeated:
- documents are tokenised without special tokens and joined by the tokenizer's EOS, the last one included;
- the stream is cut into windows of `window_length` tokens that do not overlap; an incomplete last one is dropped and
  counted;
- the BOS rule: a window begins with BOS if, and only if, the tokenizer itself puts one before a text. BOS counts as one
  of the window's tokens;
- every token but a window's first is predicted from that window alone; losses are added in fp64, in nats, so that the
  batch size makes no difference beyond the rounding of the model's own arithmetic.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def _exp(loss: float) -> float:
    # fp64 ends at exp(709.8)
    return math.exp(loss) if loss < 709 else math.inf


@dataclass
class Perplexity:
    """exp(mean loss); `loss` in nats a token over `num_tokens` predicted tokens."""

    loss: float
    num_tokens: int
    num_windows: int
    window_length: int

    @property
    def perplexity(self) -> float:
        return _exp(self.loss)


@dataclass
class Comparison:
    """A model against a reference on the same windows. `kl` = mean KL(reference || model) in nats a token."""

    reference: Perplexity
    model: Perplexity
    kl: float

    @property
    def ratio(self) -> float:
        """The model's perplexity over the reference's; 1 means that nothing was lost."""
        return _exp(self.model.loss - self.reference.loss)


def named_part(name: str) -> tuple[str, slice]:
    """NAME[a:b] -> NAME, and which rows of it; a plain NAME is all of them."""
    part = re.search(r"\[(\d*):(\d*)\]$", name)
    if part is None:
        return name, slice(None)
    start, stop = (int(number) if number else None for number in part.groups())
    return name[: part.start()], slice(start, stop)


def lone_surrogate(text: str) -> str | None:
    """Says where half a character stands (JSON can spell one, "\\ud800"), which no tokenizer takes; None without one."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"a lone surrogate, \\u{ord(text[error.start]):04x}, at character {error.start}, which is no text"
    return None


def read_documents(path: str) -> list[str]:
    """Reads a text file (one document), or JSONL with a `text` field; `FILE[a:b]` takes documents a to b of a JSONL.

    Raises:
        ValueError: no such file, no text in it, or a line that is not an object with a `text` of whole characters.
    """
    name, part = named_part(path)
    file = Path(name)
    if not file.is_file():
        raise ValueError(f"no text file at {name}: give a .txt or a .jsonl with a 'text' field")
    try:
        # Editors on Windows put a mark before the first character, which is no part of the text
        content = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if file.suffix not in (".jsonl", ".json"):
        documents = [content]
    else:
        documents = []
        # Not splitlines(): JSON strings may hold characters such as U+2028 that it takes for line ends
        for number, line in enumerate(content.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError, RecursionError):
                text = None
            if not isinstance(text, str):
                raise ValueError(f"{name}, line {number}: not a JSON object with a string 'text'")
            if (lone := lone_surrogate(text)) is not None:
                raise ValueError(f"{name}, line {number}: its text holds {lone}")
            documents.append(text)
    documents = documents[part]
    if not any(document.strip() for document in documents):
        raise ValueError(f"{path} holds no text")
    return documents


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """The BOS rule: whether the tokenizer itself puts BOS before a text."""
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]


def text_windows(
    tokenizer: PreTrainedTokenizerBase, documents: list[str], window_length: int, num_windows: int | None = None
) -> Tensor:
    """Cuts documents into (num_windows, window_length) token ids, as `cut_text` does."""
    windows, _ = cut_text(tokenizer, documents, window_length, num_windows)
    return windows


def cut_text(
    tokenizer: PreTrainedTokenizerBase, documents: list[str], window_length: int, num_windows: int | None = None
) -> tuple[Tensor, int]:
    """Cuts documents into (num_windows, window_length) token ids, by the protocol above.

    Returns:
        the windows, and how many tokens of the documents that were read (up to the one that fills the last window) are
        in none of them.

    Raises:
        ValueError: the text is too short for `num_windows` (or for a single window, where that is None).
    """
    bos = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    num_text_tokens = window_length - len(bos)
    needed = math.inf if num_windows is None else num_windows * num_text_tokens
    stream: list[int] = []
    for document in documents:
        # verbose=False: windows are cut here, so a document longer than the context is no reason to warn
        stream += tokenizer(document, add_special_tokens=False, verbose=False).input_ids + eos
        if len(stream) >= needed:
            break
    available = len(stream) // num_text_tokens
    if available < (num_windows or 1):
        raise ValueError(
            f"the text holds {available} windows of {window_length} tokens, {num_windows or 1} are needed: "
            "give more text, fewer or shorter windows"
        )
    num_taken = (num_windows or available) * num_text_tokens
    starts = range(0, num_taken, num_text_tokens)
    windows = torch.tensor([bos + stream[start : start + num_text_tokens] for start in starts])
    return windows, len(stream) - num_taken


def protocol(tokenizer: PreTrainedTokenizerBase, windows: Tensor) -> dict:
    """What a figure on these windows rests on: the BOS rule, the stride, and the text's size in tokens, words and bytes.

    The stride is a window's tokens of text. Words and bytes are those of the text as the tokenizer decodes it, without
    special tokens, so that a loss a token becomes one a word or a byte.
    """
    has_bos = adds_bos(tokenizer)
    text_ids = windows[:, 1:] if has_bos else windows
    text = tokenizer.decode(text_ids.flatten().tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {
        "bos": has_bos,
        "stride": text_ids.shape[1],
        "num_windows": len(windows),
        "window_length": windows.shape[1],
        "num_tokens": text_ids.numel(),
        "num_words": len(text.split()),
        "num_bytes": len(text.encode()),
    }


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids go: the embeddings' device, or the CPU where accelerate fetches the embeddings from disk."""
    device = model.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device


def _rows(model: PreTrainedModel, windows: Tensor) -> Iterator[Tensor]:
    """Log probabilities of each window's next tokens, (T - 1, vocabulary) in fp32: one window's at a time in memory."""
    for logits in model(input_ids=windows.to(input_device(model)), use_cache=False).logits:
        yield logits[:-1].float().log_softmax(-1)


def _loss(log_probabilities: Tensor, window: Tensor) -> float:
    targets = window[1:, None].to(log_probabilities.device)
    return -log_probabilities.gather(-1, targets).double().sum().item()


def _batches(model: PreTrainedModel, windows: Tensor, batch_size: int, description: str) -> Iterator[Tensor]:
    limit = model.config.max_position_embeddings
    if windows.shape[1] > limit:
        raise ValueError(f"windows of {windows.shape[1]} tokens do not fit the model's {limit} positions")
    model.eval()
    return iter(track(windows.split(batch_size), description=description))


def _perplexity(total_loss: float, windows: Tensor) -> Perplexity:
    num_windows, window_length = windows.shape
    num_tokens = num_windows * (window_length - 1)
    return Perplexity(total_loss / num_tokens, num_tokens, num_windows, window_length)


@torch.no_grad()
def perplexity(model: PreTrainedModel, windows: Tensor, batch_size: int = 4) -> Perplexity:
    """Perplexity of a causal language model on windows from `text_windows`."""
    batches = _batches(model, windows, batch_size, "perplexity")
    total = sum(_loss(row, window) for batch in batches for row, window in zip(_rows(model, batch), batch))
    return _perplexity(total, windows)


@torch.no_grad()
def compare(reference: PreTrainedModel, model: PreTrainedModel, windows: Tensor, batch_size: int = 4) -> Comparison:
    """Perplexity of both and KL(reference || model) in one pass over the windows."""
    reference.eval()
    reference_loss = model_loss = kl = 0.0
    for batch in _batches(model, windows, batch_size, "comparing with the source"):
        for expected, actual, window in zip(_rows(reference, batch), _rows(model, batch), batch):
            expected = expected.to(actual.device)
            reference_loss += _loss(expected, window)
            model_loss += _loss(actual, window)
            kl += torch.nn.functional.kl_div(actual, expected, reduction="sum", log_target=True).double().item()
    result = _perplexity(model_loss, windows)
    return Comparison(_perplexity(reference_loss, windows), result, kl / result.num_tokens)
