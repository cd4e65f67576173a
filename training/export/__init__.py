"""mode=export: writes a trained model in formats of other programs.

    write.py          writes the folder in one of the formats: safetensors for transformers, torchvision and
                      model.init_from; torch_export; onnx; triton, a repository for NVIDIA's Triton Inference Server
    served.py         the model for other programs: named input tensors and one output, as a program or as ONNX
    text_model.py     the text-to-text model for Triton's Python backend: a file that is copied into the repository and
                      that no module here imports

The folder appears complete or not at all.
"""
