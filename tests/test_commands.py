"""The command line: one line and exit code 2 for bad input, nothing half-written, nothing overwritten unasked."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import REPOSITORY
from safetensors.torch import load_file
from test_graft import QUICK, graft, save_source
from transformers import AutoTokenizer, GenerationConfig

from conversion import __main__ as command
from conversion.arguments import GraftArguments, parse


def run(*words, monkeypatch=None, capsys=None):
    """Exit code and error output of `python -m conversion WORDS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["conversion", *map(str, words)])
    try:
        command.main()
        code = 0
    except SystemExit as error:
        code = error.code
    return code, capsys.readouterr()


@pytest.fixture
def conversion(monkeypatch, capsys):
    return lambda *words: run(*words, monkeypatch=monkeypatch, capsys=capsys)


@pytest.fixture
def source(tmp_path):
    save_source(tmp_path / "source")
    return tmp_path / "source"


TEXT = QUICK[QUICK.index("--calibration_text") + 1]
BAD_INPUT = {
    "no output": (["{source}"], "OUTPUT is missing"),
    "too much": (["{source}", "{output}", "third"], "unknown argument 'third'"),
    "upload nowhere": (["{source}", "{output}", "--private"], "give --push_to_hub name/model too"),
    "misspelt flag": (["{source}", "{output}", "--kapa", "3"], "unknown argument '--kapa'"),
    "no number": (["{source}", "{output}", "--kappa", "x"], "invalid float value: 'x'"),
    "negative": (["{source}", "{output}", "--kappa", "-1"], "kappa is -1.0: give a finite number above 0"),
    "zero lambda": (
        ["{source}", "{output}", "--mlp_lambda", "0"],
        "mlp_lambda is '0': give auto, or a finite number above 0",
    ),
    "list length": (["{source}", "{output}", "--mlp_lambda", "1", "2"], "mlp_lambda has 2 numbers for"),
    "no layer": (["{source}", "{output}", "--exact_variance_layers", "0,9"], "layers run from 0 to 2"),
    "no index": (["{source}", "{output}", "--exact_variance_layers", "-1"], "-1"),
    "estimator": (["{source}", "{output}", "--variance_estimator", "guess"], "invalid choice: 'guess'"),
    "no tokens": (["{source}", "{output}", "--num_calibration_tokens", "0"], "num_calibration_tokens is 0"),
    "long window": (
        ["{source}", "{output}", "--window_length", "999"],
        "window_length is 999, but the source has 256",
    ),
    "no text": (["{source}", "{output}", "--report_text", "absent.txt", "--window_length", "64"], "no text file at"),
    "short text": (
        ["{source}", "{output}", "--calibration_text", "{short}", "--window_length", "64"],
        "128 are needed: give more text",
    ),
    "no text, dry": (["{source}", "{output}", "--report_text", "absent.txt", *QUICK, "--dry_run"], "no text file at"),
    "calibrated text": (
        ["{source}", "{output}", *QUICK, "--report_text", TEXT + "[0:1]"],
        "report_text holds windows of",
    ),
    "output in source": (["{source}", "{source}/sub"], "choose another folder"),
    "source by another name": (["{source}", "{source}/../source", "--overwrite"], "choose another folder"),
    "no source": (["absent/folder/here", "{output}"], "no folder at absent/folder/here"),
    "source is output": (["{source}", "{source}"], "choose another folder"),
    "no yaml": (["{source}", "{output}", "--config", "absent.yaml"], "absent.yaml cannot be read"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2_and_leaves_nothing(case, source, tmp_path, conversion):
    (tmp_path / "short.txt").write_text("a few words")
    before = sorted(tmp_path.iterdir())
    words, reason = BAD_INPUT[case]
    places = {"source": source, "output": tmp_path / "out", "short": tmp_path / "short.txt"}
    code, printed = conversion("graft", *(word.format(**places) for word in words))
    lines = [line for line in printed.err.splitlines() if "error:" in line]
    assert code == 2 and len(lines) == 1 and reason in lines[0], printed.err
    assert "Traceback" not in printed.err and sorted(tmp_path.iterdir()) == before


def test_help_and_unknown_commands(conversion):
    code, printed = conversion("--help")
    assert code == 0 and "graft SOURCE OUTPUT" in printed.out
    code, printed = conversion("graft", "--help")
    assert code == 0 and "--exact_variance_layers" in printed.out
    assert conversion()[0] == 2 and conversion("grafft")[0] == 2


def test_an_existing_output_is_replaced_only_when_told_to(source, tmp_path, conversion):
    graft(source, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").stat().st_ino
    code, printed = conversion("graft", source, tmp_path / "out", *QUICK)
    assert code == 2 and "--overwrite" in printed.err
    assert (tmp_path / "out" / "model.safetensors").stat().st_ino == before
    assert conversion("graft", source, tmp_path / "out", *QUICK, "--overwrite")[0] == 0
    assert (tmp_path / "out" / "model.safetensors").stat().st_ino != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_stopped_upload_says_what_goes_on_with_it(source, tmp_path, conversion, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("conversion.__main__.publish", interrupted)
    code, printed = conversion(
        "graft", source, tmp_path / "out", *QUICK, "--license", "mit", "--push_to_hub", "someone/model"
    )
    assert code == 130 and "out someone/model` uploads it" in printed.err
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_card_that_could_not_be_kept_is_named_before_the_work(source, tmp_path, conversion):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("---\nlicense: [\n---\n")
    code, printed = conversion("graft", source, tmp_path / "out", *QUICK, "--overwrite")
    assert code == 2 and "README.md would be kept in the new card, but the front matter" in printed.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["README.md"]


