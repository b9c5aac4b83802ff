"""Arguments of `python -m sft`: TRL's SFTConfig and ModelConfig, and what they lack; the flag is the field is the YAML key."""

from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

import torch
import yaml
from trl import ModelConfig, SFTConfig, TrlParser

from checkpoints.command_line import OneLineErrors, fail
from checkpoints.names import at_home
from checkpoints.resume import STATE_FILE, last_checkpoint, require_whole
from model_cards.licence import check_flag


DTYPES = ("auto", "float32", "bfloat16", "float16")
# What says how to train; paths of one machine and what changes no result stay out
RECIPE = """learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay optim adam_beta1 adam_beta2
    adam_epsilon max_grad_norm num_train_epochs max_steps per_device_train_batch_size gradient_accumulation_steps max_length
    packing seed data_seed bf16 fp16 neftune_noise_alpha""".split()
LORA = """lora_r lora_alpha lora_dropout lora_target_modules use_rslora use_dora load_in_4bit load_in_8bit""".split()
QUESTIONS = (
    "Give me three tips for staying awake in a long meeting.",
    "Why is the sky blue?",
    "Write a short poem about a lighthouse.",
)
ANEW = "--fresh_optimizer True goes on from its weights with a new optimizer"
# Options that may name a file or a folder
PATHS = """data eval_data perplexity_data figures_before output_dir chat_template_path resume_from_checkpoint
    model_name_or_path""".split()
# Options of TRL that would undo what this pipeline promises, each with what to do instead
NOT_TAKEN = {
    "hub_token": "it would be written into the checkpoints: set HF_TOKEN, or run `hf auth login`",
    "assistant_only_loss": "every reply, and nothing else, is supervised anyway: leave it out",
    "completion_only_loss": "every reply, and nothing else, is supervised anyway: leave it out",
    "eos_token": "what ends a turn is read from the chat template: leave it out",
    "pad_token": "set it in the tokenizer of the checkpoint",
    "padding_free": "use --packing, whose documents stay apart",
    "use_liger_kernel": "its kernels do not know these norms",
    "lora_modules_to_save": "--train_norms adds the norms",
}


@dataclass
class ChatArguments:
    """Fine-tunes a BHyT (or plain Llama) checkpoint on conversations: python -m sft --config RECIPE.yaml [--flags]

    data -> SFTTrainer -> evaluation before and after -> card -> Hub. All flags of TRL's SFTConfig and ModelConfig are
    flags here too.
    """

    data: str = field(
        default="",
        metadata={
            "help": "Conversations to train on: a .json, .jsonl or .parquet file, or a Hub id such as GAIR/lima. LIMA, "
            "Alpaca, messages, ShareGPT and prompt/completion are recognised by their columns; NAME[a:b] takes rows a to b."
        },
    )
    data_split: str = field(default="train", metadata={"help": "The split of `data`, where it comes from the Hub."})
    data_config: str | None = field(
        default=None, metadata={"help": "Which of its configurations, where a data set on the Hub has several."}
    )
    data_license: str | None = field(
        default=None,
        metadata={"help": "The licence of `data` in words, for the card, where its own card on the Hub names none."},
    )
    license: str | None = field(
        default=None,
        metadata={
            "help": "The licence of the finished model, as the Hub calls it; default: the base's, as its card says. "
            "push_to_hub needs one (`unknown` if nobody knows)."
        },
    )
    eval_data: str | None = field(
        default=None,
        metadata={"help": "Conversations, or CommonsenseQA, to evaluate on during training and before and after it."},
    )
    eval_split: str = field(default="validation", metadata={"help": "The split of `eval_data`, on the Hub."})
    eval_config: str | None = field(default=None, metadata={"help": "The configuration of `eval_data`, on the Hub."})
    perplexity_data: list[str] = field(
        default_factory=list,
        metadata={"help": "Texts (.txt, or .jsonl with `text`; FILE[a:b]) whose perplexity shows what was forgotten."},
    )
    num_perplexity_windows: int = field(default=40, metadata={"help": "Windows of each of these texts."})
    perplexity_window_length: int = field(default=512, metadata={"help": "Tokens a window."})
    questions: list[str] = field(
        default_factory=lambda: list(QUESTIONS), metadata={"help": "Asked before and after; answered greedily."}
    )
    max_answer_tokens: int = field(default=128, metadata={"help": "Tokens an answer at most; 0 asks nothing."})
    figures_before: str | None = field(
        default=None,
        metadata={"help": "before.json of an earlier run from the same base with the same texts: not measured anew."},
    )
    train_norms: bool = field(
        default=False,
        metadata={"help": "With LoRA: train gains and lambda of the norms too. Without LoRA they are always trained."},
    )
    refresh_constants_every: int = field(
        default=0,
        metadata={
            "help": "Recompute the estimator's constants every so many steps (BHyT only); 0 leaves them as they are."
        },
    )
    merge_adapter: bool = field(
        default=True, metadata={"help": "With LoRA: save the merged model. False saves the adapter alone."}
    )
    save_dtype: str = field(
        default="auto",
        metadata={
            "help": "dtype of the finished model; auto is the base checkpoint's, tensor by tensor.",
            "choices": DTYPES,
        },
    )
    overwrite: bool = field(
        default=False, metadata={"help": "Replace what earlier runs left in output_dir; the rest stays."}
    )
    fresh_optimizer: bool = field(
        default=False,
        metadata={"help": "Go on from a checkpoint's weights and step, with an optimizer that begins anew."},
    )
    dry_run: bool = field(
        default=False, metadata={"help": "Prepare everything, say what would be done, train nothing."}
    )

    def __post_init__(self):
        if not self.data:
            raise ValueError("data is missing: name a file or a Hub id, as in --data GAIR/lima")
        check_flag(self.license)
        # In a YAML file one text may stand where a list is meant
        for name in ("questions", "perplexity_data"):
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, [value])
        # A C locale hands the bytes of a flag over as surrogates
        self.questions = [q.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for q in self.questions]
        for name, least in {
            "num_perplexity_windows": 1,
            "perplexity_window_length": 8,
            "max_answer_tokens": 0,
            "refresh_constants_every": 0,
        }.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: give a whole number of at least {least}")


