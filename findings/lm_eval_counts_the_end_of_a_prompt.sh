#!/usr/bin/env bash
# lm-eval 0.4.13: the log-likelihood of an answer includes the white space at the end of its prompt.
#
# Guess: loglikelihood(prompt, answer) is log p(answer | prompt), so that its sum over a data set is the loss that a
# training run has for the same answers.
# Seen: all white space at the end of the prompt, newlines too, is moved to the answer. For a prompt "Q: 2+2?\n" the sum
# has the newline's log-probability as well. The prompts of most chat templates end with a newline, so the sums of a
# harness and of a training run differ by one token for each row.
# Source: lm_eval/api/model.py, TemplateLM._encode_pair (context.rstrip()).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# What lm_eval.api imports, without models, metrics and data sets.
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check numpy==2.3.4 requests==2.34.2 pyyaml==6.0.4 \
    jinja2==3.1.6 tqdm==4.70.1
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check --no-deps lm_eval==0.4.13
cd "$folder"
cat > finding.py << 'PROGRAM'
from importlib.metadata import version

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

print("lm-eval", version("lm_eval"))


class Characters(TemplateLM):
    """A model whose tokens are characters, each of log-probability -1."""

    backend, eot_token_id = "causal", 0

    def tok_encode(self, string, **_):
        return [ord(character) for character in string]

    def _loglikelihood_tokens(self, requests, **_):
        self.scored = ["".join(map(chr, answer)) for _, _, answer in requests]
        return [(-float(len(answer)), True) for *_, answer in requests]

    def loglikelihood_rolling(self, requests, **_):
        raise NotImplementedError

    def generate_until(self, requests, **_):
        raise NotImplementedError


model = Characters()
for prompt, answer in (("Q: 2+2?", "4"), ("Q: 2+2?\n", "4"), ("<|assistant|>\n\n", "4")):
    request = Instance("loglikelihood", {}, (prompt, answer), 0)
    ((total, _),) = model.loglikelihood([request])
    print(f"prompt {prompt!r}, answer {answer!r}: guess: -1.0 of {answer!r}; seen: {total} of {model.scored[0]!r}")
    assert total == -1.0 - (len(prompt) - len(prompt.rstrip())), total
PROGRAM
venv/bin/python -W ignore finding.py
