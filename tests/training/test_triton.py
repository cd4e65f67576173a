"""Exported repositories on a real Triton server: loaded, asked by HTTP and gRPC, batched, and refused what is wrong."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from exported import MODELS, ONNX, Exporter, assert_same, batches, translator_of_the_docs
from triton_server import TritonServer, installed

from training.export import serve_check, write

pytestmark = [pytest.mark.serving, ONNX]
SERVED = ("gpt2", "resnet50", "convnet")
OUTPUT = "logits"


@pytest.fixture(scope="module")
def client():
    """``client("grpc")``: the module of Triton's own client."""
    pytest.importorskip("tritonclient", reason="tritonclient is an extra: pip install -r requirements-serving.txt")
    import tritonclient.grpc
    import tritonclient.http

    return {"http": tritonclient.http, "grpc": tritonclient.grpc}.__getitem__


@pytest.fixture(scope="module")
def exporter(tmp_path_factory, text):
    return Exporter(tmp_path_factory.mktemp("models"), text)


@pytest.fixture(scope="module")
def repositories(exporter, tmp_path_factory):
    installed()  # or there is nothing to export for
    folder = tmp_path_factory.mktemp("repositories")
    write.write_repository(folder / "translator", translator_of_the_docs(), 8, "KIND_CPU")
    exported = {name: exporter.export(name, "triton", folder / name, "device=cpu") for name in SERVED}
    return exported | {"translator": folder / "translator"}


@pytest.fixture(scope="module")
def server(repositories, client, tmp_path_factory):
    started = TritonServer(list(repositories.values()), tmp_path_factory.mktemp("triton"))
    yield started
    started.close()


def ask(client, server, protocol, name, inputs):
    takes = MODELS[name][1]
    given = serve_check.ask(protocol, getattr(server, protocol), name, {takes: inputs.numpy()}, OUTPUT)
    return torch.from_numpy(given.copy())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("name", SERVED)
def test_the_server_answers_what_torch_computes(client, server, exporter, name, protocol):
    for inputs in batches(name):
        assert_same(ask(client, server, protocol, name, inputs), exporter.reference(name, inputs))


def test_requests_that_come_together_are_computed_together(client, server, exporter):
    """Counted by the server: computations, and the samples in them."""
    before = [server.metric(name, "resnet50") for name in ("nv_inference_count", "nv_inference_exec_count")]
    inputs = torch.randn(32, 1, *MODELS["resnet50"][2], generator=torch.Generator().manual_seed(2))
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda one: ask(client, server, "grpc", "resnet50", one), inputs))
    assert_same(torch.cat(answers), exporter.reference("resnet50", inputs.flatten(0, 1)))
    after = [server.metric(name, "resnet50") for name in ("nv_inference_count", "nv_inference_exec_count")]
    samples, computations = (new - old for new, old in zip(after, before, strict=True))
    assert samples == 32
    assert computations < 32, "some computation had a batch larger than one"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_wrong_shape_is_refused_by_the_server(client, server, protocol):
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException, match=r"unexpected shape for input 'images' .*\[-1,1,28,28\]"):
        ask(client, server, protocol, "convnet", torch.zeros(1, 1, 20, 20))
    with pytest.raises(InferenceServerException, match="batch-size must be <= 8"):
        ask(client, server, protocol, "convnet", torch.zeros(9, 1, 28, 28))


def test_a_text_longer_than_the_model_s_positions_is_an_error_and_the_server_goes_on(client, server, exporter):
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException):
        ask(client, server, "grpc", "gpt2", torch.zeros(1, 41, dtype=torch.int64))
    (inputs, *_) = batches("gpt2")
    assert_same(ask(client, server, "grpc", "gpt2", inputs), exporter.reference("gpt2", inputs))


def test_a_token_that_is_no_word_is_refused(client, server):
    from tritonclient.utils import InferenceServerException

    for token in (-1, 50257):
        with pytest.raises(InferenceServerException, match="must be within the inclusive range"):
            ask(client, server, "grpc", "gpt2", torch.tensor([[1, token]]))


def test_the_best_classes_have_their_labels(client, server, exporter):
    grpc = client("grpc")
    (one, *_) = batches("convnet")
    tensor = grpc.InferInput("images", list(one.shape), "FP32")
    tensor.set_data_from_numpy(one.numpy())
    with grpc.InferenceServerClient(server.grpc) as asked:
        wanted = [grpc.InferRequestedOutput(OUTPUT, class_count=2)]
        best = asked.infer("convnet", [tensor], outputs=wanted).as_numpy(OUTPUT)
    order = exporter.reference("convnet", one)[0].argsort(descending=True)[:2]
    assert [text.decode().split(":")[1:] for text in best.flatten()] == [[str(int(i))] * 2 for i in order]


# -- the check that a user runs ----------------------------------------------------------------------------------------


@pytest.fixture
def checked(server, monkeypatch, capsys):
    """``checked(folder)``: exit code and output of the command."""

    def run(folder, **addresses):
        where = {"http": server.http, "grpc": server.grpc, **addresses}
        options = [f"--{protocol}={address}" for protocol, address in where.items()]
        monkeypatch.setattr(sys, "argv", ["serve_check", str(folder), *options])
        return serve_check.main(), capsys.readouterr()

    return run


@pytest.mark.parametrize("name", [*SERVED, "translator"])
def test_serve_check_says_that_both_protocols_answer(checked, repositories, name):
    code, said = checked(repositories[name])
    assert code == 0, said.err
    assert [line.split()[0] for line in said.out.splitlines()] == ["http", "grpc"]
    assert said.out.count(f"{name} answers; largest difference ") == 2


def test_serve_check_names_what_is_wrong(checked, repositories, exporter, tmp_path):
    code, said = checked(repositories["gpt2"], http="127.0.0.1:9")
    assert code == 1 and said.err.startswith("error: http 127.0.0.1:9: gpt2: ")
    code, said = checked(tmp_path)
    assert code == 1 and "is no model repository of mode=export export.format=triton" in said.err
    classifier = exporter.export("classifier", "triton", tmp_path / "other")
    code, said = checked(classifier)
    assert code == 1 and "classifier" in said.err, "a model that the server does not have"
    (classifier / "classifier").rename(classifier / "convnet")
    code, said = checked(classifier)
    assert code == 1 and "error: http" in said.err


def test_serve_check_sees_other_weights(checked, repositories, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(repositories["convnet"], tmp_path / "copy")
    tensors = load_file(copy / "convnet" / "example.safetensors")
    save_file({**tensors, OUTPUT: tensors[OUTPUT] + 1e-3}, copy / "convnet" / "example.safetensors")
    code, said = checked(copy)
    assert code == 1
    assert "error: http " in said.err and "convnet differs from torch by 0.001" in said.err
