"""Conversations of every usual form become messages; bad rows are left out by one rule, with index and reason."""

import json
import subprocess
import sys

import pytest
from conftest import REPOSITORY
from datasets import Dataset
from datasets.exceptions import DatasetNotFoundError

from sft.data import read_conversations


QUESTION_AND_ANSWER = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
CSQA = {
    "question": "What barks?",
    "choices": {"label": ["A", "B"], "text": ["dog", "cat"]},
    "answerKey": "A",
}
FORMS = {
    "LIMA": {"conversations": ["Q", "A"], "source": "x"},
    "ShareGPT": {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
    "messages": {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
    "Alpaca": {"instruction": "Q", "input": "", "output": "A"},
    "prompt/completion": {"prompt": "Q", "completion": "A"},
}


def write(file, rows) -> str:
    lines = file.suffix == ".jsonl"
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) if lines else json.dumps(rows)
    file.write_text(text, encoding="utf-8")
    return str(file)


def messages_of(conversations):
    return [messages for _, messages in conversations.rows]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_every_form_is_recognised_by_its_columns(tmp_path, form, suffix):
    file = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        Dataset.from_list([FORMS[form]] * 2).to_parquet(file)
    else:
        write(file, [FORMS[form]] * 2)
    read = read_conversations(str(file), "train")
    assert read.form == form and messages_of(read) == [QUESTION_AND_ANSWER] * 2 and not read.bad


def test_prompts_of_messages_alpaca_context_and_commonsense_questions_are_put_into_words(tmp_path):
    conversational = {
        "prompt": [{"role": "human", "content": "Q"}],
        "completion": [{"role": "bot", "content": " A\n"}],
    }
    assert messages_of(read_conversations(write(tmp_path / "a.json", [conversational]), "")) == [QUESTION_AND_ANSWER]
    context = {"instruction": "Q", "input": "context", "output": "A"}
    assert (
        messages_of(read_conversations(write(tmp_path / "b.json", [context]), ""))[0][0]["content"] == "Q\n\ncontext"
    )
    asked, answered = messages_of(read_conversations(write(tmp_path / "c.json", [CSQA]), ""))[0]
    assert (
        asked["content"] == "Question: What barks?\nChoices:\nA) dog\nB) cat\nAnswer:" and answered["content"] == "A"
    )


SYSTEM = [{"role": "system", "content": "S"}]
EARLIER = [{"role": "user", "content": "Q0"}, {"role": "assistant", "content": "A0"}]
PARTS = {"role": "user", "content": [{"type": "text", "text": "Q"}]}
VARIANTS = {
    "roles in ShareGPT's column": ({"conversations": QUESTION_AND_ANSWER}, []),
    "columns of turns": ({"conversations": {"from": ["human", "gpt"], "value": ["Q", "A"]}}, []),
    "null in columns of others": (
        {"messages": [turn | {"from": None, "value": None} for turn in QUESTION_AND_ANSWER]},
        [],
    ),
    "content in parts": ({"messages": [PARTS, {"role": "assistant", "content": "A"}]}, []),
    "a prompt of messages": ({"prompt": SYSTEM + QUESTION_AND_ANSWER[:1], "completion": "A"}, SYSTEM),
    "a completion of messages": ({"prompt": "Q", "completion": QUESTION_AND_ANSWER[1:]}, []),
    "Alpaca's history": ({"instruction": "Q", "output": "A", "history": [["Q0", "A0"]]}, EARLIER),
    "a system column": ({**FORMS["ShareGPT"], "system": "S"}, SYSTEM),
    "a system column and history": ({**FORMS["Alpaca"], "system": "S", "history": [["Q0", "A0"]]}, SYSTEM + EARLIER),
    "an empty system column": ({**FORMS["Alpaca"], "system": "", "history": []}, []),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_that_a_row_says_is_lost(tmp_path, variant):
    row, before = VARIANTS[variant]
    read = read_conversations(write(tmp_path / "a.json", [row]), "")
    assert messages_of(read) == [before + QUESTION_AND_ANSWER]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": "ab"}, "its conversation is str, not a list"),
        ({"messages": [PARTS | {"content": [{"type": "image"}]}, *QUESTION_AND_ANSWER[1:]]}, "message 0 is list"),
        ({"messages": [{"role": ["user"], "content": "Q"}]}, "has the role ['user']"),
        ({"messages": QUESTION_AND_ANSWER, "tools": [{"name": "search"}]}, "it offers tools"),
        ({"conversations": {"from": ["human"], "value": ["Q", "A"]}}, "not of the form of the others"),
        ({**FORMS["Alpaca"], "system": 3}, "message 0 is int"),
    ],
)
def test_a_row_that_would_be_misread_is_bad(tmp_path, row, reason):
    with pytest.raises(ValueError, match="no usable row") as caught:
        read_conversations(write(tmp_path / "a.json", [row]), "")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "called", "hub_id"),
    [
        ("GAIR/lima", "GAIR/lima", "GAIR/lima"),
        ("GAIR/lima[:1]", "GAIR/lima[:1]", "GAIR/lima"),
        ("org/chat_v1.5", "org/chat_v1.5", "org/chat_v1.5"),
        ("data/chats", "chats", None),
    ],
)
def test_data_is_called_what_others_find_it_by(monkeypatch, tmp_path, name, called, hub_id):
    rows = Dataset.from_list([FORMS["LIMA"]] * 2)
    monkeypatch.setattr("sft.data.load_dataset", lambda name, configuration, split: rows)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "chats").mkdir(parents=True)
    read = read_conversations(name, "train")
    assert (read.name, read.hub_id) == (called, hub_id)


