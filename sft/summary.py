"""What a run will do, said before its first step."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .base import Base, trainable_parameters
from .chat import Chat, Tokenized
from .data import Conversations
from .trainer import ChatTrainer


SHOWN_ROWS = 3


def summary_rows(
    base: Base,
    chat: Chat,
    trainer: ChatTrainer,
    texts: list[tuple[str, Conversations, Tokenized]],
) -> list[tuple[str, str]]:
    """The summary as (what, how); `texts` are (purpose, as read, as tokenized)."""
    rows = [("base", f"{base.published_name} ({base.config.model_type}{_norm(base)})")]
    rows += [("put right", note) for note in base.notes]
    for purpose, conversations, tokenized in texts:
        rows += _data_rows(purpose, conversations, tokenized)
    rows += [
        ("chat template", chat.origin),
        ("end of a turn", f"{chat.stop_token!r} (id {chat.stop_id}); padding {chat.tokenizer.pad_token!r}"),
        *_precision_rows(trainer),
        ("trained", _trained(trainer)),
    ]
    return rows


def _norm(base: Base) -> str:
    norm = getattr(base.config, "norm_type", None)
    return f", norm {norm}" if norm else ""


def _data_rows(purpose: str, conversations: Conversations, tokenized: Tokenized) -> list[tuple[str, str]]:
    rows = [
        (
            purpose,
            f"{conversations.name} ({conversations.form}): {tokenized.num_rows} rows in, {len(tokenized.dataset)} kept; "
            f"{tokenized.num_supervised} of {tokenized.num_tokens} tokens supervised",
        )
    ]
    for what, how in (
        ("left out", _bad(conversations, tokenized)),
        ("left out", _count(tokenized.num_without_reply, "whose replies lie beyond max_length")),
        ("left out", _count(conversations.num_not_learnt, "whose every reply is marked as not to be learnt")),
        ("context only", _count(conversations.num_context_replies, "replies marked as not to be learnt")),
        ("left out", _count(conversations.num_questions_left, "last questions without a reply")),
        ("metadata, left out", _metadata(conversations)),
        ("cut", _count(tokenized.num_cut, f"rows, {tokenized.num_without_end} of them lost their end")),
    ):
        if how:
            rows.append((f"{purpose}: {what}", how))
    return rows


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number else ""


def _bad(conversations: Conversations, tokenized: Tokenized) -> str:
    if not tokenized.bad:
        return ""
    shown = "; ".join(f"row {index}: {reason}" for index, reason in tokenized.bad[:SHOWN_ROWS])
    more = f"; {len(tokenized.bad) - SHOWN_ROWS} more" if len(tokenized.bad) > SHOWN_ROWS else ""
    keys = f"; for what they hold: {_listed(conversations.bad_for)}" if conversations.bad_for else ""
    return f"{len(tokenized.bad)} bad ({shown}{more}{keys})"


def _metadata(conversations: Conversations) -> str:
    kinds = (("columns", conversations.columns_left), ("keys of turns", conversations.keys_left))
    return "; ".join(f"{kind} {_listed(counts)}" for kind, counts in kinds if counts)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common())


def _precision_rows(trainer: ChatTrainer) -> list[tuple[str, str]]:
    weights = sorted({str(p.dtype).removeprefix("torch.") for p in trainer.model.parameters() if p.requires_grad})
    compute = "bfloat16" if trainer.args.bf16 else "float16" if trainer.args.fp16 else weights[0]
    rows = [("precision", f"trained weights {', '.join(weights)}; computed in {compute}")]
    if weights != ["float32"]:
        rows.append(
            (
                "WARNING",
                f"weights are trained in {', '.join(weights)}: steps smaller than its spacing (0.8 % near 1, where gains "
                "and lambda stand) are lost; --dtype float32 keeps fp32 masters and computes in bf16 all the same",
            )
        )
    return rows


def _trained(trainer: ChatTrainer) -> str:
    groups = trainable_parameters(trainer.model)
    total = sum(p.numel() for p in trainer.model.parameters())
    listed = ", ".join(f"{group} {count:,}" for group, count in groups.items())
    return f"{sum(groups.values()):,} of {total:,} numbers: {listed}"


def show(rows: Sequence[tuple[str, ...]], title: str, columns: tuple[str, ...] = ()):
    table = Table(*columns, title=title, show_header=bool(columns))
    for row in rows:
        # Data may spell what rich takes for markup
        table.add_row(*map(Text, row))
    Console().print(table)
