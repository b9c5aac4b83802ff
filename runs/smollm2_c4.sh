#!/bin/sh
# The README's figures on C4: five grafts of SmolLM2-135M, calibrated on the first 100 documents, measured on 40 windows of
# the others. Usage: BHYT_DATA=FOLDER_WITH_C4 sh runs/smollm2_c4.sh FOLDER (about 25 minutes on two cores)
set -eu
folder=${1:?give a folder to work in}
source=$(python runs/find_smollm2.py)
mkdir -p "$folder"

graft() {
    name=$1
    shift
    python -m conversion graft "$source" "$folder/$name" --overwrite \
        --calibration_text "$BHYT_DATA/c4_en_valid.jsonl[:100]" --report_text "$BHYT_DATA/c4_en_valid.jsonl[100:]" \
        --num_report_tokens 20480 --batch_size 2 "$@"
}

graft exact --attention_lambda 0.1 --mlp_lambda 0.1 --variance_estimator exact
graft one_exact --exact_variance_layers 0
graft four_exact --exact_variance_layers 0,2,15,24
graft uniform_attention --variance_estimator uniform_attention
graft published --variance_estimator published

python - "$folder" <<'END'
import json, pathlib, sys

for name in ("exact", "one_exact", "four_exact", "uniform_attention", "published"):
    report = json.loads((pathlib.Path(sys.argv[1]) / name / "conversion_report.json").read_text())
    quality = report["perplexity"]
    print(f"{name:18} {quality['source']:.4f} -> {quality['bhyt']:.4f}  ratio {quality['ratio']:.4f}  KL {report['kl_nats_per_token']:.5f}")
END
