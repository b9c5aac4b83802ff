"""Training as people run it: the Trainer, PEFT, TRL and gradient checkpointing, on every norm where that is cheap."""

import copy
import warnings

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from conftest import NORM_TYPES, tiny_model
from datasets import Dataset
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import modeling_bhyt
from modeling_bhyt import BHyTLlamaForCausalLM


NORMS = ["input_layernorm", "post_attention_layernorm"]
QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """The Trainer makes its output folder wherever it stands."""
    monkeypatch.chdir(tmp_path)


def backward(model, token_ids, **kwargs):
    """Loss and every gradient, by name, of one training step's forward and backward pass."""
    model.train().zero_grad()
    loss = model(token_ids, labels=token_ids, use_cache=False, **kwargs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def logits_of(model, token_ids):
    with torch.no_grad():
        return model.eval()(token_ids).logits


def train(model, token_ids, **arguments):
    """A Trainer that has run over `token_ids`, rows of a data set, one step unless told otherwise."""
    rows = [{"input_ids": row, "labels": row} for row in token_ids]
    arguments = {"max_steps": 1, "learning_rate": 1e-2, "per_device_train_batch_size": 2, **QUIET, **arguments}
    trainer = Trainer(model, TrainingArguments("unused", **arguments), train_dataset=rows)
    trainer.train()
    return trainer


def with_lora(model, **kwargs):
    """LoRA adapters off their zero start."""
    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **kwargs))


def norm_parameters(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "norm" in name}


def assert_weight_decay_spares_norms(trainer):
    """Ten steps at a large decay and gradients of zero leave every norm parameter as it is, and shrink a matrix."""
    optimizer, model = trainer.create_optimizer(), trainer.model
    assert any(group["weight_decay"] == 1 for group in optimizer.param_groups)
    before = norm_parameters(model)
    decayed = {id(p): p.detach().clone() for group in optimizer.param_groups[:1] for p in group["params"]}
    for _ in range(10):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in norm_parameters(model).items())
    assert decayed and not any(
        torch.equal(decayed[id(p)], p) for p in model.parameters() if id(p) in decayed and decayed[id(p)].any()
    )


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_checkpointed_activations_leave_loss_and_gradients_as_they_are(norm_type, lora, token_ids):
    model = tiny_model(norm_type, num_hidden_layers=2)
    plain = with_lora(copy.deepcopy(model), target_modules="all-linear") if lora else copy.deepcopy(model)
    expected_loss, expected = backward(plain, token_ids)
    for use_reentrant in True, False:
        checkpointed = copy.deepcopy(model)
        # Called gradient_checkpointing_enable before transformers 5.24
        enable = getattr(checkpointed, "activation_checkpointing_enable", checkpointed.gradient_checkpointing_enable)
        enable({"use_reentrant": use_reentrant})
        calls = []
        # Before it, because a recomputation stops as soon as it has what the backward pass needs
        checkpointed.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        if lora:
            checkpointed = with_lora(checkpointed, target_modules="all-linear")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="None of the inputs have requires_grad")
            loss, gradients = backward(checkpointed, token_ids)
        assert len(calls) == 2
        torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-5)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-5)
        assert all(gradient.any() for name, gradient in gradients.items() if "lora" in name)


