"""What training goes on from: a checkpoint that lacks something or was cut off is named, and never gone on from in silence."""

import json
import shutil

import pytest
import torch
from chat_runs import weights
from test_heal import grafted, heal  # noqa: F401

from checkpoints.resume import checkpoints, flaw, last_checkpoint, last_whole
from conversion.heal import Distillation


EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 4}


@pytest.fixture
def run(fine_tune):
    """A run of two steps, each with its checkpoint."""
    folder = fine_tune(**EVERY_STEP)
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-1", "checkpoint-2"]
    return folder


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "config.json"]
)
def test_a_file_cut_off_is_named_with_the_whole_checkpoint_before_it(run, fine_tune, name):
    cut(run / "checkpoint-2" / name)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    error = fine_tune(resume_from_checkpoint="last", code=2, **EVERY_STEP)
    assert f"checkpoint-2/{name} is" in error
    assert f"the newest whole checkpoint before it is {run / 'checkpoint-1'}, remove {run / 'checkpoint-2'}" in error
    assert error == fine_tune(resume_from_checkpoint=run / "checkpoint-2", code=2, **EVERY_STEP)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert last_whole(run) == run / "checkpoint-1"
    shutil.rmtree(run / "checkpoint-2")
    assert last_checkpoint(run) == run / "checkpoint-1"


def test_a_checkpoint_without_optimizer_is_gone_on_from_only_when_told(fine_tune, run, monkeypatch):
    whole = weights(run)
    (run / "checkpoint-1" / "optimizer.pt").unlink()
    shutil.rmtree(run / "checkpoint-2")
    error = fine_tune(resume_from_checkpoint="last", code=2, **EVERY_STEP)
    assert "checkpoint-1 lacks its optimizer (optimizer.pt): there is no whole checkpoint before it" in error
    assert "--fresh_optimizer True goes on from its weights" in error
    rates = []
    from sft.trainer import ChatTrainer

    step = ChatTrainer.training_step

    def watch(self, *arguments, **options):
        rates.append((self.state.global_step, self.optimizer.param_groups[0]["lr"], len(self.optimizer.state)))
        return step(self, *arguments, **options)

    monkeypatch.setattr(ChatTrainer, "training_step", watch)
    resumed = fine_tune(resume_from_checkpoint="last", fresh_optimizer=True, **EVERY_STEP)
    # The second of two steps of a line that falls to 0
    assert rates == [(1, pytest.approx(0.5e-2), 0)]
    assert any(not torch.equal(tensor, whole[name]) for name, tensor in weights(resumed).items())


def test_weights_saved_alone_are_no_checkpoint_to_go_on_from(fine_tune):
    fine_tune(save_only_model=True, **EVERY_STEP)
    error = fine_tune(resume_from_checkpoint="last", code=2, **EVERY_STEP)
    assert "checkpoint-2 lacks its optimizer" in error and "fresh_optimizer" in error


def test_a_fresh_optimizer_without_a_run_to_go_on_from_is_refused(fine_tune):
    assert "fresh_optimizer is about a run that goes on" in fine_tune(fresh_optimizer=True, code=2)


def test_a_folder_called_like_a_checkpoint_is_none(run):
    shutil.copytree(run / "checkpoint-1", run / "checkpoint-best")
    (run / "checkpoint-3").mkdir()
    assert last_checkpoint(run) == run / "checkpoint-2"


def checkpoint_of(folder, *files: str):
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("wb") as file:
            torch.save({}, file)
    return folder


FSDP = ["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata", "scheduler.pt", "rng_state_0.pth"]
LAYOUTS = {
    "fsdp, shares": FSDP,
    "fsdp, whole": ["pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.pt", "rng_state_0.pth"],
    "deepspeed": ["global_step1/zero_pp_rank_0_mp_rank_00_optim_states.pt", "global_step1/mp_rank_00_model_states.pt"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_of_fsdp_and_deepspeed_are_whole_and_named_where_cut_off(tmp_path, layout):
    whole = checkpoint_of(tmp_path / "checkpoint-1", *LAYOUTS[layout])
    assert flaw(whole) is None
    for number, name in enumerate(LAYOUTS[layout]):
        broken = checkpoint_of(tmp_path / f"checkpoint-{number + 2}", *LAYOUTS[layout])
        if name.endswith(".metadata"):
            (broken / name).unlink()
            assert "lacks .metadata" in flaw(broken) and name.split("/")[0] in flaw(broken)
        else:
            cut(broken / name)
            assert f"{broken / name} is damaged" in flaw(broken)


def test_a_checkpoint_without_random_numbers_is_named(tmp_path):
    files = ("model.safetensors.index.json", "optimizer.pt", "scheduler.pt")
    folder = checkpoint_of(tmp_path / "checkpoint-1", *files)
    (folder / files[0]).write_text(json.dumps({"weight_map": {}}))
    assert flaw(folder) == f"{folder} lacks its random numbers (rng_state.pth)"
    assert flaw(folder, fresh_optimizer=True) is None


def test_a_missing_share_of_the_weights_is_named(tmp_path):
    folder = checkpoint_of(tmp_path / "checkpoint-1", "optimizer.pt", "scheduler.pt")
    assert flaw(folder) == f"{folder} holds no weights"
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert flaw(folder) == f"{folder} lacks model-00001-of-00002.safetensors, which its index names"


@pytest.mark.parametrize("what", ["cut off", "without optimizer", "without state"])
def test_heal_goes_on_from_a_whole_checkpoint_alone(grafted, monkeypatch, what):  # noqa: F811
    original = Distillation.compute_loss

    def stop(self, *arguments, **keywords):
        if self.state.global_step == 4:
            raise KeyboardInterrupt
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(Distillation, "compute_loss", stop)
    with pytest.raises(KeyboardInterrupt):
        heal(grafted, "--save_steps", "3")
    kept = grafted / "healed.checkpoints"
    assert last_whole(kept) == kept / "checkpoint-3"
    shutil.copytree(kept / "checkpoint-3", kept / "checkpoint-4")
    if what == "cut off":
        cut(kept / "checkpoint-4" / "model.safetensors")
    elif what == "without optimizer":
        (kept / "checkpoint-4" / "optimizer.pt").unlink()
    else:
        # Written last, so this one was never finished
        (kept / "checkpoint-4" / "trainer_state.json").unlink()
        assert last_checkpoint(kept) == kept / "checkpoint-3"
        return
    with pytest.raises(
        ValueError, match="checkpoint-4.*the newest whole checkpoint before it is .*checkpoint-3, remove"
    ):
        heal(grafted, "--resume", "true")
