"""What rows say arrives in the labels, or is counted and named; and no row, however odd, is a traceback."""

import hashlib
import json
import re

import pytest
from byte_tokenizer import byte_tokenizer
from chat_bases import MARKED, chat_tokenizer, known_to_trl
from chat_runs import results
from conftest import REPOSITORY, tiny_llama
from datasets import Dataset
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_export import export
from test_gguf import TEMPLATE, write_gguf
from test_graft import edit_json, graft, save_source
from transformers import AutoTokenizer

from conversion.gguf_source import read_gguf
from evaluation.answers import IGNORED
from evaluation.perplexity import read_documents
from sft.chat import choose_chat, tokenize
from sft.data import read_conversations


Q, A, Q2, A2 = (
    {"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, ("Q", "A", "Q2", "A2"))
)


def read(folder, *rows):
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return read_conversations(str(file), "train")


def learnt(conversations, tokenizer=None) -> list[str]:
    """What the labels of each row teach, as text."""
    chat = choose_chat(tokenizer or chat_tokenizer("marked"))
    rows = tokenize(conversations, chat, None).dataset
    return [chat.tokenizer.decode([label for label in row["labels"] if label != IGNORED]) for row in rows]


def said(turn: dict, **keys) -> dict:
    return turn | keys


def sharegpt(*turns) -> dict:
    """The same turns under ShareGPT's names."""
    return {
        "conversations": [
            {"from": t["role"], "value": t["content"]} | {k: t[k] for k in t if k not in ("role", "content")}
            for t in turns
        ]
    }


def columns(*turns) -> dict:
    """The same turns as one object that holds a list of each key."""
    return {"conversations": {key: [turn.get(key) for turn in turns] for key in {k: None for t in turns for k in t}}}


def messages(*turns) -> dict:
    return {"messages": list(turns)}


def wildchat(*turns) -> dict:
    return {"conversation": list(turns)}


def prompt_and_completion(*turns) -> dict:
    return {"prompt": list(turns[:-1]), "completion": [turns[-1]]}


FORMS = (messages, sharegpt, columns, wildchat, prompt_and_completion)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keys", [{"weight": 0}, {"train": False}, {"weight": 0.0, "train": False}])
def test_a_reply_that_is_not_to_be_learnt_is_context_only(tmp_path, form, keys):
    found = read(tmp_path, form(Q, said(A, **keys), Q2, said(A2, weight=1, train=True)))
    assert learnt(found) == ["A2<eos>"] and not found.bad and found.num_context_replies == 1
    ids = tokenize(found, choose_chat(chat_tokenizer("marked")), None).dataset["input_ids"][0]
    assert "A<eos>" in byte_tokenizer().decode(ids)


def test_null_and_agreeing_marks_change_nothing(tmp_path):
    found = read(tmp_path, messages(said(Q, weight=None, train=False), said(A, weight=1, train=None)))
    assert learnt(found) == ["A<eos>"]


@pytest.mark.parametrize(
    ("turns", "reason", "key"),
    [
        ((Q, said(A, weight=0.5)), "message 1 has weight 0.5: 0 and 1 are known", "weight"),
        ((Q, said(A, weight=True)), "message 1 has weight True: 0 and 1", "weight"),
        ((Q, said(A, weight="0")), "message 1 has weight '0': 0 and 1", "weight"),
        ((Q, said(A, train=1)), "message 1 has train 1: false and true", "train"),
        ((Q, said(A, train="no")), "message 1 has train 'no'", "train"),
        ((said(Q, train=True), A), r"message 0 is to be learnt \(train\), and replies alone are", "train"),
        ((said(Q, weight=1), A), r"message 0 is to be learnt \(weight\)", "weight"),
        ((said(Q, weight=7), A), "message 0 has weight 7", "weight"),
        ((Q, said(A, weight=1, train=False)), "by one of weight and train, and not by the other", "train"),
    ],
)
def test_any_other_mark_makes_a_bad_row_that_is_counted_with_its_key(tmp_path, turns, reason, key):
    found = read(tmp_path, messages(*turns), messages(Q, A))
    assert re.search(reason, found.bad[0][1]) and found.bad_for[key] == 1 and len(found.rows) == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reasoning_content", "hm"),
        ("thinking", "hm"),
        ("tool_calls", [{"function": {"name": "f"}}]),
        ("function_call", {"name": "f"}),
        ("tool_call_id", "1"),
        ("name", "Bob"),
    ],
)
def test_what_a_turn_says_beside_its_text_makes_a_bad_row_unless_it_is_empty(tmp_path, form, key, value):
    empty = [form(Q, said(A, **{key: nothing})) for nothing in (None, "", [], {})]
    found = read(tmp_path, form(Q, said(A, **{key: value})), *empty)
    assert len(found.rows) == 4 and not found.keys_left
    assert found.bad == [(0, f"message 1 has {key}, which no text here holds")] and found.bad_for == {key: 1}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tools", [{"name": "search"}]),
        ("functions", [{"name": "search"}]),
        ("tool_calls", [{"name": "search"}]),
        ("reasoning_content", "hm"),
        ("thinking", "hm"),
        ("images", ["cat.png"]),
        ("documents", [{"text": "x"}]),
        ("system_prompt", "Answer in verse."),
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"enable_thinking": True}),
        ("weight", 0.5),
        ("train", "yes"),
    ],
)
def test_a_column_that_changes_what_is_learnt_makes_a_bad_row_unless_it_is_empty(tmp_path, column, value):
    rows = [
        row | {column: say} for row in (messages(Q, A), {"instruction": "Q", "output": "A"}) for say in (value, None)
    ]
    for bad, good in (rows[:2], rows[2:]):
        found = read(tmp_path, bad, good)
        assert [index for index, _ in found.bad] == [0] and found.bad_for == {column: 1} and not found.columns_left


