"""README and docs/: their tables are those of the measurements, their commands compose, what they name exists."""

import re
import shlex

import pytest
from composed import compose
from interpreters import ROOT

from benchmarks import readme, reference
from conf import help
from conf.words import expand_lists, quote_value

PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in readme.PAGES}
# These pages name what a reader adds; tests/training/command/test_extending.py runs it.
ADDED = {"docs/own_model.md", "docs/extending.md"}
TEXT = "\n".join(text for page, text in PAGES.items() if page not in ADDED)
CODE = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))
COMMANDS = re.findall(r"^ {4}(?:python|torchrun|pip) .*?train\.py (.*?)(?: #.*)?$", TEXT, flags=re.MULTILINE)


def test_the_readme_is_one_page():
    assert len(PAGES["README.md"].splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_those_of_the_measurements(page):
    assert readme.updated(PAGES[page]) == PAGES[page], "python -m benchmarks readme"


def test_what_is_shown_of_a_table_is_on_a_page():
    assert readme.SHOWN.keys() <= set(re.findall(r"<!-- table: (\w+) -->", TEXT))


def test_the_reference_lists_the_keys_that_there_are():
    assert PAGES["docs/reference.md"] == reference.page(), "python -m benchmarks reference"


@pytest.mark.parametrize("command", sorted({command for command in COMMANDS if command}))
def test_every_command_composes(command):
    words = [quote_value(word) for word in shlex.split(command.replace("--cfg job", ""))]
    if "--help" in words:
        assert help.answer(words)
        return
    sweep = "-m" in words
    # Plugins of Hydra's own make themselves known only where they are installed.
    words = [word for word in words if word != "-m" and not word.startswith(("hydra/", "hydra.")) and "(" not in word]
    compose(*expand_lists([re.sub(r",.*", "", word) if sweep else word for word in words]))


def manifests():
    """The Kubernetes objects of docs/cluster.md, by kind."""
    import yaml

    blocks = re.findall(r"```yaml\n(.*?)```", PAGES["docs/cluster.md"], flags=re.DOTALL)
    return {found["kind"]: found for block in blocks for found in yaml.safe_load_all(block)}


def test_the_pods_of_a_pytorchjob_run_a_command_that_composes_as_one_rank_each():
    from launchers import World

    replicas = manifests()["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"] and replicas["Master"]["replicas"] == 1
    # The operator takes codes from 1 to 127 for final failures if the policy is ExitCode.
    assert {role["restartPolicy"] for role in replicas.values()} == {"OnFailure"}
    pod = replicas["Master"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch" and container["command"] == ["python", "train.py"]
    reserves(container["resources"], pod["volumes"])
    size = sum(role["replicas"] for role in replicas.values())
    environ = {"RANK": "1", "WORLD_SIZE": f"{size}", "MASTER_ADDR": "gpt2-master-0", "MASTER_PORT": "23456"}
    assert World.detect(environ) == World(1, size, 0, 1, "environment")
    parallel = compose(*container["args"]).parallel
    assert parallel.name == "ddp" and parallel.threads == int(container["resources"]["requests"]["cpu"])


def test_the_pods_of_an_indexed_job_run_a_torchrun_that_meets_in_its_first_pod():
    objects = manifests()
    service, job = objects["Service"], objects["Job"]
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "launchers.torchrun"]
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["args"]]
    torchrun = starts_its_ranks(words, container["resources"])
    assert torchrun.training_script == "train.py" and torchrun.node_rank == 1
    assert torchrun.nnodes == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert torchrun.master_addr == f"{name}-0.{pod['subdomain']}"
    assert torchrun.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    reserves(container["resources"], pod["volumes"])


