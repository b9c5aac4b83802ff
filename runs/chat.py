"""Asks a chat model one question, greedily. Usage: python chat.py FOLDER_OR_HUB_ID QUESTION"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer


name, question = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
# The folder's own code, not an installed package
assert type(model).__module__.startswith("transformers_modules")
print(f"\n{type(model).__module__}.{type(model).__name__}\n\n{question}\n")

messages = [{"role": "user", "content": question}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
stops = model.generation_config.eos_token_id
# Of the checkpoint's own settings (sampling, penalties, beams) nothing but what ends a turn
model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=model.generation_config.pad_token_id)
output = model.generate(**inputs, max_new_tokens=128, streamer=streamer)
stopped = output[0, -1].item() in (stops if isinstance(stops, list) else [stops])
print("(it stopped by itself)" if stopped else "(cut off after 128 tokens)")