def test_a_failure_half_way_leaves_the_old_output_and_no_scraps(source, tmp_path, conversion, monkeypatch):
    graft(source, tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(command, "save_report", fail)
    code, printed = conversion("graft", source, tmp_path / "out", *QUICK, "--overwrite")
    assert code == 2 and "error: no space left on device" in printed.err
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_dry_run_writes_nothing_and_says_what_would_be_done(source, tmp_path, conversion):
    code, printed = conversion("graft", source, tmp_path / "out", *QUICK, "--dry_run")
    assert code == 0 and "would copy 24 tensors and replace 6 norms" in printed.out
    assert sorted(tmp_path.iterdir()) == [source]


def test_yaml_gives_what_flags_give_and_flags_win(tmp_path):
    (tmp_path / "r.yaml").write_text("kappa: 5\nattention_lambda: 1\nexact_variance_layers: [0, 2]\nsource: a\n")
    parsed = parse(GraftArguments, ["--config", str(tmp_path / "r.yaml"), "--output", "b", "--kappa", "7"])
    assert (parsed.source, parsed.output, parsed.kappa, parsed.lambdas["attention"]) == ("a", "b", 7.0, [1.0])
    assert parsed.exact_layers == [0, 2]
    for words in (["--exact_variance_layers", "2,0"], ["--exact_variance_layers", "0", "2"]):
        assert parse(GraftArguments, ["a", "b", *words]).exact_layers == [0, 2]


BAD_YAML = [
    ("kapa: 3", "unknown key 'kapa'"),
    ("- 1", "not a mapping"),
    ("a: [", "cannot be read"),
    ("kappa: ten", "invalid float value: 'ten'"),
    ("kappa: true", "kappa is True"),
    ("window_length: 2.5", "window_length is 2.5"),
    ("attention_lambda: [a]", "attention_lambda is 'a': give auto"),
    ("calibration_text: 3", "calibration_text is 3: give a name"),
    ("dry_run: 3", "dry_run is 3: give true or false"),
    ("dtype: 3", "dtype is 3: choose from auto"),
    ("seed: null", "seed is None: give a whole number of at least 0"),
    ("report_text: [a]", "report_text is ['a']: give a name"),
]


@pytest.mark.parametrize("content,reason", BAD_YAML)
def test_a_bad_yaml_is_refused(tmp_path, capsys, content, reason):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(SystemExit) as caught:
        parse(GraftArguments, ["a", "b", "--config", str(tmp_path / "bad.yaml")])
    assert caught.value.code == 2 and reason in capsys.readouterr().err


def test_shipped_recipes_are_valid():
    recipes = sorted((REPOSITORY / "conversion" / "recipes").glob("*.yaml"))
    assert recipes and all(parse(GraftArguments, ["a", "b", "--config", str(recipe)]) for recipe in recipes)


def test_the_source_writes_its_own_text_and_the_report_takes_another_part(source, tmp_path):
    quick = QUICK[: QUICK.index("--calibration_text")]
    graft_flags = [*quick, "--seed", "3"]
    arguments = parse(GraftArguments, [str(source), "unused", *graft_flags])
    opened = command.read_source(str(source))
    opened.model.generation_config = GenerationConfig(repetition_penalty=5.0, no_repeat_ngram_size=1)
    texts = command.graft_texts(opened, arguments)
    windows = texts.windows(arguments.seed)
    calibration, held_out = windows["calibration"], windows["report"]
    assert calibration.shape == (8, 48) and held_out.shape == (4, 48)
    assert not any(torch.equal(a, b) for a in calibration for b in held_out)
    assert (calibration[:, 0] == AutoTokenizer.from_pretrained(source).eos_token_id).all()
    # The same text from a source whose generation settings would bend it
    again = command.graft_texts(command.read_source(str(source)), arguments).windows(arguments.seed)
    assert (
        torch.equal(calibration, again["calibration"])
        and texts.names["report"] == "text sampled from the source, another part"
    )


def test_a_named_text_is_split_between_calibration_and_report(source):
    arguments = parse(GraftArguments, [str(source), "unused", *QUICK])
    windows = command.graft_texts(command.read_source(str(source)), arguments).windows(arguments.seed)
    calibration, held_out = windows["calibration"], windows["report"]
    text = (REPOSITORY / "LICENSE").read_text()
    tokenizer = AutoTokenizer.from_pretrained(source)
    assert tokenizer.decode(torch.cat([calibration, held_out]).flatten()) == text[: 12 * 48]


def test_report_and_card_say_what_was_measured(source, tmp_path):
    graft(source, tmp_path / "out", "--exact_variance_layers", "1")
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["perplexity"]["ratio"] == pytest.approx(
        report["perplexity"]["model"] / report["perplexity"]["source"], rel=1e-9
    )
    assert report["exact_layers"] == [1] and len(report["sites"]) == 6
    assert [site["estimator_log_error"] is None for site in report["sites"]] == [True, False, True, True, True, False]
    assert report["source"]["files"]["model.safetensors"]["sha256"]
    for site in report["sites"]:
        assert 0 <= site["relative_output_error"] < 1 and 0 <= site["saturated_share"] <= 1
        gain = load_file(tmp_path / "out" / "model.safetensors")[
            f"model.layers.{site['layer']}.{'input' if site['site'] == 'attention' else 'post_attention'}_layernorm.weight"
        ]
        assert site["depth_effective"] == pytest.approx(
            gain.pow(2).mean().sqrt().item() * site["depth_nominal"], rel=1e-5
        )
    whole = "".join(path.read_text() for path in (tmp_path / "out").glob("*") if path.suffix in (".json", ".md"))
    assert str(tmp_path) not in whole
    card = (tmp_path / "out" / "README.md").read_text()
    assert "trust_remote_code=True" in card and f"{report['perplexity']['ratio']:.4f}" in card


def test_module_runs_from_the_shell_outside_the_checkout(source, tmp_path):
    """Through the editable install, as README says."""
    words = [sys.executable, "-m", "conversion", "graft", str(source), "out", *QUICK, "--dry_run"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "nothing was written" in done.stdout, done.stderr[-2000:]