def test_a_pod_that_has_saved_or_was_evicted_does_not_count_against_the_limit_of_a_job():
    from launchers.stopping import EXIT_CODE

    job = manifests()["Job"]["spec"]
    pod = job["template"]["spec"]
    # Kubernetes refuses a podFailurePolicy with another restartPolicy, and a rule with both kinds of conditions.
    assert pod["restartPolicy"] == "Never" and "backoffLimit" in job
    saved, evicted = job["podFailurePolicy"]["rules"]
    (container,) = pod["containers"]
    codes = {"containerName": container["name"], "operator": "In", "values": [EXIT_CODE]}
    assert saved == {"action": "Ignore", "onExitCodes": codes}
    assert evicted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def test_a_trainjob_starts_torchrun_with_what_kubeflow_sets_in_the_environment(monkeypatch):
    job = manifests()["TrainJob"]
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    trainer = job["spec"]["trainer"]
    nodes, processes = trainer["numNodes"], trainer["numProcPerNode"]
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    reserves(trainer["resourcesPerNode"], pod["volumes"])
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert node["name"] == "node" and mounted == {volume["name"] for volume in pod["volumes"]}
    for name, value in {"NNODES": nodes, "NPROC_PER_NODE": processes, "NODE_RANK": 1, "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(f"PET_{name}", f"{value}")
    python, m, module, *words = trainer["command"]
    assert (python, m, module) == ("python", "-m", "launchers.torchrun")
    torchrun = starts_its_ranks([*words, *trainer["args"]], trainer["resourcesPerNode"])
    assert torchrun.training_script == "/workspace/train.py" and torchrun.node_rank == 1
    assert "WORKDIR /workspace" in (ROOT / "Dockerfile").read_text()


def starts_its_ranks(words, resources):
    """torchrun's arguments, which start one rank for each GPU and as many as the layout has."""
    from torch.distributed.run import get_args_parser

    torchrun = get_args_parser().parse_args(words)
    assert torchrun.nproc_per_node == str(resources["limits"]["nvidia.com/gpu"])
    parallel = compose(*torchrun.training_script_args).parallel
    assert parallel.name == "pipe_ddp"
    assert parallel.dp * parallel.pp == int(torchrun.nnodes) * int(torchrun.nproc_per_node)
    assert parallel.threads * int(torchrun.nproc_per_node) == int(resources["requests"]["cpu"])
    return torchrun


def reserves(resources, volumes):
    """Cores and memory are requested, and the memory that /dev/shm may take is within the limit."""
    (shm,) = [volume["emptyDir"] for volume in volumes if "emptyDir" in volume]
    memory = resources["requests"]["memory"]
    assert resources["limits"]["memory"] == memory and "cpu" in resources["requests"]
    assert shm["medium"] == "Memory" and gib(shm["sizeLimit"]) < gib(memory)


def gib(size):
    return int(size.removesuffix("Gi"))


def test_every_setting_that_they_name_exists():
    """`parallel.comm_hook=bf16` and the like, in running text and in tables."""
    from omegaconf import OmegaConf

    kinds = [("gpt2", data) for data in ("stdlib", "jsonl", "parquet", "tokens", "mixture")]
    kinds += [
        ("convnet", "mnist"),
        ("convnet", "image_folder"),
        ("toy", "arrays"),
        ("transformers", "torch_docs"),
        ("moe", "text"),
    ]
    trees = [compose(f"model={model}", f"data={data}") for model, data in (*kinds, ("transformer", "stdlib"))]
    words = [word.strip('"') for code in CODE for word in code.split()]
    named = {match[1] for word in words if (match := re.match(r"((?:train|parallel|data|model|optim)\.\w+)=", word))}
    assert len(named) > 15
    assert [key for key in sorted(named) if all(OmegaConf.select(t, key, default="no") == "no" for t in trees)] == []


@pytest.mark.parametrize("group", ["model", "data", "experiment", "parallel"])
def test_every_option_is_in_its_table(group):
    options = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
    head = {
        "model": r"\| `model=` \| what it is",
        "parallel": r"\| `parallel=` ",
        "experiment": r"\| `python train.py experiment=` ",
    }
    table = re.split(head.get(group, rf"\| `{group}=` \|"), TEXT, maxsplit=1)[1].partition("\n\n")[0]
    assert set(re.findall(r"^\| \[?`(\w+)[` ]", table, flags=re.MULTILINE)) == options


def test_every_file_that_they_name_exists():
    named = [word for word in CODE if re.fullmatch(r"[a-z_/]+\.(py|yaml|json|csv)", word) and "/" in word]
    assert len(named) > 5
    made = ("study/",)  # docs/paper.md writes these
    assert [path for path in named if not path.startswith(made) and not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", PAGES[page])
    # GitHub's badge of CI is relative to the repository's address.
    local = [link for link in links if not link.startswith(("http", "../../actions/"))]
    assert [link for link in local if not ((ROOT / page).parent / link).exists()] == []


def test_every_page_and_heading_that_the_program_names_exists():
    """`(docs/own_model.md, 'A loss')` and the like, in errors and comments."""
    rooms = ("common", "conf", "data", "launchers", "models", "parallel", "planner", "training")
    files = [path for room in rooms for path in (ROOT / room).rglob("*") if path.suffix in (".py", ".yaml")]
    text = re.sub(r'"\n *f?"', "", "\n".join(path.read_text() for path in files))  # parts of one message
    named = set(re.findall(r"(docs/[\w/]+\.md)(?:, '([^']+)')?", text))
    assert len(named) > 5 and ("docs/own_model.md", "A loss") in named
    headings = {page: re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE) for page, text in PAGES.items()}
    assert [(page, name) for page, name in named if name not in ("", *headings.get(page, []))] == []
    assert {page for page, _ in named} <= PAGES.keys()
