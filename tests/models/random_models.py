"""Small random models of transformers, and the comparison of a chain with one of them."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks import architectures
from common.packages import load_transformers

WORDS, POSITIONS = 130, 64
SIZES = {**architectures.TINY, "vocab_size": WORDS, "max_position_embeddings": POSITIONS, "n_positions": POSITIONS}


def random_model(model_type, **options):
    """Return transformers' model of a type, in which every weight is random, those of norms and biases too."""
    pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
    transformers = load_transformers()
    kind = type(transformers.AutoConfig.for_model(model_type))
    keys = kind().to_dict()
    config = kind(**{**{key: value for key, value in SIZES.items() if key in keys}, **options})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def with_weights_of(chain, model):
    """Return the layers of a chain, with the weights of a model of transformers."""
    layers, state = chain.build(chain.names, 5, torch.device("cpu")).eval(), model.state_dict()
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            parameter.copy_(state[chain.hugging_face.their_name(name)])
    return layers


def assert_same(chain, layers, reference, exact=1e-5):
    """Compare logits, and the gradient of every weight for the loss of a text whose first half is not counted."""
    tokens = torch.randint(3, WORDS, (2, 41), generator=torch.Generator().manual_seed(3))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[:, :20] = -100
    logits, wanted = layers(inputs), reference(inputs, use_cache=False).logits
    assert (logits - wanted).abs().max() <= exact * wanted.abs().max()
    *before, head = [layer for _, layer in layers.items()]
    hidden = inputs
    for layer in before:
        hidden = layer(hidden)
    loss = head.loss(hidden, targets, None) if hasattr(head, "loss") else chain.loss(head(hidden), targets, None)
    (loss.loss / loss.count).backward()
    F.cross_entropy(wanted.flatten(0, 1), targets.flatten()).backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in layers.named_parameters():
        gradient = theirs[chain.hugging_face.their_name(name)].grad
        if gradient is None:  # an expert that no token has chosen
            assert not parameter.grad.any(), name
        else:
            assert (parameter.grad - gradient).norm() <= 2 * exact * gradient.norm(), name
