# An image that trains:
#
#     docker build -t one-word-parallel .
#     docker run --rm -v "$PWD/runs:/runs" one-word-parallel parallel=ddp model=gpt2 hydra.run.dir=/runs/a
#
# For CUDA GPUs, add --build-arg TORCH_INDEX=https://pypi.org/simple to `build` and --gpus=all to `run`.
FROM python:3.11-slim

# The package index of torch and torchvision. PyPI's wheels carry the CUDA libraries.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

WORKDIR /workspace
COPY requirements.txt .
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -r requirements.txt

# The user of Kubeflow's runtime for torch has the same number.
RUN useradd --uid 1000 --create-home trainer && chown trainer /workspace
COPY --chown=trainer . .
USER 1000

# So that `python -m launchers.torchrun` works in any folder.
ENV PYTHONPATH=/workspace
ENTRYPOINT ["python", "train.py"]