@pytest.mark.parametrize("row", [messages(Q, A), sharegpt(Q, A), {"prompt": "Q", "completion": "A"}])
def test_earlier_turns_that_a_form_does_not_read_are_not_lost(tmp_path, row):
    found = read(tmp_path, row | {"history": [["Q0", "A0"]]}, row | {"history": []})
    assert len(found.rows) == 1 and found.bad_for == {"history": 1}


def test_a_row_without_a_reply_to_learn_is_counted_and_not_trained(tmp_path):
    found = read(
        tmp_path,
        messages(Q, said(A, train=False), Q2, said(A2, weight=0)),
        messages(Q, A) | {"weight": 0},
        messages(Q, A) | {"weight": 1, "train": True},
    )
    assert found.num_not_learnt == 2 and [index for index, _ in found.rows] == [2] and not found.bad
    with pytest.raises(ValueError, match="no usable row; every reply is marked as not to be learnt"):
        read(tmp_path, {"instruction": "Q", "output": "A", "train": False})


def test_lima_commonsense_qa_and_wildchat_lose_nothing_and_their_metadata_is_counted(tmp_path):
    lima = read(tmp_path, *[{"conversations": ["Q", "A"], "source": "stackexchange"}] * 3)
    assert len(lima.rows) == 3 and lima.columns_left == {"source": 3}
    choices = {"label": ["A", "B"], "text": ["dog", "cat"]}
    csqa = read(
        tmp_path,
        {"id": "1", "question": "What barks?", "question_concept": "bark", "choices": choices, "answerKey": "A"},
    )
    assert len(csqa.rows) == 1 and csqa.columns_left == {"id": 1, "question_concept": 1}
    about = {
        "language": "English",
        "redacted": False,
        "toxic": False,
        "country": "Chile",
        "hashed_ip": "ab",
        "state": None,
    }
    about |= {"header": {"accept-language": "es"}, "timestamp": None, "turn_identifier": 101}
    row = {"conversation_hash": "00", "model": "gpt-4", "timestamp": "2023-04-09", "turn": 2} | about
    row |= {"openai_moderation": [{"flagged": False}], "detoxify_moderation": [{"toxicity": 0.1}]}
    row["conversation"] = [said(turn, **about) for turn in (Q, A, Q2, A2)]
    file = tmp_path / "wildchat.parquet"
    Dataset.from_list([row] * 2).to_parquet(file)
    for found in read(tmp_path, row, row), read_conversations(str(file), "train"):
        assert not found.bad and learnt(found) == ["A<eos>A2<eos>"] * 2
        assert found.columns_left["hashed_ip"] == found.columns_left["openai_moderation"] == 2
        assert (
            found.keys_left["toxic"] == found.keys_left["turn_identifier"] == 8 and "timestamp" not in found.keys_left
        )


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": ["Q", "A", "Q2"]},
        messages(Q, A, Q2),
        sharegpt(Q, A, Q2),
        messages({"role": "system", "content": "S"}, Q, A, Q2),
    ],
)
def test_a_last_question_is_left_and_what_stands_before_it_is_trained(tmp_path, row):
    found = read(tmp_path, row, row)
    assert learnt(found) == ["A<eos>"] * 2 and found.num_questions_left == 2 and not found.bad
    assert all("Q2" not in message["content"] for _, turns in found.rows for message in turns)


