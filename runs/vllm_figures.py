"""A BHyT folder as vLLM's Transformers backend serves it, against transformers: greedy tokens and KL divergence.

    BHYT_DATA=FOLDER python runs/vllm_figures.py serve MODEL DTYPE FILE    # where vLLM is installed
    BHYT_DATA=FOLDER python runs/vllm_figures.py compare MODEL DTYPE FILE  # where this project is

8 documents of C4: 48 tokens of each as a prompt for 48 more; every prediction on 64 tokens of the first 4.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


PROMPT, NEW, LONG, NUM_DOCUMENTS, NUM_LONG = 48, 48, 64, 8, 4


def documents(name: str) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    lines = (Path(os.environ["BHYT_DATA"]) / "c4_en_valid.jsonl").read_text(encoding="utf-8").split("\n")
    ids = [tokenizer(json.loads(line)["text"]).input_ids for line in lines[100:200]]
    return [document for document in ids if len(document) >= 128][:NUM_DOCUMENTS]


def serve(name: str, dtype: str, file: str):
    from vllm import LLM, SamplingParams

    engine = LLM(
        name, dtype=dtype, model_impl="transformers", trust_remote_code=True, enforce_eager=True, max_model_len=512,
        max_logprobs=-1, max_num_seqs=4, enable_prefix_caching=False,
    )  # fmt: skip
    texts = documents(name)
    settings = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    greedy = engine.generate([{"prompt_token_ids": text[:PROMPT]} for text in texts], settings)
    settings = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    predicted = engine.generate([{"prompt_token_ids": text[:LONG]} for text in texts[:NUM_LONG]], settings)
    rows = [
        torch.tensor([[row[token].logprob for token in range(len(row))] for row in output.prompt_logprobs[1:]])
        for output in predicted
    ]
    torch.save({"greedy": [list(output.outputs[0].token_ids) for output in greedy], "logprobs": rows}, file)


@torch.no_grad()
def compare(name: str, dtype: str, file: str):
    served, texts = torch.load(file), documents(name)
    models = [
        AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, dtype=getattr(torch, kind)).eval()
        for kind in (dtype, "float32")
    ]

    def log_probabilities(model, ids: list[int]):
        return model(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)

    equal = 0
    for text, reply in zip(texts, served["greedy"]):
        likeliest = log_probabilities(models[0], text[:PROMPT] + reply)[PROMPT - 1 : -1].argmax(-1)
        equal += int((likeliest == torch.tensor(reply)).sum())
    print(f"{equal} of {len(texts) * NEW} greedy tokens are transformers' own in {dtype}")
    sums, num_tokens = torch.zeros(3, dtype=torch.float64), 0
    for text, theirs in zip(texts, served["logprobs"]):
        same, exact = (log_probabilities(model, text[:LONG])[:-1] for model in models)
        for place, (p, q) in enumerate([(same, theirs), (exact, theirs), (exact, same)]):
            sums[place] += (p.exp() * (p - q)).double().sum()
        num_tokens += len(theirs)
    names = (f"transformers in {dtype}, vLLM", "transformers in fp32, vLLM", f"transformers in fp32, in {dtype}")
    for pair, value in zip(names, (sums / num_tokens).tolist()):
        print(f"KL({pair}): {value:.3g} nats a token over {num_tokens} tokens")


if __name__ == "__main__":
    {"serve": serve, "compare": compare}[sys.argv[1]](*sys.argv[2:])
