"""Cards: front matter that parses whatever the source calls itself, usage that fits the checkpoint, a user's text kept."""

import pytest
from huggingface_hub import ModelCard

from model_cards.converted import converted_card
from model_cards.fine_tuned import fine_tuned_card
from model_cards.render import BEGIN, END, LICENCE, merge_card, save_readme


def card(base_model=None, has_chat_template=True, **source) -> str:
    report = {"source": {"name": "source", "license": None, "quantization": None, **source}}
    report |= {"texts": {}, "command": "graft", "healing": None, "layers": None}
    return converted_card("A title", "your-name/model", report, [("ratio", "1.0065")], base_model, has_chat_template)


def chat_card(
    base="base", norm_type="bhyt", answer="yes", data=None, saved=None, conversion=None, is_adapter=False, **licence
) -> str:
    part = {"name": "lima.jsonl", "form": "LIMA", "num_rows": 9, "num_kept": 8, "num_cut": 1, "num_supervised": 70}
    part |= {"license": "unknown"}
    results = {
        "base": {"name": base, "norm_type": norm_type, "conversion": conversion, **dict.fromkeys(LICENCE), **licence},
        "data": {"data": part | {"hub_id": data}},
        "training": {"num_steps": 3, "saved_checkpoint": saved},
        "chat": {"stop_token": "<|im_end|>", "stop_id": 4},
        "recipe": {"learning_rate": 1e-5, "seed": 42},
        "versions": {"torch": "2.13.0"},
        "before": {"perplexity": {"C4": {}}, "answers": [{"question": "Why?", "answer": "no"}]},
        "after": {"answers": [{"question": "Why?", "answer": answer}]},
    }
    return fine_tuned_card(results, [("perplexity | C4", "30.1", "30.2", "x 1.0033")], "out", True, is_adapter)


@pytest.mark.parametrize("licence", ["apache-2.0", "llama3: community", "@x", "no", '"quoted"', "- list", "naïve 😀"])
def test_any_license_survives_the_front_matter(licence):
    assert ModelCard(card(license=licence)).data.license == licence


def test_what_is_unknown_is_left_out():
    data = ModelCard(card()).data
    assert data.license is None and data.base_model is None and data.tags == ["bhyt", "custom_code"]
    assert ModelCard(card(base_model="someone/model")).data.base_model == "someone/model"
    assert ModelCard(chat_card()).data.base_model is None and ModelCard(chat_card()).data.datasets is None


def test_usage_asks_for_consent_and_fits_the_tokenizer():
    assert card().count("trust_remote_code=True") == 2 and "apply_chat_template" in card()
    assert "apply_chat_template" not in card(has_chat_template=False)
    assert "| ratio | 1.0065 |" in card() and "Q4_1 blocks, dequantised" in card(quantization="Q4_1")
    assert chat_card().count("trust_remote_code=True") == 3 and "bhyt" in ModelCard(chat_card()).data.tags
    assert (
        "trust_remote_code" not in chat_card(norm_type=None)
        and "bhyt" not in ModelCard(chat_card(norm_type=None)).data.tags
    )


def test_names_of_the_hub_and_no_others_stand_in_the_front_matter():
    data = ModelCard(chat_card(base="someone/base", data="GAIR/lima")).data
    assert data.base_model == "someone/base" and data.datasets == ["GAIR/lima"]


def test_what_a_model_said_stays_a_quotation_and_a_cell_a_cell():
    text = chat_card(answer="# Heading\n\n---\n<script>alert(1)</script>\n" + END)
    assert "> # Heading\n>\n> ---\n> &lt;script>" in text and text.count(END) == 1
    assert "| perplexity \\| C4 | 30.1 | 30.2 | x 1.0033 |" in text


def test_a_users_words_and_keys_survive_a_new_card(tmp_path):
    save_readme(tmp_path, card())
    file = tmp_path / "README.md"
    file.write_text(
        file.read_text().replace("tags:", "language: de\ntags:\n- mine").replace(BEGIN, f"Mine.\n\n{BEGIN}")
        + "\nBelow.\n"
    )
    save_readme(tmp_path, card(license="mit").replace("A title", "Another"))
    text = file.read_text()
    assert text.index("Mine.") < text.index(BEGIN) < text.index("# Another") < text.index(END) < text.index("Below.")
    data = ModelCard(text).data
    assert data.language == "de" and data.license == "mit" and data.tags == ["bhyt", "custom_code", "mine"]
    assert "A title" not in text
    # Once more changes nothing
    save_readme(tmp_path, card(license="mit").replace("A title", "Another"))
    assert file.read_text() == text


def test_a_card_without_marks_is_the_users_and_stays_above():
    merged = merge_card(card(), "# My model\n\nHand-written.\n")
    assert merged.index("Hand-written.") < merged.index(BEGIN) and ModelCard(merged).data.tags == [
        "bhyt",
        "custom_code",
    ]
    assert merge_card(card(), "") == merge_card(card(), None) == card()


def test_front_matter_that_cannot_be_read_is_one_line():
    with pytest.raises(ValueError, match="front matter of a card cannot be read"):
        merge_card(card(), "---\n{: [\n---\n\nText\n")


def test_front_matter_of_an_earlier_run_is_replaced_and_a_users_own_kept(tmp_path):
    save_readme(tmp_path, chat_card(base="someone/base", data="someone/chats"))
    file = tmp_path / "README.md"
    file.write_text(file.read_text().replace("tags:\n", "language: de\ntags:\n- mine\n", 1))
    save_readme(tmp_path, chat_card(norm_type=None, data="else/where"))
    data = ModelCard(file.read_text()).data
    assert data.tags == ["sft", "trl", "mine"] and data.language == "de"
    assert data.datasets == ["else/where"] and data.base_model is None


def test_the_record_of_front_matter_cannot_end_its_comment():
    text = card(license="a --> <!-- b")
    assert merge_card(card(), text) == card()


def test_a_licence_of_its_own_is_carried_over_with_name_and_link():
    link = "https://example.org/licence"
    licence = {"license": "other", "license_name": "llama3.2", "license_link": link}
    for text in card(**licence), chat_card(**licence):
        data = ModelCard(text).data.to_dict()
        assert {key: data[key] for key in LICENCE} == licence
