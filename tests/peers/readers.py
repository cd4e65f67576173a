"""Programs that read an export.

Each is ``read(folder, tokens, half, room, bf16)`` -> the logits [tokens, words], the log-probabilities of
``tokens[half:]``, each after the tokens before it, or their sum; and the likeliest tokens after ``tokens[:half]``, or
None. It may write to the folder ``room``.
"""

import os
import runpy
import sys
from unittest.mock import patch

import numpy as np
import torch

from common.packages import load_transformers

COUNT = 8  # tokens to continue with


def _of_transformers(model, tokens, half):
    drawn = model.generate(torch.tensor([tokens[:half]]), max_new_tokens=COUNT, do_sample=False)
    return model(torch.tensor([tokens])).logits[0], drawn[0, half:].tolist()


def transformers(folder, tokens, half, room, bf16):
    kind = load_transformers().AutoModelForCausalLM
    return _of_transformers(kind.from_pretrained(folder, dtype="bfloat16" if bf16 else "auto"), tokens, half)


def peft(folder, tokens, half, room, bf16):
    load_transformers()
    from peft import AutoPeftModelForCausalLM

    return _of_transformers(AutoPeftModelForCausalLM.from_pretrained(folder).eval(), tokens, half)


def lm_eval(folder, tokens, half, room, bf16):
    load_transformers()
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)
    ((total, _),) = model._loglikelihood_tokens([(("", ""), tokens[:half], tokens[half:])], disable_tqdm=True)
    return torch.tensor(total), None


def onnxruntime(folder, tokens, half, room, bf16):
    from onnxruntime import InferenceSession

    session, text = InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"]), tokens[:half]
    for _ in range(COUNT):
        text = [*text, int(session.run(None, {"tokens": np.array([text])})[0][0, -1].argmax())]
    return torch.from_numpy(session.run(None, {"tokens": np.array([tokens])})[0][0]), text[half:]


def ctranslate2(folder, tokens, half, room, bf16):
    hub = load_transformers()
    from ctranslate2 import Generator
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(folder)).convert(str(room / "ct2"))
    generator = Generator(str(room / "ct2"), compute_type="float32", intra_threads=1)
    words = hub.AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(tokens[:half])
    (drawn,) = generator.generate_batch([words], max_length=COUNT, sampling_topk=1, include_prompt_in_result=False)
    return torch.from_numpy(np.array(generator.forward_batch([tokens])))[0], drawn.sequences_ids[0]


def mlx(folder, tokens, half, room, bf16):
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    if bf16:
        model.set_dtype(mx.bfloat16)
    drawn = [int(token) for token, _ in generate_step(mx.array(tokens[:half]), model, max_tokens=COUNT)]
    return torch.from_numpy(np.array(model(mx.array([tokens]))[0].astype(mx.float32))), drawn


def llama_cpp(folder, tokens, half, room, bf16):
    import xllamacpp

    file, script = room / "model.gguf", os.path.join(os.environ["LLAMA_CPP"], "convert_hf_to_gguf.py")
    words = [script, str(folder), "--outfile", str(file), "--outtype", "bf16" if bf16 else "f32"]
    with patch.object(sys, "argv", words), patch.object(sys, "path", [os.path.dirname(script), *sys.path]):
        runpy.run_path(script, run_name="__main__")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup = str(file), 64, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it computes in float16
    server = xllamacpp.Server(params)

    def ask(prompt, count, **more):
        answer = server.handle_completions({"prompt": prompt, "max_tokens": count, "temperature": 0, **more})
        return answer["choices"][0]["logprobs"]["content"]

    drawn = [entry["id"] for entry in ask(tokens[:half], COUNT, logprobs=1)]
    found, the = [], {"262": 100}  # a whole word is drawn: an end, or a part of a character, has no entry
    for at in range(half, len(tokens)):
        (entry,) = ask(tokens[:at], 1, logprobs=40, logit_bias=the)
        found.append({word["id"]: word["logprob"] for word in entry["top_logprobs"]}.get(tokens[at], -torch.inf))
    return torch.tensor(found), drawn
