"""What S3 and its client library say, as `tierfs.errors` with a sentence that tells what to do.

Codes are those of Amazon S3's "List of error codes" and of servers that tests run against. Where a code is unknown the
HTTP status decides.
"""

from __future__ import annotations

import http.client
import re

import urllib3.exceptions
from botocore import exceptions as boto  # type: ignore[import-untyped]

from tierfs.errors import (
    ObjectCorrupt,
    ObjectDenied,
    ObjectError,
    ObjectExists,
    ObjectMissing,
    ObjectStoreFull,
    ObjectStoreMissing,
    ObjectThrottled,
    ObjectUnavailable,
    UploadMissing,
)

#: What a call of the client library, or reading from an answer, may raise.
CLIENT_ERRORS = (
    boto.ClientError,
    boto.BotoCoreError,
    boto.HTTPClientError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
)

#: New credentials may help: these are past their time or were taken back.
_RENEW = frozenset(
    [
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidToken",
        "TokenRefreshRequired",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "SignatureDoesNotMatch",
    ]
)
_DENIED = frozenset(
    [
        "AccessDenied",
        "AllAccessDisabled",
        "AccountProblem",
        "Forbidden",
        "403",
        "401",
        "Unauthorized",
        "UnauthorizedAccess",
        "InvalidSecurity",
        "NotSignedUp",
        "AuthorizationHeaderMalformed",
    ]
)
_THROTTLED = frozenset(
    [
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
        "RequestThrottledException",
        "RequestLimitExceeded",
        "TooManyRequests",
        "TooManyRequestsException",
        "BandwidthLimitExceeded",
        "429",
    ]
)
_UNAVAILABLE = frozenset(
    [
        "ConditionalRequestConflict",
        "OperationAborted",
        "RequestTimeout",
        "RequestTimeoutException",
        "IncompleteBody",
        "InternalError",
        "ServiceUnavailable",
        "BadGateway",
        "GatewayTimeout",
    ]
)
_CORRUPT = frozenset(
    ["BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "InvalidRange", "416"]
)
_FULL = frozenset(["QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity", "InsufficientStorage", "507"])
_UPLOAD = frozenset(["NoSuchUpload", "InvalidPart", "InvalidPartOrder"])
_EXISTS = frozenset(["PreconditionFailed", "412"])

#: A server that knows less than Amazon's refuses a header or element with one of these.
_NOT_UNDERSTOOD = frozenset(
    [
        "NotImplemented",
        "InvalidArgument",
        "InvalidRequest",
        "MalformedXML",
        "MissingContentMD5",
        "UnexpectedContent",
        "400",
        "501",
    ]
)

_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.UnknownCredentialError,
    boto.MetadataRetrievalError,
    boto.ProfileNotFound,
    boto.ConfigParseError,
    boto.ConfigNotFound,
    boto.InvalidConfigError,
    boto.RefreshWithMFAUnsupportedError,
    boto.SSOError,
    boto.TokenRetrievalError,
)


#: `... Failed to establish a new connection: [Errno 111] Connection refused` of urllib3.
_OS_ERROR = re.compile(r"\[Errno -?\d+\] ([A-Z][\w ]+)")


def code_of(error: BaseException) -> str:
    """S3's error code, or the HTTP status where the answer had no body; "" for what never was an answer."""
    if not isinstance(error, boto.ClientError):
        return ""
    return str(error.response.get("Error", {}).get("Code") or status_of(error))


def status_of(error: BaseException) -> int:
    """The HTTP status; 0 where there is none."""
    if not isinstance(error, boto.ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)


def wants_new_credentials(error: BaseException) -> bool:
    return code_of(error) in _RENEW or isinstance(error, _CREDENTIALS)


def is_not_understood(error: BaseException) -> bool:
    """The server may have refused something that it does not know."""
    return code_of(error) in _NOT_UNDERSTOOD or status_of(error) == http.client.NOT_IMPLEMENTED


