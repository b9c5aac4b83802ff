"""The protocol of evaluation/perplexity.py, held to its words."""

import json
import math

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from conftest import tiny_llama, tiny_model
from tokenizers.processors import TemplateProcessing

from evaluation.perplexity import Comparison, Perplexity, adds_bos, compare, perplexity, read_documents, text_windows


def bos_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return tokenizer


def test_documents_are_joined_by_eos_and_cut_without_overlap():
    tokenizer = byte_tokenizer()
    windows = text_windows(tokenizer, ["abc", "defgh", "ij"], 4)
    assert tokenizer.batch_decode(windows) == ["abc<eos>", "defg", "h<eos>ij"]


@pytest.mark.parametrize("make,expected", [(byte_tokenizer, False), (bos_tokenizer, True)])
def test_a_window_begins_with_bos_exactly_where_the_tokenizer_puts_one(make, expected):
    tokenizer = make()
    windows = text_windows(tokenizer, ["some text that is long enough"], 8, 3)
    assert windows.shape == (3, 8) and adds_bos(tokenizer) == expected
    assert [(row[0] == 1).item() for row in windows] == [expected] * 3
    assert (windows[:, 1:] != 1).all()


def test_too_little_text_is_refused_with_what_there_is():
    with pytest.raises(ValueError, match="holds 1 windows of 8 tokens, 2 are needed"):
        text_windows(byte_tokenizer(), ["ten letters"], 8, 2)


def test_perplexity_is_the_exponential_of_the_mean_loss_of_every_token_but_the_first():
    model, windows = tiny_llama(), torch.randint(3, 300, (3, 10), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = torch.stack([model(row[None], labels=row[None]).loss for row in windows]).mean()
    result = perplexity(model, windows)
    assert result.num_tokens == 27 and result.perplexity == pytest.approx(math.exp(expected), rel=1e-5)


def test_batch_size_makes_no_difference():
    model, windows = tiny_model(), torch.randint(3, 300, (7, 16), generator=torch.Generator().manual_seed(0))
    results = [perplexity(model, windows, batch_size).loss for batch_size in (1, 2, 4, 7)]
    assert max(results) - min(results) < 1e-6


def test_comparison_with_itself_costs_nothing_and_with_another_model_something():
    windows = torch.randint(3, 300, (3, 16), generator=torch.Generator().manual_seed(0))
    model = tiny_llama()
    same, other = compare(model, model, windows), compare(model, tiny_llama(seed=9), windows)
    assert same.ratio == 1 and same.kl == pytest.approx(0, abs=1e-7) and other.kl > 0.01
    with torch.no_grad():
        p, q = (m(windows).logits[:, :-1].double().log_softmax(-1) for m in (model, tiny_llama(seed=9)))
    assert other.kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-5)


def test_a_hopeless_loss_is_infinite_perplexity_and_no_overflow():
    assert Perplexity(1e4, 1, 1, 2).perplexity == math.inf
    assert Comparison(Perplexity(3.0, 1, 1, 2), Perplexity(1e4, 1, 1, 2), 1.0).ratio == math.inf


def test_windows_beyond_the_context_are_refused():
    with pytest.raises(ValueError, match="windows of 300 tokens do not fit the model's 256 positions"):
        perplexity(tiny_model(), torch.zeros(1, 300, dtype=torch.long))


def test_documents_come_from_text_and_jsonl_and_slices(tmp_path):
    lines = [json.dumps({"text": f"document {n}\u2028 naïve 😀"}, ensure_ascii=False) for n in range(5)]
    (tmp_path / "five.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "one.txt").write_text("one\ntwo", encoding="utf-8")
    assert len(read_documents(str(tmp_path / "five.jsonl"))) == 5
    assert read_documents(str(tmp_path / "five.jsonl[1:3]"))[0] == "document 1\u2028 naïve 😀"
    assert [len(read_documents(str(tmp_path / f"five.jsonl{part}"))) for part in ("[:2]", "[2:]")] == [2, 3]
    assert read_documents(str(tmp_path / "one.txt")) == ["one\ntwo"]


@pytest.mark.parametrize("content", ["not json", '{"other": 1}', '{"text": null}', '["text"]'])
def test_a_bad_line_is_named(tmp_path, content):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' + content)
    with pytest.raises(ValueError, match="line 2: not a JSON object with a string 'text'"):
        read_documents(str(tmp_path / "bad.jsonl"))


def test_missing_and_empty_texts_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"na\xefve")
    cases = (("empty.txt", "holds no text"), ("absent.txt", "no text file at"), ("latin.txt", "is not UTF-8 text"))
    for name, message in cases:
        with pytest.raises(ValueError, match=message):
            read_documents(str(tmp_path / name))
