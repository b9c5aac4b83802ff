"""Licences and a user's front matter: carried, kept, said to be unknown where they are, and not pushed unasked."""

import json
from pathlib import Path

import pytest
import yaml
from chat_bases import save_base
from test_cards import card, chat_card
from test_graft import QUICK, save_source

from model_cards.licence import data_licence
from model_cards.publish import files_to_publish, publish
from model_cards.render import BEGIN, check_front_matter, merge_card, save_readme
from sft.arguments import parse


LEGAL = ("LICENSE.txt", "NOTICE", "USE_POLICY.md")
INDEX = [
    {"name": "mine", "results": [{"task": {"type": "text-generation"}, "metrics": [{"type": "acc", "value": 0.5}]}]}
]


@pytest.fixture
def conversion(monkeypatch, capsys):
    """Runs the command in this process: (exit code, what it printed)."""
    from conversion.__main__ import main

    def run(*words):
        monkeypatch.setattr("sys.argv", ["conversion", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, capsys.readouterr()

    return run


@pytest.fixture
def no_upload(monkeypatch):
    """Uploads are noted down, not made."""
    made = []
    for room in ("conversion", "sft"):
        monkeypatch.setattr(f"{room}.__main__.publish", lambda *words: made.append(words))
    return made


def front_matter(folder) -> dict:
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def write_legal(folder, licence: str | None = "llama3.2"):
    for name in LEGAL:
        (folder / name).write_text(f"the text of {name}")
    if licence:
        (folder / "README.md").write_text(f"---\nlicense: {licence}\n---\n\n# Source\n")
    return folder


def holds_legal(folder) -> bool:
    return all((folder / name).read_text() == f"the text of {name}" for name in LEGAL)


def test_the_policy_of_use_travels_through_graft_heal_and_export_and_is_uploaded(tmp_path, conversion):
    save_source(tmp_path / "source")
    write_legal(tmp_path / "source")
    measure = [*QUICK[:6]]
    assert conversion("graft", tmp_path / "source", tmp_path / "graft", *QUICK)[0] == 0
    assert front_matter(tmp_path / "graft")["license"] == "llama3.2"
    # What the user corrects in the graft's card holds for what is made of it
    text = (tmp_path / "graft" / "README.md").read_text()
    (tmp_path / "graft" / "README.md").write_text(text.replace("license: llama3.2", "license: llama3.1", 1))
    words = ["heal", tmp_path / "graft", tmp_path / "healed", "--teacher", tmp_path / "source", "--heal_tokens", "96"]
    assert conversion(*words, *measure[:2], *measure[4:], "--force")[0] == 0
    assert conversion("export", tmp_path / "graft", tmp_path / "plain", *measure, "--force")[0] == 0
    for name in ("graft", "healed", "plain"):
        folder = tmp_path / name
        assert holds_legal(folder) and front_matter(folder)["license"] == "llama3.1", name
        assert set(LEGAL) <= {str(file) for file in files_to_publish(folder)}


def test_the_policy_of_use_travels_through_a_fine_tune(fine_tune, base):
    write_legal(base)
    (base / "LICENSES").mkdir()
    folder = fine_tune()
    assert holds_legal(folder) and front_matter(folder)["license"] == "llama3.2"
    assert set(LEGAL) <= {str(file) for file in files_to_publish(folder)}


def test_a_users_licence_in_a_card_wins_with_a_warning_that_names_both(tmp_path, capsys):
    (tmp_path / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n\nMine.\n")
    save_readme(tmp_path, card(license="other", license_name="llama3.2", license_link="https://example.org"))
    warning = capsys.readouterr().err
    assert "cc-by-4.0" in warning and "other" in warning
    data = front_matter(tmp_path)
    assert data["license"] == "cc-by-4.0" and "license_name" not in data and "license_link" not in data
    # And again, as it is the user's in the card that a run made
    save_readme(tmp_path, card(license="mit"))
    assert front_matter(tmp_path)["license"] == "cc-by-4.0" and "mit" in capsys.readouterr().err


def test_a_licence_that_a_run_generated_gives_way_to_the_next(tmp_path, capsys):
    save_readme(tmp_path, card(license="other", license_name="llama3.2"))
    save_readme(tmp_path, card(license="mit"))
    data = front_matter(tmp_path)
    assert data["license"] == "mit" and "license_name" not in data and not capsys.readouterr().err


def test_the_flag_names_the_licence_and_a_card_that_contradicts_it_is_told_before_the_work(tmp_path, conversion):
    save_source(tmp_path / "source")
    write_legal(tmp_path / "source")
    assert conversion("graft", tmp_path / "source", tmp_path / "out", *QUICK, "--license", "mit")[0] == 0
    assert (
        front_matter(tmp_path / "out")["license"] == "mit"
        and "The weights: mit." in (tmp_path / "out" / "README.md").read_text()
    )
    text = (tmp_path / "out" / "README.md").read_text().replace("license: mit", "license: gpl-3.0", 1)
    (tmp_path / "out" / "README.md").write_text(text)
    words = ["graft", tmp_path / "source", tmp_path / "out", *QUICK, "--overwrite", "--license", "mit", "--dry_run"]
    code, printed = conversion(*words)
    assert code == 2 and "--license mit contradicts" in printed.err and "gpl-3.0" in printed.err


@pytest.mark.parametrize("licence", ["", "Apache 2.0", "MIT\n"])
def test_a_licence_that_is_no_name_is_refused(tmp_path, conversion, licence):
    code, printed = conversion("graft", tmp_path, tmp_path / "out", "--license", licence)
    assert code == 2 and "give it as the Hub calls it" in printed.err


def test_an_unknown_licence_is_said_to_be_unknown_and_not_pushed_unasked(tmp_path, conversion, no_upload):
    save_source(tmp_path / "source")
    words = ["graft", tmp_path / "source", tmp_path / "out", *QUICK, "--push_to_hub", "someone/model"]
    code, printed = conversion(*words)
    assert code == 2 and "licence is unknown" in printed.err and "--license" in printed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"] and not no_upload
    assert conversion(*words, "--license", "unknown")[0] == 0
    assert no_upload and front_matter(tmp_path / "out")["license"] == "unknown"
    assert conversion(*words[:3], *QUICK, "--overwrite")[0] == 0
    assert "license" not in front_matter(tmp_path / "out")
    assert "The weights: unknown:" in (tmp_path / "out" / "README.md").read_text()
    # A base whose card says `unknown` is no better known for it
    (tmp_path / "source" / "README.md").write_text("---\nlicense: unknown\n---\n")
    code, printed = conversion(*words, "--overwrite")
    assert code == 2 and "licence is unknown" in printed.err


def test_an_upload_of_a_fine_tune_of_unknown_licence_is_refused_before_the_work(fine_tune, tmp_path, no_upload):
    push = {"push_to_hub": True, "hub_model_id": "someone/model"}
    assert "licence is unknown" in fine_tune(code=2, **push) and not (tmp_path / "out").exists()
    folder = fine_tune(**push, license="unknown")
    assert no_upload and front_matter(folder)["license"] == "unknown"


def test_a_folder_without_a_licence_is_not_published_and_the_hub_is_not_asked(tmp_path, monkeypatch):
    folder = save_base(tmp_path / "out")
    (folder / "README.md").write_text("# Mine\n")
    monkeypatch.setattr("model_cards.publish.HfApi", lambda: pytest.fail("the Hub was asked"))
    with pytest.raises(ValueError, match="names no licence: write `license:`.*--license unknown"):
        publish(folder, "someone/model")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    with pytest.raises(ValueError, match="--license other contradicts .*README.md, which says mit"):
        publish(folder, "someone/model", licence="other")


def test_the_licence_of_data_is_its_cards_else_the_users_word_else_unknown(tmp_path, monkeypatch):
    def fetched(hub_id, *words, **options):
        if hub_id == "none/here":
            raise OSError("offline")
        return str(tmp_path / "README.md")

    monkeypatch.setattr("model_cards.licence.hf_hub_download", fetched)
    (tmp_path / "README.md").write_text("---\nlicense: odc-by\n---\n")
    assert data_licence("some/chats", None) == data_licence("some/chats", "mine") == "odc-by"
    (tmp_path / "README.md").write_text("---\nlicense: other\n---\n")
    assert data_licence("GAIR/lima", "other, non-commercial") == "other, non-commercial"
    assert data_licence("GAIR/lima", None) == "other"
    assert data_licence("none/here", "mine") == data_licence(None, "mine") == "mine"
    assert data_licence("none/here", None) == data_licence(None, None) == "unknown"


@pytest.mark.parametrize("recipe", sorted(Path(__file__).parents[1].glob("sft/recipes/*.yaml")), ids=lambda r: r.stem)
def test_recipes_on_lima_say_that_it_is_not_for_commerce_and_other_data_do_not_inherit_it(recipe):
    words = ["--config", str(recipe), "--model_name_or_path", "m", "--output_dir", "o"]
    assert parse(words)[0].data_license.startswith("other, non-commercial")
    assert parse([*words, "--data", "mine.json"])[0].data_license is None
    assert parse([*words, "--data", "mine.json", "--data_license", "mit"])[0].data_license == "mit"


def test_weights_data_and_code_are_named_apart(fine_tune, base):
    write_legal(base, "apache-2.0")
    folder = fine_tune(data_license="cc-by-4.0")
    text = (folder / "README.md").read_text().partition("## Licence")[2]
    assert "| the weights | apache-2.0 |" in text
    assert "| the data, rows.jsonl | cc-by-4.0 |" in text and "| the code (`*_bhyt.py`) | Apache-2.0 |" in text
    assert json.loads((folder / "results.json").read_text())["data"]["data"]["license"] == "cc-by-4.0"
    assert "The code beside them (`*_bhyt.py`): Apache-2.0" in card(license="mit")


def test_a_users_model_index_survives_even_where_the_hubs_parser_refuses_it(tmp_path):
    whole = {"name": "b", "results": [{**INDEX[0]["results"][0], "dataset": {"name": "C4", "type": "c4"}}]}
    theirs = {"model-index": [*INDEX, whole], "language": "de"}
    former = f"---\n{yaml.safe_dump(theirs)}---\n\nMine.\n"
    merged = merge_card(card(license="mit"), former)
    assert yaml.safe_load(merged.split("---\n")[1])["model-index"] == theirs["model-index"]
    assert merge_card(card(license="mit"), merged) == merged


def test_words_that_yaml_1_1_takes_for_truth_stay_words():
    merged = merge_card(card(), "---\nlanguage: no\nswitch: on\ngated: true\n---\n")
    data = yaml.safe_load(merged.split("---\n")[1])
    assert (data["language"], data["switch"], data["gated"]) == ("no", "on", True)


def test_front_matter_behind_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "README.md").write_text("\ufeff---\nlicense: mit\n---\n\nMine.\n", encoding="utf-8")
    save_readme(tmp_path, card())
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert front_matter(tmp_path)["license"] == "mit" and text.count("license: mit") == 1
    assert text.index("Mine.") < text.index(BEGIN)


@pytest.mark.parametrize(
    ("front", "said"),
    [
        ("license: mit\nlicense: other", "'license' stands there twice"),
        ("- a", "no keys with values"),
        ("a: [", "cannot be read"),
        ("tags:\n- 1", "tags: 1, which is no text"),
        ("license: {a: b}", "which is no text"),
    ],
)
def test_front_matter_is_checked_without_the_hub(front, said):
    with pytest.raises(ValueError, match=said):
        check_front_matter(f"---\n{front}\n---\n\nText\n")
    check_front_matter(card(license="mit"))


def test_a_card_says_of_norms_adapters_and_exports_what_is_so():
    assert "Its norms are of the kind `lns`" in chat_card(norm_type="lns")
    assert "bounded hyperbolic" not in chat_card(norm_type="lns") and "bounded hyperbolic" in chat_card()
    adapter = chat_card(is_adapter=True)
    assert "library_name: peft" in adapter and "This is an adapter alone: it needs PEFT" in adapter
    assert "The code" not in adapter and "`*_bhyt.py`" not in adapter and "The code travels" in chat_card()
    assert "Kept are the weights of checkpoint-3" in chat_card(saved="checkpoint-3") and "Kept" not in chat_card()
    report = {"command": "export", "source": {"name": "graft"}, "perplexity": {"ratio": 1.0}, "kl_nats_per_token": 0.1}
    assert "Exported from graft, before any fine-tuning" in chat_card(conversion=report)
    assert "Grafted from graft" in chat_card(conversion=report | {"command": "graft"})


def test_a_card_that_the_hub_would_refuse_is_named_before_the_work_whose_result_is_to_be_uploaded(
    tmp_path, conversion, no_upload, monkeypatch
):
    save_source(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("---\ntags: [1]\n---\n")
    words = ["graft", tmp_path / "source", tmp_path / "out", *QUICK, "--overwrite", "--license", "mit"]
    code, printed = conversion(*words, "--push_to_hub", "someone/model")
    assert code == 2 and "tags: 1, which is no text: put it in quotes" in printed.err and not no_upload
    (tmp_path / "out" / "README.md").write_text("Mine.\n")
    asked = []

    def refuse(card):
        asked.append(card)
        raise ValueError("the Hub refuses its front matter: license must be one of a list")

    monkeypatch.setattr("model_cards.licence.ask_the_hub", refuse)
    code, printed = conversion(*words, "--push_to_hub", "someone/model")
    assert code == 2 and "license must be one of a list" in printed.err and not no_upload
    assert asked == ["---\nlicense: mit\n---\n\nMine.\n"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["README.md"]