def translated(error: Exception, action: str, url: str, key: str, endpoint: str) -> ObjectError:
    """`action` is S3's name of what was asked for, which is mostly that of the permission, too."""
    what = f"{action} {url}{'/' + key if key else ''}"
    if isinstance(error, boto.ClientError):
        return _refused(error, what, action, url, endpoint)
    if isinstance(error, _CREDENTIALS):
        return ObjectDenied(
            f"{what}: no credentials: {error}; give the daemon some in its environment, in a profile (s3.profile), "
            "or by the role of its pod or host"
        )
    if isinstance(error, FileNotFoundError):
        return ObjectDenied(
            f"{what}: {error.filename} is missing, which the credentials or the trusted certificates come from"
        )
    if isinstance(error, boto.FlexibleChecksumError):
        return ObjectCorrupt(f"{what}: {error}")
    if isinstance(error, boto.SSLError):
        return ObjectUnavailable(
            f"{what}: TLS with {endpoint} failed: {error}; where its certificate is signed by an own authority, name "
            "that in s3.ca_bundle"
        )
    if isinstance(error, (boto.ParamValidationError, boto.ValidationError)):
        return ObjectError(f"{what}: {error}")
    if isinstance(error, (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError)):
        return ObjectUnavailable(
            f"{what}: no connection to {endpoint}{_cause(error)}; look at s3.endpoint_url, proxies, firewalls and "
            "whether the server runs"
        )
    if isinstance(error, boto.ReadTimeoutError):
        return ObjectUnavailable(f"{what}: {endpoint} took the request and said nothing (s3.read_timeout_s)")
    return ObjectUnavailable(f"{what}: {type(error).__name__}: {error} (endpoint {endpoint})")


def _cause(error: Exception) -> str:
    """What the operating system said of a connection that was not made, in parentheses; "" where it is not known."""
    said = str(error.kwargs.get("error", "")) if isinstance(error, boto.BotoCoreError) else ""
    found = _OS_ERROR.search(said)
    return f" ({found[1].lower()})" if found else ""


def _refused(error: Exception, what: str, action: str, url: str, endpoint: str) -> ObjectError:
    code, status = code_of(error), status_of(error)
    said = f"{what}: {_sentence(error)}"
    if code in ("NoSuchBucket", "InvalidBucketName"):
        return ObjectStoreMissing(f"{said}; make the bucket of {url} at {endpoint}, or correct `object`")
    if code in _RENEW:
        return ObjectDenied(
            f"{said}; the credentials are expired or not known at {endpoint}: renew them where they come from, "
            "which is read again by itself; for those in the daemon's environment, restart it"
        )
    if code == "RequestTimeTooSkewed":
        return ObjectDenied(f"{said}; set this host's clock")
    if code in ("PermanentRedirect", "IllegalLocationConstraintException", "301") or (
        code == "AuthorizationHeaderMalformed" and "region" in said
    ):
        return ObjectStoreMissing(f"{said}; the bucket is in another region: set s3.region")
    if code in _DENIED or code.startswith("KMS."):
        return ObjectDenied(f"{said}; allow s3:{action} (docs/object-tier.md lists the permissions)")
    if code in _UPLOAD:
        return UploadMissing(said)
    if code in _EXISTS:
        return ObjectExists(said)
    if code in _CORRUPT:
        return ObjectCorrupt(said)
    if code in _FULL:
        return ObjectStoreFull(f"{said}; free space there, or let retention delete more (retention.object_steps)")
    if code in _THROTTLED or status == http.client.TOO_MANY_REQUESTS:
        return ObjectThrottled(said)
    if code == "InvalidObjectState":
        return ObjectError(f"{said}; the object is archived: restore it to a storage class that can be read")
    if code in ("NoSuchKey", "NotFound", "404"):
        return ObjectMissing(said)
    # Also errors that came with status 200, as CompleteMultipartUpload and DeleteObjects may send them.
    if code in _UNAVAILABLE or status >= 500 or status < 300:
        return ObjectUnavailable(said)
    if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        return ObjectDenied(f"{said}; allow s3:{action} (docs/object-tier.md lists the permissions)")
    return ObjectError(said)


def _sentence(error: Exception) -> str:
    """What the server said, short, with its request id: its support asks for that."""
    assert isinstance(error, boto.ClientError)
    told = error.response.get("Error", {})
    request = error.response.get("ResponseMetadata", {}).get("RequestId", "")
    message = str(told.get("Message") or "").strip().rstrip(".")[:300]
    return f"{code_of(error)}{f' ({message})' if message else ''}{f', request {request}' if request else ''}"
