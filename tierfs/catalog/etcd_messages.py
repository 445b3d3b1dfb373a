"""The messages of etcd's gRPC interface that the catalogue uses, made from their field numbers: no generated code.

Names and numbers are those of etcd's public interface, `api/etcdserverpb/rpc.proto` and `api/mvccpb/kv.proto` of
https://github.com/etcd-io/etcd (the same in 3.4, 3.5 and 3.6). Fields that are not used are left out: protobuf skips
what it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)

_PACKAGE = "etcdserverpb"
_TYPES = {
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "uint64": descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
    # An enumeration of proto3 is a number of 32 bits on the wire.
    "enum": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
}

#: name: type number; `*` before the type repeats it, `?` makes it one of a oneof; other types are messages.
_MESSAGES = {
    "KeyValue": "key:bytes:1 create_revision:int64:2 mod_revision:int64:3 value:bytes:5 lease:int64:6",
    "Event": "type:enum:1 kv:KeyValue:2",
    "ResponseHeader": "cluster_id:uint64:1 member_id:uint64:2 revision:int64:3",
    "RangeRequest": "key:bytes:1 range_end:bytes:2 limit:int64:3 revision:int64:4 sort_order:enum:5 sort_target:enum:6 "
    "keys_only:bool:8 count_only:bool:9 min_mod_revision:int64:10",
    "RangeResponse": "header:ResponseHeader:1 kvs:*KeyValue:2 more:bool:3 count:int64:4",
    "PutRequest": "key:bytes:1 value:bytes:2 lease:int64:3",
    "DeleteRangeRequest": "key:bytes:1 range_end:bytes:2",
    "RequestOp": "request_range:?RangeRequest:1 request_put:?PutRequest:2 request_delete_range:?DeleteRangeRequest:3",
    "ResponseOp": "response_range:RangeResponse:1",
    "Compare": "result:enum:1 target:enum:2 create_revision:?int64:5 mod_revision:?int64:6 range_end:bytes:64 "
    "key:bytes:3",
    "TxnRequest": "compare:*Compare:1 success:*RequestOp:2 failure:*RequestOp:3",
    "TxnResponse": "header:ResponseHeader:1 succeeded:bool:2 responses:*ResponseOp:3",
    "LeaseGrantRequest": "TTL:int64:1 ID:int64:2",
    "LeaseGrantResponse": "header:ResponseHeader:1 ID:int64:2 TTL:int64:3",
    "LeaseRevokeRequest": "ID:int64:1",
    "LeaseRevokeResponse": "header:ResponseHeader:1",
    "LeaseKeepAliveRequest": "ID:int64:1",
    "LeaseKeepAliveResponse": "header:ResponseHeader:1 ID:int64:2 TTL:int64:3",
    "WatchCreateRequest": "key:bytes:1 range_end:bytes:2 start_revision:int64:3 progress_notify:bool:4 fragment:bool:8",
    "WatchRequest": "create_request:?WatchCreateRequest:1",
    "WatchResponse": "header:ResponseHeader:1 watch_id:int64:2 created:bool:3 canceled:bool:4 compact_revision:int64:5 "
    "cancel_reason:string:6 fragment:bool:7 events:*Event:11",
    "AuthenticateRequest": "name:string:1 password:string:2",
    "AuthenticateResponse": "header:ResponseHeader:1 token:string:2",
    "StatusRequest": "",
    "StatusResponse": "header:ResponseHeader:1 version:string:2 dbSize:int64:3 leader:uint64:4",
}

EVENT_DELETE = 1
SORT_DESCEND = 2
SORT_BY_MOD = 3
COMPARE_RESULTS = {"equal": 0, "less": 2}
COMPARE_TARGETS = {"create": 1, "mod": 2}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="tierfs/etcd.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split():
            _add_field(message, *field.split(":"))
    return file


def _add_field(message: Any, name: str, kind: str, number: str) -> None:
    proto = descriptor_pb2.FieldDescriptorProto
    plain = kind.lstrip("*?")
    field = message.field.add(name=name, number=int(number))
    field.label = proto.LABEL_REPEATED if kind.startswith("*") else proto.LABEL_OPTIONAL
    if plain in _TYPES:
        field.type = _TYPES[plain]
    else:
        field.type, field.type_name = proto.TYPE_MESSAGE, f".{_PACKAGE}.{plain}"
    if kind.startswith("?"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="one")
        field.oneof_index = 0


# A pool of its own: another package may bring etcd's generated messages under the same names.
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


RangeRequest = _message("RangeRequest")
PutRequest = _message("PutRequest")
DeleteRangeRequest = _message("DeleteRangeRequest")
RequestOp = _message("RequestOp")
Compare = _message("Compare")
TxnRequest = _message("TxnRequest")
LeaseGrantRequest = _message("LeaseGrantRequest")
LeaseRevokeRequest = _message("LeaseRevokeRequest")
LeaseKeepAliveRequest = _message("LeaseKeepAliveRequest")
WatchCreateRequest = _message("WatchCreateRequest")
WatchRequest = _message("WatchRequest")
WatchResponse = _message("WatchResponse")
AuthenticateRequest = _message("AuthenticateRequest")
StatusRequest = _message("StatusRequest")


@dataclass(frozen=True)
class Method:
    """A procedure of etcd: its path, and the class of its answers. `repeatable`: asked twice does no harm."""

    path: str
    answer: Any
    repeatable: bool = True

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


RANGE = Method("/etcdserverpb.KV/Range", _message("RangeResponse"))
TXN = Method("/etcdserverpb.KV/Txn", _message("TxnResponse"), repeatable=False)
#: A transaction that only reads.
READ_TXN = Method("/etcdserverpb.KV/Txn", _message("TxnResponse"))
# A lease that nobody heard of runs out.
GRANT = Method("/etcdserverpb.Lease/LeaseGrant", _message("LeaseGrantResponse"))
REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", _message("LeaseRevokeResponse"))
# A stream in etcd's interface; with one question and one answer it looks on the wire as any other call.
KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", _message("LeaseKeepAliveResponse"))
WATCH = Method("/etcdserverpb.Watch/Watch", WatchResponse)
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", _message("AuthenticateResponse"))
STATUS = Method("/etcdserverpb.Maintenance/Status", _message("StatusResponse"))
