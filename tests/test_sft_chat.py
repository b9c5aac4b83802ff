"""What is supervised: every reply with the token that ends it, and nothing else, whatever template a checkpoint brings."""

import json

import pytest
from chat_bases import LLAMA_2, MARKED, UNMARKED, chat_tokenizer, with_bos
from transformers import AutoTokenizer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from sft.chat import IGNORED, choose_chat, tokenize, without_marks
from sft.data import Conversations


KINDS = ["none", "marked", "unmarked", "llama-2", "llama-3", "chatml"]
REPLIES = {
    "two turns": ["Hello!", "Shorter."],
    "three turns": ["one", "two\n\n  lines", "three"],
    "control tokens and unicode": ["Use </s>, <eos>, <|eot_id|> and <|im_end|> — naïve 😀\u2028    indented"],
    "a question about the template": ["<|assistant|> [/INST] ok"],
}


def conversation(replies: list[str]):
    messages = []
    for number, reply in enumerate(replies):
        messages += [{"role": "user", "content": f"question {number} <eos>"}, {"role": "assistant", "content": reply}]
    return messages


def runs_of_labels(labels: list[int]) -> list[list[int]]:
    runs, current = [], []
    for label in [*labels, IGNORED]:
        if label != IGNORED:
            current.append(label)
        elif current:
            runs.append(current)
            current = []
    return runs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replies", REPLIES.values(), ids=REPLIES)
def test_labels_are_each_reply_and_its_end_and_nothing_else(kind, replies):
    chat = choose_chat(chat_tokenizer(kind))
    ids, labels = chat.encode(conversation(replies))
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels))
    runs = runs_of_labels(labels)
    assert [run[-1] for run in runs] == [chat.stop_id] * len(replies)
    assert sum(run.count(chat.stop_id) for run in runs) == len(replies)
    assert [chat.tokenizer.decode(run[:-1]).strip() for run in runs] == replies


@pytest.mark.parametrize("kind", KINDS)
def test_ids_before_a_reply_are_those_that_a_chat_would_send(kind):
    chat = choose_chat(chat_tokenizer(kind))
    messages = conversation(["Hello!", "Bye."])
    ids, labels = chat.encode(messages)
    first = next(place for place, label in enumerate(labels) if label != IGNORED)
    sent = chat.tokenizer.apply_chat_template(
        messages[:1],
        chat_template=chat.template,
        add_generation_prompt=True,
        return_dict=True,
        sanitize_control_tokens=True,
    )["input_ids"]
    assert ids[:first] == sent == chat.prompt(messages[:1])
    assert ids[: len(chat.encode(messages[:2])[0])] == chat.encode(messages[:2])[0]


@pytest.mark.parametrize(
    ("kind", "origin"),
    [
        ("none", "chat_template.jinja (the checkpoint has none)"),
        ("marked", "the checkpoint's own"),
        ("llama-3", "the checkpoint's own"),
        ("unmarked", "chat_template.jinja (the checkpoint's own is not known to TRL)"),
    ],
)
def test_the_checkpoints_own_template_is_taken_where_trl_can_train_on_it(kind, origin):
    chat = choose_chat(chat_tokenizer(kind))
    assert chat.origin.endswith(origin)
    if origin == "the checkpoint's own":
        assert chat.template == chat_tokenizer(kind).chat_template


def test_our_template_is_chatml_where_chatml_ends_a_turn():
    chat = choose_chat(chat_tokenizer("chatml"))
    text = chat.tokenizer.decode(chat.prompt(conversation(["x"])[:1]))
    assert text.startswith("<|im_start|>user\n") and text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert chat.stop_token == "<|im_end|>"


@pytest.mark.parametrize("kind", ["none", "marked", "llama-2", "llama-3"])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_chat_begins_with_the_bos_that_texts_begin_with_and_never_with_two(kind, adds_bos):
    tokenizer = chat_tokenizer(kind)
    if adds_bos:
        tokenizer.bos_token = "<bos>"
        tokenizer = with_bos(tokenizer)
    writes_bos = kind in ("llama-2", "llama-3")
    chat = choose_chat(tokenizer)
    for ids in chat.encode(conversation(["x"]))[0], chat.prompt(conversation(["x"])[:1]):
        assert ids.count(tokenizer.bos_token_id) == (1 if adds_bos or writes_bos else 0)
        assert ids[0] == tokenizer.bos_token_id or not (adds_bos or writes_bos)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (MARKED.replace("<eos>", ""), "ends no reply with a control token"),
        ("{{ messages | length }}" + MARKED, "changes how the template renders"),
        ("{% for m in messages %}", "Unexpected end of template"),
    ],
)
def test_a_template_that_cannot_be_trained_on_is_refused_by_name(tmp_path, template, said):
    file = tmp_path / "mine.jinja"
    file.write_text(template)
    with pytest.raises(ValueError, match=f"mine.jinja cannot be trained on: .*{said}"):
        choose_chat(chat_tokenizer("none"), str(file))