def test_a_data_sets_configuration_and_split_are_asked_for(monkeypatch):
    asked = []
    rows = Dataset.from_list([FORMS["LIMA"]])
    monkeypatch.setattr("sft.data.load_dataset", lambda *place, split: asked.append((*place, split)) or rows)
    read_conversations("someone/chats", "test", "german")
    assert asked == [("someone/chats", "german", "test")]


def test_a_file_has_no_configuration(tmp_path):
    with pytest.raises(ValueError, match="is a file, which has no configuration 'german': leave it out"):
        read_conversations(write(tmp_path / "a.json", [FORMS["LIMA"]]), "", "german")


def test_a_broken_parquet_file_is_named(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 broken")
    with pytest.raises(ValueError, match="rows.parquet is no parquet file that can be read"):
        read_conversations(str(tmp_path / "rows.parquet"), "train")


def test_rows_of_many_turns_stay_one_row_with_every_turn(tmp_path):
    rows = [{"conversations": ["Q1", "A1", "Q2", "A2"]}, {"conversations": ["Q1", "A1"]}]
    long, short = messages_of(read_conversations(write(tmp_path / "a.jsonl", rows), ""))
    assert [message["content"] for message in long] == ["Q1", "A1", "Q2", "A2"] and long[:2] == short
    assert [message["role"] for message in long] == ["user", "assistant"] * 2


def test_bad_rows_are_left_out_with_index_and_reason(tmp_path):
    broken = [
        ["Q", None],
        ["Q", ""],
        ["Q", "   "],
        ["Q", 7],
        [],
        ["Q", ["a", "b"]],
        ["Q"],
        ["Q", "A"],
    ]
    read = read_conversations(write(tmp_path / "a.jsonl", [{"conversations": row} for row in broken]), "")
    assert messages_of(read) == [QUESTION_AND_ANSWER] and read.num_read == 8
    assert [index for index, _ in read.bad] == list(range(7))
    reasons = [reason for _, reason in read.bad]
    assert reasons[:4] == [
        "message 1 is null, not text",
        "message 1 is empty",
        "message 1 is empty",
        "message 1 is int, not text",
    ]
    assert reasons[4:6] == ["no messages", "message 1 is list, not text"]
    assert reasons[6] == "not user and assistant in turn, with a reply"


def test_unknown_roles_and_system_messages_in_the_middle_are_bad(tmp_path):
    def row(*roles):
        return {"messages": [{"role": role, "content": "x"} for role in roles]}

    rows = [row("system", "user", "assistant"), row("user", "tool", "assistant"), row("user", "system", "assistant")]
    read = read_conversations(write(tmp_path / "a.json", [*rows, {"messages": "x"}, 3]), "")
    assert len(read.rows) == 1 and [index for index, _ in read.bad] == [1, 2, 3, 4]
    assert "role 'tool'" in read.bad[0][1]


def test_a_part_of_a_file_keeps_the_rows_own_numbers(tmp_path):
    rows = [{"conversations": ["Q", f"A{number}"]} for number in range(5)] + [{"conversations": ["Q", None]}]
    read = read_conversations(write(tmp_path / "a.jsonl", rows) + "[3:]", "")
    assert [index for index, _ in read.rows] == [3, 4] and read.bad[0][0] == 5


def test_files_are_utf_8_in_any_locale(tmp_path):
    answer = "Use </s> to end — naïve 😀\u2028    indented"
    file = write(tmp_path / "a.jsonl", [{"conversations": ["Q", answer + "\n"]}])
    code = (
        "import sys; from sft.data import read_conversations\n"
        "print(ascii(read_conversations(sys.argv[1], '').rows[0][1][1]['content']))"
    )
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PATH": "", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code, file], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == ascii(answer), done.stderr[-2000:]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            DatasetNotFoundError("Dataset 'GAIR/lima' is a gated dataset on the Hub."),
            "accept its terms at https://hugging",
        ),
        (DatasetNotFoundError("Dataset 'GAIR/lima' doesn't exist on the Hub"), "was not found on the Hub"),
        (RuntimeError("Dataset scripts are no longer supported, but found lima.py"), "made by a script"),
        (ConnectionError("Couldn't reach the Hub (offline mode)"), "no connection"),
    ],
)
def test_a_data_set_that_cannot_be_fetched_is_one_line_and_no_other_data(monkeypatch, error, said):
    def refuse(*arguments, **options):
        raise error

    monkeypatch.setattr("sft.data.load_dataset", refuse)
    with pytest.raises(ValueError, match=said) as caught:
        read_conversations("GAIR/lima", "train")
    assert "local file" in str(caught.value) and "\n" not in str(caught.value)


