"""What a run will do, said before its first step."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

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
    if tokenized.bad:
        shown = "; ".join(f"row {index}: {reason}" for index, reason in tokenized.bad[:SHOWN_ROWS])
        more = f"; {len(tokenized.bad) - SHOWN_ROWS} more" if len(tokenized.bad) > SHOWN_ROWS else ""
        rows.append((f"{purpose}: left out", f"{len(tokenized.bad)} bad ({shown}{more})"))
    if tokenized.num_without_reply:
        rows.append((f"{purpose}: left out", f"{tokenized.num_without_reply} whose question alone fills max_length"))
    if tokenized.num_cut:
        rows.append(
            (f"{purpose}: cut", f"{tokenized.num_cut} rows, {tokenized.num_without_end} of them lost their end")
        )
    return rows


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
        table.add_row(*row)
    Console().print(table)