class OneLineParser(OneLineErrors, TrlParser):
    pass


def _check_recipe(words: list[str], kinds: list[type]):
    """Refuses a recipe whose values are not of their options' types; TRL takes them as they stand.

    Raises:
        ValueError: the first such value, or a file that holds no mapping of names.
    """
    if "--config" not in words:
        return
    place = words[words.index("--config") + 1 :][:1]
    if not place:
        raise ValueError("--config names no file: give a recipe, as in --config recipe.yaml")
    try:
        recipe = yaml.safe_load(Path(place[0]).read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{place[0]} cannot be read as YAML: {error}") from error
    if not isinstance(recipe, dict) or not all(isinstance(name, str) for name in recipe):
        raise ValueError(f"{place[0]} is not a mapping of names to values")
    for kind in kinds:
        for name, hint in get_type_hints(kind).items():
            if name in recipe and not _is_of(recipe[name], hint):
                wanted = hint.__name__ if isinstance(hint, type) else str(hint)
                raise ValueError(f"{place[0]}: {name} is {recipe[name]!r}, and should be {wanted}")


def _is_of(value, hint) -> bool:
    """Whether a YAML value is of an option's type. A text is parsed as a flag's would be, so it always is."""
    if isinstance(value, str):
        return True
    if get_origin(hint) in (Union, UnionType):
        return any(_is_of(value, part) for part in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_is_of(item, part) for item in value for part in get_args(hint))
    kind = get_origin(hint) or hint
    if not isinstance(kind, type):
        return True
    if isinstance(value, bool) and kind in (int, float):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def parse(words: list[str]) -> tuple[ChatArguments, SFTConfig, ModelConfig]:
    """Flags over the YAML of `--config` over the defaults. Exits with 2 and one line on any bad input."""
    kinds: list = [ChatArguments, SFTConfig, ModelConfig]
    parser = OneLineParser(kinds, prog="python -m sft", description=ChatArguments.__doc__, allow_abbrev=False)
    # Losses that are not finite are to be seen; what a norm does is worth a log
    parser.set_defaults(logging_nan_inf_filter=False, output_dir=None, lora_target_modules=["all-linear"])
    if not torch.accelerator.is_available():
        parser.set_defaults(use_cpu=True, bf16=False)
    try:
        _check_recipe(words, kinds)
        chat, training, model = parser.parse_args_and_config(words)
        if _is_given("data", words) and not _is_given("data_license", words):
            # A recipe names the licence of its own data, not of what is trained on in its place
            chat.data_license = None
        for options in (chat, training, model):
            _find_home(options)
        _check(chat, training, model)
        training.resume_from_checkpoint = _checkpoint(training, chat.fresh_optimizer)
    except (ValueError, OSError, yaml.YAMLError) as error:
        fail(error)
    return chat, training, model


def _find_home(options):
    """Makes a folder of `~` in every path: a recipe meets no shell that would."""
    for name, given in vars(options).items():
        if name in PATHS and isinstance(given, str):
            setattr(options, name, at_home(given))
        elif name in PATHS and isinstance(given, list):
            setattr(options, name, [at_home(path) for path in given])


def _is_given(name: str, words: list[str]) -> bool:
    return any(word.partition("=")[0] == f"--{name}" for word in words)


def _check(chat: ChatArguments, training: SFTConfig, model: ModelConfig):
    if not model.model_name_or_path:
        raise ValueError("model_name_or_path is missing: name a folder or a Hub id")
    if chat.eval_config and not chat.eval_data:
        raise ValueError(f"eval_config is {chat.eval_config!r}, but there is no eval_data: give both, or leave it out")
    if not training.output_dir:
        raise ValueError("output_dir is missing: name the folder to make")
    for name, dtype in (("dtype", model.dtype), ("save_dtype", chat.save_dtype)):
        if dtype not in (None, *DTYPES):
            raise ValueError(f"{name} is {dtype!r}: give one of {', '.join(DTYPES)}")
    if training.max_length is not None and training.max_length < 1:
        raise ValueError(f"max_length is {training.max_length}: give a number of tokens, or leave it out")
    defaults = (SFTConfig.__dataclass_fields__, ModelConfig.__dataclass_fields__)
    for name, remedy in NOT_TAKEN.items():
        given, known = (training, defaults[0]) if name in defaults[0] else (model, defaults[1])
        if getattr(given, name) not in (known[name].default, None, False):
            raise ValueError(f"{name} is not taken here: {remedy}")
    if training.packing and training.packing_strategy == "wrapped":
        raise ValueError("packing_strategy 'wrapped' cuts conversations in two: use bfd")
    if training.push_to_hub and not training.hub_model_id:
        raise ValueError("push_to_hub needs a name on the Hub: give --hub_model_id name/model")
    if training.push_to_hub and not _is_whole(chat, model) and Path(model.model_name_or_path).exists():
        raise ValueError(
            f"push_to_hub of an adapter alone needs its base on the Hub, and {model.model_name_or_path} is a folder of this "
            "machine: publish it first and give its name, or leave merge_adapter True"
        )
    if chat.refresh_constants_every and not _is_whole(chat, model) and not chat.train_norms:
        raise ValueError(
            "refresh_constants_every changes the base, which an adapter alone does not carry: leave merge_adapter True, or "
            "give --train_norms"
        )
    if model.load_in_4bit and not model.use_peft:
        raise ValueError("load_in_4bit trains adapters alone: give --use_peft")


def _is_whole(chat: ChatArguments, model: ModelConfig) -> bool:
    """Whether the finished folder is a model, not an adapter."""
    return chat.merge_adapter or not model.use_peft


def _checkpoint(training: SFTConfig, fresh_optimizer: bool) -> str | None:
    """The checkpoint to go on from: a folder as named, or the last one for `true`, `last` or `latest`.

    Raises:
        ValueError: there is none, or it is broken.
    """
    wanted = training.resume_from_checkpoint
    if wanted in (None, False, "false", "False"):
        if fresh_optimizer:
            raise ValueError(
                "fresh_optimizer is about a run that goes on: give --resume_from_checkpoint, or leave it out"
            )
        return None
    if wanted in (True, "true", "True", "last", "latest"):
        if (found := last_checkpoint(Path(training.output_dir), fresh_optimizer, ANEW)) is None:
            raise ValueError(
                f"{training.output_dir} holds no checkpoint to resume from: leave out --resume_from_checkpoint"
            )
        return str(found)
    if not (Path(wanted) / STATE_FILE).is_file():
        raise ValueError(f"{wanted} is no checkpoint of a run, or was not finished: give its folder, or `last`")
    require_whole(Path(wanted), fresh_optimizer, ANEW)
    return wanted
