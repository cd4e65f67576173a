"""Continues texts in Triton's Python backend. A repository has this file as model.py, beside a Hugging Face folder.

The server's Python needs torch and transformers, but no code of this project. Tokens are drawn here, because all draws
of transformers' ``generate`` share one random state: the answers to several clients would depend on each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import triton_python_backend_utils as triton  # pyright: ignore[reportMissingImports]  # only the server has it

FOLDER = Path(__file__).parent
FINAL = triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """The class that the backend calls. The parameters in config.pbtxt are the defaults of a request's settings."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model and its tokenizer."""
        parameters = json.loads(args["model_config"])["parameters"]
        self.defaults = {name: json.loads(value["string_value"]) for name, value in parameters.items()}
        self.pool = ThreadPoolExecutor(self.defaults.pop("texts_at_once"))
        self.device = f"cuda:{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else "cpu"
        model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)
        self.model = model.to(self.device).eval()  # pyright: ignore[reportArgumentType]  # its decorator hides ``self``
        # Not AutoTokenizer: for some kinds of models, it splits a text in another way than tokenizer.json.
        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER)
        # Some tokenizers append an end-of-text token, but the text is to be continued.
        added = self.tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
        self.ending = next((count for count, special in enumerate(reversed(added)) if not special), 0)

    def execute(self, requests: list) -> None:
        """Answer the requests in parallel threads. Tensors of a request are valid only during this call."""
        for request in requests:
            given = {tensor.name(): tensor.as_numpy().item() for tensor in request.inputs()}
            others = json.loads(request.parameters())  # fields sent to /generate that are not inputs
            self.pool.submit(self._answer, given, others, request.get_response_sender())

    def _answer(self, given: dict[str, Any], others: dict[str, Any], sender: Any) -> None:
        try:
            if others:
                raise ValueError(f"unknown settings: {', '.join(others)}; known are {', '.join(sorted(self.defaults))}")
            if "text_input" not in given:
                raise ValueError("text_input is missing: the text to continue")
            settings = {**self.defaults, **given}
            tokens = self._encode(given["text_input"].decode())
            shown = len(self._decode(tokens))
            for token in self._draw(tokens, settings):
                tokens.append(token)
                if sender.is_cancelled():
                    break
                if settings["stream"] and not (text := self._decode(tokens)).endswith("\ufffd"):  # half a character
                    sender.send(_response(text[shown:]))
                    shown = len(text)
            sender.send(_response(self._decode(tokens)[shown:]), flags=FINAL)
        except Exception as error:  # of any kind: a client without an answer would wait forever
            sender.send(triton.InferenceResponse(error=triton.TritonError(str(error))), flags=FINAL)

    def _encode(self, text: str) -> list[int]:
        tokens = self.tokenizer(text)["input_ids"]
        tokens = tokens[: len(tokens) - self.ending] or [self.model.generation_config.bos_token_id]
        most = self.model.config.max_position_embeddings
        if len(tokens) >= most:
            raise ValueError(f"text_input has {len(tokens)} tokens; the model takes {most}, including the answer")
        return tokens

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @torch.inference_mode()
    def _draw(self, tokens: list[int], settings: dict[str, Any]) -> Iterator[int]:
        """Yield the next tokens until the end-of-text token, max_tokens, or the model's last position."""
        count, temperature = settings["max_tokens"], settings["temperature"]
        if count < 1:
            raise ValueError(f"max_tokens={count} must be at least 1")
        warpers = [transformers.TemperatureLogitsWarper(temperature)] if temperature else []
        warpers += [transformers.TopKLogitsWarper(settings["top_k"])] if settings["top_k"] else []
        warpers += [transformers.TopPLogitsWarper(settings["top_p"])]
        generator = torch.Generator().manual_seed(settings["seed"])
        new, kept = tokens, None
        for _ in range(min(count, self.model.config.max_position_embeddings - len(tokens))):
            inputs = torch.tensor([new], device=self.device)
            output = self.model(inputs, past_key_values=kept, use_cache=True, logits_to_keep=1)
            scores, kept = output.logits[:, -1, : len(self.tokenizer)].float().cpu(), output.past_key_values
            if temperature:
                for warper in warpers:
                    scores = warper(None, scores)  # pyright: ignore[reportArgumentType]  # it looks at no tokens
                token = int(torch.multinomial(scores.softmax(-1), 1, generator=generator))
            else:
                token = int(scores.argmax())
            if token in np.atleast_1d(self.model.generation_config.eos_token_id):
                return
            yield token
            new = [token]


def _response(text: str) -> Any:
    return triton.InferenceResponse([triton.Tensor("text_output", np.array([text.encode()], dtype=object))])
