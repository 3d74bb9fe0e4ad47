"""What a runtime tells people's tools about itself, at the address ``runtime/NAME``.

Owns ``Describe``: which messages a kind of actor takes and what is in them, so that ``offbook ask`` can make
one from a line of text without importing the user's classes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from offbook.actors.actor import ActorSpec
from offbook.actors.host import Host
from offbook.actors.message import Request
from offbook.bus import Bus, parse_address
from offbook.bus.errors import InvalidRequest, NoSuchActor, OffbookError, UnknownMessageType
from offbook.bus.suggest import hint


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask what the actors of a kind take. Reply: ``Kind``."""

    kind: str


class FieldInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a message; ``text`` if it holds a string."""

    name: str
    required: bool
    text: bool


class MessageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One message type; ``request`` if it wants an answer."""

    type: str
    request: bool
    fields: tuple[FieldInfo, ...]


class Kind(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A kind of actor and the messages it takes, by name."""

    kind: str
    messages: tuple[MessageInfo, ...]


def describe(spec: ActorSpec) -> Kind:
    """The description of one actor class."""
    return Kind(
        kind=spec.kind,
        messages=tuple(
            MessageInfo(
                type=tag,
                request=issubclass(handler.message, Request),
                fields=tuple(
                    FieldInfo(name=field.encode_name, required=field.required, text=field.type is str)
                    for field in msgspec.structs.fields(handler.message)
                ),
            )
            for tag, handler in sorted(spec.handlers.items())
        ),
    )


def text_message(messages: Iterable[MessageInfo], text: str, wanted: str | None = None) -> dict[str, object]:
    """The message that a line of text means to an actor which takes ``messages``.

    That is the one request with a single field that must be given and holds text; ``wanted`` names
    another type, plain messages included.

    Raises:
        UnknownMessageType: ``wanted`` is not among them.
        InvalidRequest: there is no such message, or more than one; says what there is.
    """
    known = list(messages)
    if wanted is not None and wanted not in {one.type for one in known}:
        raise UnknownMessageType(f"it takes no {wanted!r}; it takes {', '.join(o.type for o in known)}")
    found = [
        (one, fields[0])
        for one in known
        if (one.type == wanted if wanted else one.request)
        and len(fields := _slots(one)) == 1
        and fields[0].text
    ]
    if len(found) == 1:
        message, field = found[0]
        return {"type": message.type, field.name: text}
    takes = "; ".join(f"{one.type}({', '.join(f.name for f in one.fields)})" for one in known)
    if not found:
        raise InvalidRequest(
            f"{'no request' if wanted is None else wanted} takes a single text; give the message as JSON, "
            f'such as {{"type": "...", ...}}. It takes: {takes}'
        )
    raise InvalidRequest(f"several requests take a text, choose one with --type. It takes: {takes}")


def _slots(message: MessageInfo) -> list[FieldInfo]:
    """The fields a single text may go to: the required ones, or all if none is."""
    return [field for field in message.fields if field.required] or list(message.fields)


async def serve_descriptions(bus: Bus, host: Host) -> None:
    """Answer ``Describe`` at ``runtime/NAME`` until cancelled. ``bus`` must serve nothing else."""
    await bus.serve(f"runtime/{host.name}")
    async for delivery in bus.deliveries():
        try:
            request = delivery.decode(Describe)
            parse_address(f"{request.kind}/x")
            spec = host.spec(request.kind)
            if spec is None:
                known = hint(request.kind, tuple(host.kinds()))
                raise NoSuchActor(f"there are no actors of kind {request.kind!r}; {known}")
            await delivery.reply(describe(spec))
        except OffbookError as exc:
            await delivery.fail(exc)
