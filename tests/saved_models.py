"""Helpers of the tests that save and load: recognisable parameters, outputs, exact comparison, two steps of training."""

import torch
from conftest import TINY, tiny_model
from transformers import Trainer, TrainingArguments


def with_distinct_vectors(model):
    """Every parameter of one dimension gets a constant that no other has and that every dtype holds exactly."""
    with torch.no_grad():
        for number, parameter in enumerate(p for p in model.parameters() if p.ndim == 1):
            parameter.fill_((number + 1) / 64)
    return model


def outputs(model, token_ids):
    with torch.no_grad():
        return model.eval()(token_ids)[0]


def assert_states_equal(actual: dict, expected: dict):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


def train_two_steps(folder, resume: bool = False, seed: int = 0):
    """Two steps of the Trainer with a checkpoint after each; `resume` starts from the first of them."""
    rows = torch.randint(3, TINY["vocab_size"], (4, 8), generator=torch.Generator().manual_seed(3))
    trainer = Trainer(
        tiny_model(seed=seed),
        TrainingArguments(
            str(folder),
            max_steps=2,
            save_steps=1,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1") if resume else None)
    return trainer.model