def test_a_template_of_the_checkpoint_that_would_teach_a_role_instead_of_a_reply_gives_way_to_ours():
    tokenizer = chat_tokenizer("chatml")
    turns = "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}"
    tokenizer.chat_template = f"{{% for m in messages %}}{{% generation %}}{turns}{{% endgeneration %}}{{% endfor %}}"
    chat = choose_chat(tokenizer)
    assert "of two replies it would teach" in chat.origin and chat.stop_token == "<|im_end|>"


@pytest.mark.parametrize("kind", KINDS)
def test_saved_template_is_read_both_ways_and_renders_what_training_saw(tmp_path, kind):
    chat = choose_chat(chat_tokenizer(kind))
    chat.save(tmp_path)
    messages = conversation(["a", "b"])
    expected = chat.tokenizer.apply_chat_template(messages, chat_template=chat.training_template, tokenize=False)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.apply_chat_template(messages, tokenize=False) == expected
    inside = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    assert "generation %}" not in inside
    (tmp_path / "chat_template.jinja").unlink()
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.apply_chat_template(messages, tokenize=False) == expected


def test_marks_are_taken_out_without_touching_white_space():
    for template in MARKED, LLAMA_2, "a {%- generation -%} b {%- endgeneration %} c":
        assert "%} b" not in without_marks(template)
    assert without_marks(UNMARKED) == UNMARKED


def rows_of(pairs) -> Conversations:
    rows = [
        (index, [{"role": "user", "content": q}, {"role": "assistant", "content": a}])
        for index, (q, a) in enumerate(pairs)
    ]
    return Conversations("rows.jsonl", "LIMA", rows, [], len(rows))


def test_counts_say_what_became_of_every_row():
    chat = choose_chat(chat_tokenizer("none"))
    long, short, cut = ("q" * 200, "abc"), ("q", "abc"), ("q", "a" * 100)
    found = tokenize(rows_of([long] * 4 + [short] * 4 + [cut]), chat, max_length=64)
    assert (found.num_rows, len(found.dataset), found.num_without_reply) == (9, 5, 4)
    assert (found.num_cut, found.num_without_end) == (1, 1)
    # Three letters and the end, four times, and what is left of the long reply
    prompt = len(chat.prompt([{"role": "user", "content": "q"}]))
    assert found.num_supervised == 4 * 4 + 64 - prompt
    assert found.num_tokens == sum(len(row["input_ids"]) for row in found.dataset)


def test_nothing_left_to_learn_is_an_error_that_names_max_length():
    chat = choose_chat(chat_tokenizer("none"))
    with pytest.raises(ValueError, match="no token of a reply is left .* max_length = 16"):
        tokenize(rows_of([("q" * 200, "abc")]), chat, max_length=16)


@pytest.mark.parametrize("pads_with_eos", [False, True])
def test_the_end_of_every_turn_is_supervised_in_the_batch_whatever_pads(pads_with_eos):
    tokenizer = chat_tokenizer("none")
    if pads_with_eos:
        tokenizer.pad_token = tokenizer.eos_token
    chat = choose_chat(tokenizer)
    rows = [chat.encode(conversation(replies)) for replies in (["Hello"], ["one", "two", "three"])]
    collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)
    batch = collate([{"input_ids": ids, "labels": labels} for ids, labels in rows])
    for labels, mask, turns in zip(batch["labels"].tolist(), batch["attention_mask"].tolist(), (1, 3)):
        assert labels.count(chat.stop_id) == turns
        assert all(label == IGNORED for label, real in zip(labels, mask) if not real)


@pytest.mark.real
def test_every_row_of_lima_is_supervised_exactly(data_folder):
    from sft.data import read_conversations

    chat = choose_chat(chat_tokenizer("none"))
    read = read_conversations(str(data_folder / "lima1k.json") + "[:60]", "train")
    found = tokenize(read, chat, max_length=None)
    assert len(found.dataset) == 60 and not found.bad and found.num_cut == 0
    for (_, messages), row in zip(read.rows, found.dataset):
        (run,) = runs_of_labels(row["labels"])
        assert chat.tokenizer.decode(run[:-1]) == messages[1]["content"] and run[-1] == chat.stop_id