def test_the_summary_and_the_results_say_every_count(fine_tune, tmp_path, capsys):
    rows = [
        messages(said(Q, id="q1"), A, Q2) | {"source": "x", "[/b]": 1, "\ud800": 1},
        messages(Q, said(A, tool_calls=[{"name": "f"}])),
        messages(Q, said(A, weight=0), Q2, A2),
        messages(Q, said(A, weight=0)),
        messages(Q, {"role": "[/red]", "content": "A"}),
    ]
    file = tmp_path / "odd.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    folder = fine_tune(rows=file, max_steps=1)
    printed = " ".join(re.sub("[│┃]", " ", capsys.readouterr().out).split())
    data = results(folder)["data"]["data"]
    assert (data["num_questions_left"], data["num_not_learnt"], data["num_context_replies"]) == (1, 1, 1)
    assert data["columns_left"] == {"source": 1, "[/b]": 1, "\\ud800": 1} and data["keys_left"] == {"id": 1}
    assert data["bad_for"] == {"tool_calls": 1} and len(data["bad"]) == 2
    for words in (
        "last questions without a reply",
        "whose every reply is marked",
        "tool_calls (1)",
        "[/b] (1)",
        "[/red]",
    ):
        assert words in printed, words


def test_two_names_for_one_thing_must_agree(tmp_path):
    found = read(tmp_path, messages(Q, said(A, value="other")), messages(Q, said(A, value="A")))
    assert len(found.rows) == 1 and "one thing as `value` and another as `content`" in found.bad[0][1]


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Q", "input": ["context"], "output": "A"},
        {"instruction": "Q", "output": "A", "history": [["Q0", "A0", "more"]]},
        {"conversations": {"from": ["human", "gpt"], "value": "QA"}},
        {"question": "Q", "choices": {"label": ["A", "B"], "text": ["dog"]}, "answerKey": "A"},
        {"question": "Q", "choices": {"label": ["A"], "text": [None]}, "answerKey": "A"},
    ],
)
def test_a_row_of_another_shape_is_bad_and_not_read_as_something_else(tmp_path, row):
    with pytest.raises(ValueError, match="no usable row; the first: row 0"):
        read(tmp_path, row)


@pytest.mark.parametrize("row", [messages(Q, said(A, content="A\ud800")), {"instruction": "\udc00", "output": "A"}])
def test_a_lone_surrogate_makes_a_counted_bad_row(tmp_path, row):
    good = messages(Q, A) if "messages" in row else {"instruction": "Q", "output": "A"}
    found = read(tmp_path, row, good)
    assert learnt(found) == ["A<eos>"] and re.search(
        r"holds a lone surrogate, \\ud[8c]00, at character", found.bad[0][1]
    )


def test_a_lone_surrogate_in_a_text_for_perplexity_is_one_line(tmp_path, fine_tune):
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "whole"}\n{"text": "half \\ud83d"}\n')
    with pytest.raises(
        ValueError, match=r"text.jsonl, line 2: its text holds a lone surrogate, \\ud83d, at character 5"
    ):
        read_documents(str(file))
    assert "line 2: its text holds a lone surrogate" in fine_tune(code=2, perplexity_data=file)
    (tmp_path / "text.txt").write_bytes(b"half \xed\xa0\xbd")
    with pytest.raises(ValueError, match="text.txt is not UTF-8 text: invalid continuation byte at byte 5"):
        read_documents(str(tmp_path / "text.txt"))


