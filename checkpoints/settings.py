"""Puts right, at the start, what a checkpoint's settings would spoil at the end. Each function says what it changed."""

import re

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase


# Settings of generate that mean something only when it samples, or only when it searches with beams
SAMPLING_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
BEAM_SETTINGS = ("early_stopping", "length_penalty")


def read_config(name, **options) -> PretrainedConfig:
    """The configuration of a checkpoint.

    Raises:
        ValueError, OSError, StrictDataclassError: there is none, or it holds what no model can have.
    """
    try:
        return AutoConfig.from_pretrained(name, **options)
    except (ValueError, OSError, ImportError, StrictDataclassError):
        raise
    # Whatever a value of the wrong kind meets first (a division, an attribute, an index)
    except Exception as error:
        raise ValueError(f"{name}: config.json cannot be read ({type(error).__name__}: {error}): mend it") from error


def read_tokenizer(name, **options) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint.

    Raises:
        ValueError, OSError: there is none, its files are damaged, or they could not be written again.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (ValueError, OSError, ImportError):
        raise
    # The tokenizers library raises Exception itself
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name}: its tokenizer cannot be read ({reason}): take another copy of its files") from error
    check_chat_templates(name, tokenizer)
    return tokenizer


def check_chat_templates(name, tokenizer: PreTrainedTokenizerBase):
    """Refuses templates that would fail when the tokenizer is saved, after the work: each named one becomes a file.

    Raises:
        ValueError: with the template's name.
    """
    templates = tokenizer.chat_template or {}
    for called, template in (templates if isinstance(templates, dict) else {"default": templates}).items():
        if not (_can_be_written(template) and re.fullmatch(r"[\w.-]+", str(called))):
            raise ValueError(
                f"{name}: the chat template {called!r} could not be saved again: it has to be text, and its name letters, "
                "digits, '_', '-' and '.'; mend it or take it out"
            )


def _can_be_written(text) -> bool:
    try:
        text.encode("utf-8")
    except (AttributeError, UnicodeEncodeError):
        return False
    return True


def repair_generation_config(name: str, settings: GenerationConfig) -> list[str]:
    """Unsets what transformers would refuse to save: settings of a mode of generation that is off. Returns notes.

    Raises:
        ValueError: what no rule puts right.
    """
    try:
        settings.validate(strict=True)
        return []
    except TypeError as error:
        raise unsaveable(name, error) from error
    except ValueError:
        unused: tuple[str, ...] = () if settings.do_sample else SAMPLING_SETTINGS
        unused += BEAM_SETTINGS if settings.num_beams in (None, 1) else ()
        unused += ("pad_token_id",) if settings.pad_token_id is not None and settings.pad_token_id < 0 else ()
    dropped = [f"{key} = {getattr(settings, key)}" for key in unused if getattr(settings, key) is not None]
    for key in unused:
        setattr(settings, key, None)
    try:
        settings.validate(strict=True)
    except ValueError as error:
        raise unsaveable(name, error) from error
    return [f"generation_config.json: unset {', '.join(dropped)}, which its own mode of generation ignores"]


def unsaveable(name, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())
    return ValueError(f"{name}: generation_config.json would not be saved again; mend it first: {reason}")


def settle_vocabulary(name: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Every id that the tokenizer may give must have a row; a padding id without one is exchanged. Returns notes.

    Raises:
        ValueError: a token without a row.
    """
    rows = config.vocab_size
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= rows:
        raise ValueError(
            f"{name}: the tokenizer gives {token!r} the id {largest}, but the embeddings have {rows} rows: "
            f"remove it from the tokenizer, or add rows first (model.resize_token_embeddings({largest + 1}))"
        )
    pad = config.pad_token_id
    if pad is None or 0 <= pad < rows:
        return []
    config.pad_token_id = tokenizer.pad_token_id
    return [f"pad_token_id was {pad}, which is no row of the embeddings: now {config.pad_token_id} (the tokenizer's)"]
