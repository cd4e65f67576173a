"""What mode=export writes of a trained model.

    write.py          the folder, in one of the formats: safetensors for transformers, torchvision and model.init_from;
                      torch_export; onnx; triton, a repository for NVIDIA's Triton Inference Server
    served.py         the model as other programs run it: named tensors in and one out, as a program or as ONNX
    text_model.py     text for text, by Triton's Python backend: a file of the repository, which nothing here imports

What is written appears whole or not at all.
"""