def test_a_mark_of_the_byte_order_is_no_part_of_a_text(tmp_path):
    for name, content in (("a.txt", "word"), ("a.jsonl", '{"text": "word"}')):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert read_documents(str(tmp_path / name)) == ["word"]


NAMED = {"tool_use": "{{ 'tools' }}", "rag": "{{ 'documents' }}"}


def with_named_templates(folder, default: str = MARKED, as_files: bool = True):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": default} | NAMED
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder, save_jinja_files=as_files)
    assert AutoTokenizer.from_pretrained(folder).chat_template == {"default": default} | NAMED
    return folder


@pytest.mark.parametrize("as_files", [True, False])
def test_named_chat_templates_stay_in_every_folder_of_a_run(fine_tune, base, tmp_path, as_files):
    with_named_templates(base, as_files=as_files)
    folder = fine_tune(base=base, save_strategy="steps", save_steps=1)
    for place in folder, folder / "checkpoint-1":
        assert AutoTokenizer.from_pretrained(place).chat_template == {"default": MARKED} | NAMED
    assert results(folder)["chat"]["template"] == "the checkpoint's own"


def test_a_folder_that_holds_named_chat_templates_takes_them_again(fine_tune, base):
    options = {"base": with_named_templates(base), "save_strategy": "steps", "save_steps": 1}
    folder = fine_tune(**options)
    fine_tune(resume_from_checkpoint="last", **options)
    assert AutoTokenizer.from_pretrained(folder).chat_template == {"default": MARKED} | NAMED


def test_the_one_that_is_trained_is_the_default_wherever_it_comes_from(fine_tune, base, tmp_path):
    with_named_templates(base, default="{{ messages }}")
    ours = (REPOSITORY / "sft" / "chat_template.jinja").read_text(encoding="utf-8")
    assert AutoTokenizer.from_pretrained(fine_tune("ours", base=base)).chat_template == {"default": ours} | NAMED
    # Any ending will do for a template's name
    (tmp_path / "template.txt").write_text(MARKED)
    options = {"chat_template_path": tmp_path / "template.txt", "save_strategy": "steps", "save_steps": 1}
    folder = fine_tune("theirs", base=base, **options)
    for place in folder, folder / "checkpoint-1":
        assert AutoTokenizer.from_pretrained(place).chat_template == {"default": MARKED} | NAMED


def test_a_default_known_to_trl_is_found_among_named_ones_and_none_gives_way_to_ours():
    tokenizer = chat_tokenizer("llama-3")
    tokenizer.chat_template = {"default": known_to_trl("llama3.jinja")} | NAMED
    assert choose_chat(tokenizer).origin == "the checkpoint's own"
    tokenizer.chat_template = dict(NAMED)
    chat = choose_chat(tokenizer)
    assert "the checkpoint has none" in chat.origin and set(tokenizer.chat_template) == {"default", *NAMED}


def test_named_chat_templates_are_kept_by_the_conversion_there_and_back(tmp_path):
    save_source(tmp_path / "source")
    with_named_templates(tmp_path / "source")
    graft(tmp_path / "source", tmp_path / "bhyt")
    export(tmp_path / "bhyt", tmp_path / "plain", "--force")
    for name in ("bhyt", "plain"):
        assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template == {"default": MARKED} | NAMED


def test_a_gguf_files_named_chat_templates_are_read(tmp_path):
    named = [("add_string", f"tokenizer.chat_template.{name}", template) for name, template in NAMED.items()]
    write_gguf(tmp_path / "named.gguf", tiny_llama(), extra=named)
    assert read_gguf(tmp_path / "named.gguf")[1].chat_template == {"default": TEMPLATE} | NAMED


@pytest.mark.parametrize("named", [{"../x": "a"}, {"tool_use": 3}, {"tool_use": "\ud800"}])
def test_a_chat_template_that_could_not_be_saved_again_is_refused_before_the_work(base, fine_tune, tmp_path, named):
    save_source(tmp_path / "source")
    for folder in base, tmp_path / "source":
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        listed = [{"name": name, "template": template} for name, template in named.items()]
        edit_json(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": MARKED}, *listed])
    said = f"the chat template {next(iter(named))!r} could not be saved again"
    assert said in fine_tune(code=2) and not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=re.escape(said)):
        graft(tmp_path / "source", tmp_path / "graft")


