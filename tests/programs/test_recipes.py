"""Manifests, the Dockerfile and the batch script: what can be checked without a cluster.

Kubernetes refuses a manifest as a whole, so its rules for the fields that are used here are written
down below, from its documentation of Jobs and that of JobSet and Kubeflow Trainer.
"""

import os
import re
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.arguments import parse_args
from megatron.errors import is_retryable
from tests.support.launch import ROOT, Started

Yaml = dict[str, Any]
KUBERNETES = ROOT / "examples" / "kubernetes"
RETRYABLE = [status for status in range(1, 256) if is_retryable(status)]
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def manifests(name: str) -> dict[str, Yaml]:
    """The documents of a file, by their kind."""
    documents = list(yaml.safe_load_all((KUBERNETES / name).read_text()))
    return {document["kind"]: document for document in documents}


def pod_problems(pod: Yaml) -> list[str]:
    """What Kubernetes would refuse about a pod of a Job, and what a trainer cannot do without."""
    found = []
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        found.append("a Job's restartPolicy is Never or OnFailure")
    if not pod.get("securityContext", {}).get("runAsNonRoot"):
        found.append("runs as root")
    if pod.get("terminationGracePeriodSeconds", 30) <= 30:
        found.append("is killed before torchrun has ended its ranks")
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    for container in pod["containers"]:
        if not LABEL.fullmatch(container["name"]):
            found.append(f"{container['name']} is no name")
        mounts = container.get("volumeMounts", ())
        found += [f"no volume {mount['name']}" for mount in mounts if mount["name"] not in volumes]
        if "/dev/shm" not in {mount["mountPath"] for mount in mounts}:
            found.append("64 MiB of shared memory")
        for variable in container.get("env", ()):
            value = variable.get("value", "")
            if not isinstance(value, str) or ("value" in variable) == ("valueFrom" in variable):
                found.append(f"{variable['name']} is not one text")
    return found


def job_problems(spec: Yaml) -> list[str]:
    """What Kubernetes would refuse about the spec of a Job."""
    pod = spec["template"]["spec"]
    found = pod_problems(pod)
    names = {container["name"] for container in pod["containers"]}
    rules = spec.get("podFailurePolicy", {}).get("rules", [])
    if rules and pod.get("restartPolicy") != "Never":
        found.append("podFailurePolicy needs restartPolicy Never")
    if len(rules) > 20:
        found.append("more than 20 rules")
    for rule in rules:
        if rule["action"] not in ("FailJob", "Ignore", "Count", "FailIndex"):
            found.append(f"no action {rule['action']}")
        if rule["action"] == "FailIndex" and "backoffLimitPerIndex" not in spec:
            found.append("FailIndex needs backoffLimitPerIndex")
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            found.append("a rule has one of onExitCodes and onPodConditions")
        for condition in rule.get("onPodConditions", ()):
            if condition.keys() != {"type", "status"} or not isinstance(condition["status"], str):
                found.append(f"{condition} lacks its type or its status")
        if "onExitCodes" in rule:
            codes = rule["onExitCodes"]
            if codes.get("containerName", next(iter(names))) not in names:
                found.append(f"no container {codes['containerName']}")
            if codes["operator"] not in ("In", "NotIn"):
                found.append(f"no operator {codes['operator']}")
            values = codes["values"]
            if not 0 < len(values) <= 255 or values != sorted(set(values)):
                found.append("exit codes are not in order")
            if codes["operator"] == "In" and 0 in values:
                found.append("success is no failure")
    if spec.get("completionMode") == "Indexed" and spec.get("parallelism") != spec["completions"]:
        found.append("ranks that do not run at once cannot meet")
    return found


def refused_statuses(spec: Yaml) -> list[int]:
    """The statuses after which a Job is not started again."""
    refused = []
    for status in range(1, 256):
        for rule in spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes and (status in codes["values"]) == (codes["operator"] == "In"):
                refused += [status] if rule["action"] == "FailJob" else []
                break
    return refused


def assert_trains(container: Yaml) -> None:
    """The command is one that the image has and its flags are ours."""
    tini, dashes, python, *words = container["command"]
    assert (tini, dashes, python) == ("tini", "--", "python"), "PID 1 has to pass signals on"
    assert words == ["examples/torchrun.py", "pretrain_gpt.py"]
    assert all((ROOT / word).is_file() for word in words)
    config = parse_args(container["args"])
    assert config.training.exit_signal_handler
    assert config.checkpoint.save == config.checkpoint.load is not None


