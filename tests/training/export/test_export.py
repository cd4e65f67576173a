"""mode=export in the formats that are served: torch.export, ONNX, and a model repository for Triton."""

import importlib.util
import re
import shutil
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from composed import config, execute
from exported import MODELS, ONNX, Exporter, assert_same, batches, serving, translator_of_the_docs, two_inputs
from safetensors.torch import load_file
from triton_server import TritonServer, installed

from common.errors import CheckpointError, TrainingError
from data.vocabulary import GPT2Vocabulary, HuggingFaceVocabulary
from training.export import served, write
from training.export.served import ServedModel, write_texts

NO_WORDS = (-1, -50257, 50257, 50303, 50304, 2**40)  # of GPT-2, among them the rows that pad its vocabulary


@pytest.fixture(scope="module")
def exporter(tmp_path_factory, text):
    return Exporter(tmp_path_factory.mktemp("models"), text)


@pytest.fixture
def export(exporter, tmp_path, capsys):
    """``export("gpt2", "onnx")``: the folder that is written, and what is said."""

    def write(name, form, *more):
        return exporter.export(name, form, tmp_path, *more), capsys.readouterr().out

    return write


EVERY = [name if name in ("toy", "gpt2") else pytest.param(name, marks=pytest.mark.serving) for name in MODELS]


@pytest.mark.parametrize("name", EVERY)
def test_a_program_of_torch_export_computes_the_same_for_any_batch(export, exporter, name):
    folder, said = export(name, "torch_export")
    assert f"exported {name} after step 1 to {folder}: " in said
    assert "largest difference between torch.export's program and the model: " in said
    program = torch.export.load(folder / "model.pt2").module()
    for inputs in batches(name):
        assert_same(program(inputs), exporter.reference(name, inputs))
    for token in NO_WORDS if name == "gpt2" else ():
        with pytest.raises(RuntimeError, match="tokens must be from 0 to 50256"):
            program(torch.tensor([[1, token, 50256]]))


LAST = "export.positions=last"


@pytest.mark.parametrize("name", ["gpt2", pytest.param("transformer", marks=pytest.mark.serving)])
def test_a_program_can_give_the_last_position_s_logits_only(export, exporter, name):
    folder, _ = export(name, "torch_export", LAST)
    program = torch.export.load(folder / "model.pt2").module()
    for tokens in batches(name):
        assert_same(program(tokens), exporter.reference(name, tokens)[:, -1])


@serving
def test_a_repository_can_give_the_last_position_s_logits_only(export, exporter):
    import onnxruntime

    folder, said = export("gpt2", "triton", LAST)
    assert "dims: [ 50257 ]" in (folder / "gpt2" / "config.pbtxt").read_text()
    assert "FP32 [batch, 50257]" in (folder / "README.md").read_text()
    session = onnxruntime.InferenceSession(str(folder / "gpt2" / "1" / "model.onnx"))
    for tokens in batches("gpt2"):
        (answer,) = session.run(None, {"tokens": tokens.numpy()})
        assert_same(torch.from_numpy(answer), exporter.reference("gpt2", tokens)[:, -1])


@serving
def test_a_repository_has_a_model_for_text_where_transformers_can_hold_it(export):
    folder, said = export("gpt2", "triton")
    assert "largest difference between transformers and the model: " in said
    assert "v2/models/gpt2_text/generate" in (folder / "README.md").read_text()
    shutil.rmtree(folder)
    folder, said = export("transformer", "triton")
    assert "; no transformer_text: " in said
    assert sorted(left(folder)) == ["README.md", "transformer"]
    assert "_text" not in (folder / "README.md").read_text()


@serving
@pytest.mark.parametrize("name", MODELS)
def test_a_repository_for_triton_holds_a_model_that_computes_the_same(export, exporter, name):
    import onnx
    import onnxruntime

    folder, said = export(name, "triton", "export.max_batch_size=6", "device=cpu")
    assert "largest difference between ONNX Runtime and the model: " in said
    model = folder / name / "1" / "model.onnx"
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    (takes,), (gives,) = session.get_inputs(), session.get_outputs()
    _, wanted_name, shape = MODELS[name]
    assert takes.name == wanted_name
    free = ["batch", "time"] if wanted_name == "tokens" else ["batch", *shape]
    assert takes.shape == free, "the free axes have names"
    for inputs in batches(name):
        (answer,) = session.run([gives.name], {takes.name: inputs.numpy()})
        assert_same(torch.from_numpy(answer), exporter.reference(name, inputs))
    weights = [n for n in onnx.load(model).graph.initializer if n.data_type == onnx.TensorProto.FLOAT]
    tables = [n.name for n in weights if n.dims and n.dims[0] > 50_000]
    assert len(tables) <= 1, "an embedding that is the head, too, stands there once"

    outputs = exporter.reference(name, batches(name)[0]).shape[-1]
    config_text = (folder / name / "config.pbtxt").read_text()
    for line in (
        f'name: "{name}"',
        'backend: "onnxruntime"',
        "max_batch_size: 6",
        f'name: "{takes.name}"',
        f'name: "{gives.name}"',
        f"dims: [ {'-1' if wanted_name == 'tokens' else ', '.join(map(str, shape))} ]",
        f"dims: [ {f'-1, {outputs}' if wanted_name == 'tokens' else outputs} ]",
        "data_type: TYPE_INT64" if wanted_name == "tokens" else "data_type: TYPE_FP32",
        "dynamic_batching {",
        "kind: KIND_CPU",
    ):
        assert line in config_text, line
    example = load_file(folder / name / "example.safetensors")
    assert_same(example[gives.name], exporter.reference(name, example[takes.name]))
    assert name in (folder / "README.md").read_text()


