"""What every test shares: tiny models with fixed seeds, a byte-level tokenizer, and the way to the real data."""

import os
import subprocess
import sys
from pathlib import Path


# Read when huggingface_hub is imported
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_bhyt import BHyTLlamaConfig, BHyTLlamaForCausalLM


# Tiny models gain nothing from a second thread, and two threads that wait for each other slow a busy machine down
torch.set_num_threads(1)

REPOSITORY = Path(__file__).parent.parent
NORM_TYPES = ["bhyt", "bhyt_star", "rmsnorm", "peri_ln", "lns", "dyt"]
TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def pytest_addoption(parser):
    parser.addoption("--all-faults", action="store_true", help="let every file operation fail in turn, not a sample")
    parser.addoption("--all-mutations", action="store_true", help="try every mutated input, not a sample")


def shake(model, seed: int = 1):
    """Moves every parameter off its initial value, so that no test passes because gains are 1 or biases 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.rand(parameter.shape, generator=generator).to(parameter.dtype))
            else:
                parameter.mul_(3)
    return model


def tiny_model(norm_type: str = "bhyt", model_class=BHyTLlamaForCausalLM, seed: int = 0, **overrides):
    torch.manual_seed(seed)
    return shake(model_class(BHyTLlamaConfig(**{**TINY, "norm_type": norm_type, **overrides}))).eval()


def tiny_llama(seed: int = 0, **overrides) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return shake(LlamaForCausalLM(LlamaConfig(**{**TINY, **overrides}))).eval()


def run_without_package(code: str, cwd, *arguments: str, **environment: str) -> str:
    """Runs `code` in a fresh process that cannot import this project; returns what it printed."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    guard = (
        "import sys, importlib.abc\n"
        "class Hide(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('modeling_bhyt', 'checkpoints', 'conversion', 'evaluation', 'sft'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    env |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(Path(cwd) / "hf_modules"), **environment}
    done = subprocess.run(
        [sys.executable, "-c", guard + code, *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(params=NORM_TYPES)
def norm_type(request) -> str:
    return request.param


@pytest.fixture
def token_ids() -> torch.Tensor:
    return torch.randint(3, TINY["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data that BHYT_DATA names."""
    if not os.environ.get("BHYT_DATA"):
        pytest.skip("real data: set BHYT_DATA to its folder")
    return Path(os.environ["BHYT_DATA"])


# Fixtures of a module that needs what stands above
from chat_runs import base, batches, fine_tune, rows  # noqa: E402, F401
