"""Models as chains of layers, and their losses. This package does not know devices, ranks or strategies.

chain.py                            a model as named layers, and the requirements for every model
cut.py                              the division of a model's layers among ranks
losses.py, fused_cross_entropy.py   losses; the last layer of a language model
seeds.py                            random numbers that depend on names; dropout by sample
auxiliary.py                        losses of sums over the global batch, such as the balance of experts
gpt2.py, llama.py, moe.py, transformer.py, resnet50.py, classifier.py, convnet.py, toy.py     the models of conf/model
causal_lm.py, causal_lm_layers.py    any causal language model of transformers; the computation of its layers
causal_lm_config.py, causal_lm_files.py     its configuration and its files
given.py, sequential.py, lora.py    a model from Python; a chain from an nn.Module; adapters
grouped.py                          products of tokens with the matrices of their experts
attention.py, batchnorm.py          parts that several models use
sequence.py                         the part of each sequence that a process computes
generate.py                         a text continued token by token
huggingface.py                      names, shapes and sizes in Hugging Face's files
resolvers.py                        values that a model computes from its configuration
"""

import common  # noqa: F401  it joins the user's modules with this package
