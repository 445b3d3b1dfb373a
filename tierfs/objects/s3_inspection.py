"""What `tierfs doctor` says of a bucket that works: where credentials come from, and its lifecycle rule."""

from __future__ import annotations

from typing import Any

import boto3  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

from tierfs.objects.s3_client import S3Clients
from tierfs.settings import S3Settings

#: botocore.credentials: the `METHOD` of each provider of the standard chain.
_SOURCES = {
    "env": "the environment (AWS_ACCESS_KEY_ID): these are never renewed",
    "explicit": "given by the program",
    "shared-credentials-file": "the shared credentials file",
    "config-file": "the AWS configuration file",
    "assume-role": "an assumed role, renewed by itself",
    "assume-role-with-web-identity": "a web identity (IRSA), renewed by itself",
    "container-role": "the container's role (Pod Identity, ECS), renewed by itself",
    "iam-role": "the instance's role, renewed by itself",
    "sso": "IAM Identity Center: `aws sso login` renews them",
    "custom-process": "the process that the profile names",
}


def credentials_source(settings: S3Settings) -> tuple[str, str]:
    """Where they come from, "" where there are none; and why they can't be read. Never holds a key or a secret."""
    try:
        session = boto3.session.Session(profile_name=settings.profile or None)
        credentials = session.get_credentials()
    except BotoCoreError as error:
        return "", str(error)
    if credentials is None:
        return "", ""
    return _SOURCES.get(str(credentials.method), str(credentials.method)), ""


def aborts_old_uploads(bucket: str, prefix: str, settings: S3Settings) -> bool | None:
    """Whether a rule of the bucket ends uploads in parts that nobody finished; None where it may not be asked."""
    clients = S3Clients(settings, 1)
    try:
        answer = clients.current().get_bucket_lifecycle_configuration(Bucket=bucket)
    except ClientError as error:
        missing = error.response.get("Error", {}).get("Code") == "NoSuchLifecycleConfiguration"
        return False if missing else None
    except BotoCoreError:
        return None
    finally:
        clients.close()
    return any(_covers(rule, prefix) for rule in answer.get("Rules", []))


def _covers(rule: dict[str, Any], prefix: str) -> bool:
    if rule.get("Status") != "Enabled" or "AbortIncompleteMultipartUpload" not in rule:
        return False
    chosen = rule.get("Filter") or {}
    chosen = chosen.get("And", chosen)
    if chosen.get("Tag") or chosen.get("Tags"):
        return False
    return f"{prefix}/".startswith(chosen.get("Prefix", rule.get("Prefix", "")) or "")
