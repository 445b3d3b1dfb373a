"""How a connection begins: both sides say who they are, and prove it.

    client → HELLO {format, node, to, cluster, by, ticket, nonce}
    server → HELLO {format, node, nonce}
    client → PROOF {proof}
    server → PROOF {proof}

`by` is how the client means to prove itself: `tls` (the certificate did), `tls+secret`, `secret`, `ticket`, or `none`.
The server decides alone what it takes. On a connection without TLS all later frames carry tags with keys made of the
same secret and nonces (`tierfs.transport.credentials`).
"""

from __future__ import annotations

import re
import secrets

from tierfs.errors import PathRefused, PeerRefused, PeerUnavailable
from tierfs.json_fields import Fields, Wrong
from tierfs.steps.names import safe_component
from tierfs.transport.connection import Connection
from tierfs.transport.credentials import NONCE_BYTES, Credentials, Proofs, Tickets, require_name, require_proof
from tierfs.transport.frames import FORMAT, Frame, Kind, to_json
from tierfs.transport.requests import error_of

#: All of it, the TLS handshake included.
HELLO_WITHIN_S = 10.0
_NONCE = re.compile(f"[0-9a-f]{{{2 * NONCE_BYTES}}}")
_TLS_HANDSHAKE = 0x16  # the type of a record, RFC 8446, 5.1


async def greet(
    connection: Connection, credentials: Credentials, node: str, to: str, *, ticket: tuple[str, bytes] | None = None
) -> None:
    """The client's side. With `ticket` the connection stays plain. PeerRefused, PeerUnavailable."""
    if credentials.tls and ticket is None:
        await connection.secure(credentials.context(server=False), server=False)
        require_name(connection.certificate, to)
    by = "ticket" if ticket is not None else _by_certificate_or_secret(credentials)
    hello = {
        "format": FORMAT, "node": node, "to": to, "cluster": credentials.cluster, "by": by,
        "ticket": ticket[0] if ticket is not None else "", "nonce": secrets.token_hex(NONCE_BYTES),
    }  # fmt: skip
    await connection.send(Kind.hello, hello)
    answer = await _expect(connection, Kind.hello)
    if _hello(answer, ("format", "node", "nonce"))["node"] != to:
        raise PeerUnavailable(f"another node than {to} is at its address")
    key = ticket[1] if ticket is not None else credentials.secret
    proofs = Proofs(key, to_json(hello), answer.text) if key is not None else None
    await connection.send(Kind.proof, {"proof": proofs.client if proofs is not None else ""})
    given = _proof(await _expect(connection, Kind.proof))
    if proofs is not None:
        require_proof(given, proofs.server, to)
        if connection.certificate is None:
            ours, theirs = proofs.tags()
            connection.use_tags(ours, theirs)


async def welcome(connection: Connection, credentials: Credentials, node: str, tickets: Tickets) -> str:
    """The server's side: the id of the node that proved to be there. PeerRefused, PeerUnavailable."""
    if credentials.tls and (credentials.encrypt or await connection.first_byte() == _TLS_HANDSHAKE):
        await connection.secure(credentials.context(server=True), server=True)
    asked = await _expect(connection, Kind.hello)
    said = _hello(asked, ("format", "node", "to", "cluster", "by", "ticket", "nonce"))
    if said["cluster"] != credentials.cluster:
        raise PeerRefused(
            f"this is a node of the cluster {credentials.cluster} (cluster.name), not {said['cluster'][:80]}"
        )
    if said["to"] != node:
        raise PeerUnavailable(f"this is the node {node}, not {said['to'][:80]}")
    key = _key_for(said, connection, credentials, tickets)
    hello = {"format": FORMAT, "node": node, "nonce": secrets.token_hex(NONCE_BYTES)}
    await connection.send(Kind.hello, hello)
    given = _proof(await _expect(connection, Kind.proof))
    proofs = Proofs(key, asked.text, to_json(hello)) if key is not None else None
    if proofs is not None:
        require_proof(given, proofs.client, said["node"])
    await connection.send(Kind.proof, {"proof": proofs.server if proofs is not None else ""})
    if proofs is not None and connection.certificate is None:
        theirs, ours = proofs.tags()
        connection.use_tags(ours, theirs)
    return said["node"]


def _by_certificate_or_secret(credentials: Credentials) -> str:
    if credentials.tls:
        return "tls+secret" if credentials.secret is not None else "tls"
    return "secret" if credentials.secret is not None else "none"


def _key_for(said: dict[str, str], connection: Connection, credentials: Credentials, tickets: Tickets) -> bytes | None:
    """What the client has to prove that it knows; None where nothing more is asked of it."""
    if credentials.tls and connection.certificate is None:
        if said["by"] != "ticket":
            raise PeerRefused("this node asks for mutual TLS (cluster.tls_cert, tls_key and tls_ca)")
        key = tickets.key(said["ticket"], said["node"])
        if key is None:
            raise PeerUnavailable("the ticket is not known (any more)")
        return key
    expected = _by_certificate_or_secret(credentials)
    if said["by"] != expected:
        raise PeerRefused(f"this node asks for authentication by {expected}, not {said['by'][:40]}: give all nodes the "
                          "same cluster.secret_file and tls settings")  # fmt: skip
    if connection.certificate is not None:
        require_name(connection.certificate, said["node"])
    return credentials.secret


async def _expect(connection: Connection, kind: Kind) -> Frame:
    frame = await connection.receive()
    if frame.kind is Kind.error:
        raise error_of(frame.head)
    if frame.kind is not kind:
        raise PeerRefused(f"{connection.who} sent {frame.kind.name} where {kind.name} comes")
    return frame


def _hello(frame: Frame, names: tuple[str, ...]) -> dict[str, str]:
    """Its texts; `format` is looked at here and left out."""
    try:
        fields = Fields(frame.head, "a hello")
        number = fields.integer("format")
        said = {name: fields.text(name) for name in names if name != "format"}
        fields.end()
        if number != FORMAT:
            raise Wrong(f"it is of the protocol's version {number}, this node speaks {FORMAT}")
        safe_component(said["node"])
        if not _NONCE.fullmatch(said["nonce"]):
            raise Wrong("its nonce is none")
    except (Wrong, PathRefused) as error:
        raise PeerRefused(f"a hello is damaged: {error}") from None
    return said


def _proof(frame: Frame) -> str:
    try:
        fields = Fields(frame.head, "a proof")
        proof = fields.text("proof")
        fields.end()
    except Wrong as error:
        raise PeerRefused(f"a proof is damaged: {error}") from None
    return proof
