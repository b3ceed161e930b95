"""The objects of scripts/*.yaml for Kubernetes, by the schemas of Kubernetes and of Kubeflow, and by what they mean."""

import re

import pytest

from tests.ranks import REPOSITORY

yaml = pytest.importorskip("yaml")

SCRIPTS = REPOSITORY / "scripts"
OBJECTS = {
    each["kind"]: each
    for name in ("kubernetes.yaml", "pytorchjob.yaml")
    for each in yaml.safe_load_all((SCRIPTS / name).read_text())
}
JOB_SET = OBJECTS["TrainingRuntime"]["spec"]["template"]["spec"]
JOB = JOB_SET["replicatedJobs"][0]["template"]
WORKER = OBJECTS["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]


def read_back(given):
    """Return an object as Kubeflow's own types hold it: without fields that they do not know."""
    if given["kind"] == "PyTorchJob":
        client = pytest.importorskip("kubeflow.training.api_client").ApiClient()
        utils = pytest.importorskip("kubeflow.training.utils.utils")
        held = client.deserialize(utils.FakeResponse(given), "KubeflowOrgV1PyTorchJob")
        return client.sanitize_for_serialization(held)
    trainer = pytest.importorskip("kubeflow_trainer_api.models")
    return getattr(trainer, f"TrainerV1alpha1{given['kind']}").from_dict(given).to_dict()


@pytest.mark.parametrize("kind", OBJECTS)
def test_kubeflow_knows_every_field(kind):
    assert read_back(OBJECTS[kind]) == OBJECTS[kind]
    misspelt = OBJECTS[kind] | {"spec": OBJECTS[kind]["spec"] | {"restarts": 3}}
    assert read_back(misspelt) == OBJECTS[kind]


@pytest.mark.parametrize("given", [
    {"apiVersion": "batch/v1", "kind": "Job", **JOB},
    {"apiVersion": "v1", "kind": "PodTemplate", "template": WORKER["template"]},
], ids=["Job", "PodTemplate"])  # fmt: skip
def test_kubernetes_knows_every_field_of_a_pod_and_its_job(given):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(given, "1.31", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(given | {"fsGruop": 1000}, "1.31", strict=True)


def test_exit_code_2_ends_the_job_and_any_other_starts_all_pods_again():
    # podFailurePolicy is refused with any other restartPolicy, and without one a JobSet sets OnFailure.
    assert JOB["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    codes = {"containerName": "node", "operator": "In", "values": [2]}
    assert JOB["spec"]["podFailurePolicy"] == {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
    assert JOB["spec"]["backoffLimit"] == 0
    rule = {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    assert JOB_SET["failurePolicy"] == {"maxRestarts": 10, "rules": [rule]}
    # A PyTorchJob has no such rule; OnFailure restarts a container whatever its code, ExitCode only above 127.
    assert (WORKER["restartPolicy"], OBJECTS["PyTorchJob"]["spec"]["runPolicy"]) == ("OnFailure", {"backoffLimit": 10})


@pytest.mark.parametrize("pod", [JOB["spec"]["template"]["spec"], WORKER["template"]["spec"]], ids=["v2", "v1"])
def test_a_pod_writes_to_its_claims_and_has_time_to_save(pod):
    user = int(re.search(r"^USER (\d+)$", (SCRIPTS / "Dockerfile").read_text(), flags=re.M)[1])
    assert pod["securityContext"] == {"fsGroup": user}
    save_s = int(re.search(r"SHUTDOWN_TIMEOUT:-(\d+)", (SCRIPTS / "container.sh").read_text())[1])
    assert pod["terminationGracePeriodSeconds"] > save_s