def test_the_published_form_gives_the_same_conversations_from_a_file_and_from_the_hub(monkeypatch, tmp_path):
    rows = [{"conversations": ["Q1", "A1", "Q2", "A2"], "source": "x"}, {"conversations": ["Q", "A"], "source": "y"}]
    monkeypatch.setattr("sft.data.load_dataset", lambda name, configuration, split: Dataset.from_list(rows))
    from_hub = read_conversations("GAIR/lima", "train")
    assert (
        from_hub.rows == read_conversations(write(tmp_path / "lima.jsonl", rows), "").rows
        and from_hub.name == "GAIR/lima"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "holds no rows"),
        ('[{"text": "x"}]', "columns text are of no known form"),
        ('[{"conversations": ["Q", null]}]', "no usable row; the first: row 0, message 1 is null"),
        ("{broken", "is not UTF-8 JSON"),
    ],
)
def test_a_file_without_conversations_is_refused_by_name(tmp_path, content, said):
    file = tmp_path / "rows.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=said) as caught:
        read_conversations(str(file), "")
    assert "rows.json" in str(caught.value) or "columns" in str(caught.value)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no file at nowhere.jsonl"):
        read_conversations("nowhere.jsonl", "train")
    with pytest.raises(ValueError, match="no file at nowhere.parquet"):
        read_conversations("nowhere.parquet", "train")


@pytest.mark.real
def test_lima_is_read_whole(data_folder):
    read = read_conversations(str(data_folder / "lima1k.json"), "train")
    assert read.form == "Alpaca" and len(read.rows) == 1000 and not read.bad
