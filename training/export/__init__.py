"""What mode=export writes of a trained model.

    write.py          the folder, in one of the formats; safetensors for transformers, torchvision and model.init_from
    served.py         the model as other programs run it: named tensors in and one out
    program.py        torch_export: a program for torch.export.load; onnx: a model for ONNX Runtime
    repository.py     triton: a model repository for NVIDIA's Triton Inference Server, by the templates beside it
    serve_check.py    a client that asks a server and compares: ``python -m training.export.serve_check``

What is written appears whole or not at all.
"""
