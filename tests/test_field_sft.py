"""python -m sft loses no work: what would fail at the end fails before the first step, a stopped run leaves what goes on."""

import signal

import pytest
import torch
from chat_bases import save_base
from conftest import tiny_model
from peft import PeftModel
from peft.tuners.lora import LoraModel

from modeling_bhyt import BHyTLlamaForCausalLM
from sft.saving import MERGE_TOLERANCE
from sft.trainer import ChatTrainer


EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 4}


@pytest.fixture
def signalled(monkeypatch):
    """Sends this process signals in the first step of training."""

    def plan(*numbers: int):
        step = ChatTrainer.training_step

        def interrupted(self, *arguments, **options):
            for number in numbers if self.state.global_step == 0 else ():
                signal.raise_signal(number)
            return step(self, *arguments, **options)

        monkeypatch.setattr(ChatTrainer, "training_step", interrupted)

    return plan


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_training_after_the_step_with_a_checkpoint_and_its_own_code(
    fine_tune, tmp_path, signalled, number
):
    former = signal.getsignal(number)
    signalled(number)
    error = fine_tune(code=128 + number, num_train_epochs=2)
    assert "stopped after step 1: go on with --resume_from_checkpoint last" in error
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert signal.getsignal(number) is former


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_was_ignored_stays_ignored_in_training(fine_tune, signalled, number):
    former = signal.signal(number, signal.SIG_IGN)
    try:
        signalled(number)
        assert (fine_tune() / "model.safetensors").is_file()
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, former)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_training_at_once(fine_tune, tmp_path, signalled, second):
    signalled(signal.SIGTERM, second)
    assert "interrupted: there is no checkpoint yet" in fine_tune(code=128 + second)
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 4096}], ids=["rows", "packed"])
def test_batches_that_are_all_dropped_are_refused_with_the_reason(fine_tune, tmp_path, options):
    rows = 1 if options else 8
    error = fine_tune(code=2, per_device_train_batch_size=9, dataloader_drop_last=True, **options)
    assert f"dataloader_drop_last drops the last batch that is not full, and {rows} rows fill none of 9" in error
    assert not (tmp_path / "out").exists()


class Opaque(torch.Tensor):
    """A tensor as torchao makes them: dtype and shape of what it stands for, and no numbers that can be read."""

    @staticmethod
    def __new__(cls, stood_for):
        return torch.Tensor._make_wrapper_subclass(cls, stood_for.shape, dtype=stood_for.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        if function is torch.ops.aten.detach.default:
            return arguments[0]
        raise NotImplementedError(f"{cls.__name__} dispatch: {function}")


def test_constants_are_not_refreshed_from_weights_that_cannot_be_read():
    model = tiny_model(variance_estimator="uniform_attention")
    before = model.variance_constants()
    layer = model.model.layers[1].self_attn
    layer.v_proj.weight = torch.nn.Parameter(Opaque(layer.v_proj.weight.detach()), requires_grad=False)
    with pytest.raises(ValueError, match="layer 1: weights that are quantised"):
        model.refresh_variance_constants()
    assert model.variance_constants() == before


LORA = {"use_peft": True, "lora_r": 4}
ENDS = ["embed_tokens", "lm_head"]


@pytest.mark.parametrize("plain", [False, True], ids=["bhyt", "llama"])
@pytest.mark.parametrize("targets", [*([end] for end in ENDS), ["q_proj", *ENDS], r".*(q_proj|embed_\w+)"], ids=str)
def test_an_adapter_on_one_end_of_tied_embeddings_is_refused_before_training(fine_tune, tmp_path, targets, plain):
    base = save_base(tmp_path / "tied", plain=plain, tie_word_embeddings=True)
    error = fine_tune(code=2, base=base, lora_target_modules=targets, **LORA)
    # TRL takes no adapter on a head at all
    assert "are one tensor (tie_word_embeddings)" in error or "adapter to `lm_head` is not supported" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tied", "targets"),
    [
        (True, ["all-linear"]),
        (True, [r".*\.(q|o)_proj"]),
        (False, ["q_proj", "embed_tokens"]),
        (False, ["embed_tokens"]),
    ],
    ids=str,
)
def test_a_merged_model_computes_what_its_adapter_does(fine_tune, tmp_path, token_ids, tied, targets):
    base = save_base(tmp_path / "start", tie_word_embeddings=tied)
    folder = fine_tune(base=base, lora_target_modules=targets, **LORA)
    adapted = PeftModel.from_pretrained(BHyTLlamaForCausalLM.from_pretrained(base), folder / "adapter").eval()
    merged = BHyTLlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected, found, start = (
            model(token_ids).logits for model in (adapted, merged, BHyTLlamaForCausalLM.from_pretrained(base))
        )
    assert (found - expected).abs().max() <= MERGE_TOLERANCE * expected.abs().max()
    assert (start - expected).abs().max() > 10 * MERGE_TOLERANCE * expected.abs().max()


def test_a_merge_that_changes_the_model_is_refused_and_the_trained_weights_stay(fine_tune, tmp_path, monkeypatch):
    merge_honestly = LoraModel.merge_and_unload

    def merge_wrongly(self, *arguments, **options):
        merged = merge_honestly(self, *arguments, **options)
        merged.model.embed_tokens.weight.data.mul_(1.5)
        return merged

    monkeypatch.setattr(LoraModel, "merge_and_unload", merge_wrongly)
    error = fine_tune(code=2, **LORA)
    assert "the merged model is not the adapter's: logits differ by" in error
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "out" / ".unfinished" / "adapter_model.safetensors").is_file()
