#!/bin/sh
# 64 rows of LIMA, LoRA with norms, merged: SmolLM2's graft answers, and stops by itself.
# Usage: sh runs/demo_sft.sh BASE FOLDER   (rows from the Hub, or from lima1k.json in the folder BHYT_DATA)
set -eu
base=${1:?give the checkpoint to fine-tune} folder=${2:?give a folder to make}
rows=${BHYT_DATA:+$BHYT_DATA/lima1k.json}

python -m sft --config sft/recipes/smollm2_cpu.yaml --model_name_or_path "$base" --output_dir "$folder" --overwrite \
    --data "${rows:-GAIR/lima}[:64]" --max_length 192 --use_peft --lora_r 8 --train_norms --learning_rate 1e-4 \
    --max_answer_tokens 48 --data_license "other, non-commercial"

# A fresh process loads the result from its folder alone
cp runs/chat.py "$folder/chat.py"
cd "$(dirname "$folder")"
PYTHONSAFEPATH=1 PYTHONPATH= python "$(basename "$folder")/chat.py" "$(basename "$folder")" "What is the capital of France?"