@serving
def test_an_onnx_model_refuses_what_is_no_token(export):
    import onnxruntime

    folder, _ = export("gpt2", "onnx")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    for token in NO_WORDS:
        with pytest.raises(Exception, match=r"must be within the inclusive range \[-50257,50256\]"):
            session.run(None, {"tokens": np.array([[1, token, 50256]])})


@pytest.fixture(scope="module")
def translator():
    return translator_of_the_docs()


def test_a_model_with_two_inputs_is_a_program_with_two_named_inputs(translator, tmp_path):
    served.write_program(tmp_path / "model.pt2", translator)
    loaded = torch.export.load(tmp_path / "model.pt2")
    assert loaded.graph_signature.user_inputs == ("source", "target")
    for batch in (1, 5):
        inputs = two_inputs(batch)
        assert_same(loaded.module()(*inputs), translator.answer(*inputs))


def test_the_configuration_for_triton_lists_both_inputs_of_a_model(translator):
    text = write.render("config.pbtxt", translator, max_batch_size=6, kind="KIND_CPU")
    tensors = re.findall(r'name: "(\w+)"\s+data_type: TYPE_(\w+)\s+dims: \[ ([\d, ]+) \]', text)
    assert tensors == [("source", "INT64", "8"), ("target", "INT64", "8"), ("outputs", "FP32", "8, 16")]


@serving
def test_labels_and_tokenizers_are_beside_the_model(export):
    folder, _ = export("classifier", "triton")
    assert 'label_filename: "labels.txt"' in (folder / "classifier" / "config.pbtxt").read_text()
    assert (folder / "classifier" / "labels.txt").read_text().split() == [str(i) for i in range(12)]
    shutil.rmtree(folder)
    folder, _ = export("gpt2", "onnx")
    names = ["model.onnx", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in folder.iterdir()) == names


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def left(folder):
    return [path.name for path in folder.iterdir()]


@ONNX
def test_the_files_of_a_tokenizer_are_kept_as_they_are(tmp_path):
    """tokenizer.model of SentencePiece, which llama.cpp's converter needs for Gemma, is no text."""
    given, written = tmp_path / "given", tmp_path / "written"
    given.mkdir()
    written.mkdir()
    write_texts(given, GPT2Vocabulary().files(64))
    (given / "tokenizer.model").write_bytes(bytes(range(256)))
    write_texts(written, HuggingFaceVocabulary(given).files(64))
    files = {path.name: path.read_bytes() for path in given.iterdir()}
    assert {path.name: path.read_bytes() for path in written.iterdir()} == files and len(files) == 3


def test_a_batch_of_none_is_an_error_before_anything_loads(tmp_path):
    words = ["mode=export", "checkpoint=nowhere", "export.format=triton", "export.max_batch_size=0"]
    with pytest.raises(TrainingError, match="export.max_batch_size=0 must be at least 1"):
        execute(config(*words), tmp_path, None)


@pytest.mark.parametrize("missing", ["onnxscript", "transformers"])
def test_without_the_extras_the_error_names_the_command(tmp_path, monkeypatch, missing):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(TrainingError, match=f"needs .*{missing}.*: pip install -r requirements-serving.txt"):
        execute(config("mode=export", "checkpoint=nowhere", "export.format=triton"), tmp_path, None)


@pytest.mark.parametrize(
    "form, wrong", [("torch_export", 1e-3), ("torch_export", np.nan), pytest.param("triton", 1e-3, marks=ONNX)]
)
def test_a_model_that_another_program_computes_differently_is_not_exported(export, tmp_path, monkeypatch, form, wrong):
    answer = ServedModel.answer
    monkeypatch.setattr(ServedModel, "answer", lambda model, inputs: answer(model, inputs) + wrong)
    with pytest.raises(TrainingError, match=f"differs from the model by {wrong:g} in a batch of 1"):
        export("toy", form)
    assert left(tmp_path) == []


@pytest.mark.parametrize("form", ["safetensors", "torch_export", pytest.param("triton", marks=ONNX)])
def test_a_full_disk_is_an_error_that_leaves_nothing_behind(exporter, small_disk, form):
    overrides, folder = exporter.trained("convnet")
    disk = small_disk("64k")  # the model takes 116 kB
    line = [*overrides, "mode=export", f"checkpoint='{folder}'", f"export.format={form}"]
    with pytest.raises(CheckpointError, match="could not be written: .*MiB are free at"):
        execute(config(*line), disk, None)
    assert left(disk) == []


# -- on a real Triton server: loaded, asked by HTTP and gRPC, batched, and refused what is wrong --------------------

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
    with client(protocol).InferenceServerClient(getattr(server, protocol)) as connection:
        given = client(protocol).InferInput(takes, inputs.shape, {"tokens": "INT64", "images": "FP32"}[takes])
        given.set_data_from_numpy(inputs.numpy())
        return torch.from_numpy(connection.infer(name, [given]).as_numpy(OUTPUT).copy())


@serving
@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("name", SERVED)
def test_the_server_answers_what_torch_computes(client, server, exporter, name, protocol):
    for inputs in batches(name):
        assert_same(ask(client, server, protocol, name, inputs), exporter.reference(name, inputs))


@serving
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


@serving
@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("name", [*SERVED, "translator"])
def test_the_readme_compares_the_server_with_torch(client, server, repositories, monkeypatch, capsys, name, protocol):
    monkeypatch.chdir(repositories[name])
    section = (repositories[name] / "README.md").read_text().partition("## Compare")[2]
    code = textwrap.dedent(section.partition(":\n\n")[2])
    code = code.replace("localhost:8000", getattr(server, protocol))
    exec(code.replace("tritonclient.http", f"tritonclient.{protocol}"), {})
    said = capsys.readouterr().out
    assert said.startswith("largest difference: ") and float(said.split()[-1]) < 1e-4
