#!/usr/bin/env bash
# transformers 5.24.0: rope_scaling beside rope_parameters in config.json sets the base of rotary embeddings to 10000.
#
# Guess: "rope_scaling", the older name, adds its factor to "rope_parameters", or loses to it: the base of 500000 stays.
# Seen: rope_parameters is replaced as a whole, and rope_theta becomes the default. Either key alone is right. A file
# that was written by a new version and edited for an old one thus computes other positions.
# Source: transformers/modeling_rope_utils.py, the conversion of rope_scaling to rope_parameters.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check transformers==5.24.0 torch==2.13.0
cd "$folder"
cat > finding.py << 'PROGRAM'
import json

import transformers
from transformers import LlamaConfig

print("transformers", transformers.__version__)


def base(**keys):
    json.dump({"model_type": "llama", **keys}, open("config.json", "w"))
    return LlamaConfig.from_pretrained(".").rope_parameters


parameters = {"rope_type": "default", "rope_theta": 500000.0}
scaling = {"rope_type": "linear", "factor": 2.0}
print("rope_parameters alone:", base(rope_parameters=parameters))
print("rope_theta and rope_scaling:", base(rope_theta=500000.0, rope_scaling=scaling))
both = base(rope_parameters=parameters, rope_scaling=scaling)
print("rope_parameters and rope_scaling: guess: a base of 500000; seen:", both)
assert base(rope_parameters=parameters)["rope_theta"] == 500000.0
assert base(rope_theta=500000.0, rope_scaling=scaling)["rope_theta"] == 500000.0
assert both["rope_theta"] == 10000.0
PROGRAM
venv/bin/python -W ignore finding.py
