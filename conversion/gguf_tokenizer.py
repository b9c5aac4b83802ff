"""Builds a tokenizer from a GGUF file's metadata, so that its ids are llama.cpp's.

A GGUF file names the way in which text is cut before the merges (`tokenizer.ggml.pre`) instead of writing it down; the
regular expressions are llama.cpp's (src/llama-vocab.cpp, MIT licence). llama.cpp normalises nothing, and neither do we.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


# Token types of GGUF
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
EDGE = r"[^\r\n\p{L}\p{N}]?"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REST_WITH_SLASH = REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
UPPER, LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = rf"{CONTRACTIONS}|{EDGE}\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CONTRACTIONS}|{EDGE}\p{{L}}+|\p{{N}}|{REST}"
TEKKEN = rf"{EDGE}{UPPER}*{LOWER}+|{EDGE}{UPPER}+{LOWER}*|\p{{N}}|{REST_WITH_SLASH}"
# Each expression cuts what the one before it left
SPLITS = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "gpt-2": [GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [QWEN2],
    "smaug-bpe": [LLAMA3],
    "smollm": [r"\p{N}", GPT2],
    "tekken": [TEKKEN],
}
SAME_AS = {
    "gpt-2": ("phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais"),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "qwen2": ("deepseek-r1-qwen", "kormo", "megrez", "stablelm2"),
    "smaug-bpe": ("dbrx",),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
}
KIND = {name: name for name in SPLITS} | {other: name for name, others in SAME_AS.items() for other in others}
# Where a whole word stands in the vocabulary, no merge has to lead to it
IGNORES_MERGES = {"llama-bpe", "tekken"}
# Where the file does not say whether a text begins with BOS
ADDS_BOS = {"llama-bpe", "tekken"}
SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def byte_level_tokenizer(
    values: dict, tokens: list[str], types: list[int], merges: list[str]
) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer. `values` is the file's metadata, `types` says what each of `tokens` is.

    Raises:
        ValueError: a way to cut text that is not known here, or parts of a vocabulary that do not fit together.
    """
    pre = values.get("tokenizer.ggml.pre", "default")
    if pre not in KIND:
        raise ValueError(
            f"the GGUF file cuts text by tokenizer.ggml.pre = {pre!r}, which is not known here (known: "
            f"{', '.join(sorted(KIND))}): graft the checkpoint that it was made from, in safetensors"
        )
    kind = KIND[pre]
    backend = _backend(kind, tokens, merges)
    # llama.cpp finds these in a text before anything else
    backend.add_special_tokens([_whole(token) for token, type_ in zip(tokens, types) if type_ in (CONTROL, UNKNOWN)])
    backend.add_tokens([_whole(token) for token, type_ in zip(tokens, types) if type_ == USER_DEFINED])
    return _tokenizer(backend, values, tokens, adds_bos=kind in ADDS_BOS)


def sentencepiece_tokenizer(backend: Tokenizer, values: dict, tokens: list[str]) -> PreTrainedTokenizerBase:
    """transformers' own for a SentencePiece vocabulary, with llama.cpp's spaces: one before each text and after each control
    token, whatever the text begins with, and none where the file says so."""
    has_prefix = bool(values.get("tokenizer.ggml.add_space_prefix", True))
    underscores = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), underscores]) if has_prefix else underscores
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*spaces, decoders.Strip(content=" ", left=1)] if has_prefix else spaces)
    return _tokenizer(backend, values, tokens, adds_bos=True)


def _tokenizer(backend: Tokenizer, values: dict, tokens: list[str], adds_bos: bool) -> PreTrainedTokenizerBase:
    """`adds_bos`: whether a text begins with BOS where the file does not say so."""
    named = {name: _token_of(values, tokens, f"tokenizer.ggml.{key}") for name, key in SPECIAL_TOKENS.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=bool(values.get("tokenizer.ggml.add_bos_token", adds_bos)),
        add_eos_token=bool(values.get("tokenizer.ggml.add_eos_token", False)),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token is not None},
    )


def chat_templates(values: dict) -> str | dict | None:
    """The file's chat template; with others for other uses (`tokenizer.chat_template.tool_use`) each by its name."""
    key = "tokenizer.chat_template"
    found = {name.removeprefix(f"{key}."): value for name, value in values.items() if name.startswith(f"{key}.")}
    if key in values:
        found["default"] = values[key]
    return found["default"] if set(found) == {"default"} else found or None


def _backend(kind: str, tokens: list[str], merges: list[str]) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [_pair(merge) for merge in merges]
    for left, right in pairs:
        if absent := next((part for part in (left, right, left + right) if part not in vocabulary), None):
            raise ValueError(f"the GGUF file merges {left!r} and {right!r}, but its vocabulary has no {absent!r}")
    backend = Tokenizer(BPE(vocab=vocabulary, merges=pairs, ignore_merges=kind in IGNORES_MERGES))
    cuts = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in SPLITS[kind]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ValueError(f"the GGUF file holds a merge {merge!r}, which is no pair of tokens")
    return left, right


def _whole(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _token_of(values: dict, tokens: list[str], key: str) -> str | None:
    number = values.get(key)
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ValueError(f"the GGUF file says {key} = {number!r}, but it has {len(tokens)} tokens")
    return tokens[number]