@pytest.mark.parametrize(
    "head", ["ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
)
def test_every_head_trains_with_a_gradient_for_every_trainable_parameter(norm_type, head, token_ids):
    model = tiny_model(norm_type, getattr(modeling_bhyt, f"BHyTLlama{head}"), num_labels=3, learnable_variance=True)
    labels = {
        "ForCausalLM": {"labels": token_ids},
        "ForSequenceClassification": {"labels": torch.tensor([0, 2])},
        "ForTokenClassification": {"labels": token_ids % 3},
        "ForQuestionAnswering": {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
    }[head]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = copy.deepcopy(model.state_dict())
    loss = model.train()(token_ids, **labels).loss
    loss.backward()
    optimizer.step()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name
        assert not torch.equal(parameter, before[name]), name


def test_constants_never_move_in_training_even_where_something_unfroze_them(token_ids):
    model = tiny_model(learnable_lambda=False).requires_grad_(True)
    before = norm_parameters(model)
    train(model, token_ids, weight_decay=0.5)
    for name, tensor in norm_parameters(model).items():
        constant = name.endswith("lam") or "variance_" in name
        assert torch.equal(tensor, before[name]) is constant, name


def test_weight_decay_spares_every_norm_parameter(norm_type):
    model = tiny_model(norm_type, learnable_variance=True)
    arguments = TrainingArguments("unused", weight_decay=1, learning_rate=1e-2, **QUIET)
    assert_weight_decay_spares_norms(Trainer(model, arguments))


def test_weight_decay_spares_norm_parameters_saved_with_an_adapter(norm_type):
    model = with_lora(tiny_model(norm_type), target_modules="all-linear", modules_to_save=NORMS)
    arguments = TrainingArguments("unused", weight_decay=1, learning_rate=1e-2, **QUIET)
    assert_weight_decay_spares_norms(Trainer(model, arguments))


def test_number_of_items_in_the_batch_is_the_loss_divisor(token_ids):
    model = tiny_model()
    mean, _ = backward(model, token_ids)
    num_targets = token_ids[:, 1:].numel()
    divided, _ = backward(model, token_ids, num_items_in_batch=torch.tensor(4 * num_targets))
    torch.testing.assert_close(4 * divided, mean)


def test_accumulated_gradients_train_as_one_batch_of_rows_of_unequal_length(token_ids):
    rows = [token_ids[0, :3], token_ids[1], token_ids[0], token_ids[1, :6]]
    width = max(len(row) for row in rows)
    padded = [
        {
            "input_ids": torch.nn.functional.pad(row, (0, width - len(row))),
            "attention_mask": torch.nn.functional.pad(torch.ones_like(row), (0, width - len(row))),
            "labels": torch.nn.functional.pad(row, (0, width - len(row)), value=-100),
        }
        for row in rows
    ]
    states = []
    for size, accumulated in (4, 1), (1, 4):
        model = tiny_model()
        arguments = TrainingArguments(
            "unused",
            max_steps=1,
            optim="sgd",
            learning_rate=0.1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulated,
            **QUIET,
        )
        Trainer(model, arguments, train_dataset=padded).train()
        states.append(model.state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("norm_type", "targets"),
    [("bhyt", ["q_proj", "v_proj"]), *((norm_type, "all-linear") for norm_type in NORM_TYPES)],
)
def test_trained_adapter_with_norms_is_reloaded_and_merged_unchanged(tmp_path, norm_type, targets, token_ids):
    base = tiny_model(norm_type)
    base.save_pretrained(tmp_path / "base")
    adapted = with_lora(
        BHyTLlamaForCausalLM.from_pretrained(tmp_path / "base"), target_modules=targets, modules_to_save=NORMS
    )
    train(adapted, token_ids)
    expected = logits_of(adapted, token_ids)
    adapted.save_pretrained(tmp_path / "adapter")

    reloaded = PeftModel.from_pretrained(BHyTLlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(logits_of(reloaded, token_ids), expected, rtol=0, atol=2e-5)
    merged = reloaded.merge_and_unload()
    torch.testing.assert_close(logits_of(merged, token_ids), expected, rtol=0, atol=2e-5)
    merged.save_pretrained(tmp_path / "merged")
    saved = BHyTLlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(saved, token_ids), expected, rtol=0, atol=2e-5)
    for (name, before), after in zip(base.named_parameters(), saved.parameters()):
        if any(norm in name for norm in NORMS):
            assert torch.equal(before, after) is ("variance_" in name), name


@pytest.mark.parametrize("estimator", ["uniform_attention", "published"])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["v_proj"]},
        {"target_modules": "all-linear", "modules_to_save": ["input_layernorm", "post_attention_layernorm"]},
    ],
    ids=["projection", "all and norms"],
)
def test_under_lora_a_refresh_gives_the_constants_of_the_merged_model(options, estimator):
    model = tiny_model(attention_bias=True, variance_estimator=estimator)
    bounds = model.depth_bounds()
    adapted = get_peft_model(model, LoraConfig(r=4, **options))
    inner = adapted.get_base_model()
    assert inner.depth_bounds() == bounds
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "variance_" not in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    before = inner.variance_constants()
    changes = inner.refresh_variance_constants()
    for n, (ratio, offset) in inner.variance_constants().items():
        assert ratio == before[n][0] and offset == pytest.approx(changes[n][1], rel=1e-6)
    assert all(old != new for old, new in changes.values())
    merged = adapted.merge_and_unload()
    for _, (old, new) in merged.refresh_variance_constants().items():
        assert new == pytest.approx(old, rel=1e-6)