def test_the_job_is_one_that_kubernetes_takes() -> None:
    documents = manifests("job.yaml")
    job, service = documents["Job"], documents["Service"]
    assert (job["apiVersion"], service["apiVersion"]) == ("batch/v1", "v1")
    spec = job["spec"]
    assert job_problems(spec) == []
    (container,) = spec["template"]["spec"]["containers"]
    assert_trains(container)
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["PET_NNODES"] == str(spec["completions"])
    assert variables["PET_NPROC_PER_NODE"] == container["resources"]["limits"]["nvidia.com/gpu"]
    # Pods of an indexed Job are called NAME-INDEX.SUBDOMAIN, where that is a headless service.
    name, subdomain = job["metadata"]["name"], spec["template"]["spec"]["subdomain"]
    assert variables["PET_MASTER_ADDR"] == f"{name}-0.{subdomain}"
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (subdomain, "None")
    assert service["spec"]["selector"] == {"job-name": name}


def test_the_trainjob_is_one_that_kubeflow_takes() -> None:
    documents = manifests("trainjob.yaml")
    runtime, job = documents["TrainingRuntime"], documents["TrainJob"]
    version = "trainer.kubeflow.org/v1alpha1"
    assert runtime["apiVersion"] == job["apiVersion"] == version
    reference = {"apiGroup": version.partition("/")[0], "kind": "TrainingRuntime"}
    assert job["spec"]["runtimeRef"] == reference | {"name": runtime["metadata"]["name"]}
    trainer = job["spec"]["trainer"]
    assert trainer.keys() <= {
        *("image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode")
    }
    assert_trains(trainer)
    assert "torch" in runtime["spec"]["mlPolicy"], "which sets the variables PET_*"
    jobs = runtime["spec"]["template"]["spec"]
    (replicated,) = jobs["replicatedJobs"]
    step = "trainer.kubeflow.org/trainjob-ancestor-step"
    assert replicated["template"]["metadata"]["labels"] == {step: "trainer"}
    assert job_problems(replicated["template"]["spec"]) == []
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node", "the one that a TrainJob fills in"
    policy = jobs["failurePolicy"]
    assert policy["maxRestarts"] > 0
    assert [(r["action"], r["onJobFailureReasons"]) for r in policy["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"])
    ]


def test_manifests_retry_what_is_worth_it() -> None:
    job = manifests("job.yaml")["Job"]["spec"]
    runtime = manifests("trainjob.yaml")["TrainingRuntime"]["spec"]["template"]["spec"]
    (replicated,) = runtime["replicatedJobs"]
    for spec in (job, replicated["template"]["spec"]):
        assert sorted({*range(1, 256)} - {*refused_statuses(spec)}) == RETRYABLE


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("restartPolicy: Never", "restartPolicy: OnFailure", "needs restartPolicy Never"),
        ("operator: NotIn", "operator: Equals", "no operator"),
        ("[68, 75,", "[75, 68,", "not in order"),
        ("containerName: trainer", "containerName: main", "no container main"),
        ("action: Ignore", "action: Skip", "no action"),
        ("action: Ignore", "action: FailIndex", "needs backoffLimitPerIndex"),
        (', status: "True"}', "}", "lacks its type or its status"),
        ('value: "2"', "value: 2", "PET_NNODES is not one text"),
        ("parallelism: 2", "parallelism: 1", "cannot meet"),
        ("runAsNonRoot: true", "runAsNonRoot: false", "root"),
        ("terminationGracePeriodSeconds: 60", "terminationGracePeriodSeconds: 30", "killed before"),
        ("mountPath: /dev/shm", "mountPath: /shm", "shared memory"),
        ("- name: data\n", "- name: corpora\n", "no volume data"),
        ("- name: trainer", "- name: Trainer", "no name"),
    ],
)
def test_a_manifest_that_kubernetes_would_refuse_is_noticed(
    before: str, after: str, problem: str
) -> None:
    text = (KUBERNETES / "job.yaml").read_text()
    assert before in text
    documents = yaml.safe_load_all(text.replace(before, after))
    (job,) = (document for document in documents if document["kind"] == "Job")
    assert any(problem in found for found in job_problems(job["spec"]))


# The Dockerfile.


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


DOCKERFILE = instructions(ROOT / "Dockerfile")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def arguments_of(word: str) -> list[str]:
    return [rest for instruction, rest in DOCKERFILE if instruction == word]


