"""A saved folder is all that another process needs: code, weights and names, without the package or a network."""

import json
import shutil

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from conftest import NORM_TYPES, TINY, run_without_package, tiny_model
from saved_models import assert_states_equal, outputs, train_two_steps, with_distinct_vectors
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import modeling_bhyt
from modeling_bhyt.configuration_bhyt import AUTO_MAP


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = {
    "AutoModel": AutoModel,
    "AutoModelForCausalLM": AutoModelForCausalLM,
    "AutoModelForSequenceClassification": AutoModelForSequenceClassification,
    "AutoModelForTokenClassification": AutoModelForTokenClassification,
    "AutoModelForQuestionAnswering": AutoModelForQuestionAnswering,
}
CODE_FILES = {"configuration_bhyt.py", "constants_bhyt.py", "modeling_bhyt.py", "normalization_bhyt.py"}

# Runs without the package and without a network, in a folder that holds token_ids.pt and every saved model
FRESH_PROCESS = """
import json, os, socket
from pathlib import Path
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

calls = []
def blocked(*args, **kwargs):
    calls.append(repr(args))
    raise OSError("the network is blocked")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = blocked

sys.stdin.close()
results = {"refusals": [], "causal": {}, "again": {}, "heads": {}}
for auto in AutoConfig, AutoModelForCausalLM:
    try:
        auto.from_pretrained("causal/bhyt-float32")
        results["refusals"].append("none")
    except ValueError as error:
        results["refusals"].append(str(error))

token_ids = torch.load("token_ids.pt")

def outputs(folder, auto="AutoModelForCausalLM"):
    model, info = getattr(transformers, auto).from_pretrained(
        str(folder), dtype="auto", trust_remote_code=True, output_loading_info=True
    )
    with torch.no_grad():
        output = model(token_ids)
    return model, {
        "class": type(model).__name__,
        "missing": sorted(info["missing_keys"]),
        "state": model.state_dict(),
        "frozen": sorted(name for name, p in model.named_parameters() if not p.requires_grad),
        "output": output[0],
    }

for folder in sorted(Path("causal").iterdir()):
    model, results["causal"][folder.name] = outputs(folder)
    if folder.name.endswith("float32"):
        model.save_pretrained(f"again/{folder.name}")
        results["again"][folder.name] = outputs(f"again/{folder.name}")[1]
for auto in json.loads(sys.argv[1]):
    results["heads"][auto] = {
        "own": outputs(f"heads/{auto}", auto)[1], "causal": outputs("causal/bhyt-float32", auto)[1]
    }
for name in "a/model", "b/model", "runs/checkpoint-2":
    results[name] = outputs(name)[1]
tokenizer = transformers.AutoTokenizer.from_pretrained("runs/checkpoint-2", trust_remote_code=True)
generator = transformers.pipeline(
    "text-generation", "runs/checkpoint-2", tokenizer=tokenizer, trust_remote_code=True, device="cpu"
)
results["text"] = generator("ab", max_new_tokens=4, do_sample=False)[0]["generated_text"]
results["calls"] = calls
torch.save(results, "results.pt")
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Everything saved here, and what a process without the package read from it."""
    root = tmp_path_factory.mktemp("fresh")
    token_ids = torch.randint(3, TINY["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(5))
    torch.save(token_ids, root / "token_ids.pt")
    expected = {"causal": {}, "heads": {}}
    for norm_type in NORM_TYPES:
        for dtype in DTYPES:
            name = f"{norm_type}-{str(dtype).removeprefix('torch.')}"
            model = with_distinct_vectors(tiny_model(norm_type)).to(dtype)
            model.save_pretrained(root / "causal" / name)
            # `to` rounds the rotary frequencies, which no folder holds
            loaded = AutoModelForCausalLM.from_pretrained(root / "causal" / name, dtype="auto")
            expected["causal"][name] = {"state": model.state_dict(), "output": outputs(loaded, token_ids)}
    for auto in HEADS:
        model = tiny_model(model_class=getattr(modeling_bhyt, AUTO_MAP[auto].split(".")[1]), num_labels=3)
        model.save_pretrained(root / "heads" / auto)
        expected["heads"][auto] = {"state": model.state_dict(), "output": outputs(model, token_ids)}

    for name in "a", "b":
        shutil.copytree(root / "causal/bhyt-float32", root / name / "model")
    code = root / "b/model/normalization_bhyt.py"
    assert "torch.tanh(" in code.read_text()
    code.write_text(code.read_text().replace("torch.tanh(", "2 * torch.tanh("))
    model = with_distinct_vectors(tiny_model())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.mul_(2)
            layer.post_attention_layernorm.weight.mul_(2)
    expected["b/model"] = outputs(model, token_ids)
    expected["runs/checkpoint-2"] = outputs(train_two_steps(root / "runs"), token_ids)

    byte_tokenizer().save_pretrained(root / "runs/checkpoint-2")

    run_without_package(FRESH_PROCESS, root, json.dumps(list(HEADS)))
    return root, expected, torch.load(root / "results.pt")


def test_a_process_without_the_package_reads_every_tensor_bit_for_bit_and_gives_equal_logits(fresh):
    _, expected, results = fresh
    assert len(results["causal"]) == len(NORM_TYPES) * len(DTYPES)
    for name, saved in expected["causal"].items():
        assert_states_equal(results["causal"][name]["state"], saved["state"])
        assert torch.equal(results["causal"][name]["output"], saved["output"]), name


def test_a_folder_saved_again_by_such_a_process_carries_code_and_a_complete_local_auto_map(fresh, token_ids):
    root, expected, results = fresh
    for norm_type in NORM_TYPES:
        name = f"{norm_type}-float32"
        folder = root / "again" / name
        assert {path.name for path in folder.glob("*.py")} == CODE_FILES
        assert json.loads((folder / "config.json").read_text())["auto_map"] == AUTO_MAP
        assert torch.equal(results["again"][name]["output"], expected["causal"][name]["output"])
        assert_states_equal(
            AutoModelForCausalLM.from_pretrained(folder).state_dict(), expected["causal"][name]["state"]
        )


def test_config_names_our_class_our_type_and_every_auto_class_whatever_was_saved(fresh):
    root, _, _ = fresh
    for auto in HEADS:
        config = json.loads((root / "heads" / auto / "config.json").read_text())
        assert config["auto_map"] == AUTO_MAP and set(AUTO_MAP) == {"AutoConfig", *HEADS}
        assert config["model_type"] == "bhyt_llama"
        assert config["architectures"] == [AUTO_MAP[auto].split(".")[1]]


@pytest.mark.parametrize("auto", HEADS)
def test_every_head_loads_from_its_own_folder_and_from_a_causal_one(fresh, auto):
    root, expected, results = fresh
    saved = expected["heads"][auto]
    in_package = HEADS[auto].from_pretrained(root / "heads" / auto)
    for state in in_package.state_dict(), results["heads"][auto]["own"]["state"]:
        assert_states_equal(state, saved["state"])
    assert torch.equal(results["heads"][auto]["own"]["output"], saved["output"])
    assert results["heads"][auto]["own"]["missing"] == []

    from_causal, info = HEADS[auto].from_pretrained(root / "causal/bhyt-float32", output_loading_info=True)
    missing = results["heads"][auto]["causal"]["missing"]
    assert missing == sorted(info["missing_keys"])
    assert all(name.startswith(("score.", "qa_outputs.")) for name in missing)
    base = expected["causal"]["bhyt-float32"]["state"]
    for state in from_causal.state_dict(), results["heads"][auto]["causal"]["state"]:
        shared = {("model." if auto == "AutoModel" else "") + name: t for name, t in state.items()}
        assert all(torch.equal(tensor, base[name]) for name, tensor in shared.items() if name not in missing)


def test_code_is_not_run_without_consent(fresh):
    assert all("trust_remote_code=True" in message for message in fresh[2]["refusals"])
    assert len(fresh[2]["refusals"]) == 2


def test_a_local_folder_loads_without_a_network_call(fresh):
    assert fresh[2]["calls"] == []


def test_two_folders_of_one_name_run_each_its_own_code(fresh):
    _, expected, results = fresh
    assert torch.equal(results["a/model"]["output"], expected["causal"]["bhyt-float32"]["output"])
    assert torch.equal(results["b/model"]["output"], expected["b/model"])
    assert not torch.equal(results["a/model"]["output"], results["b/model"]["output"])


def test_a_trainer_checkpoint_loads_in_a_process_without_the_package(fresh):
    root, expected, results = fresh
    assert torch.equal(results["runs/checkpoint-2"]["output"], expected["runs/checkpoint-2"])
    assert {path.name for path in (root / "runs/checkpoint-1").glob("*.py")} == CODE_FILES


def test_the_text_generation_pipeline_runs_in_a_process_without_the_package(fresh):
    root, _, results = fresh
    tokenizer = byte_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(root / "runs/checkpoint-2")
    prompt = tokenizer("ab", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert results["text"] == tokenizer.decode(ids[0], skip_special_tokens=True)


def test_constants_are_frozen_in_a_process_without_the_package(fresh):
    frozen = fresh[2]["causal"]["bhyt-float32"]["frozen"]
    assert frozen == sorted(name for name in fresh[1]["causal"]["bhyt-float32"]["state"] if "variance_" in name)