def test_a_refresh_changes_the_trained_copy_of_a_norm_and_leaves_the_original(token_ids):
    model = tiny_model()
    before = model.variance_constants()
    norms = ["input_layernorm", "post_attention_layernorm"]
    adapted = get_peft_model(model, LoraConfig(target_modules=["v_proj"], modules_to_save=norms))
    inner = adapted.get_base_model()
    inner.set_variance_constants(dict.fromkeys(before, (2.0, 3.0)))
    assert set(inner.variance_constants().values()) == {(2.0, 3.0)}
    with adapted.disable_adapter():
        assert inner.variance_constants() == before


@pytest.mark.parametrize(
    "adapter",
    [
        IA3Config(target_modules=["v_proj"], feedforward_modules=[]),
        LoraConfig(target_modules=["v_proj"], use_dora=True),
    ],
    ids=["IA3", "DoRA"],
)
def test_under_another_adapter_a_refresh_is_refused_and_changes_nothing(adapter):
    inner = get_peft_model(tiny_model(), adapter).get_base_model()
    before = inner.variance_constants()
    with pytest.raises(ValueError, match="merge it first"):
        inner.refresh_variance_constants()
    assert inner.variance_constants() == before


def test_constants_saved_with_an_adapter_get_no_gradient_although_peft_unfreezes_them(token_ids):
    model = with_lora(tiny_model(), target_modules="all-linear", modules_to_save=NORMS)
    _, gradients = backward(model, token_ids)
    unused = {name for name, p in model.named_parameters() if p.requires_grad} - gradients.keys()
    assert len(unused) == 6 and all("variance_" in name for name in unused)


CONVERSATIONS = [
    {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": str(n)}]} for n in range(4)
]
TEXTS = [{"text": f"the number {n} comes before {n + 1}"} for n in range(4)]


@pytest.mark.parametrize("from_folder", [False, True], ids=["model", "folder"])
@pytest.mark.parametrize("rows", [TEXTS, CONVERSATIONS], ids=["text", "chat"])
def test_sft_trainer_trains_and_logs_the_loss_of_our_own_logits(tmp_path, from_folder, rows):
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    trainer = SFTTrainer(
        str(tmp_path / "base") if from_folder else copy.deepcopy(model),
        SFTConfig(
            str(tmp_path / "out"),
            bf16=False,
            max_steps=1,
            logging_steps=1,
            learning_rate=1e-2,
            weight_decay=0.1,
            per_device_train_batch_size=4,
            **QUIET,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=byte_tokenizer(),
    )
    assert type(trainer.model) is BHyTLlamaForCausalLM
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    with torch.no_grad():
        expected = model(**batch).loss
    logged = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert logged == pytest.approx(expected.item(), abs=1e-3)

    trainer.save_model()
    saved = BHyTLlamaForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(logits_of(saved, ids), logits_of(trainer.model, ids), rtol=0, atol=1e-6)
    assert not torch.allclose(logits_of(saved, ids), logits_of(model, ids))
    assert not any("norm" in name for name in trainer.get_decay_parameter_names(trainer.model))


def test_sft_trainer_trains_an_adapter_with_norms(tmp_path):
    trainer = SFTTrainer(
        tiny_model(),
        SFTConfig(str(tmp_path), bf16=False, max_steps=1, learning_rate=1e-2, weight_decay=1, **QUIET),
        train_dataset=Dataset.from_list(CONVERSATIONS),
        processing_class=byte_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", modules_to_save=NORMS),
    )
    before = norm_parameters(trainer.model)
    trainer.train()
    after = norm_parameters(trainer.model)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert any(name.endswith("lam") for name in moved) and any(name.endswith("weight") for name in moved)
    assert not any("variance_" in name or "original_module" in name for name in moved)
    assert_weight_decay_spares_norms(
        SFTTrainer(
            trainer.model,
            trainer.args,
            train_dataset=Dataset.from_list(CONVERSATIONS),
            processing_class=byte_tokenizer(),
        )
    )
