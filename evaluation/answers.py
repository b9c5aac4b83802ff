"""What a chat model answers: its loss on given replies, and replies of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.progress import track
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .perplexity import input_device


IGNORED = -100


@dataclass
class ReplyLoss:
    """`loss` in nats a supervised token, over all of them; `first_token_accuracy` over rows: how often the likeliest
    first token of the reply is the right one (for a question with lettered choices, the share of right answers)."""

    loss: float
    first_token_accuracy: float
    num_rows: int
    num_tokens: int


@torch.no_grad()
def reply_loss(model: PreTrainedModel, rows: list[dict], batch_size: int = 8) -> ReplyLoss:
    """Loss on the supervised tokens of rows of `input_ids` and `labels` (-100 where nothing is asked for).

    Rows of one batch are padded on the right and masked; losses are added in fp64.
    """
    model.eval()
    device = input_device(model)
    # Rows of similar length together: less padding
    rows = sorted(rows, key=lambda row: len(row["input_ids"]))
    total, num_tokens, num_right = 0.0, 0, 0
    starts = range(0, len(rows), batch_size)
    for start in track(starts, description="loss on replies"):
        batch = rows[start : start + batch_size]
        ids = pad_sequence([torch.tensor(row["input_ids"]) for row in batch], batch_first=True)
        labels = pad_sequence([torch.tensor(row["labels"]) for row in batch], batch_first=True, padding_value=IGNORED)
        mask = pad_sequence([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in batch], batch_first=True)
        logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits[:, :-1]
        targets = labels[:, 1:].to(logits.device)
        asked = targets != IGNORED
        # Few positions are asked for: the log-probabilities of the others are never made
        predicted = logits[asked].float().log_softmax(-1)
        total -= predicted.gather(-1, targets[asked][:, None]).double().sum().item()
        num_tokens += int(asked.sum())
        first = asked & (asked.cumsum(1) == 1)
        num_right += int((logits[first].argmax(-1) == targets[first]).sum())
    return ReplyLoss(total / num_tokens, num_right / len(rows), len(rows), num_tokens)


@contextmanager
def own_settings_aside(model: PreTrainedModel) -> Iterator[None]:
    """`generate` follows its arguments alone. Else whatever they leave open comes from the checkpoint: sampling,
    penalties, beams, banned words."""
    # PEFT hands the settings of the model inside on to it
    owner = getattr(model, "get_base_model", lambda: model)()
    own = owner.generation_config
    owner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        owner.generation_config = own


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[int],
    stop_ids: list[int],
    max_new_tokens: int,
) -> str:
    """The greedy continuation of a prompt up to one of `stop_ids`, whatever the checkpoint's own settings of generation
    say; one that was cut off ends in an ellipsis."""
    model.eval()
    ids = torch.tensor([prompt_ids], device=input_device(model))
    settings = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=stop_ids, pad_token_id=stop_ids[0])
    with own_settings_aside(model):
        reply = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[0, ids.shape[1] :]
    text = tokenizer.decode(reply, skip_special_tokens=True)
    return text if reply[-1].item() in stop_ids else text + " ..."
