"""Whose files lie in an OUTPUT: ours are replaced, anybody else's are never lost, whenever and however a command ends."""

import json

import pytest

from checkpoints.outputs import names_of_files, own_files, refuse_strangers, strangers


def write(folder, *names, **records):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    for name, record in records.items():
        (folder / f"{name}.json").write_text(json.dumps(record))


def test_a_folder_without_a_record_of_ours_is_all_strangers_though_its_names_are_usual(tmp_path):
    write(tmp_path, "config.json", "model.safetensors", "README.md", "LICENSE", ".cache/x", results={"mine": 1})
    assert own_files(tmp_path) is None
    assert [str(path) for path in strangers(tmp_path)] == ["config.json", "model.safetensors", "results.json"]
    assert strangers(tmp_path / "absent") == []


def test_strangers_are_what_the_record_does_not_list_and_folders_are_counted_once(tmp_path):
    write(
        tmp_path,
        "config.json",
        "a/one",
        "a/two",
        ".git/x",
        ".git/y",
        "tokenizer.json",
        ".gitattributes",
        "USE_POLICY.md",
    )
    write(
        tmp_path, conversion_report={"bhyt_version": "0", "files": ["config.json", "a/one", "conversion_report.json"]}
    )
    assert [str(path) for path in strangers(tmp_path)] == [".git", "a/two", "tokenizer.json"]
    with pytest.raises(ValueError, match=r"OUTPUT .* holds \.git/, a/two, tokenizer.json \(3 in all\)"):
        refuse_strangers(tmp_path, "OUTPUT")
    assert names_of_files(tmp_path / "a") == ["one", "two"]


def test_a_folder_with_an_older_record_is_known_by_names(tmp_path):
    write(tmp_path, "config.json", "model-00001-of-00002.safetensors", "modeling_bhyt.py", "LICENSE", "model.gguf")
    write(tmp_path, conversion_report={"bhyt_version": "0"})
    assert [str(path) for path in strangers(tmp_path)] == ["model.gguf"]
    assert strangers(tmp_path, always=["*.gguf"]) == []
