"""Text for text from a real Triton server: NAME_text of mode=export export.format=triton, beside mode=sample."""

import json
import queue
import re
import shutil
import textwrap
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from composed import config, execute, run
from exported import serving
from triton_server import TritonServer, installed

from common.packages import load_torchvision
from conf.instantiate import with_values
from data.vocabulary import END_OF_TEXT, GPT2Vocabulary
from training.command.modes.sample import sample

POSITIONS = 40
EXTRA = "<a>"
PROMPTS = ["", "the café", f"def main({EXTRA}", "😀 – ", "one", "two", "three\n\n  four", "class A:"]
# Weights that are random and large, so that each token depends on all before it.
MODELS = {
    "gpt2": [
        "model.size=tiny", "model.n_layer=2", "model.n_embd=32", "model.init_from='PUBLISHED'",
        f"""model.extra_tokens='{{"{EXTRA}": null}}'""",
    ],
    "llama": ["model.n_layer=2", "model.tied=false", "model.init_std=0.3"],
}  # fmt: skip
VOCABULARIES = {"gpt2": GPT2Vocabulary({EXTRA: None}), "llama": GPT2Vocabulary()}
KINDS = {"max_tokens": "INT32", "temperature": "FP32", "top_k": "INT32", "top_p": "FP32", "seed": "INT64"}
NUMBERS = {"INT32": np.int32, "FP32": np.float32, "INT64": np.int64}
WRONG = [
    ({"text_input": "a", "max_tokens": 0}, "max_tokens=0 must be at least 1"),
    ({"text_input": "a", "temperature": -1}, "`temperature` (=-1.0) has to be a strictly positive float"),
    ({"text_input": "a", "top_k": -1}, "`top_k` has to be a strictly positive integer, but is -1"),
    ({"text_input": "a", "top_p": 1.5}, "`top_p` has to be a float > 0 and < 1, but is 1.5"),
    ({"text_input": "a", "top_p": "x"}, "non-number"),
    ({"text_input": "a", "temprature": 1}, "unknown settings: temprature; known are max_tokens, seed, stream"),
    ({"text_input": "a" + 50 * " a"}, f"text_input has 51 tokens; the model takes {POSITIONS}, including the answer"),
    ({"max_tokens": 1}, "text_input is missing"),
]

pytestmark = pytest.mark.xdist_group("served_text")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    load_torchvision()  # or transformers fails where torchvision does not fit a CPU torch
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    size = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
    GPT2LMHeadModel(GPT2Config(**size, initializer_range=0.4)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(published, text, tmp_path_factory):
    """Each model's overrides with its run directory: trained by one step that changes next to nothing."""
    lines = {}
    for name, overrides in MODELS.items():
        folder = tmp_path_factory.mktemp("trained") / name
        line = [f"model={name}", f"model.block_size={POSITIONS}", *overrides, *text, "train.precision=fp32"]
        line = [override.replace("PUBLISHED", str(published)) for override in line]
        steps = ["train.epochs=null", "train.steps=1", "train.eval_every=null", "optim.lr=1e-6"]
        run(folder, *line, *steps, "train.global_batch_size=4")
        lines[name] = [*line, f"checkpoint='{folder}'"]
    return lines


@pytest.fixture(scope="module")
def server(trained, tmp_path_factory):
    """Both models, and one whose texts end at the fifth token that it draws for the first prompt."""
    installed()  # or there is nothing to export for
    pytest.importorskip("tritonclient", reason="tritonclient is an extra: pip install -r requirements-serving.txt")
    folder = tmp_path_factory.mktemp("served")
    for name, line in trained.items():
        export = ["mode=export", f"export_to='{folder / name}'", "export.format=triton", "sample.tokens=7"]
        execute(config(*line, *export, "sample.temperature=0", "sample.seed=5"), folder, None)
    ends = folder / "ends" / "ends_text"
    shutil.copytree(folder / "llama" / "llama_text", ends)
    (ends / "config.pbtxt").write_text((ends / "config.pbtxt").read_text().replace("llama_text", "ends_text"))
    drawn = VOCABULARIES["llama"].encode_texts([sampled(trained, "llama", PROMPTS[1], 9)])[0]
    settings = ends / "1" / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": [drawn[4], END_OF_TEXT]}))
    started = TritonServer([folder / name for name in (*trained, "ends")], folder / "triton")
    yield started
    started.close()


def sampled(trained, name, prompt, tokens):
    """The text with which mode=sample goes on, always by the likeliest token."""
    settings = ["mode=sample", f"sample.tokens={tokens}", "sample.temperature=0"]
    cfg = with_values(config(*trained[name], *settings), {"sample.prompt": prompt})
    return sample(cfg).removeprefix(prompt).split("<|endoftext|>")[0]


def length(name, prompt):
    """Tokens of a prompt; where it is empty, the one that begins a text."""
    return len(VOCABULARIES[name].encode_texts([prompt])[0]) or 1


def post(server, name, way="generate", **settings):
    """The answer to a request by HTTP: its bytes, or the server's own words where it refuses."""
    address = f"http://{server.http}/v2/models/{name}_text/{way}"
    try:
        return urllib.request.urlopen(address, json.dumps(settings).encode(), timeout=60).read()
    except urllib.error.HTTPError as error:
        raise ValueError(json.loads(error.read())["error"]) from None


def ask(server, name, prompt, **settings):
    return json.loads(post(server, name, text_input=prompt, **settings))["text_output"]


def stream(server, name, prompt, **settings):
    """The pieces of an answer by gRPC."""
    import tritonclient.grpc as grpc

    def tensor(name, kind, value):
        given = grpc.InferInput(name, [1], kind)
        given.set_data_from_numpy(np.array([value], dtype=NUMBERS.get(kind)))
        return given

    given = [tensor("text_input", "BYTES", prompt.encode()), tensor("stream", "BOOL", True)]
    given += [tensor(name, KINDS[name], value) for name, value in settings.items()]
    answers = queue.Queue()
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result.as_numpy("text_output").item().decode()))
        client.async_stream_infer(f"{name}_text", given)
        client.stop_stream()
    pieces = [answers.get_nowait() for _ in range(answers.qsize())]
    for piece in pieces:
        if not isinstance(piece, str):
            raise ValueError(str(piece))
    return pieces


