"""The Kubernetes manifest: valid by Kubernetes' own schemas, not root, nothing writable but /tmp and /data."""

from typing import Any

import pytest
import yaml

from deploy.dockerfile import ROOT, image

MANIFEST = ROOT / "deploy" / "kubernetes.yaml"
DOCUMENTS: dict[str, dict[str, Any]] = {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text())}
POD = DOCUMENTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_it_is_valid(kind: str) -> None:
    validation = pytest.importorskip("kubernetes_validate")
    validation.validate(DOCUMENTS[kind], validation.latest_version(), strict=True)


def test_a_planted_wrong_key_is_rejected() -> None:
    validation = pytest.importorskip("kubernetes_validate")
    planted = DOCUMENTS["Deployment"] | {"spec": DOCUMENTS["Deployment"]["spec"] | {"replica": 1}}
    with pytest.raises(validation.ValidationError, match="replica"):
        validation.validate(planted, validation.latest_version(), strict=True)


def test_what_belongs_together_is_called_the_same() -> None:
    labels = DOCUMENTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert DOCUMENTS["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert DOCUMENTS["Service"]["spec"]["selector"].items() <= labels.items()
    assert DOCUMENTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    claims = {
        volume["persistentVolumeClaim"]["claimName"] for volume in POD["volumes"] if "persistentVolumeClaim" in volume
    }
    assert claims == {"checkpoints", DOCUMENTS["PersistentVolumeClaim"]["metadata"]["name"]}


def test_it_is_the_image_of_this_repository() -> None:
    user, group = (int(number) for number in image().user.split(":"))
    assert (POD["securityContext"]["runAsUser"], POD["securityContext"]["runAsGroup"]) == (user, group)
    (port,) = CONTAINER["ports"]
    assert str(port["containerPort"]) == image().exposed
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in CONTAINER["volumeMounts"]}
    assert mounts == {"/checkpoints": True, "/data": False, "/keys": True, image().environment["HOME"]: False}
    assert {volume["name"] for volume in POD["volumes"]} == {mount["name"] for mount in CONTAINER["volumeMounts"]}


def test_it_may_do_nothing_but_its_work() -> None:
    allowed = CONTAINER["securityContext"]
    assert allowed["readOnlyRootFilesystem"] is True
    assert allowed["allowPrivilegeEscalation"] is False
    assert allowed["capabilities"] == {"drop": ["ALL"]}
    assert POD["automountServiceAccountToken"] is False
    assert DOCUMENTS["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in DOCUMENTS["NetworkPolicy"]["spec"]


def test_it_has_a_gpu_keys_and_time_to_finish() -> None:
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"name": "GLASSBLOCK_KEYS_FILE", "value": "/keys/keys"} in CONTAINER["env"]
    assert POD["terminationGracePeriodSeconds"] == 40  # the service itself waits 30 s for requests under way
    assert DOCUMENTS["Deployment"]["spec"]["strategy"]["type"] == "Recreate"
