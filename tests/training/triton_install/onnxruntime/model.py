"""A backend for Triton that stands in for its own `onnxruntime`: the same repositories, computed by PyPI's package.

Triton calls it with the requests that its dynamic batcher has put together; they are computed as one batch.
"""

import json
import os
import sys

# The server's Python ignores PYTHONPATH; with numpy 2 of another environment its tensors would be empty.
sys.path.insert(0, os.environ["TRITON_PACKAGES"])

import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402
import triton_python_backend_utils as triton  # noqa: E402


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.takes, (self.gives,) = ([tensor["name"] for tensor in config[kind]] for kind in ("input", "output"))
        path = os.path.join(args["model_repository"], args["model_version"], "model.onnx")
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        parts = {
            name: [triton.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
            for name in self.takes
        }
        try:
            (result,) = self.session.run([self.gives], {name: np.concatenate(part) for name, part in parts.items()})
        except Exception as error:
            return [triton.InferenceResponse(error=triton.TritonError(str(error))) for _ in requests]
        ends = np.cumsum([len(part) for part in parts[self.takes[0]]])[:-1]
        return [triton.InferenceResponse([triton.Tensor(self.gives, part)]) for part in np.split(result, ends)]