def test_what_the_dockerfile_copies_exists_and_is_not_left_out() -> None:
    copied = [source for rest in arguments_of("COPY") for source in rest.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    assert sorted(line[1:] for line in lines if line.startswith("!")) == sorted(copied)
    packages = {
        pattern.rstrip("*")
        for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    modules = {f"{name}.py" for name in PROJECT["tool"]["setuptools"]["py-modules"]}
    needed = {"pyproject.toml", "setup.py", PROJECT["project"]["readme"], *packages, *modules}
    assert needed | {*PROJECT["project"]["license-files"], "csrc", "examples"} == {*copied}


def test_the_dockerfile_installs_what_the_project_asks_for() -> None:
    pip = " ".join(rest for rest in arguments_of("RUN") if rest.startswith("pip "))
    for requirement in PROJECT["build-system"]["requires"]:
        assert requirement in pip.replace('"', "")
    extras = re.findall(r"\.\[([\w,]+)\]", pip)[0].split(",")
    assert {*extras} <= PROJECT["project"]["optional-dependencies"].keys()
    (tested,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert arguments_of("ARG")[-3:] == [f"TORCH={tested}+cpu", f"TORCH={tested}", "TORCH"]
    (version,) = re.findall(r"python:(\d\.\d+)-slim", " ".join(arguments_of("FROM")))
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert [*map(int, version.split("."))] >= [*map(int, oldest.split("."))]


def test_the_image_runs_without_root_and_passes_signals_on() -> None:
    words = [instruction for instruction, _ in DOCKERFILE]
    assert arguments_of("USER") == ["1000"]
    assert words.index("USER") > max(at for at, word in enumerate(words) if word == "RUN")
    assert arguments_of("ENTRYPOINT") == ['["tini", "--"]']
    assert arguments_of("CMD")[0].startswith('["python", ')
    stages = dict(reversed(rest.split(" AS ")) for rest in arguments_of("FROM") if " AS " in rest)
    assert stages.keys() == {"cpu", "cuda"}
    assert arguments_of("ARG")[0] == "DEVICE=cpu"


# The batch script of Slurm, with stand-ins for srun and scontrol.

SRUN = """#!/bin/sh
for report in $REPORTS; do
  echo "{\\"message\\": {\\"errorCode\\": $report}}" > "$FAILURES/$report"
done
if [ -n "$UNTIL" ]; then
  trap 'exit 0' USR1
  echo training
  while true; do sleep 0.02; done
fi
exit "$STATUS"
"""


def job_of_slurm(folder: Path, **variables: str) -> Started:
    """Start the batch script, whose tasks end as `variables` say."""
    for name, text in (("srun", SRUN), ("scontrol", '#!/bin/sh\necho "$@" > "$WORK/requeued"\n')):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    fixed = {"WORK": str(folder), "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7"}
    fixed |= {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = str(ROOT / "examples" / "pretrain_gpt_slurm.sh")
    return Started([script], cwd=folder, environment=fixed | variables)


@pytest.mark.parametrize(
    ("status", "reports", "restarts", "again"),
    [
        ("0", "", "0", False),
        ("75", "75 76", "0", True),
        ("76", "76 65", "0", False),  # the one that failed had bad data, the others noticed
        ("137", "66", "0", False),  # srun killed the others
        ("137", "", "0", True),
        ("64", "", "0", False),
        ("75", "75", "5", False),  # often enough
    ],
)
def test_a_job_of_slurm_is_queued_again_after_failures_that_are_worth_it(
    status: str, reports: str, restarts: str, again: bool, tmp_path: Path
) -> None:
    variables = {"STATUS": status, "REPORTS": reports, "SLURM_RESTART_COUNT": restarts}
    with job_of_slurm(tmp_path, **variables) as job:
        ended = job.ended(within_s=60)
    assert ended.status == int(status), ended.text
    assert (tmp_path / "requeued").exists() == again
    if again:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_a_job_of_slurm_is_queued_again_when_its_time_is_up(tmp_path: Path) -> None:
    with job_of_slurm(tmp_path, UNTIL="the signal", SLURM_RESTART_COUNT="99") as job:
        job.wait_for("training")
        job.process.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@120 does, to the script alone
        ended = job.ended(within_s=60)
    assert ended.status == 0, ended.text
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    text = (ROOT / "examples" / "pretrain_gpt_slurm.sh").read_text()
    assert "#SBATCH --signal=B:USR1@" in text
    assert "#SBATCH --requeue\n" in text
