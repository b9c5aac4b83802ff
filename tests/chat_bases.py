"""Tokenizers with chat templates of every kind that users bring, and a tiny checkpoint that can chat."""

from importlib.resources import files
from pathlib import Path

from byte_tokenizer import byte_tokenizer
from conftest import tiny_llama, tiny_model


MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<eos>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{% generation %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LLAMA_3_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHATML_TOKENS = ["<|im_start|>", "<|im_end|>"]


def known_to_trl(name: str) -> str:
    return files("trl").joinpath("chat_templates", name).read_text(encoding="utf-8")


def chat_tokenizer(kind: str):
    """ "none", "marked", "unmarked", "llama-2", "llama-3" (known to TRL) or "chatml" (end of a turn is EOS)."""
    tokenizer = byte_tokenizer()
    templates = {"none": None, "marked": MARKED, "unmarked": UNMARKED, "llama-2": LLAMA_2, "chatml": None}
    if kind == "llama-3":
        tokenizer.add_special_tokens({"additional_special_tokens": LLAMA_3_TOKENS})
        tokenizer.bos_token = "<|begin_of_text|>"
        tokenizer.chat_template = known_to_trl("llama3.jinja")
    else:
        tokenizer.chat_template = templates[kind]
    if kind == "chatml":
        tokenizer.add_special_tokens({"additional_special_tokens": CHATML_TOKENS})
        tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def with_bos(tokenizer):
    """The same tokenizer, made to put BOS before every text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    return tokenizer


def save_base(folder: Path, plain: bool = False, kind: str = "none", **overrides) -> Path:
    """A tiny BHyT (or plain Llama) checkpoint with a tokenizer."""
    make = tiny_llama if plain else tiny_model
    make(**{"max_position_embeddings": 1024, "eos_token_id": 2, **overrides}).save_pretrained(folder)
    chat_tokenizer(kind).save_pretrained(folder)
    return folder