def test_a_template_that_computes_with_what_is_not_there_is_one_line(fine_tune, tmp_path):
    (tmp_path / "broken.jinja").write_text("{{ 1 + messages[0]['content'] }}")
    assert "broken.jinja cannot be trained on: TypeError" in fine_tune(
        code=2, chat_template_path=tmp_path / "broken.jinja"
    )


# Values of any kind, those among them that rows are made of
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.floats(),
    st.sampled_from(["", " ", "user", "assistant", "gpt", "Q"]),
)
SCALARS |= st.text(st.characters(exclude_categories=()), max_size=4)
NAMES = st.sampled_from(
    [
        "role",
        "content",
        "from",
        "value",
        "type",
        "text",
        "weight",
        "train",
        "name",
        "tool_calls",
        "thinking",
        "label",
        "id",
    ]
)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=3)},
    optional={"weight": SCALARS, "train": SCALARS, "name": SCALARS, "value": SCALARS},
)
ANY = st.recursive(
    SCALARS | TURNS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=2), inner, max_size=4),
    max_leaves=8,
)
COLUMNS = [
    "messages",
    "conversations",
    "conversation",
    "instruction",
    "input",
    "output",
    "history",
    "prompt",
    "completion",
]
COLUMNS += ["question", "choices", "answerKey", "system", "weight", "train", "tools", "id"]
ROWS = st.dictionaries(st.sampled_from(COLUMNS), ANY | st.lists(TURNS | SCALARS, max_size=4), max_size=4) | ANY
FIRST = {
    "messages": messages(Q, A),
    "LIMA": {"conversations": ["Q", "A"]},
    "ShareGPT": sharegpt(Q, A),
    "Alpaca": {"instruction": "Q", "output": "A"},
    "prompt/completion": {"prompt": "Q", "completion": "A"},
    "CommonsenseQA": {"question": "Q", "choices": {"label": ["A"], "text": ["x"]}, "answerKey": "A"},
}
CHATS = {kind: choose_chat(chat_tokenizer(kind)) for kind in ("none", "llama-2", "llama-3")}


@pytest.mark.parametrize("form", FIRST)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@example(odd=[{"messages": [said(Q, content=[{"type": "text", "text": "\ud800"}]), A]}], kind="none")
@given(odd=st.lists(ROWS, min_size=1, max_size=4), kind=st.sampled_from(list(CHATS)))
def test_an_odd_row_is_left_out_or_trained_and_never_a_traceback(tmp_path, form, odd, kind):
    found = read(tmp_path, FIRST[form], *odd)
    assert found.num_read == 1 + len(odd) == len(found.rows) + len(found.bad) + found.num_not_learnt
    rows = tokenize(found, CHATS[kind], 64)
    assert len(rows.dataset) + len(rows.bad) + rows.num_without_reply + found.num_not_learnt == found.num_read


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"messages": ' * 100_000, '{"messages": ' + "1" * 5000 + "}", "7", "\x00"]
)
def test_a_file_that_no_parser_takes_is_one_line(tmp_path, content):
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(ValueError, match=r"rows.json"):
        read_conversations(str(tmp_path / "rows.json"), "train")
    (tmp_path / "text.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"text.jsonl, line 1"):
        read_documents(str(tmp_path / "text.jsonl"))


@pytest.mark.real
def test_lima_gives_the_ids_and_labels_that_it_gave_before_these_rules(data_folder):
    found = read_conversations(str(data_folder / "lima1k.json") + "[:300]", "train")
    rows = tokenize(found, choose_chat(chat_tokenizer("chatml")), None)
    assert len(rows.dataset) == 300 and not found.columns_left
    digest = hashlib.sha256(json.dumps(list(rows.dataset), sort_keys=True).encode()).hexdigest()
    assert digest == "be08718e3276c9cbe29784b94916ee0e5ebb4060a63e600f6ef713aa1369a0b6"
