"""The policies allow what the code asks of S3, and nothing else: a new call without its permission fails here."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from botocore.validate import ParamValidator  # type: ignore[import-untyped]

from tests.conftest import repository
from tierfs.objects.s3_inspection import _covers

IAM = repository() / "deploy/iam"
BUCKET, OBJECTS = "arn:aws:s3:::my-bucket", "arn:aws:s3:::my-bucket/checkpoints/*"

#: "Required permissions for Amazon S3 API operations" in the Amazon S3 User Guide: what each needs, on the bucket and
#: on its objects. Whoever may not list gets 403 for an object that is not there, instead of 404.
NEEDED = {
    # Whoever copies reads the source, too: in the archive's case that is the object tier's.
    "CopyObject": (set(), {"s3:GetObject", "s3:PutObject"}),
    "UploadPartCopy": (set(), {"s3:GetObject", "s3:PutObject"}),
    "GetObject": ({"s3:ListBucket"}, {"s3:GetObject"}),
    "HeadObject": ({"s3:ListBucket"}, {"s3:GetObject"}),
    "PutObject": (set(), {"s3:PutObject"}),
    "DeleteObject": (set(), {"s3:DeleteObject"}),
    "DeleteObjects": (set(), {"s3:DeleteObject"}),
    "ListObjectsV2": ({"s3:ListBucket"}, set()),
    "CreateMultipartUpload": (set(), {"s3:PutObject"}),
    "UploadPart": (set(), {"s3:PutObject"}),
    "CompleteMultipartUpload": (set(), {"s3:PutObject"}),
    "AbortMultipartUpload": (set(), {"s3:AbortMultipartUpload"}),
    "ListParts": (set(), {"s3:ListMultipartUploadParts"}),
    "ListMultipartUploads": ({"s3:ListBucketMultipartUploads"}, set()),
    "GetBucketLifecycleConfiguration": ({"s3:GetLifecycleConfiguration"}, set()),
}
#: Parameters of those operations that need more than the operation does.
NEEDS_MORE = {
    *("Tagging", "ACL", "GrantRead", "GrantFullControl", "GrantReadACP", "GrantWriteACP", "VersionId", "MFA"),
    *("ObjectLockMode", "ObjectLockRetainUntilDate", "ObjectLockLegalHoldStatus", "BypassGovernanceRetention"),
    *("SSEKMSKeyId", "ServerSideEncryption"),
}
READING = {"GetObject", "HeadObject", "ListObjectsV2"}


@cache
def methods() -> dict[str, str]:
    """The client's methods, and the operation of S3 that each calls."""
    client = boto3.client("s3", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    found: dict[str, str] = client.meta.method_to_api_mapping
    return found


@cache
def nodes() -> list[tuple[Path, list[ast.AST]]]:
    """The syntax of each module that can have to do with S3."""
    word = re.compile(rf"\bboto|\.(?:{'|'.join(methods())})\b")
    paths = [path for name in ("tierfs", "mount", "dcp_compat") for path in (repository() / name).rglob("*.py")]
    texts = [(path, path.read_text()) for path in paths]
    return [(path, list(ast.walk(ast.parse(text)))) for path, text in texts if word.search(text)]


def called_operations() -> set[str]:
    called = {node.attr for _, found in nodes() for node in found if isinstance(node, ast.Attribute)}
    return {operation for method, operation in methods().items() if method in called}


def needed(operations: set[str]) -> tuple[set[str], set[str]]:
    on_bucket: set[str] = set().union(*(NEEDED[each][0] for each in operations))
    on_objects: set[str] = set().union(*(NEEDED[each][1] for each in operations))
    return on_bucket, on_objects


def read(name: str) -> dict[str, Any]:
    policy: dict[str, Any] = json.loads((IAM / name).read_text())
    return policy


def allowed(name: str) -> tuple[set[str], set[str]]:
    found: dict[str, set[str]] = {BUCKET: set(), OBJECTS: set()}
    for statement in read(name)["Statement"]:
        if statement["Effect"] == "Allow":
            actions = statement["Action"]
            found[statement["Resource"]] |= {actions} if isinstance(actions, str) else set(actions)
            assert "Condition" not in statement, "GetObject of what is missing asks to list without a prefix"
    return found[BUCKET], found[OBJECTS]


def test_the_code_calls_what_is_known_here() -> None:
    called = called_operations()
    assert called == set(NEEDED), "say in NEEDED what a new operation needs, and in the policies"


def test_no_other_way_to_ask_is_used() -> None:
    """What the test above would not see: paginators, waiters, transfers, resources, other services, presigned URLs."""
    others = {"get_paginator", "get_waiter", "upload_file", "upload_fileobj", "download_file", "download_fileobj"}
    others |= {"copy", "resource", "generate_presigned_url", "generate_presigned_post"}
    services: set[str] = set()
    for _, found in nodes():
        uses_boto = any(isinstance(node, ast.Import | ast.ImportFrom) and "boto" in ast.dump(node) for node in found)
        for node in found:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr == "client" and node.args and isinstance(node.args[0], ast.Constant):
                    services.add(str(node.args[0].value))
                assert not (uses_boto and node.func.attr in others), ast.unparse(node)
    assert services == {"s3"}


def test_no_parameter_is_used_that_needs_more() -> None:
    for path, found in nodes():
        if path.parent.name != "objects":
            continue
        for node in found:
            name = node.arg if isinstance(node, ast.keyword) else node.value if isinstance(node, ast.Constant) else None
            assert name not in NEEDS_MORE, f"{path.name}: {name} needs another permission"


@pytest.mark.parametrize("name", ["policy.json", "bucket-policy-cross-account.json"])
def test_a_policy_allows_what_is_called_and_no_more(name: str) -> None:
    assert allowed(name) == needed(called_operations())


def test_the_archive_needs_the_same_of_its_own_bucket() -> None:
    archive = (IAM / "policy-archive.json").read_text()
    same = archive.replace("my-archive", "my-bucket").replace("TierfsArchive", "Tierfs")
    assert json.loads(same) == read("policy.json")


def test_a_node_that_only_reads_may_do_nothing_else() -> None:
    assert allowed("policy-read-only.json") == needed(READING)
    assert called_operations() > READING


def test_the_documents_list_the_same_actions() -> None:
    text = (repository() / "docs/object-tier.md").read_text()
    on_bucket, on_objects = needed(called_operations())
    for action in on_bucket | on_objects:
        assert f"`{action}`" in text, action
    begin = text.index('{\n  "Version"')
    shown = json.loads(text[begin : text.index("```", begin)])
    assert shown == read("policy.json")


@pytest.mark.parametrize("path", sorted(IAM.glob("*.json")), ids=lambda path: path.stem)
def test_documents_are_policies(path: Path) -> None:
    document = json.loads(path.read_text())
    if path.name == "lifecycle.json":
        return
    assert document["Version"] == "2012-10-17"
    trusts = path.name.startswith("trust-")
    sids = [statement.get("Sid") for statement in document["Statement"]]
    assert trusts or len(set(sids)) == len(sids)
    for statement in document["Statement"]:
        known = {"Sid", "Effect", "Action", "Resource", "Principal", "Condition"}
        assert statement.keys() <= known and {"Effect", "Action"} <= statement.keys()
        assert ("Principal" in statement) == (trusts or "-policy" in path.stem)
        assert ("Resource" in statement) != trusts
        if statement["Effect"] == "Allow" and "Administers" not in statement.get("Sid", ""):
            assert "*" not in "".join(statement["Action"]), "least privilege"


def test_the_accounts_of_the_chart_are_the_ones_trusted() -> None:
    subject = read("trust-irsa.json")["Statement"][0]["Condition"]["StringEquals"]
    assert {key.rpartition(":")[2]: value for key, value in subject.items()} == {
        "aud": "sts.amazonaws.com",
        "sub": "system:serviceaccount:tierfs:tierfs",
    }
    tags = read("trust-pod-identity.json")["Statement"][0]["Condition"]["StringEquals"]
    assert tags["aws:RequestTag/kubernetes-namespace"] == tags["aws:RequestTag/kubernetes-service-account"] == "tierfs"
    guide = (repository() / "docs/deploy-kubernetes.md").read_text()
    assert "helm install tierfs deploy/kubernetes/tierfs --namespace tierfs" in guide


def test_the_lifecycle_rule_is_one_that_s3_takes_and_doctor_looks_for() -> None:
    document = read("lifecycle.json")
    shape = boto3.client("s3", region_name="us-east-1").meta.service_model.operation_model(
        "PutBucketLifecycleConfiguration"
    )
    report = ParamValidator().validate({"Bucket": "my-bucket", "LifecycleConfiguration": document}, shape.input_shape)
    assert not report.has_errors(), report.generate_report()
    assert any(_covers(rule, "checkpoints") for rule in document["Rules"])
    for rule in document["Rules"]:
        assert "Days" not in rule.get("Expiration", {}) and "Transitions" not in rule, (
            "it can't know what belongs together"
        )
