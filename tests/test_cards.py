"""Cards: front matter that parses whatever the source calls itself, and usage that fits the checkpoint."""

import pytest
from huggingface_hub import ModelCard

from model_cards.render import render_card


def card(base_model=None, has_chat_template=True, **source) -> str:
    report = {"source": {"name": "source", "license": None, "quantization": None, **source}}
    report |= {"command": "graft", "healing": None, "layers": None}
    return render_card("A title", "your-name/model", report, [("ratio", "1.0065")], base_model, has_chat_template)


@pytest.mark.parametrize("licence", ["apache-2.0", "llama3: community", "@x", "no", '"quoted"', "- list", "naïve 😀"])
def test_any_license_survives_the_front_matter(licence):
    assert ModelCard(card(license=licence)).data.license == licence


def test_what_is_unknown_is_left_out():
    data = ModelCard(card()).data
    assert data.license is None and data.base_model is None and data.tags == ["bhyt", "custom_code"]
    assert ModelCard(card(base_model="someone/model")).data.base_model == "someone/model"


def test_usage_asks_for_consent_and_fits_the_tokenizer():
    assert card().count("trust_remote_code=True") == 2 and "apply_chat_template" in card()
    assert "apply_chat_template" not in card(has_chat_template=False)
    assert "| ratio | 1.0065 |" in card() and "Q4_1 blocks, dequantised" in card(quantization="Q4_1")
