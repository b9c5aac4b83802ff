"""A token's output depends on its past alone, however it is fed, and no module keeps anything between calls."""

import copy
import dataclasses

import pytest
import torch
from conftest import tiny_model
from transformers import StaticCache


every_attention = pytest.mark.parametrize("attention", ["sdpa", "eager"])


def logits_of(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, **inputs).logits


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@every_attention
def test_prefill_equals_steps_chunks_and_static_cache(norm_type, attention, token_ids):
    model = tiny_model(norm_type, attn_implementation=attention)
    expected = logits_of(model, token_ids)
    for lengths in ([1] * 12, [5, 7], [11, 1]):
        for cache in (None, StaticCache(config=model.config, max_cache_len=20)):
            pieces = []
            for piece in token_ids.split(lengths, dim=1):
                with torch.no_grad():
                    output = model(piece, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                pieces.append(output.logits)
            assert_close(torch.cat(pieces, dim=1), expected)


def padded(ids, length, side, filler=0):
    """(1, length) ids, mask and positions, `ids` at one side and `filler` at the other."""
    padding = torch.full((length - len(ids),), filler)
    real, mask = torch.ones(len(ids), dtype=torch.long), torch.zeros_like(padding)
    order = (lambda pad, own: [pad, own]) if side == "left" else (lambda pad, own: [own, pad])
    mask = torch.cat(order(mask, real))
    return torch.cat(order(padding, ids))[None], mask[None], (mask.cumsum(0) - 1).clamp(min=0)[None]


@every_attention
def test_row_in_a_padded_batch_equals_the_row_alone(norm_type, attention, token_ids):
    model = tiny_model(norm_type, attn_implementation=attention)
    short, whole = token_ids[0, :5], token_ids[1]
    alone = logits_of(model, short[None])[0]
    for side, own in (("left", slice(7, None)), ("right", slice(5))):
        results = []
        for filler in (0, 77):
            rows = [padded(short, 12, side, filler), padded(whole, 12, side)]
            ids, mask, positions = (torch.cat(parts) for parts in zip(*rows))
            logits = logits_of(model, ids, attention_mask=mask, position_ids=positions)
            assert_close(logits[0, own], alone)
            assert_close(logits[1], logits_of(model, whole[None])[0])
            results.append(logits[0, own])
        assert torch.equal(*results)


@every_attention
def test_left_padded_row_decodes_step_by_step_as_alone(norm_type, attention, token_ids):
    model = tiny_model(norm_type, attn_implementation=attention)
    (ids, mask, positions), cache = padded(token_ids[0, :5], 8, "left"), None
    pieces = []
    for step in range(8):
        one = slice(step, step + 1)
        with torch.no_grad():
            output = model(
                ids[:, one],
                attention_mask=mask[:, : step + 1],
                position_ids=positions[:, one],
                past_key_values=cache,
                use_cache=True,
            )
        cache = output.past_key_values
        pieces.append(output.logits)
    assert_close(torch.cat(pieces, dim=1)[:, 3:], logits_of(model, token_ids[:1, :5]))


@every_attention
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fully_padded_row_does_not_reach_the_others(norm_type, dtype, attention, token_ids):
    model = tiny_model(norm_type, attn_implementation=attention).to(dtype)
    mask = torch.ones_like(token_ids)
    mask[0] = 0
    logits = logits_of(model, token_ids, attention_mask=mask)[1]
    alone = logits_of(model, token_ids[1:])[0]
    assert logits.isfinite().all()
    torch.testing.assert_close(logits, alone, rtol=0.05, atol=0.05 * alone.abs().max().item())


@every_attention
def test_packed_rows_equal_the_rows_alone(norm_type, attention, token_ids):
    model = tiny_model(norm_type, attn_implementation=attention)
    first, second = token_ids[:1, :7], token_ids[1:, :5]
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    # Positions that start anew isolate the rows only where there is neither mask nor cache
    logits = logits_of(model, torch.cat([first, second], dim=1), position_ids=positions, use_cache=False)
    assert_close(logits[:, :7], logits_of(model, first))
    assert_close(logits[:, 7:], logits_of(model, second))


def test_earlier_calls_change_nothing(norm_type, token_ids):
    model = tiny_model(norm_type)
    expected = logits_of(model, token_ids)
    logits_of(model, token_ids[:1, :3] * 0 + 9)
    model.generate(token_ids[:1, :4], max_new_tokens=2, do_sample=False)
    model.train()(token_ids, labels=token_ids).loss.backward()
    assert torch.equal(logits_of(model.eval(), token_ids), expected)


def test_left_padded_batch_generates_what_each_row_generates_alone(norm_type, token_ids):
    model = tiny_model(norm_type)
    run = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    rows = [token_ids[0, :4], token_ids[1, :9], token_ids[1, :1]]
    ids, mask, _ = (torch.cat(parts) for parts in zip(*(padded(row, 9, "left") for row in rows)))
    together = model.generate(ids, attention_mask=mask, **run)[:, 9:]
    for row, generated in zip(rows, together):
        assert torch.equal(model.generate(row[None], **run)[0, len(row) :], generated)


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (list, tuple, set)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return tensors_in(vars(value)) if dataclasses.is_dataclass(value) and not isinstance(value, type) else []


def test_no_tensor_stays_on_a_module_and_the_model_can_be_copied_in_training(norm_type, token_ids):
    model = tiny_model(norm_type).train()
    output = model(token_ids, labels=token_ids)
    kept = ("_parameters", "_buffers", "_modules")
    for name, module in model.named_modules():
        attributes = {key: value for key, value in vars(module).items() if key not in kept}
        assert tensors_in(attributes) == [], name
    copied = copy.deepcopy(model)
    output.loss.backward()
    assert torch.equal(logits_of(copied, token_ids), output.logits)
