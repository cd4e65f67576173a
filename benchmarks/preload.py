"""transformers, whose import takes seconds: done once, in the process that forks the workers of a benchmark."""

from common.packages import load_transformers

load_transformers().AutoModelForCausalLM  # noqa: B018  # it is imported when it is asked for