@pytest.mark.parametrize("name", MODELS)
def test_transformers_pipeline_goes_on_with_the_same_text(trained, name, tmp_path, capfd):
    execute(config(*trained[name], "mode=export", "export_to=there"), tmp_path, None)
    from transformers import pipeline

    write = pipeline("text-generation", str(tmp_path / "there"), device="cpu")
    (given,) = write(PROMPTS[1], max_new_tokens=20, do_sample=False, return_full_text=False)
    assert given["generated_text"] == sampled(trained, name, PROMPTS[1], 20)
    assert "generat" not in capfd.readouterr().err, "no warning of settings that the folder lacks"


@serving
@pytest.mark.parametrize("name", MODELS)
def test_the_likeliest_text_is_that_of_mode_sample(server, trained, name):
    for prompt in PROMPTS:
        assert ask(server, name, prompt, max_tokens=20, temperature=0) == sampled(trained, name, prompt, 20)


@serving
@pytest.mark.parametrize("name", MODELS)
def test_text_and_answer_end_at_the_model_s_positions(server, trained, name):
    room = POSITIONS - length(name, PROMPTS[1])
    assert ask(server, name, PROMPTS[1], max_tokens=1000) == sampled(trained, name, PROMPTS[1], room)


@serving
def test_what_a_request_leaves_out_is_as_it_was_exported(server, trained):
    assert ask(server, "gpt2", "one") == sampled(trained, "gpt2", "one", 7)


@serving
def test_an_answer_ends_at_a_token_that_ends_texts(server, trained):
    assert ask(server, "ends", PROMPTS[1], max_tokens=20) == sampled(trained, "llama", PROMPTS[1], 4)


@serving
@pytest.mark.parametrize("name", MODELS)
def test_eight_clients_at_once_each_get_their_own_answer(server, trained, name):
    wanted = [sampled(trained, name, prompt, 25) for prompt in PROMPTS]
    assert len(set(wanted)) == len(PROMPTS) == 8
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda prompt: ask(server, name, prompt, max_tokens=25), PROMPTS * 3))
    assert answers == wanted * 3


@serving
def test_a_seed_gives_the_same_text_alone_and_beside_others(server):
    draws = {"max_tokens": 25, "temperature": 2.0, "top_k": 50, "top_p": 0.9}
    alone = [ask(server, "llama", "one", seed=seed, **draws) for seed in range(8)]
    assert len(set(alone)) == 8
    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(lambda seed: ask(server, "llama", "one", seed=seed, **draws), range(8))) == alone
    assert ask(server, "llama", "one", seed=1, **{**draws, "top_k": 1}) == ask(server, "llama", "one", max_tokens=25)


@serving
@pytest.mark.parametrize("prompt", PROMPTS[:4])
def test_a_stream_s_pieces_are_the_answer(server, prompt):
    whole = ask(server, "llama", prompt, max_tokens=25)
    pieces = stream(server, "llama", prompt, max_tokens=25)
    assert "".join(pieces) == whole and len(pieces) > 10
    events = post(server, "llama", "generate_stream", text_input=prompt, max_tokens=25, stream=True).decode()
    assert [json.loads(line)["text_output"] for line in events.split("data: ")[1:]] == pieces


@serving
def test_the_readme_shows_how_to_ask(server, capsys):
    readme = (server.log.parent.parent / "gpt2" / "README.md").read_text()
    wanted = ask(server, "gpt2", "def main")
    block = re.search(r"By gRPC:\n\n(.*?)\n\nOnly", readme, flags=re.DOTALL)[1]
    exec(textwrap.dedent(block).replace("localhost:8001", server.grpc), {})
    assert capsys.readouterr().out == wanted
    for way, settings in re.findall(r"gpt2_text/(\w+)[\s\\]+-d '(.*)'", readme):
        assert b'"text_output":' in post(server, "gpt2", way, **json.loads(settings))
    assert way == "generate_stream"


@serving
def test_what_is_wrong_is_an_error_to_its_client_alone(server, trained):
    wanted = sampled(trained, "llama", "two", 25)
    with ThreadPoolExecutor(8) as clients:
        others = [clients.submit(ask, server, "llama", "two", max_tokens=25) for _ in range(8)]
        for settings, said in WRONG:
            with pytest.raises(ValueError, match=re.escape(said)):
                post(server, "llama", **settings)
        assert [other.result() for other in others] == [wanted] * 8
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        stream(server, "llama", "two", max_tokens=0)
    assert ask(server, "llama", "two", max_tokens=25) == wanted


@serving
def test_an_answer_is_text_and_no_logits(server):
    """Of 256 tokens one by one, the logits of every position would be 6.6 GB."""
    answer = post(server, "gpt2", text_input="one", max_tokens=30)
    assert len(answer) < 100 + 6 * 4 * 30
